"""Experiments: realistic problems with a known truth, and the tables and figures of the papers."""
