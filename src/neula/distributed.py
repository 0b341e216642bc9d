"""Matrices whose rows are distributed over processes."""

from neula.pipeline.distributed import RowSharded, rows

__all__ = ["RowSharded", "rows"]
