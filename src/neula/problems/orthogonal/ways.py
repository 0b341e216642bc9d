"""Methods for a QR factorization, for one matrix or for a batch together.

Links are measured where they are computed, so that a CUDA graph includes the measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from neula.algorithms.elimination.lu import WHOLE
from neula.algorithms.orthogonal.batched_qr import batched_reorthogonalize
from neula.algorithms.orthogonal.cholesky_qr import MOST_LOST, cholesky_qr_low, solved_cholesky_qr
from neula.algorithms.orthogonal.gram_passes import gram_passes, passes_if_definite, shifted_passes
from neula.algorithms.orthogonal.householder import householder
from neula.algorithms.orthogonal.reorthogonalize import (
    correct,
    correct_last,
    refine_qr,
    reorthogonalize,
    second_passes,
)
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.certificates.bounds import orthogonality_2norm_bound, orthogonality_bound
from neula.certificates.qr import (
    certificates_of,
    certifying_dtype,
    image_measures,
    leading_losses,
    single_qr_measures,
)
from neula.engines import FP32, FP64, Format
from neula.engines.formats import in_double, matching_dtype
from neula.kernels.core import core, empty
from neula.kernels.magnitudes import largest_magnitude
from neula.kernels.phases import with_nonnegative_diagonal
from neula.kernels.precision import exact_matmul
from neula.kernels.qr.cholesky_qr_host import cholesky_qr
from neula.pipeline.chain import Answer, Declined, Link, answered
from neula.pipeline.inputs import check_finite, surely_finite
from neula.problems.orthogonal.problem import (
    Matrix,
    QRJudge,
    QRMatrices,
    QROptions,
    QRTuning,
    QRValues,
    holding_nan,
    measured_on_host,
    probe_vectors,
    trusted,
)

CORRECTED = " + correction"
"""End of the label of a first pass whose Q was made orthonormal before it was measured."""

SURELY_CORRECTED = 0.03
"""How far from orthonormal Q may be for a correction that must not leave a residual, since what comes next
continues from it."""

LAST = (24, 12, 4)
"""Which part of the columns, at the end, may be all that is to be corrected: a 24th of normal square matrices
of order 6000 to 24576, of which all except a 32nd have lost as much as may be left."""

WIDE = 1024
"""A multiple that these columns come in where that is at most twice as many: from so many on their inner
products are on matrix units. Elsewhere it is :data:`WHOLE`."""

POWERS = 4  # products after which one direction that is lost stands out of thousands

Factors = tuple[torch.Tensor, torch.Tensor]  # Q and R
Solution = Answer[QRValues]
QRLink = Link[QRMatrices, QRValues]

# --- a batch, all matrices together ---

Method = Callable[[torch.Tensor], Factors]  # from a matrix, or from a batch of them, to Q and R


def together(
    label: str, dtype: torch.dtype | None, method: Method, *, scaled: bool = True, waits: bool = False
) -> QRLink:
    """QR of all matrices of a batch at once, which are not wide; equal labels, equal methods."""
    # It takes matrices of a dtype, or complex ones with such parts; None if it is not scaled and takes any.
    # If it is ``scaled``, it needs columns whose largest elements are near 1, and may overwrite them. A first
    # link that takes matrices as they are saves a scaled copy. It is right unless squares of the elements
    # leave the range of the format, and then it is not accepted. Matrices of a wider format, which may not
    # fit this one, are always scaled. If the host ``waits`` for the device in it, or copies to it, no CUDA
    # graph can have it.

    def answer(matrices: QRMatrices, before: Solution | None) -> Solution:
        options = matrices.options

        def factorized(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
            batch = QRMatrices(a, options)
            if dtype is None:
                return batch.measured(*method(a[..., : batch.k]), None)
            kept = matching_dtype(dtype, a.dtype)
            if not scaled and torch.promote_types(a.dtype, kept) == kept:
                return batch.measured(*method(batch.leading(kept)), None)
            scales = batch.scales()
            return batch.measured(*method(batch.scaled(scales, kept)), scales)

        if waits:
            q, r, measures = factorized(matrices.a)
        else:
            key = (label, scaled, options.target.name)
            q, r, measures = options.engine.replay(factorized, (matrices.a,), key)
        return answered(QRValues(q, r, measures.T), label, options.progress)

    return Link(label, answer, launches_only=not waits)


def another_pass(label: str) -> QRLink:
    """Another pass in double precision over the Q of all matrices of a batch that are left."""
    # Rounding of the Q before does not matter: ``A = Q R`` up to that, and the pass makes it orthonormal.

    def answer(matrices: QRMatrices, before: Solution | None) -> Solution:
        assert before is not None
        scales, leading = matrices.scales(), in_double(before.values.r[..., : matrices.k])
        factors = batched_reorthogonalize(in_double(before.values.q), leading * scales[:, None, : matrices.k])
        q, r, measures = matrices.measured(*factors, scales)
        return Answer(QRValues(q, r, measures.T), label)

    return Link(label, answer, inherits=True)


def one_by_one(a: torch.Tensor, method: Method) -> Factors:
    """A method of single matrices as one of a batch; a single one is not copied."""
    if len(a) == 1:
        q, r = method(a[0])
        return q[None], r[None]
    factors = [method(x) for x in a]
    return torch.stack([q for q, _ in factors]), torch.stack([r for _, r in factors])


def without_factors(matrices: QRMatrices, before: Solution | None) -> Solution:
    """NaN factors and measures, for matrices of a batch that hold NaN or Inf."""
    a, target = matrices.a, matrices.options.target
    count, m, n = a.shape
    shapes = (m, matrices.k), (matrices.k, n)
    q, r = (a.new_full((count, *shape), math.nan) for shape in shapes)
    measures = torch.full(
        (count, 4), math.nan, dtype=certifying_dtype(a.dtype.to_real(), target), device="cpu"
    )
    return Answer(QRValues(q, r, measures), "none", holding_nan(count, count))


# --- one matrix, after a check of its numbers ---


def first_pass(matrices: QRMatrices, before: Solution | None) -> Solution:
    """Recursive Gram-Schmidt in the low arithmetic, unless what was launched will do to continue from."""
    # Zero columns have to be replaced before it, and no pass over Q repairs a residual. A triangle is its own
    # R, and more often than not too ill-conditioned for anything but reflections.
    looked_at = matrices.single  # which refuses NaN
    if matrices.options.in_place:
        return _answer(matrices, "", *_rgsqrf_in_place(looked_at))
    if matrices.options.algorithm is None and _is_triangular(matrices):
        return _triangular(matrices)
    if before is not None and looked_at.zero is None and not _is_spoiled(matrices, before):
        raise Declined
    return _answer(matrices, "", *looked_at.leading.rgsqrf())


def _is_triangular(matrices: QRMatrices) -> bool:
    """Whether only zeros are below the diagonal, most often known from the first column."""
    a = matrices.a[0]
    return not (matrices.options.over_rows.spread or bool(a[1:, 0].any()) or bool(a.tril(-1).any()))


def _triangular(matrices: QRMatrices) -> Solution:
    """Factors of an upper triangle or trapezoid without a reflection: R is A, except for phases of rows."""
    matrix, options, k = matrices.single, matrices.options, matrices.k
    r = matrix.a[:k].to(matching_dtype(matrix.scales.dtype, matrix.a.dtype), copy=True)
    q = r.new_zeros(len(matrix.a), k, dtype=options.low_engine.storage)
    q.diagonal().fill_(1.0)
    with_nonnegative_diagonal(q, r)
    measures = single_qr_measures(matrix.a, q, r, matrix.scales, options.target, options.over_rows)
    return Answer(QRValues.of_one(q, r, measures), "triangular")


def second_pass(matrices: QRMatrices, before: Solution | None) -> Solution:
    """Another pass over lost columns of Q, in place by panels whose residual is small whatever the rank."""
    options, in_place = matrices.options, matrices.options.in_place
    (q, r), panel = _first_factors(matrices, before), options.panel or ("householder" if in_place else None)
    factors = reorthogonalize(
        q,
        r,
        options.low_engine,
        columns=_not_orthonormal(q, options),
        panel=panel,
        cutoff=options.cutoff,
        overwrite_q=in_place,
    )
    return _answer(matrices, " + reortho", *factors)


def _not_orthonormal(q: torch.Tensor, options: QROptions) -> int:
    """How many columns, at the end, are to be orthogonalized again, since all others are orthonormal; all of
    them where that was asked for by name, or where a look takes longer than it saves.
    """
    n, over_rows = q.shape[1], options.over_rows
    if options.named or n < options.engine.tuning[QRTuning].partly_corrected:
        return n
    losses, norms = (over_rows.agree(leading_losses(q, leading(n), over_rows, x)) for x in (0, POWERS))
    return columns_lost(losses, n, options.target, norms)


def twice(matrices: QRMatrices, before: Solution | None) -> Solution:
    """Two passes of recursive Gram-Schmidt, whatever the second one says of the first."""
    options, factors = matrices.options, _first_factors(matrices, before)
    passes = second_passes(*factors, options.low_engine, panel=options.panel, cutoff=options.cutoff)
    return _answer(matrices, " + one reortho", *next(passes))


def correction(matrices: QRMatrices, before: Solution | None) -> Solution:
    """Make a nearly orthonormal Q orthonormal: in place the columns that have lost, else all of them in a
    copy, since a second pass may continue from Q.
    """
    (q, r), options, engine = _first_factors(matrices, before), matrices.options, matrices.options.low_engine
    columns = q.shape[1]
    if options.in_place:
        columns = columns_lost(leading_losses(q, leading(columns)), columns, options.target)
    else:
        q, r = (engine.empty(*x.shape).copy_(x) for x in (q, r))
    factors = correct_last(q, r, engine, columns, largest=SURELY_CORRECTED)
    return _answer(matrices, CORRECTED, *factors)


def preconditioned(matrices: QRMatrices, before: Solution | None) -> Solution:
    """Cholesky QR of ``A R^-1`` in double precision, with R from a first pass."""
    # Without zero columns, with which R is singular.
    r = _first_factors(matrices, before if matrices.single.zero is None else None)[1]
    over_rows = matrices.options.over_rows
    return _answer(
        matrices, " + cholesky-qr fp64", *refine_qr(_in_double(matrices.single.leading), r, over_rows)
    )


def by_householder(matrices: QRMatrices, before: Solution | None) -> Solution:
    """Householder reflections in double precision, of Q where that has taken the place of A."""
    if matrices.options.in_place:
        q, r = _first_factors(matrices, before)
        q, step = householder(in_double(q))
        factors = q, (step @ in_double(r)).to(r.dtype)
    else:
        factors = householder(_in_double(matrices.single.leading), matrices.options.engine)
    return replace(_answer(matrices, "", *factors), label="householder fp64")


def _in_double(matrix: Matrix) -> torch.Tensor:
    return matrix.scaled(matrix.options.engine.using(FP64))


def _first_factors(matrices: QRMatrices, before: Solution | None) -> Factors:
    """Q and R of the scaled matrix that a second pass starts from; in place there are only these."""
    matrix = matrices.single.leading
    if matrices.options.in_place:
        if before is None:
            return _rgsqrf_in_place(matrix)
        q, r = before.values.q[0], before.values.r[0]
        if not bool(torch.isfinite(r).all()):
            raise Declined
        return q, matrix.options.low_engine.fill(r, r, matrix.scales)
    if before is None:
        q, r = matrix.rgsqrf()
    else:
        q, r = before.values.q[0], before.values.r[0, :, : matrix.a.shape[1]]
        r = (r * matrix.scales).to(q.dtype)
    if matrix.options.panel is None and not bool(matrix.options.over_rows.agree(torch.isfinite(r).all())):
        q, r = matrix.rgsqrf("cholesky2")
    return q, r


def _is_spoiled(matrices: QRMatrices, before: Solution) -> bool:
    """Whether a correction has left a residual."""
    if not before.label.endswith(CORRECTED):
        return False
    assert before.numbers is not None
    measured_in, target = before.values.measures.dtype, matrices.options.target
    shape = matrices.options.shape_of(matrices.a.shape)
    found = certificates_of(before.numbers, measured_in, shape, target)[0]
    return found.residual > found.residual_bound


def _answer(matrices: QRMatrices, more: str, q: torch.Tensor, r_scaled: torch.Tensor) -> Solution:
    matrix, options, engine = matrices.single, matrices.options, matrices.options.low_engine
    if options.in_place:
        r, q = engine.fill(r_scaled, r_scaled, matrix.scales.reciprocal()), _as_returned(q, matrix)
        if matrix.zero is not None:
            r[:, matrix.zero] = 0
        measures = image_measures(matrix.image, q, r, matrix.scales)
    else:
        r = options.over_rows.agree_triangle(matrix.unscaled(q, r_scaled))
        q = _as_returned(q, matrix)
        measures = single_qr_measures(matrix.a, q, r, matrix.scales, options.target, options.over_rows)
        measures, q = options.over_rows.agree(measures), engine.widened(q)
    return Answer(QRValues.of_one(q, r, measures), f"rgsqrf {options.low.format.name}{more}")


def _as_returned(q: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """Q in the dtype of the matrix where that is narrower: what is measured is what is returned."""
    kept = torch.promote_types(matrix.a.dtype, torch.float32)
    return q if torch.promote_types(q.dtype, kept) == kept else q.to(kept)


def leading(n: int) -> list[int]:
    """How many columns, at the beginning, may be orthonormal already."""
    found = []
    for part in LAST:
        multiple = WIDE if 2 * n > part * WIDE else WHOLE
        found.append(max(0, n - -(-n // (part * multiple)) * multiple))
    return found


def columns_lost(losses: torch.Tensor, n: int, target: Format, norms: torch.Tensor | None = None) -> int:
    """How many columns, at the end, are to be corrected, given what the first :func:`leading` ones lost: on
    average, and where it was looked for in the 2-norm.
    """
    # Estimates by a few random vectors may be too small, which the certificate notices.
    orthonormal = losses <= orthogonality_bound(target, n) / 2
    if norms is not None:
        orthonormal &= norms <= orthogonality_2norm_bound(target, n) / 4
    return n - next((k for k, kept in zip(leading(n), orthonormal.tolist(), strict=True) if kept), 0)


def _rgsqrf_in_place(matrix: Matrix) -> Factors:
    """The first pass, and before it what is to be known of A when it is gone."""
    # Nothing can be done again from A, so panels are those of Householder, except on a GPU.
    options, engine = matrix.options, matrix.options.low_engine
    matrix.image  # noqa: B018
    fast = engine.tuning.recursion(engine.storage).panel == "cholesky32"
    return rgsqrf(
        matrix.filled(matrix.a, engine),
        engine,
        cutoff=options.cutoff,
        panel=options.panel or (None if fast else "householder"),
        overwrite_a=True,
        on_columns=options.report(matrix.a.shape[1]),
    )


COLUMNS = 128
"""Up to so many the factor of a Gram matrix stays in a cache, and LAPACK's reflections take more time."""

PART = 0.5  # part of the bound on orthogonality that steps without repetition may lose


def is_for_core(m: int, n: int, target: Format, *, is_complex: bool) -> bool:
    return m >= n > 0 and n * (1 + is_complex) <= COLUMNS and target in (FP32, FP64) and core() is not None


def by_core(matrices: QRMatrices, before: Solution | None, *, label: str) -> Solution:
    """Cholesky QR of few columns by the compiled core, one matrix or a batch."""
    a, target = matrices.a, matrices.options.target
    n, found = a.shape[2], None
    if a.dtype.to_real() == target.dtype:
        found = cholesky_qr(
            a, probe_vectors(2 * n if a.is_complex() else n), PART * orthogonality_bound(target, n)
        )
    if found is None:
        raise Declined
    q, r, numbers = found
    values = QRValues(q, r, torch.from_numpy(trusted(numbers, target)).T)
    return answered(values, label, matrices.options.progress)


def of_finite(link: QRLink) -> QRLink:
    """A link for a single matrix, which must not hold NaN or Inf."""

    def answer(matrices: QRMatrices, before: Solution | None) -> Solution:
        if not surely_finite(matrices.a):
            check_finite(matrices.a[0], largest_magnitude(matrices.a[0], 0), "A")
        return link.answer(matrices, before)

    return Link(link.label, answer)


def by_products(matrices: QRMatrices, before: Solution | None, *, label: str) -> Solution:
    """Cholesky QR of a single tall matrix, and of Q if random vectors see that little is orthogonal."""
    target, a = matrices.options.target, matrices.a[0]
    a = a.to(torch.promote_types(a.dtype, torch.float32))
    given = a.to(matching_dtype(matrices.options.work.dtype, a.dtype))
    by_rows = a.stride(1) == 1
    q = empty(*a.shape, dtype=given.dtype) if by_rows else empty(*a.T.shape, dtype=given.dtype).T
    r = solved_cholesky_qr(given, out=q)
    values = _measured(a, q, r, target)
    found = QRJudge(a.shape, target).certificate(values)
    if r is not None and found.orthogonality_bound < found.orthogonality <= MOST_LOST:
        again = solved_cholesky_qr(q, out=q)
        values = _measured(a, q, None if again is None else exact_matmul(again, r), target)
    return answered(values, label, matrices.options.progress)


def _measured(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor | None, target: Format) -> QRValues:
    """NaN is all that is measured where columns are too dependent: there are no factors."""
    if r is None:
        return QRValues.of_one(
            q, q.new_full((q.shape[1],) * 2, math.nan), q.new_full((4,), math.nan, dtype=torch.float64)
        )
    measures = torch.from_numpy(measured_on_host(a, q, r, target))[:, 0]
    return QRValues.of_one(q, r.to(torch.promote_types(a.dtype, r.dtype)), measures)


# --- one matrix, launched as a whole, before anything is known about its numbers ---


def launching(label: str, method: Callable[[Matrix], Factors]) -> QRLink:
    """A link with its scales and measures; NaN, Inf and zero columns show in these."""

    def answer(matrices: QRMatrices, before: Solution | None) -> Solution:
        options = matrices.options

        def factorized(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
            matrix = Matrix.unchecked(a, options)
            return _as_measured(matrix, *method(matrix))

        key = (label, options.target.name, options.panel, options.cutoff)
        q, r, measures = options.engine.replay(factorized, (matrices.a[0],), key)
        return Answer(QRValues.of_one(options.low_engine.widened(q), r, measures), label)

    return Link(label, answer, launches_only=True)


def _as_measured(matrix: Matrix, q: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, ...]:
    options = matrix.options
    if r.dtype.to_real() == matrix.scales.dtype:  # in place, since it may be as large as A
        options.engine.fill(r, r, matrix.scales.reciprocal())
    else:
        r = matrix.unscaled(q, r)
    return q, r, single_qr_measures(matrix.a, q, r, matrix.scales, options.target, options.over_rows)


def by_gram_matrices(matrix: Matrix, *, passes: int) -> Factors:
    """Cholesky QR in double precision, of three passes for dependent columns; Q as accurate as asked."""
    exact, options = matrix.options.target is FP64, matrix.options
    a = _in_double(matrix)[None]
    if passes == 3:
        (q,), (r,) = shifted_passes(a, options.engine)
    else:
        (q,), (r,) = gram_passes(a, options.engine, passes=passes, exact=exact)
    return (q, r) if exact else (q.to(options.low_engine.storage), r)


def by_gram_matrices_if_definite(label: str) -> QRLink:
    """Two passes from A itself, where a pass of panels has lost too much: sooner than another one of these.

    Where columns are too dependent, what the panels have found is left to the next link.
    """

    def answer(matrices: QRMatrices, before: Solution | None) -> Solution:
        matrix = matrices.single
        engine, storage = matrices.options.engine, matrices.options.low_engine.storage
        found = None if matrix.zero is not None else passes_if_definite(_in_double(matrix)[None], engine)
        if found is None:
            raise Declined
        (q,), (r,) = found
        return Answer(QRValues.of_one(*_as_measured(matrix, q.to(storage), r)), label)

    return Link(label, answer, inherits=True)


def two_passes(matrix: Matrix) -> Factors:
    options = matrix.options
    passes = second_passes(*matrix.rgsqrf(), options.low_engine, panel=options.panel, cutoff=options.cutoff)
    return next(passes)


def corrected(matrix: Matrix) -> Factors:
    """One pass, and what makes Q orthonormal if it nearly is."""
    return correct(*matrix.rgsqrf(), matrix.options.low_engine)


def corrected_where_lost(label: str) -> QRLink:
    """Orthogonalize only the last columns again; most often all others are orthonormal."""
    # A few are corrected and measured before anything is known, since a GPU that waits for the host to look
    # loses more. Where what was measured before says that more have lost, these are corrected afterwards.

    def answer(matrices: QRMatrices, before: Solution | None) -> Solution:
        options, (a,) = matrices.options, matrices.a
        engine, counts = options.low_engine, leading(a.shape[1])
        few = a.shape[1] - counts[0]

        def factorized(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
            matrix = Matrix.unchecked(a, options)
            q, r = matrix.rgsqrf()
            losses = leading_losses(q, counts)
            return *_as_measured(matrix, *correct_last(q, r, engine, few)), matrix.scales, losses

        key = (label, options.target.name, options.panel, options.cutoff, "with a look")
        q, r, measures, scales, losses = options.engine.replay(factorized, (a,), key)
        lost = columns_lost(losses, a.shape[1], options.target)
        if lost > few:
            r = engine.fill(engine.empty(*r.shape), r, scales)
            if q.stride(0) != 1:
                q = engine.empty(*q.shape).copy_(q)
            factors = correct_last(q, r, engine, lost)
            q, r, measures = _as_measured(Matrix(a, scales, None, options), *factors)
        return Answer(QRValues.of_one(q, r, measures), label)

    return Link(label, answer)


def low_cholesky_qr(matrix: Matrix) -> Factors:
    engine = matrix.options.low_engine
    m, n = matrix.a.shape
    # Columns are filled up like rows: they are those of the Gram matrix.
    room = engine.padded(m, engine.rows(n), dtype=engine.operand_dtype)
    room[:, n:].zero_()
    engine.fill(room[:m, :n], matrix.a, matrix.scales)
    q, r = cholesky_qr_low(room, engine, n)
    return q[:m], r
