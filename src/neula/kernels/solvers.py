"""The library's solvers on a GPU."""

from __future__ import annotations

import threading
from functools import cache

import torch

from neula.kernels.dispatch import refuse_capture

_loading = threading.Lock()


def load_solvers() -> None:
    """Let torch load its solvers, which fails where several threads ask for the first time at once.

    Source: issue 90613 of PyTorch, "lazy wrapper should be called at most once".
    """
    with _loading:
        if not _loaded.cache_info().currsize:
            refuse_capture("the library's solvers")
        _loaded()


@cache
def _loaded() -> None:
    torch.linalg.inv_ex(torch.ones(1, 1, dtype=torch.float32, device="cuda"))
