"""The table of links for QR factorizations.

Small matrices of a batch are factorized together, each step one launch; others one by one. The arithmetic of
``rgsqrf`` is the cheapest that reaches the accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, partial

import torch

from neula.algorithms.orthogonal.batched_qr import batched_qr, batched_qr_in_double, batched_reorthogonalize
from neula.algorithms.orthogonal.gram_passes import gram_passes, shifted_passes
from neula.algorithms.orthogonal.householder import householder
from neula.algorithms.orthogonal.tsqr import cholesky_tsqr, cholesky_tsqr2, cholesky_tsqr32
from neula.algorithms.orthogonal.tsqr import tsqr as tree
from neula.engines import BF16, FORMATS, FP16, FP32, FP64, Format, Tuning
from neula.kernels.precision import exact_matmul
from neula.kernels.qr.mgs import TILE_COLUMNS
from neula.kernels.qr.tall import COLUMNS, PANEL_COLUMNS
from neula.pipeline.chain import (
    CORE,
    LAUNCHED,
    Case,
    Chain,
    Link,
    Make,
    Row,
    Rule,
    Table,
    labelled,
    ruled,
)
from neula.problems.orthogonal import ways
from neula.problems.orthogonal.problem import Matrix, QRMatrices, QROptions, QRTuning
from neula.problems.orthogonal.ways import QRLink


@dataclass(frozen=True)
class MatrixLayout:
    m: int
    n: int
    dtype: torch.dtype
    # by_rows, by_columns: whether elements of one row, of one column, are neighbours in memory.
    by_rows: bool = True
    by_columns: bool = False

    @classmethod
    def from_matrix(cls, a: torch.Tensor) -> MatrixLayout:
        m, n = a.shape
        return cls(m, n, a.dtype, a.stride(1) == 1, a.stride(0) == 1)

    @property
    def nbytes(self) -> int:
        return self.m * self.n * self.dtype.itemsize


class Stage(Enum):
    TOGETHER = "small matrices of a batch together"
    TALL = "tall matrices of a few columns, ``tsqr``"
    ALONE = "one matrix"


@dataclass(frozen=True, kw_only=True)
class QRCase(MatrixLayout, Case):
    options: QROptions
    stage: Stage
    wait: bool = True  # whether the first link may wait for the host

    @property
    def target(self) -> Format:
        return self.options.target

    @property
    def complex(self) -> bool:
        return self.options.engine.is_complex

    @cached_property
    def square(self) -> bool:
        """Whether it is more often than not too ill-conditioned for one pass in float32: the condition
        number of a random square matrix is about n, that of one with twice as many rows less than 6.
        """
        return self.m < 2 * self.n

    @cached_property
    def doubled(self) -> bool:
        """Whether such matrices of a batch take one pass in float64: it costs less than two where its
        products are as fast (64 of 1024 x 1024 on an H200: 7.4 ms and 11.4), and a single tile takes two.
        """
        k = min(self.m, self.n)
        return self.m < 2 * k and self.options.work is FP32 and k > TILE_COLUMNS and self.tuning.fast_fp64

    @cached_property
    def passes(self) -> int:
        """Passes of Gram-Schmidt before the first measurement, for matrices of a batch."""
        return 2 if self.m < 2 * min(self.m, self.n) and not self.doubled else 1

    @cached_property
    def lapack(self) -> bool:
        free = not (self.options.named or self.options.in_place)
        return free and self.tuning.lapack_first(self.m, self.n)

    @cached_property
    def queued(self) -> bool:
        """Whether first links may be launched as a whole, before anything is known about the numbers."""
        options, tuning = self.options, self.tuning
        named = options.algorithm not in (None, "rgsqrf") or options.progress is not None or options.in_place
        panel = options.panel or tuning.recursion(options.low.format.storage).panel
        waits = panel not in ("cholesky", "cholesky32")
        return tuning.replayed_bytes > 0 and self.m >= self.n and not named and not waits

    @cached_property
    def tall(self) -> str:
        """Arithmetic of Cholesky QR of a whole tall matrix; empty where that does not come first."""
        options, tuning, n = self.options, self.tuning, self.n
        tall = self.m >= tuning[QRTuning].tall_ratio * n and not options.named and self.target is not FP64
        if not tall or not self.queued:
            return ""
        # The kernels of tall matrices read rows, or as many columns as a panel has.
        if n <= COLUMNS[-1] and (self.by_rows or (n <= PANEL_COLUMNS and self.by_columns)):
            return _corrected(self)[0]
        low = n <= tuning[QRTuning].low_columns and self.target in (FP16, BF16)
        return options.low.format.name if low else ""

    @cached_property
    def gram(self) -> bool:
        """Whether Cholesky QR in double precision is so fast that panels take longer to be launched."""
        passes = self.tuning[QRTuning].gram_passes
        # Panels take less time where nothing is replayed (20000 x 4000 on an H200: 20 ms, and 39).
        doubled = passes if self.nbytes > self.tuning.replayed_bytes else 16 * passes
        most = doubled if self.target is FP64 else passes / 32
        fast = not self.options.named and self.m * self.n**2 <= most and self.queued
        return fast and not self.tall

    @cached_property
    def corrected(self) -> bool:
        """Whether one launch corrects Q: square matrices are mostly too ill-conditioned for one pass."""
        default = self.options.algorithm is None
        return self.queued and default and self.square and (self.target is FP32 or self.singly)

    @cached_property
    def singly(self) -> bool:
        """Whether a pass in float32 and a correction take less time than two passes in half precision, which
        nearly square matrices would need (order 8192 on an H200: 14 ms and 22).
        """
        nearly = 16 * (self.m - self.n) < self.n and self.nbytes <= self.tuning.replayed_bytes
        return nearly and self.target in (FP16, BF16) and self.options.compute is None and not self.gram


def go_together(count: int, m: int, n: int, tuning: Tuning) -> bool:
    """Whether each step is to be one launch for a whole batch: many small matrices."""
    return count > 1 and m * n <= tuning.batched_elements


def chain_together(m: int, n: int, options: QROptions) -> Sequence[QRLink]:
    return Chain(TABLE, QRCase(m, n, options.target.dtype, options=options, stage=Stage.TOGETHER))


def chain_tall(m: int, n: int, options: QROptions) -> Sequence[QRLink]:
    return Chain(TABLE, QRCase(m, n, options.target.dtype, options=options, stage=Stage.TALL))


def chain_alone(layout: MatrixLayout, options: QROptions, *, wait: bool = True) -> Sequence[QRLink]:
    """Links for one matrix; the first one synchronizes only if it may."""
    return Chain(TABLE, QRCase(**vars(layout), options=options, stage=Stage.ALONE, wait=wait))


_when = Rule[QRCase, bool]


def _in(*stages: Stage) -> Rule[QRCase, bool]:
    return _when(", or ".join(stage.value for stage in stages), lambda case: case.stage in stages)


def _by_name(words: str, *names: str | None) -> Rule[QRCase, bool]:
    return _when(words, lambda case: case.options.algorithm in names)


_together, _tall_stage, _alone = map(_in, Stage)

_lapack = _when(
    "on a CPU, batches, and matrices that are nearly square or small",
    lambda case: case.lapack if case.stage is Stage.ALONE else case.tuning.lapack,
)

_not_lapack = _when("otherwise, and on a GPU", lambda case: not _lapack(case))

_few_columns = _when(
    "up to 128 columns, of complex numbers 64, accuracies fp32 and fp64",
    lambda case: ways.is_for_core(case.m, case.n, case.target, is_complex=case.complex),
)


@ruled("on a CPU, from 3 rows a column and more than 128 columns on, of complex numbers 64")
def _by_products(case: QRCase) -> bool:
    allowed = not (case.options.named or case.options.in_place or case.options.over_rows.spread)
    many = case.n * (1 + case.complex) > ways.COLUMNS  # a kernel does the same for fewer
    return allowed and many and case.m >= case.tuning[QRTuning].cholesky_qr_ratio * case.n


_one_pass = _when("two rows a column, or in fp64 for fp32", lambda case: case.passes == 1)
_real = _when("real numbers", lambda case: not case.complex)

_tall = _when(
    "from 32 rows a column on, up to 256 columns; in half precision up to 1024", lambda case: bool(case.tall)
)


@ruled("one matrix: accuracies fp16 and bf16, m n^2 up to 2e9; batches: complex numbers, below fp64")
def _gram_once(case: QRCase) -> bool:
    if case.stage is Stage.TOGETHER:
        return case.complex and case.target is not FP64
    return case.gram and case.target in (FP16, BF16)


@ruled("one matrix: fp32, m n^2 up to 2e9, fp64 to 1e12 (beyond CUDA graphs 7e10); batches: complex numbers")
def _gram_twice(case: QRCase) -> bool:
    return case.complex if case.stage is Stage.TOGETHER else case.gram and case.target not in (FP16, BF16)


@ruled("one matrix: fp64, matrices for CUDA graphs; batches: complex numbers")
def _gram_shifted(case: QRCase) -> bool:
    if case.stage is Stage.TOGETHER:
        return case.complex
    return case.gram and case.target is FP64 and case.nbytes <= case.tuning.replayed_bytes


_corrected_at_once = _when(
    "fp32, less than two rows a column; fp16 and bf16, nearly square matrices for CUDA graphs",
    lambda case: case.corrected,
)
_queued = _when("at least as many rows as columns", lambda case: case.queued and not case.corrected)


@ruled("fp16 and bf16, less than two rows a column, matrices for CUDA graphs")
def _two_passes(case: QRCase) -> bool:
    # If launches dominate, two replayed passes take less time than one second pass that is not replayed.
    played_back = case.nbytes <= case.tuning.replayed_bytes
    low = case.options.algorithm is None and case.square and case.target is not FP64
    return _queued(case) and low and played_back


@ruled("fp32, m n^2 from 2e9 to 7e10, in place of a second pass")
def _after_panels(case: QRCase) -> bool:
    m, n, options, tuning = case.m, case.n, case.options, case.tuning[QRTuning]
    most, small = tuning.gram_passes, m * n <= tuning.widened_elements
    wanted = not (options.named or options.in_place or options.over_rows.spread) and case.target is FP32
    return wanted and most / 32 < m * n**2 <= most and small and m >= n


@ruled("fp32, rows over processes with wide panels, or ``overwrite_a=True``")
def _corrected_after(case: QRCase) -> bool:
    # A correction has fewer operations than a second pass, most of them in half precision.
    options = case.options
    wide = options.over_rows.spread and case.tuning.spread is not None
    return case.target is FP32 and (
        (options.in_place and options.algorithm is None) or (wide and not options.named)
    )


@ruled("fp64 by default, except with ``overwrite_a=True``, and ``algorithm='cholesky-qr'``")
def _preconditioned(case: QRCase) -> bool:
    named = case.options.algorithm
    return named == "cholesky-qr" or (named is None and case.target is FP64 and not case.options.in_place)


@ruled("otherwise by default, and ``algorithm='rgsqrf-reortho'``")
def _second(case: QRCase) -> bool:
    named = case.options.algorithm
    return named == "rgsqrf-reortho" or (named is None and not _preconditioned(case))


_first = _by_name("by default, and ``algorithm='rgsqrf'``", None, "rgsqrf")
_exactly_two = _by_name("only ``algorithm='rgsqrf-twice'``", "rgsqrf-twice")
_last = _by_name("by default, and ``algorithm='householder'``", None, "householder")

_formats = Rule[QRCase, Sequence[str]]
_working = _formats("fp32, fp64: the working precision", lambda case: [case.options.work.name])
_doubled = _formats("fp32, fp64", lambda case: ["fp64" if case.doubled else case.options.work.name])

_low = _formats(
    "fp16, fp32 or fp16_cor, fp64, by the accuracy, or ``compute``",
    lambda case: [case.options.low.format.name],
)

_at_least_single = _formats(
    "fp32 or fp16_cor, or ``compute``",
    lambda case: [(replace(case.options, target=FP32) if case.singly else case.options).low.format.name],
)

_corrected = _formats(
    "fp16_cor; fp64 for that accuracy, of complex numbers, and where fp16_cor does not pay",
    lambda case: [
        "fp16_cor" if case.tuning.corrected and case.target is not FP64 and not case.complex else "fp64"
    ],
)

_tall_arithmetic = _formats("fp16_cor; fp16 where Q may have that accuracy", lambda case: [case.tall])


# A reflector in float32 errs by some 10 u, no less than what a few columns are certified to.
_of_trees = _formats("fp32, fp64", lambda case: ["fp64"] if case.target is FP64 else ["fp32", "fp64"])


def _reflected(case: QRCase, label: str, name: str) -> QRLink:
    """LAPACK's reflections in working precision, of matrices as they are: float64 is not even copied."""
    link = ways.together(label, FORMATS[name].dtype, householder, scaled=False)
    return ways.of_finite(link) if case.stage is Stage.ALONE else link


def _gram_schmidt(passes: int) -> Make:
    """So many passes: both before measuring where one would not do."""

    def make(case: QRCase, label: str, name: str) -> QRLink:
        if case.doubled:  # squares of numbers that are float32 stay in the range of float64
            first = passes == 1
            return (
                ways.together(label, None, batched_qr_in_double, scaled=False)
                if first
                else ways.another_pass(label)
            )
        if passes == case.passes:
            return ways.together(
                label, case.options.work.dtype, partial(batched_qr, passes=passes), scaled=False
            )
        method = partial(_orthogonal_at_any_rank, passes=passes)
        return ways.together(label, case.options.work.dtype, method, waits=True)

    return make


def _orthogonal_at_any_rank(a: torch.Tensor, passes: int) -> tuple[torch.Tensor, torch.Tensor]:
    q, r = batched_qr(a, overwrite_a=True)
    for _ in range(passes - 1):
        q, r = batched_reorthogonalize(q, r)
    return q, r


def _tall_cholesky(case: QRCase, label: str, name: str) -> QRLink:
    if name not in ("fp64", "fp16_cor"):
        return ways.launching(label, ways.low_cholesky_qr)
    return ways.together(
        label, case.target.storage, partial(ways.one_by_one, method=_once(case)), scaled=False
    )


def _tall_cholesky_twice(case: QRCase, label: str, name: str) -> QRLink:
    twice = partial(cholesky_tsqr2, once=_once(case))
    return ways.together(label, case.target.storage, partial(ways.one_by_one, method=twice))


def _once(case: QRCase) -> ways.Method:
    once = cholesky_tsqr if _corrected(case) == ["fp64"] else cholesky_tsqr32
    return partial(once, over_rows=case.options.over_rows)


def _tree(case: QRCase, label: str, name: str) -> QRLink:
    method = partial(case.options.over_rows.merged, factorize=partial(tree, product=exact_matmul))
    return ways.together(label, FORMATS[name].storage, method)


def _by_gram(passes: int) -> Make:
    """So many passes in double precision, each a few launches; three with a shift."""

    def make(case: QRCase, label: str, name: str) -> QRLink:
        if case.stage is Stage.ALONE:
            return ways.launching(label, partial(ways.by_gram_matrices, passes=passes))
        many = partial(gram_passes, passes=passes, exact=False) if passes < 3 else shifted_passes
        return ways.together(label, torch.float64, partial(many, engine=case.options.engine))

    return make


def _correcting(case: QRCase, label: str, name: str) -> QRLink:
    partly = case.wait and case.n >= case.tuning[QRTuning].partly_corrected
    link = ways.corrected_where_lost(label) if partly else ways.launching(label, ways.corrected)
    if not case.singly:
        return link

    def answer(matrices: QRMatrices, before: ways.Solution | None) -> ways.Solution:
        return link.answer(replace(matrices, options=replace(matrices.options, target=FP32)), before)

    return replace(link, answer=answer)


def _launching(method: Callable[[Matrix], ways.Factors]) -> Make:
    return lambda case, label, name: ways.launching(label, method)


def _after(answer: Callable[..., ways.Solution], *, inherits: bool = True) -> Make:
    """A link that continues from the one before, in the memory of A where Q is to take that."""

    def make(case: QRCase, label: str, name: str) -> QRLink:
        in_place = case.options.in_place
        return Link(label, answer, inherits=inherits or in_place, overwrites=in_place)

    return make


REPEATED = "cholesky-qr {}, repeated"
ONCE = "cholesky-qr {}"
TWICE = "cholesky-qr {}, twice"
SHIFTED = "shifted cholesky-qr {}"
RGSQRF, HOUSEHOLDER, TREE, GRAM_SCHMIDT = "rgsqrf {}", "householder {}", "tsqr {}", "gram-schmidt {}"
REORTHO, CORRECTION = "reortho", ways.CORRECTED.removeprefix(" + ")
_ON_GPU = _alone, _not_lapack
_first_stages = _in(Stage.TOGETHER, Stage.ALONE)

TABLE: Table[QRCase] = (
    Row(GRAM_SCHMIDT, _gram_schmidt(1), (_together, _not_lapack, _real, _one_pass), "", _doubled),
    Row(GRAM_SCHMIDT, _gram_schmidt(2), (_together, _not_lapack, _real), REORTHO, _doubled),
    Row(GRAM_SCHMIDT, _gram_schmidt(3), (_together, _not_lapack, _real), f"2 {REORTHO}", _doubled),
    Row(ONCE, _tall_cholesky, (_tall_stage,), "", _corrected),
    Row(TWICE, _tall_cholesky_twice, (_tall_stage,), "", _corrected),
    Row(TREE, _tree, (_tall_stage,), "", _of_trees),
    Row(REPEATED, labelled(ways.by_products), (_alone, _by_products), "", _working),
    Row(REPEATED, labelled(ways.by_core), (_first_stages, _lapack, _few_columns), place=CORE),
    Row(HOUSEHOLDER, _reflected, (_first_stages, _lapack), "", _working),
    Row(ONCE, _tall_cholesky, (*_ON_GPU, _tall), "", _tall_arithmetic, LAUNCHED),
    Row(ONCE, _by_gram(1), (_first_stages, _not_lapack, _gram_once), place=LAUNCHED),
    Row(TWICE, _by_gram(2), (_first_stages, _not_lapack, _gram_twice), place=LAUNCHED),
    Row(SHIFTED, _by_gram(3), (_first_stages, _not_lapack, _gram_shifted), place=LAUNCHED),
    Row(RGSQRF, _correcting, (*_ON_GPU, _corrected_at_once), CORRECTION, _at_least_single, LAUNCHED),
    Row(RGSQRF, _launching(Matrix.rgsqrf), (*_ON_GPU, _queued), "", _low, LAUNCHED),
    Row(RGSQRF, _launching(ways.two_passes), (*_ON_GPU, _two_passes), REORTHO, _low, LAUNCHED),
    Row(RGSQRF, _after(ways.first_pass), (*_ON_GPU, _first), "", _low),
    Row(TWICE, lambda case, label, _: ways.by_gram_matrices_if_definite(label), (*_ON_GPU, _after_panels)),
    Row(RGSQRF, _after(ways.correction), (*_ON_GPU, _corrected_after), CORRECTION, _low),
    Row(RGSQRF, _after(ways.preconditioned), (*_ON_GPU, _preconditioned), "cholesky-qr fp64", _low),
    Row(RGSQRF, _after(ways.twice), (*_ON_GPU, _exactly_two), f"one {REORTHO}", _low),
    Row(RGSQRF, _after(ways.second_pass), (*_ON_GPU, _second), REORTHO, _low),
    Row(HOUSEHOLDER, _after(ways.by_householder, inherits=False), (_alone, _last)),
    Row(
        HOUSEHOLDER,
        lambda case, label, _: ways.together(label, torch.float64, householder, waits=True),
        (_together,),
    ),
)
"""Cheapest first."""
