"""``torch.ops.neula.eigh`` and ``svd``."""

from __future__ import annotations

from typing import Any

import torch

from neula.pipeline import spectral_derivatives
from neula.pipeline.operators import Operator
from neula.pipeline.result import EighResult, SVDResult
from neula.problems.operators.arguments import (
    COMMON,
    Tensors,
    are_simple,
    certified,
    fields_of,
    results_of,
    settings,
    unread,
    worst,
)

EIGH = Operator(
    f"eigh(Tensor A, {COMMON})"
    " -> (Tensor w, Tensor V, Tensor errors, Tensor residual, Tensor orthogonality, Tensor accepted)",
    spectral_derivatives.EigenvectorsFunction,
    fields_of(
        *("spectra.eigh:eigh", "eigenvalues", "eigenvectors"),
        *("errors", "residuals", "orthogonalities", "accepted"),
    ),
    results_of("real n", "n n", "float64 n", "float64", "float64", "bool"),
)


def traced_eigh(
    A: Any,
    B: Any = None,
    *,
    upper: bool = False,
    eigvals_only: bool = False,
    subset_by_index: tuple[int, int] | None = None,
    subset_by_value: tuple[float, float] | None = None,
    **options: Any,
) -> EighResult[Any] | None:
    """:func:`neula.eigh` in a graph; how many values an interval has depends on the numbers."""
    from neula.problems.spectra.eigh import indices

    if B is not None or subset_by_value is not None or not are_simple(A, **options) or A.ndim < 2:
        return None
    found = EIGH.by_name(A.mH if upper else A, **options)
    first, last = indices(subset_by_index, A.shape[-1]) or (0, A.shape[-1] - 1)
    w, v, errors = (x[..., first : last + 1] for x in found[:3])
    residuals, orthogonalities, accepted = found[3:]
    known = unread(accepted, residuals=residuals, orthogonalities=orthogonalities) | settings(options, A)
    return EighResult(eigenvalues=w, eigenvectors=None if eigvals_only else v, errors=errors, **known)


def _svd(A: torch.Tensor, **options: Any) -> Tensors:
    from neula.problems.spectra.svd import svd

    found = svd(A, full_matrices=False, **options)
    return *found, found.errors, *certified(found, A)


SVD = Operator(
    f"svd(Tensor A, {COMMON}) -> (Tensor U, Tensor s, Tensor Vh, Tensor errors, Tensor residual, "
    "Tensor orthogonality, Tensor accepted)",
    spectral_derivatives.TripletsFunction,
    _svd,
    results_of("m k", "real k", "k n", "float64 k", "float64", "float64", "bool"),
)


def traced_svd(
    A: Any, *, full_matrices: bool = True, compute_uv: bool = True, **options: Any
) -> SVDResult[Any] | None:
    """:func:`neula.svd` in a graph; vectors beyond the rank have no derivatives."""
    if not are_simple(A, **options) or A.ndim < 2:
        return None
    if full_matrices and compute_uv and A.shape[-2] != A.shape[-1]:
        return None
    u, s, vh, errors, residuals, _, accepted = SVD.by_name(A, **options)
    known: dict[str, Any] = {"relative_error": worst(residuals), "converged": accepted.all()}
    return SVDResult(
        U=u if compute_uv else None,
        s=s,
        Vh=vh if compute_uv else None,
        errors=errors,
        **known,
        accepted=accepted,
        **settings(options, A),
    )
