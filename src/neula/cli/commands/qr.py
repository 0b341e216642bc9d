"""``neula qr``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from neula.cli import options as opt
from neula.cli import show, tracing
from neula.cli.orthogonal import check_factors, write_factors
from neula.cli.run import running

Algorithm = StrEnum("Algorithm", ["rgsqrf", "rgsqrf-twice", "rgsqrf-reortho", "cholesky-qr", "householder"])
PanelName = StrEnum("PanelName", ["caqr", "cholesky", "cholesky2", "cholesky32", "householder"])


def qr(
    a: opt.MatrixFile,
    mode: opt.ModeOption = opt.Mode.reduced,
    accuracy: opt.AccuracyOption = None,
    algorithm: Annotated[
        Algorithm | None, typer.Option(help="Force this algorithm; no fallback. The default is a chain.")
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
            tracing.check_traced(algorithm and algorithm.value, ("rgsqrf",))
        check_factors(run, a, mode, output, q_file, r_file)
        table = run.read({"A": a}, decimal=decimal.value, header=header, missing=missing)["A"]
        options = {"algorithm": algorithm, "panel": panel, "cutoff": cutoff, "progress": run.progress}
        result = run.compute("qr", table.values, mode=mode, accuracy=accuracy, engine=engine, **options)
        if trace:
            run.steps = tracing.show_qr(table.values, engine.value, panel and panel.value, cutoff)
        write_factors(run, result, table, output, q_file, r_file)
    reached = None if result.converged else show.certificate(result.certificate)
    run.finish(show.qr(result), reached=reached)
