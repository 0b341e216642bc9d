"""The operator of a least-squares problem against products in 80-bit arithmetic."""

from typing import Any

import numpy as np
import pytest
import torch

import neula
from campaign.oracle import LeastSquares
from half_engine import HalfEngine
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.algorithms.scaling import power_of_two_scales
from neula.io.matrices import random_matrix
from neula.problems.least_squares import refined

U64 = 2.0**-53


@pytest.mark.parametrize("weight", [1e-160, 1e-40, 1e25, 1e160])
@pytest.mark.parametrize("compute", ["fp16", "fp32"])
def test_weights_in_any_unit(weight: float, compute: str) -> None:
    """All rows in other units: nothing in between overflows, and x is that without weights."""
    a, b = (
        random_matrix("normal", 300, 40, seed=1).numpy(),
        random_matrix("normal", 300, 1, seed=2)[:, 0].numpy(),
    )
    weights = np.full(300, weight)
    found = neula.lstsq(a, b, weights=weights, compute=compute, algorithm="cgls", engine="emulated")
    expected = np.linalg.lstsq(a, b, rcond=None)[0]
    assert found.converged
    np.testing.assert_allclose(found.x, expected, rtol=0, atol=1e-13 * np.linalg.norm(expected))


def test_rows_that_a_weight_rescues() -> None:
    """Rows of 1e30 with weights of 1e-30 are rows of 1."""
    a, b = (
        random_matrix("normal", 300, 40, seed=1).numpy(),
        random_matrix("normal", 300, 1, seed=2)[:, 0].numpy(),
    )
    sizes = 10.0 ** np.linspace(-30, 30, 300)
    given = {"weights": 1 / sizes, "algorithm": "cgls", "compute": "fp32"}
    found = neula.lstsq(a * sizes[:, None], b * sizes, **given)
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


@pytest.mark.parametrize("given", [{}, {"damp": 1e-3}, {"damp": 1e-3, "weights": True}, {"weights": True}])
@pytest.mark.parametrize("size", [1.0, 1e200])
def test_a_forward_error_that_is_requested_counts_rounded_weights(given: dict[str, Any], size: float) -> None:
    a = random_matrix("geometric", 60, 20, cond=1e4, seed=1).numpy()
    rng = np.random.default_rng(0)
    b, weights = rng.standard_normal((60, 2)), rng.random(60) + 0.1
    asked = {**given, "weights": weights} if "weights" in given else given
    found = neula.lstsq(size * a, b, algorithm="cgls", certify="forward", **asked)
    judge = LeastSquares(size * a, b, weights=asked.get("weights"), damp=asked.get("damp", 0.0), rcond=0.0)
    assert found.converged
    assert (judge.errors(found.x, 20) <= found.forward_errors).all()
    assert found.forward_error <= 8 * U64
