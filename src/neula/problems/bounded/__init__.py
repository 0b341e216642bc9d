"""Least squares with bounds."""
