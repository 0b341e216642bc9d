"""Code shared by the pictures of all papers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from neula.errors import needs_extra
from neula.papers.data import Measurements

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas
else:
    Axes = Canvas = Any

MARKERS = "osD^vP*X"


def new_canvas(width: float, height: float) -> Canvas:
    """A canvas of so many inches; an ImportError says how to get matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise needs_extra("drawing", "matplotlib", "plot") from error
    return Figure(figsize=(width, height), layout="constrained")


def lines(
    axes: Axes, rows: Measurements, x: str, y: str, series: str, styles: Sequence[Hashable] = ()
) -> None:
    """One line with markers for each value of ``series``; what is None is left out.

    Later ones are drawn smaller, so that lines that coincide can both be seen. Where pictures share series,
    ``styles`` lists the values of all of them, and each has its colour and marker by its place there.
    """
    names = rows.by(series)
    for number, (name, part) in enumerate(names.items()):
        points = [(row[x], row[y]) for row in part if row.get(x) is not None and row.get(y) is not None]
        if points:
            style = (styles or list(names)).index(name)
            axes.plot(
                *zip(*points, strict=True),
                color=f"C{style}",
                marker=MARKERS[style % 8],
                markersize=max(3.0, 9.0 - 2 * number),
                label=str(name),
            )


def curves(
    rows: Measurements,
    canvas: Canvas,
    x: str,
    xlabel: str,
    quantities: Mapping[str, tuple[str, str]],
    series: str,
    *,
    legend: Any = "outside upper center",
    ncols: int = 1,
    sharey: bool = False,
    fontsize: int | None = 10,
) -> None:
    """A picture for each quantity, with its label and title, against a size that doubles: :func:`lines`."""
    panels = canvas.subplots(1, len(quantities), sharey=sharey, squeeze=False)[0]
    for axes, (y, (label, title)) in zip(panels, quantities.items(), strict=True):
        lines(axes, rows, x, y, series)
        log_log(axes, xlabel, label, title)
        axes.set_xscale("log", base=2)
    canvas.legend(*panels[0].get_legend_handles_labels(), loc=legend, ncols=ncols, fontsize=fontsize)


def grouped_bars(
    axes: Axes,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    labels: Mapping[str, Sequence[str]],
) -> None:
    """Bars side by side for each group, with labels above them."""
    width = 0.8 / len(series)
    for number, (name, heights) in enumerate(series.items()):
        left = [group + (number - (len(series) - 1) / 2) * width for group in range(len(groups))]
        bars = axes.bar(left, [height or 0.0 for height in heights], width, label=name)
        if name in labels:
            axes.bar_label(bars, labels[name], fontsize=8, rotation=90, padding=2)
    axes.set_xticks(range(len(groups)), groups, rotation=25, ha="right")


def log_log(axes: Axes, xlabel: str, ylabel: str, title: str = "") -> None:
    axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel, title=title)
    axes.grid(alpha=0.3)


def plain_ticks(axes: Axes) -> None:
    """Numbers such as 20 and 50 at a logarithmic axis that spans few decades."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def shape_text(m: int, n: int) -> str:
    return f"{m}x{n}"
