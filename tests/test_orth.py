"""neula.orth: where it warns that columns are dependent, and the range that rcond= gives, against SciPy."""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import scipy.linalg
import torch
from tests.matrices import normal

import neula
from neula.algorithms.spectra import numerical_rank
from neula.io.matrices import random_matrix

DEPENDENT = r"columns lack full rank.*: the rank is at most {}, not {}, to.*pass rcond="

each_engine = pytest.mark.parametrize("engine", ["cpu", "emulated"])
each_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])


@pytest.fixture
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def of_spectrum(m: int, n: int, s: list[float], seed: int = 0) -> torch.Tensor:
    k = min(m, n)
    u, v = (torch.linalg.qr(normal(size, k, seed=seed + i)).Q for i, size in enumerate((m, n)))
    return (u * torch.tensor(s, dtype=torch.float64)) @ v.T


def is_orthonormal(q: torch.Tensor, u: float) -> bool:
    q = q.double()
    k = q.shape[-1]
    error = torch.linalg.matrix_norm(q.mT @ q - torch.eye(k, dtype=torch.float64))
    return bool((error <= 12 * u * math.sqrt(k) * (2 + math.log2(max(k, 1)))).all())


# ---------------------------------------------------------------- where it warns


@each_engine
@each_dtype
@pytest.mark.parametrize("shape", [(6, 1), (60, 5), (200, 50), (30, 30), (4, 60, 5), (5, 60), (2, 3, 8, 40)])
def test_nothing_to_say_of_independent_columns(shape, dtype, engine, no_warnings):
    q = neula.orth(normal(*shape).to(dtype), engine=engine)
    assert q.shape == (*shape[:-1], min(shape[-2:]))


@each_engine
@each_dtype
@pytest.mark.parametrize(("m", "n"), [(9, 2), (9, 9), (60, 5), (200, 50)])
@pytest.mark.parametrize("kind", ["twice", "sum", "zero"])
def test_dependent_columns(kind, m, n, dtype, engine):
    # Multiples of a quarter up to 7/4, whose sums every format holds.
    a = ((normal(m, n) * 4).round().clamp(-7, 7) / 4).to(dtype)
    a[:, -1] = {"twice": a[:, 0], "sum": a[:, 0] + a[:, (n - 1) // 2], "zero": 0 * a[:, 0]}[kind]
    with pytest.warns(neula.AccuracyWarning, match=DEPENDENT.format(n - 1, n)) as caught:
        q = neula.orth(a, engine=engine)
    assert caught[0].filename == __file__
    assert is_orthonormal(q, torch.finfo(dtype).eps / 2)
    with pytest.raises(neula.AccuracyError, match="full rank") as raised:
        neula.orth(a, engine=engine, strict=True)
    assert raised.value.indices == ((),)
    assert torch.equal(raised.value.result.Q, q)
    assert pickle.loads(pickle.dumps(raised.value)).indices == ((),)


@pytest.mark.parametrize("rank", [0, 1, 7])
def test_the_rank_is_in_the_message(rank):
    a = normal(50, rank) @ normal(rank, 20, seed=1)
    with pytest.warns(neula.AccuracyWarning, match=DEPENDENT.format(rank, 20)):
        neula.orth(a)


def test_larger_matrices_are_judged_by_estimates(monkeypatch):
    monkeypatch.setattr(numerical_rank, "EXACT_COLUMNS", 10)
    a = normal(90, 40)
    neula.orth(a, strict=True)
    with pytest.warns(neula.AccuracyWarning, match=DEPENDENT.format(39, 40)):
        neula.orth(torch.cat([a[:, :-2], a[:, :2]], 1))


def test_units_of_columns_do_not_matter(no_warnings):
    neula.orth(normal(50, 6) * 10.0 ** torch.tensor([-200, -30, 0, 5, 100, 200], dtype=torch.float64))


def test_a_wide_matrix_lacks_rank_only_if_its_rows_are_dependent(no_warnings):
    a = normal(6, 40)
    a[:, 3] = a[:, 1]
    neula.orth(a)
    a[4] = a[2]
    with pytest.raises(neula.AccuracyWarning, match=DEPENDENT.format(5, 6)):
        neula.orth(a)


def test_members_of_a_batch_are_named():
    a = normal(2, 3, 30, 4)
    a[0, 1, :, 2] = a[0, 1, :, 3]
    a[1, 0, :, 2] = 0
    with pytest.raises(
        neula.AccuracyError, match=r"rank for A\[0, 1\], A\[1, 0\]: the rank is at most 3, not 4"
    ) as raised:
        neula.orth(a, strict=True)
    assert raised.value.indices == ((0, 1), (1, 0))


def test_an_accuracy_that_is_coarser_says_less(no_warnings):
    """The smallest singular value is below what products in fp16 leave of R."""
    a = random_matrix("cluster_small", 400, 100, cond=1e7)
    neula.orth(a)
    with pytest.raises(neula.AccuracyWarning, match=r"full rank.*to fp16 accuracy"):
        neula.orth(a, accuracy="fp16", engine="emulated")


# ---------------------------------------------------------------- rcond


@each_engine
@pytest.mark.parametrize("shape", [(30, 8), (8, 30), (8, 8), (120, 60)])
@pytest.mark.parametrize("rcond", [1e-12, 1e-7, 1e-3, 0.05, 0.9])
def test_the_range_is_that_of_scipy(shape, rcond, engine, no_warnings):
    k = min(shape)
    a = of_spectrum(*shape, torch.logspace(0, -10, k).tolist())
    found, expected = (
        neula.orth(a, rcond, engine=engine),
        torch.from_numpy(scipy.linalg.orth(a.numpy(), rcond)),
    )
    assert found.shape == expected.shape
    assert is_orthonormal(found, 2.0**-53)
    # Spaces that differ by errors of A, relative to the gap behind the last singular value that counts.
    rank = found.shape[1]
    s = torch.linalg.svdvals(a)
    gap = float(s[rank - 1] - (s[rank] if rank < k else 0))
    difference = torch.linalg.matrix_norm(found @ found.T - expected @ expected.T)
    assert float(difference) <= 40 * math.sqrt(k) * 2.0**-53 * (2 + math.log2(k)) / gap


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_of_smaller_rank_in_the_library_and_dtype_of_a(dtype):
    a = (np.arange(12.0).reshape(6, 2) % 5 @ np.array([[1, 0, 1, 1], [0, 1, 1, -1]])).astype(dtype)
    q = neula.orth(a, 1e-2)
    assert isinstance(q, np.ndarray)
    assert (q.shape, q.dtype) == ((6, 2), dtype)
    wide = a.astype(np.float64)
    left = np.linalg.norm(wide - q.astype(np.float64) @ (q.astype(np.float64).T @ wide), 2)
    assert left <= 60 * np.finfo(dtype).eps * np.linalg.norm(wide, 2)


@pytest.mark.parametrize("size", [1e-300, 1e-30, 1e30, 1e300])
def test_units_of_the_matrix_do_not_matter(size):
    a = size * of_spectrum(20, 6, [1, 1, 0.5, 1e-9, 1e-9, 1e-10])
    assert neula.orth(a, 1e-6).shape == (20, 3)
    assert neula.orth(a / 1e300 if size > 1 else a, 1e-11).shape == (20, 6)


def test_no_columns_of_zeros():
    assert neula.orth(np.zeros((4, 3)), 0.1).shape == scipy.linalg.orth(np.zeros((4, 3)), 0.1).shape == (4, 0)
    assert neula.orth(np.zeros((2, 4, 3)), 0.0).shape == (2, 4, 0)


@each_engine
def test_a_batch_of_one_rank(engine):
    a = torch.stack([of_spectrum(20, 6, [3, 2, 1, 1e-12, 1e-12, 0], seed=i) for i in range(6)])
    a = a.reshape(2, 3, 20, 6)
    q = neula.orth(a, 1e-6, engine=engine)
    assert q.shape == (2, 3, 20, 3)
    assert is_orthonormal(q, 2.0**-53)
    torch.testing.assert_close(q @ (q.mT @ a), a, rtol=0, atol=1e-11)
    a[1, 1, 0, 0] = math.nan
    with pytest.warns(neula.AccuracyWarning, match="NaN or Inf"):
        again = neula.orth(a, 1e-6, engine=engine)
    assert again[1, 1].isnan().all()
    assert again[0].isfinite().all()


def test_a_batch_of_different_ranks():
    a = torch.stack([of_spectrum(9, 3, [1, 1, s]) for s in (1, 1e-10)])
    with pytest.raises(ValueError, match=r"\(2, 9, 3\), have ranks from 2 to 3 with rcond=1e-06.*pass"):
        neula.orth(a, 1e-6)
    assert neula.orth(a, 1e-12).shape == (2, 9, 3)


@pytest.mark.parametrize("rcond", [-0.1, 1.0, math.nan, math.inf])
def test_rcond_out_of_range(rcond):
    with pytest.raises(ValueError, match="rcond must be at least 0 and below 1"):
        neula.orth(np.eye(3), rcond)


def test_gradients():
    a = normal(12, 4).requires_grad_()
    weights = normal(12, 4, seed=1)
    expected = torch.autograd.grad((weights * neula.qr(a).Q).sum(), a)[0]
    for rcond in (None, 1e-6):
        found = torch.autograd.grad((weights * neula.orth(a, rcond)).sum(), a)[0]
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    b = of_spectrum(12, 4, [1, 1, 1, 1e-9]).requires_grad_()
    with pytest.raises(ValueError, match=r"rank 3 .*not unique.*A.detach\(\)"):
        neula.orth(b, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(500, 40), (3000, 1500), (1500, 1500), (300, 200, 64), (4, 900, 600)])
def test_on_a_gpu(shape, dtype):
    a = normal(*shape).to("cuda", dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if shape[-1] != shape[-2] or dtype != torch.float16:
            neula.orth(a)
    a[..., 7] = a[..., 3]
    k = shape[-1]
    with pytest.warns(neula.AccuracyWarning, match=DEPENDENT.format(k - 1, k)):
        neula.orth(a)
    if shape[-1] != shape[-2]:
        assert neula.orth(a, 1e-2).shape == (*shape[:-1], k - 1)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_thousands_of_tiny_matrices_are_orthonormalized_without_a_warning(n: int, no_warnings: None) -> None:
    assert is_orthonormal(neula.orth(normal(20_000, n, n, seed=n)), torch.finfo(torch.float64).eps / 2)
