"""Results on one screen, and as objects: equality, hash, copies, pickles."""

from __future__ import annotations

import copy
import dataclasses
import html.parser
import math
import pickle
import unittest
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import neula
from neula.pipeline.result import shown

A = np.random.default_rng(0).standard_normal((60, 20))
SQUARE = A[:20]
BATCH = np.random.default_rng(1).standard_normal((3, 8, 8))

RESULTS: dict[str, Callable[[], Any]] = {
    "lstsq": lambda: neula.lstsq(A, A[:, 0]),
    "lstsq of several": lambda: neula.lstsq(torch.from_numpy(A), torch.from_numpy(A[:, :9])),
    "lstsq of nothing": lambda: neula.lstsq(np.empty((0, 3)), np.empty(0)),
    "lstsq below full rank": lambda: neula.lstsq(A[:, [0, 0]], A[:, 1]),
    "solve": lambda: neula.solve(SQUARE, np.ones(20)),
    "solve a batch": lambda: neula.solve(BATCH, np.ones(8)),
    "solve a singular one": lambda: neula.solve(SQUARE * np.logspace(0, -20, 20) @ SQUARE.T, np.ones(20)),
    "qr": lambda: neula.qr(A),
    "qr of torch": lambda: neula.qr(torch.from_numpy(A)),
    "r alone": lambda: neula.qr(A, "r"),
    "qr of a batch": lambda: neula.qr(BATCH),
    "tsqr": lambda: neula.tsqr(A),
    "svd": lambda: neula.svd_lowrank(A, rank=3),
    "cholesky": lambda: neula.cholesky(SQUARE @ SQUARE.T, upper=True),
    "lu": lambda: neula.lu_factor(SQUARE),
    "lu of a batch": lambda: neula.lu_factor(BATCH, pivot="rbt", keep_a=False),
}


@pytest.fixture(params=RESULTS)
def result(request: pytest.FixtureRequest) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", neula.AccuracyWarning)
        return RESULTS[request.param]()


def test_one_screen(result: Any) -> None:
    lines = repr(result).splitlines()
    assert lines[0].startswith(type(result).__name__ + ": ")
    assert 4 <= len(lines) <= 12
    assert max(map(len, lines)) <= 100
    assert "time" in lines[-1]
    assert 0 < result.seconds < 600


def test_html(result: Any) -> None:
    class Tags(html.parser.HTMLParser):
        depth = cells = 0

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            self.depth += 1
            self.cells += tag == "td"

        def handle_endtag(self, tag: str) -> None:
            self.depth -= 1

    tags = Tags()
    tags.feed(result._repr_html_())
    assert (tags.depth, tags.cells) == (0, len(list(result._rows())))


def test_it_shows_public_attributes_and_is_no_array(result: Any) -> None:
    inner = {"headline", "rows", "remark", "deficiency", "pending", "fit", "member", "from_fields"}
    assert not inner & set(dir(result))
    with pytest.raises(TypeError, match=r"is not an array: take its \.\w"):
        np.asarray(result)


def test_attempts_are_logged_for_those_who_ask() -> None:
    check = unittest.TestCase()
    with check.assertNoLogs("neula", "INFO"):
        neula.solve(SQUARE, np.ones(20))
    with check.assertLogs("neula", "DEBUG") as said:
        found = neula.solve(SQUARE, np.ones(20))
    assert [record.getMessage() for record in said.records] == [
        f"{one.method}: accepted, {one.reason}" for one in found.attempts
    ]


def test_equality_is_identity(result: Any) -> None:
    again = dataclasses.replace(result)
    assert result == result
    assert result != again
    assert result in [again, result]
    assert {result: 1}[result] == 1
    assert len({result, again}) == 2


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies(result: Any, again: Callable[[Any], Any]) -> None:
    other = again(result)
    assert type(other) is type(result)
    assert repr(other) == repr(result)


def test_factors_solve_after_a_journey() -> None:
    factors = neula.lu_factor(SQUARE)
    other = pickle.loads(pickle.dumps(factors))
    assert np.array_equal(neula.lu_solve(other, SQUARE[0]), neula.lu_solve(factors, SQUARE[0]))
    assert other.growth == factors.growth


def test_what_is_said() -> None:
    said = repr(neula.lstsq(A, A @ np.arange(20.0), accuracy="fp32"))
    assert "LstsqResult: certified to fp32 accuracy" in said
    assert "(20,) float64: [" in said
    assert "5, ..., 17, 18, 19]" not in said
    assert ", 2, ..., 17, 18, 19]" in said
    with pytest.warns(neula.IllConditionedWarning):
        said = repr(neula.solve(np.vander(np.arange(20.0)), np.ones(20)))
    assert "NOT certified to fp64 accuracy, no digit of x is guaranteed" in said
    batch = np.stack([A, np.full_like(A, np.nan)])
    with pytest.warns(neula.AccuracyWarning):
        said = repr(neula.lstsq(batch, np.ones(len(A))))
    assert "1 of 2 accepted, no digit of x is guaranteed" in " ".join(said.split())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12.34, "12.3 s"), (0.0123, "12.3 ms"), (4.5e-5, "45 us"), (math.nan, "unknown")],
)
def test_durations(seconds: float, text: str) -> None:
    assert shown.duration(seconds) == text


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (None, "not computed"),
        (np.arange(3), "(3,) int64: [0, 1, 2]"),
        (np.empty(0), "(0,) float64"),
        (torch.ones(2, 3), "(2, 3) float32"),
        (torch.ones(2, requires_grad=True), "(2,) float32: [1, 1]"),
    ],
)
def test_arrays(x: Any, text: str) -> None:
    assert shown.array(x) == text
