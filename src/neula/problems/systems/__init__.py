"""Linear systems below :func:`neula.solve`: what can be tried, and in which order."""
