"""Cholesky factorization below :func:`neula.cholesky`: what can be tried, and in which order."""
