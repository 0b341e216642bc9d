"""Bounds on errors of eigenvalues and subspaces: not below the truth, and near it where that is known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.matrices import normal, normal_complex

from neula.certificates.spectra import (
    SpectralBounds,
    SpectralErrors,
    backward_error,
    consistency,
    inconsistency,
    measured,
    measured_alone,
    rounding_error,
    spectral_errors,
)
from neula.engines import BF16, FP32, FP64

EYE = torch.eye(2, dtype=torch.float64)[None]
D = 1e-6


def matrix(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)[None]


def of_diagonal(a: torch.Tensor, s: list[float] | None = None, **options: torch.Tensor) -> SpectralErrors:
    """Unit vectors as eigenvectors, and diagonal elements as eigenvalues unless others are given."""
    w = a.diagonal(0, 1, 2) if s is None else torch.tensor([s], dtype=torch.float64)
    v = torch.eye(a.shape[1], dtype=torch.float64)[None]
    return spectral_errors(w, measured(a, v, w, v), symmetric=True, **options)


def test_largest_accepted_errors() -> None:
    for format, neglected in ((FP64, 2.0 ** (53 / 8)), (FP32, 10.0), (BF16, 10.0)):
        for n in (1, 13, 130):
            eigenvalues, singular = (SpectralBounds.for_order(format, n, symmetric=x) for x in (True, False))
            assert eigenvalues.residual == pytest.approx(30 * n**0.5 * format.u)
            assert singular.residual == pytest.approx((30 * n**0.5 + neglected) * format.u)
            assert eigenvalues.orthogonality == singular.orthogonality == min(0.1, 30 * n * format.u)


def within(found: torch.Tensor, least: float, most: float) -> bool:
    return bool((found >= least).all() & (found <= most).all())


def test_shifted_values() -> None:
    """All are off by the same: alone by their residuals, in a cluster by the backward error."""
    apart = of_diagonal(matrix([1, 0], [0, 3]), [1 + D, 3 + D]).errors
    together = of_diagonal(matrix([2, 0], [0, 2]), [2 + D, 2 + D]).errors
    assert within(apart, D, D * (1 + 1e-8))
    assert within(together, D, 2**0.5 * D * (1 + 1e-8))


def test_temple_and_kato() -> None:
    """``[[0, d], [d, 1]]`` has the eigenvalues ``-d^2`` and ``1 + d^2``, and vectors off by d, nearly."""
    found = of_diagonal(matrix([0, D], [D, 1]))
    exact = (0.25 + D * D) ** 0.5 - 0.5
    assert within(found.errors, exact, exact * (1 + 1e-2) + 1e-15)
    sine = math.sin(math.atan(2 * D) / 2)
    assert within(found.vector_errors, sine, sine * (1 + 1e-4))
    assert found.gaps.tolist() == [[1, 1]]


def test_gaps_are_those_to_the_nearer_side() -> None:
    a = torch.diag(torch.tensor([0.0, 1.0, 5.0, 5.0, 5.5], dtype=torch.float64))[None]
    found = of_diagonal(a)
    assert found.clusters.tolist() == [[0, 1, 2, 2, 3]]
    assert found.gaps.tolist() == [[1, 1, 0.5, 0.5, 0.5]]
    edges = torch.tensor([-0.25], dtype=torch.float64), torch.tensor([5.75], dtype=torch.float64)
    assert of_diagonal(a, edges=edges).gaps.tolist() == [[0.25, 1, 0.5, 0.5, 0.25]]
    alone = of_diagonal(matrix([2, 0], [0, 2]))
    assert alone.gaps.tolist() == [[math.inf] * 2]
    assert alone.vector_errors.tolist() == [[0, 0]]


def test_clusters_join_what_cannot_be_told_apart() -> None:
    """A coupling of d turns vectors of values that are t apart by ``atan(2 d / t) / 2``."""
    for t, joined in ((5 * D, True), (100 * D, False)):
        a = torch.zeros(1, 3, 3, dtype=torch.float64)
        a[0] = torch.diag(torch.tensor([1.0, 1.0 + t, 3.0]))
        a[0, 0, 1] = a[0, 1, 0] = D
        found = of_diagonal(a)
        assert found.clusters.tolist() == [[0, 0, 1] if joined else [0, 1, 2]]
        sine = 0.0 if joined else math.sin(math.atan(2 * D / t) / 2)
        assert float(found.vector_errors[0, 0]) >= sine


def test_parts_rest_on_a_priori_positions() -> None:
    a, bound = matrix([1, 0], [0, 2]), torch.tensor([0.3], dtype=torch.float64)
    found = of_diagonal(a, a_priori=bound)
    assert bool((found.errors < 1e-14).all())  # 0.3 tells them apart
    assert bool((found.vector_errors < 1e-14).all())
    assert of_diagonal(a, a_priori=2 * bound).errors.tolist() == [[0.6, 0.6]]
    close = of_diagonal(matrix([1, D], [D, 1.5]), a_priori=bound)
    assert float(close.vector_errors[0, 0]) == pytest.approx(D / 0.2, rel=1e-3)


@pytest.mark.parametrize(
    ("values", "moved", "expected"),
    [([1, 2], [1e-4, 2e-4], [1e-4, 2e-4]), ([1, 1, 3], [3e-4, 4e-4, 0], [5e-4, 5e-4, 0])],
)
def test_vectors_that_were_moved_since(values: list, moved: list, expected: list) -> None:
    values, moved, expected = (torch.tensor([x], dtype=torch.float64) for x in (values, moved, expected))
    found = of_diagonal(torch.diag_embed(values), moved=moved).vector_errors
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-14)


def test_singular_vectors() -> None:
    """Left and right ones of ``[[2, d], [d, 1]]`` are off by ``atan(2 d) / 2``, values by some ``d^2``."""
    a = matrix([2, D], [D, 1])
    s = a.diagonal(0, 1, 2)
    found = spectral_errors(s, measured(a, EYE, s, EYE), symmetric=False)
    sine = math.sin(math.atan(2 * D) / 2)
    assert within(found.vector_errors, sine, math.pi * sine)
    assert within(found.errors, 0.0, 2**0.5 * D * (1 + 1e-6))
    edges = None, torch.zeros(1, dtype=torch.float64)  # zeros are next to singular values of a rectangle
    found = spectral_errors(s, measured(a, EYE, s, EYE), symmetric=False, edges=edges)
    assert found.gaps.tolist() == [[1, 1]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=["real", "complex"])
@pytest.mark.parametrize("n", [3, 400])
def test_lost_orthogonality_is_part_of_backward_errors(n: int, dtype: torch.dtype) -> None:
    """``A`` exactly, of vectors ``V = Q (I + E)``: the exact change of A is known to first order."""
    q = torch.linalg.qr(normal(n, n).to(dtype) + (1j * normal(n, n, seed=1) if dtype.is_complex else 0))[0]
    e = 1e-5 * torch.diag(torch.linspace(-1, 1, n, dtype=torch.float64)).to(dtype)
    w = torch.linspace(1, 2, n, dtype=torch.float64)
    a = (q * w) @ q.mH
    v = (q @ (torch.eye(n, dtype=dtype) + e))[None]
    found = measured(((a + a.mH) / 2)[None], v, w[None], v)
    assert 2e-5 <= float(found.orthogonality) <= 2e-5 * (2 * n**0.5 if n <= 384 else 4.1)
    assert float(found.total) >= 0
    least = float(torch.linalg.matrix_norm((v[0] * w) @ v[0].mH - a, 2))
    assert float(backward_error(w[None], found)) >= least / 2  # either of V and its polar factor
    assert float(backward_error(w[None], found, frobenius=True)) >= float(backward_error(w[None], found))
    worse = measured(a[None], 1.5 * v, w[None], 1.5 * v)  # norms above 1.4: nothing is known
    assert backward_error(w[None], worse).tolist() == [math.inf]
    unknown = spectral_errors(w[None], worse, symmetric=True)
    assert bool(unknown.errors.isinf().all())
    assert bool((unknown.vector_errors[unknown.gaps.isfinite()] == 1).all())


def test_residuals_and_rounding_of_complex_matrices() -> None:
    """They are zero for the adjoint's conjugate too if a conjugation is forgotten."""
    a = torch.tensor([[[1.0, 1j], [-1j, 2.0]]], dtype=torch.complex128)
    w, v = torch.linalg.eigh(a)
    assert float(measured(a, v, w, v).total) < 1e-14
    assert float(measured(a.mT, v, w, v).total) > 1
    assert rounding_error(9, torch.float64) == pytest.approx(4 * 2.0**-53)
    assert rounding_error(9, torch.complex64) == pytest.approx(8 * 2.0**-24)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_measures_of_one_matrix_are_not_below_the_truth(dtype: torch.dtype, symmetric: bool) -> None:
    for seed in range(20):
        a = (normal_complex if dtype.is_complex else normal)(7, 5, seed=seed).to(dtype)
        a = a.mH @ a if symmetric else a
        u, s, vh = torch.linalg.svd(a, full_matrices=False)
        v = vh.mH.resolve_conj()
        u = v if symmetric else u
        right = v.numpy()
        left = right if symmetric else u.numpy()
        total, lost, measures = measured_alone(a.numpy(), left, s.numpy(), right, float(a.norm()), dtype)
        found, a, u, v = measures(), *(x.to(torch.complex128) for x in (a, u, v))
        r = a @ v - u * s.double()
        assert bool((found.residuals[0] >= r.norm(dim=0)).all())
        if symmetric:
            assert bool((found.quotients[0] >= torch.linalg.vecdot(v.mT, r.mT).abs()).all())
        assert total == float(found.total) >= float(r.norm())
        identity = torch.eye(5)
        assert lost == float(found.orthogonality) >= max(float((x.mH @ x - identity).norm()) for x in (u, v))


def test_values_that_disagree_with_trace_or_norm() -> None:
    a = matrix([1, 0], [0, 3])
    for s, symmetric, shift in (
        ([1, 3 + D], True, D),
        ([1 - D, 3 + D], True, 2**0.5 * D),
        ([3 + D, 1], False, D),
    ):
        found = float(consistency(a, torch.tensor([s], dtype=torch.float64), symmetric=symmetric))
        assert 0.19 * D <= found <= shift / 10**0.5  # a lower bound on the relative change of A
    exact = torch.tensor([[1.0, 3.0]], dtype=torch.float64)
    assert float(consistency(a, exact, symmetric=True)) <= 2.0**-52


@pytest.mark.parametrize("as_given", [torch.as_tensor, np.asarray, float])
def test_disagreement_is_unknown_where_trace_or_norm_is(as_given: Any) -> None:
    s = torch.ones(2, dtype=torch.float64) if as_given is torch.as_tensor else np.ones(2)
    for size, trace in ((math.nan, 2.0), (2**0.5, math.nan)):
        assert math.isnan(inconsistency(s, as_given(size), as_given(trace)))
