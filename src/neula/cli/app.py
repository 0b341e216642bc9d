"""The command line: files in, a certified answer out.

Exit codes: 0 solved and certified, 1 solved but not to the accuracy asked for or without a sure digit, 2 bad
input, 70 a defect of neula itself, 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
import scipy
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import neula
from neula import engines
from neula.certificates.forward_error import SURE
from neula.cli import bench as benchmarks
from neula.cli.demo import run_demo
from neula.io.files import FileError, check_output, read_matrix, split_key, write_files
from neula.papers.data import Data
from neula.papers.drawing import new_canvas
from neula.papers.figure import Scale
from neula.papers.lu import LU_PAPER
from neula.papers.qr import QR_PAPER
from neula.papers.reproduce import Paper, reproduce
from neula.papers.tsqr import TSQR_PAPER
from neula.pipeline.result import AccuracyWarning, Attempt, LstsqResult, QRResult, SolveResult, SVDResult

CERTIFIED, NOT_CERTIFIED, BAD_INPUT, DEFECT, INTERRUPTED = 0, 1, 2, 70, 130
SHORT = 20
"""Solutions of at most so many numbers are printed when no output file is given."""

PICTURES = (".svg", ".png", ".pdf")

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


class Accuracy(StrEnum):
    """Accuracy that the answer must have."""

    fp16 = "fp16"
    bf16 = "bf16"
    tf32 = "tf32"
    fp32 = "fp32"
    fp64 = "fp64"


class Certify(StrEnum):
    """What is refined until it is at the level of the accuracy."""

    backward = "backward"
    forward = "forward"


class EngineName(StrEnum):
    """What multiplies."""

    auto = "auto"
    cpu = "cpu"
    emulated = "emulated"
    cuda = "cuda"


class Structure(StrEnum):
    """What ``neula solve`` may take for granted."""

    gen = "gen"
    pos = "pos"


class BenchmarkName(StrEnum):
    """What ``neula bench`` solves."""

    qr = "qr"
    lstsq = "lstsq"
    svd = "svd"
    gemm = "gemm"


class Mode(StrEnum):
    """Which factors ``neula qr`` computes."""

    reduced = "reduced"
    r = "r"


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
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout and everything else on stderr.")
]


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


def _figure_help(paper: Paper) -> str:
    return "One of " + ", ".join(figure.name for figure in paper.figures) + ", or all of them."


# --- commands ---------------------------------------------------------------------------------------------


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
    as_json: JsonOption = False,
) -> None:
    """Solve the least-squares problem min ||Ax - b||; with m < n, the solution of minimum norm."""
    with _running("lstsq", as_json) as run:
        run.check_outputs([a, b, weights], (output, 1))
        matrix, rhs = run.read("A", a), run.read("b", b, column_as_vector=True)
        row_weights = None if weights is None else run.read("weights", weights, column_as_vector=True)
        result: LstsqResult = run.compute(
            lambda neula, **common: neula.lstsq(
                matrix, rhs, damp=damp, weights=row_weights, rcond=rcond, certify=certify.value, **common
            ),
            accuracy,
            engine,
        )
        run.write({output: {"x": result.x}})
    facts: dict[str, Any] = {
        "converged": result.converged,
        "accuracy": result.accuracy,
        "engine": result.engine,
        "factorization": result.factorization,
        "iterations": result.iterations,
        "backward_error": result.backward_error,
        "tolerance": result.tolerance,
        **_digits_facts(result),
        "optimality": result.optimality,
        "residual_norm": result.residual_norm,
        "rank": result.rank,
        "history": result.history,
        "attempts": result.attempts,
    }
    rank, full = result.rank, matrix.shape[-1] if damp else min(matrix.shape[-2:])
    rows = {
        "engine": result.engine,
        **_attempt_rows(result.attempts),
        "iterations": str(result.iterations),
        **_digits_rows(result),
        "residual norm": _norms(result.residual_norm),
        "rank": f"{rank} of {full}" + (", solution of minimum norm" if rank < full else ""),
    }
    _finish_solution(run, result, facts, rows, output)


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
    with _running("solve", as_json) as run:
        run.check_outputs([a, b], (output, 1))
        matrix, rhs = run.read("A", a), run.read("b", b, column_as_vector=True)
        result: SolveResult = run.compute(
            lambda neula, **common: neula.solve(
                matrix, rhs, assume_a=assume_a.value, certify=certify.value, **common
            ),
            accuracy,
            engine,
        )
        run.write({output: {"x": result.x}})
    facts: dict[str, Any] = {
        "converged": result.converged,
        "accuracy": result.accuracy,
        "engine": result.engine,
        "method": result.method,
        "iterations": result.iterations,
        "backward_error": result.backward_error,
        "tolerance": result.tolerance,
        **_digits_facts(result),
        "growth": result.growth,
        "history": result.history,
        "attempts": result.attempts,
    }
    rows = {
        "engine": result.engine,
        **_attempt_rows(result.attempts),
        "iterations": str(result.iterations),
        **_digits_rows(result),
        "growth": f"{result.growth:.1e}",
    }
    _finish_solution(run, result, facts, rows, output)


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
    with _running("qr", as_json) as run:
        if mode is Mode.r and q_file is not None:
            raise ValueError("--mode r computes no Q: leave out --q, or use --mode reduced")
        run.check_outputs([a], (output, 1 if mode is Mode.r else 2), (q_file, 1), (r_file, 1))
        matrix = run.read("A", a)
        result: QRResult = run.compute(
            lambda neula, **common: neula.qr(matrix, mode.value, **common), accuracy, engine
        )
        factors = {"R": result.R} if mode is Mode.r else {"Q": result.Q, "R": result.R}
        run.write({output: factors, q_file: {"Q": result.Q}, r_file: {"R": result.R}})
    _finish_qr(run, result)


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
    with _running("orth", as_json) as run:
        run.check_outputs([a], (output, 1))
        matrix = run.read("A", a)
        q = run.compute(lambda neula, **common: neula.orth(matrix, rcond, **common), accuracy, engine)
        run.write({output: {"Q": q}})
    facts = {"converged": run.missed is None, "columns": q.shape[-1], "rcond": rcond}
    columns = f"{q.shape[-1]}, of {matrix.shape[-1]} in A" + ("" if rcond is None else f" (rcond {rcond:g})")
    run.finish(facts, {"columns": columns}, reached=run.missed)


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
    with _running("svd", as_json) as run:
        if (rank is None) == (tol is None):
            raise ValueError("give one of --rank and --tol: the rank, or the relative error to reach")
        run.check_outputs([a], (output, 3))
        matrix = run.read("A", a)
        result: SVDResult = run.compute(
            lambda neula, **common: neula.svd_lowrank(matrix, rank, tol=tol, **common), accuracy, engine
        )
        run.write({output: {"U": result.U, "s": result.s, "Vh": result.Vh}})
    facts = {
        **_qr_facts(result.qr),
        "rank": result.s.shape[-1],
        "relative_error": result.relative_error,
        "s": result.s,
    }
    rows = {
        **_qr_rows(result.qr),
        "rank": str(result.s.shape[-1]),
        "relative error": f"{result.relative_error:.1e}",
        "singular values": _numbers(result.s),
    }
    run.finish(facts, rows, reached=None if result.qr.converged else _certificate_text(result.qr.certificate))


@app.command()
def info(as_json: JsonOption = False) -> None:
    """Show what this machine offers: engines, formats, measured rates."""
    with _running("info", as_json) as run:
        run.progress("measuring the engines", 0.0)
        offers = engines.describe()
    versions = _versions()
    if as_json:
        _print_json({"command": "info", "versions": versions, "engines": offers})
        return
    console = Console(highlight=False, markup=False)
    console.print(_grid(versions))
    console.print(_engine_table(offers))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory for the pictures.")] = Path("demo-output"),
    degree: Annotated[int, typer.Option(help="Degree of the gravity field.")] = 40,
) -> None:
    """Run the main job on real data and on a large realistic problem, beside scipy and torch."""
    with _guarded("demo", as_json=False, err=Console(stderr=True, highlight=False, markup=False)):
        run_demo(out, degree=degree, console=Console())


@app.command()
def bench(
    problems: Annotated[
        list[BenchmarkName] | None, typer.Argument(metavar="[qr|lstsq|svd|gemm]...", help="All by default.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for the results as JSON and CSV.")] = None,
    draw: Annotated[
        Path | None, typer.Option(help="File for a picture of the results (.svg, .png or .pdf).")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Directory of results to show and draw: nothing is measured.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Measure the CPU even if there is a GPU.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure neula beside the direct solvers of torch: time, rate and accuracy, on this machine.

    Without a GPU the shapes are small.
    """
    with _running("bench", as_json) as run:
        if data is not None and (problems or out):
            raise ValueError("--data measures nothing: leave out the problems and --out")
        if draw is not None:
            _check_picture(draw)
        device = torch.device("cuda" if torch.cuda.is_available() and not cpu else "cpu")
        names = [problem.value for problem in problems or BenchmarkName]
        results = benchmarks.read(data) if data else [_measured(name, device, run) for name in names]
        paths = [str(benchmarks.write(result, out)) for result in results] if out else []
        if draw is not None:
            draw.parent.mkdir(parents=True, exist_ok=True)
            benchmarks.draw(results).savefig(draw, dpi=160)
            paths.append(str(draw))
    if as_json:
        _print_json({"command": "bench", "results": results, "outputs": paths})
        return
    console = Console(highlight=False, markup=False)
    for result in results:
        console.print(benchmarks.table(result))
    for path in paths:
        console.print(f"saved to {path}")


def _measured(name: str, device: torch.device, run: _Run) -> Data:
    run.progress(f"measuring {name}", 0.0)
    return benchmarks.run(name, device, lambda row: run.say(f"{name} {benchmarks.line(row)}"))


def _check_picture(path: Path) -> None:
    """Notice before the work that a picture could not be drawn."""
    if path.suffix not in PICTURES:
        raise ValueError(f"{path}: a picture is one of {', '.join(PICTURES)}; choose another name")
    try:
        new_canvas(1.0, 1.0)
    except ImportError as error:
        raise ValueError(str(error)) from None


experiments = typer.Typer(no_args_is_help=True, help="Reproduce the figures of a paper on this machine.")
app.add_typer(experiments, name="experiment")


ScaleOption = Annotated[
    Scale, typer.Option(help="small: two cores, a minute a figure; paper: its sizes, on a GPU.")
]
OutOption = Annotated[Path, typer.Option(help="Directory for data, pictures and the page.")]
RedrawOption = Annotated[
    bool, typer.Option("--redraw", help="Draw and judge the data in the directory, measure nothing.")
]


@experiments.command("qr-paper")
def qr_paper(
    figure: Annotated[str, typer.Argument(metavar="FIGURE|all", help=_figure_help(QR_PAPER))],
    scale: ScaleOption = Scale.small,
    out: OutOption = Path("qr-paper"),
    redraw: RedrawOption = False,
) -> None:
    """QR factorization: Zhang, Baharlouei, Wu, HPDC 2020."""
    _experiment(QR_PAPER, figure, scale, out, redraw)


@experiments.command("tsqr-paper")
def tsqr_paper(
    figure: Annotated[str, typer.Argument(metavar="FIGURE|all", help=_figure_help(TSQR_PAPER))],
    scale: ScaleOption = Scale.small,
    out: OutOption = Path("tsqr-paper"),
    redraw: RedrawOption = False,
) -> None:
    """TSQR with error correction: Ootomo, Yokota, 2021."""
    _experiment(TSQR_PAPER, figure, scale, out, redraw)


@experiments.command("lu-paper")
def lu_paper(
    figure: Annotated[str, typer.Argument(metavar="FIGURE|all", help=_figure_help(LU_PAPER))],
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
    _experiment(LU_PAPER, figure, scale, out, redraw, matrices)


def _experiment(
    paper: Paper, figure: str, scale: Scale, out: Path, redraw: bool, matrices: Path | None = None
) -> None:
    err = Console(stderr=True, highlight=False, markup=False)
    with _guarded("experiment", as_json=False, err=err), _Progress(err) as progress:
        reproduce(
            paper, figure, scale, out, redraw=redraw, matrices=matrices, console=Console(), progress=progress
        )


# --- running a command ------------------------------------------------------------------------------------


class _Progress:
    """Reports ``progress(stage, fraction)``: a bar on a terminal, otherwise lines for what takes long."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task: Any = None
        self._start = time.perf_counter()
        self._next_line = 2.0

    def __enter__(self) -> _Progress:
        if sys.stderr.isatty() and self._console.is_interactive:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("", total=None)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, stage: str, fraction: float) -> None:
        if self._bar is None:
            self._print(stage, fraction)
        elif not stage:
            # Something is about to be printed where the bar is.
            self._bar.stop()
        else:
            self._bar.start()
            # A stage that has not moved yet may never tell more: its bar pulses.
            total = 1.0 if fraction > 0 else None
            self._bar.update(self._task, description=stage, completed=fraction, total=total)

    def _print(self, stage: str, fraction: float) -> None:
        elapsed = time.perf_counter() - self._start
        if stage and elapsed >= self._next_line:
            self._next_line = 2 * elapsed
            self._console.print(f"neula: {stage}, {fraction:.0%} after {elapsed:.0f} s", soft_wrap=True)


class _Run:
    """What the commands share: reading, computing, writing, and showing how it went."""

    def __init__(self, command: str, as_json: bool, err: Console, progress: _Progress) -> None:
        self.command = command
        self.as_json = as_json
        self.progress = progress
        self._err = err
        self._inputs: dict[str, dict[str, Any]] = {}
        self._outputs: dict[str, list[str]] = {}
        self._seconds: dict[str, float] = {}
        self.missed: str | None = None
        """What a warning said that the accuracy, or the rank, was missed."""

    def check_outputs(self, inputs: Sequence[str | None], *outputs: tuple[Path | None, int]) -> None:
        """Notice before the work that a result could not be saved, or would replace the input."""
        taken = {split_key(name)[0].resolve(): name for name in inputs if name is not None}
        for path, arrays in outputs:
            if path is None:
                continue
            check_output(path, arrays=arrays)
            if path.resolve() in taken:
                raise FileError(f"{path}: would replace {taken[path.resolve()]}; choose another output file")
            taken[path.resolve()] = f"another output, {path}"

    def read(self, name: str, argument: str, *, column_as_vector: bool = False) -> np.ndarray:
        """Read the file of an argument."""
        with self._timed("read"):
            self.progress(f"reading {argument}", 0.0)
            path, key = split_key(argument)
            array = read_matrix(path, key=key, column_as_vector=column_as_vector, message=self.say)
        self._inputs[name] = {"file": argument, "shape": array.shape, "dtype": str(array.dtype)}
        return array

    def compute(self, solve: Callable[..., Any], accuracy: Accuracy | None, engine: EngineName) -> Any:
        """Call ``solve(neula, accuracy=..., engine=..., progress=...)``."""
        with self._timed("compute"), self._noticing():
            self.progress("starting", 0.0)
            wanted = None if accuracy is None else accuracy.value
            return solve(neula, accuracy=wanted, engine=engine.value, progress=self.progress)

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        """Keep an AccuracyWarning for the last line, whatever filters the user has set; show all others."""
        with warnings.catch_warnings():
            show_others = warnings.showwarning

            def show(message: Warning | str, category: type[Warning], *place: Any) -> None:
                if issubclass(category, AccuracyWarning):
                    self.missed = " ".join(str(message).split())
                else:
                    show_others(message, category, *place)

            warnings.simplefilter("always", AccuracyWarning)
            warnings.showwarning = show  # type: ignore[assignment]
            yield

    def write(self, contents: Mapping[Path | None, Mapping[str, np.ndarray]]) -> None:
        """Write the arrays to the files that were asked for, all or none."""
        wanted = {path: arrays for path, arrays in contents.items() if path is not None}
        if wanted:
            with self._timed("write"):
                self.progress("writing", 0.0)
                write_files(wanted)
        self._outputs = {str(path): list(arrays) for path, arrays in wanted.items()}

    def say(self, text: str) -> None:
        """Tell something on stderr."""
        self._err.print(f"neula: {text}", soft_wrap=True)

    def finish(
        self,
        facts: Mapping[str, Any],
        rows: Mapping[str, str],
        *,
        reached: str | None,
        answer: str | None = None,
    ) -> NoReturn:
        """Show the result and end.

        Parameters
        ----------
        facts : mapping
            The JSON object, but for what every command has.
        rows : mapping
            The summary for people.
        reached : str or None
            How far it got, when the result is not certified.
        answer : str, optional
            Printed below the summary.
        """
        if self.as_json:
            common = {"command": self.command, "inputs": self._inputs, "outputs": self._outputs}
            _print_json({**common, **facts, "seconds": self._seconds})
        else:
            self._print_summary(rows, certified=reached is None)
            if answer is not None:
                print(answer)
        if reached is not None:
            saved = "; the best that was found is in " + ", ".join(self._outputs) if self._outputs else ""
            self.say((self.missed or f"not the accuracy asked for: {reached}") + saved)
        raise typer.Exit(CERTIFIED if reached is None else NOT_CERTIFIED)

    def _print_summary(self, rows: Mapping[str, str], *, certified: bool) -> None:
        inputs = {name: f"{_shape_text(given)}  {given['file']}" for name, given in self._inputs.items()}
        outputs = {", ".join(names): f"saved to {path}" for path, names in self._outputs.items()}
        seconds = {"time": ", ".join(f"{name} {_time_text(value)}" for name, value in self._seconds.items())}
        console = Console(highlight=False, markup=False)
        verdict, style = ("certified", "bold green") if certified else ("NOT certified", "bold yellow")
        console.print(Text.assemble((f"neula {self.command}", "bold"), ": ", (verdict, style)))
        console.print(_grid({**inputs, **rows, **seconds, **outputs}))

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start


@contextmanager
def _running(command: str, as_json: bool) -> Iterator[_Run]:
    """Show progress and turn errors into a line on stderr and an exit code."""
    err = Console(stderr=True, highlight=False, markup=False)
    with _guarded(command, as_json, err), _Progress(err) as progress:
        yield _Run(command, as_json, err, progress)


@contextmanager
def _guarded(command: str, as_json: bool, err: Console) -> Iterator[None]:
    try:
        with _warnings_in_one_line(err):
            yield
    except KeyboardInterrupt:
        err.print("neula: interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        if isinstance(error, (ValueError, TypeError, ArithmeticError, OSError)):
            text = " ".join(str(error).split())
        elif _is_out_of_memory(error):
            text = f"out of memory ({error}); use a smaller matrix, a narrower dtype or a larger machine"
        else:
            raise
        err.print(f"neula: error: {text}", soft_wrap=True)
        if as_json:
            _print_json({"command": command, "error": text})
        raise typer.Exit(BAD_INPUT) from None


@contextmanager
def _warnings_in_one_line(err: Console) -> Iterator[None]:
    """Show warnings without the source line."""

    def show(message: Warning | str, *_: object) -> None:
        err.print(f"neula: warning: {message}", soft_wrap=True)

    with warnings.catch_warnings():
        warnings.showwarning = show  # type: ignore[assignment]
        yield


def _is_out_of_memory(error: Exception) -> bool:
    # torch raises its own class on a GPU and a plain RuntimeError on the CPU.
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )


# --- what is shown ----------------------------------------------------------------------------------------


def _finish_solution(
    run: _Run,
    result: LstsqResult | SolveResult,
    facts: Mapping[str, Any],
    rows: Mapping[str, str],
    output: Path | None,
) -> NoReturn:
    """Show what a solver found, and x itself where it is not saved."""
    error = f"backward error {result.backward_error:.1e}, tolerance {result.tolerance:.1e}"
    run.finish(
        facts if output else {**facts, "x": result.x},
        rows,
        reached=None if result.converged else error,
        answer=None if output else _solution_text(result.x),
    )


def _digits_facts(result: LstsqResult | SolveResult) -> dict[str, float]:
    return {
        "condition": result.condition,
        "forward_error": result.forward_error,
        "digits": result.digits,
    }


def _digits_rows(result: LstsqResult | SolveResult) -> dict[str, str]:
    error = result.forward_error
    sure = f"{result.digits:.1f} are sure" if error <= SURE else "none is sure"
    if error <= np.finfo(result.x.dtype).eps / 2:
        sure = "all are sure"
    return {
        "backward error": f"{result.backward_error:.1e} (tolerance {result.tolerance:.1e})",
        "condition": f"{result.condition:.1e}",
        "digits of x": f"{sure} (forward error {error:.1e})",
    }


def _finish_qr(run: _Run, result: QRResult) -> NoReturn:
    reached = None if result.converged else _certificate_text(result.certificate)
    run.finish(_qr_facts(result), _qr_rows(result), reached=reached)


def _qr_facts(result: QRResult) -> dict[str, Any]:
    return {
        "converged": result.converged,
        "accuracy": result.accuracy,
        "engine": result.engine,
        "certificate": result.certificate,
        "attempts": result.attempts,
    }


def _qr_rows(result: QRResult) -> dict[str, str]:
    return {"engine": result.engine, **_attempt_rows(result.attempts)}


def _certificate_text(certificate: Any) -> str:
    return "; ".join(map(str, certificate)) if isinstance(certificate, tuple) else str(certificate)


def _attempt_rows(attempts: Sequence[Attempt]) -> dict[str, str]:
    verdicts = ("rejected", "accepted")
    lines = [f"{attempt.method}: {verdicts[attempt.accepted]}, {attempt.reason}" for attempt in attempts]
    return {"tried": "\n".join(lines)}


def _norms(residual_norm: Any) -> str:
    return _numbers(np.atleast_1d(residual_norm))


def _numbers(values: np.ndarray, most: int = 8) -> str:
    flat = values.reshape(-1)
    return " ".join(f"{value:.4g}" for value in flat[:most]) + (" ..." if flat.size > most else "")


def _solution_text(x: np.ndarray) -> str:
    if x.size > SHORT:
        return f"x has {x.size} entries; save them with -o x.npy"
    # str() of a NumPy scalar has as many digits as bring back the same number.
    return "\n".join(" ".join(map(str, row)) for row in x.reshape(len(x), -1))


def _shape_text(given: Mapping[str, Any]) -> str:
    return " x ".join(map(str, given["shape"])) + f" {given['dtype']}"


def _time_text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{1000 * seconds:.2g} ms"


def _grid(rows: Mapping[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(f"  {name}", value)
    return grid


def _versions() -> dict[str, str]:
    packages = {package.__name__: package.__version__ for package in (neula, torch, np, scipy)}
    threads = f"{torch.get_num_threads()} of {os.cpu_count()} cores"
    return {**packages, "python": platform.python_version(), "threads": threads}


def _engine_table(offers: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("engine", "device", "format", "rate", "note")
    table.columns[3].justify = "right"
    for engine in offers:
        device = engine["device"] if engine["available"] else "not available"
        table.add_row(engine["engine"], device, "", "", engine["note"], style="bold")
        for name, offer in engine["formats"].items():
            table.add_row("", "", name, _rate_text(offer["rate_gflops"]), offer["note"])
    return table


def _rate_text(gflops: float | None) -> str:
    if gflops is None:
        return ""
    return f"{gflops / 1000:.3g} TFLOP/s" if gflops >= 1000 else f"{gflops:.3g} GFLOP/s"


def _print_json(value: Mapping[str, Any]) -> None:
    print(json.dumps(_plain(value), allow_nan=False))


def _plain(value: Any) -> Any:
    """Reduce a result to what JSON has; NaN and infinities become null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


if __name__ == "__main__":
    main()
