"""``neula matmul``."""

from __future__ import annotations

from typing import Annotated

import typer

from neula.cli import options as opt
from neula.cli.run import running


def matmul(
    a: opt.MatrixFile,
    b: Annotated[str, typer.Argument(metavar="B", help="File of the other matrix, or -.")],
    compute: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Format of the operands: fp16, bf16, tf32, with _cor for error correction, fp32 "
            "or fp64. The default is as accurate as the input's dtype.",
        ),
    ] = None,
    engine: opt.EngineOption = opt.EngineName.auto,
    output: Annotated[str | None, opt.output_option("the product")] = None,
    decimal: opt.DecimalOption = opt.Decimal.point,
    header: opt.HeaderOption = None,
    trace: opt.TraceOption = False,
    as_json: opt.JsonOption = False,
) -> None:
    """Multiply A by B, in the arithmetic that you choose."""
    from neula.io.table import Table

    with running("matmul", as_json) as run:
        run.check([a, b], (output, 1))
        given = run.read({"A": a, "B": b}, decimal=decimal.value, header=header)
        product = run.compute("matmul", given["A"].values, given["B"].values, compute=compute, engine=engine)
        if trace:
            from neula.cli import tracing

            run.steps = tracing.show_matmul(given["A"].values, given["B"].values, engine.value, compute)
        # The columns of the product are those of B, unless A is a row, which it does not have.
        names = given["B"].columns if given["A"].values.ndim > 1 else None
        run.write((output, {"C": Table(product, names)}))
    shape = tuple(product.shape)
    facts = {"shape": shape, "dtype": str(product.dtype), "compute": compute}
    run.finish((facts, {"product": f"{' x '.join(map(str, shape))} {product.dtype}"}), judged=False)
