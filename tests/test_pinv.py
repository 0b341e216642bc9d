"""Pseudoinverses: Penrose's conditions, shapes, formats, ranks, what is refused."""

from __future__ import annotations

from functools import partial

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


def of_rank(rank: int, m: int, n: int) -> np.ndarray:
    return normal_array(m, rank) @ normal_array(rank, n, seed=1)


def with_zero_lines() -> np.ndarray:
    a = normal_array(8, 5)
    a[:, 2] = a[3] = 0
    return a


SMALL = [(1, 1), (1, 6), (6, 1), (5, 5), (40, 12), (12, 40), (130, 31)]
NOT_TOGETHER = [(900, 160), (160, 900), (300, 300)]
LOW_RANK = [(60, 20), (20, 60), (30, 30), (700, 150), (150, 700)]
CASES = {
    **{f"{m} x {n}": partial(normal_array, m, n) for m, n in SMALL + NOT_TOGETHER},
    **{f"{m} x {n} of rank 8": partial(of_rank, 8, m, n) for m, n in LOW_RANK},
    "zero": lambda: np.zeros((4, 3)),
    "a zero row and column": with_zero_lines,
}


@pytest.mark.parametrize("case", CASES)
def test_every_matrix(case: str) -> None:
    a = CASES[case]()
    expected = np.linalg.pinv(a, rcond=1e-10)
    for engine in ("cpu", "emulated") if max(a.shape) < 140 else ("cpu",):
        x = neula.pinv(a, engine=engine)
        assert x.shape == a.shape[::-1]
        assert case == "zero" or penrose(a, x) <= 1000 * EPS
        np.testing.assert_allclose(x, expected, rtol=1e-8, atol=1e-10)
        # A line of zeros has one in the pseudoinverse; the rank is that of A.
        assert not x[~a.any(0)].any()
        assert not x[:, ~a.any(1)].any()
        assert np.linalg.matrix_rank(x) == np.linalg.matrix_rank(a)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        if case == "40 x 12":
            narrow = torch.from_numpy(a).to(dtype)
            x = neula.pinv(narrow)
            assert x.dtype == dtype
            error = (x.double() - torch.linalg.pinv(narrow.double())).norm() / x.double().norm()
            assert error <= torch.finfo(dtype).eps


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
