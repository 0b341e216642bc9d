"""What the first link solves at once is told of as by the chain, and what it does not solve goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import neula
from neula.engines import EmulatedEngine
from neula.engines.shipped import EMULATED
from neula.problems.least_squares import solution


class Queueing(EmulatedEngine):
    """An engine whose first link looks at nothing, as that of a GPU."""

    tuning = replace(EMULATED, prelaunched_steps=3)


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def by_chain(monkeypatch: pytest.MonkeyPatch, *args: Any, **asked: Any) -> Any:
    with monkeypatch.context() as patched:
        patched.setattr(solution, "begin_at_once", lambda *_: None)
        return neula.lstsq(*args, engine=Queueing("cpu"), **asked)


CASES: dict[str, tuple[torch.Tensor, torch.Tensor, dict[str, Any]]] = {
    "vector": (normal(20, 5), normal(20), {}),
    "matrix": (normal(20, 5), normal(20, 3), {}),
    "batch": (normal(4, 3, 20, 5), normal(4, 3, 20, 2), {}),
    "one vector for all": (normal(4, 20, 5), normal(20), {}),
    "weights": (normal(20, 5), normal(20), {"weights": normal(20).abs() + 0.1}),
    "damping": (normal(20, 5), normal(20), {"damp": 0.5}),
    "wide": (normal(5, 20), normal(5), {}),
    "float32": (normal(20, 5).float(), normal(20).float(), {}),
    "all digits": (normal(20, 5), normal(20), {"certify": "forward"}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_is_said(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    a, b, asked = CASES[name]
    expected = by_chain(monkeypatch, a, b, **asked)
    found = neula.lstsq(a, b, engine=Queueing("cpu"), **asked)
    assert [x.method for x in found.attempts] == [x.method for x in expected.attempts]
    assert [x.reason for x in found.attempts] == [x.reason for x in expected.attempts]
    said, told = vars(found), vars(expected)
    assert said.keys() <= told.keys()
    for field in said.keys() - {"seconds", "attempts", "fit", "optimality"}:
        one, other = getattr(found, field), getattr(expected, field)
        assert type(one) is type(other), field
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other), field
            assert one.dtype == other.dtype, field
        else:
            assert one == other, field
    assert found.optimality >= expected.optimality  # of a batch that of the worst, by whatever counts
    assert repr(found).splitlines()[:-1] == repr(expected).splitlines()[:-1]
    assert (found.fit is None) == (expected.fit is None)


def test_arrays_of_numpy_come_back_as_such() -> None:
    a, b = normal(20, 5).numpy(), normal(20).numpy()
    found = neula.lstsq(a, b, engine=Queueing("cpu"))
    for field in ("x", "accepted", "ranks", "backward_errors", "forward_errors", "conditions"):
        assert isinstance(getattr(found, field), (np.ndarray, np.generic)), field
    assert isinstance(found.residual_norm, float)


def test_what_is_not_accepted_goes_on() -> None:
    """Without full rank, with NaN among others, and with numbers that are not finite."""
    a, b = normal(3, 20, 5), normal(3, 20)[..., None]
    a[1, :, 4] = a[1, :, 0]
    found = neula.lstsq(a, b, engine=Queueing("cpu"))
    assert found.converged
    assert found.ranks.tolist() == [5, 4, 5]
    assert found.attempts[0].reason.startswith("1 of 3 problems rejected")
    a[2, 3, 3] = torch.nan
    with pytest.warns(neula.AccuracyWarning):
        found = neula.lstsq(a, b, engine=Queueing("cpu"))
    assert found.accepted.tolist() == [True, True, False]
    with pytest.raises(ValueError, match="must be finite"):
        neula.lstsq(a[2], b[2], engine=Queueing("cpu"))


def test_gradients() -> None:
    a, b = normal(20, 5).requires_grad_(), normal(20).requires_grad_()
    weights = (normal(20).abs() + 0.1).requires_grad_()
    operands = (a, b, weights)
    asked = {"engine": Queueing("cpu")}
    assert torch.autograd.gradcheck(lambda a, b, w: neula.lstsq(a, b, weights=w, **asked).x, operands)
