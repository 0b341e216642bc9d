"""The picture of the demonstration: a gravity field, and the errors of its estimate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from neula.cli.gravity import KAULA, FloatArray, GravityProblem, as_vector, degree_errors, synthesize
from neula.papers.drawing import new_canvas

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(problem: GravityProblem, x: Any, path: str | Path) -> None:
    """Draw the true geoid, the error of the recovered one, and signal and error of each degree.

    The suffix of the file says the format (png, pdf, svg). An ImportError says how to get matplotlib.
    """
    figure = new_canvas(13, 8.6)
    grid = figure.add_gridspec(2, 2, height_ratios=(1.0, 0.95))
    truth = synthesize(problem.truth, *_map_grid())
    error = synthesize(as_vector(x) - as_vector(problem.truth), *_map_grid())
    _map(figure, grid[0, 0], truth, "True geoid", "Geoid height (m)", "RdBu_r")
    _map(figure, grid[0, 1], 100 * error, "Recovered minus true geoid", "Geoid height error (cm)", "PuOr_r")
    _degree_plot(figure, grid[1, :], problem, x)
    m, n = problem.A.shape
    figure.suptitle(
        f"Gravity field to degree {problem.degree} from simulated satellite gradiometry: "
        f"{m:,} observations, {n:,} unknowns",
        fontsize=15,
    )
    figure.savefig(path, dpi=150)


def _map_grid() -> tuple[FloatArray, FloatArray]:
    """Latitudes and longitudes of a map, one point a degree."""
    return np.linspace(-90, 90, 181), np.linspace(-180, 180, 361)


def _map(figure: Figure, place: Any, values: FloatArray, title: str, label: str, cmap: str) -> None:
    latitude, longitude = (np.deg2rad(degrees) for degrees in _map_grid())
    limit = float(np.abs(values).max()) or 1.0
    axes = figure.add_subplot(place, projection="mollweide")
    image = axes.pcolormesh(
        longitude, latitude, values, cmap=cmap, vmin=-limit, vmax=limit, shading="gouraud", rasterized=True
    )
    axes.set_title(title, pad=12)
    axes.grid(color="black", alpha=0.15, linewidth=0.5)
    axes.set_xticklabels([])
    axes.tick_params(axis="y", labelsize=8, colors="0.35")
    figure.colorbar(image, ax=axes, orientation="horizontal", shrink=0.7, aspect=30, pad=0.04, label=label)


def _degree_plot(figure: Figure, place: Any, problem: GravityProblem, x: Any) -> None:
    degrees, signal, error = degree_errors(problem, x)
    axes = figure.add_subplot(place)
    kaula = KAULA / degrees**2
    axes.semilogy(degrees, kaula, color="0.6", linestyle="--", label=r"Kaula's rule, $10^{-5} / l^2$")
    axes.semilogy(degrees, signal, color="tab:blue", marker="o", markersize=3.5, label="True coefficients")
    axes.semilogy(degrees, error, color="tab:red", marker="s", markersize=3.5, label="Error of the estimate")
    axes.set_title("Coefficients by degree")
    axes.set_xlabel(r"Degree $l$")
    axes.set_ylabel("RMS over orders (dimensionless)")
    axes.margins(x=0.01)
    axes.grid(which="major", alpha=0.3)
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
