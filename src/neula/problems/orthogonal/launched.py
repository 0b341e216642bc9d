"""First links of one matrix: launched as a whole, by a CUDA graph where it has one.

Nothing is known about the numbers but what is measured on the way; NaN, Inf and zero columns show in that.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from neula.algorithms.orthogonal.cholesky_qr import cholesky_qr_low
from neula.algorithms.orthogonal.gram_passes import gram_passes, passes_if_definite, shifted_passes
from neula.algorithms.orthogonal.reorthogonalize import correct, correct_last, second_passes
from neula.certificates.qr import leading_losses, single_qr_measures
from neula.engines import FP64
from neula.pipeline.chain import Answer, Declined, Link
from neula.problems.orthogonal.problem import Matrix, QRMatrices, QRValues
from neula.problems.orthogonal.ways import Factors, QRLink, Solution, columns_lost, leading


def launching(label: str, method: Callable[[Matrix], Factors]) -> QRLink:
    """A link with its scales and measures; NaN, Inf and zero columns show in these."""

    def answer(matrices: QRMatrices, before: Solution | None) -> Solution:
        options = matrices.options

        def factorized(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
            matrix = Matrix.unchecked(a, options)
            return _measured(matrix, *method(matrix))

        key = (label, options.target.name, options.panel, options.cutoff)
        q, r, measures = options.engine.replay(factorized, (matrices.a[0],), key)
        return Answer(QRValues.of_one(options.low_engine.widened(q), r, measures), label)

    return Link(label, answer, launches_only=True)


def _measured(matrix: Matrix, q: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, ...]:
    options = matrix.options
    if r.dtype.to_real() == matrix.scales.dtype:  # in place, since it may be as large as A
        options.engine.fill(r, r, matrix.scales.reciprocal())
    else:
        r = matrix.unscaled(q, r)
    return q, r, single_qr_measures(matrix.a, q, r, matrix.scales, options.target, options.over_rows)


def by_gram_matrices(matrix: Matrix, *, passes: int) -> Factors:
    """Cholesky QR in double precision, Q as its accuracy is requested."""
    exact, options = matrix.options.target is FP64, matrix.options
    q, r = gram_passes(_in_double(matrix), options.engine, passes=passes, exact=exact)
    return (q, r) if exact else (q.to(options.low_engine.storage), r)


def by_shifted_gram_matrices(matrix: Matrix) -> Factors:
    """QR by three passes of shifted Cholesky QR, for nearly dependent columns."""
    return shifted_passes(_in_double(matrix), matrix.options.engine)


def by_gram_matrices_if_definite(label: str) -> QRLink:
    """Two passes from A itself, where a pass of panels has lost too much: sooner than another one of these.

    Where columns are too dependent, what the panels have found is left to the next link.
    """

    def answer(matrices: QRMatrices, before: Solution | None) -> Solution:
        matrix = matrices.single
        engine, storage = matrices.options.engine, matrices.options.low_engine.storage
        found = None if matrix.zero is not None else passes_if_definite(_in_double(matrix), engine)
        if found is None:
            raise Declined
        q, r = found
        return Answer(QRValues.of_one(*_measured(matrix, q.to(storage), r)), label)

    return Link(label, answer, inherits=True)


def _in_double(matrix: Matrix) -> torch.Tensor:
    return matrix.scaled(matrix.options.engine.using(FP64))


def two_passes(matrix: Matrix) -> Factors:
    options = matrix.options
    passes = second_passes(*matrix.rgsqrf(), options.low_engine, panel=options.panel, cutoff=options.cutoff)
    return next(passes)


def corrected(matrix: Matrix) -> Factors:
    """One pass, and what makes Q orthonormal if it nearly is."""
    return correct(*matrix.rgsqrf(), matrix.options.low_engine)


def corrected_where_lost(label: str) -> QRLink:
    """Orthogonalize only the last columns again; most often all others are orthonormal.

    A few are corrected and measured before anything is known, since a GPU that waits for the host to look
    loses more. Where what was measured before says that more have lost, these are corrected afterwards.
    """

    def answer(matrices: QRMatrices, before: Solution | None) -> Solution:
        options, (a,) = matrices.options, matrices.a
        engine, counts = options.low_engine, leading(a.shape[1])
        few = a.shape[1] - counts[0]

        def factorized(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
            matrix = Matrix.unchecked(a, options)
            q, r = matrix.rgsqrf()
            losses = leading_losses(q, counts)
            return *_measured(matrix, *correct_last(q, r, engine, few)), matrix.scales, losses

        key = (label, options.target.name, options.panel, options.cutoff, "with a look")
        q, r, measures, scales, losses = options.engine.replay(factorized, (a,), key)
        lost = columns_lost(losses, a.shape[1], options.target)
        if lost > few:
            r = engine.fill(engine.empty(*r.shape), r, scales)
            if q.stride(0) != 1:
                q = engine.empty(*q.shape).copy_(q)
            factors = correct_last(q, r, engine, lost)
            q, r, measures = _measured(Matrix(a, scales, None, options), *factors)
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
