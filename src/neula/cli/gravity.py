"""Estimate the gravity field of the Earth from satellite gradiometry: a large dense least-squares problem.

A satellite in a low, nearly polar orbit measures the second radial derivative of the gravitational potential.
Unknown are the coefficients of the potential in spherical harmonics. Every observation depends on every
coefficient, so the matrix is dense; the field is simulated, so the true coefficients are known and the
estimate can be judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from neula.papers.drawing import new_canvas

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GM = 3.986004415e14  # gravitational constant times mass of the Earth, m^3/s^2 (EGM96)
EARTH_RADIUS = 6378136.3  # reference radius of the coefficients, m (EGM96)
EARTH_ROTATION = 7.292115e-5  # angular velocity of the Earth, rad/s
EOTVOS = 1e-9  # one Eoetvoes, the unit of gravity gradients, in 1/s^2
KAULA = 1e-5  # Kaula's rule: coefficients of degree l have the size ``KAULA / l^2``, dimensionless
REPEAT_REVOLUTIONS, REPEAT_DAYS = 979, 61
"""The ground track closes after 979 revolutions in 61 days, as that of ESA's GOCE mission did."""
FIRST_DEGREE = 2  # degree 0 is the mass, degree 1 the position of the centre of mass: both are known

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class GravityProblem:
    """Least-squares problem ``min ||A x - b||`` for the coefficients of a gravity field."""

    # Shape (m, n), column-major: second radial derivative of the potential at each observation for a
    # coefficient of 1, Eoetvoes (1e-9/s^2).
    A: torch.Tensor
    b: torch.Tensor  # shape (m,): observations with noise, Eoetvoes
    # Shape (n,), float64: coefficients of the simulated field: fully normalized, dimensionless.
    truth: torch.Tensor
    # degrees, orders, int, shape (n,): Degree and order of each coefficient. Degree by degree, cosine
    # coefficients (order 0, 1, ...) before sine coefficients (order 1, 2, ...).
    degrees: IntArray
    orders: IntArray
    is_sine: npt.NDArray[np.bool_]  # bool, shape (n,): whether a coefficient belongs to a sine
    # latitude, longitude, shape (m,), float64: geocentric position of the observations, radians.
    latitude: torch.Tensor
    longitude: torch.Tensor
    radius: float  # distance of the observations from the centre of the Earth, m
    noise: float  # standard deviation of the noise in b, Eoetvoes

    @property
    def degree(self) -> int:
        return int(self.degrees[-1])


def coefficient_count(degree: int) -> int:
    """Number of coefficients of degrees 2 to ``degree``: ``(degree + 1)^2 - 4``.

    >>> coefficient_count(40)
    1677
    """
    if degree < FIRST_DEGREE:
        raise ValueError(f"degree={degree!r}: give an integer of at least {FIRST_DEGREE}")
    return _first_column(degree + 1)


def legendre(degree: int, latitude: torch.Tensor) -> Iterator[torch.Tensor]:
    """Fully normalized associated Legendre functions of the sine of p latitudes (radians), degree by degree.

    The standard forward column recursion, all orders and points at once. It is stable; up to degree 1900 or
    so float64 underflows only near the poles, where those functions are negligible (S. A. Holmes and W. E.
    Featherstone, "A unified approach to the Clenshaw summation and the recursive computation of very high
    degree and order normalised associated Legendre functions", J. Geodesy 76, 2002, section 2).

    For degree ``l = 0, 1, ..., degree`` it yields the functions of order 0 to ``l``, shape (l + 1, p),
    without the Condon-Shortley sign, normalized so that the mean square of ``P_lm(sin latitude)
    cos(m longitude)`` over the sphere is 1. The next degrees are computed from it: do not modify it.
    """
    sine, cosine = torch.sin(latitude), torch.cos(latitude)
    before = last = torch.ones_like(sine)[None]
    yield last
    for ell in range(1, degree + 1):
        orders = torch.arange(ell, dtype=sine.dtype, device=sine.device)[:, None]
        width = (ell - orders) * (ell + orders)
        row = torch.empty((ell + 1, len(sine)), dtype=sine.dtype, device=sine.device)
        torch.mul(last, sine, out=row[:ell]).mul_(torch.sqrt((4 * ell * ell - 1) / width))
        if ell > 1:
            weight = (2 * ell + 1) / (2 * ell - 3) * (ell + orders - 1) * (ell - orders - 1) / width
            row[:-2].addcmul_(torch.sqrt(weight[:-1]), before, value=-1)
        torch.mul(last[-1], cosine, out=row[-1]).mul_(math.sqrt(3 if ell == 1 else 1 + 1 / (2 * ell)))
        yield row
        before, last = last, row


def design_matrix(
    degree: int,
    latitude: torch.Tensor,
    longitude: torch.Tensor,
    radius: float,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Second radial derivative of the potential of every spherical harmonic at every point.

    The potential of degree l decays as ``r^-(l+1)``, so its second derivative is ``(l+1)(l+2)/r^2`` times
    itself. Latitudes and longitudes are geocentric, in radians, the radius in m. The matrix is column-major
    and has n = (degree + 1)^2 - 4 columns, in Eoetvoes for a coefficient of 1; memory is needed for about
    ``6 (degree + 1) m`` more numbers.
    """
    columns = torch.empty((coefficient_count(degree), len(latitude)), dtype=dtype, device=latitude.device)
    cosine, sine = _multiples(degree, longitude)
    for ell, row in enumerate(legendre(degree, latitude)):
        if ell >= FIRST_DEGREE:
            even, odd = _blocks(columns, ell)
            decay = (EARTH_RADIUS / radius) ** ell
            scaled = row * (GM / radius**3 * (ell + 1) * (ell + 2) * decay / EOTVOS)
            torch.mul(scaled, cosine[: ell + 1], out=even)
            torch.mul(scaled[1:], sine[1 : ell + 1], out=odd)
    return columns.T


def gravity_problem(
    degree: int,
    observations: int | None = None,
    *,
    noise: float = 0.005,
    seed: int = 0,
    inclination: float = 89.0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
    part: slice = slice(None),
) -> GravityProblem:
    """Simulate a satellite mission and set up the estimation of the gravity field from its observations.

    The orbit is circular at an altitude of 249 km with a repeating ground track; each of m equal intervals of
    the mission holds one observation at a random time. The field follows Kaula's rule (Theory of Satellite
    Geodesy, 1966): coefficients of degree l are normal with standard deviation ``1e-5 / l^2``.

    There are n = (degree + 1)^2 - 4 unknowns, and by default m = 10 n observations, fewer where the matrix
    would grow beyond 2^31 numbers, but at least 4 n. The noise is white; its standard deviation, in
    Eoetvoes, is by default the level of GOCE's gradiometer. The inclination of the orbit is in degrees:
    GOCE's 96.7 leaves gaps of 6.7 degrees around the poles, and the matrix is worse conditioned the higher
    the degree: after column scaling the zonal coefficients alone have condition number 50 at degree 60 and
    3000 at degree 120, but 8 at the default. The seed is for the field, the times and the noise, the same on
    every device. ``part`` are the observations to make: processes that make a part each have made the same as
    one that makes all. A ValueError says which number is out of range.

    >>> problem = gravity_problem(10)
    >>> tuple(problem.A.shape)
    (1170, 117)
    """
    n = coefficient_count(degree)
    m = max(4 * n, min(10 * n, 2**31 // n)) if observations is None else int(observations)
    if m < n:
        raise ValueError(f"observations={m}: give at least {n}, the number of unknowns")
    if not noise >= 0:
        raise ValueError(f"noise={noise!r}: give a standard deviation of at least 0 (Eoetvoes)")
    if dtype not in (torch.float64, torch.float32):
        raise ValueError(f"dtype={dtype}: choose torch.float64 or torch.float32")
    rng = np.random.default_rng(seed)
    degrees, orders, is_sine = _coefficient_table(degree)
    truth = torch.from_numpy(rng.standard_normal(n) * KAULA / degrees**2).to(device)
    times = torch.from_numpy(((np.arange(m) + rng.random(m)) / m)[part]).to(device)
    errors = torch.from_numpy((rng.standard_normal(m) * noise)[part]).to(device)
    latitude, longitude = _ground_track(times, math.radians(inclination))
    # By Kepler's third law for a spherical Earth, the ground track repeats at this radius.
    radius = (GM / (EARTH_ROTATION * REPEAT_REVOLUTIONS / REPEAT_DAYS) ** 2) ** (1 / 3)
    A = design_matrix(degree, latitude, longitude, radius, dtype)
    b = A @ truth.to(dtype) + errors.to(dtype)
    return GravityProblem(A, b, truth, degrees, orders, is_sine, latitude, longitude, radius, noise)


def degree_errors(problem: GravityProblem, x: Any) -> tuple[IntArray, FloatArray, FloatArray]:
    """The degrees 2 to L; for each the root mean squares of true coefficients and of the errors of ``x``."""
    truth = as_vector(problem.truth)
    squares = np.stack([truth**2, (as_vector(x) - truth) ** 2])
    degrees = np.arange(FIRST_DEGREE, problem.degree + 1)
    sums = np.add.reduceat(squares, _first_column(degrees), axis=1)
    signal, error = np.sqrt(sums / (2 * degrees + 1))
    return degrees, signal, error


def geoid_rms(x: Any) -> float:
    """Root mean square over the sphere of the geoid height (m) that coefficients, or their errors, describe.

    By the normalization it is the Earth's radius times their norm.
    """
    return EARTH_RADIUS * float(np.linalg.norm(as_vector(x)))


def synthesize(x: Any, latitude: npt.ArrayLike, longitude: npt.ArrayLike) -> FloatArray:
    """Geoid height (m) on a grid of latitudes and longitudes (degrees), by Bruns' formula.

    It is the height above the reference sphere without the known degrees 0 and 1, shape (latitudes,
    longitudes). The number of the coefficients ``x``, in the order of :class:`GravityProblem`, tells the
    degree; a ValueError says that it belongs to none.
    """
    coefficients = torch.from_numpy(as_vector(x))[:, None]
    degree = math.isqrt(len(coefficients) + FIRST_DEGREE**2) - 1
    if degree < FIRST_DEGREE or coefficient_count(degree) != len(coefficients):
        raise ValueError(f"x has {len(coefficients)} entries: give all (L + 1)^2 - 4 of degrees 2 to L")
    parallels, meridians = (torch.from_numpy(np.deg2rad(np.atleast_1d(v))) for v in (latitude, longitude))
    even, odd = torch.zeros((2, degree + 1, len(parallels)), dtype=torch.float64, device="cpu")
    for ell, row in enumerate(legendre(degree, parallels)):
        if ell >= FIRST_DEGREE:
            of_cosine, of_sine = _blocks(coefficients, ell)
            even[: ell + 1] += of_cosine * row
            odd[1 : ell + 1] += of_sine * row[1:]
    cosine, sine = _multiples(degree, meridians)
    return EARTH_RADIUS * (even.T @ cosine + odd.T @ sine).numpy()


def _first_column(degree: Any) -> Any:
    """Column of the first coefficient of a degree (or of an array of degrees)."""
    return degree**2 - FIRST_DEGREE**2


def _blocks(by_column: torch.Tensor, degree: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of ``by_column`` (one for each coefficient) for the cosines and the sines of one degree."""
    block = by_column[_first_column(degree) : _first_column(degree + 1)]
    return block[: degree + 1], block[degree + 1 :]


def _coefficient_table(degree: int) -> tuple[IntArray, IntArray, npt.NDArray[np.bool_]]:
    each = np.arange(FIRST_DEGREE, degree + 1)
    degrees = np.repeat(each, 2 * each + 1)
    position = np.arange(len(degrees)) - _first_column(degrees)
    is_sine = position > degrees
    return degrees, np.where(is_sine, position - degrees, position), is_sine


def _ground_track(times: torch.Tensor, inclination: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Latitude and longitude (radians) at times in units of the repeat period."""
    argument = 2 * math.pi * REPEAT_REVOLUTIONS * times
    rotation = 2 * math.pi * REPEAT_DAYS * times
    latitude = torch.asin(math.sin(inclination) * torch.sin(argument))
    inertial = torch.atan2(math.cos(inclination) * torch.sin(argument), torch.cos(argument))
    return latitude, torch.remainder(inertial - rotation, 2 * math.pi)


def _multiples(degree: int, longitude: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of 0, 1, ..., degree times the longitude, each of shape (degree + 1, points)."""
    orders = torch.arange(degree + 1, dtype=longitude.dtype, device=longitude.device)
    angles = orders[:, None] * longitude
    return torch.cos(angles), angles.sin_()


def as_vector(x: Any) -> FloatArray:
    on_host = x.detach().cpu() if isinstance(x, torch.Tensor) else x
    return np.asarray(on_host, dtype=np.float64).ravel()


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
