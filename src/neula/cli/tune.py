"""``neula tune``: where one way becomes faster than another on this machine, measured and kept.

Each threshold is a size from which on, or up to which, another link of a chain comes first. Both ways solve
the same problems of several sizes in turns; the threshold is where changing from one to the other takes the
least time in sum, each size counting equally. Where that gains next to nothing, the threshold in force stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from rich.table import Table

import neula
from neula.cli.bench import definite, normal
from neula.engines import Engine, select_engine, tuned
from neula.papers.measuring import interleaved_seconds
from neula.pipeline.progress import Progress

NEVER = 1 << 62  # a threshold that no size reaches
SECONDS = 0.3  # least total time of both ways at one size

PAYS = 0.1
"""Saving required to replace the current threshold, in units of the faster time at one size: less is noise.
"""

Problem = Callable[[int, torch.device], Callable[[Engine], Any]]
"""From a size and a device to a call that solves a problem of that size with an engine."""


@dataclass(frozen=True)
class Crossover:
    """A threshold between two ways."""

    name: str  # a number of neula.engines.tuning.Tuning
    sizes: tuple[int, ...]  # ascending
    problem: Problem
    # Whether the threshold is the last size of the first way, and not the first of the second.
    up_to: bool = False
    meaning: str = ""  # for a person


def _system(dtype: torch.dtype, assume_a: Literal["gen", "pos"] = "gen") -> Problem:
    def problem(n: int, device: torch.device) -> Callable[[Engine], Any]:
        a = definite(n, dtype, device) if assume_a == "pos" else normal((n, n), dtype, device)
        b = normal((n, 1), dtype, device, seed=2)
        return lambda engine: neula.solve(a, b, assume_a=assume_a, engine=engine)

    return problem


def _least_squares(rows: int) -> Problem:
    def problem(n: int, device: torch.device) -> Callable[[Engine], Any]:
        a, b = (normal((rows * n, k), torch.float64, device, seed=k) for k in (n, 1))
        return lambda engine: neula.lstsq(a, b, engine=engine)

    return problem


def _factors(n: int, device: torch.device) -> Callable[[Engine], Any]:
    a = definite(n, torch.float32, device)
    return lambda engine: neula.cholesky(a, engine=engine)


ORDERS = (350, 500, 700, 1000, 1400, 2000, 2800)
CPU = (
    Crossover("direct", ORDERS, _system(torch.float64), meaning="solve: LU in float64 below this order"),
    Crossover(
        "direct_definite",
        ORDERS,
        _system(torch.float64, "pos"),
        meaning="solve, definite: Cholesky in float64 below this order",
    ),
    Crossover(
        "direct_single",
        (32, 64, 128, 256, 512),
        _system(torch.float32),
        meaning="solve, float32: LU in float32 from this order on",
    ),
)

CUDA = (
    Crossover(
        "queued",
        (1024, 2048, 4096, 8192, 12288, 16384),
        _system(torch.float64),
        up_to=True,
        meaning="solve: LU of the mixed matrix in float64 up to this order",
    ),
    Crossover(
        "queued_definite",
        (1024, 4096, 8192, 12288, 16384, 24576),
        _system(torch.float64, "pos"),
        up_to=True,
        meaning="solve, definite: Cholesky in float64 up to this order",
    ),
    Crossover(
        "gram_columns",
        (1024, 2048, 4096, 6144, 8192),
        _least_squares(4),
        up_to=True,
        meaning="lstsq: R from a Gram matrix up to this number of columns",
    ),
    Crossover(
        "cholesky",
        (2048, 4096, 8192, 16384, 24576),
        _factors,
        meaning="cholesky, float32: recursion by blocks from this order on",
    ),
)


def measure(
    device: torch.device, progress: Progress, crossovers: Sequence[Crossover] | None = None
) -> dict[str, int]:
    """Thresholds of a device, by name."""
    engine = select_engine("auto", device)
    found = {}
    for crossover in _crossovers(device) if crossovers is None else crossovers:
        progress(f"measuring {crossover.name}", 0.0)
        found[crossover.name] = _threshold(crossover, engine, progress)
    return found


def _crossovers(device: torch.device) -> Sequence[Crossover]:
    return CUDA if device.type == "cuda" else CPU


def _threshold(crossover: Crossover, engine: Engine, progress: Progress) -> int:
    count, times = len(crossover.sizes), []
    for done, size in enumerate(crossover.sizes):
        call = crossover.problem(size, engine.device)
        ways = [partial(call, other) for other in _both(engine, crossover)]
        for way in ways:  # once to warm up
            way()
        times.append(interleaved_seconds(ways, SECONDS))
        progress(f"measuring {crossover.name}", (done + 1) / count)
    in_force = getattr(engine.tuning, crossover.name)
    return threshold_of(times, crossover.sizes, in_force, up_to=crossover.up_to)


def _both(engine: Engine, crossover: Crossover) -> Iterator[Engine]:
    """The engine that goes the first way at any size, and the one that goes the second."""
    for threshold in (NEVER, 0):
        tuning = engine.tuning.having(**{crossover.name: threshold})
        yield type("Trial", (type(engine),), {"tuning": tuning})(engine.device)


def threshold_of(
    times: Sequence[Sequence[float]], sizes: Sequence[int], in_force: int, *, up_to: bool
) -> int:
    """Size from which the second way is faster, given the times of both at each size.

    The threshold in force stays unless another saves more than :data:`PAYS`.

    >>> threshold_of([(1.0, 2.0), (1.0, 1.5), (3.0, 2.0)], (10, 20, 40), 15, up_to=False)
    40
    >>> threshold_of([(1.0, 2.0), (1.0, 1.5), (3.0, 2.0)], (10, 20, 40), 15, up_to=True)
    20
    >>> threshold_of([(1.0, 2.0), (1.02, 1.0), (3.0, 2.0)], (10, 20, 40), 33, up_to=False)
    33
    """
    # Relative to the faster one: otherwise the largest size would decide alone.
    first, second = ([t[i] / min(t) for t in times] for i in (0, 1))
    totals = [sum(first[:change]) + sum(second[change:]) for change in range(len(sizes) + 1)]
    change = totals.index(min(totals))
    before = sum(size <= in_force if up_to else size < in_force for size in sizes)
    if totals[before] - totals[change] <= PAYS:
        return in_force
    if up_to:
        return sizes[change - 1] if change else 0
    return sizes[change] if change < len(sizes) else 2 * sizes[-1]


def table(device: torch.device) -> Table:
    """The thresholds in force that are measured on such a device, and where they come from."""
    machine, engine = tuned.machine_of(device), select_engine("auto", device)
    measured = tuned.read(machine)
    shown = Table("threshold", "value", "from", "meaning", title=f"{machine['device']}, {engine.name} engine")
    tuning = engine.tuning.having(**measured)
    for crossover in _crossovers(device):
        name = crossover.name
        source = "neula tune" if name in measured else "shipped"
        shown.add_row(name, str(getattr(tuning, name)), source, crossover.meaning)
    return shown
