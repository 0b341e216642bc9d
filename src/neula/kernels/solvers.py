"""The library's solvers on a GPU."""

from __future__ import annotations

import threading
from functools import cache

import torch

_loading = threading.Lock()


def load_solvers() -> None:
    """Let torch load its solvers, which fails where several threads ask for the first time at once.

    Source: issue 90613 of PyTorch, "lazy wrapper should be called at most once".
    """
    with _loading:
        _loaded()


@cache
def _loaded() -> None:
    torch.linalg.inv_ex(torch.ones(1, 1, device="cuda"))
