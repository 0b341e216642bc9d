"""What is tried for low-rank approximations, cheapest first, and when triplets are accepted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from neula.certificates.low_rank import SVDCertificate
from neula.engines import FP16, FP16_COR, FP64, Tuning
from neula.pipeline.chain import Answer, Link, Verdict
from neula.problems.low_rank import links
from neula.problems.low_rank.problem import SVDOptions, SVDValues, TallMatrix

SVDLink = Link[TallMatrix, SVDValues]

OVERSAMPLING = 4
"""A block has a column for each triplet that is wanted, and more for each so many of them."""

MULTIPLE = 8
"""Columns of a block come in such numbers, so that products fill the matrix units."""

FEWEST = 6
"""Products by ``A^T A`` that must be worth it before iterations are tried: four do where there is a gap."""

LIMIT = 1000
"""The same of iterations that were asked for by name."""


def chain(m: int, n: int, options: SVDOptions) -> list[SVDLink]:
    """What is tried for a tall matrix.

    A part of the singular values comes from iterations where these cost less than the Gram matrix and its
    eigenvectors, from the Gram matrix otherwise; all of them, and what neither finds, from QR and the SVD of
    R, or for small matrices, unless their rows are spread over processes, from the library's SVD.
    """
    tuning, named, rank = options.engine.tuning, options.algorithm, options.rank
    if named == "qr-svd":
        return [_QR_SVD]
    if named == "gram-svd":
        return [_gram(options)]
    if named == "iteration":
        return [_iteration(m, n, options)]
    if m * n * n <= tuning.direct_svd and not options.engine.over_rows.spread:
        return [Link(f"svd {options.work.name}", links.by_svd), _QR_SVD]
    if rank is None or rank > tuning.gram_part * n:
        return [_QR_SVD]
    iterations = [_iteration(m, n, options)] if worth(m, n, rank, tuning) >= FEWEST else []
    return [*iterations, _gram(options), _QR_SVD]


def block_width(n: int, rank: int) -> int:
    """Columns of the block that iterations work on."""
    beyond = max(MULTIPLE, rank // OVERSAMPLING)
    return min(n, -(-(rank + beyond) // MULTIPLE) * MULTIPLE)


def worth(m: int, n: int, rank: int, tuning: Tuning) -> int:
    """Products of a block by ``A^T A`` for the price of the Gram matrix with its eigenvectors."""
    operations = (m + tuning.eigenvectors * n) * n * n
    return int(operations / (4 * m * n * block_width(n, rank) + tuning.iteration))


def _iteration(m: int, n: int, options: SVDOptions) -> SVDLink:
    assert options.rank is not None
    label = f"subspace iteration {options.low}"
    most = worth(m, n, options.rank, options.engine.tuning)
    most = LIMIT if options.algorithm is not None else most
    width = block_width(n, options.rank)
    return Link(label, partial(links.by_iteration, width=width, most=most, label=label))


def _gram(options: SVDOptions) -> SVDLink:
    if options.work is FP64:
        compute = "fp64"
    elif not options.engine.tuning.corrected:
        compute = "fp32"
    else:
        compute = "fp16" if options.part is None and options.target.u >= FP16.u else FP16_COR
    return Link(f"gram-svd {compute}", partial(links.by_gram, compute=compute))


_QR_SVD: SVDLink = Link("qr-svd", links.by_qr)


@dataclass(frozen=True)
class SVDJudge:
    """Triplets are accepted by residual, orthogonality, and what may have been missed.

    Attributes
    ----------
    bound, orthogonality_bound : float
    """

    bound: float
    orthogonality_bound: float

    @classmethod
    def for_shape(cls, m: int, n: int, options: SVDOptions) -> SVDJudge:
        """The judge of triplets of a matrix of this shape."""
        return cls(options.bound(m, n), options.orthogonality_bound(m, n))

    def measure(self, problems: object, answer: Answer[SVDValues]) -> torch.Tensor:
        """Links have done it, since iterations stop by what is measured."""
        return answer.values.measures.T

    def certificate(self, numbers: np.ndarray) -> SVDCertificate:
        """What the numbers say."""
        residual, orthogonality, missed = numbers[:, 0].tolist()
        return SVDCertificate(residual, orthogonality, missed, self.bound, self.orthogonality_bound)

    def verdict(self, answer: Answer[SVDValues], numbers: np.ndarray) -> Verdict:
        """Of triplets that are not accepted those are best whose measures exceed their bounds least."""
        found = self.certificate(numbers)
        penalty = np.array([[not found.accepted], [max(found.excess)]])
        return Verdict(np.array([found.accepted]), penalty, str(found))
