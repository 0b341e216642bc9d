"""What is tried for QR factorizations, cheapest first, and when factors are accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from neula.algorithms.orthogonal.batched_qr import (
    TILE_COLUMNS,
    batched_qr,
    batched_qr_in_double,
    batched_reorthogonalize,
)
from neula.algorithms.orthogonal.householder import householder
from neula.algorithms.orthogonal.tsqr import cholesky_tsqr, cholesky_tsqr2, cholesky_tsqr32
from neula.algorithms.orthogonal.tsqr import tsqr as tree
from neula.certificates.qr import QRCertificate, QRCertificates, certificate_of, certificates_of
from neula.engines import BF16, FORMATS, FP16, FP32, FP64, Format, Tuning
from neula.engines.reduction import HERE, Reduction
from neula.kernels.precision import exact_matmul
from neula.kernels.tall import PANEL_COLUMNS
from neula.pipeline.chain import Answer, Link, Run, Verdict
from neula.pipeline.inputs import finite_members
from neula.problems.orthogonal import host_links, launched, links
from neula.problems.orthogonal.by_kernel import LABEL, is_for_core
from neula.problems.orthogonal.links import QRLink
from neula.problems.orthogonal.problem import Matrix, QRMatrices, QROptions, QRValues

WIDENED = 1 << 26
"""Elements of matrices in single precision, at most, that are copied in double."""

MAX_PASSES = 3
"""Gram-Schmidt passes: twice is enough at full rank, the third is for matrices without."""


@dataclass(frozen=True)
class MatrixLayout:
    """A matrix without its numbers.

    Attributes
    ----------
    m, n : int
    dtype : torch.dtype
    by_rows, by_columns : bool
        Whether elements of one row, of one column, are neighbours in memory.
    """

    m: int
    n: int
    dtype: torch.dtype
    by_rows: bool = True
    by_columns: bool = False

    @classmethod
    def from_matrix(cls, a: torch.Tensor) -> MatrixLayout:
        """That of a single matrix."""
        m, n = a.shape
        return cls(m, n, a.dtype, a.stride(1) == 1, a.stride(0) == 1)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.m * self.n * self.dtype.itemsize


def go_together(count: int, m: int, n: int, tuning: Tuning) -> bool:
    """Whether each step is to be one launch for a whole batch: many small matrices."""
    return count > 1 and m * n <= tuning.batched_elements


def chain_together(m: int, n: int, target: Format, tuning: Tuning) -> list[QRLink]:
    """What is tried for all matrices of a batch together.

    Square matrices are often too ill-conditioned for one pass in float32 (the condition number of a random
    one is about n, that of one with twice as many rows as columns less than 6). One in float64 costs less
    than two where its products are as fast (64 of 1024 x 1024 on an H200: 7.4 ms and 11.4); elsewhere, and
    for a single tile, which two passes do not leave, both are done before measuring.
    """
    storage, k = FP64 if target is FP64 else FP32, min(m, n)
    name, dtype = storage.name, storage.dtype
    last = links.together("householder fp64", torch.float64, householder, waits=True)
    if tuning.lapack:
        return [*_by_core(m, n, target), links.by_lapack(storage), last]
    square = m < 2 * k
    doubled = square and storage is FP32 and k > TILE_COLUMNS and "fp64" in tuning.preconditioners
    passes = 2 if square and not doubled else 1
    name = "fp64" if doubled else name
    labels = {
        n: f"gram-schmidt {name}{label}" for n, label in ((1, ""), (2, " + reortho"), (3, " + 2 reortho"))
    }
    if doubled:  # squares of numbers that are float32 stay in the range of float64
        first = links.together(labels[1], None, batched_qr_in_double, scaled=False)
        return [first, *(links.another_pass(labels[n]) for n in range(2, MAX_PASSES + 1)), last]
    first = links.together(labels[passes], dtype, partial(batched_qr, passes=passes), scaled=False)
    more = [
        links.together(labels[n], dtype, partial(_orthogonal_at_any_rank, passes=n), waits=True)
        for n in range(passes + 1, MAX_PASSES + 1)
    ]
    return [first, *more, last]


def chain_tall(target: Format, tuning: Tuning, over_rows: Reduction = HERE) -> list[QRLink]:
    """What is tried for tall matrices of a few columns, one or a batch: Gram matrices first, then a tree."""
    low = tuning.corrected and target is not FP64
    once, name = (cholesky_tsqr32, "fp16_cor") if low else (cholesky_tsqr, "fp64")
    once = partial(once, over_rows=over_rows)
    passes = partial(links.one_by_one, method=once)
    twice = partial(links.one_by_one, method=partial(cholesky_tsqr2, once=once))
    # A reflector in float32 errs by some 10 u, no less than what a few columns are certified to.
    trees = ("fp64",) if target is FP64 else ("fp32", "fp64")
    return [
        links.together(f"cholesky-qr {name}", target.storage, passes, scaled=False),
        links.together(f"cholesky-qr {name}, twice", target.storage, twice),
        *(
            links.together(
                f"tsqr {name}",
                FORMATS[name].storage,
                partial(over_rows.merged, factorize=partial(tree, product=exact_matmul)),
            )
            for name in trees
        ),
    ]


def chain_alone(layout: MatrixLayout, options: QROptions, *, wait: bool = True) -> list[QRLink]:
    """What is tried for one matrix, whose first link waits for the host only if it may."""
    low, named = f"rgsqrf {options.low.format.name}", options.algorithm
    if options.in_place:
        return _in_place(low, options)
    storage, tuning = FP64 if options.target is FP64 else FP32, options.engine.tuning
    tried: list[QRLink] = []
    if not (options.named or options.over_rows.spread) and tuning.cholesky_qr_first(layout.m, layout.n):
        tried.append(host_links.by_products(options.target))
    if not options.named and tuning.lapack_first(layout.m, layout.n):
        tried += _by_core(layout.m, layout.n, options.target)
        return [*tried, host_links.alone_by_lapack(storage), Link("householder fp64", links.by_householder)]
    tried += _tall(layout, options) or _by_gram_matrices(layout, options, wait=wait)
    tried += _queued(low, layout, options, wait=wait)
    if named in (None, "rgsqrf"):
        tried.append(Link(low, links.first_pass, inherits=True))
    tried += _in_double_after_panels(layout, options)
    if _is_corrected_over_processes(options):
        tried.append(Link(low + links.CORRECTED, links.correction, inherits=True))
    if named == "cholesky-qr" or (named is None and options.target is FP64):
        tried.append(Link(f"{low} + cholesky-qr fp64", links.preconditioned, inherits=True))
    if named == "rgsqrf-reortho" or (named is None and options.target is not FP64):
        tried.append(Link(f"{low} + reortho", links.second_pass, inherits=True))
    if named in (None, "householder"):
        tried.append(Link("householder fp64", links.by_householder))
    return tried


def _by_core(m: int, n: int, target: Format) -> list[QRLink]:
    """The compiled core, of few columns."""
    return [Link(LABEL, host_links.by_core)] if is_for_core(m, n, target) else []


def is_queued(layout: MatrixLayout, options: QROptions) -> bool:
    """Whether the first links may be launched as a whole, before anything is known about the numbers."""
    tuning = options.engine.tuning
    named = options.algorithm not in (None, "rgsqrf") or options.progress is not None
    panel = options.panel or tuning.recursion(options.low.format.storage).panel
    waits = panel not in ("cholesky", "cholesky32")
    return tuning.replayed_bytes > 0 and layout.m >= layout.n and not named and not waits


def _tall(layout: MatrixLayout, options: QROptions) -> list[QRLink]:
    """Cholesky QR of a whole tall matrix: in corrected products, as in :func:`neula.tsqr`, or in low ones."""
    m, n, target, tuning = layout.m, layout.n, options.target, options.engine.tuning
    tall = m >= tuning.tall_ratio * n and not options.named and target is not FP64
    if not tall or not is_queued(layout, options):
        return []
    # The kernels of tall matrices read rows, or as many columns as a panel has.
    if n <= tuning.tall_columns and (layout.by_rows or (n <= PANEL_COLUMNS and layout.by_columns)):
        return chain_tall(target, tuning)[:1]
    if n <= tuning.low_columns and target in (FP16, BF16):
        return [launched.launching(f"cholesky-qr {options.low.format.name}", launched.low_cholesky_qr)]
    return []


def _by_gram_matrices(layout: MatrixLayout, options: QROptions, *, wait: bool) -> list[QRLink]:
    """Cholesky QR in double precision, where that is so fast that panels take longer to be launched.

    One pass for a low format, which loses no more orthogonality than that up to a condition number of 1e6;
    two for others, and in double precision three with a shift where these fail.
    """
    target, tuning = options.target, options.engine.tuning
    low, label, shifted = target in (FP16, BF16), "cholesky-qr fp64, twice", "shifted cholesky-qr fp64"
    most = 16 * tuning.gram_passes if target is FP64 else tuning.gram_passes / 32
    if options.named or layout.m * layout.n**2 > most or not is_queued(layout, options):
        return []
    if low:
        return [launched.launching("cholesky-qr fp64", partial(launched.by_gram_matrices, passes=1))]
    if target is FP64 and wait and layout.nbytes > tuning.replayed_bytes:
        return [launched.by_gram_matrices_with_a_look(label, shifted)]
    found = [launched.launching(label, partial(launched.by_gram_matrices, passes=2))]
    if target is FP64:
        found.append(launched.launching(shifted, launched.by_shifted_gram_matrices))
    return found


def _in_double_after_panels(layout: MatrixLayout, options: QROptions) -> list[QRLink]:
    """The same in place of a second pass in float32, of matrices that are too large to begin with it."""
    m, n, most = layout.m, layout.n, options.engine.tuning.gram_passes
    if options.named or options.target is not FP32 or options.over_rows.spread or options.in_place:
        return []
    pays = most / 32 < m * n**2 <= most and m * n <= WIDENED and m >= n
    return [launched.by_gram_matrices_if_definite("cholesky-qr fp64, twice")] if pays else []


def _queued(low: str, layout: MatrixLayout, options: QROptions, *, wait: bool) -> list[QRLink]:
    """First passes that are launched as a whole, or would be if nothing was gained by reading numbers."""
    if not is_queued(layout, options):
        return []
    # Square matrices are too ill-conditioned for one pass in float32 more often than not.
    square, default = layout.m < 2 * layout.n, options.algorithm is None
    if default and square and options.target is FP32:
        if wait and layout.n >= options.engine.tuning.partly_corrected:
            return [launched.corrected_where_lost(low + links.CORRECTED)]
        return [launched.launching(low + links.CORRECTED, launched.corrected)]
    tried = [launched.launching(low, Matrix.rgsqrf)]
    # Where launches decide, both passes played back take less time than a second one that is not.
    played_back = layout.nbytes <= options.engine.tuning.replayed_bytes
    if default and square and options.target is not FP64 and played_back:
        tried.append(launched.launching(f"{low} + reortho", launched.two_passes))
    return tried


def _is_corrected_over_processes(options: QROptions) -> bool:
    """Whether wide panels may have lost what a correction brings back, with fewer operations than a second
    pass, most of them in half precision.

    Matrices that are all here are corrected in a link that only launches, or in their places.
    """
    wide = options.over_rows.spread and options.engine.tuning.spread is not None
    return wide and not options.named and options.target is FP32


def _in_place(low: str, options: QROptions) -> list[QRLink]:
    """What is tried in the memory of A.

    Once ``A = Q R``, whatever orthogonalizes Q factorizes A.
    """
    named, tried = options.algorithm, []
    if named != "rgsqrf-reortho":
        tried.append(Link(low, links.first_pass_in_place, overwrites=True))
    if named is None and options.target is FP32:
        tried.append(Link(low + links.CORRECTED, links.correction_in_place, inherits=True, overwrites=True))
    if named != "rgsqrf":
        label = f"{low} + reortho"
        tried.append(Link(label, links.second_pass_in_place, inherits=True, overwrites=True))
    if named is None:
        tried.append(Link("householder fp64", links.householder_of_q, inherits=True, overwrites=True))
    return tried


def _orthogonal_at_any_rank(a: torch.Tensor, passes: int) -> tuple[torch.Tensor, torch.Tensor]:
    q, r = batched_qr(a, overwrite_a=True)
    for _ in range(passes - 1):
        q, r = batched_reorthogonalize(q, r)
    return q, r


@dataclass(frozen=True)
class QRJudge:
    """Factors are accepted by residual and orthogonality, along random vectors.

    Attributes
    ----------
    shape : (int, int)
        Of each matrix.
    target : Format
    batch : Tensor, shape (batch, m, n), or None
        Matrices that are factorized together, and may hold NaN or Inf: these are not tried again.
    in_place : bool
        Whether there is nothing but the last factors.
    """

    shape: Sequence[int]
    target: Format
    batch: torch.Tensor | None = None
    in_place: bool = False

    def measure(self, problems: QRMatrices, answer: Answer[Any]) -> torch.Tensor:
        """Links have done it, since CUDA graphs play it back with the rest."""
        return answer.values.measures.T

    def certificates(self, run: Run[Any]) -> Sequence[QRCertificate]:
        """Those of the best factors."""
        found: Sequence[QRCertificate] | None = run.evidence
        return self._certificates(run.found, run.numbers) if found is None else found

    def _certificates(self, values: QRValues, numbers: np.ndarray) -> QRCertificates:
        return certificates_of(numbers, values.measures.dtype, self.shape, self.target)

    def verdict(self, answer: Answer[Any], numbers: np.ndarray) -> Verdict:
        """Of factors that are not accepted those with the smallest error are best."""
        if self.batch is None:
            return self._verdict_of_one(answer, numbers[:, 0].tolist())
        found = self._certificates(answer.values, numbers)
        accepted = found.accepted
        penalty = np.array([~accepted, found.error])
        return Verdict(accepted, penalty, found.in_words, accepted | ~self._usable(self.batch, found), found)

    def _verdict_of_one(self, answer: Answer[Any], numbers: Sequence[float]) -> Verdict:
        """Without arrays of one number, which take longer than the numbers."""
        residual, size, loss = numbers
        found = certificate_of(
            residual, size, loss, self.shape, self.target, measured_in=answer.values.measures.dtype
        )
        penalty = [[0.0], [0.0]] if self.in_place else [[not found.accepted], [found.error]]
        words = answer.doubt or found.in_words
        return Verdict(np.array([found.accepted]), np.array(penalty), words, evidence=[found])

    def _usable(self, batch: torch.Tensor, found: QRCertificates) -> np.ndarray:
        """Which matrices hold neither NaN nor Inf; only those are read whose residual is not finite."""
        usable = np.isfinite(found.residual)
        doubtful = np.flatnonzero(~usable)
        if len(found) < len(batch):  # those that were are no longer tried
            usable[doubtful] = True
        elif len(doubtful) > 0:
            usable[doubtful] = finite_members(batch[torch.from_numpy(doubtful).to(batch.device)]).cpu()
        return usable
