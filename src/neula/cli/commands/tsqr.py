"""``neula tsqr``."""

from __future__ import annotations

from typing import Annotated

import typer

from neula.cli import options as opt
from neula.cli import show, tracing
from neula.cli.orthogonal import check_factors, write_factors
from neula.cli.run import running


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
            help="auto: the fastest way to the accuracy of A. Or the tree of Ootomo and Yokota: fp16_cor, "
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
        check_factors(run, a, opt.Mode(mode.lower()), output, q_file, r_file)
        table = run.read({"A": a}, decimal=decimal.value, header=header, missing=missing)["A"]
        result = run.compute("tsqr", table.values, mode=mode.lower(), compute=compute, engine=engine)
        if trace:
            run.steps = tracing.show_tsqr(table.values, engine.value, compute)
        write_factors(run, result, table, output, q_file, r_file)
    reached = None if result.converged else show.certificate(result.certificate)
    run.finish(show.qr(result), reached=reached)
