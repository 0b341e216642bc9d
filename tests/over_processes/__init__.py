"""Matrices over processes."""
