"""QR with column pivoting: factors, orders, and what R shows of the rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch

import neula
from neula.algorithms.orthogonal.pivots import (
    eliminated_order,
    greedy_orders,
    lapack_factors,
    sketched_pivots,
)
from neula.algorithms.orthogonal.strong_rrqr import _Interchange, _interchanged, first_weak, strong_order
from neula.engines import CpuEngine, EmulatedEngine, Tuning
from neula.problems.orthogonal import pivoted

EPS = 2.0**-52


def normal(m: int, n: int) -> np.ndarray:
    return np.random.default_rng(m * n).standard_normal((m, n))


def with_singular_values(s: np.ndarray, m: int) -> np.ndarray:
    u, v = np.linalg.qr(normal(m, len(s)))[0], np.linalg.qr(normal(len(s), len(s)))[0]
    return u * s @ v.T


def kahan(n: int, angle: float = 1.2, perturbed: float = 25.0) -> np.ndarray:
    """Kahan, "Numerical linear algebra", 1966; perturbed so that no rounding error interchanges columns."""
    s, c = np.sin(angle), np.cos(angle)
    a = s ** np.arange(n)[:, None] * (np.eye(n) - c * np.triu(np.ones((n, n)), 1))
    return a + perturbed * EPS * np.diag(np.arange(n, 0, -1.0))


def gu_eisenstat(n: int, k: int, c: float = 0.285, mu: float = 1e-6) -> np.ndarray:
    """Gu and Eisenstat 1996, Example 3: pivoting by norms interchanges nothing, and R22 is too large."""
    s = np.sqrt(1 - c * c)
    a = mu * np.eye(n)
    scales = s ** np.arange(k - 1)
    a[: k - 1, : k - 1] = scales[:, None] * (np.eye(k - 1) - c * np.triu(np.ones((k - 1, k - 1)), 1))
    a[: k - 1, n - 1] = -c * scales
    return a


def stewart(n: int, *, gap: float = 0.1) -> np.ndarray:
    """Stewart, "Rank degeneracy", 1984: singular values fall, end half-way, and noise is added."""
    s = np.geomspace(1, 1e-3, n)
    s[n // 2 :] = 0
    return with_singular_values(s, n) + gap * s[n // 2 - 1] / np.sqrt(n) * 0.1 * normal(n, n)


def devils_stairs(n: int, step: int = 15) -> np.ndarray:
    """Stewart, "The QLP approximation to the singular value decomposition", 1999."""
    return with_singular_values(10.0 ** -(np.arange(n) // step * 0.6), n)


def kernel(n: int) -> np.ndarray:
    x = np.linspace(0, 1, n)
    return np.exp(-((x[:, None] - x) ** 2) / 0.01)


REVEALED: dict[str, tuple[Callable[[], np.ndarray], float]] = {
    "kahan": (lambda: kahan(96), 1e-13),
    "kahan of order 300": (lambda: kahan(300, 1.25), 1e-13),
    "gu-eisenstat": (lambda: gu_eisenstat(96, 48), 1e-5),
    # Smallest singular values below the tolerance, and distances of columns above it.
    "kahan at the tolerance": (lambda: kahan(60, 1.1), 1e-13),
    "gu-eisenstat at the tolerance": (lambda: gu_eisenstat(150, 75, 0.2, 1e-4), 1e-10),
    "stewart": (lambda: stewart(100), 2e-4),
    "devil's stairs": (lambda: devils_stairs(150), 1e-3),
    "kernel": (lambda: kernel(150), 1e-13),
    "low rank": (lambda: normal(150, 40) @ normal(40, 120), 1e-13),
    "noise of 1e-9": (lambda: with_singular_values(np.repeat([1.0, 1e-9], 60), 150), 1e-6),
    "tall": (lambda: kahan(96)[np.arange(288) // 3], 1e-13),
}


class WithTournaments(CpuEngine):
    """Finds pivots as a GPU does."""

    @property
    def tuning(self) -> Tuning:
        return replace(super().tuning, tournaments=True)


class Eliminating(EmulatedEngine):
    """Finds all pivots at once, as a GPU does."""

    @property
    def tuning(self) -> Tuning:
        return replace(
            super().tuning, tournaments=True, pivoted_panel=128, pivoted_inner_panel=32, sketched_pivots=40
        )


@pytest.mark.parametrize("name", REVEALED)
@pytest.mark.parametrize("by", ["lapack", "sketches", "tournaments", "columns"])
def test_the_rank_is_revealed(name: str, by: str) -> None:
    """At the numerical rank k: ``||R22|| <= 10 sqrt(n) sigma_(k+1)``, and likewise for R11."""
    make, tolerance = REVEALED[name]
    a = torch.from_numpy(make())
    a = a / a.abs().max()
    n = a.shape[1]
    if by in ("sketches", "tournaments"):
        engine = CpuEngine("cpu", "fp64") if by == "sketches" else WithTournaments("cpu", "fp64")
        order, _ = sketched_pivots(a.T.clone().T, engine, 32)
    else:
        order = lapack_factors(a[None])[2][0] if by == "lapack" else greedy_orders(a[None].clone())[0]
    assert sorted(order.tolist()) == list(range(n))
    s = torch.linalg.svdvals(a)
    better = strong_order(torch.linalg.qr(a[:, order], mode="r")[1], tolerance * float(s[0]))
    order = order if better is None else order[better]
    assert_revealed(a, order, tolerance)


@pytest.mark.parametrize(
    ("shape", "i", "j", "rank"),
    [((30, 40), 3, 33, 20), ((30, 30), 0, 29, 30), ((9, 9), 4, 8, 5), ((1, 3), 0, 2, 1)],
)
def test_an_interchange_leaves_a_triangle(shape: tuple[int, int], i: int, j: int, rank: int) -> None:
    """Whose Gram matrix is that of the columns, at singular values from 1 to 1e-6."""
    k, n = shape
    r = torch.from_numpy(np.triu(normal(k, n)) * np.geomspace(1, 1e-6, k)[:, None])
    row = torch.linalg.inv(r[:rank, :rank])[i, i:]
    places, found = _interchanged(r, _Interchange(i, j, row, rank))
    assert sorted(places) == list(range(n))
    assert places[rank - 1] == (j if j >= rank else i)
    assert torch.equal(found[:, :rank].tril(-1), torch.zeros(k, rank, dtype=r.dtype))
    expected = torch.linalg.qr(r[:, places], mode="r")[1]
    # R errs by rounding errors times the condition number of the block, whatever makes it (Higham, 19.9).
    size = torch.linalg.matrix_norm(r)
    gap = found[:rank].abs() - expected[:rank].abs()
    assert torch.linalg.matrix_norm(gap) <= 10 * n * EPS * size * float(torch.linalg.vector_norm(row) * size)
    gram = found.T @ found - expected.T @ expected
    assert torch.linalg.matrix_norm(gram) <= 10 * n * EPS * size**2


def assert_revealed(a: torch.Tensor, order: torch.Tensor, tolerance: float) -> None:
    (m, n), s = a.shape, torch.linalg.svdvals(a)
    r = torch.linalg.qr(a[:, order], mode="r")[1]
    k = int((s > tolerance * s[0]).sum())
    assert 0 < k < n
    rounding = max(m, n) * EPS * s[0]
    assert torch.linalg.matrix_norm(r[k:, k:], 2) <= 10 * n**0.5 * (s[k] + rounding)
    assert torch.linalg.svdvals(r[:k, :k])[-1] >= (s[k - 1] - rounding) / (10 * n**0.5)


@pytest.mark.parametrize("name", REVEALED)
def test_the_rank_is_revealed_by_elimination(name: str) -> None:
    """In half precision, and in its own scale what is left."""
    make, tolerance = REVEALED[name]
    a = torch.from_numpy(make())
    q, r, order = neula.qr(a, pivoting=True, engine=Eliminating())
    assert sorted(order.tolist()) == list(range(a.shape[1]))
    assert torch.linalg.matrix_norm(a[:, order] - q @ r) <= 1e-14 * torch.linalg.matrix_norm(a)
    assert_revealed(a, order, tolerance)


@pytest.mark.parametrize("shape", [(1, 1), (70, 1), (1, 70), (64, 65), (100, 129), (129, 40), (70, 300)])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e-4])
def test_orders_by_elimination(shape: tuple[int, int], scale: float) -> None:
    a = torch.from_numpy(normal(*shape)) / 8
    a[:, 1:] *= scale
    order = eliminated_order(a.half().T.clone().T, Eliminating(format="fp16"))
    assert sorted(order.tolist()) == list(range(shape[1]))
    if scale < 1:
        assert order[0] == 0


def test_batch_by_elimination() -> None:
    a = torch.from_numpy(normal(130, 300).reshape(3, 130, 100))
    a[0] = a[0] @ torch.diag(10.0 ** -torch.arange(0, 10, 0.1, dtype=a.dtype)) @ a[0, :100]
    a[1, 5, 7] = torch.nan
    with pytest.warns(neula.AccuracyWarning, match="NaN"):
        q, r, order = neula.qr(a, pivoting=True, engine=Eliminating())
    assert order[1].tolist() == list(range(100))
    for i in (0, 2):
        assert first_weak(r[i], 1e-12) is None
        error = torch.linalg.matrix_norm(a[i][:, order[i]] - q[i] @ r[i])
        assert error <= 1e-14 * torch.linalg.matrix_norm(a[i])


@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (1, 5), (40, 40), (200, 37), (37, 120), (7, 7)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
def test_factors(shape: tuple[int, int], dtype: torch.dtype, mode: str) -> None:
    a = torch.from_numpy(normal(*shape)).to(dtype)
    result = neula.qr(a, mode, pivoting=True)
    q, r, order = result
    assert result.converged
    assert len(result) == 3
    assert (order.dtype, r.dtype) == (torch.int64, dtype)
    assert sorted(order.tolist()) == list(range(shape[1]))
    assert r.shape == (shape[0] if mode == "complete" else min(shape), shape[1])
    assert (r.tril(-1) == 0).all()
    assert (r.diagonal() >= 0).all()
    # The first column is the longest, or nearly so.
    assert r[0, 0] >= 0.2 * a.double().norm(dim=0).max()
    if mode == "r":
        assert q is None
        gram = a[:, order].T.double() @ a[:, order].double()
        assert torch.linalg.matrix_norm(r.T.double() @ r.double() - gram) <= 100 * shape[1] * torch.finfo(
            dtype
        ).eps * torch.linalg.matrix_norm(gram)
        return
    eps = torch.finfo(dtype).eps
    assert torch.linalg.matrix_norm(a[:, order] - q @ r) <= 30 * eps * torch.linalg.matrix_norm(a)
    assert torch.linalg.matrix_norm(q.T @ q - torch.eye(q.shape[1])) <= 60 * eps * q.shape[1] ** 0.5


def test_a_batch_is_ordered_as_one_by_one() -> None:
    """Whether R shows a small singular value, hides it, or has several, or A is zero or holds NaN: members do
    not change each other.
    """
    a = np.stack([kahan(40), *normal(7 * 40, 40).reshape(7, 40, 40)])
    a[1, :, 7] = a[1, :, 3] + a[1, :, 20]
    a[2, :, 5] = 1e-15 * a[2, :, 6]
    a[3] = a[3][:, :30] @ a[3][:30]
    a[4] = a[0][:, ::-1]
    a[5] = 0
    a[6, 2, 3] = np.nan
    with pytest.raises(ValueError, match=r"A\[2, 3\] is nan"):
        neula.qr(a[6], pivoting=True)
    with pytest.warns(neula.AccuracyWarning, match="NaN"):
        q, r, order = neula.qr(a.reshape(2, 4, 40, 40), pivoting=True)
    assert (q.shape, r.shape, order.shape) == ((2, 4, 40, 40), (2, 4, 40, 40), (2, 4, 40))
    q, r, order = q.reshape(a.shape), r.reshape(a.shape), order.reshape(8, 40)
    assert np.isnan(q[6]).all()
    others = [0, 1, 2, 3, 4, 5, 7]
    assert [neula.qr(a[i], pivoting=True).P.tolist() for i in others] == order[others].tolist()
    for i in others:
        assert np.linalg.norm(a[i][:, order[i]] - q[i] @ r[i]) <= 1e-14 * np.linalg.norm(a[i])
    assert (np.linalg.norm(r, axis=-1)[1:3, -1] <= 40 * EPS * np.linalg.norm(a[1:3], axis=(1, 2))).all()


def test_what_defeats_pivoting_by_norms() -> None:
    a = kahan(96)
    r, order = scipy.linalg.qr(a, mode="r", pivoting=True)
    smallest = np.linalg.svd(a, compute_uv=False)[-1]
    assert (order == np.arange(96)).all()
    assert abs(r[-1, -1]) > 1e10 * smallest
    q, r, order = neula.qr(a, pivoting=True)
    assert abs(r[-1, -1]) < 10 * np.sqrt(96) * (smallest + 96 * EPS * np.linalg.norm(a, 2))
    assert np.linalg.norm(a[:, order] - q @ r) <= 1e-14 * np.linalg.norm(a)


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_ends_of_the_range(scale: float) -> None:
    a = normal(30, 10) * scale
    q, r, order = neula.qr(a, pivoting=True)
    assert np.abs(a[:, order] / scale - q @ (r / scale)).max() <= 1e-13


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (4, 0), (3, 0, 4), (0, 3, 4), (2, 4, 0)])
def test_empty(shape: tuple[int, ...]) -> None:
    q, r, order = neula.qr(np.empty(shape), pivoting=True)
    k = min(shape[-2:])
    assert q.shape == (*shape[:-1], k)
    assert r.shape == (*shape[:-2], k, shape[-1])
    assert order.shape == (*shape[:-2], shape[-1])
    assert (order == np.arange(shape[-1])).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_rank_is_revealed_on_a_gpu(dtype: torch.dtype) -> None:
    """Of more columns than a sketch has rows, so that tournaments find those that come into question."""
    a = torch.from_numpy(kernel(1500)).to("cuda", dtype)
    q, r, order = neula.qr(a, pivoting=True)
    assert sorted(order.tolist()) == list(range(1500))
    eps = torch.finfo(dtype).eps
    s, r = torch.linalg.svdvals(a.double()), r.double()
    assert torch.linalg.matrix_norm(a[:, order].double() - q.double() @ r) <= 100 * eps * s[0]
    for k in (50, 200, 400):
        rounding = 1500 * eps * s[0]
        assert torch.linalg.matrix_norm(r[k:, k:], 2) <= 10 * 1500**0.5 * (s[k] + rounding)


def test_small_ones_of_a_cpu_need_no_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless R may hide something, or is no good."""
    calls: list[tuple[int, ...]] = []
    chain = pivoted.factorize_pivoted

    def counted(matrices: torch.Tensor, *given: Any, **asked: Any) -> Any:
        calls.append(tuple(matrices.shape[1:]))
        return chain(matrices, *given, **asked)

    monkeypatch.setattr("neula.problems.orthogonal.qr.factorize_pivoted", counted)
    for a in (
        normal(30, 8),
        normal(300, 40).astype(np.float32),
        1e50 * normal(9, 9),
        normal(4, 1),
        normal(4, 7),
    ):
        result = neula.qr(a, pivoting=True)
        assert result.converged
        q, r, order = result
        eps = np.finfo(a.dtype).eps
        assert np.linalg.norm(a[:, order] - q @ r) <= 30 * eps * np.linalg.norm(a)
        assert np.linalg.norm(q.T @ q - np.eye(q.shape[1])) <= 60 * eps * len(order) ** 0.5
        assert result.P.dtype == np.int64
        assert result.R.dtype == a.dtype
    assert not calls
    dependent = normal(30, 8)
    dependent[:, 3] = dependent[:, 5]
    for a in (kahan(90), dependent, 1e-200 * normal(9, 9)):
        neula.qr(a, pivoting=True)
    assert calls == [(90, 90), (30, 8), (9, 9)]
