"""Names and reports common to commands that solve for x."""

from __future__ import annotations

import math
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


def named(x: np.ndarray, a: Table, b: Table) -> Table:
    """A solution with the names of A's columns, where it has some, before its rows."""
    from neula.io.table import Table

    if a.columns is None or x.ndim > 2:
        return Table(x)
    unnamed = ("x",) if x.ndim == 1 else tuple(str(i + 1) for i in range(x.shape[1]))
    return Table(x, columns=b.columns or unnamed, rows=a.columns)


def with_errors(
    found: show.Shown, result: Any, a: Table, level: float, *, absolute: bool, all_shown: bool
) -> show.Shown:
    """A solution with standard errors and confidence intervals, or with the reason why there are none."""
    import numpy as np

    facts, rows = found
    try:
        if not hasattr(result, "standard_errors"):
            raise ValueError("solutions with bounds have none")
        errors = np.asarray(result.standard_errors(absolute=absolute))
        of_fit = {name: getattr(result, name) for name in ("degrees_of_freedom", "residual_variance")}
        of_rows: dict[str, Any] = {}
        lower = upper = None
        if not np.iscomplexobj(result.x):  # intervals and R-squared are those of real numbers
            intervals = np.asarray(result.confidence_intervals(level, absolute=absolute))
            lower, upper = np.moveaxis(intervals, -1, 0)
            for name, value in (("t", result.t_values), ("p", result.p_values)):
                of_fit[name] = np.asarray(value(absolute=absolute))
            of_rows = getattr(result._fit, "numbers", dict)()  # nothing if only R was kept
        of_fit["r_squared"] = of_rows.get("r_squared", math.nan)
    except ValueError as why:
        return {**facts, "no_standard_errors": str(why)}, {**rows, "standard errors": f"none: {why}"}
    facts = {**facts, "standard_errors": errors, "lower": lower, "upper": upper, "level": level, **of_fit}
    if errors.ndim != 1:
        return facts, rows
    names = a.columns or tuple(f"x{i + 1}" for i in range(len(errors)))
    lines = show.estimates(names, result.x, errors, lower, upper, level)
    if len(lines) > show.SHORT and not all_shown:
        more = f"{len(lines) - show.SHORT} more: --errors shows all, --json has them"
        lines = {**dict(list(lines.items())[: show.SHORT]), "...": more}
    explained = f"R-squared {of_fit['r_squared']:.4g}, " if lower is not None else ""
    fit = f"{explained}{result.degrees_of_freedom:.6g} degrees of freedom"
    return facts, {**rows, "fit": fit, **lines}


def finish_solution(run: CommandRun, result: LstsqResult | SolveResult, shown: show.Shown, a: Table) -> None:
    """Report what a solver found, and how good it is; the entries of x belong to the columns of A."""
    facts, rows = shown
    error = f"backward error {result.backward_error:.1e}, tolerance {result.tolerance:.1e}"
    more = getattr(result, "_deficiency", str)()
    run.finish(({**facts, "names": a.columns}, rows), reached=None if result.converged else error, more=more)
