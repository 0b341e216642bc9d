"""Factors of Gram matrices with their inverses: reference and kernel against the same bounds.

The kernel is CUDA C++. On a GPU it runs as it is (``pytest -m gpu``), elsewhere thread by thread on the CPU
(``cuda_on_host.h``), where there is a compiler.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import pytest
import torch
from tests.devices import DEVICE, variants

from neula.io.matrices import random_matrix
from neula.kernels.cholesky import cholesky as module
from neula.kernels.cholesky.cholesky import CholeskyFactors, cholesky_inverse

U = 2.0**-24

Factorize = Callable[..., CholeskyFactors]


@pytest.fixture(scope="module")
def on_host(compiled_for_host: Callable[..., ctypes.CDLL]) -> Factorize:
    """The kernel, compiled for the CPU."""
    function = compiled_for_host("cholesky", BYTES=module.SHARED_BYTES).factorize

    def factorize(gram: torch.Tensor, out: torch.Tensor | None = None) -> CholeskyFactors:
        n = len(gram)
        gram = gram.contiguous()
        r = torch.full((n, n), math.nan) if out is None else out
        inverse, norms = torch.full((n, n), math.nan), torch.full((n,), math.nan)
        places = [ctypes.c_void_p(x.data_ptr()) for x in (gram, r, inverse, norms)]
        function(*places, n, *r.stride())
        return CholeskyFactors(r, inverse, norms)

    return factorize


KERNELS = ["on_host", pytest.param("kernel", marks=pytest.mark.gpu)]
kernel = variants(cholesky_inverse, *KERNELS)
factorize = variants(cholesky_inverse, "reference", *KERNELS)


def gram_of(a: torch.Tensor) -> torch.Tensor:
    return a.double().mT @ a.double()


@pytest.mark.parametrize(("n", "kind"), [(1, "normal"), (32, "normal"), (33, "normal"), (128, "geometric")])
def test_factor_and_inverse(factorize: Factorize, n: int, kind: str) -> None:
    """The residual of a Cholesky factorization does not depend on the condition number, here up to 1e6."""
    a = random_matrix(kind, 3 * n + 5, n, cond=1e3, seed=n).to(DEVICE)
    gram = gram_of(a)
    before = gram.clone()
    r, inverse, norms = factorize(gram)
    assert torch.equal(gram, before)
    assert (r.dtype, inverse.dtype, norms.dtype) == (torch.float32,) * 3
    assert torch.equal(r, r.triu()), "exact zeros below the diagonal"
    assert torch.equal(inverse, inverse.triu())
    assert (r.diagonal() > 0).all()
    r, inverse = r.double(), inverse.double()
    # Rounding G, and n operations for each element of R^T R (Higham 2002, theorem 10.3), each column beside
    # its norm.
    size = norms.double()[:, None] * norms.double()
    assert ((r.mT @ r - gram).abs() <= (n + 4) * U * size).all()
    # Substitution errs by n u |R| |R^-1| (theorem 14.5).
    unity = torch.eye(n, dtype=torch.float64, device=DEVICE)
    assert ((r @ inverse - unity).abs() <= (n + 4) * U * (r.abs() @ inverse.abs())).all()
    assert torch.allclose(norms.double(), torch.linalg.vector_norm(a.double(), dim=0), rtol=4 * U)


def test_only_the_symmetric_part_counts(factorize: Factorize) -> None:
    gram = gram_of(random_matrix("normal", 200, 70, seed=1).to(DEVICE))
    skew = torch.randn(70, 70, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(DEVICE)
    r = factorize(gram + (skew - skew.mT) / 16).r
    assert torch.allclose(r, factorize(gram).r, rtol=0, atol=100 * U * float(r.max()))


@pytest.mark.parametrize("order", ["rows", "columns", "block"])
def test_room_of_any_strides(factorize: Factorize, order: str) -> None:
    gram = gram_of(random_matrix("normal", 200, 40, seed=2).to(DEVICE))
    whole = torch.full((100, 90), math.nan, device=DEVICE)
    room = {"rows": whole[:40, :40], "columns": whole.mT[:40, :40], "block": whole[3:83:2, 7:47]}[order]
    r = factorize(gram, room).r
    assert r.data_ptr() == room.data_ptr()
    assert torch.equal(r, factorize(gram).r)
    assert int(whole.isnan().sum()) == whole.numel() - 1600


def test_nan_and_zero_columns_show(factorize: Factorize) -> None:
    a = random_matrix("normal", 100, 50, seed=3).to(DEVICE)
    for value in (math.nan, 0.0):
        bad = a.clone()
        bad[:, 37] = value
        r = factorize(gram_of(bad)).r
        assert not bool(r.isfinite().all() & (r.diagonal() > 0).all())


def test_nan_off_the_diagonal_shows(kernel: Factorize) -> None:
    """Also below pivots that are lost, where everything else becomes zero."""
    for gram in (torch.ones(100, 100), torch.eye(100)):
        bad = gram.double().to(DEVICE)
        bad[5, 3] = math.nan
        assert bad.isnan().sum() == 1
        assert not kernel(bad).r.isfinite().all()


@pytest.mark.parametrize("kind", ["repeated", "rank one"])
def test_dependent_columns_become_short_ones(kernel: Factorize, kind: str) -> None:
    """The kernel factorizes a matrix that differs by no more than what a Gram matrix in float32 may lack."""
    a = random_matrix("normal", 300, 60, seed=4).to(DEVICE)
    if kind == "repeated":
        a[:, 59] = a[:, 3]
    else:
        a[:, 1:] = a[:, :1] * a[:1, 1:]
    r, inverse, norms = kernel(gram_of(a))
    assert r.isfinite().all()
    assert inverse.isfinite().all()
    size = norms.double()[:, None] * norms.double()
    assert ((r.double().mT @ r.double() - gram_of(a)).abs() <= (2.0**-19 + 64 * U) * size).all()


@pytest.mark.parametrize("mean", [0.0, 3.0])
def test_dependent_columns_are_seen_also_where_all_have_a_direction_in_common(
    kernel: Factorize, mean: float
) -> None:
    """Then a pivot that should vanish is what rounding errors of the first columns leave, which are large: in
    one of some dozens of matrices they would pass for a pivot if all sixteen columns were summed up first.
    """
    generator, rank = torch.Generator().manual_seed(1), 120
    for _ in range(60 if mean else 3):
        a = torch.randn(400, 128, generator=generator, dtype=torch.float64) + mean
        mixed = torch.randn(rank, 128 - rank, generator=generator, dtype=torch.float64) / rank**0.5
        a[:, rank:] = a[:, :rank] @ mixed
        r, _, norms = kernel(gram_of(a.to(DEVICE)))
        pivots = (r.diagonal().double() / norms.double()).square()
        assert torch.allclose(pivots[rank:], torch.full_like(pivots[rank:], 2.0**-19), rtol=0.01)
        assert (pivots[:rank] > 2.0**-10).all()


def test_more_columns_than_the_kernel_takes() -> None:
    gram = gram_of(random_matrix("normal", 400, 130, seed=5).to(DEVICE))
    r = cholesky_inverse(gram).r.double()
    assert (r.mT @ r - gram).abs().max() <= 134 * U * gram.max()
