"""The operator of a least-squares problem against the stacked matrix, written out."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import neula
from half_engine import HalfEngine
from neula.algorithms.krylov.operators import LeastSquaresOperator
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.algorithms.scaling import power_of_two_scales
from neula.engines import ENGINES
from neula.io.matrices import random_matrix
from neula.problems.least_squares import refined

U64 = 2.0**-53
SHAPES = [(1, 1), (300, 1), (33, 33), (129, 7), (7, 33)]
CASES = list(itertools.product(SHAPES, (False, True), (0.0, 0.7)))


def make(m: int, n: int, weighted: bool, damp: float) -> LeastSquaresOperator:
    weights = random_matrix("uniform", m, 1, seed=1)[:, 0] if weighted else None
    return LeastSquaresOperator(random_matrix("normal", m, n), weights, damp)


def stacked(operator: LeastSquaresOperator) -> np.ndarray:
    """``[diag(w) A; damp I]`` in 80-bit arithmetic."""
    a = operator.a.numpy().astype(np.longdouble)
    top = a if operator.weights is None else operator.weights.numpy().astype(np.longdouble)[:, None] * a
    return np.vstack([top, operator.damp * np.eye(a.shape[1])]) if operator.damp else top


def close(computed: torch.Tensor, factor: np.ndarray, x: torch.Tensor) -> bool:
    """Within ``(k + 2) u |factor| |x|`` of their product, elementwise: k products, a weight, an addition."""
    exact = factor @ x.numpy().astype(np.longdouble)
    bound = (x.shape[0] + 2) * U64 * (np.abs(factor) @ np.abs(x.numpy()))
    return computed.shape == exact.shape and bool((np.abs(computed.numpy() - exact) <= bound).all())


@pytest.mark.parametrize(("shape", "weighted", "damp"), CASES)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_products(shape: tuple[int, int], weighted: bool, damp: float, k: int) -> None:
    operator = make(*shape, weighted, damp)
    factor = stacked(operator)
    x, y = random_matrix("normal", shape[1], k, seed=2), random_matrix("normal", factor.shape[0], k, seed=3)
    before = x.clone(), y.clone(), operator.a.clone()
    assert operator.shape == factor.shape
    assert close(operator.matmul(x), factor, x)
    assert close(operator.rmatmul(y), factor.T, y)
    for given, kept in zip((x, y, operator.a), before, strict=True):
        assert torch.equal(given, kept)


@pytest.mark.parametrize(("shape", "weighted", "damp"), CASES)
@pytest.mark.parametrize("k", [1, 2])
def test_both_products_at_once(shape: tuple[int, int], weighted: bool, damp: float, k: int) -> None:
    operator = make(*shape, weighted, damp)
    x, b = random_matrix("normal", shape[1], k, seed=2), random_matrix("normal", operator.shape[0], k, seed=3)
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
        operator = LeastSquaresOperator(a, None, 0.5)
        x, y = random_matrix("normal", a.shape[1], k), random_matrix("normal", sum(a.shape), k)
        assert close(operator.matmul(x), stacked(operator), x)
        assert close(operator.rmatmul(y), stacked(operator).T, y)


@pytest.mark.parametrize(("shape", "weighted", "damp"), CASES)
def test_right_hand_side(shape: tuple[int, int], weighted: bool, damp: float) -> None:
    operator = make(*shape, weighted, damp)
    b = random_matrix("normal", shape[0], 3, seed=4)
    before = b.clone()
    rhs = operator.right_hand_side(b)
    weights = torch.ones(shape[0]) if operator.weights is None else operator.weights
    assert torch.equal(rhs[: shape[0]], b * weights.double()[:, None])
    assert rhs.shape == (operator.shape[0], 3)
    assert not rhs[shape[0] :].any()
    assert torch.equal(b, before)


@pytest.mark.parametrize(("shape", "weighted", "damp"), CASES)
def test_dense(shape: tuple[int, int], weighted: bool, damp: float) -> None:
    operator = make(*shape, weighted, damp)
    assert close(operator.dense(), stacked(operator), torch.eye(shape[1], dtype=torch.float64))
    if not weighted and not damp:
        assert operator.dense() is operator.a


@pytest.mark.parametrize(("shape", "weighted", "damp"), CASES)
@pytest.mark.parametrize("name", ["cpu", "emulated"])
def test_column_max(shape: tuple[int, int], weighted: bool, damp: float, name: str) -> None:
    operator = make(*shape, weighted, damp)
    largest = operator.column_max(ENGINES[name]("cpu", "fp32"))
    expected = np.abs(stacked(operator)).max(0)
    assert (np.abs(largest.numpy() - expected) <= 2 * U64 * expected).all()


def test_column_max_counts_a_damping_of_either_sign() -> None:
    operator = LeastSquaresOperator(torch.full((4, 2), 0.5, dtype=torch.float64), None, -2.0)
    assert operator.column_max(ENGINES["cpu"]("cpu", "fp32")).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(("shape", "weighted", "damp"), CASES)
@pytest.mark.parametrize("format", ["fp32", "fp64"])
@pytest.mark.parametrize("name", ["cpu", "emulated"])
def test_fill(shape: tuple[int, int], weighted: bool, damp: float, format: str, name: str) -> None:
    """The stacked, scaled matrix in working storage; a weight costs a rounding more."""
    engine = ENGINES[name]("cpu", format)
    operator = make(*shape, weighted, damp)
    scales = power_of_two_scales(operator.column_max(engine))
    work = operator.fill(engine, scales)
    expected = stacked(operator) * scales.numpy()
    u = U64 if format == "fp64" else 2.0**-24
    assert work.shape == expected.shape
    assert work.dtype == engine.storage
    assert work.stride() == (1, work.shape[0]), "column-major"
    assert (np.abs(work.double().numpy() - expected) <= 3 * u * np.abs(expected)).all()


@pytest.mark.parametrize("weight", [1e-40, 1e-25, 1e25, 1e40])
@pytest.mark.parametrize("format", ["fp32", "fp64"])
def test_weights_in_any_unit(weight: float, format: str) -> None:
    """All rows in other units: the scales undo it, and nothing in between may overflow."""
    engine = ENGINES["cpu"]("cpu", format)
    weights = torch.full((30,), weight, dtype=torch.float64)
    operator = LeastSquaresOperator(random_matrix("normal", 30, 4), weights)
    scales = power_of_two_scales(operator.column_max(engine))
    expected = operator.a.numpy() * (weight * scales.numpy())
    u = U64 if format == "fp64" else 2.0**-24
    work = operator.fill(engine, scales).double().numpy()
    assert np.isfinite(work).all()
    assert (np.abs(work - expected) <= 3 * u * np.abs(expected)).all()


def test_rows_that_a_weight_rescues() -> None:
    """Rows of 1e30 with weights of 1e-30 are rows of 1."""
    engine = ENGINES["cpu"]("cpu", "fp32")
    a = random_matrix("normal", 30, 4)
    sizes = 10.0 ** torch.linspace(-30, 30, 30, dtype=torch.float64)
    operator = LeastSquaresOperator(a * sizes[:, None], 1 / sizes)
    scales = power_of_two_scales(operator.column_max(engine))
    expected = a.numpy() * scales.numpy()
    work = operator.fill(engine, scales).double().numpy()
    assert (np.abs(work - expected) <= 4 * 2.0**-24 * np.abs(expected)).all()


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
