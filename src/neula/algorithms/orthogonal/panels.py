"""The panel interface: a panel factorizes an m x n matrix of few columns into Q and R.

A panel takes a working matrix (float32 or float64, column-major, m >= n) and the engine that multiplies for
it, and returns a new Q and R. Where a column is linearly dependent beyond repair, R holds NaN or zeros on
the diagonal; certificates catch it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from neula.algorithms.orthogonal.caqr import caqr
from neula.algorithms.orthogonal.cholesky_qr import cholesky_qr, cholesky_qr2, cholesky_qr32
from neula.algorithms.orthogonal.householder import householder
from neula.engines import Engine
from neula.errors import check_name

Panel = Callable[[torch.Tensor, Engine], tuple[torch.Tensor, torch.Tensor]]

PANELS: dict[str, Panel] = {
    "caqr": caqr,
    "cholesky": cholesky_qr,
    "cholesky2": cholesky_qr2,
    "cholesky32": cholesky_qr32,
    "householder": householder,
}


def panel_named(name: str) -> Panel:
    """Look a panel up; a ValueError lists those that there are."""
    check_name("panel", name, PANELS)
    return PANELS[name]
