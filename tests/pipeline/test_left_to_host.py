"""Small problems that the first link of a GPU does not solve go to the host, and no others do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.matrices import normal_array

import neula
from campaign.oracle import LeastSquares
from neula.engines import CpuEngine, Engine, select_engine
from neula.engines.shipped import cuda_tuning
from neula.pipeline import call, solutions
from neula.pipeline.solutions import SolutionOptions
from neula.problems.least_squares import run
from neula.problems.systems import links

noise = partial(normal_array, seed=1)

LIBRARY = "lu fp64 with pivoting"


class OnAGPU(CpuEngine):
    """A CPU that takes the steps of a GPU."""

    tuning = replace(
        cuda_tuning((9, 0), replayed_bytes=1 << 20, corrected=False),
        by_host=0,
        by_host_kernel=0,
        one_launch=0,
    )


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many problems the host took over, each time that it did; ``"auto"`` is a GPU here."""

    def select(asked: Any, device: torch.device) -> Engine:
        return OnAGPU("cpu") if asked == "auto" else select_engine(asked, device)

    counts: list[int] = []

    def counted(options: SolutionOptions, count: int, work: int) -> Engine | None:
        found = solutions.host_for(options, count, work)
        counts.extend([] if found is None else [count])
        return found

    monkeypatch.setattr(call, "select_engine", select)
    for module in (links, run):
        monkeypatch.setattr(module, "host_for", counted)
    return counts


@contextmanager
def limit(most: int) -> Iterator[None]:
    before = OnAGPU.tuning
    OnAGPU.tuning = replace(before, left_to_host=most)
    try:
        yield
    finally:
        OnAGPU.tuning = before


def of_condition(cond: float, m: int, n: int) -> np.ndarray:
    u, v = np.linalg.qr(noise(m, n))[0], np.linalg.qr(noise(n, n, seed=2))[0]
    return (u * np.geomspace(1, 1 / cond, n)) @ v.T


def test_systems_that_are_left(taken: list[int]) -> None:
    """One of condition 1e11, and none whose columns are of other sizes: one chain, and one record of it."""
    a, b = noise(6, 9, 9), noise(6, 9, 2)
    a[1], a[4, :, 3] = of_condition(1e11, 9, 9), a[4, :, 3] * 1e-60
    found = neula.solve(a, b)
    assert found.converged
    assert taken == [1]
    assert [attempt.method for attempt in found.attempts][-1] == LIBRARY
    for i in range(6):
        errors = LeastSquares(a[i], b[i], rcond=0.0).errors(found.x[i], 9)
        assert (errors <= found.forward_errors[i]).all()
    assert not neula.solve(a, b, engine=OnAGPU("cpu")).attempts[0].accepted
    assert taken == [1]  # who names an engine has that


def test_least_squares_that_are_left(taken: list[int]) -> None:
    """Ill-conditioned, without full rank, not finite, beside what is easy; one by itself."""
    a, b = noise(6, 20, 5), noise(6, 20, 1)
    a[1], a[2, :, 4], b[3, 2, 0] = of_condition(1e10, 20, 5), a[2, :, 1], np.nan
    with pytest.warns(neula.AccuracyWarning, match=r"A\[3\]"):
        found = neula.lstsq(a, b)
    assert taken == [3]
    assert found.accepted.tolist() == [True, True, True, False, True, True]
    assert found.ranks.tolist() == [5, 5, 4, 0, 5, 5]
    assert np.isnan(found.x[3]).all()
    for i in (0, 1, 2, 4, 5):
        rank = found.ranks[i]
        errors = LeastSquares(a[i], b[i], rcond=0.0 if rank == 5 else 1e-13).errors(found.x[i], rank)
        assert (errors <= found.forward_errors[i]).all()
    alone = neula.lstsq(a[1], b[1])
    assert alone.converged
    assert taken == [3, 1]
    with pytest.raises(ValueError, match=r"b\[2\] is nan"):
        neula.lstsq(a[3], b[3])


def test_what_no_link_for_batches_solves(taken: list[int]) -> None:
    """More of it goes than of what the next link may solve: here two without full rank, not the third."""
    a, b = noise(5, 60, 20), noise(5, 60, 1)
    a[0], a[1, :, 4], a[3, :, 7] = of_condition(1e10, 60, 20), a[1, :, 2], 0.0
    with limit(50_000):
        found = neula.lstsq(a, b)
    assert found.converged
    assert taken == [2]
    assert found.ranks.tolist() == [20, 19, 20, 19, 20]
    assert "svd fp64" not in [attempt.method for attempt in found.attempts]


@pytest.mark.parametrize("problem", ["solve", "lstsq"])
def test_what_would_take_the_host_longer_stays(problem: str, taken: list[int]) -> None:
    """Problems count by their operations, and small ones by those of calls."""
    a, b = np.stack([of_condition(1e11, 9, 9), noise(9, 9)]), noise(2, 9, 1)
    function = getattr(neula, problem)
    with limit(solutions.LEAST_WORK - 1):
        stays = function(a, b)
    assert taken == []
    with limit(solutions.LEAST_WORK):
        goes = function(a, b)
    assert taken == [1]
    assert stays.converged
    assert goes.converged
    bound = (stays.forward_errors + goes.forward_errors) * np.linalg.norm(stays.x, axis=1)
    assert (np.linalg.norm(stays.x - goes.x, axis=1) <= 1e3 * bound).all()


def test_weights_and_damping_go_along(taken: list[int]) -> None:
    a, b, w = np.stack([of_condition(1e11, 20, 4)] * 2), noise(2, 20, 1), np.abs(noise(20)) + 0.5
    here = neula.lstsq(a, b, weights=w)
    there = neula.lstsq(a, b, weights=w, engine="cpu")
    assert taken == [2]
    assert here.converged
    bound = (here.forward_errors + there.forward_errors) * np.linalg.norm(there.x, axis=1)
    columns = np.linalg.norm(a[0], axis=0)
    assert (np.linalg.norm(here.x - there.x, axis=1) <= columns.max() / columns.min() * bound).all()


def test_a_singular_one_is_named_as_the_user_counts() -> None:
    a, b = noise(5, 8, 8), noise(5, 8, 1)
    a[3] = np.diag([1.0] + 7 * [0.0])
    for engine in ("auto", OnAGPU("cpu"), "cpu"):
        with pytest.raises(np.linalg.LinAlgError, match=r"A\[3\] of the batch: A is singular"):
            neula.solve(a, b, engine=engine)
