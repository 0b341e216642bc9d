"""Two-sided equilibration: powers of two, sizes as promised, and undone exactly in the solution."""

from __future__ import annotations

import pytest
import torch

from neula.algorithms.elimination.equilibrate import TOP, Equilibrated, equilibrate, equilibrate_symmetric
from neula.algorithms.elimination.factorization import library_lu
from neula.engines import CpuEngine, EmulatedEngine

ENGINE = EmulatedEngine(format="fp16")


def badly_scaled(n: int, decades: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(n, n, dtype=torch.float64, generator=generator)
    scales = 10.0 ** torch.linspace(-decades, decades, n, dtype=torch.float64)
    return scales[:, None] * a * scales[torch.randperm(n, generator=generator)]


def scaled(a: torch.Tensor, engine: EmulatedEngine | CpuEngine = ENGINE) -> torch.Tensor:
    scales = equilibrate(a, a.abs().sum(1), engine)
    return scales.rows[:, None] * a * scales.columns


@pytest.mark.parametrize("decades", [0, 1, 8, 100])
@pytest.mark.parametrize("n", [1, 2, 50])
def test_largest_elements_lie_near_the_top(n: int, decades: float) -> None:
    a = badly_scaled(n, decades)
    scales = equilibrate(a, a.abs().sum(1), ENGINE)
    size = (scales.rows[:, None] * a * scales.columns).abs()
    assert 2.0 ** (TOP - 1) <= size.max() < 2.0**TOP
    # Columns may differ by the factor of ten that is left alone, and by one power of two.
    assert size.amax(0).min() >= 2.0 ** (TOP - 1) / 20
    for d in (scales.rows, scales.columns):
        assert torch.equal(torch.frexp(d)[0], torch.full_like(d, 0.5))


def test_well_scaled_matrices_have_one_factor() -> None:
    a = 1e7 * badly_scaled(40, 0)
    scales = equilibrate(a, a.abs().sum(1), ENGINE)
    assert scales.trivial
    assert torch.equal(scales.rows, scales.rows[:1].expand(40))
    assert torch.equal(scales.columns, scales.columns[:1].expand(40))


@pytest.mark.parametrize("decades", [0, 8])
def test_the_lower_triangle_alone(decades: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neula.algorithms.elimination.equilibrate.LEAST", 4)
    n, g = 50, badly_scaled(50, decades)
    scales = equilibrate_symmetric((g @ g.T).diagonal())
    whole = scales.fill(ENGINE.empty(n, n), g @ g.T, ENGINE)
    found = scales.fill_lower(ENGINE.empty(n, n).fill_(torch.nan), g @ g.T, ENGINE)
    assert torch.equal(found.tril(), whole.tril())
    assert 0.9 * 7 / 16 <= float(found.isnan().double().mean()) <= 7 / 16


@pytest.mark.parametrize("engine", [ENGINE, CpuEngine("cpu", "fp32")], ids=str)
@pytest.mark.parametrize("decades", [0, 8, 100])
def test_fill_rounds_once(decades: float, engine) -> None:
    a = badly_scaled(30, decades)
    scales = equilibrate(a, a.abs().sum(1), engine)
    work = scales.fill(engine.empty(30, 30), a, engine)
    assert torch.equal(work, scaled(a, engine).to(engine.storage))


def test_nothing_overflows_half_precision_that_would_have() -> None:
    """Squeezing: elements from 1e-16 to 1e16 fit fp16, none of any size lost."""
    a = badly_scaled(60, 8)
    assert torch.isinf(a.half()).any()
    assert (a.half() == 0).any()
    half = scaled(a).half()
    assert torch.isfinite(half).all()
    assert half.abs().amax(0).min() > 2.0**-14
    assert half.abs().amax(1).min() > 2.0**-14


def test_norm_of_the_scaled_matrix() -> None:
    a = badly_scaled(25, 6)
    scales = equilibrate(a, a.abs().sum(1), ENGINE)
    assert scales.norm(a) == pytest.approx(float(scaled(a).abs().sum(1).max()), rel=1e-14)


def test_solution_of_a_badly_scaled_system() -> None:
    a = badly_scaled(40, 8)
    scales = equilibrate(a, a.abs().sum(1), ENGINE)
    factors = Equilibrated(library_lu(scaled(a), ENGINE), scales)
    x = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = x * scales.columns[:, None]
    # Backward stable in the scaled system, of condition below 1e5: 1e5 * n * u64 relative to y.
    bound = 1e5 * 40 * 2.0**-53 * x.abs().max()
    assert ((factors.solve(a @ y) - y) / scales.columns[:, None]).abs().max() <= bound
    z = x * scales.rows[:, None]
    assert ((factors.solve_transposed(a.T @ z) - z) / scales.rows[:, None]).abs().max() <= bound
    assert factors.growth == factors.factors.growth
    assert torch.equal(factors.in_double().solve(a @ y), factors.solve(a @ y))


@pytest.mark.parametrize("size", [2.0**-700, 2.0**700])
def test_right_hand_sides_of_any_size(size: float) -> None:
    """Factors in single precision could not take them as they are."""
    a = badly_scaled(20, 0)
    scales = equilibrate(a, a.abs().sum(1), ENGINE)
    factors = Equilibrated(library_lu(scaled(a).float(), ENGINE), scales)
    b = torch.ones(20, 1, dtype=torch.float64)
    assert torch.equal(factors.solve(size * b) / size, factors.solve(b))


@pytest.mark.parametrize("decades", [0, 4, 60])
def test_symmetric_scaling(decades: float) -> None:
    g = torch.randn(30, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    d = 10.0 ** torch.linspace(-decades, decades, 30, dtype=torch.float64)
    lower = (d[:, None] * (g @ g.T) * d).tril()
    a = lower + lower.tril(-1).T
    scales = equilibrate_symmetric(a.diagonal())
    assert torch.equal(scales.rows, scales.columns)
    size = scales.rows[:, None] * a * scales.columns
    assert torch.equal(size, size.T)
    # The exponent of a square root is rounded: the diagonal lies within a factor of four of the top.
    assert 2.0 ** (TOP - 2) <= size.diagonal().max() < 2.0**TOP
    assert size.abs().max() < 2.0**TOP
    assert scales.trivial == (decades == 0)
