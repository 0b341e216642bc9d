"""A formula and a table as a fit, and a fit as a report and as a picture: data, curve and band, residuals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import torch

from neula.cli import show
from neula.io.expressions import Formula
from neula.io.integers import in_float64
from neula.io.table import Table, listed
from neula.papers.drawing import new_canvas
from neula.pipeline.result import shown

POINTS = 400  # points of a drawn curve


@dataclass(frozen=True)
class Roles:
    """The parts that names play in a fit."""

    formula: Formula
    label: str  # the response, as the caller named it
    observed: Formula  # the response, of columns
    sigma: str | None
    parameters: tuple[str, ...]
    start: np.ndarray
    columns: tuple[str, ...]  # those that the fit uses


@dataclass(frozen=True)
class Fitting:
    roles: Roles
    predictors: dict[str, torch.Tensor]  # columns in the formula
    observed: torch.Tensor
    deviations: np.ndarray | None

    def model(self, columns: dict[str, torch.Tensor], *values: torch.Tensor) -> torch.Tensor:
        found = self.roles.formula({**columns, **dict(zip(self.roles.parameters, values, strict=True))})
        length = len(next(iter(columns.values()))) if columns else len(self.observed)
        return torch.as_tensor(found, dtype=torch.float64, device="cpu").expand(length)


@dataclass(frozen=True)
class FitPicture:
    title: str
    labels: tuple[str, str]  # of the axes
    data: tuple[np.ndarray, np.ndarray]  # observations
    residuals: np.ndarray
    # Points of the curve, and half the width of its band there.
    curve: tuple[np.ndarray, np.ndarray, np.ndarray]
    level: float  # the probability of the band
    deviations: np.ndarray | None = None  # of the observations, drawn as error bars


def roles_of(
    columns: Sequence[str], text: str, response: str | None, sigma: str | None, p0: str | None
) -> Roles:
    """Tell columns from parameters."""
    left, right = _sides(text)
    formula = Formula.parse(right)
    if sigma is not None and sigma not in columns:
        raise ValueError(f"no column is named {sigma!r} for --sigma: there are {listed(columns)}")
    label = _response(left, response, columns, formula, sigma)
    observed = Formula.parse(f"Q({label!r})" if label in columns else label)
    if not observed.names or not set(observed.names) <= set(columns):
        raise ValueError(f"the response {label!r} is no column: there are {listed(columns)}")
    parameters = tuple(name for name in formula.names if name not in columns)
    _check_spelling(parameters, columns, p0)
    if not parameters:
        raise ValueError(
            f"every name in {right!r} is a column ({listed(list(formula.names))}): there is nothing to fit"
        )
    used = dict.fromkeys([*formula.names, *observed.names, *([] if sigma is None else [sigma])])
    needed = tuple(name for name in used if name in columns)
    return Roles(formula, label, observed, sigma, parameters, _start(p0, parameters), needed)


def prepare(table: Table, roles_of_columns: Callable[[Sequence[str]], Roles]) -> Fitting:
    columns = _columns(table)
    roles = roles_of_columns(list(columns))
    predictors = {name: torch.from_numpy(columns[name]) for name in roles.formula.names if name in columns}
    observed = torch.from_numpy(np.asarray(roles.observed(columns), dtype=np.float64))
    return Fitting(roles, predictors, observed, None if roles.sigma is None else columns[roles.sigma])


def _check_spelling(parameters: tuple[str, ...], columns: Sequence[str], p0: str | None) -> None:
    """Refuse a parameter that looks like a column whose name was mistyped, unless ``--p0`` names it."""
    started = {part.partition("=")[0].strip() for part in (p0 or "").split(",") if "=" in part}
    lower = {name.lower(): name for name in columns}
    for name in parameters:
        near = get_close_matches(name.lower(), lower, 1, cutoff=0.75)
        if near and name not in started:
            raise ValueError(
                f"no column is named {name!r}: did you mean {lower[near[0]]!r}? If it is a parameter, say "
                f'its starting value: --p0 "{name}=1"'
            )


def report(wanted: Fitting, found: Any, level: float) -> tuple[dict[str, Any], dict[str, str], Table]:
    """Facts for programs, lines for people, and the parameters as a table."""
    result = found.result
    deviation = math.sqrt(result.residual_variance)
    values, errors = found.popt.numpy(), found.standard_errors().numpy()
    lower, upper = found.confidence_intervals(level).numpy().T
    rows = show.estimates(wanted.roles.parameters, values, errors, lower, upper, level)
    rows |= {
        "residual": f"standard deviation {deviation:.4g}, {result.degrees_of_freedom} degrees of freedom",
        "digits": f"{shown.correct(result.digits)}, condition {result.condition:.1e}",
        "message": result.message,
    }
    names = ("converged", "residual_variance", "degrees_of_freedom", "stationarity", "condition", "digits")
    facts = show.facts_of(result, *names, "rank", "nfev", "message")
    facts |= {
        "formula": wanted.roles.formula.text,
        "response": wanted.roles.label,
        "names": list(wanted.roles.parameters),
        "values": values,
        "standard_errors": errors,
        "lower": lower,
        "upper": upper,
        "covariance": found.pcov.numpy(),
    }
    table = Table(np.column_stack([values, errors]), ("value", "standard_error"), wanted.roles.parameters)
    return facts, rows, table


def picture_of(wanted: Fitting, found: Any, level: float) -> FitPicture:
    """The data with the curve; of several predictors with what was fitted."""
    fitted, spread = (part.numpy() for part in found.band(wanted.predictors, level))
    observed = wanted.observed.numpy()
    title = f"{wanted.roles.label} = {wanted.roles.formula.text.strip()}"
    if len(wanted.predictors) == 1:
        ((name, x),) = wanted.predictors.items()
        grid = torch.linspace(float(x.min()), float(x.max()), POINTS, dtype=torch.float64, device="cpu")
        curve, band = (part.numpy() for part in found.band({name: grid}, level))
        at, line = x.numpy(), (grid.numpy(), curve, band)
    else:
        name, at, order = "fitted", fitted, np.argsort(fitted)
        line = fitted[order], fitted[order], spread[order]
    labels, residuals = (name, wanted.roles.label), observed - fitted
    return FitPicture(title, labels, (at, observed), residuals, line, level, wanted.deviations)


def draw(path: Path, picture: FitPicture) -> None:
    """Draw it; the suffix of the file says the format. An ImportError says how to get matplotlib."""
    canvas = new_canvas(7.0, 6.0)
    above, below = canvas.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [3, 1]})
    (x, y), (at, curve, half) = picture.data, picture.curve
    above.fill_between(
        at,
        curve - half,
        curve + half,
        color="tab:blue",
        alpha=0.25,
        linewidth=0,
        label=f"{picture.level:.0%} band",
    )
    above.plot(at, curve, color="tab:blue", label="fit")
    bars = {"fmt": "o", "color": "0.2", "ecolor": "0.6", "elinewidth": 0.8}
    above.errorbar(x, y, picture.deviations, markersize=4, label="data", **bars)
    # A band may have no width, or none that is known, and data decide what is shown.
    bar = 0.0 if picture.deviations is None else picture.deviations
    low, high = min((y - bar).min(), curve.min()), max((y + bar).max(), curve.max())
    margin = 0.08 * (high - low) or 1.0
    above.set_ylim(low - margin, high + margin)
    above.set_ylabel(picture.labels[1])
    above.set_title(picture.title, fontsize=11, wrap=True)
    above.legend(frameon=False)
    below.axhline(0.0, color="tab:blue", linewidth=1)
    if picture.deviations is None:
        below.vlines(x, 0.0, picture.residuals, color="0.6", linewidth=0.8)
    below.errorbar(x, picture.residuals, picture.deviations, markersize=3, **bars)
    below.set_xlabel(picture.labels[0])
    below.set_ylabel("residual")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    canvas.savefig(path, dpi=150)


def _columns(table: Table) -> dict[str, np.ndarray]:
    values = in_float64(table.values, "the table")
    values = values[:, None] if values.ndim == 1 else values
    names = table.columns
    if names is None and values.shape[1] == 2:
        names = ("x", "y")
    if names is None or values.ndim != 2:
        raise ValueError("the table has no names of columns: write them into its first line")
    return {name: np.ascontiguousarray(values[:, k]) for k, name in enumerate(names)}


def _sides(text: str) -> tuple[str | None, str]:
    left, equals, right = text.partition("=")
    return (left.strip(), right) if equals and left.strip() else (None, text)


def _response(
    left: str | None, named: str | None, columns: Sequence[str], formula: Formula, sigma: str | None
) -> str:
    if left is not None and named is not None:
        raise ValueError(f"the formula says {left!r} and --response {named!r}: leave one out")
    if left is not None or named is not None:
        return str(left if left is not None else named)
    rest = [name for name in columns if name not in formula.names and name != sigma]
    if len(rest) == 1 or "y" in rest:
        return rest[0] if len(rest) == 1 else "y"
    raise ValueError(
        f"several columns are not in the formula: {listed(rest)}; name the one to fit by --response"
    )


def _start(p0: str | None, parameters: tuple[str, ...]) -> np.ndarray:
    parts = [part.strip() for part in (p0 or "").split(",") if part.strip()]
    try:
        if not any("=" in part for part in parts):
            numbers = [float(part) for part in parts] or [1.0] * len(parameters)
            if len(numbers) != len(parameters):
                raise ValueError(
                    f"--p0 has {len(numbers)} numbers for {len(parameters)} parameters "
                    f"({', '.join(parameters)})"
                )
            return np.array(numbers)
        given = {name.strip(): float(value) for name, _, value in (part.partition("=") for part in parts)}
    except ValueError as error:
        if str(error).startswith("--p0"):
            raise
        raise ValueError(f'--p0 {p0!r} is not understood: write "a=2,b=0.5", or numbers alone') from None
    strange = [name for name in given if name not in parameters]
    if strange:
        raise ValueError(f"--p0 names {strange[0]!r}; the parameters are {', '.join(parameters)}")
    return np.array([given.get(name, 1.0) for name in parameters])
