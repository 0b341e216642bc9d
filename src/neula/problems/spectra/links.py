"""The table of links for eigenvalues and singular values: LAPACK or cuSOLVER, and products on a GPU.

There matrices are divided by products, and cuSOLVER's singular values take ten times as long as its
eigenvalues: the polar factor, which takes products alone, leaves eigenvalues to be computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from neula.algorithms.orthogonal.batched_qr import batched_qr
from neula.algorithms.spectra.divide import corrected, divide, orthonormalized
from neula.algorithms.spectra.reduction import reduced_eigenvectors
from neula.certificates.spectra import DIRECT, consistency, measured
from neula.engines import BF16, FORMATS, FP16, FP32, FP64, Format
from neula.engines.formats import in_double
from neula.engines.graphs import called
from neula.kernels import scipy_linalg
from neula.kernels.polar.svd import converged_eigh, converged_eigvalsh, singular_values, svd
from neula.kernels.precision import exact_matmul
from neula.kernels.small_problems.embedding import interleaved, of_stacked_parts
from neula.kernels.spectra.small_eigh import small_eigh
from neula.kernels.spectra.tridiagonal import tridiagonal
from neula.pipeline.chain import Answer, Case, Chain, Declined, Link, Row, Rule, Table, formatted, run_chain
from neula.pipeline.progress import stage
from neula.problems.orthogonal.factorize import begin, factorize
from neula.problems.orthogonal.problem import QROptions
from neula.problems.polar.polar import decompose, symmetric_factor
from neula.problems.polar.problem import PolarOptions
from neula.problems.spectra.problem import (
    SpectralJudge,
    SpectralMatrices,
    SpectralOptions,
    SpectralTuning,
    SpectralValues,
)

Solution = Answer[SpectralValues]

_DIVIDED, _REDUCED = "divide and conquer", "tridiagonal form"  # names of methods


def by_library(matrices: SpectralMatrices, before: Solution | None, label: str, format: Format) -> Solution:
    """LAPACK or cuSOLVER in float32 or float64."""
    options, a = matrices.options, matrices.stored(format)
    report = stage(options.progress, label)
    if not options.vectors:
        s = converged_eigvalsh(a) if options.symmetric else singular_values(a)
        report(1.0)
        return _values_alone(matrices, s, label)
    if not options.symmetric:
        q, a = (None, a) if options.tuning.lapack else _square(options, a, format)  # LAPACK does that, too
        u, s, vh = svd(a)
        answer = measured_answer(matrices, _times(q, u), s, vh.mH, label, format)
    elif small_eigh.takes(a):
        answer = _by_kernel(matrices, label, format)
    else:
        s, v = converged_eigh(a)
        answer = measured_answer(matrices, v, s, v, label, format)
    report(1.0)
    return answer


def _by_kernel(matrices: SpectralMatrices, label: str, format: Format) -> Solution:
    """Eigenvectors of small matrices on a GPU, which synchronize nothing."""
    options = matrices.options

    def decomposed(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = SpectralMatrices(a, options)
        s, v = small_eigh(given.stored(format))
        return s, v, *_measured(given, v, s, v, format)

    s, v, *found = options.engine.replay(decomposed, (matrices.a,), ("eigh", *_how(options, format)))
    return Answer(SpectralValues(s, v, v, *found[:-1]), label, measured=found[-1])


def _how(options: SpectralOptions, format: Format) -> tuple[str, float]:
    return format.name, options.tuning[SpectralTuning].measured_in_double


def _measured(
    matrices: SpectralMatrices, u: torch.Tensor, s: torch.Tensor, v: torch.Tensor, format: Format
) -> tuple[torch.Tensor, ...]:
    """Measures, and what the judge reads of them."""
    found = measured(matrices.precise(format), u, s, v)
    return *found, found.numbers


def part_by_lapack(
    matrices: SpectralMatrices, before: Solution | None, label: str, format: Format
) -> Solution:
    """Some eigenvalues of a single matrix on a CPU, by LAPACK's relatively robust representations."""
    options, a = matrices.options, matrices.stored(format)
    assert options.part is not None
    lower, vectors = a[0].numpy(), options.vectors
    report = stage(options.progress, label)
    found = scipy_linalg.eigh(lower, subset_by_index=options.part, eigvals_only=not vectors, driver="evr")
    report(1.0)
    if not vectors:
        return _values_alone(matrices, torch.from_numpy(found)[None], label, whole=False)
    s, v = (torch.from_numpy(x)[None] for x in found)
    return measured_answer(matrices, v, s, v, label, format)


def by_polar_factor(
    matrices: SpectralMatrices, before: Solution | None, label: str, format: Format
) -> Solution:
    """Singular values of ``A = U H`` from eigenvalues of H: all else is products."""
    options = matrices.options
    q, a = _square(options, matrices.stored(format), format)
    asked = PolarOptions(format, options.engine, completion=True)
    u = decompose(a, asked).u.to(a.dtype)
    h = symmetric_factor(a, u, "right", asked).to(a.dtype)
    of_h = SpectralOptions(format, options.engine, symmetric=True)
    judge = SpectralJudge(of_h.bounds(h.shape[2]))
    found = run_chain(chain(len(h), h.shape[2], of_h), SpectralMatrices(h, of_h), judge).found
    s, v = found.s.to(a.dtype.to_real()), found.v.to(a.dtype)
    u, s, v = _descending(exact_matmul(u, v), s, v)  # values near zero may be negative
    return measured_answer(matrices, _times(q, u), s, v, label, format)


def _square(
    options: SpectralOptions, a: torch.Tensor, format: Format
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Q and R, of matrices with twice as many rows as columns or more; else None and A."""
    if a.shape[1] < 2 * a.shape[2]:
        return None, a
    factors = factorize(a, "reduced", QROptions(format, options.engine))
    return factors.q.to(a.dtype), factors.r.to(a.dtype)


def _times(q: torch.Tensor | None, u: torch.Tensor) -> torch.Tensor:
    return u if q is None else exact_matmul(q, u)


def by_gram_matrix(
    matrices: SpectralMatrices, before: Solution | None, label: str, format: Format
) -> Solution:
    """Singular vectors of single precision from eigenvectors of ``A^T A`` in double precision, then QR of
    ``A V``: R is diagonal up to rounding errors.
    """
    a, engine = matrices.stored(format), matrices.options.engine
    wide = in_double(a)
    v = converged_eigh(exact_matmul(wide.mH, wide))[1].flip(2)
    factors = factorize(exact_matmul(wide, v).to(a.dtype), "reduced", QROptions(format, engine))
    s = factors.r.diagonal(0, 1, 2).to(a.dtype)
    u, s, v = _descending(factors.q.to(a.dtype), s, v.to(a.dtype))
    return measured_answer(matrices, u, s, v, label, format)


def _descending(
    u: torch.Tensor, s: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Triplets with the largest value first; the sign of a negative one goes to U."""
    u = u * torch.where(s < 0, -1.0, 1.0)[:, None, :]
    s, order = s.abs().sort(1, descending=True)
    u, v = (x.gather(2, order[:, None, :].expand_as(x)) for x in (u, v))
    return u, s, v


def by_reduction(
    matrices: SpectralMatrices, before: Solution | None, label: str, format: Format, divided: bool
) -> Solution:
    """Reduction to tridiagonal form in single precision; then corrections, if double is asked for.

    Without a kernel for these matrices they are divided, if ``divided``, or else left to the library.
    """
    options, low = matrices.options, matrices.stored(FP32)
    if low.is_cuda and not tridiagonal.takes(low):
        if not divided:
            raise Declined
        return by_division(matrices, before, label.replace(_REDUCED, _DIVIDED), format)
    report, engine = stage(options.progress, label), options.engine.using(options.tuning.cheapest(FP32))
    key = "reduced to tridiagonal form", engine.arithmetic.name
    play = engine.replay if low.shape[1] <= DIRECT else called  # large ones keep a GPU busy
    s, v = play(partial(reduced_eigenvectors, engine=engine), (low,), key)
    report(1.0)
    if format is not FP64:
        return measured_answer(matrices, v, s, v, label, format)
    double = options.engine.using(options.tuning.cheapest(FP64))
    # Corrections take vectors to be orthonormal: otherwise the first one leaves errors of single precision.
    v = orthonormalized(v.to(matrices.stored(FP64).dtype), double, double)
    return _corrected(matrices, v, 2, label, format)


def by_division(matrices: SpectralMatrices, before: Solution | None, label: str, format: Format) -> Solution:
    """Spectral divide and conquer as accurate as float32, signs in half precision; then corrections.

    Each squares errors, from 1e-3 on, until rounding errors alone are left: after two in single precision, or
    one and three more in double precision.
    """
    options = matrices.options
    half, single = (options.engine.using(options.tuning.cheapest(target)) for target in (FP16, FP32))

    def orthonormal(x: torch.Tensor) -> torch.Tensor:
        if len(x) >= options.tuning[SpectralTuning].qr_together:
            if x.is_complex():
                return of_stacked_parts(batched_qr(interleaved(x), overwrite_a=True)[0][..., ::2])
            return batched_qr(x)[0]
        # Accurate products, and whatever orthogonality one pass gives; in doubt it is measured again.
        asked = QROptions(BF16, options.engine, compute=single.arithmetic.name)
        begun = begin(x, asked)
        if begun is not None and bool(begun[1].all()):
            return begun[0].q.to(x.dtype)
        return factorize(x, "reduced", asked, begun and begun[2]).q.to(x.dtype)

    low = matrices.stored(FP32)
    v = divide(low, orthonormal, replace(options, target=FP32).leaf, single, half)
    if format is FP64:
        v = corrected(low, v, matrices.neighbours, single)[1]
    return _corrected(matrices, v, 2 + (format is FP64), label, format)


def by_more_corrections(
    matrices: SpectralMatrices, before: Solution | None, label: str, format: Format
) -> Solution:
    """Two more corrections of eigenvectors that were not accepted."""
    if before is None:  # too little memory, or no kernel
        raise Declined
    return _corrected(matrices, before.values.v, 2, label, format)


def _corrected(
    matrices: SpectralMatrices, v: torch.Tensor, times: int, label: str, format: Format
) -> Solution:
    options, a = matrices.options, matrices.stored(format)
    engine, report = options.engine.using(options.tuning.cheapest(format)), stage(options.progress, label)
    v = v.to(a.dtype)
    width = matrices.neighbours
    key = "eigenvectors corrected", engine.arithmetic.name, width
    for step in range(times):
        s, v = engine.replay(partial(corrected, width=width, engine=engine), (a, v), key)
        report((step + 1) / times)
    return measured_answer(matrices, v, s, v, label, format)


def measured_answer(
    matrices: SpectralMatrices, u: torch.Tensor, s: torch.Tensor, v: torch.Tensor, label: str, format: Format
) -> Solution:
    """Decompositions with what is measured of them."""
    options, same = matrices.options, u is v

    def measure(
        a: torch.Tensor, s: torch.Tensor, v: torch.Tensor, *u: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return _measured(SpectralMatrices(a, options), v if same else u[0], s, v, format)

    play = options.engine.replay if matrices.a.shape[2] <= DIRECT else called
    *found, numbers = play(
        measure, (matrices.a, s, v) + (() if same else (u,)), ("measured", same, *_how(options, format))
    )
    return Answer(SpectralValues(s, u, v, *found), label, measured=numbers)


def _values_alone(matrices: SpectralMatrices, s: torch.Tensor, label: str, *, whole: bool = True) -> Solution:
    """Values that are consistent with trace and norm; of a part of them nothing is measured."""
    a, options = matrices.a, matrices.options
    off = torch.zeros(len(a), dtype=torch.float64, device=a.device)
    if whole:
        off = consistency(matrices.precise(FP64), s, symmetric=options.symmetric)
    none = (a.new_empty(len(a), n, 0) for n in a.shape[1:])
    unknown = torch.full_like(s, torch.nan, dtype=torch.float64)
    one = torch.full_like(off, torch.nan)
    values = SpectralValues(s, next(none), next(none), unknown, unknown, one, one, one)
    return Answer(values, label, measured=torch.stack([off, torch.zeros_like(off)]))


SpectralLink = Link[SpectralMatrices, SpectralValues]


@dataclass(frozen=True)
class SpectralCase(Case):
    """Matrices of one shape, without numbers."""

    count: int
    n: int  # the number of columns, of which there are no more than rows
    options: SpectralOptions

    @property
    def reduced(self) -> bool:
        """Whether matrices are reduced to tridiagonal form, all of a batch together."""
        options, tuning = self.options, self.tuning[SpectralTuning]
        eigenvectors = options.symmetric and options.vectors and options.algorithm is None
        return eigenvectors and self.count > 1 and options.leaf < self.n <= tuning.reduced

    @property
    def divided(self) -> bool:
        """Whether products divide the matrices, if these are real."""
        options, tuning = self.options, self.tuning[SpectralTuning]
        real = options.symmetric and not options.engine.is_complex
        if not (real and options.vectors and self.n > options.leaf):
            return False
        times = 1.0 if options.work is FP32 else tuning.divided_in_double
        return self.count >= times * tuning.divided_batch or self.count * self.n >= times * tuning.divided

    @property
    def by_jacobi(self) -> bool:
        """Whether the library has a method for float32 that takes longer than double precision."""
        options, most = self.options, self.tuning[SpectralTuning].jacobi
        real = options.symmetric and not options.engine.is_complex
        return real and self.count == 1 and options.leaf < self.n <= most  # up to the leaf by a kernel

    @property
    def partial(self) -> bool:
        """Whether LAPACK computes the part of the eigenvalues that is asked for."""
        part, lapack = self.options.part, self.tuning.lapack
        return part is not None and lapack and self.count == 1 and 2 * (part[1] - part[0]) < self.n


def chain(count: int, n: int, options: SpectralOptions) -> Sequence[SpectralLink]:
    """Links for ``count`` matrices of n columns together."""
    return Chain(TABLE, SpectralCase(count, n, options))


def _library(case: SpectralCase, label: str, name: str) -> SpectralLink:
    label = label if case.options.symmetric else label.replace("eigh", "svd")
    return Link(label, partial(by_library, label=label, format=FORMATS[name]))


def _approximate(case: SpectralCase, label: str, name: str) -> SpectralLink:
    if not case.reduced:
        return Link(label, partial(by_division, label=label, format=FORMATS[name]))
    label = label.replace(_DIVIDED, _REDUCED)
    return Link(label, partial(by_reduction, label=label, format=FORMATS[name], divided=case.divided))


_when = Rule[SpectralCase, bool]

_some = _when("up to half of the eigenvalues of one matrix on a CPU", lambda case: case.partial)

_singular = _when(
    "singular vectors, on a GPU",
    lambda case: (
        not case.options.symmetric
        and case.options.vectors
        and case.n >= case.tuning[SpectralTuning].polar_first
    ),
)

_approximated = _when(
    "by name; eigenvectors of large matrices, and of batches, beyond the orders of the kernel: batches are "
    "reduced to tridiagonal form",
    lambda case: case.options.algorithm == "divide" or case.divided or case.reduced,
)

_gram = _when(
    "singular vectors of a batch of few columns, on a GPU",
    lambda case: (
        not case.options.symmetric
        and case.options.vectors
        and case.count > 1
        and case.options.work is FP32
        and not case.options.engine.is_complex
        and case.n <= case.tuning[SpectralTuning].gram
    ),
)

_default = _when("by default", lambda case: case.options.algorithm is None)

_below = _when(
    "accuracies below fp64; on a GPU, one symmetric matrix of order 129 to 512 takes less time in fp64",
    lambda case: case.options.work is FP32 and not case.by_jacobi,
)

_work = Rule[SpectralCase, Sequence[str]]("fp32, fp64", lambda case: [case.options.work.name])

TABLE: Table[SpectralCase] = (
    Row("some of eigh {}", formatted(part_by_lapack), (_some,), arithmetics=_work),
    Row(f"{_DIVIDED} {{}}", _approximate, (_approximated,), arithmetics=_work),
    Row(
        "corrected again {}",
        formatted(by_more_corrections, inherits=True),
        (_approximated,),
        arithmetics=_work,
    ),
    Row("Gram matrix {}", formatted(by_gram_matrix), (_gram,), arithmetics=_work),
    Row("polar factor and eigh {}", formatted(by_polar_factor), (_singular,), arithmetics=_work),
    Row("eigh {}", _library, (_default, _below), arithmetics=("fp32",)),
    Row("eigh {}", _library, (_default,)),
)
"""Cheapest first; of singular values it is the library's SVD that ends the chain."""
