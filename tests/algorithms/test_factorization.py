"""LU in one precision or with products of a low format: factors, growth, solves."""

from __future__ import annotations

import math

import pytest
import torch

from neula.algorithms.blocked_lu import LUFactors, blocked_lu
from neula.algorithms.factorization import SingularMatrixError, growth_of, library_lu
from neula.engines import CpuEngine, EmulatedEngine, Engine

ENGINES = [CpuEngine("cpu", "fp32"), EmulatedEngine(format="fp16"), EmulatedEngine(format="fp64")]


def normal(n: int, dominant: bool = False) -> torch.Tensor:
    a = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    return a + 2 * n * torch.eye(n, dtype=torch.float64) if dominant else a


def factorized(a: torch.Tensor, engine: Engine, *, pivot: bool, panel: int = 16) -> LUFactors:
    return blocked_lu(engine.empty(*a.shape).copy_(a), engine, pivot=pivot, panel=panel)


@pytest.mark.parametrize("engine", ENGINES, ids=repr)
@pytest.mark.parametrize("pivot", [False, True])
@pytest.mark.parametrize("n", [1, 16, 33, 100])
def test_backward_error_of_the_factors(n: int, pivot: bool, engine: Engine) -> None:
    a = normal(n, dominant=not pivot)
    found = factorized(a, engine, pivot=pivot)
    lower = found.lu.double().tril(-1) + torch.eye(n, dtype=torch.float64)
    upper = found.lu.double().triu()
    expected = a if found.order is None else a[found.order]
    # Lopez and Mary, formula (3.2): 2 u + n u_storage, times |A| + |L| |U|.
    bound = 2.1 * engine.format.u + n * torch.finfo(engine.storage).eps
    assert ((lower @ upper - expected).abs() <= bound * (expected.abs() + lower.abs() @ upper.abs())).all()
    assert found.growth == pytest.approx(float(upper.abs().max() / a.abs().max()), rel=1e-6)
    if pivot:
        assert lower.abs().max() <= 1


@pytest.mark.parametrize("pivot", [False, True])
def test_solves(pivot: bool) -> None:
    a = normal(70, dominant=not pivot)
    b = torch.ones(70, 2, dtype=torch.float64)
    factors = factorized(a, EmulatedEngine(format="fp64"), pivot=pivot)
    assert torch.allclose(factors.solve(b), torch.linalg.solve(a, b), rtol=1e-9)
    single = factorized(a, CpuEngine("cpu", "fp32"), pivot=pivot)
    assert single.in_double().lu.dtype == torch.float64
    assert torch.allclose(single.in_double().solve(b), single.solve(b), rtol=1e-2)


def test_a_zero_pivot_gives_no_finite_growth() -> None:
    a = torch.eye(40, dtype=torch.float64).roll(1, 0)
    assert not math.isfinite(factorized(a, EmulatedEngine(format="fp16"), pivot=False).growth)


def test_library_lu_says_which_pivot_is_zero() -> None:
    a = torch.eye(6, dtype=torch.float64)
    a[3] = a[1]
    with pytest.raises(SingularMatrixError, match="pivot 3 is exactly zero") as caught:
        library_lu(a, EmulatedEngine())
    assert caught.value.index == 3


def test_growth_of_the_matrix_that_grows_most() -> None:
    """Wilkinson's: 2^(n - 1) with partial pivoting."""
    n = 20
    a = torch.eye(n, dtype=torch.float64) - torch.ones(n, n, dtype=torch.float64).tril(-1)
    a[:, -1] = 1
    assert library_lu(a, EmulatedEngine()).growth == 2.0 ** (n - 1)


def test_growth_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    lu = normal(50)
    expected = float(lu.triu().abs().max()) / 3
    monkeypatch.setattr("neula.algorithms.factorization._BLOCK", 7)
    assert growth_of(lu, torch.tensor(3.0), EmulatedEngine()) == pytest.approx(expected)
    assert growth_of(lu, torch.tensor(0.0), EmulatedEngine()) == 1.0
