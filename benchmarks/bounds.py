"""Floors that operations and bytes set on an H200, the measured times, and the ratio of the two."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.compared import FOLDER, MACHINES, Source, comparisons, milliseconds, shown
from neula.papers.data import ExperimentData


@dataclass(frozen=True)
class Bound:
    """Measurements that are held against the machine.

    Attributes
    ----------
    what : str
    source : Source
    sizes : sequence of tuple of int
    entry : int
        Bytes that must be read and written for each entry of the matrix.
    products : int
        How many the unit multiplies for each product.
    unit : str
    """

    what: str
    source: Source
    sizes: Sequence[tuple[int, ...]]
    entry: int
    products: int = 1
    unit: str = "fp16"


_SQUARE = [(8192, 8192), (4096, 4096)]

BOUNDS = (
    Bound(
        '`qr`, `accuracy="fp16"`',
        Source("qr", {"accuracy": "fp16"}),
        [(32768, 32768), (32768, 16384), (131072, 4096), (524288, 1024), (4194304, 128), (1024, 1024)],
        entry=8,
    ),
    Bound(
        "`qr`, float32",
        Source("qr", {"accuracy": "fp32"}),
        [(32768, 16384), *_SQUARE, (524288, 1024)],
        entry=8,
        products=3,
    ),
    Bound("`qr`, float64", Source("qr", {"accuracy": "fp64"}), [(32768, 16384)], entry=16, unit="fp64"),
    Bound("`lstsq`", Source("lstsq", {"matrix": "normal"}), [(32768, 16384)], entry=8),
    Bound(
        "`lstsq`, condition 1e4",
        Source("lstsq", {"matrix": "geometric", "cond": 1e4}),
        [(32768, 16384)],
        entry=8,
    ),
    Bound("`lu_factor`, no pivoting", Source("lu"), [(32768,), (65536,)], entry=2),
    Bound("`solve`, HPL-AI", Source("solve", {"matrix": "hpl-ai"}), [(32768,)], entry=8),
    Bound("`solve`, Fasi and Higham", Source("solve", {"matrix": "fasi-higham"}), [(32768,)], entry=8),
    Bound("`solve`, normal", Source("solve", {"matrix": "normal"}), [(32768,)], entry=8),
)


def bounds(folder: Path = FOLDER) -> Iterator[Sequence[str]]:
    """Each bound with its measurement."""
    yield "what", "size", "GFLOP", "GB", "floor, ms", "measured, ms"
    tflops, gbytes_a_second = rates(folder)
    for bound in BOUNDS:
        found = {one.size: one for one in comparisons(bound.source, folder)}
        for size in bound.sizes:
            if size in found:
                gflop, gbytes = operations(size), 1e-9 * bound.entry * math.prod(_shape(size))
                floor = max(bound.products * gflop / tflops[bound.unit], 1e3 * gbytes / gbytes_a_second)
                work = f"{bound.products} x " * (bound.products > 1) + milliseconds(gflop), f"{gbytes:.2g}"
                times = milliseconds(floor), milliseconds(found[size].ms)
                yield bound.what, shown(size[:2]), *work, *times


def of_sizes(folder: Path = FOLDER) -> Iterator[Sequence[str]]:
    """The benchmark of sizes beside its floors, and beside torch."""
    yield "what", "size", "GFLOP", "GB", "floor, ms", "measured, ms", "times the floor", "torch, ms"
    for row in ExperimentData.read(folder / f"sizes-{MACHINES['H200']}.json").rows:
        if row.get("floor_ms"):
            work = milliseconds(row["gflop"]), f"{row['gb']:.2g}"
            times = milliseconds(row["floor_ms"]), milliseconds(row["ms"])
            ratio = milliseconds(row["ms"] / row["floor_ms"])
            what = f"`{row['problem'].partition(',')[0]}`, {row['matrix']}"
            yield what, row["shape"], *work, *times, ratio, milliseconds(row["torch_ms"])


def operations(size: tuple[int, ...]) -> float:
    """GFLOP of the classical algorithm: of elimination where a matrix is square by its name."""
    m, n = _shape(size)
    return 1e-9 * (2 * n**3 / 3 if len(size) == 1 else 2 * m * n**2)


def _shape(size: tuple[int, ...]) -> tuple[int, int]:
    return size[0], size[min(1, len(size) - 1)]


def rates(folder: Path = FOLDER) -> tuple[dict[str, float], float]:
    """TFLOP/s of large products in each format, and gigabytes a second of a copy, as measured."""
    files = {name: folder / f"{name}-{MACHINES['H200']}.json" for name in ("kernels", "qr")}
    unit = ExperimentData.read(files["kernels"]).rows.where(unit="fp16")[0]
    double = ExperimentData.read(files["qr"]).rows.where(accuracy="fp64", bound_by="operations")[0]
    fp64 = 2e-9 * double["m"] * double["n"] ** 2 / double["floor_ms"]
    return {"fp16": unit["unit_tflops"], "fp64": fp64}, unit["copy_gbytes"]
