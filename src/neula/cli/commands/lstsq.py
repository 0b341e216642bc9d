"""``neula lstsq``, with bounds and constraints or without."""

from __future__ import annotations

import math
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from neula.cli import options as opt
from neula.cli import show
from neula.cli.run import CommandRun, Ending, problem

if TYPE_CHECKING:
    import numpy as np

    from neula.io.table import Table

Algorithm = StrEnum("Algorithm", ["cgls", "lsqr", "direct", "normal", "householder", "svd"])
MAX_ITERATIONS = 60  # defaults of ``neula.lstsq``
WITHOUT_BOUNDS = {
    "damp": 0.0,
    "weights": None,
    "sigma": None,
    "rcond": None,
    "certify": "backward",
    "algorithm": None,
    "max_iterations": MAX_ITERATIONS,
}
"""Options that go without bounds only, with what they are by default."""


@problem("the solution x", missing=True)
def lstsq(
    run: CommandRun,
    a: opt.MatrixFile,
    b: opt.RightHandSideFile,
    accuracy: opt.AccuracyOption = None,
    certify: opt.CertifyOption = opt.Certify.backward,
    damp: Annotated[float, opt.option("Minimize ||Ax - b||^2 + damp^2 ||x||^2.")] = 0.0,
    intercept: Annotated[
        bool, opt.option("Add a column of ones to A, before the others; never damped.", "--intercept")
    ] = False,
    rcond: opt.RcondOption = None,
    algorithm: Annotated[
        Algorithm | None, opt.option("Run this algorithm only; by default neula tries several.")
    ] = None,
    max_iterations: Annotated[
        int, opt.option("Largest number of refinement iterations.", min=1)
    ] = MAX_ITERATIONS,
    weights: opt.WeightsOption = None,
    sigma: opt.SigmaOption = None,
    absolute_sigma: opt.AbsoluteSigmaOption = False,
    errors: Annotated[
        bool | None,
        opt.option(
            "Standard errors and confidence intervals; by default of columns that have names.",
            "--errors/--no-errors",
        ),
    ] = None,
    level: Annotated[float, opt.option("Probability of the intervals.", min=0, max=1)] = 0.95,
    nonnegative: Annotated[bool, opt.option("Solve for x >= 0.", "--nonnegative")] = False,
    bounds: Annotated[
        str | None, opt.option("Solve for LO <= x <= HI; inf is no bound.", metavar="LO,HI")
    ] = None,
    constraints: Annotated[
        str | None, opt.option("Files of C and d: solve for Cx = d.", metavar="C,d")
    ] = None,
    report: Annotated[
        Path | None,
        opt.option("File for a page (.html) with coefficients, residuals and spectrum.", metavar="FILE"),
    ] = None,
    stream: opt.StreamOption = False,
    memory: opt.MemoryOption = None,
    trace: opt.TraceOption = False,
) -> Ending:
    """Solve the least-squares problem min ||Ax - b||; with m < n, the minimum-norm solution.

    Columns of tables are chosen by their names: neula lstsq table.csv:x1,x2 table.csv:y --intercept

    An A in a .npy, Parquet or HDF5 file that does not fit into memory is read in blocks, two or three times.
    """
    opt.check_absolute_sigma(absolute_sigma, sigma)
    if trace:
        bounded = {"nonnegative": nonnegative, "bounds": bounds, "constraints": constraints}
        others = {"damp": damp, "weights": weights, "rcond": rcond, **bounded}
        opt.check_traced(algorithm and algorithm.value, ("cgls", "lsqr"), **others)
    c, d = (None, None) if constraints is None else _two_files(constraints)
    run.check([a, b, weights, sigma, c, d], 1)
    if report is not None:
        from neula.cli.bench import check_picture

        check_picture(report, [".html"])
    # These need all of A at once.
    whole = intercept or nonnegative or trace or any((bounds, constraints, report))
    if whole and stream:
        raise ValueError(
            "--stream reads A in blocks, and --intercept, --nonnegative, --bounds, --constraints, "
            "--report and --trace need all of A: leave out one of the two"
        )
    rows = None if whole else run.rows_in_blocks(a, stream=stream, memory=memory)
    files = {"A": a if rows is None else None, "b": b, "weights": weights, "sigma": sigma}
    given = run.read(files) | run.read({"C": c, "d": d}, drops=False)
    table = with_intercept(given["A"]) if intercept else given["A"] if rows is None else rows
    options = {
        "damp": damp,
        "weights": given["weights"].values if weights else None,
        **({"sigma": given["sigma"].values} if sigma else {}),
        **({"intercept": True} if intercept and not (nonnegative or bounds) else {}),
        "rcond": rcond,
        "certify": certify.value,
        "algorithm": algorithm,
        "max_iterations": max_iterations,
    }
    pair = None if c is None else (given["C"].values, given["d"].values)
    function, options = _call_for(options, nonnegative, bounds, pair)
    keywords = {"accuracy": accuracy, "progress": run.progress, **options}
    added = bool(options.get("intercept"))  # by the function
    result = run.compute(function, (given["A"] if added else table).values, given["b"].values, **keywords)
    facts, lines, reached = show.certified(result)
    if errors or (errors is None and table.columns is not None and function == "lstsq"):
        with_errors(facts, lines, result, table, level, absolute=absolute_sigma, all_shown=bool(errors))
    if trace:
        method = algorithm.value if algorithm else "cgls"
        run.trace("show_lstsq", table.values, given["b"].values, run.engine, method, max_iterations)
    run.write({"x": named(result.x, table, given["b"])})
    if report is not None:
        from neula.cli.report import write_report

        write_report(report, table, given["b"].values, result)
    more = getattr(result, "_deficiency", str)()
    return Ending({**facts, "names": table.columns}, lines, reached, more=more)


def _interval(text: str) -> tuple[float, float]:
    """Two numbers with a comma between them.

    >>> _interval("0,inf"), _interval("-1.5, 2")
    ((0.0, inf), (-1.5, 2.0))
    """
    try:
        lower, upper = map(float, text.split(","))
    except ValueError:
        raise ValueError(
            f"--bounds {text!r} is not a pair of numbers: write it like --bounds=0,1 or --bounds=-inf,2.5"
        ) from None
    return lower, upper


def _two_files(text: str) -> tuple[str, str]:
    c, comma, d = text.rpartition(",")
    if not comma or not c or not d:
        raise ValueError(f"--constraints {text!r} does not name two files: write it like C.csv,d.csv")
    return c, d


def _call_for(
    options: dict[str, Any],
    nonnegative: bool,
    bounds: str | None,
    constraints: tuple[np.ndarray, np.ndarray] | None,
) -> tuple[str, dict[str, Any]]:
    if not nonnegative and bounds is None:
        return "lstsq", {**options, "constraints": constraints} if constraints else options
    if nonnegative and bounds is not None:
        raise ValueError("--nonnegative is --bounds=0,inf: leave one of them out")
    if constraints is not None:
        raise ValueError("--constraints do not go together with bounds: leave one of them out")
    for name, default in WITHOUT_BOUNDS.items():
        value = options.get(name, default)
        if value is not default and (hasattr(value, "shape") or value != default):
            raise ValueError(
                f"--{name.replace('_', '-')} does not go together with bounds: leave one of them out"
            )
    return ("nnls", {}) if bounds is None else ("lsq_linear", {"bounds": _interval(bounds)})


INTERCEPT = "intercept"


def with_intercept(a: Table) -> Table:
    """A with a first column of ones."""
    import numpy as np

    matrix = a.values
    if matrix.ndim != 2:
        raise ValueError(f"--intercept adds a column to a matrix, and A has shape {matrix.shape}")
    ones = np.ones((len(matrix), 1), dtype=matrix.dtype)
    names = a.columns or tuple(str(i + 1) for i in range(matrix.shape[1]))
    return replace(a, values=np.hstack([ones, matrix]), columns=(INTERCEPT, *names))


def named(x: np.ndarray, a: Table, b: Table) -> Table:
    """A solution with the names of A's columns, where it has some, before its rows."""
    from neula.io.table import Table

    if a.columns is None or x.ndim > 2:
        return Table(x)
    unnamed = ("x",) if x.ndim == 1 else tuple(str(i + 1) for i in range(x.shape[1]))
    return Table(x, columns=b.columns or unnamed, rows=a.columns)


def with_errors(
    facts: show.Facts,
    rows: show.Labelled,
    result: Any,
    a: Table,
    level: float,
    *,
    absolute: bool,
    all_shown: bool,
) -> None:
    """Add standard errors and confidence intervals to a report, or the reason why there are none."""
    import numpy as np

    try:
        if not hasattr(result, "standard_errors"):
            raise ValueError("solutions with bounds have none")
        errors = np.asarray(result.standard_errors(absolute=absolute))
        of_fit = {name: getattr(result, name) for name in ("degrees_of_freedom", "residual_variance")}
        of_rows: dict[str, Any] = {}
        lower = upper = None
        if not np.iscomplexobj(result.x):  # intervals and R-squared are those of real numbers
            intervals = np.asarray(result.confidence_intervals(level, absolute=absolute))
            lower, upper = np.moveaxis(intervals, -1, 0)
            for name, value in (("t", result.t_values), ("p", result.p_values)):
                of_fit[name] = np.asarray(value(absolute=absolute))
            of_rows = getattr(result._fit, "numbers", dict)()  # nothing if only R was kept
        of_fit["r_squared"] = of_rows.get("r_squared", math.nan)
    except ValueError as why:
        facts["no_standard_errors"], rows["standard errors"] = str(why), f"none: {why}"
        return
    facts |= {"standard_errors": errors, "lower": lower, "upper": upper, "level": level, **of_fit}
    if errors.ndim != 1:
        return
    names = a.columns or tuple(f"x{i + 1}" for i in range(len(errors)))
    lines = show.estimates(names, result.x, errors, lower, upper, level)
    if len(lines) > show.SHORT and not all_shown:
        more = f"{len(lines) - show.SHORT} more: --errors shows all, --json has them"
        lines = {**dict(list(lines.items())[: show.SHORT]), "...": more}
    explained = f"R-squared {of_fit['r_squared']:.4g}, " if lower is not None else ""
    rows["fit"] = f"{explained}{result.degrees_of_freedom:.6g} degrees of freedom"
    rows |= lines
