"""Chains where memory does not suffice: the next link has its turn, and the error says what was missing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import neula
from neula.problems.least_squares import refined
from neula.problems.systems import ways


def short(*args: object, **kwargs: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_least_squares_go_on_with_what_needs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    A, b = rng.standard_normal((900, 120)), rng.standard_normal(900)
    monkeypatch.setattr(refined, "fast_r", short)
    result = neula.lstsq(A, b, engine="emulated")
    assert result.converged
    assert result.factorization.startswith("householder")
    assert "needed 2.00 GiB more" in result.attempts[0].reason
    with pytest.raises(torch.OutOfMemoryError, match=r"not enough memory on cpu: rgsqrf .* needed 2.00 GiB"):
        neula.lstsq(A, b, algorithm="cgls", engine="emulated")


def test_systems_go_on_with_what_needs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    A, b = rng.standard_normal((300, 300)), rng.standard_normal(300)
    monkeypatch.setattr(ways, "mixed_lu", short)
    result = neula.solve(A, b, engine="emulated")
    assert result.converged
    assert result.method == "lu fp64 with pivoting"
    assert "needed 2.00 GiB more" in result.attempts[0].reason
    with pytest.raises(torch.OutOfMemoryError, match=r"not enough memory on cpu: lu fp16"):
        neula.solve(A, b, engine="emulated", pivot="partial")


def test_factorizations_go_on_with_what_needs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    A = np.random.default_rng(0).standard_normal((300, 60))
    monkeypatch.setattr("neula.problems.orthogonal.problem.rgsqrf", short)
    result = neula.qr(A, engine="emulated")
    assert result.converged
    assert [a.method for a in result.attempts] == ["out of memory", "out of memory", "householder fp64"]
    with pytest.raises(
        torch.OutOfMemoryError, match=r"not enough memory on cpu: rgsqrf fp64 needed 2.00 GiB"
    ):
        neula.qr(A, engine="emulated", algorithm="rgsqrf")


def test_a_matrix_that_is_overwritten_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    A = np.asfortranarray(np.random.default_rng(0).standard_normal((300, 60)))
    monkeypatch.setattr("neula.problems.orthogonal.ways.rgsqrf", short)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        neula.qr(A, engine="emulated", overwrite_a=True)
