"""Matrices whose rows are distributed over processes: what makes them."""

from neula.pipeline.distributed import RowSharded, rows

__all__ = ["RowSharded", "rows"]
