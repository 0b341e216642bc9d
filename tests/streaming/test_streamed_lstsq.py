"""Least squares of matrices that are read in blocks, beside definitions and the solution in memory."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.campaign.oracle import LeastSquares
from tests.matrices import with_condition

import neula
from neula.engines import CpuEngine
from neula.engines.shipped import cuda_tuning
from neula.io.sources import row_blocks
from neula.problems.least_squares.streamed import GRAM_RATE, MOST_PASSES

U = 2.0**-53


class Pieces:
    """Rows in blocks of uneven lengths."""

    def __init__(self, a: Any) -> None:
        self.a, self.shape, self.dtype = a, a.shape, a.dtype

    def blocks(self) -> Iterator[Any]:
        start, length = 0, 1
        while start < len(self.a):
            yield self.a[start : start + length]
            start, length = start + length, 3 * length + 1


def errors_of(a: np.ndarray, b: np.ndarray, result: Any, **asked: Any) -> np.ndarray:
    """``||D (x - x*)|| / ||D x*||`` of each right-hand side."""
    n = a.shape[1]
    truth = LeastSquares(a.astype(float), b.reshape(len(b), -1).astype(float), rcond=0.0, **asked)
    return truth.errors(result.x.reshape(n, -1).astype(float), n)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many blocks as a large matrix has."""
    tuning = replace(CpuEngine("cpu").tuning, streamed_bytes=1 << 12)
    monkeypatch.setattr(CpuEngine, "tuning", tuning)


@pytest.mark.parametrize("condition", [1.0, 1e3, 1e6, 1e9, 1e12])
@pytest.mark.parametrize("noise", [0.0, 1e-3])
@pytest.mark.parametrize("certify", ["backward", "forward"])
def test_every_condition_number(
    rng: np.random.Generator, condition: float, noise: float, certify: str
) -> None:
    """Errors are below their bounds, and where digits can be had there is no warning."""
    m, n = 400, 10
    a = with_condition(rng, m, n, condition)
    b = a @ rng.standard_normal((n, 2)) + noise * rng.standard_normal((m, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = neula.lstsq(Pieces(a), b, certify=certify)
    error = errors_of(a, b, result).max()
    assert error <= result.forward_error or not result.converged
    assert result.converged == (not caught)
    assert result.passes <= MOST_PASSES
    if condition <= 1e6 or (noise == 0.0 and certify == "backward" and condition <= 1e9):
        assert result.converged, result
    if result.converged and certify == "forward":
        assert error <= 16 * U
    if condition**2 * n * U <= GRAM_RATE:
        assert result.passes == 2
        assert result.factorization.startswith("cholesky")
    if result.converged:
        residual = b - a @ result.x
        # Walden, Karlson and Sun: the smallest perturbation of A is at most ||P r|| / ||x||.
        projected = np.linalg.norm(np.linalg.qr(a)[0].T @ residual, axis=0)
        smallest = projected / np.linalg.norm(result.x, axis=0) / np.linalg.norm(a, 2)
        consistent = np.linalg.norm(residual, axis=0) / np.linalg.norm(b, axis=0)
        assert (np.minimum(smallest, consistent) <= 2 * result.tolerance + 4 * m**0.5 * U).all()


@pytest.mark.parametrize("damp", [1e-3, 10.0])
@pytest.mark.parametrize("shape", [(300, 12), (7, 12)])
def test_damping(rng: np.random.Generator, damp: float, shape: tuple[int, int]) -> None:
    """Also with fewer rows than columns."""
    a, b = rng.standard_normal(shape), rng.standard_normal(shape[0])
    result = neula.lstsq(Pieces(a), b, damp=damp, certify="forward")
    assert result.converged
    assert errors_of(a, b, result, damp=damp) <= 16 * U
    norm = math.hypot(np.linalg.norm(b - a @ result.x), damp * np.linalg.norm(result.x))
    assert abs(result.residual_norm - norm) <= 1e-12 * norm


@pytest.mark.parametrize(("condition", "certify"), [(1.0, "backward"), (1e2, "forward"), (1e6, "forward")])
def test_weights(rng: np.random.Generator, condition: float, certify: str) -> None:
    """They are rounded, which counts, also where residuals are in twice the precision."""
    a, b, w = with_condition(rng, 300, 6, condition), rng.standard_normal((300, 3)), 1 + rng.random(300)
    if certify == "backward":
        w[:3] = 0.0, -1.0, 1e6
    result = neula.lstsq(Pieces(a), b, weights=w, certify=certify, accuracy=1e-6)
    assert result.converged
    assert (errors_of(a, b, result, weights=w) <= result.forward_errors).all()
    assert result.x.shape == (6, 3)
    assert (result.forward_errors <= 1e-12 * condition).all() or certify == "backward"


@pytest.mark.parametrize("scale", [2.0**900, 2.0**-900, 1.0])
def test_badly_scaled_columns(rng: np.random.Generator, scale: float) -> None:
    """Squares neither overflow nor underflow, also where it shows in a later block that they would."""
    a = rng.standard_normal((300, 6))
    units = 2.0 ** np.array([-900, -300, 0, 1, 300, 900]) if scale == 1.0 else np.full(6, scale)
    b = a @ np.arange(1.0, 7.0) + 0.01 * rng.standard_normal(300)
    result = neula.lstsq(Pieces(a * units), b * 2.0**20, certify="forward")
    assert result.converged
    assert errors_of(a * units, b * 2.0**20, result) <= 16 * U
    late = a * units
    late[:100] *= 2.0**-60
    assert neula.lstsq(Pieces(late), b).converged


def test_below_full_rank(rng: np.random.Generator) -> None:
    """The solution of minimum norm, with the rank, in three passes."""
    a = rng.standard_normal((300, 4)) @ rng.standard_normal((4, 9))
    a[:, 2] = 0.0
    b = rng.standard_normal(300)
    result = neula.lstsq(Pieces(a), b)
    expected, _, rank, _ = np.linalg.lstsq(a, b, rcond=1e-12)
    assert (result.rank, rank) == (4, 4)
    assert result.converged
    assert result.passes == 3
    # Singular vectors err by u times the condition number.
    assert np.linalg.norm(result.x - expected) <= 1e-12 * np.linalg.norm(expected)
    assert result.forward_error < 1e-9
    nothing = neula.lstsq(Pieces(np.zeros((30, 3))), b[:30])
    assert (nothing.rank, nothing.converged, nothing.forward_error) == (0, True, 0.0)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("certify", ["backward", "forward"])
@pytest.mark.filterwarnings("ignore::neula.AccuracyWarning")  # it may say that it has no digit
def test_the_shortest_solution_is_that_of_the_columns_as_they_are(seed: int, certify: str) -> None:
    """Where sizes differ much, it depends on the space of the rows more than the condition number says.

    Residuals in twice the precision take columns of one size, which do not know what is the shortest.
    """
    rng = np.random.default_rng(seed)
    whole = rng.integers(-5, 6, (37, 3)) @ rng.integers(-5, 6, (3, 7))
    a, b = whole * np.exp2(rng.choice([-100, 100] if seed else [-2, 0, 3, 6], 7)), np.eye(37)[:, :2]
    result = neula.lstsq(row_blocks(a), b, certify=certify)
    assert result.rank == 3
    assert (LeastSquares(a, b, rcond=1e-12).errors(result.x, 3) <= result.forward_errors).all()
    assert result.forward_error < 1e-11 or seed


def test_subnormal_numbers(rng: np.random.Generator) -> None:
    """They have few digits, and what columns are divided by is in range."""
    a = np.round(rng.standard_normal((60, 3)) * 100) * 5e-324
    result = neula.lstsq(row_blocks(a), a @ np.ones(3), certify="forward")
    assert np.abs(result.x - 1).max() <= result.forward_error < 1e-10
    # Large solutions of them are in range.
    large = neula.lstsq(row_blocks(a[:, :1]), a[:, 0] * 2.0**700, certify="forward")
    assert abs(large.x[0] * 2.0**-700 - 1) <= large.forward_error < 1e-10


def test_rank_without_a_gap_is_warned_of(rng: np.random.Generator) -> None:
    a = with_condition(rng, 300, 20, 1e16)
    with pytest.warns(neula.AccuracyWarning):
        assert not neula.lstsq(Pieces(a), np.ones(300)).converged
    with pytest.raises(neula.AccuracyError):
        neula.lstsq(Pieces(a), np.ones(300), strict=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_narrow_numbers(rng: np.random.Generator, dtype: Any) -> None:
    a, b = rng.standard_normal((300, 6)).astype(dtype), rng.standard_normal(300).astype(dtype)
    result = neula.lstsq(Pieces(a), b)
    assert result.x.dtype == dtype
    assert result.accuracy == {np.float32: "fp32", np.float16: "fp16"}[dtype]
    assert errors_of(a, b, result) <= result.forward_error
    assert result.forward_error <= 4 * np.finfo(dtype).eps


def test_solutions_are_like_b(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((60, 3)), rng.standard_normal((60, 1))
    assert isinstance(neula.lstsq(Pieces(a), b).x, np.ndarray)
    found = neula.lstsq(Pieces(torch.from_numpy(a)), torch.from_numpy(b).float())
    assert found.x.dtype == torch.float64
    assert found.x.shape == (3, 1)
    assert found.accepted.shape == ()
    zero = neula.lstsq(Pieces(a), 0 * b)
    assert zero.converged
    assert not zero.x.any()
    assert zero.forward_error == 0


def test_what_a_gpu_does(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Residuals in twice the precision without being asked."""
    assert cuda_tuning((9, 0)).streams_doubled
    tuning = replace(CpuEngine("cpu").tuning, streams_doubled=True)
    monkeypatch.setattr(CpuEngine, "tuning", tuning)
    a, b = with_condition(rng, 300, 8, 1e5), rng.standard_normal(300)
    result = neula.lstsq(Pieces(a), b)
    assert result.converged
    assert result.forward_error <= 1e-12
    assert errors_of(a, b, result) <= result.forward_error


def test_names_and_numbers_are_checked(rng: np.random.Generator) -> None:
    a = Pieces(rng.standard_normal((30, 6)))
    for asked, message in (
        ({"algorithm": "qr"}, "algorithm"),
        ({"certify": "both"}, "certify"),
        ({"damp": -1.0}, "damp must be finite and not negative"),
        ({"rcond": 2.0}, "rcond must be at least 0"),
        ({"engine": "gpu"}, "engine"),
        ({"accuracy": "fp8"}, "accuracy"),
    ):
        with pytest.raises(ValueError, match=message):
            neula.lstsq(a, np.ones(30), **asked)


def test_named_algorithm(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((300, 6)), rng.standard_normal(300)
    result = neula.lstsq(Pieces(a), b, algorithm="householder")
    assert result.converged
    assert [attempt.method for attempt in result.attempts] == ["householder fp64 + seminormal"]
    assert result.passes == 2
    for asked in ({"algorithm": "svd"}, {"compute": "fp32"}):
        with pytest.raises(ValueError, match="needs A in memory"):
            neula.lstsq(Pieces(a), b, **asked)


def test_progress(rng: np.random.Generator) -> None:
    told: list[tuple[str, float]] = []
    a = rng.standard_normal((3000, 6))
    neula.lstsq(row_blocks(a), a[:, 0], progress=lambda *what: told.append(what))
    stages = list(dict.fromkeys(name for name, _ in told))
    assert stages == ["pass 1: Gram matrix", "pass 2: refinement"]
    assert [fraction for name, fraction in told if name == stages[0]][-1] == 1.0
    assert len(told) > 20
