"""One linear system by LAPACK beyond the orders whose inverse is formed: what is measured is a bound."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from tests.campaign.oracle import System

import neula
from neula.algorithms.lapack import square
from neula.algorithms.lapack.square import SquareSystem
from neula.algorithms.spectra.inverse_norm import EXPLICIT
from neula.certificates.forward_error import MAX_RATE

pytestmark = pytest.mark.usefixtures("by_kernels_or_numpy")

N = EXPLICIT + 3


def with_values(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A random matrix with these singular values."""
    left, right = (np.linalg.qr(rng.standard_normal((N, N)))[0] for _ in range(2))
    return (left * values) @ right


def one_small(condition: float) -> np.ndarray:
    return np.append(np.ones(N - 1), 1 / condition)


KINDS = {
    "normal": lambda rng: rng.standard_normal((N, N)),
    "orthogonal": lambda rng: with_values(np.ones(N), rng),
    "geometric 1e8": lambda rng: with_values(np.logspace(0, -8, N), rng),
    "one small 1e11": lambda rng: with_values(one_small(1e11), rng),
    "one large 1e11": lambda rng: with_values(1 / one_small(1e11)[::-1] * 1e-11, rng),
    "half small 1e7": lambda rng: with_values(np.where(np.arange(N) < N // 2, 1.0, 1e-7), rng),
    "growth": lambda rng: np.asfortranarray(np.eye(N) - np.tril(np.ones((N, N)), -1) + np.eye(N)[:, -1:]),
}


def found(a: np.ndarray, b: np.ndarray, *, large: bool, **how: bool) -> SquareSystem | None:
    how = {"positive": False, "single": False, "doubled": False} | how
    with np.errstate(all="ignore"):
        one = SquareSystem.factorize(a, [b], large=large, **how)
    return None if one is None else one[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_the_forward_error_is_a_bound(kind: str, dtype: str) -> None:
    rng = np.random.default_rng(5)
    a = KINDS[kind](rng).astype(dtype, order="K") * 2.0**20
    sides = [rng.standard_normal(N), a.astype(float) @ rng.standard_normal(N), np.eye(N)[0]]
    b = np.array(sides).T.astype(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", neula.AccuracyWarning)
        result = neula.solve(a, b)
    exact = np.column_stack([System(a, b[:, [k]]).rounded_solution(N) for k in range(3)])
    sizes = np.linalg.norm(a.astype(float), axis=0)[:, None]
    errors = np.linalg.norm(sizes * (result.x - exact), axis=0) / np.linalg.norm(sizes * exact, axis=0)
    assert (errors <= result.forward_errors).all()


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_singular_matrix_has_no_factors_that_are_good(large: bool, single: bool, order: str) -> None:
    """Rounding errors make its factors regular, and a b in its range hides that from residuals."""
    rng = np.random.default_rng(6)
    for rank in (N - 1, N - 2, N // 2):
        a = rng.integers(-3, 4, (N, N)).astype(float)
        a[rank:] = rng.integers(-1, 2, (N - rank, 3)) @ a[:3] + a[3:4]
        a = np.array(a.astype("f4") if single else a, order=order)
        assert found(a, a.astype(float) @ np.ones(N), large=large, single=single) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positive", [False, True])
def test_both_libraries_measure_the_same(kind: str, positive: bool) -> None:
    a, b = KINDS[kind](np.random.default_rng(7)), np.random.default_rng(8).standard_normal(N)
    if positive:
        a = a @ a.T + np.eye(N)
    numpys, torchs = (found(a, b, large=large, positive=positive) for large in (False, True))
    assert (numpys is None) == (torchs is None)
    if numpys is None or torchs is None:
        return
    assert max(numpys.rate, torchs.rate) <= MAX_RATE
    assert torchs.condition == pytest.approx(numpys.condition, rel=1e-3)
    np.testing.assert_allclose(
        torchs.first[0], numpys.first[0], rtol=0, atol=1e-3 * abs(numpys.first[0]).max()
    )
    # A step of the power method from a random vector is not far below the largest singular value.
    sizes = np.linalg.norm(a, axis=0)
    assert 0.1 <= numpys.condition / np.linalg.cond(a / sizes) <= 1.001


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("order", ["C", "F"])
def test_lengths_are_summed_block_by_block(large: bool, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a = np.array(np.random.default_rng(9).standard_normal((N, N)), order=order)
    monkeypatch.setattr(square, "BLOCK", 10 * N)
    rows, columns = square._squares(a, large=large)
    np.testing.assert_allclose(rows, (a**2).sum(1), rtol=N * 2**-52)
    np.testing.assert_allclose(columns, (a**2).sum(0), rtol=N * 2**-52)
    a[5, 7] = np.nan
    assert found(a, np.ones(N), large=large) is None


def test_whether_the_residual_is_longer_than_b() -> None:
    a, b = np.eye(N) + 0.1, np.ones(N)
    system = found(a, b, large=False)
    assert system is not None
    residual = np.zeros(N)
    assert system.longest(residual, np.full(N, 1e-20), 1.0) <= 1.0
    assert not system.longest(residual, np.full(N, 1.0), 1.0) <= 1.0
    assert not system.longest(residual, np.full(N, np.nan), 1.0) <= 1.0
    # Orthogonal to the large singular vector of A: bounds are not enough, and the product decides.
    lost = np.zeros(N)
    lost[:2] = 0.5, -0.5
    assert system.longest(residual, lost, 0.75) <= 0.75
