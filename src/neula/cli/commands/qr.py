"""``neula qr``."""

from __future__ import annotations

from neula.cli import show
from neula.cli.options import (
    AccuracyOption,
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
    ModeOption,
    QFileOption,
    RFileOption,
)
from neula.cli.orthogonal import check_factors, write_factors
from neula.cli.run import running


def qr(
    a: MatrixFile,
    mode: ModeOption = Mode.reduced,
    accuracy: AccuracyOption = None,
    engine: EngineOption = EngineName.auto,
    output: FactorsOption = None,
    q_file: QFileOption = None,
    r_file: RFileOption = None,
    decimal: DecimalOption = Decimal.point,
    header: HeaderOption = None,
    missing: MissingOption = Missing.error,
    as_json: JsonOption = False,
) -> None:
    """Factorize A = QR: Q with orthonormal columns, R upper triangular."""
    with running("qr", as_json) as run:
        check_factors(run, a, mode, output, q_file, r_file)
        table = run.read({"A": a}, decimal=decimal.value, header=header, missing=missing)["A"]
        result = run.compute(
            "qr", table.values, mode=mode, accuracy=accuracy, engine=engine, progress=run.progress
        )
        write_factors(run, result, table, output, q_file, r_file)
    reached = None if result.converged else show.certificate(result.certificate)
    run.finish(show.qr(result), reached=reached)
