"""Figures 1 to 6 and Table 3: errors and rates against n, and matrices from applications.

The matrices of Table 3 are formulas, or files that the user has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from neula.algorithms.elimination.equilibrate import equilibrate
from neula.engines import BF16, FP16, FP32, Engine
from neula.io.files import read_matrix
from neula.io.matrices import (
    hpl_ai_matrix,
    journal_bearing_matrix,
    no_pivoting_matrix,
    torsion_matrix,
    wathen_matrix,
)
from neula.papers.data import Measurements, Row, span
from neula.papers.drawing import Axes, Canvas, lines, log_log
from neula.papers.figure import Setting
from neula.papers.lu.algorithms import (
    ALGORITHMS,
    BEST,
    BUFFERED,
    COMPARED,
    DOUBLY_LOW,
    DOUBLY_WIDE,
    EMULATED,
    EMULATED_UP_TO,
    HALF,
    PAPERS_UNIT,
    SINGLE,
    STANDARD,
    UNIT,
    WIDE_PANELS,
    accuracy_row,
    factorize,
    solution_error,
    units,
)
from neula.papers.measuring import WARM, first_run, timed
from neula.papers.verdicts import EVERY, HALF_AN_ORDER, MORE, ClaimCheck, Interval, about, cases, within

LIBRARY, LIBRARY_UNPIVOTED = "library", "library, no pivoting"
"""fp32 LU of cuSOLVER on a GPU and of LAPACK on a CPU; only cuSOLVER has one without pivoting."""
SERIES = (*ALGORITHMS, LIBRARY, LIBRARY_UNPIVOTED)
"""All that is drawn, in colours and marks that are the same in all figures."""
BYTES = 24
"""Memory of an entry: A, the factors, the library's copy of A in column-major order, and its factors."""
ALIKE = 1.25
"""How far a ratio of rates may be from the paper's to be about the same: it depends on the machine."""


# item: L Figure 6
def measure_performance(setting: Setting, orders: Sequence[int] | None = None) -> Iterator[Row]:
    """Rates of the algorithms of section 6 and of the library."""
    sizes = orders or setting.pick(small=(512, 1024, 2048, 3072), paper=[2**k for k in range(12, 17)])
    shapes = setting.fitting([(n, n) for n in sizes], BYTES)
    for n, _ in setting.track(shapes, lambda shape: f"n = {shape[0]}"):
        yield from times(dominant(setting, n), COMPARED, setting)


def dominant(setting: Setting, n: int) -> torch.Tensor:
    """The matrix of the HPL-AI benchmark, or the user's, for times and most errors."""
    make = partial(hpl_ai_matrix, n, dtype=torch.float32, device=setting.device, seed=n)
    a = setting.given_or(make, torch.float32)
    # Its diagonal is n. A power of two changes no error.
    return a if n < FP16.largest else a.div_(2)


def times(a: torch.Tensor, names: Sequence[str], setting: Setting) -> Iterator[Row]:
    """Time of the algorithms, with the panels that suit the engine, and of the library."""
    n = len(a)
    methods: dict[str, Callable[[], Any]] = {
        name: partial(factorize, a, name, setting.speed, BEST) for name in names
    }
    column_major = setting.speed.empty(n, n).copy_(a)
    methods[LIBRARY] = partial(torch.linalg.lu_factor_ex, column_major)
    if a.is_cuda:
        methods[LIBRARY_UNPIVOTED] = partial(torch.linalg.lu_factor_ex, column_major, pivot=False)
    for name, method in methods.items():
        result, seconds = first_run(method, warmup=WARM if name in names else 0)
        seconds = math.nan if result is None else seconds  # which has failed
        yield {"n": n, "algorithm": name, "ms": 1e3 * seconds, "tflops": 1e-12 * operations(n) / seconds}


def operations(n: int) -> float:
    return 2 * n**3 / 3


def draw_performance(rows: Measurements, canvas: Canvas) -> None:
    axes = canvas.subplots()
    draw_rates(axes, rows, COMPARED)
    canvas.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=10)


def draw_rates(axes: Axes, rows: Measurements, names: Sequence[str]) -> None:
    shown = (*names, LIBRARY, LIBRARY_UNPIVOTED)
    part = Measurements(row for name in shown for row in rows.where(algorithm=name))
    lines(axes, part, "n", "tflops", "algorithm", SERIES)
    log_log(axes, "n", "TFLOP/s, of $2n^3/3$ operations", "rate")
    axes.set_xscale("log", base=2)


def rates(rows: Measurements, name: str) -> dict[int, float]:
    """TFLOP/s for each n at which it was timed; NaN where it failed."""
    part = Measurements(row for row in rows.where(algorithm=name) if "tflops" in row)
    return dict(zip(part.column("n"), part.numbers("tflops"), strict=True))


def faster(
    rows: Measurements, name: str, peers: Sequence[str], paper: tuple[float, float] | None = None
) -> ClaimCheck:
    """An algorithm is faster than others for the largest n, about as much as the rates in the paper say."""
    expected = 1.0 if paper is None else paper[0] / paper[1]
    claimed = MORE if paper is None else (max(1.0, expected / ALIKE), expected * ALIKE)
    ours = rates(rows, name)
    largest = max(ours)
    found = {peer: {n: ours[n] / rate for n, rate in rates(rows, peer).items()} for peer in peers}
    words = ", ".join(
        f"{ratios[largest]:.2f} times {peer} (up to {max(ratios.values()):.2f} for all n)"
        for peer, ratios in found.items()
    )
    text = f"{name} at n = {largest}: {ours[largest]:.3g} TFLOP/s, {words}"
    return within([ratios[largest] for ratios in found.values()], claimed, text, weaker=MORE)


def ours_beats_library(rows: Measurements) -> ClaimCheck:
    """The default is faster than the library, without pivoting where that can be had."""
    peer = LIBRARY_UNPIVOTED if rates(rows, LIBRARY_UNPIVOTED) else LIBRARY
    return faster(rows, DOUBLY_WIDE, [peer])


APPLICATION_BYTES = 30
"""Memory of an entry: A in float64, which is made from two more, and later A, L and U in float32."""
LARGEST_SMALL = 2048  # order of matrices for which two cores take seconds
ENDINGS = (".mtx", ".mtx.gz")
ENOUGH = 8  # more than half of the paper's matrices: fewer are too few for a verdict on what it says of all


class SuiteSparseMatrix(NamedTuple):
    """A matrix of the paper's Table 3: its name and order in the SuiteSparse collection, the paper's errors.

    They are times 1e4, for 3.1 fp32, 3.1 fp16, 5.2/4.1 and 5.2/5.1; None where the algorithm failed.
    """

    name: str
    n: int
    errors: tuple[float | None, float | None, float | None, float | None]


PROBLEMS = (
    SuiteSparseMatrix("gyro", 17361, (0.4, 4.5, 3.9, 2.2)),
    SuiteSparseMatrix("FEM_3D_thermal1", 17880, (0.4, 4.0, 3.7, 2.4)),
    SuiteSparseMatrix("Goodwin_040", 17922, (0.8, 3.0, 1.7, 0.9)),
    SuiteSparseMatrix("nmos3", 18588, (2.5, None, 3.7, 3.3)),
    SuiteSparseMatrix("crystm03", 24696, (0.5, 3.4, 2.9, 2.7)),
    SuiteSparseMatrix("smt", 25710, (0.4, 2.2, 1.1, 0.8)),
    SuiteSparseMatrix("sme3Db", 29067, (0.4, 5.4, 2.0, 1.2)),
    SuiteSparseMatrix("ship_001", 29736, (3.2, None, None, 2.6)),
    SuiteSparseMatrix("nd12k", 36000, (0.9, 5.3, 4.8, 2.8)),
    SuiteSparseMatrix("pdb1HYS", 36417, (0.3, 5.0, 4.0, 1.4)),
    SuiteSparseMatrix("wathen120", 36441, (0.7, 2.9, 2.7, 1.9)),
    SuiteSparseMatrix("jnlbrng1", 40000, (1.2, 2.8, 2.8, 2.4)),
    SuiteSparseMatrix("torsion1", 40000, (0.3, 2.4, 2.6, 1.6)),
    SuiteSparseMatrix("sme3Dc", 42930, (0.5, 6.4, 1.6, 1.3)),
    SuiteSparseMatrix("Goodwin_071", 56021, (0.7, None, 2.4, 1.5)),
)


class MatrixSource(NamedTuple):
    """A ``"file"`` or ``"formula"`` that a matrix comes from; its order is known before it is loaded."""

    kind: str
    n: int
    load: Callable[[], torch.Tensor]


# item: L Table 3
def measure_applications(setting: Setting) -> Iterator[Row]:
    """Errors and rates of the four algorithms on those of the paper's matrices that can be had."""
    cases = _available(setting)
    for problem, source in setting.track(cases, lambda case: f"{case[0].name}, n = {case[1].n}"):
        a, x = scaled_system(source.load().to(setting.device), setting.numerics)
        for name, paper in zip(COMPARED, problem.errors, strict=True):
            factors, seconds = timed(partial(factorize, a, name, setting.numerics, BEST))
            rate = None if factors is None else 1e-12 * operations(len(a)) / seconds
            yield {
                "matrix": problem.name,
                "n": len(a),
                "from": source.kind,
                "algorithm": name,
                "error_1e4": 1e4 * solution_error(a, factors, x),
                "paper_1e4": paper,
                "tflops": setting.pick(small=None, paper=rate),
            }
            del factors


def scaled_system(a: torch.Tensor, engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
    """``R A C`` in float32 and ``C^-1`` times ones, the solution of the system scaled as for ``neula.solve``.

    The paper scales rows and columns, too, to keep the matrix regular in fp16. Powers of two leave the
    componentwise backward error as it is.
    """
    scales = equilibrate(a, torch.linalg.vector_norm(a, 1, dim=1), engine)
    single = engine.using(FP32)
    return scales.fill(single.empty(*a.shape), a, single), 1 / scales.columns


def _available(setting: Setting) -> list[tuple[SuiteSparseMatrix, MatrixSource]]:
    """The matrices that can be had and are not too large; those that are left out are noted."""
    if (own := setting.matrix) is not None:
        return [
            (
                SuiteSparseMatrix("", len(own), (None, None, None, None)),
                MatrixSource("file", len(own), lambda: own),
            )
        ]
    found = [(problem, source) for problem in PROBLEMS if (source := _source(problem, setting)) is not None]
    missing = [problem.name for problem in PROBLEMS if problem not in [known for known, _ in found]]
    if missing:
        setting.notes.append(
            f"{len(missing)} matrices left out, of which there is no file ({', '.join(missing)}): get them "
            "as Matrix Market files from https://sparse.tamu.edu, and pass their folder with --matrices"
        )
    fitting = setting.fitting([(source.n, source.n) for _, source in found], APPLICATION_BYTES)
    largest = setting.pick(small=LARGEST_SMALL, paper=max(problem.n for problem in PROBLEMS))
    for problem, source in found:
        if source.n > largest:
            setting.notes.append(f"{problem.name} left out: n = {source.n} is too large for scale small")
    return [(p, source) for p, source in found if (source.n, source.n) in fitting and source.n <= largest]


def _source(problem: SuiteSparseMatrix, setting: Setting) -> MatrixSource | None:
    """The user's file, if there is one, else the formula, if there is one."""
    path = None if setting.matrices is None else file_of(setting.matrices, problem.name)
    if path is not None:
        return MatrixSource("file", problem.n, lambda: torch.from_numpy(read_matrix(path)))
    makers = _formulas(setting)
    return MatrixSource("formula", *makers[problem.name]) if problem.name in makers else None


def file_of(folder: Path, name: str) -> Path | None:
    """The file of a matrix, in the folder or, as the collection packs it, in a folder of its name there."""
    places = [place / f"{name}{ending}" for place in (folder, folder / name) for ending in ENDINGS]
    return next((path for path in places if path.is_file()), None)


def _formulas(setting: Setting) -> dict[str, tuple[int, Callable[[], torch.Tensor]]]:
    """Orders of the matrices that can be made, and how."""
    nx, ny = setting.pick(small=(16, 20), paper=(100, 120))
    size = setting.pick(small=32, paper=200)
    device = setting.device
    return {
        "wathen120": (3 * nx * ny + 2 * nx + 2 * ny + 1, partial(wathen_matrix, nx, ny, device=device)),
        "jnlbrng1": (size**2, partial(journal_bearing_matrix, size, device=device)),
        "torsion1": (size**2, partial(torsion_matrix, size, device=device)),
    }


# Claims of Table 3 are judged only if there are enough matrices for a statement about the paper's fifteen.
def ratios(
    rows: Measurements,
    name: str,
    peers: Sequence[str],
    most: float = math.inf,
    field: str = "error_1e4",
    least: float = 0.0,
) -> ClaimCheck:
    """How many times a field of an algorithm is that of others, for each matrix that both factorize."""
    found = {peer: rows.ratios(field, name, peer, "algorithm") for peer in peers}
    found = {peer: [x for x in part if not math.isnan(x)] for peer, part in found.items()}
    words = "; ".join(f"{name} over {x} {span(part, '.2g') if part else ''}" for x, part in found.items())
    values = [x for part in found.values() for x in part]
    count = len(rows.by("matrix"))
    return within(values if count >= ENOUGH else [], (least, most), f"{words}; {count} matrices")


def failures(rows: Measurements) -> ClaimCheck:
    """Where the most accurate algorithm that stores the matrix in fp16 fails, so do the others."""
    failed = {name: rows.where(algorithm=name, error_1e4=None).column("matrix") for name in COMPARED}
    text = ", ".join(f"{name} {len(matrices)}" for name, matrices in failed.items())
    others = set(failed[DOUBLY_LOW]) & set(failed[HALF])
    kept = [matrix in others or matrix not in failed[DOUBLY_WIDE] for matrix in rows.by("matrix")]
    text = f"of {len(kept)} matrices cannot be factorized: {text}"
    return cases(kept if len(kept) >= ENOUGH else [], text)


ERROR_BYTES = 60
"""Memory of an entry: A, which is made in float64, the factors, L and U, and blocks of them in float64."""
CONDITION = 1e3  # of the matrices of Figure 5
COARSER, COARSER_UP_TO = (HALF, BUFFERED), 4096
"""Algorithms that are compared in bf16, too, and up to which order: an eighth of what fp16 needs."""
SAME = about(1.0, 3.0)
"""From and up to how many times the error of another algorithm an error counts as the same."""
AN_ORDER, TWO_ORDERS = about(10.0, HALF_AN_ORDER), about(100.0, HALF_AN_ORDER)
"""How many times as large an error is that is about one or two orders of magnitude larger."""
TIE = 1.01  # errors that both come from the panels are equal up to the last digits
ORDER = ((SINGLE,), (WIDE_PANELS, DOUBLY_WIDE), (BUFFERED, DOUBLY_LOW), (HALF,))


# item: L Figure 1; L Figure 2; L Figure 3; L Figure 4
def measure_dominant(setting: Setting, orders: Sequence[int] | None = None) -> Iterator[Row]:
    """Errors of all algorithms on HPL-AI matrices, and times in rows of their own."""
    for n in _tracked(setting, orders):
        a = dominant(setting, n)
        for name in ALGORITHMS:
            yield from _errors_on_units(a, name, setting)
        if n <= COARSER_UP_TO:
            coarser = setting.emulated.using(BF16)
            yield from (accuracy_row(a, name, EMULATED, coarser) for name in COARSER)
        yield from times(a, [name for name in ALGORITHMS if name != STANDARD], setting)


# item: L Figure 5
def measure_tunable(setting: Setting, orders: Sequence[int] | None = None) -> Iterator[Row]:
    """Errors of the algorithms of section 6 on the matrices of Fasi and Higham."""
    for n in _tracked(setting, orders):
        make = partial(no_pivoting_matrix, n, CONDITION, dtype=torch.float32, device=setting.device)
        a = setting.given_or(make, torch.float32)
        for name in COMPARED:
            yield from _errors_on_units(a, name, setting)


def _tracked(setting: Setting, orders: Sequence[int] | None) -> Iterator[int]:
    sizes = orders or setting.pick(small=(512, 768, 1024), paper=[2**k for k in range(10, 16)])
    shapes = setting.fitting([(n, n) for n in sizes], ERROR_BYTES)
    return (n for n, _ in setting.track(shapes, lambda shape: f"n = {shape[0]}"))


def _errors_on_units(a: torch.Tensor, name: str, setting: Setting) -> Iterator[Row]:
    """On tensor cores and emulated, as far as the latter is cheap; without a unit there is only emulation."""
    for unit, engine in units(setting).items():
        if len(a) <= EMULATED_UP_TO if unit == EMULATED else name != STANDARD:
            yield accuracy_row(a, name, unit, engine)


def draw_with_rates(rows: Measurements, canvas: Canvas, names: Sequence[str]) -> None:
    """Errors with their bounds on the left, rates on the right."""
    left, right = canvas.subplots(1, 2)
    _draw_errors(left, rows, names)
    draw_rates(right, rows, [name for name in names if name != STANDARD])
    handles = dict(zip(*reversed(left.get_legend_handles_labels()), strict=True))
    handles |= dict(zip(*reversed(right.get_legend_handles_labels()), strict=True))
    canvas.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=6, fontsize=10)


def draw_tunable(rows: Measurements, canvas: Canvas) -> None:
    axes = canvas.subplots()
    _draw_errors(axes, rows, COMPARED)
    canvas.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=10)


def _draw_errors(axes: Axes, rows: Measurements, names: Sequence[str]) -> None:
    """Solid on the unit, dotted where that is emulated besides, dashed the bound of the theorem."""
    found = {name: _errors(rows, name) for name in names}
    measured = Measurements(row for part in found.values() for row in part)
    lines(axes, measured, "n", "error", "algorithm", SERIES)
    for name, part in found.items():
        color = f"C{SERIES.index(name)}"
        axes.plot(part.column("n"), part.numbers("bound"), "--", color=color, linewidth=1)
        emulated = _errors(rows, name, emulated=True)
        if emulated != part:
            axes.plot(emulated.column("n"), emulated.numbers("error"), ":", color=color)
    axes.plot([], [], "--", color="gray", linewidth=1, label="bound")
    log_log(axes, "n", "componentwise backward error", "error")
    axes.set_xscale("log", base=2)


# Claims are judged on the paper's unit, emulated; the numbers of the machine's own unit follow in the text.
def _errors(rows: Measurements, name: str, *, format: str = "fp16", emulated: bool = False) -> Measurements:
    """Rows with the errors of an algorithm on the unit; where it was only emulated, or by request, those."""
    part = rows.where(algorithm=name, format=format)
    return (not emulated and part.where(unit=UNIT)) or part.where(unit=EMULATED)


def _both_units(
    rows: Measurements,
    on_unit: Callable[[bool], tuple[list[float], str]],
    claimed: Interval,
    *,
    format: str = "fp16",
    weaker: Interval | None = None,
) -> ClaimCheck:
    """Compare numbers, with their text, on the paper's unit, and show those on the machine's."""
    values, words = on_unit(True)
    if rows.where(unit=UNIT, format=format):
        # Rows without a t are of neula 0.1.0, whose unit rounded to nearest.
        t = rows.where(unit=EMULATED)[0].get("t")
        unit = f"t = {t}" if t is not None else f"t = 8 to nearest, not the paper's {PAPERS_UNIT.block}"
        words = f"{unit}: {words}. This machine's unit: {on_unit(False)[1]}"
    return within(values, claimed, words, weaker=weaker)


def worse(
    rows: Measurements, name: str, peer: str, claimed: Interval, *, format: str = "fp16", large: bool = False
) -> ClaimCheck:
    """How many times the error of an algorithm is that of another one, for all or large n."""

    def ratios(emulated: bool) -> tuple[list[float], str]:
        ours, theirs = (
            {row["n"]: row for row in _errors(rows, x, format=format, emulated=emulated)}
            for x in (name, peer)
        )
        found = {n: ours[n]["error"] or math.nan for n in ours if n in theirs}
        found = {n: error / (theirs[n]["error"] or math.nan) for n, error in found.items()}
        n = max(found)
        smallest, largest = (_short(find(found.values())) for find in (min, max))
        words = f"{_short(found[n])} times at n = {n}; {smallest} to {largest} for all n"
        return [found[n]] if large else list(found.values()), words

    return _both_units(rows, ratios, claimed, format=format, weaker=MORE if claimed[0] >= 1.0 else None)


def _short(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2g}"


def bounded(rows: Measurements, names: Sequence[str]) -> ClaimCheck:
    """No error exceeds its bound, on any unit and in any format."""
    shares = {}
    for name in names:
        # Where n u16 is 1 or more, theorems about sums in fp16 say nothing.
        measured = Measurements(r for r in rows.where(algorithm=name) if r.get("bound") is not None)
        # NumPy's maximum of NaN and anything is NaN, which holds no bound.
        shares[name] = float(np.divide(measured.numbers("error"), measured.column("bound")).max())
    words = ", ".join(f"{name} {share:.2g}" for name, share in shares.items())
    return within(shares.values(), (0.0, 1.0), f"largest error over bound: {words}")


def ordered(rows: Measurements) -> ClaimCheck:
    """Errors of groups of algorithms are in order at the largest n; equal errors count as ordered."""

    def order(emulated: bool) -> tuple[list[float], str]:
        found = {x: _errors(rows, x, emulated=emulated) for group in ORDER for x in group}
        last = {name: part.numbers("error")[-1] for name, part in found.items()}
        groups = [[last[name] for name in group] for group in ORDER]
        words = ", ".join(f"{name} {error:.1e}" for name, error in last.items())
        return [float(max(low) <= TIE * min(high)) for low, high in itertools.pairwise(groups)], words

    return _both_units(rows, order, EVERY)
