"""Spectral decompositions of batches: scale, run the chain, and put what was found into the units of A."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial, reduce
from typing import Any, NamedTuple

import numpy as np
import torch

from neula.algorithms.orthogonal.reconstruction import complement
from neula.algorithms.scaling import power_of_two_scales
from neula.certificates.low_rank import SVDCertificate
from neula.certificates.spectra import (
    DIRECT,
    SpectralErrors,
    SpectralMeasures,
    a_priori_error,
    backward_error,
    inconsistency,
    lost_alone,
    measured_alone,
    spectral_errors,
)
from neula.engines.formats import in_double, matching_dtype
from neula.engines.graphs import called
from neula.errors import of_batch
from neula.kernels.cholesky.symmetric import hermitian_from_lower
from neula.kernels.magnitudes import SQUARABLE, largest_magnitude, two_norms
from neula.kernels.precision import plain_arithmetic
from neula.kernels.shift import shift
from neula.pipeline.call import Call, restored
from neula.pipeline.chain import Run, run_chain
from neula.pipeline.inputs import check_finite
from neula.pipeline.plans import Given, accepted_result, numbers_later
from neula.pipeline.result import Attempt, EighResult, SVDResult
from neula.pipeline.result.shown import Later
from neula.problems.spectra.links import chain
from neula.problems.spectra.problem import (
    SpectralJudge,
    SpectralMatrices,
    SpectralOptions,
    SpectralTuning,
    SpectralValues,
)


@dataclass(frozen=True)
class Decomposed:
    """Decompositions of a batch of matrices."""

    run: Run[SpectralValues]
    judge: SpectralJudge
    options: SpectralOptions
    shape: tuple[int, int]  # of the matrices, which are not wide
    exponents: torch.Tensor  # shape (batch,): A was divided by these powers of two
    usable: torch.Tensor  # shape (batch,): which matrices hold neither NaN nor Inf
    metric: torch.Tensor | None = None  # L^H, where V is orthonormal in the inner product of L L^H

    @property
    def values(self) -> torch.Tensor:
        """Eigenvalues or singular values of A, shape (batch, k), float64; NaN of unusable matrices.

        Raises OverflowError.
        """
        found = self._in_units(in_double(self.run.found.s))
        if bool(found.isinf().any()):
            name = "an eigenvalue" if self.options.symmetric else "a singular value"
            raise OverflowError(f"{name} does not fit torch.float64: scale A down")
        return found

    @property
    def u(self) -> torch.Tensor:
        """Left singular vectors, or eigenvectors; NaN of unusable matrices."""
        return self._known(self.run.found.u)

    @property
    def v(self) -> torch.Tensor:
        """Right singular vectors."""
        return self._known(self.run.found.v)

    def errors(self, dtype: torch.dtype) -> SpectralErrors:
        """Bounds on the errors of values and vectors that are rounded to a dtype."""
        found, options, order = self.run.found, self.options, self.shape[1]
        s, part, u = in_double(found.s), options.part, options.work.u
        if not options.vectors:
            bound = a_priori_error(u, order) * (_largest(s) if part is None else self._size)
            unknown = torch.full_like(s, math.nan)
            error = bound[:, None].expand_as(s)
            errors = SpectralErrors(error, unknown, torch.zeros_like(unknown, dtype=torch.int64), unknown)
        else:
            ends: list[torch.Tensor | None] = [None, None]
            if part is not None and s.shape[1] < order:  # what lies beyond these is unknown
                ends = [s[:, 0] if part[0] > 0 else None, s[:, -1] if part[1] < order - 1 else None]
            if not options.symmetric and self.shape[0] > order > 0:
                ends[1] = torch.zeros_like(s[:, 0])
            known = None if part is None or s.shape[1] == order else a_priori_error(u, order) * self._size
            vectors = (found.v,) if options.symmetric else (found.u, found.v)
            moved = [_lost_digits(x, dtype, self.metric) for x in vectors]
            errors = spectral_errors(
                s,
                found.measures,
                symmetric=options.symmetric,
                edges=(ends[0], ends[1]),
                a_priori=known,
                moved=reduce(torch.maximum, moved),
            )
        bounds = self._bound_in_units(errors.errors + self._rounding(dtype.to_real()))
        sines = self._known(errors.vector_errors)
        return errors._replace(errors=bounds, gaps=self._in_units(errors.gaps), vector_errors=sines)

    @property
    def backward_errors(self) -> torch.Tensor:
        """Frobenius norms of changes of A whose exact eigenvalues and eigenvectors are those found, shape
        (batch,), relative to the powers of two that A was divided by.
        """
        return backward_error(in_double(self.run.found.s), self.run.found.measures, frobenius=True)

    def _rounding(self, dtype: torch.dtype) -> torch.Tensor:
        """Errors of rounding values to a dtype, scaled."""
        s, exponents = in_double(self.run.found.s), self.exponents[:, None]
        return (shift(in_double(shift(s, exponents).to(dtype)), -exponents) - s).abs()

    def _bound_in_units(self, x: torch.Tensor) -> torch.Tensor:
        """Not below x where it becomes subnormal."""
        found = self._in_units(x)
        below = shift(found, -self.exponents[:, None]) < x
        return torch.where(below, torch.nextafter(found, torch.full_like(found, math.inf)), found)

    def error_fields(
        self, call: Call, part: Callable[[SpectralErrors], SpectralErrors] = lambda errors: errors
    ) -> dict[str, Any]:
        """Fields of results with bounds on errors, of a part of the values: computed when one is read."""
        batch, errors = call.first.tensor.shape[:-2], cache(lambda: part(self.errors(call.dtype.to_real())))

        def later(name: str) -> Later:
            def made() -> Any:
                x = getattr(errors(), name)
                return call.hand_back(x.reshape(*batch, x.shape[-1]), x.dtype)

            return Later(made)

        return {name: later(name) for name in SpectralErrors._fields[: None if self.options.vectors else 1]}

    def common_fields(self, call: Call) -> dict[str, Any]:
        """Fields of all results."""
        accepted = self.run.accepted
        known = {"converged": bool(accepted.all()), "accepted": call.of_members(accepted)}
        return known | call.diagnostics(self.run.attempts)

    def report(self, call: Call, what: str, result: Any) -> None:
        """Warn, or raise if the call is strict, where the accuracy was missed."""
        if not result.converged:
            what = f"{what} are not certified to {result.accuracy} accuracy"
            call.report_missed(what, self.run.attempts[-1].reason, result, call.missed(self.run.accepted))

    @property
    def _size(self) -> torch.Tensor:
        """``||A||_F``, scaled; of values alone a bound by the order: parts of elements are below 1."""
        size, parts = self.run.found.size, 2 if self.run.found.v.is_complex() else 1
        return torch.where(size.isnan(), self.shape[1] * parts**0.5, size)

    def _in_units(self, x: torch.Tensor) -> torch.Tensor:
        return self._known(shift(x, self.exponents[:, None]))

    @cached_property
    def _all_usable(self) -> bool:
        return bool(self.usable.all())

    def _known(self, x: torch.Tensor) -> torch.Tensor:
        if self._all_usable:
            return x
        return torch.where(self.usable.reshape(-1, *(1,) * (x.ndim - 1)), x, math.nan)


def _largest(s: torch.Tensor) -> torch.Tensor:
    return s.abs().amax(1) if s.shape[1] else s.new_zeros(len(s))


def _lost_digits(v: torch.Tensor, dtype: torch.dtype, metric: torch.Tensor | None) -> torch.Tensor:
    """Norms of what rounding to a dtype takes from each column, shape (batch, k)."""
    lost = v - v.to(matching_dtype(dtype.to_real(), v.dtype)).to(v.dtype)
    return in_double(two_norms(lost if metric is None else metric @ lost, 1))


def decompose(
    call: Call, matrices: torch.Tensor, options: SpectralOptions, *, upper: bool = False
) -> Decomposed:
    """Decompose matrices that are not wide; of symmetric ones the lower triangle is read.

    Shapes: matrices (batch, m, n). ``upper``: whether these are adjoints of what was given, whose upper
    triangles are read. Raises ValueError if a single matrix holds NaN or Inf.
    """
    m, n = matrices.shape[1:]
    scaled = partial(_scaled, symmetric=options.symmetric)
    # Of larger ones the rest takes so long that launches do not matter.
    play = options.engine.replay if matrices.numel() and n <= DIRECT else called
    a, largest, usable, exponents = play(scaled, (matrices,), ("scaled", options.symmetric))
    if call.first.tensor.ndim == 2:
        given = call.first.tensor
        if options.symmetric:
            given = given.triu() if upper else given.tril()
        check_finite(given, largest, "A")
    judge = SpectralJudge(options.bounds(n))
    if a.numel() == 0:
        run = _of_nothing(a)
    else:
        run = run_chain(chain(len(a), n, options), SpectralMatrices(a, options), judge)
    known = usable.cpu().numpy()
    if not known.all():
        run.accepted &= known
        run.numbers[:, ~known] = math.nan
        reason = of_batch("NaN or Inf in A", int((~run.accepted).sum()), len(a), "matrices")
        run.attempts[-1] = replace(run.attempts[-1], accepted=False, reason=reason)
    return Decomposed(run, judge, options, (m, n), exponents, usable)


def _scaled(matrices: torch.Tensor, *, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Matrices divided by powers of two, zero where they hold NaN or Inf; their largest elements; which are
    finite; and the exponents. Nothing synchronizes on a GPU.
    """
    a = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
    if symmetric and (a.is_cuda or not torch.equal(a, a.mH)):
        a = hermitian_from_lower(a)
    largest = largest_magnitude(a, (1, 2)) if a.numel() else a.real.new_zeros(len(a))
    usable = largest.isfinite()
    scales = power_of_two_scales(torch.where(usable, largest, 0.0))
    if a.is_cuda or not bool(usable.all()):
        a = torch.where(usable[:, None, None], a, 0.0)
    return a * scales[:, None, None], largest, usable, 1 - torch.frexp(scales)[1]


def _of_nothing(a: torch.Tensor) -> Run[SpectralValues]:
    """No matrices, or matrices without elements."""
    count, m, n = a.shape
    none = torch.zeros(count, n, dtype=torch.float64, device=a.device)
    one = torch.zeros(count, dtype=torch.float64, device=a.device)
    u, v = (torch.eye(k, n, dtype=a.dtype, device=a.device).expand(count, k, n).clone() for k in (m, n))
    run = Run.begin(count, SpectralValues(none, u, v, none, none, one, one, one))
    run.numbers, run.accepted[:] = np.zeros((2, count)), True
    run.attempts.append(Attempt("nothing to do", True, f"A is {m} x {n}, {count} times"))
    return run


def worst(x: np.ndarray) -> float:
    """The largest of some errors, NaN being infinite."""
    return float(np.where(np.isnan(x), np.inf, x).max(initial=0.0))


def completed(u: torch.Tensor) -> torch.Tensor:
    """Square matrices that begin with orthonormal columns, shape (batch, m, k)."""
    count, m, k = u.shape
    if not count:
        return u.new_zeros(0, m, m)
    rest = complement(u.nan_to_num(0.0))
    rest = torch.where(u.isfinite().flatten(1).all(1)[:, None, None], rest, math.nan) if k else rest
    return torch.cat([u, rest], 2)


class AcceptedSpectrum(NamedTuple):
    """An accepted decomposition of A, which is as it was measured, and of a norm."""

    a: torch.Tensor
    size: float
    u: torch.Tensor | None
    s: torch.Tensor
    v: torch.Tensor | None
    numbers: tuple[float, float]  # as the judge reads them
    measures: Callable[[], SpectralMeasures] | None  # None of values alone


class SpectralPlan:
    """A plan for single matrices on a CPU, of which LAPACK comes first in their own precision.

    ``upper``: whether the upper triangle is read, of a symmetric matrix. ``full``: whether U and Vh are to be
    square.
    """

    def __init__(
        self, shape: tuple[int, int], options: SpectralOptions, *, upper: bool = False, full: bool = False
    ) -> None:
        self.options, self.bounds = options, options.bounds(min(shape))
        self._upper, self._full, self._shape = upper, full, shape
        self._device, name = torch.device("cpu"), "eigh" if options.symmetric else "svd"
        self.label = f"{name} {options.work.name}"
        double = min(shape) <= options.tuning[SpectralTuning].measured_in_double
        self._wide: Callable[[torch.Tensor], torch.Tensor] = in_double if double else lambda x: x

    @classmethod
    def for_matrix(cls, a: torch.Tensor, options: SpectralOptions, **others: bool) -> SpectralPlan | None:
        """Plan for matrices like A; None where LAPACK is not the first link in the precision of A."""
        alone = a.ndim == 2 and a.numel() > 0
        host = options.engine.device.type == "cpu" and options.tuning.lapack
        if not (alone and host and a.dtype.to_real() == options.work.dtype):
            return None
        return cls((a.shape[0], a.shape[1]), options, **others)

    @restored
    def __call__(self, given: Given) -> EighResult[Any] | SVDResult[Any] | None:
        """The result; None where it is not accepted."""
        with plain_arithmetic(self._device):
            found = self.decomposed(given.arrays[0])
            return None if found is None else self._result(given, found)

    def decomposed(self, given: np.ndarray | torch.Tensor) -> AcceptedSpectrum | None:
        """Values and vectors with their errors; None where they are not accepted."""
        a = given if isinstance(given, torch.Tensor) else torch.from_numpy(given)
        a, options = a.mH if self._upper else a, self.options  # as everywhere: signs of vectors are the same
        whole = a
        if options.symmetric and not torch.equal(a, a.mH):
            whole = hermitian_from_lower(a)
        whole = self._wide(whole)
        size = float(norm := two_norms(whole))
        if not 1 / SQUARABLE < size < SQUARABLE:
            return None
        u = v = None
        if not options.vectors:
            s = torch.linalg.eigvalsh(a) if options.symmetric else torch.linalg.svdvals(a)
            trace = float(in_double(whole.diagonal()).real.sum()) if options.symmetric else None
            total = size * float(inconsistency(in_double(s).numpy(), size, trace))
            lost, measures = 0.0, None
        else:
            if options.symmetric:
                s, v = torch.linalg.eigh(a)
                u = v
            else:
                wide = len(a) < a.shape[1]
                u, s, vh = torch.linalg.svd(a.mH if wide else a, full_matrices=False)
                u, v = (vh.mH.resolve_conj(), u) if wide else (u, vh.mH)
                if self._full:
                    u, v = (x if len(x) == x.shape[1] else completed(x[None])[0] for x in (u, v))
            total, lost, measures = self._measured(whole, u, s, v, norm)
        if not (total / size <= self.bounds.residual and lost <= self.bounds.orthogonality):
            return None
        return AcceptedSpectrum(whole, size, u, s, v, (total / size, lost), measures)

    def _measured(
        self, a: torch.Tensor, u: torch.Tensor, s: torch.Tensor, v: torch.Tensor, norm: torch.Tensor
    ) -> tuple[float, float, Callable[[], SpectralMeasures]]:
        """Total error and orthogonality of all vectors, and later measures of those that belong to values."""
        k, rest = len(s), 0.0
        if self._shape[0] < self._shape[1]:
            a, u, v = a.mH, v, u
        given = a.resolve_conj().numpy()
        right = v.resolve_conj().numpy().astype(given.dtype, copy=False)
        left = right if u is v else u.resolve_conj().numpy().astype(given.dtype, copy=False)
        if left.shape[1] > k:
            rest, left = lost_alone(left.T, a.dtype), left[:, :k]
        values = s.numpy().astype(given.real.dtype, copy=False)
        found = measured_alone(given, left, values, right, float(norm), a.dtype)
        return found[0], max(found[1], rest), found[2]

    def _result(self, given: Given, found: AcceptedSpectrum) -> EighResult[Any] | SVDResult[Any]:
        options, bounds, give = self.options, self.bounds, given.give
        u, s, v, measures, numbers = found.u, found.s, found.v, found.measures, found.numbers
        as_measured = s.clone()  # the user may write into s
        errors = cache(lambda: self._errors(as_measured, measures and measures()))

        def later(name: str) -> Later:
            return Later(lambda: give(getattr(errors(), name)[0]))

        fields: dict[str, Any] = {"errors": later("errors"), "converged": True}
        for name in ("clusters", "gaps", "vector_errors"):
            fields[name] = later(name) if options.vectors else None
        fields["accepted"] = Later(lambda: give(as_measured.isfinite().all()))

        certificate = partial(SVDCertificate, *numbers, 0.0, bounds.residual, bounds.orthogonality)
        residual, lost = numbers
        fields |= {"evidence": "measured" if options.vectors else "a priori"}
        if not options.symmetric:
            fields |= {"U": None if u is None else give(u), "s": give(s)}
            fields |= {"Vh": None if v is None else give(v.mH.resolve_conj())}
            fields |= {"relative_error": residual, "certificate": Later(certificate)}
            return accepted_result(SVDResult, given, options, self.label, lambda: str(certificate()), fields)
        fields |= {"eigenvalues": give(s), "eigenvectors": None if v is None else give(v)}
        fields |= {"residual": residual, "orthogonality": lost}
        fields |= {"residual_bound": bounds.residual, "orthogonality_bound": bounds.orthogonality}
        fields |= numbers_later(given, {"residuals": residual, "orthogonalities": lost})
        return accepted_result(EighResult, given, options, self.label, lambda: str(certificate()), fields)

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
