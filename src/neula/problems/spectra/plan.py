"""Single matrices of a shape that was decomposed before: LAPACK, what is measured, the result."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from neula.certificates.low_rank import SVDCertificate
from neula.certificates.spectra import (
    SpectralErrors,
    SpectralMeasures,
    a_priori_error,
    consistency,
    lost_orthogonality,
    measured,
    spectral_errors,
)
from neula.engines.formats import in_double
from neula.kernels.cholesky.symmetric import hermitian_from_lower
from neula.kernels.magnitudes import SQUARABLE
from neula.kernels.precision import plain_arithmetic
from neula.pipeline.plans import Given, accepted_result
from neula.pipeline.result import EighResult, SVDResult
from neula.pipeline.result.deferred import Later
from neula.problems.spectra.decompose import completed
from neula.problems.spectra.problem import SpectralOptions, SpectralTuning


class SpectralPlan:
    """A plan for single matrices on a CPU, of which LAPACK comes first in their own precision.

    Parameters
    ----------
    shape : (int, int)
    options : SpectralOptions
    upper : bool, optional
        Whether the upper triangle is read, of a symmetric matrix.
    full : bool, optional
        Whether U and Vh are to be square.
    """

    def __init__(
        self, shape: tuple[int, int], options: SpectralOptions, *, upper: bool = False, full: bool = False
    ) -> None:
        self.options, self._bounds = options, options.bounds(min(shape))
        self._triangle, self._upper, self._full, self._shape = "LU"[upper], upper, full, shape
        self._device, name = torch.device("cpu"), "eigh" if options.symmetric else "svd"
        self._label = f"{name} {options.work.name}"
        double = min(shape) <= options.tuning[SpectralTuning].measured_in_double
        self._wide: Callable[[torch.Tensor], torch.Tensor] = in_double if double else lambda x: x

    @classmethod
    def for_matrix(cls, a: torch.Tensor, options: SpectralOptions, **others: bool) -> SpectralPlan | None:
        """Plan for matrices like A; None where LAPACK is not the first link in the precision of A."""
        alone = a.ndim == 2 and a.numel() > 0 and options.progress is None
        host = options.engine.device.type == "cpu" and options.tuning.lapack
        if not (alone and host and a.dtype.to_real() == options.work.dtype):
            return None
        return cls((a.shape[0], a.shape[1]), options, **others)

    def __call__(self, given: Given) -> EighResult[Any] | SVDResult[Any] | None:
        """The result; None where it is not accepted."""
        a = given.arrays[0]
        with plain_arithmetic(self._device):
            return self._solved(a if isinstance(a, torch.Tensor) else torch.from_numpy(a), given)

    def _solved(self, a: torch.Tensor, given: Given) -> EighResult[Any] | SVDResult[Any] | None:
        options, whole = self.options, a
        if options.symmetric:
            whole = a if torch.equal(a, a.mH) else hermitian_from_lower(a.mH if self._upper else a)
        whole = self._wide(whole)
        norm = in_double(torch.linalg.vector_norm(whole)[None])
        size = float(norm)
        if not 1 / SQUARABLE < size < SQUARABLE:
            return None
        u = v = None
        if not options.vectors:
            s = torch.linalg.eigvalsh(a, self._triangle) if options.symmetric else torch.linalg.svdvals(a)
            residual = float(consistency(whole[None], s[None], symmetric=options.symmetric))
            lost, found = 0.0, None
        else:
            if options.symmetric:
                s, v = torch.linalg.eigh(a, self._triangle)
                u = v
            else:
                u, s, vh = torch.linalg.svd(a, full_matrices=False)
                v = vh.mH
                if self._full:
                    u, v = (x if len(x) == x.shape[1] else completed(x[None])[0] for x in (u, v))
            found, rest = self._measured(whole, u, s, v, norm)
            residual, lost = float(found.total) / size, max(float(found.orthogonality), rest)
        bounds = self._bounds
        if not (residual <= bounds.residual and lost <= bounds.orthogonality):
            return None
        return self._result(given, (u, s, v), (residual, lost), found)

    def _measured(
        self, a: torch.Tensor, u: torch.Tensor, s: torch.Tensor, v: torch.Tensor, norm: torch.Tensor
    ) -> tuple[SpectralMeasures, float]:
        """Measures of vectors that belong to values, and the orthogonality of all."""
        m, n = self._shape
        k, rest = min(m, n), 0.0
        if max(u.shape[1], v.shape[1]) > k:
            square = u if m > n else v
            rest = float(lost_orthogonality(square[None], a.dtype))
        if u is v:
            v = v[None]
            return measured(a[None], v, s[None], v, norm), rest
        tall = (a, u[:, :k], v[:, :k]) if m >= n else (a.mH, v[:, :k], u[:, :k])
        a, left, right = (x[None] for x in tall)
        return measured(a, left, s[None], right, norm), rest

    def _result(
        self,
        given: Given,
        triplet: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None],
        numbers: tuple[float, float],
        found: SpectralMeasures | None,
    ) -> EighResult[Any] | SVDResult[Any]:
        options, bounds, (u, s, v), give = self.options, self._bounds, triplet, given.give
        errors = cache(lambda: self._errors(s, found))

        def later(name: str) -> Later:
            return Later(lambda: give(getattr(errors(), name)[0]))

        fields: dict[str, Any] = {"errors": later("errors"), "converged": True}
        for name in ("clusters", "gaps", "vector_errors"):
            fields[name] = later(name) if options.vectors else None
        fields["accepted"] = Later(lambda: give(s.isfinite().all()))

        def certificate() -> SVDCertificate:
            return SVDCertificate(*numbers, 0.0, bounds.residual, bounds.orthogonality)

        residual, lost = numbers
        if not options.symmetric:
            fields |= {"U": None if u is None else give(u), "s": give(s)}
            fields |= {"Vh": None if v is None else give(v.mH.resolve_conj())}
            fields |= {"relative_error": residual, "certificate": Later(certificate)}
            return accepted_result(SVDResult, given, options, self._label, lambda: str(certificate()), fields)
        fields |= {"eigenvalues": give(s), "eigenvectors": None if v is None else give(v)}
        fields |= {"evidence": "measured" if options.vectors else "a priori"}
        fields |= {"residual": residual, "orthogonality": lost}
        fields |= {"residual_bound": bounds.residual, "orthogonality_bound": bounds.orthogonality}
        for name, number in (("residuals", residual), ("orthogonalities", lost)):
            fields[name] = Later(partial(lambda x: give(s.new_tensor(x, dtype=torch.float64)), number))
        return accepted_result(EighResult, given, options, self._label, lambda: str(certificate()), fields)

    def _errors(self, s: torch.Tensor, found: SpectralMeasures | None) -> SpectralErrors:
        m, n = self._shape
        s = in_double(s)[None]
        if found is None:
            unknown = torch.full_like(s, torch.nan)
            error = a_priori_error(self.options.work.u, n) * s.abs().amax(1, keepdim=True)
            return SpectralErrors(error.expand_as(s), unknown, unknown.long(), unknown)
        symmetric = self.options.symmetric
        end = None if symmetric or m == n else torch.zeros_like(s[:, 0])
        return spectral_errors(s, found, symmetric=symmetric, edges=(None, end))
