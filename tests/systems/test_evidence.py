"""Condition and forward error of a system, from factors in low precision."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.matrices import normal

import neula
from campaign.oracle import System
from neula.algorithms.elimination.equilibrate import Equilibrated, equilibrate
from neula.algorithms.elimination.factorization import MixedLU, mixed_lu
from neula.algorithms.krylov import gmres
from neula.algorithms.krylov.driver import Refined
from neula.algorithms.krylov.iterative_refinement import classical, gmres_refinement
from neula.algorithms.spectra.inverse_norm import EXPLICIT
from neula.certificates.backward_error import Measures
from neula.engines import EmulatedEngine
from neula.engines.shipped import EMULATED
from neula.io.matrices import random_matrix
from neula.problems.systems import evidence, ways
from neula.problems.systems.evidence import ESTIMATED, SystemEvidence
from scaled_errors import scaled_errors

from .test_direct import OPTIONS

U64 = 2.0**-53
FORMATS = ["fp16", "fp32", "fp64"]


def graded(n: int) -> torch.Tensor:
    """Rows over six decades, and columns over twenty."""
    rows, columns = (torch.logspace(0, d, n, dtype=torch.float64) for d in (-6, 20))
    return rows[:, None] * random_matrix("normal", n, n, seed=2) * columns


def matrix(kind: str, n: int) -> torch.Tensor:
    if kind == "graded":
        return graded(n)
    if kind == "cluster_small":
        return random_matrix(kind, n, n, cond=1e6, seed=1)
    return random_matrix("arithmetic", n, n, cond=1.0) if kind == "orthogonal" else random_matrix(kind, n, n)


def singular_values(kind: str, n: int, cond: float, rng: np.random.Generator) -> np.ndarray:
    """One small, in even steps, or most of them above a last one that is much smaller."""
    if kind == "one small":
        return np.append(np.ones(n - 1), 1 / cond)
    if kind == "even":
        return cond ** -np.linspace(0, 1, n)
    return np.append(cond ** -np.linspace(0, rng.uniform(0, 1), n - 1), 1 / cond)


def with_singular_values(s: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    left, right = (np.linalg.qr(rng.standard_normal((len(s), len(s))))[0] for _ in range(2))
    return left * s @ right


def factors_of(a: torch.Tensor, format: str) -> Equilibrated:
    engine = EmulatedEngine(format=format)
    scales = equilibrate(a, torch.linalg.vector_norm(a, 1, dim=1), engine)
    work = scales.fill(engine.empty(*a.shape, dtype=engine.operand_dtype), a, engine)
    return Equilibrated(mixed_lu(work, engine, pivoting=True), scales)


def measured(a: torch.Tensor, factors: Equilibrated, correct: Any = None) -> SystemEvidence:
    return SystemEvidence.measure(a, factors, factors.scales, correct, 60, torch.linalg.vector_norm(a, dim=0))


def condition_of(a: torch.Tensor) -> float:
    return float(torch.linalg.cond(a / torch.linalg.vector_norm(a, dim=0)))


@pytest.mark.parametrize("n", [3, 30])
def test_a_residual_that_vanishes_is_not_an_error_of_zero(n: int) -> None:
    """Computed in working precision it is as uncertain as its sums: x may be off by some last digits."""
    a, x = matrix("normal", n), normal(n, 1)
    b, found = a @ x, measured(a, factors_of(a, "fp64"))
    none = torch.zeros_like(b)
    error = found.forward_error(b, Refined(x, Measures(*[none[0]] * 2), residual=none))
    true = torch.from_numpy(System(a.numpy(), b.numpy()).errors(x.numpy(), n))
    assert 0 < float(true) <= float(error) < 100 * n * U64 * float(found.condition)


CONDITIONS = [
    *itertools.product(["normal", "graded", "orthogonal"], FORMATS, [False, True]),
    *itertools.product(
        ["cluster_small"], FORMATS, [False]
    ),  # 1e6: factors in fp16 do not solve, and GMRES does
]


@pytest.mark.parametrize(("kind", "format", "gmres"), CONDITIONS)
@pytest.mark.parametrize("n", [30, 100])
def test_condition(kind: str, n: int, format: str, gmres: bool) -> None:
    """Within a factor of ten, whatever the format of the factors."""
    a = matrix(kind, n)
    factors = factors_of(a, format)
    found = measured(a, factors, gmres_refinement(a, factors) if gmres else None)
    assert condition_of(a) / 10 <= float(found.condition) <= 10 * condition_of(a)
    assert found.is_regular or kind == "cluster_small"


def test_a_singular_matrix_is_not_regular() -> None:
    a, none, ones = random_matrix("normal", 40, 40), torch.zeros(1).double(), torch.ones(40, 1).double()
    a[:, 7] = a[:, 3]
    found = measured(a, factors_of(a, "fp32"))
    assert not found.is_regular
    refined = Refined(ones, Measures(none, none), residual=0 * ones)
    assert found.forward_error(ones, refined).item() == np.inf


@pytest.mark.parametrize(("format", "cond"), [("fp16", 1e2), ("fp32", 1e4), ("fp32", 1e6), ("fp64", 1e10)])
def test_refined_to_the_forward_error_of_the_format(format: str, cond: float) -> None:
    a, b = random_matrix("geometric", 50, 50, cond=cond, seed=1), normal(50, 2)
    factors = factors_of(a, format)
    found = measured(a, factors)
    rounding = torch.full((2,), U64, dtype=torch.float64)
    start = Refined(factors.solve(b), Measures(rounding, rounding), residual=b)
    options = replace(OPTIONS, engine=EmulatedEngine(), forward=True)
    refined, error = found.refine_forward(b, start, classical(factors), options)
    true = torch.from_numpy(System(a.numpy(), b.numpy()).errors(refined.x.numpy(), 50))
    assert (true <= error).all()
    assert (error <= 1.01 * 1.5 * U64).all()
    assert torch.equal(replace(found, measured=error).forward_error(b, refined), error)


ALMOST_SINGULAR = np.array(
    [
        [0.9459911573291809, -0.11436922073643865, -0.1781629492839892, -0.07918011607047451],
        [-0.11436922073643865, 0.013827172621507584, 0.021539494467117663, 0.0095724556968633],
        [-0.1781629492839892, 0.021539494467117663, 0.033554833788128215, 0.01491331028675058],
        [-0.07918011607047451, 0.0095724556968633, 0.01491331028675058, 0.006629005835750187],
    ]
)
"""Of condition 4e16, with singular values 1, 1e-5, 1e-11 and 3e-17: what factors in fp32 enlarge most has
next to nothing along the last one."""


def test_what_factors_do_not_enlarge_is_not_overlooked() -> None:
    """GMRES left it in the residual: 1e-4 was claimed, and no digit is right."""
    b = np.array([1.1412829153910423, -0.13797938021417264, -0.2149442757928724, -0.09552802337881023])
    with pytest.warns(neula.IllConditionedWarning):
        result = neula.solve(ALMOST_SINGULAR, b, compute="fp32", engine="emulated", assume_a="pos")
    assert result.forward_error == np.inf


@pytest.mark.parametrize("format", ["fp16", "fp32"])
@pytest.mark.parametrize("kind", ["one small", "even", "two sizes"])
@pytest.mark.parametrize(("n", "count"), [(4, 20), (20, 10), (70, 3)])
def test_norms_of_inverses_are_not_underestimated(n: int, count: int, kind: str, format: str) -> None:
    """The factor in the forward error is at least the norm of the inverse, or A is not called regular.

    Up to condition 1e12 A is called regular where the inverse was computed, and the factor is close.
    """
    rng = np.random.default_rng([n, count])
    for cond in 10.0 ** rng.uniform(3, 18, count):
        a = torch.from_numpy(with_singular_values(singular_values(kind, n, cond, rng), rng))
        factors = factors_of(a, format)
        found = measured(a, factors)
        if cond < 1e12 and n <= EXPLICIT:
            assert found.is_regular
        if found.is_regular:
            b = factors.scales.rows[:, None] * a / torch.linalg.vector_norm(a, dim=0)
            smallest = float(torch.linalg.svdvals(b)[-1])
            rounding = 4 * U64 * n**0.5 * float(torch.linalg.matrix_norm(b))  # of LAPACK's, and of b
            assert ESTIMATED * float(found.inverse) * (smallest + rounding) >= 1
            if cond < 1e12 and n <= EXPLICIT:  # n^(1/4) is the Schatten norm, 2 what is left of B X
                assert float(found.inverse) * (smallest - rounding) <= 2 * n**0.25


@pytest.mark.usefixtures("costly")
@pytest.mark.parametrize("k", [1, 3])
def test_large_systems_show_the_norm_of_the_inverse_beside_their_solution(
    k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GMRES solves for the probe together with the system, and for nothing else."""
    begun, probe = [], evidence.InverseProbe.from_factors
    monkeypatch.setattr(
        evidence.InverseProbe, "from_factors", lambda *x: [begun.append(probe(*x)), begun[-1]][1]
    )
    monkeypatch.setattr(evidence, "_by_preconditioned_gmres", lambda *_: pytest.fail("once more"))
    a, x = random_matrix("geometric", 150, 150, cond=2e4), random_matrix("normal", 150, k)
    found = neula.solve(a, a @ x, engine="emulated", pivot="partial")
    assert found.converged
    assert "gmres" in found.method
    assert len(begun) == 1
    # b is rounded: x is the solution for it up to the condition number times u.
    condition = condition_of(a)
    assert (scaled_errors(a, found.x, x) <= found.forward_error + 2 * condition * U64).all()
    assert condition / 10 <= found.condition <= 10 * condition


@pytest.mark.usefixtures("costly")
@pytest.mark.parametrize("decades", [2, 5])
def test_rows_in_small_units_are_solved_by_the_refinement(
    decades: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norm of the inverse in the units of the rows takes a few more iterations, and no power method."""
    monkeypatch.setattr(evidence, "_by_preconditioned_gmres", lambda *_: pytest.fail("once more"))
    rows = torch.logspace(0, -decades, 300, dtype=torch.float64)[:, None]
    a = rows * random_matrix("geometric", 300, 300, cond=2e4)
    found = neula.solve(a, a.sum(1, keepdim=True), engine="emulated", pivot="partial", compute="fp16")
    assert found.converged
    assert "gmres" in found.method
    assert condition_of(a) / 10 <= found.condition <= 10 * condition_of(a)


@pytest.mark.usefixtures("costly")
def test_nothing_more_is_solved_for_where_large_systems_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """GMRES is not run for the norm of the inverse: as many iterations a vector, and an unreliable result."""
    monkeypatch.setattr(evidence, "_by_preconditioned_gmres", lambda *_: pytest.fail("for nothing"))
    a = random_matrix("geometric", 300, 300, cond=1e12)
    b = random_matrix("normal", 300, 1)
    with pytest.warns(neula.AccuracyWarning):
        found = neula.solve(a, b, engine="emulated", pivot="partial", compute="fp16")
    assert not found.converged
    assert np.isinf(found.condition)
    assert np.isinf(found.forward_error)


@pytest.mark.usefixtures("costly")
@pytest.mark.parametrize(("cond", "poor"), [(1e3, False), (1e8, True)])
def test_poor_factors_are_noticed_before_gmres(
    cond: float, poor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one step for some random vectors, where GMRES would come first and give up after twenty."""
    monkeypatch.setattr(ways, "HARMLESS", 0.0)
    monkeypatch.setattr(ways, "TOO_POOR", 1.5)  # small matrices have fewer directions
    monkeypatch.setattr(MixedLU, "narrow", True)
    monkeypatch.setattr(EmulatedEngine, "tuning", replace(EMULATED, at_a_time=8))
    steps, step = [], gmres.Space._step
    monkeypatch.setattr(gmres.Space, "_step", lambda *x: [steps.append(x), step(*x)][1])
    a = random_matrix("geometric", 300, 300, cond=cond)
    found = neula.solve(a, a.sum(1, keepdim=True), engine="emulated")
    assert found.converged
    first = found.attempts[0]
    assert first.method.startswith("lu fp16 with pivoting")
    assert ("too poor" in first.reason) == poor
    assert first.accepted == (not poor)
    if not poor:
        assert len(steps) > 0
