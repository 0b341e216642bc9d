"""A table of regression as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from neula.pipeline.result.named import as_numpy

if TYPE_CHECKING:
    from neula.pipeline.result.regression import Regression


class Summary(str):
    """A text that shows itself as it is printed."""

    def __repr__(self) -> str:
        return str(self)


def summarized(result: Regression, level: float, how: Mapping[str, Any]) -> Summary:
    """The table of one right-hand side."""
    columns = result._table(level, **how)
    names = result._labels(len(columns["coefficient"]))
    kind = "clustered" if how.get("groups") is not None else how.get("robust") or "nonrobust"
    given = {
        "Dep. Variable:": (result.responses or ("b",))[0],
        "Method:": "Least Squares",
        "No. Observations:": str(len(as_numpy(result.residuals))),
        "Df Residuals:": f"{result.degrees_of_freedom:.6g}",
        "Df Model:": f"{result.model_degrees_of_freedom:.6g}",
        "Covariance Type:": "absolute" if how.get("absolute") else kind,
        "Correct digits:": str(int(result.digits)),
    }
    right = {
        "R-squared:": f"{result.r_squared:.3f}",
        "Adj. R-squared:": f"{result.adjusted_r_squared:.3f}",
        "F-statistic:": f"{result.f_statistic:.4g}" if kind == "nonrobust" else "-",
        "Prob (F-statistic):": f"{result.f_p_value:.3g}" if kind == "nonrobust" else "-",
        "Log-Likelihood:": f"{result.log_likelihood:.5g}",
        "AIC:": f"{result.aic:.4g}",
        "BIC:": f"{result.bic:.4g}",
    }
    tail = (1 - level) / 2
    heads = ("coef", "std err", "t", "P>|t|", f"[{tail:.3g}", f"{1 - tail:.3g}]")
    width = max(12, *map(len, names)) + 2
    total = max(78, width + 66)  # as statsmodels has
    lines = [
        "Least Squares Regression Results".center(total).rstrip(),
        "=" * total,
        *_pairs(given, right, total),
        "=" * total,
        " " * width + "".join(head.rjust(11) for head in heads),
        "-" * total,
    ]
    for i, name in enumerate(names):
        coefficient, error, t, p, *ends = (float(values[i]) for values in columns.values())
        cells = _number(coefficient, 4), _number(error), f"{t:.3f}", f"{p:.3f}", *map(_number, ends)
        lines.append(f"{name:<{width}}" + "".join(cell.rjust(11) for cell in cells))
    left = as_numpy(result._of_rows.whitened_residuals())
    durbin_watson = np.sum(np.diff(left) ** 2) / max(np.sum(left**2), np.finfo(np.float64).tiny)
    below = {"Durbin-Watson:": f"{durbin_watson:.3f}"}, {"Cond. No. (scaled):": f"{result.condition:.3g}"}
    return Summary("\n".join([*lines, "=" * total, *_pairs(*below, total), "=" * total]))


def _number(x: float, digits: int = 3) -> str:
    """Format a number like statsmodels: with a fixed number of decimals, or an exponent."""
    return f"{x:.{digits}f}" if x == 0 or 1e-4 <= abs(x) < 1e4 else f"{x:.{digits - 1}e}"


def _pairs(left: Mapping[str, str], right: Mapping[str, str], total: int) -> list[str]:
    """Two columns of names and values."""
    half = total // 2 - 1
    lines = []
    for (a, x), (b, y) in zip(left.items(), right.items(), strict=True):
        lines.append(f"{a}{x.rjust(half - len(a))}   {b}{y.rjust(total - half - 3 - len(b))}")
    return lines
