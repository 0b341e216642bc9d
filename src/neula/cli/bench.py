"""``neula bench``: every size compared with the fastest call of torch and SciPy that is as accurate.

A peer counts if its error is at most :data:`AS_ACCURATE` times neula's, or ``sqrt(n) u``. All are timed in
one process and several rounds, so that other load on the machine affects all of them equally, but each by
itself: the threads of one library would hold up those of another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import scipy.linalg
import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

import neula
from neula.certificates.low_rank import low_rank_error
from neula.certificates.qr import qr_certificate
from neula.engines import FP64
from neula.io.matrices import random_matrix
from neula.papers.data import ExperimentData, Measurements, Row, show
from neula.papers.drawing import MARKERS, Axes, Canvas, log_log, new_canvas
from neula.papers.errors import optimality
from neula.papers.measuring import circumstances, data_file, householder_flops, rested_seconds

NAME = "sweep"

PROBLEMS = ("qr", "lstsq", "solve", "svd")
"""Names on the command line, with which those of tasks begin."""

PICTURES = (".svg", ".png", ".pdf")

BYTES_AN_ENTRY = 40
"""Bytes of a GPU's memory that an entry of a matrix takes, with the copies of neula and of the peers."""

PEER = "the fastest call of torch and SciPy that is as accurate"

AS_ACCURATE = 10.0  # backward-stable algorithms differ by such a factor
SLOWER, LATER = 1.1, 0.1  # largest accepted time: this multiple of the peer's time, plus these milliseconds
QUICK_FLOPS = 3e8  # most operations of the classical algorithm for a sweep of a minute

Calls = Mapping[str, Callable[[], Any]]
Matrix = Callable[[tuple[int, ...]], torch.Tensor]


@dataclass(frozen=True)
class Task:
    """One problem of one size."""

    problem: str
    shape: tuple[int, ...]  # leading dimensions count problems
    dtype: torch.dtype
    flops: float  # of the classical algorithm
    # Makes the numbers; returns neula's call, those of the peers, and the error of a result of either.
    calls: Callable[[], tuple[Callable[[], Any], Calls, Callable[[Any], float]]]


def run(
    device: torch.device,
    on_row: Callable[[Row], None] | None = None,
    *,
    names: Collection[str] = (NAME,),
    quick: bool = False,
    condition: float | None = None,
    special: bool = False,
) -> ExperimentData:
    """Measure all sizes, or those that take a minute together; ``on_row`` gets each row as it comes.

    Matrices are normal, or have geometric singular values of a condition number; or problems are
    :func:`special_tasks`. Times are medians in milliseconds; ``ratio`` is the peer's over neula's; ``within``
    says whether neula takes no more than :data:`SLOWER` times the peer's and :data:`LATER`. The names are
    some of :data:`PROBLEMS`, or :data:`NAME` for all; a ValueError says that no such problem has one of them.
    """
    rows, some = Measurements(), () if NAME in names else tuple(names)
    for task in special_tasks(device) if special else tasks(device, condition):
        if not task.problem.startswith(some or PROBLEMS) or (quick and task.flops > QUICK_FLOPS):
            continue
        rows.append(_measure(task, *((0.05, 1) if quick else (0.5, 3))))
        if on_row is not None:
            on_row(rows[-1])
    if not rows:
        raise ValueError(f"no problem of this kind is one of {', '.join(names)}: leave out the names for all")
    error = "backward errors; of svd_lowrank that of the approximation"
    about = {"problem": NAME, "peer": PEER, "error": error, **circumstances(device)}
    about |= {"names": sorted(some)} if some else {}
    about |= {} if condition is None else {"condition": condition}
    about |= {"special": True} if special else {}
    return ExperimentData.from_rows(about, rows)


def _measure(task: Task, at_least: float, rounds: int = 1) -> Row:
    ours, peers, error = task.calls()
    result = ours()
    found = error(result)
    # Each once to warm up; what is far slower than another, or less accurate, is not measured again.
    errors = {name: error(call()) for name, call in peers.items()}
    enough = AS_ACCURATE * max(found, 0.5 * torch.finfo(task.dtype).eps * task.shape[-1] ** 0.5)
    accurate = {name: call for name, call in peers.items() if errors[name] <= enough}
    candidates = accurate or peers
    once = dict(zip(candidates, rested_seconds(list(candidates.values()), 0.0, rounds=1), strict=True))
    near = [name for name in once if once[name] <= 3 * min(once.values())]
    mine, *others = rested_seconds([ours, *(peers[name] for name in near)], at_least, rounds)
    seconds, peer = min(zip(others, near, strict=True))
    return {
        "problem": task.problem,
        "shape": "x".join(map(str, task.shape)),
        "dtype": str(task.dtype).removeprefix("torch."),
        "ms": 1e3 * mine,
        "peer": peer,
        "peer_ms": 1e3 * seconds,
        "ratio": seconds / mine,
        "within": 1e3 * mine <= SLOWER * 1e3 * seconds + LATER,
        "error": found,
        "peer_error": errors[peer],
        "forward_error": getattr(result, "forward_error", None),
        "certified": getattr(result, "converged", None),
        "method": getattr(result, "qr", result).attempts[-1].method,
    }


TALL = ((10, 3), (50, 5), (64, 32), (200, 20), (300, 40), (600, 100), (2000, 50), (2000, 500), (10000, 100))
LARGE = ((20000, 500), (100000, 100), (16384, 2048))
LARGEST = ((131072, 4096), (524288, 1024), (32768, 16384))  # of a GPU, if its memory holds them
SQUARE = (512, 1000, 2000, 4000)
ORDERS = (3, 10, 50, 100, 200, 500, 1000, 2000, 4000)
LOW_RANK = ((300, 200, 10), (2000, 500, 20), (3000, 3000, 50), (20000, 1000, 20))
BATCHES = ((1000, 16, 6), (1000, 32, 16), (100, 200, 50), (10, 600, 100))

WORST = 1e14  # condition number of the worst matrices: float64 does not hold those of others

HELD = 0.1
"""Rounding errors of a dtype times the condition number, beyond which it cannot hold a matrix of that."""


def tasks(device: torch.device, condition: float | None = None) -> Iterator[Task]:
    """Cases to measure in float64 and float32; with a given condition number, all except low rank."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    largest = [(m, n) for m, n in LARGEST if BYTES_AN_ENTRY * m * n <= free]
    shapes: list[tuple[int, ...]] = [*TALL, *LARGE, *largest, *((n, n) for n in SQUARE), *BATCHES]
    dtypes = (torch.float64, torch.float32)
    for dtype in (x for x in dtypes if (condition or 1) * torch.finfo(x).eps <= HELD):
        matrix = partial(_matrix, dtype=dtype, device=device, condition=condition)
        for problem, make in (("qr", _qr), ("lstsq", _lstsq)):
            for shape in shapes:
                *batch, m, n = shape
                # Q takes as many operations again.
                flops = math.prod(batch) * householder_flops(m, n) * (2 if problem == "qr" else 1)
                yield Task(problem, shape, dtype, flops, partial(make, matrix, shape))
        for order in (*((n,) for n in ORDERS), *((count, n) for count, _, n in BATCHES)):
            flops = math.prod(order) * 2 * order[-1] ** 2 / 3
            yield Task("solve", (*order, order[-1]), dtype, flops, partial(_solve, matrix, order))
        for m, n, rank in LOW_RANK if condition is None else ():
            # A randomized method with four power iterations reads A ten times.
            calls = partial(_svd, m, n, rank, dtype, device)
            yield Task("svd_lowrank", (m, n, rank), dtype, 20 * m * n * rank, calls)


def normal(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, dtype=dtype, device=device, generator=generator)


def _matrix(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, condition: float | None
) -> torch.Tensor:
    """Normal matrices, or those of geometric singular values."""
    if condition is None:
        return normal(shape, dtype, device)
    *batch, m, n = shape
    geometric = partial(random_matrix, "geometric", m, n, cond=condition, device=device)
    return torch.stack([geometric(seed=seed) for seed in range(math.prod(batch))]).reshape(shape).to(dtype)


def _calls(torchs: Calls, scipys: Calls, a: torch.Tensor) -> Calls:
    """Peers: SciPy's where it can be called with what there is, on the CPU and not for batches."""
    return {**torchs, **(scipys if a.device.type == "cpu" and a.ndim == 2 else {})}


def _qr(matrix: Matrix, shape: tuple[int, ...]) -> Any:
    a = matrix(shape)
    scipys = {"scipy qr": lambda: scipy.linalg.qr(a.numpy(), mode="economic", check_finite=False)}
    torchs = {"torch qr": partial(torch.linalg.qr, a)}
    return partial(neula.qr, a), _calls(torchs, scipys, a), partial(qr_error, a)


def qr_error(a: torch.Tensor, factors: Any) -> float:
    """The larger of the residual and the loss of orthogonality, the largest of a batch."""
    q, r = (torch.as_tensor(x, device=a.device)[None] if a.ndim == 2 else x for x in factors)
    one = torch.ones(a.shape[-1], dtype=torch.float32, device=a.device)
    found = [
        qr_certificate(*parts, one, FP64) for parts in zip(a if a.ndim > 2 else a[None], q, r, strict=True)
    ]
    return max(max(certificate.residual, certificate.orthogonality) for certificate in found)


def _lstsq(matrix: Matrix, shape: tuple[int, ...]) -> Any:
    a = matrix(shape)
    b = normal((*shape[:-1], 1), a.dtype, a.device, seed=2)
    return _least_squares(partial(neula.lstsq, a, b), a, b)


def _least_squares(
    ours: Callable[[], Any], a: torch.Tensor, b: torch.Tensor, *, full_rank: bool = True
) -> Any:
    """Neula's call, and those of the drivers that solve ``min ||A x - b||``: ``gels`` is for full rank."""
    drivers = ("gels",) if a.is_cuda else ("gels", "gelsy", "gelsd")[not full_rank :]
    torchs = {f"torch {name}": partial(torch.linalg.lstsq, a, b, driver=name) for name in drivers}
    scipys = {
        f"scipy {name}": lambda name=name: scipy.linalg.lstsq(
            a.numpy(), b.numpy(), lapack_driver=name, check_finite=False
        )
        for name in ("gelsy", "gelsd")
    }

    def error(found: Any) -> float:
        x = found.x if hasattr(found, "x") else torch.as_tensor(found[0], device=a.device)
        every = zip(*(y.double().reshape(-1, *y.shape[-2:]) for y in (a, b, x)), strict=True)
        return max(min(optimality(*one), float(_relative_residual(*one))) for one in every)

    return ours, _calls(torchs, scipys, a), error


def _solve(matrix: Matrix, shape: tuple[int, ...]) -> Any:
    a = matrix((*shape, shape[-1]))
    b = normal((*shape, 1), a.dtype, a.device, seed=2)
    torchs = {"torch solve": partial(torch.linalg.solve, a, b)}
    # By default newer ones look for structure first.
    options = {"assume_a": "gen", "check_finite": False}
    scipys = {"scipy solve": lambda: scipy.linalg.solve(a.numpy(), b.numpy(), **options)}
    return partial(neula.solve, a, b), _calls(torchs, scipys, a), partial(_error_of_system, a, b)


def _error_of_system(a: torch.Tensor, b: torch.Tensor, found: Any) -> float:
    x = found.x if hasattr(found, "x") else torch.as_tensor(found, device=a.device)
    return float(_relative_residual(a.double(), b.double(), x.double()).max())


def _relative_residual(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``||b - A x|| / (||A|| ||x|| + ||b||)``."""
    norm = partial(torch.linalg.vector_norm, dim=(-2, -1))
    return norm(b - a @ x) / (norm(a) * norm(x) + norm(b))


def _svd(m: int, n: int, rank: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Singular values from 1 to 0.01, then noise.

    Four power iterations of the peer are the fewest but one for triplets as accurate as neula's: with three
    ``||A V - U S||`` is at rounding errors, with two 1000 times as large. Three may not suffice.
    """
    u, v = (torch.linalg.qr(normal((size, rank), dtype, device, seed=size))[0] for size in (m, n + 1))
    values = torch.logspace(0, -2, rank, dtype=dtype, device=device)
    noise = 1e-4 / (math.sqrt(m) + math.sqrt(n)) * normal((m, n), dtype, device, seed=3)
    a = u * values @ v[:n].T + noise

    def randomized() -> Any:
        left, s, right = torch.svd_lowrank(a, rank + 5, niter=4)
        return left[:, :rank], s[:rank], right[:, :rank].T

    peers = {"torch svd_lowrank": randomized}
    if m * n * n <= 1e9:
        peers["torch svd"] = partial(truncated_svd, a, rank)
    return partial(neula.svd_lowrank, a, rank), peers, lambda found: low_rank_error(a, *found)


def truncated_svd(a: torch.Tensor, rank: int) -> tuple[torch.Tensor, ...]:
    """Leading triplets of all that there are."""
    u, s, vh = torch.linalg.svd(a, full_matrices=False)
    return u[:, :rank], s[:rank], vh[:rank]


FEW_ROWS = ((3, 10), (32, 64), (40, 300), (100, 600), (500, 2000))
SOME = ((10, 3), (64, 32), (300, 40), (600, 100), (2000, 50), (2000, 500), (10000, 100))
DAMP = 0.1


def special_tasks(device: torch.device) -> Iterator[Task]:
    """Least squares with fewer rows than columns, of three quarters of full rank, damped and weighted, and
    definite systems, in float64.
    """
    for kind in ("fewer rows", "dependent", "damped", "weighted"):
        for m, n in FEW_ROWS if kind == "fewer rows" else SOME:
            flops = householder_flops(max(m, n), min(m, n))
            calls = partial(_special, kind, m, n, device)
            yield Task(f"lstsq, {kind}", (m, n), torch.float64, flops, calls)
    for n in ORDERS:
        yield Task("solve, definite", (n, n), torch.float64, n**3 / 3, partial(_definite, n, device))


def _special(kind: str, m: int, n: int, device: torch.device) -> Any:
    """Least squares; peers are given the matrix with the damping below, or rows times weights."""
    a, b = normal((m, n), torch.float64, device), normal((m, 1), torch.float64, device, seed=2)
    match kind:
        case "dependent":
            rank = 3 * n // 4
            a = normal((m, rank), a.dtype, device) @ normal((rank, n), a.dtype, device, seed=3)
        case "damped":
            below = DAMP * torch.eye(n, dtype=a.dtype, device=device)
            stacked = torch.cat([a, below]), torch.cat([b, b.new_zeros(n, 1)])
            return _least_squares(partial(neula.lstsq, a, b, damp=DAMP), *stacked)
        case "weighted":
            weights = normal((m, 1), a.dtype, device, seed=3).exp()
            ours = partial(neula.lstsq, a, b, weights=weights[:, 0])
            return _least_squares(ours, weights * a, weights * b)
    return _least_squares(partial(neula.lstsq, a, b), a, b, full_rank=kind != "dependent")


def definite(n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    half = normal((n, n), dtype, device)
    return half @ half.T / n + torch.eye(n, dtype=dtype, device=device)


def _definite(n: int, device: torch.device) -> Any:
    a, b = definite(n, torch.float64, device), normal((n, 1), torch.float64, device, seed=2)
    torchs = {"torch cholesky": lambda: torch.cholesky_solve(b, torch.linalg.cholesky(a))}
    options = {"assume_a": "pos", "check_finite": False}
    scipys = {"scipy solve": lambda: scipy.linalg.solve(a.numpy(), b.numpy(), **options)}
    ours = partial(neula.solve, a, b, assume_a="pos")
    return ours, _calls(torchs, scipys, a), partial(_error_of_system, a, b)


_HEADINGS = {
    "problem": "problem",
    "shape": "shape",
    "dtype": "dtype",
    "ms": "ms",
    "peer_ms": "peer's",
    "peer": "peer",
    "ratio": "ratio",
    "within": "fast",
    "error": "error",
    "peer_error": "peer's",
}


def table(data: ExperimentData) -> Table:
    count, slow = len(data.rows), sum(not row["within"] for row in data.rows)
    condition = data.about.get("condition")
    hard = "" if condition is None else f", matrices of condition {condition:g}"
    hard = ", special problems" if "special" in data.about else hard
    title = f"neula and {PEER} on {data.about['device']}, {data.about['threads']} threads{hard}"
    caption = f"fast: at most {SLOWER} times the peer's time and {LATER} ms; {slow} of {count} are not"
    shown = Table(title=title, caption=caption, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name, heading in _HEADINGS.items():
        is_text = name in ("problem", "shape", "dtype", "peer")
        shown.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    for row in data.rows:
        shown.add_row(*(_cell(name, row[name]) for name in _HEADINGS))
    return shown


def _cell(name: str, value: Any) -> str:
    if name == "within":
        return "yes" if value else "no"
    sizes = str(value).split("x") if name == "shape" else ()
    if len(sizes) == 3 and len(set(sizes)) == 1:
        return f"{sizes[0]}^3"
    return f"{value:.1e}" if name.endswith("error") else show(value)


def line(row: Row) -> str:
    beside = f"{show(row['ratio'])} times as fast as {row['peer']}, {show(row['peer_ms'])} ms"
    return f"{row['problem']} {row['shape']} {row['dtype']}: {show(row['ms'])} ms, {beside}, {row['method']}"


def check_picture(path: Path, suffixes: Sequence[str] = PICTURES) -> None:
    """Raise before the work if a picture, or a page with pictures, could not be made."""
    if path.suffix not in suffixes:
        raise ValueError(f"{path}: the name must end with {' or '.join(suffixes)}; choose another one")
    try:
        new_canvas(1.0, 1.0)
    except ImportError as error:
        raise ValueError(str(error)) from None


def write(data: ExperimentData, folder: Path) -> Path:
    """Write ``bench-sweep-DEVICE.json`` and ``.csv``; what was asked for stands between."""
    about = data.about
    kinds = [*about.get("names", ())] + ["special"] * ("special" in about)
    kinds += [f"{about['condition']:g}".replace("+", "")] if "condition" in about else []
    path = data_file(folder, "-".join(["bench", NAME, *kinds]), about)
    data.write(path)
    return path


def read(folder: Path) -> list[ExperimentData]:
    """Read the files that :func:`write` has written there."""
    paths = sorted(folder.glob("bench-*.json"))
    if not paths:
        raise ValueError(f"{folder}: no bench-*.json; measure with: neula bench --out {folder}")
    found = [ExperimentData.read(path) for path in paths]
    for path, data in zip(paths, found, strict=True):
        if data.about.get("problem") != NAME:
            raise ValueError(f"{path} does not hold what neula bench writes: take it out of the folder")
    return found


def draw(results: Sequence[ExperimentData]) -> Canvas:
    """A picture for each result: rows are points by the times of both; those below the line are fast."""
    canvas = new_canvas(5.5 * len(results), 3.6)
    for axes, data in zip(canvas.subplots(1, len(results), squeeze=False)[0], results, strict=True):
        _draw(axes, data)
    canvas.suptitle(results[0].about["device"])
    return canvas


def _draw(axes: Axes, data: ExperimentData) -> None:
    for number, (problem, rows) in enumerate(data.rows.by("problem").items()):
        axes.plot(rows.numbers("peer_ms"), rows.numbers("ms"), MARKERS[number], label=problem, alpha=0.7)
    times = sorted(data.rows.numbers("peer_ms"))
    axes.plot(times, [SLOWER * time + LATER for time in times], "k-", linewidth=0.8, label="allowed")
    log_log(axes, "ms of the fastest peer", "ms", NAME)
    axes.legend(fontsize=7)
