"""The time of ``lstsq`` and ``qr`` of rows over many GPUs, in operations, bytes, latency and bandwidth.

``python -m benchmarks model`` compares what the model says of one, two and four GPUs with what was measured
(``benchmarks/data/distributed-*.json``), says what it expects of more, and draws
``docs/images/scaling.png``.
The constants of a machine and of the network inside a host come from the same data; before there are any,
from an H100 host whose all-reduces were measured alone. The network between hosts was not measured: what is
said of it is what InfiniBand NDR promises, one adapter of 50 GB/s a GPU.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from neula.papers.data import ExperimentData, Measurements, show
from neula.papers.drawing import Axes, new_canvas

DATA = Path(__file__).parent / "data"
FIGURE = Path(__file__).parent.parent / "docs" / "images" / "scaling.png"

GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
COLUMNS = (1024, 4096, 16384)
HOST = 8
"""GPUs of a host."""

DRAWN = (
    ("lstsq float64", 524288, 4096),
    ("lstsq float64", 524288, 2048),
    ("qr float32", 1048576, 1024),
    ("qr float32", 32768, 16384),
)
"""Measured problems that are drawn next to the model."""

PANEL = 1024
"""Columns of a panel of QR over processes."""


@dataclass(frozen=True)
class Machine:
    """Rates per second, and delays, of a GPU and the network.

    Attributes
    ----------
    memory : float
        Bytes of A that all but the factorization goes through: less than kernels read that do nothing else.
    gram, gram_low, qr : float
        Operations: of Gram matrices in fp16 with error correction and without, of a QR in fp16.
    corrected, low : float
        Operations of the products of a QR in fp16 with error correction, and without.
    panel : float
        Seconds that the factor of a Gram matrix of :data:`PANEL` columns takes with its inverse (of an H200).
    serial : float
        Operations of Cholesky factors and inverses, which every GPU computes for itself.
    inside : dict of float to float
        Seconds of an all-reduce of some bytes over two GPUs of a host.
    adapter : float
        Bytes that a GPU sends to another host, at 80% of what is promised.
    hop : float
        Seconds that a small message takes from host to host.
    capacity : float
        Bytes that a GPU holds.
    host, over : float
        Seconds of a call for what does not depend on the size, launches and looks; and of one over processes,
        where messages wait for the process that launches last.
    """

    memory: float = 3.0e12
    gram: float = 190e12
    gram_low: float = 600e12
    qr: float = 270e12
    corrected: float = 170e12
    low: float = 700e12
    panel: float = 0.44e-3
    serial: float = 15e12
    inside: Mapping[float, float] = field(
        default_factory=lambda: {512: 23e-6, 64e6: 64e6 / 239e9, 1e9: 1e9 / 327e9}
    )
    adapter: float = 40e9
    hop: float = 5e-6
    capacity: float = 80e9
    host: float = 1.5e-3
    over: float = 3e-3

    def all_reduce(self, size: float, gpus: int) -> float:
        """Seconds of an all-reduce of some bytes: inside hosts a ring, between them a tree of rings.

        Of g GPUs each sends ``2 (g - 1) / g`` times its bytes. Between hosts every GPU reduces its eighth
        with those of the same place in other hosts.
        """
        if gpus == 1:
            return 0.0
        here = min(gpus, HOST)
        inside = _interpolated(self.inside, size)
        latency = min(self.inside.values())
        seconds = latency + (inside - latency) * 2 * (here - 1) / here
        hosts = -(-gpus // HOST)
        if hosts > 1:
            share = size / here
            seconds += 2 * math.log2(hosts) * self.hop + 2 * (hosts - 1) / hosts * share / self.adapter
        return seconds


H100 = Machine()


def _interpolated(known: Mapping[float, float], size: float) -> float:
    """Seconds for a size between those that were measured, on a line; beyond the last by its rate."""
    sizes = sorted(known)
    place = min(max(1, bisect_left(sizes, size)), len(sizes) - 1)
    a, b = sizes[place - 1], sizes[place]
    if size <= sizes[0]:
        return known[sizes[0]]
    return known[a] + (known[b] - known[a]) * (size - a) / (b - a)


@dataclass(frozen=True)
class Time:
    """Seconds of one solution, by what they are spent on.

    Attributes
    ----------
    factorization, passes, replicated, network, host : float
    """

    factorization: float
    passes: float
    replicated: float
    network: float
    host: float

    @property
    def total(self) -> float:
        """All of them: nothing overlaps yet."""
        return sum(vars(self).values())


def lstsq(machine: Machine, m: float, n: int, gpus: int) -> Time:
    """The links of :func:`neula.lstsq` for well-conditioned float64 rows on GPUs.

    - Up to 4096 columns R comes from a Gram matrix: ``1.25 m n^2`` operations, as its rate is measured, one
      all-reduce of ``n^2`` float32 numbers, a Cholesky factor and its inverse on each GPU.
    - Beyond, recursive Gram-Schmidt: ``2 m n^2 - 2/3 n^3`` operations, all-reduces of ``n^2`` numbers in two
      for each panel of 1024 columns, whose Gram matrix each GPU factorizes.
    - A is read ten times: the copy in fp16, products with random vectors, steps or iterations, residuals, the
      certificate; eight times where R is as accurate as float32. Each is followed by two triangular solves,
      an all-reduce of the gradient and a broadcast of the update, both small.
    """
    rows = m / gpus
    low = n > 2048
    passes = 10 if low else 8
    if n <= 4096:
        factorization = 1.25 * rows * n * n / (machine.gram_low if low else machine.gram)
        replicated = 2 / 3 * n**3 / machine.serial
        network = machine.all_reduce(4 * n * n, gpus)
    else:
        factorization = max(0.0, 2 * rows * n * n - 2 / 3 * n**3 / gpus) / machine.qr
        panels = n / PANEL if gpus > 1 else 0
        replicated = panels * machine.panel
        network = 2 * panels * machine.all_reduce(4 * n * n / max(1, 2 * panels), gpus)
    # Triangles are half of what is read for a solve with R.
    replicated += passes * 2 * 8 * n * n / 2 / machine.memory
    network += (2 * passes + 4) * machine.all_reduce(8 * (n + 1), gpus)
    host = machine.host if gpus == 1 else machine.over
    return Time(factorization, passes * 8 * rows * n / machine.memory, replicated, network, host)


def qr(machine: Machine, m: float, n: int, gpus: int, *, low: bool) -> Time:
    """The first link of :func:`neula.qr` for float32 rows over GPUs, in fp16, with error correction or not.

    - Recursive Gram-Schmidt: ``2 m n^2`` operations, of which the Gram matrices of panels (1.25) and the
      products with the inverses of their factors (2) are always corrected ones.
    - Each GPU factorizes the Gram matrix of each panel.
    - All-reduces of these, and of ``n^2 / 2`` products in a message for each panel but the first. The
      triangle of R is broadcast.
    - A is gone through ten times in float32: column maxima, the scaled copy, the parts of panels, what graphs
      copy, the certificate.
    """
    rows, width = m / gpus, min(n, PANEL)
    panels = n / width
    rate = machine.low if low else machine.corrected
    factorization = 2 * rows * n * (n - width) / rate + 3.25 * rows * n * width / machine.corrected
    triangle = 4 * n * (n - width) / 2
    network = panels * machine.all_reduce(4 * width**2, gpus) + machine.all_reduce(4 * n * n / 2, gpus)
    network += (panels - 1) * machine.all_reduce(triangle / max(1, panels - 1), gpus)
    return Time(
        factorization,
        10 * 4 * rows * n / machine.memory,
        panels * machine.panel * width / PANEL,
        network,
        machine.over,
    )


def fits(machine: Machine, m: float, n: int, gpus: int) -> bool:
    """Whether rows in float64, and what is made of them in low precision, fit the memory of the GPUs."""
    return 1.5 * 8 * m * n / gpus + 3 * 8 * n * n <= machine.capacity


def machine_of(rows: Measurements, start: Machine = H100) -> Machine:
    """A machine by the constants that were measured on it.

    The rate at which A is gone through is what one GPU has left for it of its time: kernels that only read
    are faster. What calls over processes take beside all that is the median of what they took.
    """
    known = {row["what"]: row["value"] for row in rows.where(problem="constant") if row.get("value")}
    reduces = rows.where(problem="constant", what="all-reduce", processes=2)
    names = {"gram": "gram corrected", "gram_low": "gram low", "qr": "qr low"}
    found: dict[str, Any] = {name: known[what] for name, what in names.items() if what in known}
    inside = {row["bytes"]: row["ms"] / 1e3 for row in reduces}
    machine = replace(start, inside=inside or start.inside, **found)
    without = replace(machine, memory=math.inf)
    rates = []
    for m, n, gpus, seconds in _solved(rows):
        if gpus == 1:
            rest = lstsq(without, m, n, 1).total
            moved = lstsq(replace(machine, memory=1.0), m, n, 1).total - rest
            rates.append(moved / max(1e-9, seconds - rest))
    machine = replace(machine, memory=statistics.geometric_mean(rates)) if rates else machine
    at_once = replace(machine, over=0.0)
    left = [seconds - lstsq(at_once, m, n, p).total for m, n, p, seconds in _solved(rows) if p > 1]
    return replace(machine, over=max(machine.host, statistics.median(left))) if left else machine


def _solved(rows: Measurements) -> Iterator[tuple[float, int, int, float]]:
    """Rows, columns, GPUs and seconds of least squares; of weak scaling the share of one, in its time."""
    for row in rows.where(problem="lstsq float64"):
        yield row["m"], row["n"], 1, row["one_ms"] / 1e3
    for row in rows.where(problem="lstsq float64 weak"):
        yield row["m"] / row["processes"], row["n"], 1, row["one_ms"] / 1e3 / row["processes"]
    for row in rows:
        if str(row["problem"]).startswith("lstsq float64") and row["processes"] > 1:
            yield row["m"], row["n"], row["processes"], row["ms"] / 1e3


MEASURED = (
    {"problem": "lstsq float64", "m": 262144, "n": 4096, "processes": 1, "ms": 42.7},
    {"problem": "lstsq float64", "m": 524288, "n": 2048, "processes": 1, "ms": 40.6},
)
"""On one H100, where there are no other data."""


def compared(rows: Measurements, machine: Machine) -> Iterator[dict[str, Any]]:
    """Measured times and those of the model, one row for each number of GPUs."""
    alone = set()
    for row in rows:
        problem = row["problem"]
        if not str(problem).startswith("lstsq float64"):
            continue
        m, n = row["m"], row["n"]
        pieces = row["processes"] if str(problem).endswith("weak") else 1
        if row.get("one_ms") and (problem, m // pieces, n) not in alone:
            alone.add((problem, m // pieces, n))
            yield _compared(row, 1, row["one_ms"] / pieces, lstsq(machine, m / pieces, n, 1), m // pieces)
        yield _compared(row, row["processes"], row["ms"], lstsq(machine, m, n, row["processes"]), m)


def compared_qr(rows: Measurements, machine: Machine) -> Iterator[dict[str, Any]]:
    """The same of QR over processes."""
    for row in rows:
        problem, gpus = str(row["problem"]), row["processes"]
        if problem.startswith("qr ") and gpus > 1:
            said = qr(machine, row["m"], row["n"], gpus, low="fp16" in problem)
            yield _compared(row, gpus, row["ms"], said, row["m"])


def _compared(row: Mapping[str, Any], gpus: int, ms: float, time: Time, m: int) -> dict[str, Any]:
    said = 1e3 * time.total
    shape = {"problem": row["problem"], "m": m, "n": row["n"], "gpus": gpus}
    return {**shape, "ms": ms, "model_ms": said, "ratio": said / ms, "replicated_ms": 1e3 * time.replicated}


def expected(machine: Machine) -> Iterator[dict[str, Any]]:
    """Predictions for 8, 64 and 1,024 GPUs: strong scaling of 10^6 to 10^9 rows, and weak scaling."""
    for n in COLUMNS:
        for m in (1e6, 1e7, 1e8, 1e9):
            row: dict[str, Any] = {"rows": f"{m:.0e}", "n": n}
            for gpus in (8, 64, 1024):
                time = lstsq(machine, m, n, gpus)
                said = f"{1e3 * time.total:.1f} ms, {_busy(time):.0%} useful"
                row[f"{gpus} GPUs"] = said if fits(machine, m, n, gpus) else "does not fit"
            yield row
        weak: dict[str, Any] = {"rows": "2.5e5 a GPU", "n": n}
        for gpus in (8, 64, 1024):
            time = lstsq(machine, 250e3 * gpus, n, gpus)
            one = lstsq(machine, 250e3, n, 1)
            weak[f"{gpus} GPUs"] = f"{1e3 * time.total:.1f} ms, {one.total / time.total:.0%} of one"
        yield weak


def _busy(time: Time) -> float:
    """Part of the time in which GPUs do what more of them would do faster."""
    return (time.factorization + time.passes) / time.total


def draw(machine: Machine, rows: Measurements, path: Path) -> None:
    """Speed with more GPUs: as it was measured, of a matrix of one size, and with as many rows on each."""
    canvas = new_canvas(15, 4.4)
    seen, strong, weak = canvas.subplots(1, 3)
    _draw_measured(seen, machine, rows)
    for place, n in enumerate(COLUMNS):
        for m, style in ((1e6, ":"), (1e7, "--"), (1e8, "-")):
            points = [(g, lstsq(machine, m, n, g).total) for g in GPUS if fits(machine, m, n, g)]
            if len(points) > 1:
                first, seconds = points[0]
                speed = [(g, first * seconds / time) for g, time in points]
                label = f"{m:.0e} x {n}".replace("e+0", "e")
                strong.plot(*zip(*speed, strict=True), style, color=f"C{place}", marker=".", label=label)
        one = lstsq(machine, 250e3, n, 1).total
        share = [one / lstsq(machine, 250e3 * g, n, g).total for g in GPUS]
        weak.plot(GPUS, share, color=f"C{place}", marker=".", label=f"{n} columns")
    strong.plot(GPUS, GPUS, color="0.7", linewidth=1, zorder=0)
    strong.set(yscale="log", xlabel="GPUs", ylabel="speed, one GPU = 1", ylim=(0.8, 1500))
    strong.set_title("lstsq, a matrix of one size (those that fit)")
    weak.set(xlabel="GPUs", ylabel="part of the speed of one", ylim=(0, 1.05))
    weak.set_title("lstsq, 250,000 rows on each GPU")
    for axes, ticks in ((seen, (1, 2, 4)), (strong, GPUS[::2]), (weak, GPUS[::2])):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(g) for g in ticks])
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path, dpi=130)


def _draw_measured(axes: Axes, machine: Machine, rows: Measurements) -> None:
    """Points for what was measured, and broken lines for what the model says."""
    for place, (problem, m, n) in enumerate(DRAWN):
        some = rows.where(problem=problem, m=m, n=n)
        gpus = [1, *(row["processes"] for row in some)]
        speed = [1.0, *(row["ratio"] for row in some)]
        shape = f"{problem.partition(' ')[0]} {m} x {n}"
        axes.plot(gpus, speed, color=f"C{place}", marker="o", linestyle="", label=shape)
        least_squares = problem.startswith("lstsq")
        times = [
            lstsq(machine, m, n, g) if least_squares else qr(machine, m, n, g, low=False) for g in gpus[1:]
        ]
        said = [1e-3 * row["one_ms"] / time.total for row, time in zip(some, times, strict=True)]
        axes.plot(gpus, [1.0, *said], color=f"C{place}", linestyle="--", linewidth=1)
    axes.plot((1, 2, 4), (1, 2, 4), color="0.7", linewidth=1, zorder=0)
    axes.set(xlabel="GPUs", ylabel="speed, one GPU = 1", ylim=(0.8, 4.2))
    axes.set_title("Measured (points), and the model (lines)")


def measured_rows() -> Measurements:
    """Data of all GPUs on which ``distributed`` was run."""
    files = sorted(DATA.glob("distributed-nvidia-*.json"))
    return Measurements(row for file in files for row in ExperimentData.read(file).rows)


def main(
    figure: Annotated[Path, typer.Option(help="picture to draw")] = FIGURE,
) -> None:
    """Compare the model with the data, say what it expects, and draw it; nothing is measured."""
    rows = measured_rows()
    machine = machine_of(rows)
    for title, found in (
        ("lstsq float64, measured and as the model says", compared(rows or Measurements(MEASURED), machine)),
        ("qr, measured and as the model says", compared_qr(rows, machine)),
        ("lstsq float64, as the model expects", expected(machine)),
    ):
        shown = Measurements(found)
        table = Table(*shown.fields, title=title)
        for row in shown:
            table.add_row(*(show(row.get(name)) for name in shown.fields))
        Console(width=110).print(table)
    draw(machine, rows, figure)
    Console().print(f"picture: {figure}")
