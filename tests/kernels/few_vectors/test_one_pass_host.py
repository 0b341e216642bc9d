"""Products in one pass over a matrix, against plain ones of NumPy."""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from neula import _core
from neula.kernels import core as core_module
from neula.kernels.few_vectors import one_pass_host
from neula.kernels.few_vectors.one_pass_host import takes

U = 2.0**-53
SHAPES = [(1, 1), (9, 8), (7, 17), (257, 100), (40, 300)]


@pytest.fixture(params=[1, 3, 64], autouse=True)
def _threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the matrix is."""
    monkeypatch.setattr(one_pass_host, "EACH", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)


def numbers(*shape: int, dtype: type[np.floating] = np.float64, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def products(a: np.ndarray, *given: np.ndarray | None, **which: bool) -> list[np.ndarray]:
    a, *given = (None if x is None else torch.from_numpy(x) for x in (a, *given))
    return [np.asarray(x) for x in one_pass_host.one_pass(a, *given, **which)]


def gram_times(a: np.ndarray, x: np.ndarray) -> np.ndarray:
    return products(a, x, image=False)[1]


def close(found: np.ndarray, a: np.ndarray, x: np.ndarray, b: np.ndarray | float = 0.0) -> bool:
    """Whether it is ``b - A x`` up to rounding errors of sums: ``(n + 2) u`` times their terms, twice since
    the comparison has errors, too.
    """
    a = a.astype(np.float64)
    size = np.abs(a) @ np.abs(x) + np.abs(b)
    return bool((np.abs(found - (b - a @ x)) <= 2 * (a.shape[1] + 2) * U * size).all())


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("shape", SHAPES)
def test_products(shape: tuple[int, int]) -> None:
    for dtype, several in itertools.product((np.float64, np.float32), ((), (1,), (2,), (5,))):
        a = numbers(*shape, dtype=dtype)
        x, b = numbers(shape[1], *several, seed=1), numbers(shape[0], *several, seed=2)
        (image, _), (residual, back) = products(a, x, back=False), products(a, x, b)
        assert image.shape == residual.shape == b.shape
        assert close(-image, a, x)
        assert close(residual, a, x, b)
        assert back.shape == x.shape
        assert close(-back, a.T, residual)
        assert close(-products(a, None, b, image=False)[1], a.T, b)
        assert close(-gram_times(a, x), a.T, image)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_rows_apart_are_read_as_they_are(dtype: type[np.floating]) -> None:
    room = np.full((40, 20), np.nan, dtype)
    a = room[1:-1:3, 2:15]
    a[:] = numbers(*a.shape, dtype=dtype)
    x = numbers(13)
    assert takes(a)
    assert np.array_equal(gram_times(a, x), gram_times(a.copy(), x))


@pytest.mark.parametrize("where", [(0, 0), (5, 9), (8, 9)])
@pytest.mark.parametrize("what", [np.nan, np.inf])
def test_what_is_not_finite_is_seen_there_alone(where: tuple[int, int], what: float) -> None:
    a = numbers(9, 10)
    a[where] = what
    residual, back = products(a, np.ones(10), np.ones(9))
    assert (~np.isfinite(residual)).nonzero()[0].tolist() == [where[0]]
    assert not np.isfinite(back).any()  # that residual counts in all of them
    back = products(a, None, np.ones(9), image=False)[1]
    assert (~np.isfinite(back)).nonzero()[0].tolist() == [where[1]]


@pytest.fixture
def _own_threads() -> Iterator[None]:
    yield
    _core.share_threads(core_module._pool_of_torch())


@pytest.mark.usefixtures("_own_threads")
def test_threads_of_a_pool() -> None:
    """All of its threads are asked, if there are several parts; without a pool threads are started."""
    a, x = numbers(1030, 13), numbers(13, seed=1)
    shared, calls = gram_times(a, x), []

    @ctypes.CFUNCTYPE(
        None, ctypes.CFUNCTYPE(None, ctypes.c_void_p), ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
    )
    def pool(function, given, threads, flags):  # type: ignore[no-untyped-def]
        calls.append(threads)
        function(given)
        function(given)  # of a second thread, to which nothing is left

    _core.share_threads(ctypes.cast(pool, ctypes.c_void_p).value)
    pooled = gram_times(a, x)
    _core.share_threads(0)
    assert np.array_equal(pooled, shared)
    assert np.array_equal(gram_times(a, x), shared)
    assert calls == [0] * (torch.get_num_threads() > 1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="another OpenMP, or none")
def test_the_pool_is_torchs() -> None:
    assert core_module._pool_of_torch() != 0


def test_no_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def one_pass(self, *given: object) -> None:
            raise MemoryError

    monkeypatch.setattr(one_pass_host, "core", Full)
    with pytest.raises(MemoryError, match="sums of 3 vectors of 4 numbers"):
        products(numbers(6, 4), np.ones((4, 3)))
