"""A figure of a paper: what to measure, how to draw it, what the paper claims about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from neula.engines import FP32, CudaEngine, EmulatedEngine, Engine, select_engine
from neula.io.matrices import random_matrix
from neula.papers.data import ExperimentScale, Measurements, Row
from neula.papers.drawing import Canvas
from neula.papers.measuring import median_seconds
from neula.papers.verdicts import Claim

__all__ = ["ExperimentScale", "Figure", "Setting"]

T = TypeVar("T")

PROBE = 512
"""Order of the product whose times show how noisy a machine is: milliseconds on one core."""


@dataclass(frozen=True)
class Figure:
    """One figure or table: what yields its rows of data, what draws them, and what they are held against."""

    name: str  # on the command line
    title: str
    shows: str  # what is measured and how, in a sentence or two
    scaled_down: str  # what ``--scale small`` changes
    measure: Callable[[Setting], Iterator[Row]]
    draw: Callable[[Measurements, Canvas], None] | None  # None for a table
    claims: tuple[Claim, ...]
    size: tuple[float, float] = (8.0, 5.0)  # width and height of the canvas, in inches
    takes_matrix: bool = True  # whether it can be measured on a matrix of the user's
    emulated_times: bool = False  # whether the engine of accuracy, emulated on a CPU, takes the times


@dataclass
class Setting:
    """Where and how large an experiment runs."""

    scale: ExperimentScale  # small for two cores of a CPU and a minute, paper for a GPU
    report: Callable[[str, float], None] = lambda step, fraction: None  # told the step and the part done
    notes: list[str] = field(default_factory=list)  # for the reader of the data: what was left out, and why
    unit: str = "a100"  # whose sums are emulated
    matrices: Path | None = None  # folder with matrices of the paper that the user has
    matrix: torch.Tensor | None = None  # of the user's, in place of random ones
    probes: list[float] = field(default_factory=list)  # seconds of one and the same product during the run

    def __post_init__(self) -> None:
        if self.scale is ExperimentScale.small and self.speed.format is FP32:
            self.notes.append("this CPU has no format that is faster than fp32: low is fp32")
        if self.scale is ExperimentScale.paper and not torch.cuda.is_available():
            raise ValueError("scale 'paper' needs an NVIDIA GPU that torch sees: take scale 'small' on a CPU")

    @property
    def device(self) -> torch.device:
        """Where the matrices live."""
        if self.scale is ExperimentScale.small:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    @property
    def numerics(self) -> Engine:
        """The engine of experiments about accuracy: tensor cores, or their emulation, in fp16."""
        small = self.scale is ExperimentScale.small
        return self.emulated if small else CudaEngine(self.device, "fp16")

    @property
    def emulated(self) -> EmulatedEngine:
        """The paper's matrix unit, emulated where the matrices live."""
        return EmulatedEngine(self.device, "fp16", self.unit)

    @property
    def speed(self) -> Engine:
        """The engine of experiments about time, in its cheapest format."""
        return select_engine("auto", self.device)

    def pick(self, *, small: T, paper: T) -> T:
        """The choice for this scale."""
        return small if self.scale is ExperimentScale.small else paper

    def shape(
        self, *, small: tuple[int, int], paper: tuple[int, int], bytes_an_entry: int
    ) -> tuple[int, int]:
        """The shape for this scale, halved until there is memory for it; that it was is noted."""
        if self.matrix is not None:
            return self.matrix.shape[0], self.matrix.shape[1]
        m, n = wanted = self.pick(small=small, paper=paper)
        while bytes_an_entry * m * n > self._free():
            m, n = m // 2, n // 2
        if (m, n) != wanted:
            self.notes.append(
                f"{m} x {n} instead of {wanted[0]} x {wanted[1]}, for which memory is too small"
            )
        return m, n

    def _free(self) -> float:
        """Bytes that are free on the GPU; no limit on a CPU, where matrices are small."""
        if self.device.type == "cpu":
            return math.inf
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)

    def random(self, kind: str, m: int, n: int, **options: Any) -> torch.Tensor:
        """:func:`neula.io.matrices.random_matrix` on the device, or the user's matrix in its place."""
        dtype = options.get("dtype", torch.float64)
        return self.given_or(lambda: random_matrix(kind, m, n, device=self.device, **options), dtype)

    def given_or(self, make: Callable[[], torch.Tensor], dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """The user's matrix on the device, or the one that the paper takes."""
        return make() if self.matrix is None else self.matrix.to(self.device, dtype)

    def kinds(self, cases: Sequence[T]) -> Sequence[T]:
        """Kinds of matrices; of the user's there is one."""
        return cases if self.matrix is None else cases[:1]

    def column_major_normal(self, m: int, n: int) -> torch.Tensor:
        """A random matrix stored as LAPACK and the recursion have it: no method has to transpose it."""
        a = self.random("normal", m, n, dtype=torch.float32, seed=m + n)
        return self.speed.empty(m, n).copy_(a)

    def fitting(self, shapes: Iterable[tuple[int, int]], bytes_an_entry: int) -> list[tuple[int, int]]:
        """Shapes for which there is memory; the others are noted."""
        if self.matrix is not None:
            return [(self.matrix.shape[0], self.matrix.shape[1])]
        shapes, free = list(shapes), self._free()
        fit = [(m, n) for m, n in shapes if bytes_an_entry * m * n <= free]
        for m, n in shapes:
            if (m, n) not in fit:
                self.notes.append(
                    f"{m} x {n} left out: {bytes_an_entry * m * n / 1e9:.0f} GB needed, {free / 1e9:.0f} free"
                )
        return fit

    def track(self, cases: Sequence[T], describe: Callable[[T], str] = str) -> Iterator[T]:
        """Go through the cases and report how far it is."""
        for done, case in enumerate(cases):
            self.report(describe(case), done / len(cases))
            self._probe()
            yield case

    def _probe(self) -> None:
        """Time a product that is the same throughout the run, as the experiments take their times."""
        n = self.pick(small=PROBE, paper=8 * PROBE)
        a = self.speed.empty(n, n).fill_(1.0)
        self.probes.append(median_seconds(lambda: a @ a, repeats=3))

    @property
    def noise(self) -> float:
        """Factor between the slow and the fast probes of the run, without a tenth of them at either end."""
        probes = sorted(self.probes)
        left_out = len(probes) // 10
        return probes[-1 - left_out] / probes[left_out] if probes else 1.0
