"""Measurements beside a peer, of any benchmark, in one form: for the README's tables and pictures."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neula.papers.data import ExperimentData, Measurements, Row

FOLDER = Path(__file__).parent / "data"

MACHINES = {"H200": "nvidia-h200", "CPU": "amd-epyc"}
"""Names of machines, and the ends of the names of their files."""


@dataclass(frozen=True)
class Source:
    """Rows of one benchmark that have these values, and the names of their errors.

    Attributes
    ----------
    benchmark, machine : str
        A key of :data:`MACHINES`.
    where : mapping
    errors : tuple of str
        Fields with the errors of neula and of its peer; with one name, the difference of their solutions.
    """

    benchmark: str
    where: Mapping[str, Any] = field(default_factory=dict)
    errors: tuple[str, ...] = ()
    machine: str = "H200"


@dataclass(frozen=True)
class Comparison:
    """Times of neula and of its peer for one problem.

    Attributes
    ----------
    size : tuple of int
        Of a batch with the number of matrices first.
    ms, peer_ms : float
        That of the peer is NaN where it could not solve the problem.
    errors : tuple of float
        As in :class:`Source`.
    """

    size: tuple[int, ...]
    ms: float
    peer_ms: float
    errors: tuple[float, ...] = ()

    @property
    def ratio(self) -> float:
        """Above 1, neula is the faster one."""
        return self.peer_ms / self.ms


def comparisons(source: Source, folder: Path = FOLDER) -> list[Comparison]:
    """Comparisons of a source; none where it has not been measured."""
    path = folder / f"{source.benchmark}-{MACHINES[source.machine]}.json"
    rows = ExperimentData.read(path).rows if path.exists() else Measurements()
    return [
        Comparison(
            size_of(row),
            row["ms"],
            row.get("torch_ms", math.nan),
            tuple(row[name] for name in source.errors),
        )
        for row in rows.where(**source.where)
    ]


def by_size(found: Iterable[Comparison]) -> list[Comparison]:
    """From small to large."""
    return sorted(found, key=lambda one: (math.prod(one.size) * one.size[-1], one.size))


def size_of(row: Row) -> tuple[int, ...]:
    """The numbers in a row's shape, however its benchmark writes it."""
    if "shape" in row:
        return tuple(int(number) for number in re.findall(r"\d+", row["shape"]))
    return tuple(_sizes(row))


def _sizes(row: Row) -> Iterator[int]:
    return (row[name] for name in ("batch", "m", "n", "k") if name in row)


def milliseconds(time: float) -> str:
    """Two digits, and all before the point."""
    return f"{time:.0f}" if time >= 100 else f"{time:.2g}"


def shown(size: tuple[int, ...]) -> str:
    """``(16384, 2048)`` as ``16384 x 2048``."""
    return " x ".join(map(str, size))
