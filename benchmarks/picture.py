"""The README's picture: how many times as fast as torch, from small problems to large ones, as accurate.

What is drawn is in the file's description, too, so that it can be told whether it is up to date.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import unescape
from pathlib import Path
from typing import Any

from benchmarks.compared import FOLDER, Comparison, Source, by_size, comparisons, shown
from neula.papers.drawing import Axes, new_canvas

PANELS: Mapping[str, Source] = {
    "Least squares, float64": Source("sizes", {"problem": "lstsq", "matrix": "normal"}),
    "Linear systems, float64": Source("sizes", {"problem": "solve", "matrix": "normal"}),
    "Positive definite systems, float64": Source(
        "sizes", {"problem": "solve definite", "matrix": "definite"}
    ),
    "QR, float32": Source("sizes", {"problem": "qr", "matrix": "float32"}),
    "Cholesky factors, float32": Source("sizes", {"problem": "cholesky"}),
}
"""Problems whose answers are as accurate as torch's, in one run."""

FASTER, SLOWER = "#2f81f7", "#db6d28"
"""Colours for ratios above and below 1, visible to the colour-blind, on white and on black."""

INKS = {"light": ("#1f2328", "white"), "dark": ("#e6edf3", "none")}
"""Of a picture for a light and for a dark page: the ink, and what it is drawn on."""


def measured(folder: Path = FOLDER) -> dict[str, list[Comparison]]:
    """Comparisons that each panel shows; panels that have not been measured are left out."""
    found = {title: by_size(comparisons(source, folder)) for title, source in PANELS.items()}
    return {title: bars for title, bars in found.items() if bars}


def description(panels: Mapping[str, list[Comparison]]) -> str:
    """The ratios in words: for those who do not see the picture, and to tell whether it is up to date."""
    return "Times as fast as torch on an H200. " + ". ".join(
        f"{title}: " + ", ".join(f"{shown(one.size)} {one.ratio:.2g}" for one in bars)
        for title, bars in panels.items()
    )


def is_current(path: Path, panels: Mapping[str, list[Comparison]]) -> bool:
    """Whether a file shows these measurements."""
    drawn = path.read_text("utf-8") if path.exists() else ""
    found = re.search(r"<dc:description>(.*?)</dc:description>", drawn, re.S)
    return found is not None and unescape(found[1]) == description(panels)


def draw(path: Path, panels: Mapping[str, list[Comparison]], page: str) -> None:
    """Draw all panels on one scale, as SVG; ``page`` is one of :data:`INKS`."""
    import matplotlib as mpl

    ink, paper = INKS[page]
    colors = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style: dict[Any, Any] = {**dict.fromkeys(colors, ink), "axes.facecolor": "none", "svg.hashsalt": "neula"}
    with mpl.rc_context(style):
        canvas = new_canvas(11, 5.6)
        grid = canvas.subplots(2, 3, sharey=True).flatten()
        most = max(map(len, panels.values()))
        for axes, (title, bars) in zip(grid, panels.items(), strict=False):
            _panel(axes, title, bars, ink)
            axes.set_xlim(-0.6, most - 0.4)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        for axes in grid[::3]:
            axes.set_ylabel("times as fast as torch")
        about = {"Description": description(panels), "Date": None, "Title": "neula beside torch on an H200"}
        canvas.savefig(path, format="svg", facecolor=paper, metadata=about)


def _panel(axes: Axes, title: str, bars: list[Comparison], ink: str) -> None:
    _speedup_bars(axes, [_tick(one.size) for one in bars], [one.ratio for one in bars], ink)
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def _tick(size: tuple[int, ...]) -> str:
    """A size without what can be guessed: the order of what is square."""
    return str(size[0]) if len(set(size)) == 1 else shown(size)


def _speedup_bars(axes: Axes, labels: list[str], ratios: list[float], ink: str) -> None:
    """How many times as fast: bars from zero on a linear axis, whose lengths are what they say."""
    places = range(len(ratios))
    axes.bar(places, ratios, 0.75, color=[FASTER if ratio >= 1 else SLOWER for ratio in ratios])
    axes.axhline(1.0, color=ink, linewidth=0.8, linestyle="--")
    for place, ratio in zip(places, ratios, strict=True):
        above = (place, max(ratio, 1.0))
        axes.annotate(f"{ratio:.2g}", above, (0, 2), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xticks(places, labels, rotation=45, ha="right", rotation_mode="anchor", fontsize=7.5)
    axes.margins(y=0.08)
