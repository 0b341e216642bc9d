"""``neula bench``: this machine's speed and accuracy, compared with torch's direct solvers.

Each problem yields cases, a case is measured in one place, and a measurement is a row: what was solved, the
times of both, how near to the rate of plain products it comes, and the errors of both by one measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table

import neula
from neula.certificates.low_rank import low_rank_error
from neula.cli import sweep
from neula.cli.sweep import normal
from neula.engines import CudaEngine
from neula.engines.cpu import measured_rates
from neula.engines.cuda import measured_rate
from neula.engines.formats import FormatName
from neula.kernels.precision import exact_matmul
from neula.papers.data import ExperimentData, Measurements, Row, show
from neula.papers.drawing import Canvas, new_canvas, speedup_bars
from neula.papers.errors import optimality
from neula.papers.measuring import circumstances, data_file, householder_flops, median_seconds
from neula.pipeline.result import LstsqResult

if TYPE_CHECKING:
    from neula.cli.run import CommandRun

PICTURES = (".svg", ".png", ".pdf")

BYTES_AN_ENTRY = 40
"""Bytes an entry of a matrix in double precision takes, with the copies of neula and of the peer."""

PART = 1e-2  # relative error allowed for singular values and vectors if singular values decay
GEMM_ROWS = 512  # rows of a product that are compared with the product in double precision


@dataclass(frozen=True)
class BenchmarkCase:
    shape: tuple[int, ...]
    accuracy: str  # requested of neula
    run: Callable[[], Any]
    peer: Callable[[], Any]
    flops: float  # of the classical algorithm, whatever is done instead
    error: Callable[[Any], float]  # of a result of either


@dataclass(frozen=True)
class BenchmarkProblem:
    """A benchmark: cases for a device and a shape, its peer in torch, and the error of both."""

    cases: Callable[[torch.device, int, int], Iterator[BenchmarkCase]]
    gpu: list[tuple[int, int]]
    cpu: list[tuple[int, int]]
    peer: str
    error: str


def run(name: str, device: torch.device, on_row: Callable[[Row], None] | None = None) -> ExperimentData:
    """Measure one of :data:`PROBLEMS`, on a CPU with small shapes; ``on_row`` gets each row as it comes.

    Times are in milliseconds; ``ratio`` is torch's time over neula's, ``of_rate`` the part of the rate of
    products in the fastest format, which is in ``about`` with the rest of the circumstances.
    """
    problem = PROBLEMS[name]
    format, rate = product_rate(device)
    rows = Measurements()
    for case in chain.from_iterable(problem.cases(device, m, n) for m, n in _fitting(problem, device)):
        rows.append(_measure(case, rate, repeats=5 if device.type == "cuda" else 3))
        if on_row is not None:
            on_row(rows[-1])
    about = {"problem": name, "peer": problem.peer, "error": problem.error}
    return ExperimentData.from_rows(
        {**about, "format": format, "tflops": rate, **circumstances(device)}, rows
    )


def run_all(names: Iterable[str], report: CommandRun, *, cpu: bool, **of_sweep: Any) -> list[ExperimentData]:
    """Measure problems on the GPU, or on the CPU if there is none or by request, and report each row.

    Other arguments are those of :func:`neula.cli.sweep.run`.
    """
    device = torch.device("cuda" if torch.cuda.is_available() and not cpu else "cpu")

    def measured(name: str) -> ExperimentData:
        report.progress(f"measuring {name}", 0.0)
        if name == sweep.NAME:
            return sweep.run(device, lambda row: report.say(sweep.line(row)), **of_sweep)
        return run(name, device, lambda row: report.say(f"{name} {line(row)}"))

    return [measured(name) for name in names]


def check_picture(path: Path, suffixes: Sequence[str] = PICTURES) -> None:
    """Raise before the work if a picture, or a page with pictures, could not be made."""
    if path.suffix not in suffixes:
        raise ValueError(f"{path}: the name must end with {' or '.join(suffixes)}; choose another one")
    try:
        new_canvas(1.0, 1.0)
    except ImportError as error:
        raise ValueError(str(error)) from None


def product_rate(device: torch.device) -> tuple[str, float]:
    """The fastest format and the TFLOP/s of a large product in it, as measured now."""
    if device.type == "cuda":
        return "fp16", measured_rate(CudaEngine(device, "fp16"), 8192) / 1e3
    rates = measured_rates(1024, 4096)
    best = max(rates, key=rates.__getitem__)
    return best, rates[best] / 1e3


def _measure(case: BenchmarkCase, rate: float, repeats: int) -> Row:
    seconds = median_seconds(case.run, repeats, warmup=2)
    peer = median_seconds(case.peer, max(1, repeats // 2))
    result = case.run()
    tflops = 1e-12 * case.flops / seconds
    return {
        "shape": "x".join(map(str, case.shape)),
        "accuracy": case.accuracy,
        "ms": 1e3 * seconds,
        "torch_ms": 1e3 * peer,
        "ratio": peer / seconds,
        "tflops": tflops,
        "of_rate": tflops / rate,
        "error": case.error(result),
        "torch_error": case.error(case.peer()),
        "certified": getattr(result, "converged", None),
        "method": _method(result) or case.accuracy,
    }


def _method(result: Any) -> str | None:
    """Method of the accepted attempt of a result; None for a product."""
    attempts = getattr(getattr(result, "qr", result), "attempts", ())
    return str(attempts[-1].method) if attempts else None


def _fitting(problem: BenchmarkProblem, device: torch.device) -> list[tuple[int, int]]:
    if device.type != "cuda":
        return problem.cpu
    free = torch.cuda.mem_get_info(device)[0]
    return [(m, n) for m, n in problem.gpu if BYTES_AN_ENTRY * m * n <= free]


def _low_accuracies(device: torch.device) -> tuple[FormatName, ...]:
    return ("fp16", "fp32") if device.type == "cuda" else ("fp32",)


def _qr(device: torch.device, m: int, n: int) -> Iterator[BenchmarkCase]:
    a = normal((m, n), torch.float32, device)
    peer, flops, error = partial(torch.linalg.qr, a), householder_flops(m, n), partial(sweep.qr_error, a)
    for accuracy in _low_accuracies(device):
        yield BenchmarkCase((m, n), accuracy, partial(neula.qr, a, accuracy=accuracy), peer, flops, error)


def _lstsq(device: torch.device, m: int, n: int) -> Iterator[BenchmarkCase]:
    a, b = (normal((m, k), torch.float64, device, seed) for seed, k in ((1, n), (2, 1)))

    def error(found: Any) -> float:
        return optimality(a, b, found.x if isinstance(found, LstsqResult) else found.solution)

    peer = partial(torch.linalg.lstsq, a, b, driver="gels")
    yield BenchmarkCase((m, n), "fp64", partial(neula.lstsq, a, b), peer, householder_flops(m, n), error)


def _svd(device: torch.device, m: int, n: int) -> Iterator[BenchmarkCase]:
    a, rank = normal((m, n), torch.float32, device), n // 16
    size, flops, peer = (m, n, rank), 2 * m * n * n, partial(sweep.truncated_svd, a, rank)
    for accuracy in _low_accuracies(device):
        run = partial(neula.svd_lowrank, a, rank, accuracy=accuracy)
        yield BenchmarkCase(size, accuracy, run, peer, flops, partial(_svd_error, a))
    a = _decaying(m, n, rank, device)
    run = partial(neula.svd_lowrank, a, rank, accuracy=PART)
    yield BenchmarkCase(size, f"{PART:g}", run, _power_iterations(a, rank), flops, partial(_svd_error, a))


def _decaying(m: int, n: int, rank: int, device: torch.device) -> torch.Tensor:
    """Singular values from 1 to 0.01, and noise of 1e-4."""
    u, v = (normal((size, rank), torch.float32, device, seed) / size**0.5 for seed, size in ((1, m), (2, n)))
    noise = normal((m, n), torch.float32, device, seed=3).mul_(1e-4 / (m**0.5 + n**0.5))
    return noise.addmm_(u * torch.logspace(0, -2, rank, dtype=torch.float32, device=device), v.T)


def _power_iterations(a: torch.Tensor, rank: int) -> Callable[[], Any]:
    """``torch.svd_lowrank`` with the fewest iterations that are as accurate as neula is asked to be."""
    for iterations in (0, 1, 2, 4, 8, 16):
        peer = partial(torch.svd_lowrank, a, rank, niter=iterations)
        u, s, v = peer()
        gaps = (exact_matmul(a, v) - u * s, exact_matmul(a.T, u) - v * s)
        if max(float((torch.linalg.vector_norm(gap, dim=0) / s).norm()) for gap in gaps) <= PART:
            break
    return peer


def _svd_error(a: torch.Tensor, triplets: Any) -> float:
    u, s, v = triplets
    return low_rank_error(a, u, s, v if v.shape[1] == a.shape[1] else v.T)


def _gemm(device: torch.device, m: int, n: int) -> Iterator[BenchmarkCase]:
    a, b = (normal((rows, n), torch.float32, device, seed) for seed, rows in ((1, m), (2, n)))
    exact = a[:GEMM_ROWS].double() @ b.double()

    def error(c: torch.Tensor) -> float:
        return float((c[:GEMM_ROWS] - exact).norm() / exact.norm())

    for mode in ("fp16", "fp16_cor") if device.type == "cuda" else ("fp32",):
        run = partial(neula.matmul, a, b, compute=mode)
        yield BenchmarkCase((m, n, n), mode, run, partial(exact_matmul, a, b), 2 * m * n * n, error)


PROBLEMS = {
    "qr": BenchmarkProblem(
        _qr,
        [(32768, 16384), (16384, 16384), (131072, 4096), (524288, 1024), (8192, 8192), (16384, 1024)],
        [(8192, 512), (2048, 1024)],
        "torch.linalg.qr",
        "the larger of ||A - QR|| / ||A|| and ||I - Q^T Q|| / sqrt(n), estimated",
    ),
    "lstsq": BenchmarkProblem(
        _lstsq,
        [(32768, 16384), (131072, 4096), (524288, 1024), (16384, 2048)],
        [(8192, 512), (4096, 1024)],
        'torch.linalg.lstsq(driver="gels")',
        "||A^T r|| / (||A|| ||r||)",
    ),
    "svd": BenchmarkProblem(
        _svd,
        [(524288, 1024), (131072, 2048), (262144, 512)],
        [(8192, 256), (4096, 512)],
        "torch.linalg.svd, truncated; to 0.01 torch.svd_lowrank",
        "||A - U diag(s) Vh|| / ||A||, estimated",
    ),
    "gemm": BenchmarkProblem(
        _gemm,
        [(4096, 4096), (8192, 8192), (16384, 16384)],
        [(1024, 1024), (2048, 2048)],
        "torch.matmul in float32",
        "||C - AB|| / ||AB||",
    ),
}
"""By name, as in ``neula bench NAME``."""


def table(data: ExperimentData) -> Table:
    about = data.about
    if about["problem"] == sweep.NAME:
        return sweep.table(data)
    title = f"{about['problem']} and {about['peer']} on {about['device']}"
    rate = f"part: of {about['tflops']:.3g} TFLOP/s, products in {about['format']}"
    return sweep.table_of(_HEADINGS, data.rows, title, f"{rate}; error: {about['error']}")


_HEADINGS = {
    "shape": "shape",
    "accuracy": "to",
    "ms": "ms",
    "torch_ms": "torch ms",
    "ratio": "ratio",
    "tflops": "TFLOP/s",
    "of_rate": "part",
    "error": "error",
    "torch_error": "torch's",
}


def line(row: Row) -> str:
    ratio = f"{show(row['ratio'])} times as fast as torch's {show(row['torch_ms'])} ms"
    return f"{row['shape']} {row['accuracy']}: {show(row['ms'])} ms, {ratio}, error {row['error']:.1e}"


def write(data: ExperimentData, folder: Path) -> Path:
    """Write ``bench-PROBLEM-DEVICE.json`` and ``.csv``; what a sweep was asked for stands between."""
    kind = f"-{data.about['condition']:g}".replace("+", "") if "condition" in data.about else ""
    kind = "-special" if "special" in data.about else kind
    path = data_file(folder, f"bench-{data.about['problem']}{kind}", data.about)
    data.write(path)
    return path


def read(folder: Path) -> list[ExperimentData]:
    """Read the files that :func:`write` has written there, in the order of :data:`PROBLEMS`."""
    paths = sorted(folder.glob("bench-*.json"))
    if not paths:
        raise ValueError(f"{folder}: no bench-*.json; measure with: neula bench --out {folder}")
    found, names = {path: ExperimentData.read(path) for path in paths}, [*PROBLEMS, sweep.NAME]
    for path, data in found.items():
        if data.about.get("problem") not in names:
            raise ValueError(f"{path} does not hold what neula bench writes: take it out of the folder")
    return sorted(found.values(), key=lambda data: names.index(data.about["problem"]))


def draw(results: list[ExperimentData]) -> Canvas:
    """How many times as fast as torch, one picture for all problems."""
    canvas = new_canvas(5.5 * min(2, len(results)), 3.6 * -(-len(results) // 2))
    panels = canvas.subplots(-(-len(results) // 2), min(2, len(results)), squeeze=False).flatten()
    for axes, data in zip(panels, results, strict=False):
        if data.about["problem"] == sweep.NAME:
            sweep.draw(axes, data)
            continue
        labels = [f"{row['shape']} {row['accuracy']}" for row in data.rows]
        speedup_bars(axes, labels, data.rows.numbers("ratio"))
        axes.set_title(f"{data.about['problem']}, compared with {data.about['peer']}", fontsize=10)
        axes.set_ylabel("times as fast")
    for axes in panels[len(results) :]:
        axes.set_axis_off()
    canvas.suptitle(results[0].about["device"])
    return canvas
