"""Residuals and gradients together in twice the precision: by definition, and by the kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from tests.devices import KERNEL, normal
from tests.kernels.doubled.test_doubled import BOUND, U, exactly, numbers  # noqa: F401

from neula.kernels.doubled.doubled import Pair
from neula.kernels.doubled.doubled_normal import doubled_normal

Evaluate = Callable[..., tuple[Pair, Pair]]


@pytest.fixture(params=["reference", KERNEL])
def evaluate(request: pytest.FixtureRequest) -> Evaluate:
    if request.param == "reference":
        return doubled_normal.reference
    pytest.importorskip("triton")
    from neula.kernels.doubled import doubled_normal as module

    return partial(module.doubled_normal_triton, given=(128, 8, 3, 1))


@pytest.mark.usefixtures("uninitialized_is_nan")
@pytest.mark.parametrize(("m", "n"), [(1, 1), (61, 32), (70, 3)])
@pytest.mark.parametrize("consistent", [False, True])
def test_errors_are_those_of_twice_the_precision(
    evaluate: Evaluate, m: int, n: int, *, consistent: bool
) -> None:
    a = normal(m + 3, n + 1)[3:, :n]
    x, b = normal(n, 1), normal(m, 2)[:, 1:]
    x_low = 0.7 * U * x.flip(0)
    b = a @ x if consistent else b
    (high, low), (g, rest) = evaluate(a, x, x_low, b)
    assert high.shape == low.shape == b.shape
    assert g.shape == rest.shape == x.shape
    assert (low.abs() <= U * high.abs()).all()
    expected = numbers(b) - numbers(a) @ (numbers(x) + numbers(x_low))
    size = float(n * a.abs().max() * x.abs().max() + b.abs().max())
    assert abs((numbers(high) + numbers(low)) - expected).max() <= BOUND * size
    gradient = numbers(a).T @ (numbers(high) + numbers(low))
    assert abs(numbers(g) + numbers(rest) - gradient).max() <= BOUND * float(
        m * a.abs().max() * high.abs().max()
    )


def test_nan_comes_out(evaluate: Evaluate) -> None:
    a, x, b = normal(40, 30), normal(30, 1), normal(40, 1)
    a[17, 29] = torch.nan
    (high, _), (g, rest) = evaluate(a, x, 0 * x, b)
    assert high[17].isnan().all()
    assert (g + rest).isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n"), [(20000, 500), (20001, 1024), (9000, 2047)])
def test_what_a_gpu_takes(m: int, n: int) -> None:
    a, x, b = normal(m, n), normal(n, 1), normal(m, 1)
    assert doubled_normal.takes(a, x, 0 * x, b)
    found, expected = (f(a, x, 1e-17 * x, b) for f in (doubled_normal, doubled_normal.reference))
    largest = float(a.abs().max())
    sizes = n * largest * x.abs().max() + b.abs().max(), m * largest * found[0][0].abs().max()
    for (high, low), (other, rest), size in zip(found, expected, sizes, strict=True):
        assert ((high - other) + (low - rest)).abs().max() <= 2 * BOUND * size
    again = doubled_normal(a, x, 1e-17 * x, b)
    assert all(
        torch.equal(y, z) for p, q in zip(found, again, strict=True) for y, z in zip(p, q, strict=True)
    )
