"""Subspace iteration against the singular values that a matrix was made from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.matrices import normal

from neula.algorithms.spectra.gram_svd import gram_svd
from neula.algorithms.spectra.ritz import (
    Ritz,
    is_asynchronous,
    orthonormal,
    orthonormal_asynchronously,
    ritz_triplets,
)
from neula.algorithms.spectra.subspace_iteration import MixedPrecisionOperator, subspace_iteration
from neula.engines import CpuEngine, EmulatedEngine, Engine
from neula.engines.shipped import cuda_tuning
from neula.io import matrices

U32, U64 = 2.0**-24, 2.0**-53
N = 120

SPECTRA: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "geometric": lambda i: 0.9**i,
    "1/k": lambda i: 1 / (i + 1),
    "roots": lambda i: (i + 1) ** -0.5,
    "gap": lambda i: torch.where(i < 8, 1 / (i + 1), 1e-5),
    "cluster at the cut": lambda i: torch.where(i < 5, 1.0, torch.where(i < 12, 0.5, 0.2)),
    "rank 5": lambda i: torch.where(i < 5, 0.5**i, 0.0),
}


def random_orthonormal(m: int, n: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return matrices.random_orthonormal(m, n, generator, torch.float64)


def with_spectrum(s: torch.Tensor, m: int) -> torch.Tensor:
    n = len(s)
    return (random_orthonormal(m, n, seed=1) * s) @ random_orthonormal(n, n, seed=2).T


def engine_of(dtype: torch.dtype) -> Engine:
    return CpuEngine("cpu", "fp32" if dtype == torch.float32 else "fp64")


def gap_over(bound: float, rank: int) -> Callable[[Ritz], float]:
    return lambda found: float(found.rest.diagonal()[:rank].sum().clamp_min(0).sqrt()) / bound


def on_a_gpu(dtype: torch.dtype) -> Engine:
    """Panels as on an H200, by the references of its kernels."""
    engine = EmulatedEngine("cpu", "fp32" if dtype == torch.float32 else "fp64")
    engine.tuning = cuda_tuning((9, 0))
    return engine


def emulated(dtype: torch.dtype) -> Engine:
    return EmulatedEngine("cpu", "fp32" if dtype == torch.float32 else "fp64")


@pytest.mark.parametrize("engine_of", [engine_of, on_a_gpu])
@pytest.mark.parametrize(("dtype", "m"), [(torch.float32, 400), (torch.float64, N)])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_triplets(
    spectrum: str, dtype: torch.dtype, m: int, engine_of: Callable[[torch.dtype], Engine]
) -> None:
    k, width = 8, 16
    s = SPECTRA[spectrum](torch.arange(N, dtype=torch.float64)).double()
    a, u, engine = with_spectrum(s, m).to(dtype), U32 if dtype == torch.float32 else U64, engine_of(dtype)
    bound = 40 * u * float(s.norm())
    operator = MixedPrecisionOperator.from_matrix(a, float(s.norm()), engine, engine)
    found, products = subspace_iteration(operator, k, width, gap_over(bound, k), 200)
    assert products <= 60
    wide, left, right = a.double(), found.u.double(), found.v.double()
    identity = torch.eye(width, dtype=torch.float64)
    for basis in (left, right):
        assert float((basis.T @ basis - identity).norm()) <= 30 * width * u
    assert float((wide @ right - left * found.s).norm()) <= bound
    assert float((wide.T @ left - right * found.s)[:, :k].norm()) <= 2 * bound
    assert float((found.s[:k] - s[:k]).abs().max()) <= bound
    assert found.loss <= 100 * u


@pytest.mark.parametrize("scale", [1e-15, 1e6])
@pytest.mark.parametrize("spectrum", ["roots", "gap"])
def test_subspaces_may_come_from_half_precision(spectrum: str, scale: float) -> None:
    """Half-precision subspaces are measured in float32: errors of singular values are of second order."""
    k = 8
    s = SPECTRA[spectrum](torch.arange(N, dtype=torch.float64)).double() * scale
    a = with_spectrum(s, 300).float()
    operator = MixedPrecisionOperator.from_matrix(
        a, float(s.norm()), EmulatedEngine("cpu", "fp32"), EmulatedEngine("cpu", "fp16")
    )
    assert float(operator.low.abs().max()) < 2.0**15 / 4
    found, _ = subspace_iteration(operator, k, 16, gap_over(1e-3 * float(s[k - 1]), k), 100)
    assert float(found.rest.diagonal()[:k].sum().sqrt()) <= 1e-3 * float(s[k - 1])
    assert float(((found.s[:k] - s[:k]) / s[:k]).abs().max()) <= 1e-5


def test_it_stops_where_it_would_take_too_long() -> None:
    s = torch.linspace(1, 0.999, N, dtype=torch.float64)
    a, engine = with_spectrum(s, N), engine_of(torch.float64)
    found, products = subspace_iteration(
        MixedPrecisionOperator.from_matrix(a, float(s.norm()), engine, engine), 8, 16, gap_over(1e-14, 8), 50
    )
    assert products == 2
    assert float(found.rest.diagonal()[:8].sum().sqrt()) > 1e-6


@pytest.mark.parametrize("kind", ["duplicates", "zero"])
def test_a_look_at_blocks_that_were_not_made_orthonormal(kind: str) -> None:
    generator = torch.Generator().manual_seed(4)
    block = torch.randn(N, 6, generator=generator)
    block[:, 3:] = block[:, :3] if kind == "duplicates" else 0.0
    a = with_spectrum(0.8 ** torch.arange(N, dtype=torch.float64), 200).float()
    found = ritz_triplets(a, block, on_a_gpu(torch.float32))
    assert found.loss <= 100 * U32
    exact = torch.linalg.svdvals(a.double() @ torch.linalg.qr(block[:, :3].double()).Q)
    assert bool((found.s[:3] >= exact * (1 - 100 * U32)).all())


@pytest.mark.parametrize("engine", [engine_of, on_a_gpu, emulated])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["zero", "ones", "graded", "duplicates", "normal", "mild", "tiny"])
def test_blocks_are_orthonormal_whatever_their_rank(
    kind: str, dtype: torch.dtype, engine: Callable[[torch.dtype], Engine]
) -> None:
    """Some condition numbers also without a look at them: Cholesky QR takes them by its reference, which
    has no lost pivots.
    """
    x = normal(200, 6, seed=3)
    if kind == "ones":
        x.fill_(1.0)
    elif kind == "duplicates":
        x[:, 3:] = x[:, :3]
    elif kind == "mild":
        x = x @ (normal(6, 6, seed=4) * 10.0 ** -torch.linspace(0, 3, 6))
    x = x * {"zero": 0.0, "tiny": 1e-12, "graded": 10.0 ** -torch.arange(0, 30, 5).double()}.get(kind, 1.0)
    x, u = x.to(dtype), U32 if dtype == torch.float32 else U64
    assert is_asynchronous(x, engine(dtype)) == (engine is on_a_gpu and dtype == torch.float32)
    blind = kind in ("normal", "mild", "tiny") and is_asynchronous(x, engine(dtype))
    for method in (orthonormal, orthonormal_asynchronously) if blind else (orthonormal,):
        q, r = (y.double() for y in method(x, engine(dtype)))
        assert float((q.T @ q - torch.eye(6)).norm()) <= 100 * u
        assert float((q @ r - x.double()).norm()) <= 100 * u * float(x.double().norm())


def test_steps_on_the_matrix_itself_bring_back_what_the_gram_matrix_hides() -> None:
    """In single precision the Gram matrix knows singular values above 2e-4 only; the 8th is 1e-3 here."""
    k, engine = 8, CpuEngine("cpu", "fp32")
    a = matrices.random_matrix("geometric", 300, 64, cond=1e27, seed=2).float()
    allowed = 20 * U32 * float(a.norm())
    triplets = gram_svd(a, k, engine, engine, allowed)
    assert triplets is not None
    assert triplets[0].residual <= allowed
    truth = matrices.singular_values("geometric", 64, 1e27)[:k]
    assert float((triplets[0].s.double() - truth).abs().max()) <= 300 * U32


@pytest.mark.parametrize("element", [float("inf"), 1e30])
def test_nothing_comes_of_a_gram_matrix_that_overflows(element: float) -> None:
    engine = CpuEngine("cpu", "fp32")
    assert gram_svd(torch.full((30, 10), element), 2, engine, engine, 1e-5) is None
