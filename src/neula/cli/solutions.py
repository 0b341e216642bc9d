"""Names and reports common to commands that solve for x."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from neula.cli import show
from neula.cli.run import CommandRun

if TYPE_CHECKING:
    import numpy as np

    from neula.io.table import Table
    from neula.pipeline.result import LstsqResult, SolveResult

INTERCEPT = "intercept"


def with_intercept(a: Table) -> Table:
    """A with a first column of ones."""
    import numpy as np

    matrix = a.values
    if matrix.ndim != 2:
        raise ValueError(f"--intercept adds a column to a matrix, and A has shape {matrix.shape}")
    ones = np.ones((len(matrix), 1), dtype=matrix.dtype)
    names = a.columns or tuple(str(i + 1) for i in range(matrix.shape[1]))
    return replace(a, values=np.hstack([ones, matrix]), columns=(INTERCEPT, *names))


def unread(rows: Any) -> Table:
    """A matrix that is read block by block, in place of its array."""
    from neula.io.table import Table

    return Table(rows)


def named(x: np.ndarray, a: Table, b: Table) -> Table:
    """A solution with the names of A's columns, where it has some, before its rows."""
    from neula.io.table import Table

    if a.columns is None or x.ndim > 2:
        return Table(x)
    unnamed = ("x",) if x.ndim == 1 else tuple(str(i + 1) for i in range(x.shape[1]))
    return Table(x, columns=b.columns or unnamed, rows=a.columns)


def finish_solution(run: CommandRun, result: LstsqResult | SolveResult, shown: show.Shown, a: Table) -> None:
    """Report what a solver found, and how good it is; the entries of x belong to the columns of A."""
    facts, rows = shown
    error = f"backward error {result.backward_error:.1e}, tolerance {result.tolerance:.1e}"
    more = getattr(result, "_deficiency", str)()
    run.finish(({**facts, "names": a.columns}, rows), reached=None if result.converged else error, more=more)
