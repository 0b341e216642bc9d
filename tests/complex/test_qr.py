"""QR of complex matrices beside bounds and real embeddings; tests/test_qr_paths.py has every path."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from tests.matrices import normal, normal_complex
from tests.qr_bounds import check
from tests.test_chains import engine_of

import neula
from neula.algorithms.orthogonal.strong_rrqr import strong_order
from neula.certificates.qr import qr_certificate
from neula.engines import FORMATS, cublas
from neula.engines.complex import over
from neula.engines.shipped import cuda_tuning
from neula.problems.orthogonal.links import MatrixLayout, chain_alone, chain_together
from neula.problems.orthogonal.problem import QROptions

DTYPES = (torch.complex64, torch.complex128)


@pytest.mark.parametrize("pivoting", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [12, 24, 30, 50])
def test_small_integers_of_rank_one(n: int, dtype: torch.dtype, pivoting: bool) -> None:
    """The diagonal of R comes down to subnormal numbers, whose phases ``torch.sgn`` takes for infinite."""
    rng = np.random.default_rng(n)
    for _ in range(8):
        a = np.outer(rng.integers(-3, 4, n + 6), rng.integers(-3, 4, n)) * (1 + 1j)
        found = neula.qr(torch.from_numpy(a).to(dtype), pivoting=pivoting)
        q, r = found.Q.numpy().astype(complex), found.R.numpy().astype(complex)
        order = found.P.numpy() if pivoting else slice(None)
        u = torch.finfo(dtype).eps / 2
        assert found.converged
        assert np.linalg.norm(q.conj().T @ q - np.eye(n)) <= 20 * n * u
        assert np.linalg.norm(q @ r - a[:, order]) <= 20 * n * u * np.linalg.norm(a)
        assert (np.diag(r).real >= 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (1, 1), (3, 70, 40), (2, 0, 3), (0, 4, 4), (4, 0)])
@pytest.mark.parametrize("engine", ["cpu", "emulated"])
def test_modes(shape: tuple[int, ...], engine: str, dtype: torch.dtype) -> None:
    a = normal_complex(*shape).to(dtype).numpy()
    (m, n), u = shape[-2:], float(np.finfo(a.dtype).eps)
    for pivoting in (False, True):
        q, r, *order = neula.qr(a, "complete", pivoting=pivoting, engine=engine)
        permuted = np.take_along_axis(a, order[0][..., None, :], -1) if order else a
        assert q.shape == (*shape[:-2], m, m)
        assert np.abs(q @ r - permuted).max(initial=0.0) <= 40 * m * u
        assert np.abs(q.conj().swapaxes(-1, -2) @ q - np.eye(m)).max(initial=0.0) <= 40 * max(m, 1) * u
        only = neula.qr(a, "r", pivoting=pivoting, engine=engine)
        assert only.Q is None
        assert np.allclose(only.R, r[..., : min(m, n), :], rtol=0, atol=100 * max(m, 1) * u)
    h, tau = neula.qr(torch.from_numpy(a), "raw", engine=engine)
    k = min(m, n)
    if a.size:
        q = torch.linalg.householder_product(h[..., :k], tau).numpy()
        assert np.abs(q @ np.triu(h[..., :k, :].numpy()) - a).max() <= 40 * m * u
        assert not h.diagonal(dim1=-2, dim2=-1).imag.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_pivots_are_those_of_lapack(dtype: torch.dtype) -> None:
    a = (normal_complex(60, 40) * torch.logspace(0, -3, 40)).to(dtype)
    found = neula.qr(a, pivoting=True)
    check(a[:, found.P], found.Q, found.R, torch.finfo(dtype).eps / 2)
    assert found.P.tolist() == scipy.linalg.qr(a.numpy(), pivoting=True)[2].tolist()


@pytest.mark.parametrize("engine", ["cpu", "emulated"])
@pytest.mark.parametrize("rank", [1, 30, 89])
def test_pivoting_reveals_the_rank(rank: int, engine: str) -> None:
    """Of sketches as well: 200 columns are more than are pivoted one by one on an emulated unit."""
    for m, n in ((120, 90), (260, 200)):
        a = normal_complex(m, rank) @ normal_complex(rank, n)
        found = neula.qr(a, pivoting=True, engine=engine)
        check(a[:, found.P], found.Q, found.R, 2.0**-53)
        sizes = torch.linalg.svdvals(a)
        assert torch.linalg.matrix_norm(found.R[rank:, rank:], 2) <= 1e-12 * sizes[0]
        assert torch.linalg.svdvals(found.R[:rank, :rank])[-1] >= sizes[rank - 1] / (10 * n)


def test_a_hidden_singular_value_is_found() -> None:
    """Kahan's matrix with complex phases: pivots by norms leave it as it is."""
    n, c = 90, math.cos(1.2)
    s = math.sqrt(1 - c * c)
    kahan = torch.diag(s ** torch.arange(n).double()) @ (torch.eye(n) - c * torch.ones(n, n).triu(1)).double()
    kahan = kahan * (1 - 1e-14) ** torch.arange(n).double()
    turned = torch.polar(torch.ones(n).double(), normal(n))[:, None] * kahan
    turned = turned * torch.polar(torch.ones(n).double(), normal(n, seed=1))
    size = 10 * float(torch.linalg.svdvals(turned)[-1])
    order = strong_order(torch.linalg.qr(turned)[1], size)
    assert order is not None
    r = torch.linalg.qr(turned[:, order])[1]
    smallest = torch.linalg.svdvals(turned)[-1]
    assert r[-1, -1].abs() <= 10 * n * smallest
    assert torch.linalg.svdvals(r[:-1, :-1])[-1] >= torch.linalg.svdvals(turned)[-2] / (10 * n)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compute", ["auto", "fp32_notc", "fp16_nocor", "tf32_nocor"])
def test_trees(compute: str, dtype: torch.dtype) -> None:
    for shape in ((1500, 40), (2, 600, 17)):
        a = normal_complex(*shape).to(dtype)
        found = neula.tsqr(a, compute=compute, engine="cpu" if compute == "auto" else "emulated")
        assert found.converged
        batch = (x.reshape(-1, *x.shape[-2:]) for x in (a, *found))
        for one, q, r in zip(*batch, strict=True):
            check(one, q, r, FORMATS[found.accuracy].u)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bases(dtype: torch.dtype) -> None:
    a = normal_complex(50, 20).to(dtype)
    a[:, 15:] = 1j * a[:, :5]
    basis = neula.orth(a, rcond=1e-5)
    assert basis.shape == (50, 15)
    u = torch.finfo(dtype).eps
    assert (basis.mH @ basis - torch.eye(15)).norm() <= 30 * u
    assert (a - basis @ (basis.mH @ a)).norm() <= 100 * u * a.norm()
    with pytest.warns(neula.AccuracyWarning, match="lack full rank"):
        neula.orth(a)
    full = neula.orth(a[:, :15].numpy())
    assert np.linalg.norm(full.conj().T @ full - np.eye(15)) <= 30 * u


def test_a_certificate_sees_an_error() -> None:
    """Of a column in the wrong phase, and of columns that are not orthogonal by an imaginary part."""
    a = normal_complex(60, 20)
    q, r = neula.qr(a)
    ones = torch.ones(20).double()
    assert qr_certificate(a, q, r, ones, FORMATS["fp64"]).accepted
    for change in (1e-9j * q[:, 4], 1e-10j * torch.eye(60)[5]):
        wrong = q.clone()
        wrong[:, 3] += change
        assert not qr_certificate(a, wrong, r, ones, FORMATS["fp64"]).accepted


@pytest.mark.parametrize(
    ("m", "n", "accuracy", "first"),
    [
        (32768, 8192, "fp32", "rgsqrf fp32"),
        (8192, 8192, "fp32", "rgsqrf fp32 + correction"),
        (600, 100, "fp32", "cholesky-qr fp64, twice"),
        (20000, 2000, "fp64", "rgsqrf fp64"),
        (100000, 64, "fp32", "cholesky-qr fp64"),
    ],
)
def test_first_links_on_an_h200(m: int, n: int, accuracy: str, first: str) -> None:
    """Batches are factorized together, without kernels and without a loop over members."""
    dtype = torch.complex128 if accuracy == "fp64" else torch.complex64
    tuning = cuda_tuning((9, 0), replayed_bytes=290 << 20)
    options = QROptions(FORMATS[accuracy], over(engine_of(tuning), dtype))
    assert chain_alone(MatrixLayout(m, n, dtype), options)[0].label == first
    if accuracy == "fp32":
        labels = [link.label for link in chain_together(256, 128, options)]
        gram = ["cholesky-qr fp64", "cholesky-qr fp64, twice", "shifted cholesky-qr fp64"]
        assert labels == [*gram, "householder fp64"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_lower_triangles_of_gram_matrices(dtype: torch.dtype) -> None:
    """By rows and by columns, with gaps between them."""
    a = normal_complex(1500, 1100)[:1400, :1000].to("cuda")
    a = a.real.contiguous() if dtype == torch.float64 else a
    for given in (a, a.contiguous(), a.mT.contiguous().mT):
        if cublas.squares(given[None]):
            found = cublas.lower_square(given)
            assert torch.allclose(found, (a.mH @ a).tril(), rtol=0, atol=1e-10)
    assert cublas.squares(a[None])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(64, 32), (600, 100), (3000, 700), (1500, 1500), (40000, 64), (1000, 256, 128)]
)
def test_factors_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    a = normal_complex(*shape).to("cuda", dtype)
    for _ in range(4):  # replayed at the third
        result = neula.qr(a)
        assert result.converged
    q, r = result
    for one in range(0, max(1, len(a) if a.ndim > 2 else 1), 333):
        place = one if a.ndim > 2 else slice(None)
        check(a[place].cpu(), q[place].cpu(), r[place].cpu(), torch.finfo(dtype).eps / 2)
    basis = neula.orth(a[..., : shape[-1] // 2])
    assert basis.shape[-1] == shape[-1] // 2
