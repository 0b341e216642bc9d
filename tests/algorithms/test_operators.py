"""The operator of a least-squares problem against products in 80-bit arithmetic."""

from typing import Any

import numpy as np
import pytest
import torch

import neula
from half_engine import HalfEngine
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.algorithms.scaling import power_of_two_scales
from neula.io.matrices import random_matrix
from neula.problems.least_squares import refined

SIZES = 10.0 ** np.linspace(-30, 30, 300)


@pytest.mark.parametrize("weights", [*(np.full(300, w) for w in (1e-160, 1e-40, 1e25, 1e160)), 1 / SIZES])
@pytest.mark.parametrize("compute", ["fp16", "fp32"])
def test_weights_in_any_unit(weights: np.ndarray, compute: str) -> None:
    """All rows in other units, or rows of 1e30 whose weights are 1e-30: nothing in between overflows, and x
    is that without weights.
    """
    a, b = (random_matrix("normal", 300, n, seed=n).numpy() for n in (40, 1))
    rows = SIZES[:, None] if weights[0] != weights[1] else 1.0
    options = {"weights": weights, "algorithm": "cgls", "compute": compute, "engine": "emulated"}
    found = neula.lstsq(a * rows, b * rows, **options)
    expected = np.linalg.lstsq(a, b, rcond=None)[0]
    assert found.converged
    np.testing.assert_allclose(found.x, expected, rtol=0, atol=1e-13 * np.linalg.norm(expected))


@pytest.mark.parametrize("damp", [0.0, 0.7])
def test_an_r_in_half_precision_comes_from_a_matrix_in_half_precision(
    damp: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matrix to factorize is stored in fp16, rounded once; for other formats, in the working storage."""
    a, b = random_matrix("normal", 330, 150, seed=1), random_matrix("normal", 330, 2, seed=2)
    found: list[torch.Tensor] = []

    def factorized(work: torch.Tensor, *others: Any, **named: Any) -> Any:
        found.append(work.clone())
        return rgsqrf(work, *others, **named)

    monkeypatch.setattr(refined, "rgsqrf", factorized)
    for compute, dtype in (("fp16", torch.float16), ("fp32", torch.float32)):
        result = neula.lstsq(a, b, engine=HalfEngine("cpu"), compute=compute, damp=damp)
        assert result.converged
        work = found.pop()
        assert work.dtype == dtype
        scales = power_of_two_scales(a.abs().amax(0).clamp_min(damp))
        expected = torch.cat([a, damp * torch.eye(150)]) if damp else a
        assert torch.equal(work[: len(expected)], (expected * scales).to(dtype))
        assert not work[len(expected) :].any()
