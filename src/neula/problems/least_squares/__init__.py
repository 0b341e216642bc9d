"""Least squares below :func:`neula.lstsq`: what can be tried, and in which order."""
