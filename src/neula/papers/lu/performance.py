"""Figure 6 and Table 3: rates against n, and matrices from applications.

The matrices of Table 3 are formulas, or files that the user has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from neula.algorithms.elimination.equilibrate import equilibrate
from neula.engines import FP16, FP32, Engine
from neula.io.files import read_matrix
from neula.io.matrices import hpl_ai_matrix, journal_bearing_matrix, torsion_matrix, wathen_matrix
from neula.papers.data import Measurements, Row, span
from neula.papers.drawing import Axes, Canvas, lines, log_log
from neula.papers.figure import Setting, described
from neula.papers.lu import algorithms as lu
from neula.papers.measuring import WARM, first_run, timed
from neula.papers.verdicts import MORE, ClaimCheck, cases, within

LIBRARY, LIBRARY_UNPIVOTED = "library", "library, no pivoting"
"""fp32 LU of cuSOLVER on a GPU and of LAPACK on a CPU; only cuSOLVER has one without pivoting."""
SERIES = (*lu.ALGORITHMS, LIBRARY, LIBRARY_UNPIVOTED)
"""All that is drawn, in colours and marks that are the same in all figures."""
BYTES = 24
"""Memory of an entry: A, the factors, the library's copy of A in column-major order, and its factors."""
ALIKE = 1.25
"""How far a ratio of rates may be from the paper's to be about the same: it depends on the machine."""


def measure_performance(setting: Setting, orders: Sequence[int] | None = None) -> Iterator[Row]:
    """Rates of the algorithms of section 6 and of the library."""
    sizes = orders or setting.pick(small=(512, 1024, 2048, 3072), paper=[2**k for k in range(12, 17)])
    shapes = setting.fitting([(n, n) for n in sizes], BYTES)
    for n, _ in setting.track(shapes, lambda shape: f"n = {shape[0]}"):
        yield from times(dominant(setting, n), lu.COMPARED, setting)


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
        name: partial(lu.factorize, a, name, setting.speed, lu.BEST) for name in names
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
    draw_rates(axes, rows, lu.COMPARED)
    canvas.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=10)


def draw_rates(axes: Axes, rows: Measurements, names: Sequence[str]) -> None:
    shown = (*names, LIBRARY, LIBRARY_UNPIVOTED)
    part = Measurements(row for name in shown for row in rows.where(algorithm=name))
    lines(axes, part, "n", "tflops", "algorithm", SERIES)
    log_log(axes, "n", "TFLOP/s, of $2n^3/3$ operations", "rate")
    axes.set_xscale("log", base=2)


# --- claims -----------------------------------------------------------------------------------------------


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
    told = ", ".join(
        f"{ratios[largest]:.2f} times {peer} (up to {max(ratios.values()):.2f} for all n)"
        for peer, ratios in found.items()
    )
    text = f"{name} at n = {largest}: {ours[largest]:.3g} TFLOP/s, {told}"
    return within([ratios[largest] for ratios in found.values()], claimed, text, tendency=MORE)


def ours_beats_library(rows: Measurements) -> ClaimCheck:
    """The default is faster than the library, without pivoting where that can be had."""
    peer = LIBRARY_UNPIVOTED if rates(rows, LIBRARY_UNPIVOTED) else LIBRARY
    return faster(rows, lu.DOUBLY_WIDE, [peer])


# item: L Figure 6
FIGURE_6 = described("lu-paper", "figure6", globals())


APPLICATION_BYTES = 30
"""Memory of an entry: A in float64, which is made from two more, and later A, L and U in float32."""
LARGEST_SMALL = 2048  # order of matrices for which two cores take seconds
ENDINGS = (".mtx", ".mtx.gz")
ENOUGH = 8  # more than half of the paper's matrices: fewer are too few for a verdict on what it says of all
ORDER_OF_MAGNITUDE = 20.0  # in the paper's table the ratio of errors goes up to 17
ABOUT = 1.25  # in the paper's table 5.2/5.1 is ahead of 3.1 fp32 once, by 23%: as accurate, up to this factor


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


def measure_applications(setting: Setting) -> Iterator[Row]:
    """Errors and rates of the four algorithms on those of the paper's matrices that can be had."""
    cases = _available(setting)
    for problem, source in setting.track(cases, lambda case: f"{case[0].name}, n = {case[1].n}"):
        a, x = scaled_system(source.load().to(setting.device), setting.numerics)
        for name, paper in zip(lu.COMPARED, problem.errors, strict=True):
            factors, seconds = timed(partial(lu.factorize, a, name, setting.numerics, lu.BEST))
            rate = None if factors is None else 1e-12 * operations(len(a)) / seconds
            yield {
                "matrix": problem.name,
                "n": len(a),
                "from": source.kind,
                "algorithm": name,
                "error_1e4": 1e4 * lu.solution_error(a, factors, x),
                "paper_1e4": paper,
                "tflops": setting.pick(small=None, paper=rate),
            }
            del factors


def scaled_system(a: torch.Tensor, engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
    """``R A C`` in float32 and ``C^-1`` times ones, the solution of the system scaled as for ``neula.solve``.

    The paper scales rows and columns, too, lest the matrix become singular in fp16. Powers of two leave the
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


# --- claims: judged only if there are enough matrices for a statement about the paper's fifteen -----------


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
    told = "; ".join(f"{name} over {x} {span(part, '.2g') if part else ''}" for x, part in found.items())
    values = [x for part in found.values() for x in part]
    count = len(rows.by("matrix"))
    return within(values if count >= ENOUGH else [], (least, most), f"{told}; {count} matrices")


def failures(rows: Measurements) -> ClaimCheck:
    """Where the most accurate algorithm that stores the matrix in fp16 fails, so do the others."""
    failed = {name: rows.where(algorithm=name, error_1e4=None).column("matrix") for name in lu.COMPARED}
    text = ", ".join(f"{name} {len(matrices)}" for name, matrices in failed.items())
    others = set(failed[lu.DOUBLY_LOW]) & set(failed[lu.HALF])
    kept = [matrix in others or matrix not in failed[lu.DOUBLY_WIDE] for matrix in rows.by("matrix")]
    text = f"of {len(kept)} matrices cannot be factorized: {text}"
    return cases(kept if len(kept) >= ENOUGH else [], text)


# item: L Table 3
TABLE_3 = described("lu-paper", "table3", globals())
