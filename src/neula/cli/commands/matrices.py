"""Commands of one or two matrices: products, linear systems, factorizations, spectra."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from neula.cli import options as opt
from neula.cli import show
from neula.cli.commands.lstsq import named
from neula.cli.run import CommandRun, Ending, problem
from neula.errors import check_name

if TYPE_CHECKING:
    from neula.io.table import Table
    from neula.pipeline.result import QRResult

Structure = StrEnum("Structure", ["gen", "pos"])
Pivot = StrEnum("Pivot", ["partial", "none"])
QRAlgorithm = StrEnum(
    "QRAlgorithm", ["rgsqrf", "rgsqrf-twice", "rgsqrf-reortho", "cholesky-qr", "householder"]
)
PanelName = StrEnum("PanelName", ["caqr", "cholesky", "cholesky2", "cholesky32", "householder"])
VARIANT = "5.2/5.1"  # default of ``neula.lu_factor``


@problem("the product")
def matmul(
    run: CommandRun,
    a: opt.MatrixFile,
    b: Annotated[str, opt.argument("B", "File of the other matrix, or -.")],
    compute: Annotated[
        str | None,
        opt.option(
            "Format of the operands: fp16, bf16, tf32, with _cor for error correction, fp32 "
            "or fp64. The default is as accurate as the input's dtype.",
            metavar="FORMAT",
        ),
    ] = None,
    trace: opt.TraceOption = False,
) -> Ending:
    """Multiply A by B, in the arithmetic that you choose."""
    from neula.io.table import Table

    run.check([a, b], 1)
    left, right = run.read({"A": a, "B": b}).values()
    product = run.compute("matmul", left.values, right.values, compute=compute)
    if trace:
        run.trace("show_matmul", left.values, right.values, run.engine, compute)
    # The columns of the product are those of B, unless A is a row, which it does not have.
    run.write({"C": Table(product, right.columns if left.values.ndim > 1 else None)})
    shape = tuple(product.shape)
    facts = {"shape": shape, "dtype": str(product.dtype), "compute": compute}
    return Ending(facts, {"product": f"{' x '.join(map(str, shape))} {product.dtype}"}, judged=False)


@problem("the solution x")
def solve(
    run: CommandRun,
    a: opt.MatrixFile,
    b: opt.RightHandSideFile,
    assume_a: Annotated[
        Structure, opt.option("pos: A is positive definite, symmetric or Hermitian.", "--assume-a")
    ] = Structure.gen,
    accuracy: opt.AccuracyOption = None,
    certify: opt.CertifyOption = opt.Certify.backward,
) -> Ending:
    """Solve the linear system Ax = b with a square matrix A."""
    run.check([a, b], 1)
    left, right = run.read({"A": a, "b": b}).values()
    options = {"assume_a": assume_a, "accuracy": accuracy, "certify": certify, "progress": run.progress}
    result = run.compute("solve", left.values, right.values, **options)
    run.write({"x": named(result.x, left, right)})
    facts, rows, reached = show.certified(result)
    return Ending({**facts, "names": left.columns}, rows, reached)


@problem("L, U and the permutation (.npz, .h5 or .mat)")
def lu(
    run: CommandRun,
    a: opt.MatrixFile,
    variant: Annotated[
        str, opt.option("Algorithm of Lopez and Mary: 2.1, 3.1, 4.1, 5.1, 5.2/5.1, ...", metavar="NUMBER")
    ] = VARIANT,
    block: Annotated[
        int | None, opt.option("Columns r of a panel; 256 in the paper.", "--block", "--panel", min=1)
    ] = None,
    inner_panel: Annotated[
        str | None,
        opt.option(
            "Columns of an inner panel of Algorithm 5.2, 8 in the paper; s,t: partitioned once more.",
            metavar="s[,t]",
        ),
    ] = None,
    pivot: Annotated[
        Pivot, opt.option("none is faster, but only for matrices that need no pivoting.")
    ] = Pivot.partial,
    compute: Annotated[
        str | None,
        opt.option("Format of the operands of products; by default the cheapest.", metavar="FORMAT"),
    ] = None,
    storage: Annotated[
        str | None, opt.option("Format of L and U; by default that of --compute.", metavar="FORMAT")
    ] = None,
    trace: opt.TraceOption = False,
) -> Ending:
    """Factorize A = LU with interchanges of rows, in low precision unless --compute says otherwise.

    To solve systems, use neula solve, which certifies the solution.
    """
    import numpy as np

    run.check([a], 3)
    matrix = run.read({"A": a})["A"].values
    with run.loading():
        import torch

        from neula.engines import select_engine
    if compute is None and storage is None:  # what the papers are about
        compute = select_engine(run.engine, torch.device("cpu")).format.name
    inner = None if inner_panel is None else _widths(inner_panel)
    widths: dict[str, Any] = {"variant": variant, "panel": block, "inner_panel": inner}
    options = {"pivot": pivot, "compute": compute, "storage": storage, "progress": run.progress}
    factors = run.compute("lu_factor", matrix, **options, **widths)
    if trace:
        pivoting = pivot is Pivot.partial
        run.trace("show_lu", matrix, run.engine, compute, storage, pivoting=pivoting, **widths)
    lower, upper, permutation = factors.L, factors.U, np.asarray(factors.permutation, dtype=np.int64)
    run.write({"L": lower, "U": upper, "permutation": permutation})
    rows = np.take_along_axis(matrix, permutation[..., np.newaxis], axis=-2)
    return Ending(*show.lu(factors, rows, lower, upper), judged=False)


def _widths(text: str) -> int | tuple[int, ...]:
    """``8`` or ``8,4``."""
    try:
        widths = tuple(map(int, text.split(",")))
    except ValueError:
        raise ValueError(f"--inner-panel takes one or two widths, such as 8 or 8,4, got {text!r}") from None
    return widths[0] if len(widths) == 1 else widths


@problem("L, or U")
def cholesky(
    run: CommandRun,
    a: opt.MatrixFile,
    upper: Annotated[
        bool, opt.option("U with A = U'U, from the upper triangle of A, in place of L.", "--upper")
    ] = False,
    accuracy: opt.AccuracyOption = None,
) -> Ending:
    """Factorize a positive definite A = LL', symmetric or Hermitian; only its lower triangle is read."""
    run.check([a], 1)
    matrix = run.read({"A": a})["A"].values
    result = run.compute("cholesky", matrix, upper=upper, accuracy=accuracy, progress=run.progress)
    run.write({"U" if upper else "L": result.factor})
    return Ending(*show.certified(result))


@problem("Q and R (.npz, .h5 or .mat); any kind with --mode r", missing=True)
def qr(
    run: CommandRun,
    a: opt.MatrixFile,
    mode: opt.ModeOption = opt.Mode.reduced,
    accuracy: opt.AccuracyOption = None,
    algorithm: Annotated[
        QRAlgorithm | None, opt.option("Run this algorithm only; by default neula tries several.")
    ] = None,
    panel: Annotated[PanelName | None, opt.option("Panel at which the recursion of rgsqrf ends.")] = None,
    cutoff: Annotated[int | None, opt.option("Columns of a panel; 128 in the paper.", min=1)] = None,
    q_file: opt.QFileOption = None,
    r_file: opt.RFileOption = None,
    trace: opt.TraceOption = False,
) -> Ending:
    """Factorize A = QR: Q with orthonormal columns, R upper triangular."""
    if trace:
        opt.check_traced(algorithm and algorithm.value, ("rgsqrf",))
    table = _read_to_factorize(run, a, mode, q_file, r_file)
    options = {"algorithm": algorithm, "panel": panel, "cutoff": cutoff, "progress": run.progress}
    result = run.compute("qr", table.values, mode=mode, accuracy=accuracy, **options)
    if trace:
        accuracy = None if algorithm is None else result.accuracy  # a named algorithm is the one shown
        run.trace("show_qr", table.values, run.engine, panel and panel.value, cutoff, accuracy)
    return _factors_written(run, result, table, q_file, r_file)


@problem("Q and R (.npz, .h5 or .mat); any kind with --mode r", missing=True)
def tsqr(
    run: CommandRun,
    a: opt.MatrixFile,
    mode: Annotated[
        str,
        opt.option(
            "Compute Q and R, or R alone; or a mode of the slides, as FP16_Cor, the same as --compute.",
            metavar="reduced|r|MODE",
        ),
    ] = opt.Mode.reduced.value,
    compute: Annotated[
        str,
        opt.option(
            "auto: the fastest for the accuracy of A. Or the tree of Ootomo and Yokota: fp16_cor, "
            "fp16_nocor, tf32_cor, tf32_nocor, fp32_notc; fp16_slides, tf32_slides: as in the slides.",
            metavar="MODE",
        ),
    ] = "auto",
    q_file: opt.QFileOption = None,
    r_file: opt.RFileOption = None,
    trace: opt.TraceOption = False,
) -> Ending:
    """Factorize A = QR for a tall and skinny A, of at most 256 columns."""
    if mode.lower() not in list(opt.Mode):
        from neula.problems.orthogonal.tsqr import COMPUTE, MODES, SLIDES

        check_name("--mode", mode.lower(), (*MODES, "auto", *COMPUTE, *SLIDES))
        compute, mode = mode, opt.Mode.reduced
    mode, compute = mode.lower(), compute.lower()
    table = _read_to_factorize(run, a, opt.Mode(mode), q_file, r_file)
    result = run.compute("tsqr", table.values, mode=mode, compute=compute)
    if trace:
        run.trace("show_tsqr", table.values, run.engine, compute)
    return _factors_written(run, result, table, q_file, r_file)


def _read_to_factorize(
    run: CommandRun, a: str, mode: opt.Mode, q_file: str | None, r_file: str | None
) -> Table:
    """A, unless factors could not be written."""
    if mode is opt.Mode.r and q_file is not None:
        raise ValueError("--mode r computes no Q: leave out --q, or use --mode reduced")
    run.check([a], 1 if mode is opt.Mode.r else 2, q_file, r_file)
    return run.read({"A": a})["A"]


def _factors_written(
    run: CommandRun, result: QRResult, a: Table, q_file: str | None, r_file: str | None
) -> Ending:
    """Write Q and R together, and each alone; the columns of R have the names of those of A."""
    r = {"R": replace(a, values=result.R)}
    q = {} if result.Q is None else {"Q": result.Q}
    run.write({**q, **r}, (q_file, q), (r_file, r))
    return Ending(*show.certified(result))


@problem("Q", missing=True)
def orth(
    run: CommandRun, a: opt.MatrixFile, rcond: opt.RcondOption = None, accuracy: opt.AccuracyOption = None
) -> Ending:
    """Compute an orthonormal basis of the columns of A; with --rcond of its numerical range."""
    run.check([a], 1)
    matrix = run.read({"A": a})["A"].values
    q = run.compute("orth", matrix, rcond=rcond, accuracy=accuracy, progress=run.progress)
    run.write({"Q": q})
    facts = {"converged": run.missed is None, "columns": q.shape[-1], "rcond": rcond}
    columns = f"{q.shape[-1]}, of {matrix.shape[-1]} in A" + ("" if rcond is None else f" (rcond {rcond:g})")
    return Ending(facts, {"columns": columns}, run.missed)


@problem("eigenvalues and eigenvectors (.npz, .h5 or .mat); any kind with --values-only")
def eigh(
    run: CommandRun,
    a: opt.MatrixFile,
    b: Annotated[
        str | None, opt.argument("[B]", "File of a positive definite matrix: A V = B V diag(w).")
    ] = None,
    values_only: opt.ValuesOnlyOption = False,
    subset: Annotated[
        str | None,
        opt.option(
            "Indices of the eigenvalues to compute, both inclusive: 0,4 are the five smallest, "
            "-5,-1 the five largest.",
            metavar="FIRST,LAST",
        ),
    ] = None,
    upper: Annotated[bool, opt.option("Read the upper triangles, not the lower.", "--upper")] = False,
    accuracy: opt.AccuracyOption = None,
) -> Ending:
    """Compute eigenvalues and eigenvectors of a symmetric or Hermitian A; its lower triangle is read."""
    indices = None if subset is None else _parsed(subset)
    run.check([a, b], 1 if values_only else 2)
    matrices = [table.values for table in run.read({"A": a, "B": b}).values()]
    if indices is not None:
        indices = _in_range(indices, matrices[0].shape[-1])
    options = {"eigvals_only": values_only, "subset_by_index": indices, "upper": upper}
    result = run.compute("eigh", *matrices, **options, accuracy=accuracy, progress=run.progress)
    vectors = {} if values_only else {"eigenvectors": result.eigenvectors}
    run.write({"eigenvalues": result.eigenvalues, **vectors})
    return Ending(*show.certified(result))


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


@problem("U, s and Vh (.npz, .h5 or .mat); any kind with --values-only", missing=True)
def svd(
    run: CommandRun,
    a: opt.MatrixFile,
    rank: Annotated[int | None, opt.option("How many singular values and vectors; all by default.")] = None,
    tol: Annotated[
        float | None, opt.option("Relative error of the approximation; takes as few as reach it.")
    ] = None,
    values_only: opt.ValuesOnlyOption = False,
    accuracy: opt.AccuracyOption = None,
    stream: opt.StreamOption = False,
    memory: opt.MemoryOption = None,
) -> Ending:
    """Decompose A = U diag(s) Vh; with --rank or --tol, approximate it by such a product of low rank."""
    if rank is not None and tol is not None:
        raise ValueError("give one of --rank and --tol: the rank, or the relative error to reach")
    run.check([a], 1 if values_only else 3)
    table = run.rows_in_blocks(a, stream=stream, memory=memory) or run.read({"A": a})["A"]
    matrix = table.values
    if len(matrix.shape) != 2:
        raise ValueError(f"svd is for one matrix, got an array of shape {matrix.shape}")
    common = {"accuracy": accuracy, "progress": run.progress}
    if rank is None and tol is None:
        result = run.compute("svd", matrix, full_matrices=False, compute_uv=not values_only, **common)
    else:
        result = run.compute("svd_lowrank", matrix, rank=rank, tol=tol, **common)
    names = ("s",) if values_only else ("U", "s", "Vh")
    run.write({name: getattr(result, name) for name in names})
    return Ending(*show.certified(result))
