"""Pseudoinverses: Penrose's conditions, shapes, formats, ranks, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.matrices import normal_array

import neula
from neula.io.matrices import random_matrix

EPS = 2.0**-52


def penrose(a: np.ndarray, x: np.ndarray) -> float:
    """The largest violation of the four conditions, relative to the norms of their terms."""
    norm = np.linalg.norm
    size = norm(a) * norm(x)
    ax, xa = a @ x, x @ a
    return max(
        norm(ax @ a - a) / (size * norm(a)),
        norm(xa @ x - x) / (size * norm(x)),
        norm(ax - ax.T) / size,
        norm(xa - xa.T) / size,
    )


@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (6, 1), (5, 5), (40, 12), (12, 40), (130, 31)])
@pytest.mark.parametrize("engine", ["cpu", "emulated"])
def test_full_rank(shape: tuple[int, int], engine: str) -> None:
    a = normal_array(*shape)
    x = neula.pinv(a, engine=engine)
    assert x.shape == shape[::-1]
    assert penrose(a, x) <= 100 * EPS
    np.testing.assert_allclose(x, np.linalg.pinv(a), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("shape", [(900, 160), (160, 900), (300, 300), (520, 500)])
def test_larger_ones(shape: tuple[int, int]) -> None:
    """Which are not solved together."""
    a = normal_array(*shape)
    x = neula.pinv(a)
    assert penrose(a, x) <= 100 * EPS
    np.testing.assert_allclose(x, np.linalg.pinv(a), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("shape", [(60, 20), (20, 60), (30, 30), (700, 150), (150, 700)])
def test_low_rank(shape: tuple[int, int]) -> None:
    a = normal_array(shape[0], 8) @ normal_array(8, shape[1], seed=1)
    x = neula.pinv(a)
    assert np.linalg.matrix_rank(x) == 8
    assert penrose(a, x) <= 1000 * EPS
    np.testing.assert_allclose(x, np.linalg.pinv(a, rcond=1e-10), atol=1e-12)


@pytest.mark.parametrize("cond", [1e3, 1e8, 1e12])
def test_ill_conditioned_ones_keep_their_digits(cond: float) -> None:
    """Compared with the exact inverse of the stored matrix, by products in twice the precision."""
    a = random_matrix("geometric", 30, 30, cond=cond).numpy()
    x = neula.pinv(a)
    exact = np.array(_exact_inverse(a), dtype=float)
    assert np.linalg.norm(x - exact) <= 4 * EPS * np.linalg.norm(exact)


def _exact_inverse(a: np.ndarray) -> list[list[float]]:
    import flint

    with flint.ctx.workprec(400):
        return [[float(v.mid()) for v in row] for row in flint.arb_mat(a.tolist()).inv().tolist()]


def test_rcond() -> None:
    u, v = np.linalg.qr(normal_array(50, 50))[0], np.linalg.qr(normal_array(40, 40, seed=1))[0]
    a = u[:, :40] * np.repeat([1.0, 1e-7], 20) @ v.T
    assert np.linalg.norm(neula.pinv(a), 2) > 1e6
    assert np.linalg.norm(neula.pinv(a, 1e-4), 2) < 10
    np.testing.assert_allclose(neula.pinv(a.T, rcond=1e-4).T, neula.pinv(a, rcond=1e-4), atol=1e-5)


def test_batches_and_nan() -> None:
    a = normal_array(2, 3, 9, 4)
    a[0, 1] = normal_array(9, 2, seed=2) @ normal_array(2, 4, seed=3)
    np.testing.assert_allclose(neula.pinv(a), np.linalg.pinv(a, rcond=1e-12), atol=1e-11)
    wide = np.ascontiguousarray(a.swapaxes(-1, -2))
    np.testing.assert_allclose(neula.pinv(wide), np.linalg.pinv(wide, rcond=1e-12), atol=1e-11)
    a[1, 2, 3, 3] = np.nan
    with pytest.warns(neula.AccuracyWarning, match="pseudoinverse"):
        x = neula.pinv(a)
    assert np.isnan(x[1, 2]).all()
    assert np.isfinite(x[:1]).all()
    with pytest.raises(ValueError, match=r"A\[1, 2, 3, 3\] is nan"):
        neula.pinv(a, strict=True)


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (4, 0), (3, 0, 4), (0, 3, 4), (2, 4, 0)])
def test_empty(shape: tuple[int, ...]) -> None:
    assert neula.pinv(np.empty(shape)).shape == (*shape[:-2], shape[-1], shape[-2])


def test_zero_and_zero_lines() -> None:
    assert (neula.pinv(np.zeros((4, 3))) == 0).all()
    a = normal_array(8, 5)
    a[:, 2] = a[3] = 0
    x = neula.pinv(a)
    assert (x[2] == 0).all()
    assert (x[:, 3] == 0).all()
    np.testing.assert_allclose(x, np.linalg.pinv(a), atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_formats(dtype: torch.dtype) -> None:
    a = torch.from_numpy(normal_array(30, 10)).to(dtype)
    x = neula.pinv(a)
    assert x.dtype == dtype
    error = (x.double() - torch.linalg.pinv(a.double())).norm() / x.double().norm()
    assert error <= torch.finfo(dtype).eps


def test_no_gradient_below_full_rank() -> None:
    a = torch.ones(4, 2, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match="rank 1, not 2"):
        neula.pinv(a).sum().backward()


def test_what_is_refused() -> None:
    a = normal_array(5, 4)
    with pytest.raises(ValueError, match="rcond must be at least 0"):
        neula.pinv(a, -1.0)
    with pytest.raises(ValueError, match="must be a matrix"):
        neula.pinv(a[0])
    a[2, 3] = np.inf
    with pytest.raises(ValueError, match=r"A\[2, 3\] is inf"):
        neula.pinv(a)


def test_singular_values_at_rcond_are_reported() -> None:
    a = random_matrix("geometric", 40, 40, cond=1e17).numpy()
    with pytest.warns(neula.AccuracyWarning, match="pseudoinverse is not certified"):
        neula.pinv(a)
    with pytest.raises(neula.AccuracyError):
        neula.pinv(a, strict=True)
