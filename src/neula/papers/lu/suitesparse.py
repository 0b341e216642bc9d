"""Table 3: matrices from applications, those that are formulas and those that the user has as files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from neula.algorithms.elimination.equilibrate import equilibrate
from neula.engines import FP32, Engine
from neula.io.files import read_matrix
from neula.io.matrices import journal_bearing_matrix, torsion_matrix, wathen_matrix
from neula.papers.data import Measurements, Row
from neula.papers.figure import Figure, Setting
from neula.papers.lu import algorithms as lu
from neula.papers.lu.performance import operations
from neula.papers.measuring import timed
from neula.papers.verdicts import Claim, ClaimCheck, cases, claim, within

BYTES = 30
"""Memory of an entry: A in float64, which is made from two more, and later A, L and U in float32."""
LARGEST_SMALL = 2048
"""Order of matrices for which two cores take seconds."""
ENDINGS = (".mtx", ".mtx.gz")
ENOUGH = 8
"""More than half of the paper's matrices: fewer are too few for a verdict on what it says of all."""
ORDER_OF_MAGNITUDE = 20.0
"""In the paper's table the ratio of errors goes up to 17."""
ABOUT = 1.25
"""In the paper's table 5.2/5.1 is ahead of 3.1 fp32 once, by 23%: as accurate, up to this factor."""


@dataclass(frozen=True)
class SuiteSparseMatrix:
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


@dataclass(frozen=True)
class MatrixSource:
    """A ``"file"`` or ``"formula"`` that a matrix comes from; its order is known before it is loaded."""

    kind: str
    n: int
    load: Callable[[], torch.Tensor]


def measure_applications(setting: Setting) -> Iterator[Row]:
    """Errors and rates of the four algorithms on what there is of the paper's matrices."""
    cases = _available(setting)
    for problem, source in setting.track(cases, lambda case: f"{case[0].name}, n = {case[1].n}"):
        a, x = scaled_system(source.load().to(setting.device), setting.numerics)
        for name, paper in zip(lu.COMPARED, problem.errors, strict=True):
            factors, seconds = timed(partial(lu.factorize, a, name, setting.numerics, lu.Widths()))
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
    """The matrices that can be had and are not too large; what is left out is noted."""
    found = [(problem, source) for problem in PROBLEMS if (source := _source(problem, setting)) is not None]
    missing = [problem.name for problem in PROBLEMS if problem not in [known for known, _ in found]]
    if missing:
        setting.notes.append(
            f"{len(missing)} matrices left out, of which there is no file ({', '.join(missing)}): get them "
            "as Matrix Market files from https://sparse.tamu.edu, and pass their folder with --matrices"
        )
    fitting = setting.fitting([(source.n, source.n) for _, source in found], BYTES)
    largest = setting.pick(small=LARGEST_SMALL, paper=max(problem.n for problem in PROBLEMS))
    for problem, source in found:
        if source.n > largest:
            setting.notes.append(f"{problem.name} left out: n = {source.n} is too large for scale small")
    return [(p, source) for p, source in found if (source.n, source.n) in fitting and source.n <= largest]


def _source(problem: SuiteSparseMatrix, setting: Setting) -> MatrixSource | None:
    """The user's file, if there is one, else the formula, if there is one."""
    if setting.matrices is not None:
        path = file_of(setting.matrices, problem.name)
        if path is not None:
            return MatrixSource("file", problem.n, partial(_read, path, setting))
    makers: dict[str, tuple[int, Callable[[], torch.Tensor]]] = _formulas(setting)
    return MatrixSource("formula", *makers[problem.name]) if problem.name in makers else None


def file_of(folder: Path, name: str) -> Path | None:
    """The file of a matrix, in the folder or, as the collection packs it, in a folder of its name there."""
    places = [place / f"{name}{ending}" for place in (folder, folder / name) for ending in ENDINGS]
    return next((path for path in places if path.is_file()), None)


def _read(path: Path, setting: Setting) -> torch.Tensor:
    return torch.from_numpy(read_matrix(path)).to(setting.device)


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


# --- claims -----------------------------------------------------------------------------------------------


def _ratios(rows: Measurements, name: str, peer: str, field: str = "error_1e4") -> dict[str, float]:
    """Quotients of two algorithms for each matrix that both could factorize."""
    ratios = zip(rows.by("matrix"), rows.ratios(field, name, peer, "algorithm"), strict=True)
    return {str(matrix): ratio for matrix, ratio in ratios if not math.isnan(ratio)}


def _enough(rows: Measurements) -> bool:
    """Whether there are as many matrices as a statement about the paper's fifteen needs."""
    return len(rows.by("matrix")) >= ENOUGH


def _told(ratios: dict[str, float]) -> str:
    """The extremes."""
    if not ratios:
        return "0 matrices"
    smallest, largest = (find(ratios, key=ratios.__getitem__) for find in (min, max))
    told = f"{ratios[smallest]:.2g} ({smallest}) to {ratios[largest]:.2g} ({largest})"
    return f"{told} for {len(ratios)} matrices"


def _error_ratios(text: str, name: str, *peers: str, least: float = 0.0, most: float = float("inf")) -> Claim:
    """The claim that the error of an algorithm is so many times that of others, for all matrices."""

    def judge(rows: Measurements) -> ClaimCheck:
        found = {peer: _ratios(rows, name, peer) for peer in peers}
        told = "; ".join(f"{name} over {peer} {_told(ratios)}" for peer, ratios in found.items())
        values = [ratio for ratios in found.values() for ratio in ratios.values()]
        return within(values if _enough(rows) else [], (least, most), told)

    return Claim(text, judge)


@claim("5.2/5.1 factorizes what the others with an fp16 matrix do")
def _failures(rows: Measurements) -> ClaimCheck:
    """Where the most accurate algorithm that stores the matrix in fp16 fails, so do the others."""
    failed = {name: rows.where(algorithm=name, error_1e4=None).column("matrix") for name in lu.COMPARED}
    text = ", ".join(f"{name} {len(matrices)}" for name, matrices in failed.items())
    others = set(failed[lu.DOUBLY_LOW]) & set(failed[lu.HALF])
    kept = [matrix in others or matrix not in failed[lu.DOUBLY_WIDE] for matrix in rows.by("matrix")]
    text = f"of {len(kept)} matrices cannot be factorized: {text}"
    return cases(kept if _enough(rows) else [], text)


def _faster_than(name: str, peer: str) -> Callable[[Measurements], ClaimCheck]:
    def judge(rows: Measurements) -> ClaimCheck:
        ratios = _ratios(rows, name, peer, "tflops")
        text = f"rate of {name} over that of {peer} {_told(ratios)}"
        return within(ratios.values() if _enough(rows) else [], (1.0, math.inf), text)

    return judge


ORDER_MORE = "3.1 errs at most about an order of magnitude more with an fp16 matrix"
# item: L Table 3
TABLE_3 = Figure(
    name="table3",
    title="Table 3: matrices from applications",
    shows="Componentwise backward error (formula 2.2), times 1e4, beside the paper's, and TFLOP/s, of four "
    "algorithms without pivoting and with the panels that suit the engine; empty where a pivot vanishes or "
    "fp16 overflows. Rows and columns are scaled by powers of two. Three matrices are formulas: wathen120 "
    "with other random numbers, jnlbrng1 and torsion1 in their free variables. The others are read from the "
    "folder that `--matrices` names (`NAME.mtx` or `NAME.mtx.gz`, or the same in a folder NAME).",
    scaled_down="matrices that are formulas, on smaller grids; no rates, since tensor cores are emulated",
    measure=measure_applications,
    draw=None,
    claims=(
        _error_ratios(
            "3.1 with an fp32 matrix is the most accurate",
            lu.SINGLE,
            lu.HALF,
            lu.DOUBLY_LOW,
            lu.DOUBLY_WIDE,
            most=ABOUT,
        ),
        _error_ratios(ORDER_MORE, lu.HALF, lu.SINGLE, most=ORDER_OF_MAGNITUDE),
        _error_ratios(
            "5.2/5.1 is more accurate than 3.1 with an fp16 matrix", lu.DOUBLY_WIDE, lu.HALF, most=1.0
        ),
        _error_ratios("5.2/4.1 is no worse than 3.1 with an fp16 matrix", lu.DOUBLY_LOW, lu.HALF, most=ABOUT),
        _failures,
        Claim(
            "5.2/4.1 is faster than 3.1 with an fp16 matrix", _faster_than(lu.DOUBLY_LOW, lu.HALF), timed=True
        ),
    ),
    takes_matrix=False,
)
