"""Products in twice the precision against exact ones: the reference, and the kernel against the same bounds.

The kernel runs on the GPU where there is one (``pytest -m gpu``), in Triton's interpreter elsewhere.
"""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import torch

from neula.kernels import doubled
from neula.kernels.doubled import Doubled

U = 2.0**-53
BOUND = 8 * 2.0**-104
"""Of the error, relative to ``n max|a| max|x|``: products of what is left after slicing, the low part of x, which
is a unit of its last place, and the rounding error of the sum of the low parts are a few ``2^-106`` each."""


def exact(a: torch.Tensor, *factors: torch.Tensor) -> np.ndarray:
    """``A (x + y + ...)`` without rounding errors, as numbers of mpmath: 1500 bits hold any sum made here."""
    with mpmath.workprec(1500):
        rows = [[mpmath.mpf(v) for v in row] for row in a.tolist()]
        sums = [
            [mpmath.fsum(mpmath.mpf(v) for v in entry) for entry in zip(*parts, strict=True)]
            for parts in zip(*(factor.mT.tolist() for factor in factors), strict=True)
        ]
        product = [[mpmath.fdot(row, column) for column in sums] for row in rows]
    return np.array(product, dtype=object).reshape(len(rows), len(sums))


def errors(pair: tuple[torch.Tensor, ...], expected: np.ndarray) -> torch.Tensor:
    """How far sums of numbers are from what they should be."""
    with mpmath.workprec(1500):
        parts = [np.vectorize(mpmath.mpf, otypes=[object])(part.numpy()) for part in pair]
        return torch.from_numpy(abs(sum(parts) - expected).astype(float))


def check_residual(
    a: torch.Tensor, x: torch.Tensor, b: torch.Tensor, x_low: torch.Tensor | None = None
) -> None:
    """Each member of a batch has the accuracy promised, for each right-hand side by itself."""
    high, low = Doubled.of(a).residual(x, b, x_low)
    assert high.shape == low.shape == b.shape
    assert (low.abs() <= U * high.abs()).all()
    for i in range(len(a)):
        factors = (x[i],) if x_low is None else (x[i], x_low[i])
        with mpmath.workprec(1500):
            expected = np.vectorize(mpmath.mpf, otypes=[object])(b[i].numpy()) - exact(a[i], *factors)
        size = a.shape[2] * a[i].abs().max() * x[i].abs().amax(0) + b[i].abs().amax(0)
        assert (errors((high[i], low[i]), expected) <= BOUND * size).all()


def check_transposed_product(a: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    z = Doubled.of(a).transposed_product(high, low)
    assert z.shape == (len(a), a.shape[2], high.shape[2])
    for i in range(len(a)):
        expected = exact(a[i].mT, high[i], low[i])
        size = a.shape[1] * a[i].abs().max() * high[i].abs().amax(0)
        assert (errors((z[i],), expected) <= BOUND * size + U * z[i].abs()).all()


def normal(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def matrix(*shape: int) -> torch.Tensor:
    a = normal(*shape)
    return a / a.abs().max()


def graded(*shape: int) -> torch.Tensor:
    a = matrix(*shape)
    return a * torch.logspace(0, -30, a.numel(), dtype=a.dtype).reshape(shape)


SHAPES = [(1, 7, 5, 1), (3, 30, 20, 2), (2, 1, 9, 3), (2, 9, 1, 3), (1, 1, 1, 1), (2, 20, 33, 5)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [matrix, graded])
@pytest.mark.parametrize("layout", ["rows", "columns", "view"])
def test_accuracy(shape: tuple[int, ...], make, layout: str) -> None:
    batch, m, n, k = shape
    a = make(batch, m, n)
    if layout == "columns":
        a = a.mT.contiguous().mT
    if layout == "view":
        a = torch.cat([a, a], dim=2)[:, :, ::2]
    x = normal(batch, n, k)
    b = normal(batch, m, k)
    check_residual(a, x, b)
    check_residual(a, x, a @ x, x_low=x * U * 0.7)
    check_transposed_product(a, b, b * U * 0.7)
