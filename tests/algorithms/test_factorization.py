"""LU by the library and in mixed precision: factors, growth, solves."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from neula.algorithms.elimination.factorization import (
    MixedLU,
    SingularMatrixError,
    growth_of,
    library_lu,
    mixed_lu,
)
from neula.algorithms.triangular.substitution import Substitution
from neula.engines import CpuEngine, EmulatedEngine, Engine

ENGINES = [
    CpuEngine("cpu", "fp32"),
    EmulatedEngine(format="fp16"),
    EmulatedEngine(format="tf32"),
    EmulatedEngine(format="fp64"),
]


def normal(n: int, dominant: bool = False) -> torch.Tensor:
    a = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    return a + 2 * n * torch.eye(n, dtype=torch.float64) if dominant else a


def factorized(a: torch.Tensor, engine: Engine, *, pivoting: bool) -> MixedLU:
    work = engine.empty(*a.shape, dtype=engine.operand_dtype).copy_(a)
    found = mixed_lu(work, engine, pivoting=pivoting)
    assert found.substitution.factors.lu.data_ptr() == work.data_ptr()
    return found


@pytest.mark.parametrize("engine", ENGINES, ids=repr)
@pytest.mark.parametrize("pivoting", [False, True])
@pytest.mark.parametrize("n", [1, 16, 33, 300])
def test_backward_error_of_the_factors(n: int, pivoting: bool, engine: Engine) -> None:
    a = normal(n, dominant=not pivoting)
    found = factorized(a, engine, pivoting=pivoting)
    packed = found.substitution.factors
    lower = packed.lu.double().tril(-1) + torch.eye(n, dtype=torch.float64)
    upper = packed.lu.double().triu()
    expected = a[packed.permutation]
    # Lopez and Mary, Table 2: 2 u + n u_storage, times |A| + |L| |U|, and u for rounding A.
    bound = 3.1 * engine.format.u + n * torch.finfo(engine.storage).eps
    relative = bound * (expected.abs() + lower.abs() @ upper.abs())
    # Elements may be subnormal: half the smallest such number in each of A, L and U.
    tiny = 2.0 ** (1 - engine.format.max_exponent - engine.format.significand)
    absolute = tiny * (1 + lower.abs().sum(1, keepdim=True) + upper.abs().sum(0))
    assert ((lower @ upper - expected).abs() <= relative + absolute).all()
    largest = float(engine.operand(a.to(engine.storage)).abs().max())
    assert found.growth == pytest.approx(float(upper.abs().max()) / largest, rel=2 * engine.format.u)
    if pivoting:
        assert lower.abs().max() <= 1


@pytest.mark.parametrize("pivoting", [False, True])
def test_solves(pivoting: bool) -> None:
    a = normal(70, dominant=not pivoting)
    b = torch.ones(70, 2, dtype=torch.float64)
    factors = factorized(a, EmulatedEngine(format="fp64"), pivoting=pivoting)
    assert torch.allclose(factors.solve(b), torch.linalg.solve(a, b), rtol=1e-9)
    single = factorized(a, CpuEngine("cpu", "fp32"), pivoting=pivoting)
    assert single.in_double().substitution.factors.lu.dtype == torch.float64
    assert torch.allclose(single.in_double().solve(b), single.solve(b), rtol=1e-2)
    assert not single.narrow
    packed = single.substitution.factors
    half = MixedLU(Substitution(replace(packed, lu=packed.lu.half()), torch.float32), single.growth)
    assert half.narrow
    error = torch.linalg.vector_norm(half.solve(b) - single.solve(b), dim=0)
    assert (error <= 0.1 * torch.linalg.vector_norm(single.solve(b), dim=0)).all()


@pytest.mark.parametrize("format", ["fp16", "fp32"])
def test_a_zero_pivot_gives_no_finite_growth(format: str) -> None:
    a = torch.eye(40, dtype=torch.float64).roll(1, 0)
    assert not math.isfinite(factorized(a, EmulatedEngine(format=format), pivoting=False).growth)


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
    monkeypatch.setattr("neula.algorithms.elimination.factorization._BLOCK", 7)
    assert growth_of(lu, torch.tensor(3.0), EmulatedEngine()) == pytest.approx(expected)
    assert growth_of(lu, torch.tensor(0.0), EmulatedEngine()) == 1.0
