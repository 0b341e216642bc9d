"""Mixed-precision Cholesky: errors that do not grow with n, whatever the format."""

from __future__ import annotations

import math

import pytest
import torch

from neula.algorithms.elimination.cholesky import PANEL, SHIFT, NotPositiveDefiniteError, cholesky
from neula.engines import CpuEngine, EmulatedEngine, Engine
from neula.engines.cuda import CudaEngine

ENGINES = [CpuEngine("cpu", "fp32"), CpuEngine("cpu", "fp64")] + [
    EmulatedEngine(format=name) for name in ("fp16", "bf16", "tf32", "fp32", "fp64")
]


def definite(n: int, seed: int = 0) -> torch.Tensor:
    """Elements of order 1 and condition of order 10."""
    g = torch.randn(n, 2 * n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return g @ g.T / n


def factorized(a: torch.Tensor, engine: Engine, panel: int = PANEL):
    n = len(a)
    return cholesky(engine.empty(n, n, dtype=engine.operand_dtype).copy_(a), engine, panel=panel)


@pytest.mark.parametrize("engine", ENGINES, ids=repr)
@pytest.mark.parametrize(("n", "panel"), [(1, 8), (7, 8), (64, 16), (150, 64)])
def test_backward_error_of_the_factor(n: int, panel: int, engine: Engine) -> None:
    a = definite(n)
    lower = factorized(a, engine, panel).lower.double().tril()
    error = (a - lower @ lower.T).abs()
    # Lopez and Mary, theorem 3, with |L| |L^T|: input rounding u, twice the rounding of L, sums in storage
    # precision; and the shift of the diagonal.
    u, high = engine.format.u, torch.finfo(engine.storage).eps / 2
    size = a.abs() + lower.abs() @ lower.abs().T
    assert (error <= (3.1 * u + (n + 1) * high) * size + 1.1 * SHIFT * u * torch.diag(a.diagonal())).all()


@pytest.mark.parametrize("engine", ENGINES, ids=repr)
def test_solves_to_the_accuracy_of_the_format(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neula.algorithms.elimination.cholesky._SUBSTITUTION", 48)
    a, n = definite(120), 120
    b = torch.randn(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    before = b.clone()
    factor = factorized(a, engine, 32)
    reference = torch.linalg.solve(a, b)
    bound = 10 * float(torch.linalg.cond(a)) * engine.format.u * math.sqrt(n)
    for factors in (factor, factor.in_double()):
        x = factors.solve(b)
        assert x.dtype == torch.float64
        assert torch.linalg.matrix_norm(x - reference) <= bound * torch.linalg.matrix_norm(reference)
    assert torch.equal(b, before)
    assert factor.growth == 1.0


def test_substitution_in_double_keeps_only_the_errors_of_the_factor() -> None:
    factor = factorized(definite(90), EmulatedEngine(format="fp16"))
    lower = factor.lower.double().tril()
    b = torch.ones(90, 1, dtype=torch.float64)
    error = [float((lower @ (lower.T @ f.solve(b)) - b).abs().max()) for f in (factor, factor.in_double())]
    assert error[0] > 1e-8
    assert error[1] <= 90 * 10 * 2.0**-53


@pytest.mark.parametrize("index", [0, 5, 40])
def test_says_which_minor_is_not_positive(index: int) -> None:
    a = torch.eye(50, dtype=torch.float64)
    a[index, index] = -1.0
    with pytest.raises(NotPositiveDefiniteError, match=f"order {index + 1}") as caught:
        factorized(a, CpuEngine("cpu", "fp32"), 16)
    assert caught.value.order == index + 1


def test_rounding_alone_does_not_cost_definiteness() -> None:
    """Smallest eigenvalue u/4: rounding to fp16 can push it below zero, and the shift brings it back."""
    engine = EmulatedEngine(format="fp16")
    n, u = 24, engine.format.u
    off = (1 - u / 4) * torch.ones(2, 2, dtype=torch.float64).fill_diagonal_(0)
    a = torch.block_diag(*[torch.eye(2, dtype=torch.float64) + off for _ in range(n // 2)])
    assert torch.linalg.eigvalsh(a).min() > 0
    assert torch.linalg.eigvalsh(a.half().double()).min() <= 0
    assert torch.isfinite(factorized(a, engine).lower.tril()).all()


def test_reads_the_lower_triangle_only() -> None:
    a = definite(40)
    engine = EmulatedEngine(format="fp16")
    garbage = a.tril() + torch.full_like(a, 7.0).triu(1)
    assert torch.equal(factorized(a, engine, 16).lower.tril(), factorized(garbage, engine, 16).lower.tril())


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["fp16", "bf16", "fp32", "fp64"])
def test_on_a_gpu(format: str) -> None:
    engine = CudaEngine("cuda", format)
    a = definite(700).cuda()
    factor = factorized(a, engine)
    assert factor.lower.dtype == engine.operand_dtype
    b = torch.ones(700, 2, dtype=torch.float64, device="cuda")
    bound = 10 * float(torch.linalg.cond(a)) * engine.format.u * math.sqrt(700)
    assert (a @ factor.solve(b) - b).abs().max() <= bound * 100
