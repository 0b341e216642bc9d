"""``neula lstsq`` with bounds and constraints: what is called for its options, and what is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from neula.cli import show

if TYPE_CHECKING:
    import numpy as np

    from neula.pipeline.result import LsqLinearResult, LstsqResult, NNLSResult

WITHOUT_BOUNDS = {
    "damp": 0.0,
    "weights": None,
    "sigma": None,
    "rcond": None,
    "certify": "backward",
    "algorithm": None,
    "max_iterations": 60,
}
"""Options that go without bounds only, with what they are by default."""


def interval(text: str) -> tuple[float, float]:
    """Two numbers with a comma between them.

    Examples
    --------
    >>> interval("0,inf"), interval("-1.5, 2")
    ((0.0, inf), (-1.5, 2.0))
    """
    try:
        lower, upper = map(float, text.split(","))
    except ValueError:
        raise ValueError(
            f"--bounds {text!r} is not a pair of numbers: write it like --bounds=0,1 or --bounds=-inf,2.5"
        ) from None
    return lower, upper


def two_files(text: str) -> tuple[str, str]:
    """The files of C and d."""
    c, comma, d = text.rpartition(",")
    if not comma or not c or not d:
        raise ValueError(f"--constraints {text!r} does not name two files: write it like C.csv,d.csv")
    return c, d


def call_for(
    options: dict[str, Any],
    nonnegative: bool,
    bounds: str | None,
    constraints: tuple[np.ndarray, np.ndarray] | None,
) -> tuple[str, dict[str, Any]]:
    """The function of neula to call, and its options."""
    if not nonnegative and bounds is None:
        return "lstsq", {**options, "constraints": constraints} if constraints else options
    if nonnegative and bounds is not None:
        raise ValueError("--nonnegative is --bounds=0,inf: leave one of them out")
    if constraints is not None:
        raise ValueError("--constraints do not go together with bounds: leave one of them out")
    for name, default in WITHOUT_BOUNDS.items():
        value = options.get(name, default)
        if value is not default and (hasattr(value, "shape") or value != default):
            raise ValueError(
                f"--{name.replace('_', '-')} does not go together with bounds: leave one of them out"
            )
    return ("nnls", {}) if bounds is None else ("lsq_linear", {"bounds": interval(bounds)})


def shown(result: LstsqResult | NNLSResult | LsqLinearResult) -> show.Shown:
    """A solution, with bounds or without."""
    import numpy as np

    from neula.pipeline.result import LstsqResult

    if isinstance(result, LstsqResult):
        return show.lstsq(result)
    names = ("converged", "accuracy", "engine", "iterations", *show.EVIDENCE)
    facts = show.facts_of(result, *names, "residual_norm", "active_mask", "attempts")
    at_bounds = int((result.active_mask != 0).sum())
    rows = dict(result._rows())
    rows |= {"at bounds": f"{at_bounds} of {result.x.size} unknowns", "tried": show.attempts(result.attempts)}
    rows["residual norm"] = show.numbers(np.atleast_1d(result.residual_norm))
    return facts, {name: value for name, value in rows.items() if name not in ("x", "time")}
