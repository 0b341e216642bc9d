"""Least squares of matrices whose rows are spread over processes, beside what one process gives."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import neula
from gram_problems import accepted, problem, solved
from neula.problems.least_squares.together import SOURCES
from over_processes import tasks
from over_processes.problems import COUNTS, SPECTRA, matrix, noise
from over_processes.processes import Processes
from scaled_errors import scaled_errors

pytestmark = pytest.mark.filterwarnings("ignore::neula.AccuracyWarning")
LARGE = (1500, 90)
"""More than what is solved in one step, so that a fast R preconditions CGLS."""


def compare(
    processes: Processes, size: int, a: Any, b: Any, weights: Any = None, **asked: Any
) -> neula.LstsqResult:
    """The same evidence as for one process, and solutions that differ by no more than both may err."""
    found = processes.check(size, tasks.solution, a, b, weights, asked)
    first, one = found[0], neula.lstsq(a, b, weights=weights, **asked)
    for other in found[1:]:
        assert torch.equal(torch.as_tensor(other.x), torch.as_tensor(first.x))
        for name in ("attempts", "iterations", "backward_error", "residual_norm"):
            assert np.array_equal(getattr(other, name), getattr(first, name)), name
    assert (first.converged, first.rank, first.accuracy) == (one.converged, one.rank, one.accuracy)
    if one.converged:
        assert first.backward_error <= first.tolerance
        # One may be an estimate, which counts three times where it matters, and the other have the Schatten
        # 4-norm of an inverse, up to n^(1/4) times its norm.
        within = 3 * torch.as_tensor(a).shape[1] ** 0.25
        assert 1 / within <= first.condition / one.condition <= within
    error = first.forward_error + one.forward_error
    if math.isfinite(error):
        weighted = torch.as_tensor(a) if weights is None else torch.as_tensor(a) * weights[:, None]
        assert (scaled_errors(weighted, first.x, one.x)[one.x.any(0).tolist()] <= error).all()
    return first


@pytest.mark.parametrize("size", COUNTS)
@pytest.mark.parametrize("name", SPECTRA)
def test_spectra(processes: Processes, size: int, name: str) -> None:
    for condition in (1e2, 1e6, 1e9):
        a = matrix(*LARGE, name, condition)
        assert compare(processes, size, a, noise(LARGE[0], 2)).converged


@pytest.mark.parametrize("size", COUNTS)
def test_small_problems(processes: Processes, size: int) -> None:
    """Solved in one step, with residuals in twice the working precision: all digits are right."""
    a, b, weights = matrix(80, 7, "geometric"), noise(80, 3), 1 + noise(80, seed=3).abs()
    for asked in ({}, {"damp": 0.1}, {"accuracy": "fp32"}):
        found = compare(processes, size, a, b, **asked)
        assert found.forward_error <= 16 * 2.0**-53
        assert compare(processes, size, a, b, weights, **asked).converged
    assert compare(processes, size, a.float(), b[:, 0].float()).converged
    assert compare(processes, size, 2.0**700 * a, 2.0**-200 * b, weights).converged
    assert compare(processes, size, a.numpy(), b[:, 0].numpy()).x.dtype == np.float64


@pytest.mark.parametrize("size", COUNTS)
@pytest.mark.parametrize("imaginary", [False, True])
def test_statistics(processes: Processes, size: int, imaginary: bool) -> None:
    a, b = matrix(80, 7, "geometric", imaginary=imaginary), noise(80, 3, imaginary=imaginary)
    weights = 1 + noise(80, seed=3).abs()
    for given, damp in ((None, 0.0), (weights, 0.0), (None, 0.5)):
        one = neula.lstsq(a, b, weights=given, damp=damp)
        expected = one.standard_errors(), one.covariance(), one.degrees_of_freedom
        task = processes.check(size, tasks.statistics, a, b, given, {"damp": damp})
        for *known, again, said in task:
            for found, wanted in zip(known, expected, strict=True):
                np.testing.assert_allclose(found, wanted, rtol=1e-9)
            assert torch.equal(again, known[0])
            assert "not all processes asked before that" in said


@pytest.mark.parametrize("size", [2, 4])
def test_large_problems(processes: Processes, size: int) -> None:
    m, n = LARGE
    a, b, weights = matrix(m, n, "geometric", 1e3), noise(m, 1), 1 + noise(m, seed=3).abs()
    assert compare(processes, size, a, b, weights).converged
    assert compare(processes, size, a, b, weights, damp=1e-2).converged
    assert compare(processes, size, a.float(), b.float()).converged
    assert compare(processes, size, 2.0**600 * a, b, weights).converged
    assert compare(processes, size, a, b, engine="emulated").converged
    for algorithm in ("lsqr", "householder", "direct", "normal"):
        assert compare(processes, size, a, b, algorithm=algorithm).converged == (algorithm[0] in "lh")


@pytest.mark.parametrize("size", [1, 3])
def test_the_links_of_a_gpu(processes: Processes, size: int) -> None:
    engine = tasks.LikeAGpu("cpu")
    for shape in ((80, 7), LARGE, (3000, 130)):
        for name, condition in (("geometric", 1e2), ("cluster", 1e5), ("arithmetic", 1e8)):
            a = matrix(*shape, name, condition)
            assert compare(processes, size, a, noise(shape[0], 1), engine=engine).converged


@pytest.mark.parametrize("name", SOURCES)
def test_where_r_of_small_problems_comes_from(processes: Processes, name: str) -> None:
    """``R^T R = A^T A`` to the precision of the arithmetic, and the same R on all processes."""
    a = matrix(90, 12)
    u = 2.0**-24 if "fp32" in name else 2.0**-53
    for size in COUNTS:
        found = processes.check(size, tasks.r_factor, name, a)
        error = torch.linalg.matrix_norm(found[0].T @ found[0] - a.T @ a)
        assert error <= 90 * u * torch.linalg.matrix_norm(a) ** 2
        assert all(torch.equal(r, found[0]) for r in found)


@pytest.mark.parametrize("size", [1, 3])
def test_forward_errors(processes: Processes, size: int) -> None:
    """Gradients are totalled in twice the working precision."""
    m, n = LARGE
    a, b, weights = matrix(m, n, "geometric", 1e6), noise(m, 1), 1 + noise(m, seed=3).abs()
    for given, damp in ((None, 0.0), (weights, 0.0), (weights, 1e-3)):
        found = compare(processes, size, a, b, given, damp=damp, certify="forward")
        assert found.converged
        assert found.forward_error <= 16 * 2.0**-53


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shape", [(60, 8), LARGE])
def test_below_full_rank(processes: Processes, size: int, shape: tuple[int, int]) -> None:
    """The solution of minimum norm, by singular vectors that are the same on all processes."""
    a, b = matrix(*shape), noise(shape[0], 2)
    a[:, 3], a[:, 5] = a[:, 4] - a[:, 2], 0.0
    found = compare(processes, size, a, b)
    assert found.converged
    assert found.rank == shape[1] - 2


def test_kernels_that_take_the_rows_of_some_processes_only(processes: Processes) -> None:
    """Messages have one size: a process with few rows measures with as many vectors as others."""
    a, b = matrix(5000, 160, "geometric", 1e2), noise(5000, 1)
    found, one = processes.check(2, tasks.as_with_kernels, a, b), neula.lstsq(a, b)
    assert found[0].converged
    assert found[0].attempts == found[1].attempts
    assert scaled_errors(a, found[0].x, one.x) <= found[0].forward_error + one.forward_error


def test_more_columns_than_rows_with_damping(processes: Processes) -> None:
    for size in COUNTS:
        assert compare(processes, size, noise(12, 30), noise(12, 2, seed=2), damp=0.5).converged


def test_zeros(processes: Processes) -> None:
    """A right-hand side that is zero, or orthogonal to all columns across processes."""
    a = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]).double().repeat(6, 1)
    b = torch.tensor([1.0, 1.0, -1.0, 5.0]).double().repeat(6)
    for rhs in (b, 0 * b):
        found = compare(processes, 3, a, rhs)
        assert found.converged
        assert not found.x.any()
    assert not compare(processes, 2, 0 * a, b).x.any()


def test_nearly_singular(processes: Processes) -> None:
    """If no process is sure of a solution, no process accepts it."""
    a = matrix(*LARGE, "geometric", 1e14)
    assert not compare(processes, 3, a, noise(LARGE[0], 1)).converged


def test_nothing_to_solve(processes: Processes) -> None:
    found = processes.check(2, tasks.solution, torch.ones(5, 0), torch.ones(5), None, {})
    assert found[0].x.shape == (0,)
    assert found[0].residual_norm == pytest.approx(5**0.5)
    found = processes.check(2, tasks.solution, torch.ones(5, 1), torch.ones(5, 0), None, {})
    assert found[0].x.shape == (1, 0)


@pytest.mark.parametrize("size", COUNTS)
@pytest.mark.parametrize("condition", [3.0, 1e3, 1e5, 0.0])
@pytest.mark.parametrize("unit", [1.0, 2.0**600])
@pytest.mark.parametrize("asked", [{}, {"compute": "fp16"}])
def test_large_problems_as_they_are_given(
    processes: Processes, size: int, condition: float, unit: float, asked: dict[str, Any]
) -> None:
    """By a Gram matrix of low precision: accepted like those of one process, or no digit is claimed."""
    a, b = problem(condition)
    one = solved(unit * a, b, **asked).values
    found = processes.check(size, tasks.by_gram, unit * a, b, asked)
    for members in found:
        pairs = zip(members.tensors, found[0].tensors, strict=True)
        assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in pairs)
    if condition != 1e3 or not asked:  # an R in fp16 is neither good nor bad then, and rounding decides
        assert accepted(found[0]) == accepted(one) == (0 < condition <= 1e3)
    if accepted(found[0]) and accepted(one):
        allowed = (found[0].forward_error + one.forward_error)[0].numpy()
        assert (scaled_errors(a, found[0].x[0], one.x[0]) <= allowed).all()


def test_nan_in_a_large_problem(processes: Processes) -> None:
    """Nothing is claimed, on any process, and none waits for another."""
    a, b = problem(10.0)
    a[-1, 3] = torch.nan
    for members in processes.check(3, tasks.by_gram, a, b, {}):
        assert not accepted(members)


@pytest.mark.parametrize("size", COUNTS)
def test_one_bound_for_all(processes: Processes, size: int) -> None:
    """Whatever rows a process has: what one accepts, all do."""
    bounds = processes.check(size, tasks.bound, 5000, 2048)
    assert len(set(bounds)) == 1


RNG = np.random.default_rng(3)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("algorithm", [None, "cgls", "lsqr", "householder"])
@pytest.mark.parametrize(("m", "n", "condition"), [(60, 5, 2.0), (900, 40, 2.0), (200, 8, 1e5)])
def test_complex_numbers(
    processes: Processes, m: int, n: int, condition: float, algorithm: str | None, size: int
) -> None:
    a, b = matrix(m, n, "geometric", condition, imaginary=True), noise(m, 2, imaginary=True)
    found = compare(processes, size, a, b, algorithm=algorithm)
    assert found.converged
    assert found.forward_error < 1e-3


@pytest.mark.parametrize("asked", [{"damp": 0.5}, {"certify": "forward"}])
def test_real_and_complex_operands(processes: Processes, asked: dict[str, Any]) -> None:
    a, b = noise(60, 5, imaginary=True), noise(60, imaginary=True)
    weights = torch.linspace(0.5, 2.0, 60, dtype=torch.float64)
    for left, right in ((a, b), (a, b.real.clone()), (a.real.clone(), b)):
        assert compare(processes, 3, left, right, weights, **asked).converged


def test_messages(processes: Processes) -> None:
    for found in processes.check(3, tasks.sums_of_mixed_dtypes):
        assert all(found), found
