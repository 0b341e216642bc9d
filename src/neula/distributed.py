"""Matrices whose rows are spread over processes: what makes them."""

from neula.pipeline.distributed import RowSharded, rows

__all__ = ["RowSharded", "rows"]
