"""Some of the problems of a batch: all of them, more often than not, and then nothing is copied.

The numbers of problems are in order and each is there once, so as many as there are problems are all of them.
"""

from __future__ import annotations

import torch


def picked(x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """The entries of the problems ``which``; x itself if these are all."""
    return x if which.shape[0] == x.shape[0] else x[which]


def placed(x: torch.Tensor, which: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A tensor like x with other values for problems ``which``; of all of them the values themselves."""
    return values if which.shape[0] == x.shape[0] else x.index_copy(0, which, values)
