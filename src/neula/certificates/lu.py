"""Backward errors of LU factors, and the bounds that theory has for them."""

from __future__ import annotations

import torch

from neula.engines import FP16, Format, format_of
from neula.errors import unknown_name
from neula.kernels.precision import exact_matmul
from neula.kernels.thin import thin_product

_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Elements that are converted at a time: what a cache holds, and what fills a GPU."""


# item: L (2.2)
def componentwise_backward_error(
    a: torch.Tensor, x: torch.Tensor, b: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor
) -> float:
    """The smallest ``e`` with ``(A + dA) x = b`` and ``|dA| <= e (|A| + |L| |U|)``, in float64.

    Lopez and Mary (2022), formula 2.2, by the theorem of Oettli and Prager; the worst right-hand side counts.

    Parameters
    ----------
    a : Tensor, shape (n, n)
        With the rows in the order of L: ``A[permutation]`` after pivoting.
    x : Tensor, shape (n, k)
    b : Tensor, shape (n, k)
        Rows as in ``a``.
    lower, upper : Tensor, shape (n, n)
        L and U.

    Returns
    -------
    float
        NaN if x is not finite.

    Examples
    --------
    >>> a, one = torch.tensor([[4.0, 0.0], [0.0, 4.0]]), torch.ones(2, 1)
    >>> componentwise_backward_error(a, one, 4.5 * one, torch.eye(2), a)
    0.0625
    """
    high = torch.float64
    x = x.to(high)
    residual = (thin_product(a, x) - b.to(high)).abs()
    size = _abs_matmul(a, x.abs()) + _abs_matmul(lower, _abs_matmul(upper, x.abs()))
    return float(torch.where(residual == 0, 0.0, residual / size).max())


# item: L (2.1); L Theorem 1; L Lemma 1; L Theorem 2; L Theorem 3; L Theorem 4; L square root
def lu_bound(
    variant: str,
    n: int,
    *,
    panel: int,
    inner_panel: int | None = None,
    low: Format = FP16,
    storage: Format | None = None,
) -> float:
    """The dominant term of f in ``A + dA = L U``, ``|dA| <= f (|A| + |L| |U|)``.

    Lopez and Mary (2022), Tables 1 and 2; for the standard algorithms ``n u``. What rounding A to the low
    format adds (u, for Algorithms 4.1 to 5.2) is not in it.

    Parameters
    ----------
    variant : str
        ``"2.1"``, ``"2.2"``, ``"3.1"``, ``"4.1"``, ``"5.1"``, ``"5.2/4.1"`` or ``"5.2/5.1"``.
    n : int
    panel, inner_panel : int
        Widths r and s.
    low : Format
        Of the operands of products.
    storage : Format, optional
        Of the matrix, for Algorithm 3.1: ``low`` by default.

    Raises
    ------
    ValueError
        For an unknown variant, and for 5.2/4.1 without an inner panel.

    Examples
    --------
    >>> ratio = lu_bound("4.1", 1000, panel=256) / lu_bound("5.1", 1000, panel=256)
    >>> 100 < ratio < 256
    True
    """
    u, high = low.u, format_of(low.storage).u
    if variant == "5.2/4.1" and inner_panel is None:
        raise ValueError("the bound of '5.2/4.1' depends on the width of the inner panels: pass inner_panel")
    bounds = {
        "2.1": n * u,
        "2.2": n * u,
        "3.1": n * u / 4 if storage in (None, low) else 2 * u + n * high,
        "4.1": u + max(n * high, panel * u),
        "5.1": 2 * u + n * high,
        "5.2/4.1": (inner_panel or 0) * u + n * high,
        "5.2/5.1": 2 * u + n * high,
    }
    if variant not in bounds:
        raise unknown_name("variant", variant, bounds)
    return bounds[variant]


def _row_blocks(a: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Blocks small enough that a copy in a wider dtype does not hurt; the matrix itself if none is needed."""
    return (a,) if a.dtype == dtype else a.split(max(1, _CHUNK[a.device.type] // a.shape[1]))


def _abs_matmul(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([exact_matmul(block.to(x.dtype).abs(), x) for block in _row_blocks(a, x.dtype)])
