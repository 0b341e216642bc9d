"""``neula lstsq``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from neula.cli import constrained
from neula.cli import options as opt
from neula.cli.run import running
from neula.cli.solutions import finish_solution, named, with_errors, with_intercept

Algorithm = StrEnum("Algorithm", ["cgls", "lsqr", "direct", "normal", "householder", "svd"])
MAX_ITERATIONS = 60
"""Defaults of ``neula.lstsq``."""


def lstsq(
    a: opt.MatrixFile,
    b: opt.RightHandSideFile,
    accuracy: opt.AccuracyOption = None,
    certify: opt.CertifyOption = opt.Certify.backward,
    damp: Annotated[float, typer.Option(help="Minimize ||Ax - b||^2 + damp^2 ||x||^2.")] = 0.0,
    intercept: Annotated[
        bool,
        typer.Option("--intercept", help="Add a column of ones to A, before the others; never damped."),
    ] = False,
    rcond: opt.RcondOption = None,
    algorithm: Annotated[
        Algorithm | None, typer.Option(help="Force this algorithm; no fallback. The default is a chain.")
    ] = None,
    max_iterations: Annotated[
        int, typer.Option(min=1, help="Largest number of refinement iterations.")
    ] = MAX_ITERATIONS,
    engine: opt.EngineOption = opt.EngineName.auto,
    output: opt.SolutionOption = None,
    weights: opt.WeightsOption = None,
    sigma: opt.SigmaOption = None,
    absolute_sigma: opt.AbsoluteSigmaOption = False,
    errors: Annotated[
        bool | None,
        typer.Option(
            "--errors/--no-errors",
            help="Standard errors and confidence intervals; by default of columns that have names.",
        ),
    ] = None,
    level: Annotated[float, typer.Option(help="Probability of the intervals.")] = 0.95,
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
    decimal: opt.DecimalOption = opt.Decimal.point,
    header: opt.HeaderOption = None,
    missing: opt.MissingOption = opt.Missing.error,
    stream: opt.StreamOption = False,
    memory: opt.MemoryOption = None,
    trace: opt.TraceOption = False,
    as_json: opt.JsonOption = False,
) -> None:
    """Solve the least-squares problem min ||Ax - b||; with m < n, the minimum-norm solution.

    Columns of tables go by their names: neula lstsq table.csv:x1,x2 table.csv:y --intercept

    An A in a .npy, Parquet or HDF5 file that does not fit into memory is read in blocks, two or three times.
    """
    with running("lstsq", as_json) as run:
        opt.check_absolute_sigma(absolute_sigma, sigma)
        if trace:
            bounded = {"nonnegative": nonnegative, "bounds": bounds, "constraints": constraints}
            others = {"damp": damp, "weights": weights, "rcond": rcond, **bounded}
            opt.check_traced(algorithm and algorithm.value, ("cgls", "lsqr"), **others)
        c, d = (None, None) if constraints is None else constrained.two_files(constraints)
        run.check([a, b, weights, sigma, c, d], (output, 1))
        if report is not None:
            from neula.cli.bench import check_picture

            check_picture(report, [".html"])
        whole = (
            intercept or nonnegative or trace or any((bounds, constraints, report))
        )  # what needs all of A at once
        if whole and stream:
            raise ValueError(
                "--stream reads A in blocks, and --intercept, --nonnegative, --bounds, --constraints, "
                "--report and --trace need all of A: leave out one of the two"
            )
        rows = None if whole else run.rows_in_blocks(a, stream=stream, memory=memory)
        files = {"A": a if rows is None else None, "b": b, "weights": weights, "sigma": sigma}
        given = run.read(files, decimal=decimal.value, header=header, missing=missing)
        given |= run.read({"C": c, "d": d}, decimal=decimal.value, header=header)
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
        function, options = constrained.call_for(options, nonnegative, bounds, pair)
        keywords = {"accuracy": accuracy, "engine": engine, "progress": run.progress, **options}
        added = bool(options.get("intercept"))  # by the function
        result = run.compute(function, (given["A"] if added else table).values, given["b"].values, **keywords)
        shown = constrained.shown(result)
        if errors or (errors is None and table.columns is not None and function == "lstsq"):
            shown = with_errors(shown, result, table, level, absolute=absolute_sigma, all_shown=bool(errors))
        if trace:
            from neula.cli import tracing

            method = algorithm.value if algorithm else "cgls"
            run.steps = tracing.show_lstsq(
                table.values, given["b"].values, engine.value, method, max_iterations
            )
        run.write((output, {"x": named(result.x, table, given["b"])}))
        if report is not None:
            from neula.cli.report import write_report

            write_report(report, table, given["b"].values, result)
    finish_solution(run, result, shown, table)
