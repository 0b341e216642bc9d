"""The table of links for leading singular triplets.

A part of the singular values comes from iterations where these cost less than the Gram matrix and its
eigenvectors, from the Gram matrix otherwise; all of them, and what neither finds, from QR and the SVD of R.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from neula.algorithms.spectra.gram_svd import gram_svd
from neula.algorithms.spectra.qr_svd import loss_of, svd_of_r
from neula.algorithms.spectra.ritz import Ritz
from neula.algorithms.spectra.subspace_iteration import MixedPrecisionOperator, subspace_iteration
from neula.certificates.bounds import measurement_error
from neula.certificates.low_rank import largest_beyond, upper_bounds
from neula.engines import FP16, FP16_COR, FP64, Tuning
from neula.kernels.magnitudes import two_norms
from neula.kernels.precision import exact_matmul
from neula.pipeline.chain import (
    Answer,
    Case,
    Chain,
    Declined,
    Link,
    Row,
    Rule,
    Table,
    answered,
    computed,
    ruled,
    way,
)
from neula.problems.low_rank.problem import SVDOptions, SVDValues, TallMatrix
from neula.problems.orthogonal.factorize import factorize
from neula.problems.orthogonal.problem import QROptions

Solution = Answer[SVDValues]

CLEAR = 0.9
"""Part of the smallest singular value that is wanted, below which what is beyond may be: then it makes the
bounds on errors five times as large as they would be without."""

LESS = 10.0
"""By how much the residual is to be smaller where it is small enough, and bounds on errors are not; and part
of what an error may be up to which no sharper bound is looked for."""

TRIES = 3
"""Number of tries: directions that random vectors find are not in the block, or not distinct from it."""


def by_iteration(
    problems: TallMatrix, before: Solution | None, *, width: int, most: int, label: str
) -> Solution:
    """Subspace iteration from a random block, until the certificate is content."""
    options, a = problems.options, problems.a[0]
    rank = options.rank
    assert rank is not None
    evidence = _TripletMeasurements(problems, rank, most)
    operator = MixedPrecisionOperator.from_matrix(
        a, problems.norm, options.exact, options.exact.using(options.low)
    )
    found, products = subspace_iteration(operator, rank, width, evidence.excess, most)
    u, s, v = found.u[:, :rank], found.s[:rank], found.v[:, :rank]
    values = _values(u, s, v, evidence.measures, evidence.errors, evidence.remainder)
    return replace(answered(values, label, options.progress), iterations=products)


class _TripletMeasurements:
    """Measures triplets during iterations: cheap measures first, the others if the first are good enough."""

    # ``measures`` are those of a certificate, of the last triplets, ``errors`` bounds on the errors of their
    # singular values, and ``remainder`` is an estimate of the error of the approximation.

    def __init__(self, problems: TallMatrix, rank: int, most: int) -> None:
        self.problems, self.rank, self.most = problems, rank, most
        self.tries = 0
        self.measures = [math.nan] * 3
        self.errors = torch.empty(0, dtype=torch.float32, device="cpu")
        self.remainder = math.nan

    def excess(self, found: Ritz) -> float:
        """Largest ratio of an error to its requested bound."""
        problems, k = self.problems, self.rank
        m, n = problems.options.shape_of(problems.a.shape)
        bound = problems.options.bound(m, n)
        # The numbers are few, and on the host, where NumPy takes a part of the time of torch for them.
        weights = problems.options.weights(found.s, problems.norm, m, n)[:k].numpy()
        gaps = np.sqrt(np.maximum(found.rest.numpy().diagonal()[:k].real, 0.0))
        lost = problems.rounded
        residual = float(np.linalg.norm(gaps / weights)) + lost / weights.min()
        errors, missed = np.full(k, math.inf), math.inf
        if residual <= bound:
            errors = self._errors(found, bound * weights) + lost
            missed = float((errors / weights).max())
        self.errors, self.measures = torch.from_numpy(errors), [residual, found.loss, missed]
        if residual > bound:
            return residual / bound
        # Errors of singular values are of second order in the residual, unless one was missed.
        self.tries += 1
        return min(LESS, missed / bound) if missed <= bound or self.tries < TRIES else math.inf

    def _errors(self, found: Ritz, most: np.ndarray) -> np.ndarray:
        """Bounds on the errors of the singular values, given what they may be at most."""
        s, k, margin = found.s.numpy(), self.rank, float(most[-1])
        last, edge = float(s[k - 1]), float(s[-1])
        wanted = max(CLEAR * (last + margin), (last + margin + edge) / 2)
        a, exact = self.problems.a[0], self.problems.options.exact
        beyond = largest_beyond(a, found.u, found.v, edge, wanted, exact, most=self.most)
        left = float(np.square(s[k:]).sum() + found.rest.numpy().trace().real)
        self.remainder = math.hypot(math.sqrt(left), beyond.size)
        bounds = upper_bounds(s, found.rest.numpy(), k, beyond.bound, margin, most / LESS)
        s = s[:k]
        # Singular values of A are larger by so much, or smaller; s is rounded.
        larger, smaller = bounds - s + found.loss * self.problems.norm, found.rounding + found.loss * s
        return np.maximum(larger, smaller) + self.problems.options.work.u * s


def by_gram(problems: TallMatrix, before: Solution | None, *, label: str, compute: str) -> Solution:
    """Eigenvectors of the Gram matrix, and a step or more of subspace iteration on A itself."""
    options, a, norm = problems.options, problems.a[0], problems.norm
    rank = options.rank
    assert rank is not None
    low, shape = options.exact.using(compute), options.shape_of(problems.a.shape)
    triplets = gram_svd(a, rank, low, options.exact, options.rounding(*shape) * norm)
    if triplets is None:
        raise Declined("the Gram matrix overflows")
    found, beyond = triplets
    s, left = found.s, found.residual + problems.rounded
    # Up to rounding errors of A^T A, which are relative to its norm, that is the largest beyond.
    beyond = (beyond**2 + low.arithmetic.u * norm**2) ** 0.5
    weights, errors = options.weights(s, norm, *shape), torch.full_like(s, left)
    errors[-1] = torch.maximum(errors[-1], beyond - s[-1] + problems.rounded)
    measures = [left / float(weights.min()), found.loss, float((errors / weights).max())]
    errors = errors + found.loss * rank**0.5 * s
    values = _values(found.u, s, found.v, measures, errors)
    return answered(values, label, options.progress)


def by_qr(problems: TallMatrix, before: Solution | None) -> Solution:
    options, norm = problems.options, problems.norm
    shape, over_rows = options.shape_of(problems.a.shape), options.engine.over_rows
    factors = factorize(
        problems.a, "reduced", QROptions(options.target, options.engine, progress=options.progress)
    )
    certificate = factors.certificates[0]
    q, r = (x[0].to(options.exact.storage) for x in (factors.q, factors.r))
    u, s, vh, left, lost = svd_of_r(r, rank=options.rank, tol=options.tol, over_rows=over_rows)
    u, s = exact_matmul(q, u), s.double().cpu()
    bound, weights = options.bound(*shape), options.weights(s, norm, *shape)
    # Certified errors are relative to the norm of A.
    smallest = float(weights.min()) if len(s) else norm
    unit = options.rounding(*shape) * norm / smallest if smallest > 0 else bound
    residual = unit * certificate.residual / certificate.residual_bound
    residual += (left + problems.rounded) / smallest if smallest > 0 else 0.0
    if residual > bound and smallest > 0:  # a sum of bounds, of which the triplets may miss less
        image = over_rows.total(exact_matmul(problems.a[0].mH, u))
        gaps = two_norms(image - vh.mH * s.to(u.device, u.dtype.to_real()), 0)
        residual = float(two_norms(gaps.double().cpu() / weights)) + problems.rounded / smallest
    orthogonality = max(lost, float(over_rows.agree(loss_of(u, over_rows))))
    n, work = shape[1], options.work.dtype
    errors = (certificate.residual + 2 * measurement_error(n, work)) * norm + left + problems.rounded
    # Norms differ by half of what the squares of U and of V lack.
    errors = errors + (certificate.orthogonality + lost) * n**0.5 * s
    measures = [residual, orthogonality, residual]
    label = f"{factors.attempts[-1].method} + svd"
    return answered(_values(u, s, vh.mH, measures, errors), label, options.progress)


def _values(
    u: torch.Tensor,
    s: torch.Tensor,
    v: torch.Tensor,
    measures: list[float],
    errors: torch.Tensor,
    remainder: float = math.nan,
) -> SVDValues:
    numbers = torch.tensor([[remainder, *measures]], dtype=torch.float64, device="cpu")
    return SVDValues(u[None], s[None], v[None], errors[None], numbers[:, 0], numbers[:, 1:])


SVDLink = Link[TallMatrix, SVDValues]
OVERSAMPLING = 4  # a block has a column for each triplet that is wanted, and more for each so many of them
MULTIPLE = 8  # columns of a block come in such numbers, so that products fill the matrix units

FEWEST = 6
"""Least price of iterations in products by ``A^T A`` for a try: four suffice where there is a gap."""

LIMIT = 1000  # largest number of products by ``A^T A`` if iterations are requested by name


@dataclass(frozen=True)
class SVDTuning:
    """Prices of the ways to singular triplets."""

    # Shorter side of the matrices of a batch, of 3:1, up to which all triplets are computed at once.
    triplets_together: float
    gram_part: float  # part of all triplets up to which the leading ones are computed by themselves
    eigenvectors: float  # price of a symmetric eigenproblem, in operations in float32 for each n^3
    iteration: float  # price of a product by A^T A in addition to its operations, in operations in float32
    block: float  # price of that product for each element of A and column of the block, in the same unit


@dataclass(frozen=True)
class SVDCase(Case):
    m: int
    n: int
    options: SVDOptions

    @property
    def rank(self) -> int:
        return self.n if self.options.rank is None else self.options.rank

    @property
    def partial(self) -> bool:
        """Whether the leading triplets are computed by themselves."""
        options = self.options
        few = options.rank is not None and self.rank <= self.tuning[SVDTuning].gram_part * self.n
        return options.algorithm is None and few


def chain(m: int, n: int, options: SVDOptions) -> Sequence[SVDLink]:
    return Chain(TABLE, SVDCase(m, n, options))


def block_width(n: int, rank: int) -> int:
    """Columns of the block that iterations work on."""
    beyond = max(MULTIPLE, rank // OVERSAMPLING)
    return min(n, -(-(rank + beyond) // MULTIPLE) * MULTIPLE)


def worth(m: int, n: int, rank: int, tuning: Tuning) -> int:
    """Products of a block by ``A^T A`` for the price of the Gram matrix with its eigenvectors."""
    operations = (m + tuning[SVDTuning].eigenvectors * n) * n * n
    product = tuning[SVDTuning].block * m * n * block_width(n, rank) + tuning[SVDTuning].iteration
    return int(operations / product)


def _iteration(case: SVDCase, label: str, name: str) -> SVDLink:
    most = LIMIT if case.options.algorithm is not None else _worth(case)
    width = block_width(case.n, case.rank)
    return Link(label, partial(by_iteration, width=width, most=most, label=label))


def _worth(case: SVDCase) -> int:
    return worth(case.m, case.n, case.rank, case.tuning)


_when = Rule[SVDCase, bool]
_formats = Rule[SVDCase, Sequence[str]]

_iterates = _when(
    "a rank up to n / 4 where six products by A^T A cost less than its eigenvectors, and by name",
    lambda case: case.options.algorithm == "iteration" or (case.partial and _worth(case) >= FEWEST),
)

_part = _when(
    "a rank up to n / 4, and by name", lambda case: case.options.algorithm == "gram-svd" or case.partial
)

_default = _when("by default, and by name", lambda case: case.options.algorithm in (None, "qr-svd"))
_low = _formats("that of products by A", lambda case: [str(case.options.low)])


@ruled("fp16, fp16_cor, fp64; fp32 on a CPU")
def _of_gram(case: SVDCase) -> Sequence[str]:
    options = case.options
    if options.work is FP64 or not case.tuning.corrected:
        return ["fp64" if options.work is FP64 else "fp32"]
    return ["fp16" if options.part is None and options.target.u >= FP16.u else FP16_COR]


TABLE: Table[SVDCase] = (
    Row("subspace iteration {}", _iteration, (_iterates,), arithmetics=_low),
    Row("gram-svd {}", computed(by_gram), (_part,), arithmetics=_of_gram),
    Row("qr-svd", way(by_qr), (_default,)),
)
"""Cheapest first."""
