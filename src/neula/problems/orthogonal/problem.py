"""Options of a QR factorization, the matrices, and their measured factors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from neula.algorithms.orthogonal.reconstruction import complement
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.algorithms.scaling import SAFE_NORMS, power_of_two_scales
from neula.certificates.orthogonality import PROBES, gaussian_probes, measured_again
from neula.certificates.qr import (
    certificate_of,
    certificates_of,
    certifying_dtype,
    image_of,
    qr_measures,
    units,
)
from neula.certificates.qr_evidence import QRCertificate, QRCertificates
from neula.engines import BF16, FP16, FP64, Arithmetic, Engine, Format
from neula.engines.formats import in_double, matching_dtype
from neula.engines.reduction import HERE, Reduction
from neula.kernels.few_vectors.probes import probe_errors
from neula.kernels.few_vectors.probes_host import reflected_errors
from neula.kernels.magnitudes import largest_magnitude, two_norms
from neula.pipeline.batches import Batch, Values
from neula.pipeline.call import Call, ProblemOptions
from neula.pipeline.chain import Answer, Run, Verdict
from neula.pipeline.distributed import Give
from neula.pipeline.factors import QRMethods
from neula.pipeline.gradients import attach_factors
from neula.pipeline.inputs import check_finite, usable_members
from neula.pipeline.plans import Given, accepted_result
from neula.pipeline.result import Attempt, QRResult
from neula.pipeline.result.shown import Later


@dataclass(frozen=True)
class QRTuning:
    """Sizes from which one way to a QR is faster than another."""

    cholesky_qr_ratio: float  # rows a column from which on Cholesky QR beats LAPACK's reflections
    widened_elements: int  # of a matrix in single precision, at most, that is copied in double
    # m n^2 up to which Gram matrices in double precision take over where panels have lost too much: for
    # float32 up to a 32nd of that at once, in double precision, replayed, up to 16 times as much. 0: fp64 is
    # slow.
    gram_passes: int
    low_columns: int  # columns up to which Cholesky QR of a whole tall matrix comes first in half precision
    tall_ratio: int  # rows a column from which on a matrix is tall
    partly_corrected: float  # columns from which on only the last ones of a square Q are corrected
    # Columns up to which a GPU's library reflects those of one matrix, or of a batch, before Q and R are
    # tried, where reflectors are asked for.
    reflected: int
    reflected_of_batch: int


@dataclass(frozen=True)
class QROptions(ProblemOptions):
    # algorithm, compute, panel, cutoff: as for neula.qr.
    algorithm: str | None = None
    compute: str | None = None
    panel: str | None = None
    cutoff: int | None = None
    in_place: bool = False  # whether Q is to take the memory of A

    @property
    def named(self) -> bool:
        return (self.algorithm, self.compute, self.panel, self.cutoff) != (None,) * 4

    @cached_property
    def low(self) -> Arithmetic:
        """Arithmetic of the products: the one that was named, or the cheapest that reaches the target."""
        name = self.engine.tuning.cheapest(self.target) if self.compute is None else self.compute
        return Arithmetic.named(name)

    @cached_property
    def low_engine(self) -> Engine:
        return self.engine.using(self.low)

    def report(self, n: int) -> Callable[[int], None] | None:
        """The callback of recursive Gram-Schmidt for progress, given the finished columns of n."""
        if self.progress is None:
            return None
        progress, stage = self.progress, f"rgsqrf {self.low.format.name}"
        return lambda columns: progress(stage, (columns / n) ** 2)


@dataclass(frozen=True)
class QRValues(Values):
    q: torch.Tensor  # shape (batch, m, k): with k = min(m, n), in working precision
    r: torch.Tensor  # shape (batch, k, n)
    measures: torch.Tensor  # shape (batch, 4): as of neula.certificates.qr.qr_measures

    def norms(
        self, which: np.ndarray, found: QRCertificate | QRCertificates, over_rows: Reduction = HERE
    ) -> np.ndarray:
        """``||I - Q^H Q||_2`` of some members, whose first estimates exceed the bound of a certificate."""
        q = self.q if which.all() else self.q[torch.from_numpy(which).to(self.q.device)]
        return np.array(measured_again(q, found.orthogonality_2norm_bound, over_rows).tolist())

    @classmethod
    def of_one(cls, q: torch.Tensor, r: torch.Tensor, measures: torch.Tensor) -> QRValues:
        """The factors of a single matrix, which are not copied."""
        return cls(q.unsqueeze(0), r.unsqueeze(0), measures.unsqueeze(0))


def raw_dtype(given: torch.dtype) -> torch.dtype:
    """The dtype of a QR in Householder form: LAPACK, and so torch, has no reflectors in half precision."""
    return torch.promote_types(given, torch.float32)


@dataclass(frozen=True)
class QRMatrices(Batch):
    a: torch.Tensor  # shape (batch, m, n)
    options: QROptions

    @cached_property
    def single(self) -> Matrix:
        """The single matrix, checked and scaled. Raises ValueError if it holds NaN or Inf."""
        return Matrix.checked(self.a[0], self.options)

    @property
    def k(self) -> int:
        return min(self.options.shape_of(self.a.shape))

    def leading(self, dtype: torch.dtype) -> torch.Tensor:
        """The leading blocks that are not wide; the matrices themselves where nothing changes."""
        return self.a[..., : self.k].to(dtype)

    def scales(self) -> torch.Tensor:
        wide_enough = torch.promote_types(self.a.dtype.to_real(), torch.float32)
        largest = largest_magnitude(self.a, 1)
        return power_of_two_scales(self.options.over_rows.largest(largest).to(wide_enough))

    def scaled(self, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (self.a[..., : self.k] * scales[:, None, : self.k]).to(dtype)

    def measured(
        self, q: torch.Tensor, r: torch.Tensor, scales: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Factors as they are kept, the R of wide matrices with the columns beyond the square, and measures.

        Without scales, those that make columns of norm 1: R has the norms of A's columns, unless they are out
        of the range in which their squares can be trusted, and then measures are NaN.
        """
        q = q.to(matching_dtype(self.options.work.dtype, q.dtype))
        r = r.to(torch.promote_types(self.a.dtype, torch.float32))
        if scales is not None:
            r = r / scales[:, None, : self.k]
        if self.a.shape[2] > self.k:
            r = torch.cat([r, self._projected(q, scales).to(r.dtype)], -1)
        alike = self.a.dtype == q.dtype == r.dtype and r.shape[1] == r.shape[2]
        if scales is None and alike and self.a.is_cpu and not self.options.over_rows.spread:
            # The host measures such factors faster than torch does.
            measures = measured_on_host(self.a, q, r, self.options.target)
            if np.isfinite(measures).all():
                return q, r, torch.from_numpy(measures)
        if scales is None:
            norms = two_norms(r, 1)
            low, high = SAFE_NORMS[q.dtype.to_real()]
            # NaN unless low < norm < high; zero columns are harmless.
            inverse = functional.threshold(norms, low, math.nan).reciprocal_()
            scales = functional.threshold(inverse, 1 / high, math.nan).masked_fill_(norms == 0, 1.0)
        (r,) = self.options.over_rows.agreed(r)
        return q, r, qr_measures(self.a, q, r, scales, self.options.over_rows)

    def _projected(self, q: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """``Q^H A`` of the columns beyond the square."""
        q, rest = in_double(q), in_double(self.a[..., self.k :])
        if scales is None:
            return q.mH @ rest
        beyond = scales[:, None, self.k :]
        return (q.mH @ (rest * beyond)) / beyond


@dataclass(frozen=True)
class Matrix:
    """A single matrix with its column scales."""

    # A zero column is replaced by a random one for the factorization, and its column of R by zeros: Q stays
    # orthonormal, as Householder reflections would have it.

    a: torch.Tensor  # shape (m, n)
    scales: torch.Tensor  # shape (n,)
    # bool, shape (n,): zero columns; None where there are none, and where not read yet.
    zero: torch.Tensor | None
    options: QROptions

    @classmethod
    def checked(cls, a: torch.Tensor, options: QROptions) -> Matrix:
        """Check the numbers and choose the scales: one pass over the matrix."""
        column_max = _column_max(a, options)
        seen = column_max.cpu()  # the host waits once for all that it reads
        check_finite(a, seen, "A", options.over_rows)
        zero = column_max == 0 if bool((seen == 0).any()) else None
        return cls(a, power_of_two_scales(column_max), zero, options)

    @classmethod
    def unchecked(cls, a: torch.Tensor, options: QROptions) -> Matrix:
        """Make a matrix and its scales without synchronizing, and so without a check for NaN."""
        return cls(a, power_of_two_scales(_column_max(a, options)), None, options)

    @property
    def leading(self) -> Matrix:
        """The leading square block of a wide matrix; others themselves."""
        m, n = self.options.shape_of(self.a.shape)
        if m >= n:
            return self
        zero = None if self.zero is None else self.zero[:m]
        return Matrix(self.a[:, :m], self.scales[:m], zero, self.options)

    @cached_property
    def image(self) -> torch.Tensor:
        """Products with random vectors, by which factors can be measured when A is gone."""
        return image_of(self.a, self.scales, certifying_dtype(self.a.dtype, self.options.target))

    def scaled(self, engine: Engine) -> torch.Tensor:
        return self.filled(engine.empty(*self.a.shape), engine)

    def filled(self, out: torch.Tensor, engine: Engine) -> torch.Tensor:
        """Write the scaled matrix into ``out``, which may be A."""
        engine.fill(out, self.a, self.scales)
        if self.zero is not None:
            over_rows = self.options.over_rows
            generator = torch.Generator("cpu").manual_seed(over_rows.first)
            shape = (over_rows.own(out.shape[0]), int(self.zero.sum()))
            columns = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
            out[: shape[0], self.zero] = columns.to(out)
        return out

    def rgsqrf(self, panel: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Recursive Gram-Schmidt in the low arithmetic: Q, and R of the scaled matrix."""
        options, engine = self.options, self.options.low_engine
        m, n = self.a.shape
        chosen = (panel, options.panel, options.cutoff) != (None,) * 3
        low = options.target in (FP16, BF16) and not chosen
        work = engine.padded(m, n, dtype=engine.working_dtype if low else engine.storage)
        self.filled(work[:m], engine)
        panel, report = panel or options.panel, options.report(n)
        q, r = rgsqrf(work, engine, cutoff=options.cutoff, panel=panel, overwrite_a=True, on_columns=report)
        return q[:m], r

    def unscaled(self, q: torch.Tensor, r_scaled: torch.Tensor) -> torch.Tensor:
        """R of the matrix as given: scales undone, zero columns zero, those of a wide one added."""
        leading, options = self.leading, self.options
        r = r_scaled.to(matching_dtype(self.scales.dtype, q.dtype)) / leading.scales
        if leading.zero is not None:
            r[:, leading.zero] = 0
        m, n = options.shape_of(self.a.shape)
        if m >= n:
            return r
        engine = options.low_engine if options.target in (FP16, BF16) else options.engine.using(FP64)
        scales = self.scales[m:]
        rest = engine.fill(engine.empty(m, n - m), self.a[:, m:], scales)
        product = engine.gemm(engine.operand(q.to(engine.storage)).mH, engine.operand(rest))
        return torch.cat([r, product.to(r.dtype) / scales], 1)


def _column_max(a: torch.Tensor, options: QROptions) -> torch.Tensor:
    """Largest magnitude in each column, at least in float32."""
    return options.engine.column_max(a).to(torch.promote_types(a.dtype.to_real(), torch.float32))


def holding_nan(count: int, total: int) -> str:
    return f"{count} of {total} matrices hold NaN or Inf"


def measured_on_host(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor, target: Format) -> np.ndarray:
    """Measures as of :func:`neula.certificates.qr.qr_measures`."""
    # A batch, or one matrix and its factors. Diagonals of square R are nonnegative. Returns an array of shape
    # (4, batch).
    vectors = [probe_vectors(size, r.dtype) for size in r.shape[:-3:-1]]
    if r.shape[-2] == r.shape[-1] and (found := reflected_errors(a, q, r, vectors[0])) is not None:
        return trusted(found, target)
    a, q, r = (x if x.ndim == 3 else x[None] for x in (a, q, r))
    norms, (g, h) = two_norms(r, 1).double(), map(torch.from_numpy, vectors)
    errors = torch.stack(probe_errors(a, q, r, 1 / norms, g, h))
    errors = errors * units(len(h), PROBES, h.dtype, h.device)[:, None]
    return trusted(torch.cat([errors, torch.stack([norms.amin(1), norms.amax(1)])]).numpy(), target)


def trusted(found: np.ndarray, target: Format) -> np.ndarray:
    """The measures among these six numbers, NaN where the squares of columns are not to be trusted."""
    low, high = SAFE_NORMS[torch.promote_types(target.dtype, torch.float32)]
    measures, safe = found[:4], (found[4] > low) & (found[5] < high)
    if not safe.all():  # to select by a mask takes longer
        measures[:, ~safe] = math.nan
    return measures


@lru_cache(maxsize=64)
def probe_vectors(n: int, dtype: torch.dtype = torch.float64) -> np.ndarray:
    """Random vectors of a length, kept; complex for a complex dtype."""
    return gaussian_probes(n, torch.device("cpu"), dtype).numpy()


@dataclass(frozen=True)
class QRJudge:
    """Factors are accepted by residual and orthogonality, along random vectors and in the 2-norm."""

    shape: Sequence[int]  # of each matrix
    target: Format
    # Shape (batch, m, n): matrices that are factorized together, and may hold NaN or Inf: these are not tried
    # again.
    batch: torch.Tensor | None = None
    in_place: bool = False  # whether there are only the last factors
    over_rows: Reduction = HERE

    def certificates(self, run: Run[Any]) -> Sequence[QRCertificate]:
        found: Sequence[QRCertificate] | None = run.evidence
        dtype = run.found.measures.dtype
        return certificates_of(run.numbers, dtype, self.shape, self.target) if found is None else found

    def certificate(self, values: QRValues, numbers: np.ndarray | None = None) -> QRCertificate:
        """Certificate for a single matrix: arrays of one number take longer than numbers."""
        known = values.measures[0] if numbers is None else numbers[:, 0]
        found = certificate_of(known.tolist(), values.measures.dtype, self.shape, self.target)
        if not found.doubtful:
            return found
        (norm,) = values.norms(np.ones(1, dtype=bool), found, self.over_rows)
        return replace(found, orthogonality_2norm=float(norm))

    def certificates_of_batch(self, values: QRValues, numbers: np.ndarray) -> QRCertificates:
        """Certificates for a batch, from the measured numbers; estimates that are too large are replaced."""
        dtype = values.measures.dtype
        found = certificates_of(numbers, dtype, self.shape, self.target)
        if not found.doubtful.any():
            return found
        numbers[3, found.doubtful] = values.norms(found.doubtful, found, self.over_rows)
        return certificates_of(numbers, dtype, self.shape, self.target)

    def verdict(self, answer: Answer[Any], numbers: np.ndarray) -> Verdict:
        """Among factors that are not accepted, prefer the smallest error."""
        if self.batch is None:
            one = self.certificate(answer.values, numbers)
            numbers[3, 0] = one.orthogonality_2norm
            level = [[0.0], [0.0]] if self.in_place else [[not one.accepted], [one.error]]
            words = answer.doubt or one.in_words
            return Verdict(np.array([one.accepted]), np.array(level), words, evidence=[one])
        found = self.certificates_of_batch(answer.values, numbers)
        accepted = found.accepted
        penalty = np.array([~accepted, found.error])
        final = accepted | ~usable_members(self.batch, found.residual)
        return Verdict(accepted, penalty, found.in_words, final, found)


@dataclass(frozen=True)
class QRFactors:
    """Q and R in working precision, with the evidence."""

    q: torch.Tensor  # shape (batch, m, k): or H, shape (batch, m, n), in Householder form
    r: torch.Tensor  # shape (batch, k, n): or tau, shape (batch, k)
    certificates: Sequence[QRCertificate]  # one for each matrix
    attempts: tuple[Attempt, ...]

    @classmethod
    def from_run(cls, run: Run[Any], certificates: Sequence[QRCertificate]) -> QRFactors:
        """Factors at the end of a chain; NaN for matrices that hold NaN or Inf."""
        q, r, attempts = run.found.q, run.found.r, list(run.attempts)
        lost = ~run.accepted
        lost[run.open] = False
        if lost.any():
            attempts.append(Attempt("none", False, holding_nan(int(lost.sum()), len(q))))
            for factor in (q, r):
                factor[torch.from_numpy(lost).to(factor.device)] = math.nan
        return cls(q, r, certificates, tuple(attempts))

    @classmethod
    def of_nothing(cls, matrices: torch.Tensor, mode: str, target: Format) -> QRFactors:
        """The factors of no matrices, or of matrices without elements: nothing in them can be wrong."""
        # Without columns the complete Q is the identity, as in NumPy and torch.
        count, m, n = matrices.shape
        k = m if mode == "complete" else min(m, n)
        q, r = matrices.new_empty(count, m, k), matrices.new_empty(count, k, n)
        if q.numel() > 0:
            q.copy_(torch.eye(m, dtype=q.dtype, device=q.device))
        perfect = certificates_of(np.zeros((4, count)), torch.float64, (m, max(n, 1)), target)
        return cls(q, r, tuple(perfect), (Attempt("nothing to do", True, "no elements"),))

    def completed(self) -> QRFactors:
        """Append an orthonormal basis of the complement to Q, and zeros to R."""
        *batch, m, k = self.q.shape
        zeros = self.r.new_zeros(*batch, m - k, self.r.shape[-1])
        zeros[self.q.isnan().all((-2, -1))] = math.nan  # where there are no factors
        return replace(self, q=torch.cat([self.q, complement(self.q)], -1), r=torch.cat([self.r, zeros], -2))

    @property
    def residual(self) -> torch.Tensor:
        return self._of_each("residual")

    @property
    def accepted(self) -> torch.Tensor:
        return self._of_each("accepted")

    def _of_each(self, name: str) -> torch.Tensor:
        found = self.certificates
        if isinstance(found, QRCertificates):  # thousands take milliseconds one by one
            return torch.from_numpy(getattr(found, name))
        return torch.from_numpy(np.array([getattr(c, name) for c in found]))


def as_pending(
    values: QRValues, accepted: torch.Tensor, call: Call, mode: str, finish: Callable[[], Any]
) -> QRResult:
    """The result of first links before anything is read from the device."""
    batch = call.first.tensor.shape[:-2]
    q, r = (x.reshape(*batch, *x.shape[1:]) for x in (values.q, values.r))
    if call.differentiable:
        q, r = attach_factors(call.first.graph, q, r)
    if torch.promote_types(r.dtype, call.dtype) != call.dtype:  # R may not fit
        fits = r.to(call.dtype).isfinite() == r.isfinite()
        accepted = accepted & fits.flatten(len(batch)).all(-1).flatten()
    Q, R = None if mode == "r" else call.hand_back(q), call.hand_back(r)
    return QRResult(
        Q=Q,
        R=R,
        engine=str(call.engine),
        accuracy=call.target.name,
        accepted=call.hand_back(accepted.reshape(batch), torch.bool),
        _pending=finish,
        _factors=_methods(call.first.graph, (Q, R), (q, r)),
    )


def as_accepted(
    given: Given,
    options: QROptions,
    mode: str,
    factors: tuple[torch.Tensor, torch.Tensor],
    certificate: QRCertificate | QRCertificates,
    label: str,
    order: torch.Tensor | None = None,
) -> QRResult[Any]:
    """Accepted result of one method, from factors in the shape and dtype of A, in few microseconds."""
    give, (q, r) = given.give, factors
    fields = {
        "Q": None if mode == "r" else give(q),
        "R": give(r.resolve_conj()),
        "certificate": certificate,
        "accepted": Later(lambda: give(torch.ones(q.shape[:-2], dtype=torch.bool, device=q.device))),
    }
    if order is not None:
        fields["P"] = give(order)
    elif given.arrays:
        fields["_factors"] = _methods(given.arrays[0], (fields["Q"], fields["R"]), factors)
    return accepted_result(QRResult, given, options, label, lambda: certificate.in_words, fields)


def give_factors_back(result: QRResult, tall: Give, replicated: Give) -> QRResult:
    """Factors of a distributed matrix: Q distributed like A, R on all processes."""
    Q = None if result.Q is None else tall(result.Q)
    return replace(result, Q=Q, R=replicated(result.R), _factors=None)


def _methods(matrix: Any, arrays: tuple[Any, Any], factors: tuple[torch.Tensor, ...]) -> QRMethods | None:
    """Methods of the result; None unless it has a Q, and R as many columns as that."""
    m, n = factors[0].shape[-2:]
    if arrays[0] is None or n != factors[1].shape[-1]:
        return None
    return QRMethods(matrix if m == n else None, *arrays)  # tall ones are not kept alive


def as_result(
    factors: QRFactors, call: Call, mode: str, options: QROptions, order: torch.Tensor | None = None
) -> QRResult:
    batch, certificates = call.first.tensor.shape[:-2], factors.certificates
    q, r = (x.reshape(*batch, *x.shape[1:]) for x in (factors.q, factors.r))
    if call.differentiable:
        q, r = attach_factors(call.first.graph, q, r)
    dtype = raw_dtype(call.dtype) if mode == "raw" else None
    pair = (None if mode == "r" else call.give_back(q, dtype)), call.give_back(r, dtype)
    Q, R, H, tau = (None, None, *pair) if mode == "raw" else (*pair, None, None)
    result: QRResult[Any] = QRResult(
        Q=Q,
        R=R,
        H=H,
        tau=tau,
        certificate=certificates if batch else certificates[0],
        P=None if order is None else call.give_back(order.reshape(*batch, order.shape[-1]), order.dtype),
        **(
            call.diagnostics(factors.attempts)
            | {"engine": str(options.engine), "accuracy": options.target.name}
        ),
        accepted=Later(lambda: call.give_back(factors.accepted.reshape(batch), torch.bool)),
        _factors=None
        if order is not None or options.in_place
        else _methods(call.first.graph, (Q, R), (q, r)),
    )
    if not result.converged:
        large = q if mode == "raw" else r  # with NaN if the factorization broke down
        # Others of a batch are none the worse, and with small columns it is the method that broke down.
        if not batch and bool(large.isinf().any()):
            a = call.first.tensor
            if float(largest_magnitude(a, (0, 1))) * math.sqrt(len(a)) >= torch.finfo(r.dtype).max:
                raise OverflowError(f"R does not fit {r.dtype}: scale A down, or pass it in a wider dtype")
        call.report_missed(
            f"QR is not certified to {options.target.name} accuracy",
            factors.attempts[-1].reason if batch else str(certificates[0]),
            result,
            (~factors.accepted).reshape(batch).nonzero().tolist(),
        )
    return result
