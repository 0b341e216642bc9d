"""The main job on real data and on a realistic large problem, side by side with SciPy and PyTorch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.linalg
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from neula.cli import gravity
from neula.cli.fitting import POINTS, FitPicture
from neula.cli.fitting import draw as draw_fit
from neula.cli.gravity import draw
from neula.io.datasets import SURVEYING_NAMES, log_relative_error, nist, nist_names, nist_nonlinear, surveying
from neula.papers.errors import optimality
from neula.papers.measuring import median_seconds, timed
from neula.pipeline.progress import Progress
from neula.pipeline.result import AccuracyWarning, LstsqResult
from neula.problems.least_squares.lstsq import lstsq
from neula.problems.nonlinear.curve_fit import curve_fit

HOST_MAX_DEGREE = 60
"""Beyond it SciPy, and on a machine with a GPU every solver on the CPU, is left out: minutes, gigabytes."""
FITTED = "rat43"
SLOW = 5.0  # seconds from which one run is enough to time a solver


@dataclass(frozen=True)
class _Measurement:
    solver: str
    answer: Any = None
    seconds: float = math.inf
    failure: str = ""

    @property
    def x(self) -> torch.Tensor:
        return torch.as_tensor(
            self.answer.x if isinstance(self.answer, LstsqResult) else self.answer, device="cpu"
        )


def run_demo(
    out: Path, *, degree: int = 40, console: Console, progress: Progress = lambda stage, part: None
) -> None:
    """Solve real and realistic least-squares problems and compare with SciPy and PyTorch in the same run.

    The pictures ``fit.png`` and ``gravity.png`` go to the folder ``out``. The gravity field of a highest
    degree L has (L + 1)^2 - 4 unknowns, and ten times as many observations.
    """
    gravity.coefficient_count(degree)
    out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with warnings.catch_warnings():
        # The tables say what is certified and what is not.
        warnings.simplefilter("ignore", AccuracyWarning)
        progress("NIST reference data", 0.0)
        _show(console, progress, _nist_table())
        progress("surveying problems", 0.0)
        _show(console, progress, _surveying_table())
        progress("a non-linear fit", 0.0)
        _show(console, progress, *_fit_picture(out / "fit.png"))
        progress(f"simulating a gravity mission, field to degree {degree}", 0.0)
        problem = gravity.gravity_problem(degree, device=device)
        solvers = _gravity_solvers(degree, device)
        measurements = [_measure(problem, *solver, progress) for solver in solvers]
        progress("comparing the gravity fields", 0.0)
        _show(console, progress, _solution(problem, measurements[0]), _comparison(problem, measurements))
        progress("drawing the gravity field", 0.0)
        x, path = measurements[0].x, out / "gravity.png"
        _show(console, progress, _drawn(lambda: draw(problem, x, path), path))


def _show(console: Console, progress: Progress, *things: Table | str) -> None:
    """Print where the progress bar was."""
    progress("", 1.0)
    for thing in things:
        if isinstance(thing, str):
            console.print(escape(thing), soft_wrap=True, highlight=False)
        else:
            console.print(thing, "")


def _nist_table() -> Table:
    title, found = "correct digits of the worst coefficient", ("neula", "scipy", "torch gels", "certified")
    table = _table(f"NIST reference data: {title}", "set", "m x n", numbers=found)
    table.caption = "certified: measured backward error of neula within tolerance"
    for problem in map(nist, nist_names()):
        result, answers = _three_answers(problem.A, problem.b)
        digits = (f"{log_relative_error(x, problem.certified):.1f}" for x in answers.values())
        table.add_row(problem.name, _shape(problem.A), *digits, _yes(result.converged))
    return table


def _three_answers(A: np.ndarray, b: np.ndarray) -> tuple[LstsqResult, dict[str, Any]]:
    """The result of neula, and solutions by library."""
    result = lstsq(A, b)
    return result, {"neula": result.x, "scipy": scipy.linalg.lstsq(A, b)[0], "torch gels": _gels(A, b)}


def _surveying_table() -> Table:
    headings, numbers = ("problem", "m x n", "solver"), ("||b - A x||", "optimality", "certified")
    table = _table("Surveying problems of Paige and Saunders", *headings, numbers=numbers)
    table.caption = "optimality: ||A^T r|| / (||A|| ||r||), zero for the exact solution"
    for name in SURVEYING_NAMES:
        A, b = surveying(name)
        result, answers = _three_answers(A, b)
        for solver, x in answers.items():
            tensors = (torch.as_tensor(array, device="cpu") for array in (A, b, x))
            evidence = f"{np.linalg.norm(b - A @ np.asarray(x)):.10f}", f"{optimality(*tensors):.1e}"
            certified = _yes(result.converged) if solver == "neula" else ""
            table.add_row(name, _shape(A), solver, *evidence, certified)
        table.add_section()
    return table


def _fit_picture(path: Path) -> tuple[str, str]:
    """Fit and draw a growth curve of NIST's from the first start, with its band; report on both."""
    problem = nist_nonlinear(FITTED)
    formula = problem.formula

    def model(x: np.ndarray, *b: float) -> Any:
        return formula({"x": x, **dict(zip(problem.parameters, b, strict=True))})

    x = problem.predictors["x"]
    fit = curve_fit(model, x, problem.y, p0=problem.starts[0])
    digits = log_relative_error(fit.popt, problem.certified)
    certified = "certified" if fit.converged else "NOT certified"
    grid = np.linspace(x.min(), x.max(), POINTS)
    curve = (grid, *fit.band(grid))
    picture = FitPicture(
        formula.text, ("x", "y"), (x, problem.y), problem.y - problem.predict(fit.popt), curve, 0.95
    )
    text = f"NIST's {problem.name}, from the first start: {digits:.1f} correct digits, {certified}"
    return text, _drawn(lambda: draw_fit(path, picture), path)


def _gravity_solvers(degree: int, device: str) -> list[tuple[str, str]]:
    """Library and device of the solvers to compare, neula first."""
    solvers = [("neula", device), ("torch gels", device)]
    if degree <= HOST_MAX_DEGREE:
        solvers += [("torch gels", "cpu")] * (device != "cpu") + [("scipy", "cpu")]
    return solvers


def _measure(problem: gravity.GravityProblem, library: str, device: str, progress: Progress) -> _Measurement:
    name = f"{library} ({device})"
    progress(f"gravity field by {name}", 0.0)
    A, b = problem.A.to(device), problem.b.to(device)
    solve: dict[str, Callable[[], Any]] = {
        "neula": lambda: lstsq(A, b, progress=progress),
        "torch gels": lambda: _gels(A, b),
        "scipy": lambda: scipy.linalg.lstsq(A.numpy(), b.numpy())[0],
    }
    try:
        return _Measurement(name, *_timed(solve[library]))
    except RuntimeError as error:
        # cuSOLVER counts elements in 32 bits: it refuses what neula solves.
        if library == "neula":
            raise
        return _Measurement(name, failure=str(error).split(",")[0])


def _timed(solve: Callable[[], Any], repeats: int = 3) -> tuple[Any, float]:
    """An answer and its time: the median after a warm-up, or the only run of a slow solver."""
    answer, warm_up = timed(solve)
    if warm_up > SLOW:
        return answer, warm_up
    return answer, median_seconds(solve, repeats, warmup=0)


def _solution(problem: gravity.GravityProblem, ours: _Measurement) -> Table:
    """The solution of the gravity field, with its attempts and evidence."""
    result = ours.answer
    gigabytes = problem.A.nbytes / 1e9
    grid = Table.grid(padding=(0, 2))
    grid.title = "The Earth's gravity field from a simulated satellite mission, by neula.lstsq"
    grid.title_justify = "left"
    rows = {
        "matrix": f"{_shape(problem.A)} float64, {gigabytes:.2f} GB, {_machine(problem.A.device)}",
        "engine": result.engine,
        "method": result.factorization,
        "tried": "\n".join(
            f"{'accepted' if attempt.accepted else 'rejected'}: {attempt.method} ({attempt.reason})"
            for attempt in result.attempts
        ),
        "iterations": str(result.iterations),
        "certificate": f"backward error {result.backward_error:.1e} (tolerance {result.tolerance:.1e}): "
        + ("certified" if result.converged else "NOT certified"),
        "geoid": f"rms {gravity.geoid_rms(problem.truth):.1f} m, "
        f"recovered to {100 * gravity.geoid_rms(ours.x.cpu() - problem.truth.cpu()):.1f} cm",
    }
    for label, text in rows.items():
        grid.add_row(label, escape(text))
    return grid


def _comparison(problem: gravity.GravityProblem, measurements: list[_Measurement]) -> Table:
    numbers = ("time (s)", "time / neula", "optimality", "rms error")
    table = _table("Gravity field: neula and its peers", "solver", numbers=numbers)
    notes = ["rms error of the coefficients: the noise of the observations"]
    for measured in measurements:
        if measured.failure:
            table.add_row(measured.solver, "failed", "", "", "")
            notes.append(f"{measured.solver} failed: {escape(measured.failure)}")
            continue
        x = measured.x.to(problem.A.device)
        error = float((x - problem.truth).square().mean().sqrt())
        times = f"{measured.seconds:.3f}", f"{measured.seconds / measurements[0].seconds:.1f}"
        found = f"{optimality(problem.A, problem.b, x):.1e}", f"{error:.3e}"
        table.add_row(measured.solver, *times, *found)
    table.caption = "\n".join(notes)
    return table


def _drawn(drawing: Callable[[], None], path: Path) -> str:
    """Without matplotlib there is no picture."""
    try:
        drawing()
    except ImportError as error:
        return f"No picture: {error}"
    return f"Picture: {path}"


def _gels(A: Any, b: Any) -> torch.Tensor:
    left, right = (torch.as_tensor(x, device="cpu") for x in (A, b[:, None]))
    return torch.linalg.lstsq(left, right, driver="gels").solution[:, 0]


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU with {torch.get_num_threads()} threads"


def _table(title: str, *headings: str, numbers: Sequence[str]) -> Table:
    """A table with texts in the first columns, and numbers in the others."""
    table = Table(*headings, title=title, title_justify="left", caption_justify="left")
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def _shape(A: Any) -> str:
    return " x ".join(f"{size:,}" for size in A.shape)


def _yes(certified: bool) -> str:
    return "yes" if certified else "no"
