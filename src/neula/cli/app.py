"""The command line: files in, a certified answer out.

Exit codes: 0 solved and certified, 1 solved but not to the accuracy asked for or without a sure digit, 2 bad
input, 70 a defect of neula itself, 130 interrupted.

Commands import what needs torch when they run, so that help and refusals come at once.
"""

from __future__ import annotations

import sys
import traceback
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

import neula
from neula.cli import constrained, machine, show
from neula.cli.machine import JsonOption
from neula.cli.report import write_report
from neula.cli.run import BAD_INPUT, CERTIFIED, DEFECT, INTERRUPTED, NOT_CERTIFIED, Run, running
from neula.papers.data import Scale

if TYPE_CHECKING:
    from neula.papers.reproduce import Paper
    from neula.pipeline.result import LstsqResult, SolveResult

__all__ = ["BAD_INPUT", "CERTIFIED", "DEFECT", "INTERRUPTED", "NOT_CERTIFIED", "app", "main"]

app = typer.Typer(
    name="neula",
    help="Dense linear algebra on neural engines: half-precision speed, certified accuracy.\n\n"
    "Matrices are read from .npy, .npz (file.npz:key chooses an array), .csv, .mtx and .mtx.gz files, "
    "and written to .npy, .npz, .csv and .mtx files.",
    epilog="Exit codes: 0 solved and certified; 1 solved, but not to the accuracy asked for, or so "
    "ill-conditioned that no digit is sure; 2 bad input.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Accuracy = StrEnum("Accuracy", ["fp16", "bf16", "tf32", "fp32", "fp64"])
Certify = StrEnum("Certify", ["backward", "forward"])
EngineName = StrEnum("EngineName", ["auto", "cpu", "emulated", "cuda"])
Structure = StrEnum("Structure", ["gen", "pos"])
Mode = StrEnum("Mode", ["reduced", "r"])

MatrixFile = Annotated[str, typer.Argument(metavar="A", help="File of the matrix.")]
RightHandSideFile = Annotated[
    str, typer.Argument(metavar="b", help="File of one or several right-hand sides.")
]
SolutionOption = Annotated[Path | None, typer.Option("--output", "-o", help="File for the solution x.")]
AccuracyOption = Annotated[
    Accuracy | None,
    typer.Option("--accuracy", help="Accuracy of the answer; the default is that of the input's dtype."),
]
CertifyOption = Annotated[
    Certify,
    typer.Option(
        "--certify",
        help="backward: stop at the backward error; forward: refine until the digits of x are right.",
    ),
]
RcondOption = Annotated[
    float | None, typer.Option("--rcond", help="Singular values below rcond times the largest count as zero.")
]
EngineOption = Annotated[EngineName, typer.Option("--engine", help="What multiplies.")]


def main() -> None:
    """Run the command line; the console script ``neula``."""
    try:
        app(prog_name="neula")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception:
        # Python would end with 1, which promises an answer.
        traceback.print_exc()
        print("neula: this is a defect of neula, please report it", file=sys.stderr)
        sys.exit(DEFECT)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"neula {neula.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


# --- problems ---------------------------------------------------------------------------------------------


@app.command()
def lstsq(
    a: MatrixFile,
    b: RightHandSideFile,
    output: SolutionOption = None,
    accuracy: AccuracyOption = None,
    engine: EngineOption = EngineName.auto,
    damp: Annotated[float, typer.Option(help="Minimize ||Ax - b||^2 + damp^2 ||x||^2.")] = 0.0,
    weights: Annotated[str | None, typer.Option(metavar="FILE", help="File of one weight per row.")] = None,
    rcond: RcondOption = None,
    certify: CertifyOption = Certify.backward,
    nonnegative: Annotated[bool, typer.Option("--nonnegative", help="Solve for x >= 0.")] = False,
    bounds: Annotated[
        str | None, typer.Option(metavar="LO,HI", help="Solve for LO <= x <= HI; inf is no bound.")
    ] = None,
    constraints: Annotated[
        str | None, typer.Option(metavar="C,d", help="Files of C and d: solve for Cx = d.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A page (.html) about the solution.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Solve the least-squares problem min ||Ax - b||; with m < n, the solution of minimum norm."""
    with running("lstsq", as_json) as run:
        files = None if constraints is None else constrained.two_files(constraints)
        run.check_outputs([a, b, weights, *(files or ())], (output, 1))
        matrix, rhs = run.read("A", a), run.read("b", b, column_as_vector=True)
        row_weights = None if weights is None else run.read("weights", weights, column_as_vector=True)
        options = {"damp": damp, "weights": row_weights, "rcond": rcond, "certify": certify.value}
        pair = (
            None
            if files is None
            else (run.read("C", files[0]), run.read("d", files[1], column_as_vector=True))
        )
        function, options = constrained.call_for(options, nonnegative, bounds, pair)
        result = run.compute(function, matrix, rhs, accuracy=accuracy, engine=engine, **options)
        run.write({output: {"x": result.x}})
        if report is not None:
            write_report(report, matrix, rhs, result)
    full_rank = matrix.shape[-1] if damp or pair else min(matrix.shape[-2:])
    _finish_solution(run, result, constrained.shown(result, full_rank), output)


@app.command()
def solve(
    a: MatrixFile,
    b: RightHandSideFile,
    output: SolutionOption = None,
    assume_a: Annotated[
        Structure, typer.Option("--assume-a", help="pos: A is symmetric positive definite.")
    ] = Structure.gen,
    accuracy: AccuracyOption = None,
    engine: EngineOption = EngineName.auto,
    certify: CertifyOption = Certify.backward,
    as_json: JsonOption = False,
) -> None:
    """Solve the linear system Ax = b with a square matrix A."""
    with running("solve", as_json) as run:
        run.check_outputs([a, b], (output, 1))
        matrix, rhs = run.read("A", a), run.read("b", b, column_as_vector=True)
        options = {"assume_a": assume_a.value, "certify": certify.value}
        result = run.compute("solve", matrix, rhs, accuracy=accuracy, engine=engine, **options)
        run.write({output: {"x": result.x}})
    _finish_solution(run, result, show.solve(result), output)


def _finish_solution(
    run: Run, result: LstsqResult | SolveResult, shown: show.Shown, output: Path | None
) -> None:
    """Show what a solver found, and x itself where it is not saved."""
    facts, rows = shown
    error = f"backward error {result.backward_error:.1e}, tolerance {result.tolerance:.1e}"
    run.finish(
        (facts if output else {**facts, "x": result.x}, rows),
        reached=None if result.converged else error,
        answer=None if output else show.vector(result.x),
    )


@app.command()
def qr(
    a: MatrixFile,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="An .npz file for Q and R; any file with --mode r.")
    ] = None,
    q_file: Annotated[Path | None, typer.Option("--q", metavar="FILE", help="File for Q alone.")] = None,
    r_file: Annotated[Path | None, typer.Option("--r", metavar="FILE", help="File for R alone.")] = None,
    mode: Annotated[Mode, typer.Option(help="Compute Q and R, or R alone.")] = Mode.reduced,
    accuracy: AccuracyOption = None,
    engine: EngineOption = EngineName.auto,
    as_json: JsonOption = False,
) -> None:
    """Factorize A = QR: Q with orthonormal columns, R upper triangular."""
    with running("qr", as_json) as run:
        if mode is Mode.r and q_file is not None:
            raise ValueError("--mode r computes no Q: leave out --q, or use --mode reduced")
        run.check_outputs([a], (output, 1 if mode is Mode.r else 2), (q_file, 1), (r_file, 1))
        result = run.compute("qr", run.read("A", a), mode=mode.value, accuracy=accuracy, engine=engine)
        factors = {"R": result.R} if mode is Mode.r else {"Q": result.Q, "R": result.R}
        run.write({output: factors, q_file: {"Q": result.Q}, r_file: {"R": result.R}})
    reached = None if result.converged else show.certificate(result.certificate)
    run.finish(show.qr(result), reached=reached)


@app.command()
def orth(
    a: MatrixFile,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File for Q.")] = None,
    rcond: RcondOption = None,
    accuracy: AccuracyOption = None,
    engine: EngineOption = EngineName.auto,
    as_json: JsonOption = False,
) -> None:
    """Orthonormal basis of the columns of A; with --rcond of its numerical range."""
    with running("orth", as_json) as run:
        run.check_outputs([a], (output, 1))
        matrix = run.read("A", a)
        q = run.compute("orth", matrix, rcond=rcond, accuracy=accuracy, engine=engine)
        run.write({output: {"Q": q}})
    facts = {"converged": run.missed is None, "columns": q.shape[-1], "rcond": rcond}
    columns = f"{q.shape[-1]}, of {matrix.shape[-1]} in A" + ("" if rcond is None else f" (rcond {rcond:g})")
    run.finish((facts, {"columns": columns}), reached=run.missed)


@app.command()
def svd(
    a: MatrixFile,
    rank: Annotated[int | None, typer.Option(help="How many singular values and vectors.")] = None,
    tol: Annotated[
        float | None, typer.Option(help="As many as make the relative error of the approximation this small.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="An .npz file for U, s and Vh.")
    ] = None,
    accuracy: AccuracyOption = None,
    engine: EngineOption = EngineName.auto,
    as_json: JsonOption = False,
) -> None:
    """Approximate A by a product U diag(s) Vh of low rank."""
    with running("svd", as_json) as run:
        if (rank is None) == (tol is None):
            raise ValueError("give one of --rank and --tol: the rank, or the relative error to reach")
        run.check_outputs([a], (output, 3))
        matrix = run.read("A", a)
        result = run.compute("svd_lowrank", matrix, rank=rank, tol=tol, accuracy=accuracy, engine=engine)
        run.write({output: {"U": result.U, "s": result.s, "Vh": result.Vh}})
    reached = None if result.qr.converged else show.certificate(result.qr.certificate)
    run.finish(show.svd(result), reached=reached)


# --- this machine -----------------------------------------------------------------------------------------

for command in (machine.info, machine.demo, machine.bench, machine.tune):
    app.command()(command)


# --- papers -----------------------------------------------------------------------------------------------

experiments = typer.Typer(no_args_is_help=True, help="Reproduce the figures of a paper on this machine.")
app.add_typer(experiments, name="experiment")


QR_FIGURES = (
    "table3, figure1, figure2, figure3, figure4, figure5, figure6, figure7, figure8, figure9, table4, "
    "overflow, iterations"
)
TSQR_FIGURES = "underflow, products, accuracy, performance, batched"
LU_FIGURES = "figure1, table1, figure2, figure3, table2, figure4, figure5, table3, figure6, iterations"


def _figure_of(names: str) -> Any:
    return typer.Argument(metavar="FIGURE|all", help=f"One of {names}, or all of them.")


ScaleOption = Annotated[
    Scale, typer.Option(help="small: two cores, a minute a figure; paper: its sizes, on a GPU.")
]
OutOption = Annotated[Path, typer.Option(help="Directory for data, pictures and the page.")]
RedrawOption = Annotated[
    bool, typer.Option("--redraw", help="Draw and judge the data in the directory, measure nothing.")
]


@experiments.command("qr-paper")
def qr_paper(
    figure: Annotated[str, _figure_of(QR_FIGURES)],
    scale: ScaleOption = Scale.small,
    out: OutOption = Path("qr-paper"),
    redraw: RedrawOption = False,
) -> None:
    """QR factorization: Zhang, Baharlouei, Wu, HPDC 2020."""
    from neula.papers.qr import QR_PAPER

    _experiment(QR_PAPER, figure, scale, out, redraw)


@experiments.command("tsqr-paper")
def tsqr_paper(
    figure: Annotated[str, _figure_of(TSQR_FIGURES)],
    scale: ScaleOption = Scale.small,
    out: OutOption = Path("tsqr-paper"),
    redraw: RedrawOption = False,
) -> None:
    """TSQR with error correction: Ootomo, Yokota, 2021."""
    from neula.papers.tsqr import TSQR_PAPER

    _experiment(TSQR_PAPER, figure, scale, out, redraw)


@experiments.command("lu-paper")
def lu_paper(
    figure: Annotated[str, _figure_of(LU_FIGURES)],
    scale: ScaleOption = Scale.small,
    out: OutOption = Path("lu-paper"),
    redraw: RedrawOption = False,
    matrices: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            exists=True,
            file_okay=False,
            help="Directory with .mtx or .mtx.gz files of the SuiteSparse matrices of table3.",
        ),
    ] = None,
) -> None:
    """LU factorization with fp16 storage: Lopez, Mary, 2022."""
    from neula.papers.lu import LU_PAPER

    _experiment(LU_PAPER, figure, scale, out, redraw, matrices)


def _experiment(
    paper: Paper, figure: str, scale: Scale, out: Path, redraw: bool, matrices: Path | None = None
) -> None:
    from neula.papers.reproduce import reproduce

    console = Console()
    with running("experiment") as run:
        report = run.progress
        reproduce(
            paper, figure, scale, out, redraw=redraw, matrices=matrices, console=console, progress=report
        )


if __name__ == "__main__":
    main()
