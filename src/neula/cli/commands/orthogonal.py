"""``neula qr``, ``neula tsqr`` and ``neula orth``."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from neula.cli import options as opt
from neula.cli import show
from neula.cli.run import CommandRun, running

if TYPE_CHECKING:
    from neula.io.table import Table
    from neula.pipeline.result import QRResult

Algorithm = StrEnum("Algorithm", ["rgsqrf", "rgsqrf-twice", "rgsqrf-reortho", "cholesky-qr", "householder"])
PanelName = StrEnum("PanelName", ["caqr", "cholesky", "cholesky2", "cholesky32", "householder"])


def qr(
    a: opt.MatrixFile,
    mode: opt.ModeOption = opt.Mode.reduced,
    accuracy: opt.AccuracyOption = None,
    algorithm: Annotated[
        Algorithm | None, typer.Option(help="Run this algorithm only; by default neula tries several.")
    ] = None,
    panel: Annotated[
        PanelName | None, typer.Option(help="Panel at which the recursion of rgsqrf ends.")
    ] = None,
    cutoff: Annotated[int | None, typer.Option(min=1, help="Columns of a panel; 128 in the paper.")] = None,
    engine: opt.EngineOption = opt.EngineName.auto,
    output: opt.FactorsOption = None,
    q_file: opt.QFileOption = None,
    r_file: opt.RFileOption = None,
    decimal: opt.DecimalOption = opt.Decimal.point,
    header: opt.HeaderOption = None,
    missing: opt.MissingOption = opt.Missing.error,
    trace: opt.TraceOption = False,
    as_json: opt.JsonOption = False,
) -> None:
    """Factorize A = QR: Q with orthonormal columns, R upper triangular."""
    with running("qr", as_json) as run:
        if trace:
            opt.check_traced(algorithm and algorithm.value, ("rgsqrf",))
        _check_factors(run, a, mode, output, q_file, r_file)
        table = run.read({"A": a}, decimal=decimal.value, header=header, missing=missing)["A"]
        options = {"algorithm": algorithm, "panel": panel, "cutoff": cutoff, "progress": run.progress}
        result = run.compute("qr", table.values, mode=mode, accuracy=accuracy, engine=engine, **options)
        if trace:
            from neula.cli import tracing

            accuracy = None if algorithm is None else result.accuracy  # a named algorithm is the one shown
            run.steps = tracing.show_qr(table.values, engine.value, panel and panel.value, cutoff, accuracy)
        _write_factors(run, result, table, output, q_file, r_file)
    reached = None if result.converged else show.certificate(result.certificate)
    run.finish(show.qr(result), reached=reached)


def tsqr(
    a: opt.MatrixFile,
    mode: Annotated[
        str,
        typer.Option(
            metavar="reduced|r|MODE",
            help="Compute Q and R, or R alone; or a mode of the slides, as FP16_Cor, the same as --compute.",
        ),
    ] = opt.Mode.reduced.value,
    compute: Annotated[
        str,
        typer.Option(
            metavar="MODE",
            help="auto: the fastest for the accuracy of A. Or the tree of Ootomo and Yokota: fp16_cor, "
            "fp16_nocor, tf32_cor, tf32_nocor, fp32_notc; fp16_slides, tf32_slides: as in the slides.",
        ),
    ] = "auto",
    engine: opt.EngineOption = opt.EngineName.auto,
    output: opt.FactorsOption = None,
    q_file: opt.QFileOption = None,
    r_file: opt.RFileOption = None,
    decimal: opt.DecimalOption = opt.Decimal.point,
    header: opt.HeaderOption = None,
    missing: opt.MissingOption = opt.Missing.error,
    trace: opt.TraceOption = False,
    as_json: opt.JsonOption = False,
) -> None:
    """Factorize A = QR for a tall and skinny A, of at most 256 columns."""
    with running("tsqr", as_json) as run:
        if mode.lower() not in list(opt.Mode):
            compute, mode = mode, opt.Mode.reduced
        compute = compute.lower()
        _check_factors(run, a, opt.Mode(mode.lower()), output, q_file, r_file)
        table = run.read({"A": a}, decimal=decimal.value, header=header, missing=missing)["A"]
        result = run.compute("tsqr", table.values, mode=mode.lower(), compute=compute, engine=engine)
        if trace:
            from neula.cli import tracing

            run.steps = tracing.show_tsqr(table.values, engine.value, compute)
        _write_factors(run, result, table, output, q_file, r_file)
    reached = None if result.converged else show.certificate(result.certificate)
    run.finish(show.qr(result), reached=reached)


def orth(
    a: opt.MatrixFile,
    rcond: opt.RcondOption = None,
    accuracy: opt.AccuracyOption = None,
    engine: opt.EngineOption = opt.EngineName.auto,
    output: Annotated[str | None, opt.output_option("Q")] = None,
    decimal: opt.DecimalOption = opt.Decimal.point,
    header: opt.HeaderOption = None,
    missing: opt.MissingOption = opt.Missing.error,
    as_json: opt.JsonOption = False,
) -> None:
    """Compute an orthonormal basis of the columns of A; with --rcond of its numerical range."""
    with running("orth", as_json) as run:
        run.check([a], (output, 1))
        matrix = run.read({"A": a}, decimal=decimal.value, header=header, missing=missing)["A"].values
        q = run.compute("orth", matrix, rcond=rcond, accuracy=accuracy, engine=engine, progress=run.progress)
        run.write((output, {"Q": q}))
    facts = {"converged": run.missed is None, "columns": q.shape[-1], "rcond": rcond}
    columns = f"{q.shape[-1]}, of {matrix.shape[-1]} in A" + ("" if rcond is None else f" (rcond {rcond:g})")
    run.finish((facts, {"columns": columns}), reached=run.missed)


def _check_factors(
    run: CommandRun, a: str, mode: opt.Mode, output: str | None, q_file: str | None, r_file: str | None
) -> None:
    """Raise before the work if the factors could not be written."""
    if mode is opt.Mode.r and q_file is not None:
        raise ValueError("--mode r computes no Q: leave out --q, or use --mode reduced")
    run.check([a], (output, 1 if mode is opt.Mode.r else 2), (q_file, 1), (r_file, 1))


def _write_factors(
    run: CommandRun, result: QRResult, a: Table, output: str | None, q_file: str | None, r_file: str | None
) -> None:
    """Write Q and R together, and each alone; the columns of R have the names of those of A."""
    r = {"R": replace(a, values=result.R)}
    q = {} if result.Q is None else {"Q": result.Q}
    run.write((output, {**q, **r}), (q_file, q), (r_file, r))
