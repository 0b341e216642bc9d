"""The operator of a least-squares problem against products in 80-bit arithmetic."""

from typing import Any

import numpy as np
import pytest
import torch

import neula
from campaign.oracle import LeastSquares
from half_engine import HalfEngine
from neula.algorithms.krylov.cgls import LeastSquaresOperator
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.algorithms.scaling import power_of_two_scales
from neula.io.matrices import random_matrix
from neula.problems.least_squares import refined

U64 = 2.0**-53
SHAPES = pytest.mark.parametrize("shape", [(1, 1), (300, 1), (33, 33), (129, 7), (7, 33)])


def close(computed: torch.Tensor, factor: torch.Tensor, x: torch.Tensor) -> bool:
    """Within ``(k + 2) u |factor| |x|`` of their product, elementwise."""
    a, y = (z.numpy().astype(np.longdouble) for z in (factor, x))
    exact, bound = a @ y, (len(x) + 2) * U64 * (np.abs(a) @ np.abs(y))
    return computed.shape == exact.shape and bool((np.abs(computed.numpy() - exact) <= bound).all())


@SHAPES
@pytest.mark.parametrize("k", [1, 2, 5])
def test_products(shape: tuple[int, int], k: int) -> None:
    a = random_matrix("normal", *shape)
    operator = LeastSquaresOperator(a)
    x, y = random_matrix("normal", shape[1], k, seed=2), random_matrix("normal", shape[0], k, seed=3)
    before = x.clone(), y.clone(), a.clone()
    assert operator.shape == shape
    assert close(operator.matmul(x), a, x)
    assert close(operator.rmatmul(y), a.T, y)
    for given, kept in zip((x, y, a), before, strict=True):
        assert torch.equal(given, kept)


@SHAPES
@pytest.mark.parametrize("k", [1, 2])
def test_both_products_at_once(shape: tuple[int, int], k: int) -> None:
    operator = LeastSquaresOperator(random_matrix("normal", *shape))
    x, b = random_matrix("normal", shape[1], k, seed=2), random_matrix("normal", shape[0], k, seed=3)
    y, z = operator.normal(x)
    assert torch.equal(y, operator.matmul(x))
    assert torch.equal(z, operator.rmatmul(y))
    residual, gradient = operator.normal(x, b)
    assert torch.equal(residual, b - y)
    assert torch.equal(gradient, operator.rmatmul(residual))


@pytest.mark.parametrize("k", [1, 3])
def test_products_with_views(k: int) -> None:
    store = random_matrix("normal", 80, 120)
    for a in (store[::2, ::3], store.T, store[:, 5:6]):
        operator = LeastSquaresOperator(a)
        x, y = random_matrix("normal", a.shape[1], k), random_matrix("normal", a.shape[0], k)
        assert close(operator.matmul(x), a, x)
        assert close(operator.rmatmul(y), a.T, y)


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
