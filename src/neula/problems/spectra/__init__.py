"""Eigenvalues and singular values, all or some of them, and powers of definite matrices."""
