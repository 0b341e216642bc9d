"""``neula eigh`` and ``neula svd``."""

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


def svd(
    a: opt.MatrixFile,
    rank: Annotated[
        int | None, typer.Option(help="How many singular values and vectors; all by default.")
    ] = None,
    tol: Annotated[
        float | None, typer.Option(help="Relative error of the approximation; takes as few as reach it.")
    ] = None,
    values_only: opt.ValuesOnlyOption = False,
    accuracy: opt.AccuracyOption = None,
    engine: opt.EngineOption = opt.EngineName.auto,
    output: Annotated[
        str | None, opt.output_option("U, s and Vh (.npz, .h5 or .mat); any kind with --values-only")
    ] = None,
    decimal: opt.DecimalOption = opt.Decimal.point,
    header: opt.HeaderOption = None,
    missing: opt.MissingOption = opt.Missing.error,
    stream: opt.StreamOption = False,
    memory: opt.MemoryOption = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Decompose A = U diag(s) Vh; with --rank or --tol, approximate it by such a product of low rank."""
    with running("svd", as_json) as run:
        if rank is not None and tol is not None:
            raise ValueError("give one of --rank and --tol: the rank, or the relative error to reach")
        run.check([a], (output, 1 if values_only else 3))
        table = run.rows_in_blocks(a, stream=stream, memory=memory)
        if table is None:
            table = run.read({"A": a}, decimal=decimal.value, header=header, missing=missing)["A"]
        matrix = table.values
        if len(matrix.shape) != 2:
            raise ValueError(f"svd is for one matrix, got an array of shape {matrix.shape}")
        common = {"accuracy": accuracy, "engine": engine, "progress": run.progress}
        if rank is None and tol is None:
            whole = {"full_matrices": False, "compute_uv": not values_only}
            result = run.compute("svd", matrix, **whole, **common)
        else:
            result = run.compute("svd_lowrank", matrix, rank=rank, tol=tol, **common)
        names = ("s",) if values_only else ("U", "s", "Vh")
        run.write((output, {name: getattr(result, name) for name in names}))
    reached = None if result.qr.converged else show.certificate(result.qr.certificate)
    run.finish(show.svd(result), reached=reached)
