"""Timing against the peers; every number comes with the accuracy beside it, and is kept as data."""
