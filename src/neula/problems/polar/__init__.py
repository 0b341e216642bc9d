"""Polar decomposition below :func:`neula.polar`: what can be tried, and in which order."""
