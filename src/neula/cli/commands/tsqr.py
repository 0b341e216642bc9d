"""``neula tsqr``."""

from __future__ import annotations

from typing import Annotated

import typer

from neula.cli import show, tracing
from neula.cli.options import (
    Decimal,
    DecimalOption,
    EngineName,
    EngineOption,
    FactorsOption,
    HeaderOption,
    JsonOption,
    MatrixFile,
    Missing,
    MissingOption,
    Mode,
    QFileOption,
    RFileOption,
    TraceOption,
)
from neula.cli.orthogonal import check_factors, write_factors
from neula.cli.run import running


def tsqr(
    a: MatrixFile,
    mode: Annotated[
        str,
        typer.Option(
            metavar="reduced|r|MODE",
            help="Compute Q and R, or R alone; or a mode of the slides, as FP16_Cor, the same as --compute.",
        ),
    ] = Mode.reduced.value,
    compute: Annotated[
        str,
        typer.Option(
            metavar="MODE",
            help="auto: the fastest way to the accuracy of A. Or the tree of Ootomo and Yokota: fp16_cor, "
            "fp16_nocor, tf32_cor, tf32_nocor, fp32_notc; fp16_slides, tf32_slides: as in the slides.",
        ),
    ] = "auto",
    engine: EngineOption = EngineName.auto,
    output: FactorsOption = None,
    q_file: QFileOption = None,
    r_file: RFileOption = None,
    decimal: DecimalOption = Decimal.point,
    header: HeaderOption = None,
    missing: MissingOption = Missing.error,
    trace: TraceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Factorize A = QR for a tall and skinny A, of at most 256 columns."""
    with running("tsqr", as_json) as run:
        if mode.lower() not in list(Mode):
            compute, mode = mode, Mode.reduced
        compute = compute.lower()
        check_factors(run, a, Mode(mode.lower()), output, q_file, r_file)
        table = run.read({"A": a}, decimal=decimal.value, header=header, missing=missing)["A"]
        result = run.compute("tsqr", table.values, mode=mode.lower(), compute=compute, engine=engine)
        if trace:
            tracing.show_tsqr(table.values, engine.value, compute)
        write_factors(run, result, table, output, q_file, r_file)
    reached = None if result.converged else show.certificate(result.certificate)
    run.finish(show.qr(result), reached=reached)
