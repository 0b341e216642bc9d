"""Of many problems that are all solved at once the host reads the worst alone, which nobody is to notice."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import neula
from least_squares_options import options_of
from neula.engines import CpuEngine
from neula.pipeline import chain
from neula.problems.least_squares.problem import LeastSquaresJudge, LeastSquaresSolutions

FIELDS = ("converged", "iterations", "backward_error", "condition", "forward_error", "digits", "rank")
ARRAYS = ("x", "accepted", "backward_errors", "conditions", "forward_errors", "ranks", "residual_norm")


def both(monkeypatch: pytest.MonkeyPatch, a: np.ndarray, b: np.ndarray) -> list[Any]:
    """Results with all numbers read, and with those of the worst."""
    found = []
    for many in (10**9, 2):
        monkeypatch.setattr(chain, "MANY", many)
        found.append(neula.lstsq(a, b))
    return found


def batch(count: int = 12) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    scales = 10.0 ** np.arange(count)[:, None, None] ** 0.5
    a = rng.standard_normal((count, 9, 3))
    a[:, :, 2] = a[:, :, 1] + a[:, :, 2] / scales[:, 0]
    return a, scales * rng.standard_normal((count, 9, 1))


def nothing(a: np.ndarray, b: np.ndarray) -> None:
    """All problems are solved at once."""


def without_rank(a: np.ndarray, b: np.ndarray) -> None:
    a[3, :, 1] = a[3, :, 0]


def zero(a: np.ndarray, b: np.ndarray) -> None:
    b[4] = 0


@pytest.mark.parametrize("spoil", [nothing, without_rank, zero])
def test_results_are_the_same(spoil: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = batch()
    spoil(a, b)
    full, short = both(monkeypatch, a, b)
    copies = [copy.copy(short), pickle.loads(pickle.dumps(neula.lstsq(a, b)))]  # before anything is read
    assert full.attempts == short.attempts
    for name in FIELDS:
        assert getattr(full, name) == getattr(short, name), name
    for name in ARRAYS:
        for one in (short, *copies):
            np.testing.assert_array_equal(getattr(full, name), getattr(one, name), err_msg=name)


def test_right_hand_sides_with_nan_that_share_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = batch()
    b = np.stack([b, 2 * b])
    b[1, 5, 2] = np.nan
    with pytest.warns(neula.AccuracyWarning):
        full, short = both(monkeypatch, a, b)
    assert not short.accepted[1, 5]
    assert np.isnan(short.forward_error)
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(full, name), getattr(short, name), err_msg=name)


@pytest.mark.parametrize(
    ("worse", "settled"),
    [({}, True), ({"zero": 1.0}, False), ({"doubtful": 1.0}, False), ({"forward_error": np.nan}, False)],
)
def test_what_the_worst_numbers_settle(worse: dict[str, float], settled: bool) -> None:
    """Of a solution that is zero the gradient is looked at first: it may be one that has underflowed."""
    judge = LeastSquaresJudge.for_shape(9, 3, options_of(CpuEngine("cpu"), rcond=1e-13), together=True)
    numbers = dict.fromkeys(LeastSquaresSolutions.names, 0.0) | worse
    assert judge.settled(list(numbers.values())) == settled
