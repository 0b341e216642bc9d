"""QR of complex matrices beside bounds and real embeddings; tests/test_qr_paths.py has every path."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from tests.matrices import normal, normal_complex
from tests.qr_bounds import check

import neula
from neula.algorithms.orthogonal.batched_qr import batched_qr, batched_reorthogonalize
from neula.algorithms.orthogonal.strong_rrqr import strong_order
from neula.certificates.qr import qr_certificate
from neula.engines import FORMATS, EmulatedEngine, cublas, select_engine
from neula.engines.complex import over
from neula.engines.shipped import cuda_tuning
from neula.kernels.core import core
from neula.problems.orthogonal.certified import certified_qr, certified_triangle
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


@pytest.mark.parametrize(
    "algorithm", ["rgsqrf", "rgsqrf-twice", "rgsqrf-reortho", "cholesky-qr", "householder"]
)
def test_named_algorithms(algorithm: str) -> None:
    a = normal_complex(120, 60)
    for compute in ("fp16", "fp32", "fp64") if algorithm != "rgsqrf" else ("fp64",):
        accuracy = "fp64" if algorithm in ("cholesky-qr", "householder") else compute
        options = {"accuracy": accuracy, "compute": compute, "cutoff": 16, "engine": "emulated"}
        found = neula.qr(a, algorithm=algorithm, **options)
        assert found.converged
        check(a, *found, FORMATS[accuracy].u)
        raw = neula.qr(a, "raw", algorithm=algorithm, **options)
        assert raw.converged
        q = torch.linalg.householder_product(*raw)
        assert torch.linalg.matrix_norm(q @ raw.H[:60].triu() - a) <= 60 * FORMATS[accuracy].u * a.norm()


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
        u = FORMATS[found.accuracy].u
        assert found.converged
        batch = (x.reshape(-1, *x.shape[-2:]) for x in (a, *found))
        for one, q, r in zip(*batch, strict=True):
            check(one, q, r, u)


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


@pytest.mark.parametrize("engine", ["cpu", "emulated"])
@pytest.mark.parametrize("shape", [(1, 30, 12), (3, 20, 20), (1, 400, 20), (1, 3, 5)])
def test_certified_factors_of_other_problems(shape: tuple[int, ...], engine: str) -> None:
    """The engine may be that for real matrices."""
    a, b = normal_complex(*shape), normal_complex(*shape[:-1], 2, seed=5)
    found = certified_qr(a.to(torch.complex64), select_engine(engine, a.device))
    assert found.accepted.all()
    assert (found.q @ found.r - a.to(torch.complex64)).norm() <= 1e-13 * a.norm()
    triangle = certified_triangle(a, b, select_engine(engine, a.device))
    assert triangle.accepted
    gram, image = triangle.r.mH @ triangle.r, triangle.r.mH @ triangle.c
    assert (gram - a.mH @ a).norm() <= 1e-13 * a.norm() ** 2
    assert (image - a.mH @ b).norm() <= 1e-12 * a.norm() * b.norm()


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_real_embedding_has_the_same_triangle(dtype: torch.dtype) -> None:
    """``[[Re, -Im], [Im, Re]]`` has each singular value twice, and the same condition."""
    a = normal_complex(30, 12).to(dtype)
    r = neula.qr(a, "r").R
    embedded = torch.cat([torch.cat([a.real, -a.imag], 1), torch.cat([a.imag, a.real], 1)])
    sizes = torch.linalg.svdvals(neula.qr(embedded.double(), "r").R)
    assert torch.allclose(
        torch.linalg.svdvals(r.to(torch.complex128)), sizes[::2], rtol=20 * torch.finfo(dtype).eps
    )


class OnH200(EmulatedEngine):
    """Multiplies nothing here; it has the thresholds."""

    tuning = cuda_tuning((9, 0), replayed_bytes=290 << 20)


FIRST_LINKS = [
    (32768, 8192, "fp32", "rgsqrf fp32"),
    (8192, 8192, "fp32", "rgsqrf fp32 + correction"),
    (600, 100, "fp32", "cholesky-qr fp64, twice"),
    (20000, 2000, "fp64", "rgsqrf fp64"),
    (100000, 64, "fp32", "cholesky-qr fp64"),
]


@pytest.mark.parametrize(("m", "n", "accuracy", "first"), FIRST_LINKS)
def test_first_links_on_an_h200(m: int, n: int, accuracy: str, first: str) -> None:
    dtype = torch.complex128 if accuracy == "fp64" else torch.complex64
    options = QROptions(FORMATS[accuracy], over(OnH200("cpu"), dtype))
    assert chain_alone(MatrixLayout(m, n, dtype), options)[0].label == first


def test_batches_on_an_h200() -> None:
    """All members of a batch together, without kernels and without a loop over them."""
    options = QROptions(FORMATS["fp32"], over(OnH200("cpu"), torch.complex64))
    labels = [link.label for link in chain_together(256, 128, options)]
    assert labels == [
        "cholesky-qr fp64",
        "cholesky-qr fp64, twice",
        "shifted cholesky-qr fp64",
        "householder fp64",
    ]


def test_first_links_of_a_cpu() -> None:
    """Few columns are for the compiled core, more for products."""
    for shape in ((60, 20), (300, 64), (3, 60, 20)):
        expected = "householder fp64" if core() is None else "cholesky-qr fp64, repeated"
        assert neula.qr(normal_complex(*shape)).attempts[0].method == expected
    assert neula.qr(normal_complex(390, 130)).attempts[0].method == "cholesky-qr fp64, repeated"


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


def test_batches_by_gram_schmidt() -> None:
    """Of tiles of rows that are equal, and that zero rows fill up."""
    for shape in ((4, 300, 45), (2, 1201, 20)):
        a = normal_complex(*shape)
        q, r = batched_reorthogonalize(*batched_qr(a))
        assert (q @ r - a).norm() <= 1e-13 * a.norm()
        assert (q.mH @ q - torch.eye(shape[2])).norm() <= 1e-13
