"""Up to which size a QR with pivots is LAPACK's alone."""

from __future__ import annotations

PIVOTED = 95
"""Columns up to which a QR with pivots takes no threads of a library of its own."""
