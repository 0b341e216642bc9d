"""``neula eigh``."""

from __future__ import annotations

from typing import Annotated

import typer

from neula.cli import options as opt
from neula.cli import show
from neula.cli.run import running


def eigh(
    a: opt.MatrixFile,
    b: Annotated[
        str | None,
        typer.Argument(metavar="[B]", help="File of a positive definite matrix: A V = B V diag(w)."),
    ] = None,
    values_only: opt.ValuesOnlyOption = False,
    subset: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST,LAST",
            help="Indices of the eigenvalues to compute, both inclusive: 0,4 are the five smallest, "
            "-5,-1 the five largest.",
        ),
    ] = None,
    upper: Annotated[bool, typer.Option("--upper", help="Read the upper triangles, not the lower.")] = False,
    accuracy: opt.AccuracyOption = None,
    engine: opt.EngineOption = opt.EngineName.auto,
    output: Annotated[
        str | None,
        opt.output_option("eigenvalues and eigenvectors (.npz, .h5 or .mat); any kind with --values-only"),
    ] = None,
    decimal: opt.DecimalOption = opt.Decimal.point,
    header: opt.HeaderOption = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Compute eigenvalues and eigenvectors of a symmetric or Hermitian A; its lower triangle is read."""
    with running("eigh", as_json) as run:
        indices = None if subset is None else _parsed(subset)
        run.check([a, b], (output, 1 if values_only else 2))
        given = run.read({"A": a, "B": b}, decimal=decimal.value, header=header)
        matrices = [table.values for table in given.values()]
        if indices is not None:
            indices = _in_range(indices, matrices[0].shape[-1])
        options = {"eigvals_only": values_only, "subset_by_index": indices, "upper": upper}
        result = run.compute(
            "eigh", *matrices, **options, accuracy=accuracy, engine=engine, progress=run.progress
        )
        vectors = {} if values_only else {"eigenvectors": result.eigenvectors}
        run.write((output, {"eigenvalues": result.eigenvalues, **vectors}))
    missed = f"residual {result.residual:.1e}, bound {result.residual_bound:.1e}"
    run.finish(show.eigh(result), reached=None if result.converged else missed)


def _parsed(subset: str) -> tuple[int, int]:
    try:
        first, last = map(int, subset.split(","))
    except ValueError:
        raise ValueError(f"--subset must be two indices, as 0,4 or -5,-1, got {subset!r}") from None
    return first, last


def _in_range(indices: tuple[int, int], n: int) -> tuple[int, int]:
    """Indices of which negative ones count from the end."""
    first, last = (index + n if index < 0 else index for index in indices)
    if not 0 <= first <= last < n:
        raise ValueError(
            f"--subset {indices[0]},{indices[1]} is out of range: give the smaller index first, from 0 to "
            f"{n - 1}, or from -{n} to -1"
        )
    return first, last
