"""Chains where memory does not suffice: the next link has its turn, and the error says what was missing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import neula


def short(*args: object, **kwargs: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


A, B = (np.random.default_rng(0).standard_normal(shape) for shape in ((900, 300), 900))


@pytest.mark.parametrize(
    ("call", "named", "place", "last", "says"),
    [
        (
            partial(neula.lstsq, A[:, :120], B),
            {"algorithm": "cgls"},
            "neula.problems.least_squares.refined.fast_r",
            "householder",
            "rgsqrf .* needed 2.00 GiB",
        ),
        (
            partial(neula.solve, A[:300], B[:300]),
            {"pivot": "partial"},
            "neula.problems.systems.ways.mixed_lu",
            "lu fp64 with pivoting",
            "lu fp16",
        ),
        (
            partial(neula.qr, A[:300, :60]),
            {"algorithm": "rgsqrf"},
            "neula.problems.orthogonal.problem.rgsqrf",
            "householder fp64",
            "rgsqrf fp64 needed 2.00 GiB",
        ),
    ],
)
def test_the_next_link_needs_less(
    call: Callable[..., Any],
    named: dict[str, str],
    place: str,
    last: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(place, short)
    result = call(engine="emulated")
    assert result.converged
    assert result.attempts[-1].method.startswith(last)
    assert "needed 2.00 GiB more" in result.attempts[0].reason
    with pytest.raises(torch.OutOfMemoryError, match=f"not enough memory on cpu: {says}"):
        call(engine="emulated", **named)


def test_a_matrix_that_is_overwritten_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    A = np.asfortranarray(np.random.default_rng(0).standard_normal((300, 60)))
    monkeypatch.setattr("neula.problems.orthogonal.ways.rgsqrf", short)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        neula.qr(A, engine="emulated", overwrite_a=True)
