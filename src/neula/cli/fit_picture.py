"""The picture of a fit: data, curve and band above, residuals below."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from neula.papers.drawing import new_canvas


@dataclass(frozen=True)
class FitPicture:
    """Data of the picture of a fit."""

    title: str
    labels: tuple[str, str]  # of the axes
    data: tuple[np.ndarray, np.ndarray]  # observations
    residuals: np.ndarray
    # Points of the curve, and half the width of its band there.
    curve: tuple[np.ndarray, np.ndarray, np.ndarray]
    level: float  # the probability of the band
    deviations: np.ndarray | None = None  # of the observations, drawn as error bars


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
