"""Problems that the first link of a device does not solve go on; those that it solves have gradients."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from tests import matrices

import neula
from neula.engines import EmulatedEngine
from neula.engines.shipped import EMULATED


class Queueing(EmulatedEngine):
    """An engine whose first link looks at nothing, as that of a GPU."""

    tuning = replace(EMULATED, prelaunched_steps=3)


normal = partial(matrices.normal, seed=None)


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
    function = lambda a, b, w: neula.lstsq(a, b, weights=w, **asked).x  # noqa: E731
    assert torch.autograd.gradcheck(function, operands, fast_mode=True)
