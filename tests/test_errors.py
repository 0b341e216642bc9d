"""Where warnings point."""

from __future__ import annotations

import warnings

import pytest
import torch

import neula


@pytest.mark.parametrize("compiled", [False, True])
def test_warnings_name_the_line_of_the_caller(compiled, rng):
    a = torch.from_numpy(rng.standard_normal((60, 60)))

    def factorize(a: torch.Tensor) -> torch.Tensor:
        return neula.qr(a + 1, algorithm="rgsqrf", compute="bf16", engine="emulated").R

    function = torch.compile(factorize, backend="eager") if compiled else factorize
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(a)
    found = [w for w in caught if w.category is neula.AccuracyWarning]
    assert [w.filename for w in found] == [__file__]
