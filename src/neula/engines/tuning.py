"""Thresholds and block sizes of machines: the files in ``machines/``, and the records of algorithms that
read them, such as ``engine.tuning[LUTuning]``. None of them changes an answer's accuracy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, TypeVar

import torch

from neula.engines.formats import Arithmetic, Format

Record = TypeVar("Record")


@dataclass(frozen=True)
class Recursion:
    """How the recursion of a QR ends."""

    panel: str  # a key of neula.algorithms.orthogonal.panels.PANELS
    cutoff: int  # width of the panels


@dataclass(frozen=True)
class CorrectedTuning:
    """Sizes from which products in fp16 with error correction are faster than in float32."""

    corrected_from: int  # smallest dimension
    # corrected_gram, projected_from: m n^2 of a Gram matrix, or m n k of a projection A - Q (Q^T A) whose
    # smallest dimension is projected_from.
    corrected_gram: int
    projected_from: int
    # corrected_product, corrected_width: m n k and m n / (m + n) of neula.matmul, which splits its operands:
    # a few passes over (m + n) k numbers, so that m n k operations are faster.
    corrected_product: int
    corrected_width: int


@dataclass(frozen=True, init=False, eq=False)
class Tuning:
    """Thresholds of speed of one machine by name; those that many algorithms share are attributes.

    They are made of all ``numbers`` and other values of some, as ``dataclasses.replace`` passes them.
    """

    numbers: Mapping[str, Any]
    arithmetics: tuple[str, ...]  # of products, cheapest first
    preconditioners: tuple[str, ...]  # formats of factors that are refined, soonest to a solution first
    definite: tuple[str, ...]  # arithmetics of Cholesky factors that are refined, likewise
    corrected: bool  # whether the kernel of products with error correction runs
    tournaments: bool  # whether kernels pick pivots in half precision by tournaments
    lapack: bool  # whether nothing beats LAPACK on small matrices, and on tall ones
    # Value of m n^2 up to which nothing beats LAPACK's reflections on one matrix twice as tall as wide.
    lapack_alone: int
    replayed_bytes: int  # size of inputs up to which whole links are replayed from CUDA graphs
    # single, double, half, spread: of a QR whose working matrices are float32, float64, fp16 (None: there
    # are no panels for it), or float32 with rows over processes.
    single: Recursion
    double: Recursion
    half: Recursion | None
    spread: Recursion | None
    batched_elements: int  # of a matrix up to which a batch takes each step of a QR together
    chunk_elements: int  # of problems that are worked on together
    at_a_time: int  # vectors that a large matrix is multiplied by in about the time of one; 0: one
    _records: dict[type, Any] = field(init=False, repr=False)  # that were requested

    def __init__(self, numbers: Mapping[str, Any], **others: Any) -> None:
        if unknown := others.keys() - numbers.keys():
            raise TypeError(f"unknown thresholds: {', '.join(sorted(unknown))}")
        found = {**numbers, **others}
        vars(self).update(found, numbers=found, _records={})

    def __getitem__(self, record: type[Record]) -> Record:
        """The record of an algorithm."""
        found: Record | None = self._records.get(record)
        if found is None:
            names = [each.name for each in fields(record)]  # type: ignore[arg-type]
            found = self._records[record] = record(**{name: self.numbers[name] for name in names})
        return found

    def having(self, **others: Any) -> Tuning:
        return Tuning(self.numbers, **others)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tuning) and self.numbers == other.numbers

    def __hash__(self) -> int:
        return hash(frozenset(self.numbers.items()))

    @property
    def fast_fp64(self) -> bool:
        """Whether a GPU multiplies in double precision as fast as in float32: such factors are refined."""
        return "fp64" in self.preconditioners

    def has_tournaments(self, format: Format) -> bool:
        """Whether LU in this format finds pivots by tournaments."""
        return self.tournaments and format.dtype.itemsize == 2

    def cheapest(self, target: Format) -> str:
        """The cheapest arithmetic whose accuracy is that of a format, or better."""
        return _cheapest(self.arithmetics, target)

    def lapack_first(self, m: int, n: int) -> bool:
        """Whether LAPACK's reflections come first for one matrix."""
        long, short = max(m, n), min(m, n)
        return self.lapack and (long < 2 * short or long * short**2 <= self.lapack_alone)

    def recursion(self, storage: torch.dtype) -> Recursion:
        """How the recursion of a QR with working matrices of this dtype ends."""
        if storage == torch.float16 and self.half is not None:
            return self.half
        # Panels of complex numbers are calls of the library, of which wide ones take half.
        return self.double if storage == torch.float64 or storage.is_complex else self.single


@lru_cache(maxsize=64)
def _cheapest(arithmetics: tuple[str, ...], target: Format) -> str:
    """Asked for in every call, so it must not take what the names do."""
    return next(name for name in arithmetics if Arithmetic.named(name).u <= target.u)
