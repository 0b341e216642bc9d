"""Lists of matrices, as optimizers hold them."""

from __future__ import annotations

import pytest
import torch

import neula
from neula.pipeline.result import AccuracyWarning


def matrices() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(9, 4), (5, 5), (9, 4), (4, 9)]
    found = [torch.randn(shape, generator=generator) for shape in shapes]
    return [*found, found[0].double()]


def test_answers_are_those_of_each() -> None:
    given = matrices()
    for result, a in zip(neula.polar(given, side="right"), given, strict=True):
        alone = neula.polar(a, side="right")
        assert result.U.dtype == result.H.dtype == a.dtype
        assert torch.allclose(result.U, alone.U, atol=1e-5)
        assert torch.allclose(result.H, alone.H, atol=1e-5)
        assert (result.converged, result.rank) == (True, min(a.shape))
    for result, a in zip(neula.qr(given), given, strict=True):
        q, r = result
        assert result.converged
        assert result.certificate.accepted
        assert torch.allclose(q @ r, a, atol=1e-5)
    for q, a in zip(neula.orth(given), given, strict=True):
        assert torch.allclose(q, neula.qr(a).Q, atol=1e-5)


def test_nothing() -> None:
    assert neula.polar([]) == neula.qr([]) == neula.orth([]) == []


def test_warnings_name_places_in_the_list() -> None:
    given = matrices()
    given[2][1, 1] = torch.nan
    with pytest.warns(AccuracyWarning, match=r"for A\[2\]"):
        results = neula.polar(given)
    assert [result.converged for result in results] == [True, True, False, True, True]
    assert results[2].U.isnan().all()
    with pytest.warns(AccuracyWarning, match=r"for A\[2\]"):
        factors = neula.qr(given)
    assert [result.converged for result in factors] == [True, True, False, True, True]


def test_gradients_reach_each() -> None:
    given = [a.double().requires_grad_() for a in matrices()]
    sum(result.U.sum() for result in neula.polar(given)).backward()
    for a in given:
        alone = a.detach().requires_grad_()
        neula.polar(alone).U.sum().backward()
        assert torch.allclose(a.grad, alone.grad, atol=1e-10)


def test_other_lists_are_arrays() -> None:
    assert neula.polar([[2.0, 0.0], [0.0, 3.0]]).U.shape == (2, 2)
