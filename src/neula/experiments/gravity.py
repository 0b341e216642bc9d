"""Estimate the Earth's gravity field from simulated satellite gradiometry: a large, dense, real least-squares problem.

A satellite in a low, nearly polar orbit measures the second radial derivative of the gravitational potential. Unknown
are the coefficients of the potential in spherical harmonics. Every observation depends on every coefficient, so the
matrix is dense; the true coefficients are known because the field is simulated, and the result can be judged.
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

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GM = 3.986004415e14
"""Gravitational constant times mass of the Earth, m^3/s^2 (EGM96)."""
EARTH_RADIUS = 6378136.3
"""Reference radius of the coefficients, m (EGM96)."""
EARTH_ROTATION = 7.292115e-5
"""Angular velocity of the Earth, rad/s."""
EOTVOS = 1e-9
"""One Eoetvoes, the unit of gravity gradients, in 1/s^2."""
REPEAT_REVOLUTIONS, REPEAT_DAYS = 979, 61
"""The satellite's ground track closes after 979 revolutions in 61 days, as GOCE's did."""
FIRST_DEGREE = 2
"""Degree 0 is the mass, degree 1 the position of the centre of mass: both are known."""


@dataclass(frozen=True)
class GravityProblem:
    """Least-squares problem ``min ||A x - b||`` for the coefficients of a gravity field.

    Attributes
    ----------
    A : Tensor, shape (m, n), column-major
        Second radial derivative of the potential at each observation for each coefficient, Eoetvoes (1e-9/s^2).
    b : Tensor, shape (m,)
        Observations with noise, Eoetvoes.
    truth : Tensor, shape (n,), float64
        Coefficients of the simulated field: fully normalized, dimensionless.
    degrees, orders : ndarray of int, shape (n,)
        Degree and order of each coefficient. Degree by degree, cosine coefficients (order 0, 1, ...) before sine
        coefficients (order 1, 2, ...).
    is_sine : ndarray of bool, shape (n,)
        Whether a coefficient belongs to a sine.
    latitude, longitude : Tensor, shape (m,), float64
        Geocentric position of the observations, radians.
    radius : float
        Distance of the observations from the centre of the Earth, m.
    noise : float
        Standard deviation of the noise in ``b``, Eoetvoes.
    """

    A: torch.Tensor
    b: torch.Tensor
    truth: torch.Tensor
    degrees: npt.NDArray[np.int64]
    orders: npt.NDArray[np.int64]
    is_sine: npt.NDArray[np.bool_]
    latitude: torch.Tensor
    longitude: torch.Tensor
    radius: float
    noise: float

    @property
    def degree(self) -> int:
        """The highest degree of the field."""
        return int(self.degrees[-1])


def coefficient_count(degree: int) -> int:
    """Number of coefficients of degrees 2 to ``degree``: ``(degree + 1)^2 - 4``.

    Parameters
    ----------
    degree : int
        Highest degree.

    Returns
    -------
    int

    Raises
    ------
    ValueError
        If ``degree`` is no integer of at least 2.

    Examples
    --------
    >>> coefficient_count(40)
    1677
    """
    if int(degree) != degree or degree < FIRST_DEGREE:
        raise ValueError(f"degree={degree!r}: give an integer of at least {FIRST_DEGREE}")
    return (int(degree) + 1) ** 2 - FIRST_DEGREE**2


def legendre(degree: int, latitude: torch.Tensor) -> Iterator[torch.Tensor]:
    """Fully normalized associated Legendre functions of the sine of the latitude, degree by degree.

    Parameters
    ----------
    degree : int
        Highest degree.
    latitude : Tensor, shape (p,)
        Geocentric latitudes, radians.

    Yields
    ------
    Tensor, shape (l + 1, p)
        For degree ``l = 0, 1, ..., degree`` the functions of order 0 to ``l``, normalized so that the mean of the
        square of ``P_lm(sin latitude) cos(m longitude)`` over the sphere is 1. The next degree is computed from
        it: do not modify it.

    Notes
    -----
    The standard forward column recursion, all orders and points at once. It is stable; float64 underflows near the
    poles only where the functions are negligible, up to degree 1900 or so [1]_.

    References
    ----------
    .. [1] S. A. Holmes and W. E. Featherstone, "A unified approach to the Clenshaw summation and the recursive
       computation of very high degree and order normalised associated Legendre functions", J. Geodesy 76 (2002)
       279-299, equations 11 to 13.
    """
    sine, cosine = torch.sin(latitude), torch.cos(latitude)
    before, last = torch.zeros_like(sine)[None], torch.ones_like(sine)[None]
    yield last
    for l in range(1, degree + 1):
        orders = torch.arange(l, dtype=sine.dtype, device=sine.device)[:, None]
        width = (l - orders) * (l + orders)
        row = torch.empty((l + 1, len(sine)), dtype=sine.dtype, device=sine.device)
        torch.mul(last, sine, out=row[:l]).mul_(torch.sqrt((4 * l * l - 1) / width))
        if l > 1:
            weight = torch.sqrt((2 * l + 1) / (2 * l - 3) * (l + orders - 1) * (l - orders - 1) / width)
            row[: l - 1].addcmul_(weight[: l - 1], before, value=-1)
        torch.mul(last[l - 1], cosine, out=row[l]).mul_(math.sqrt(3 if l == 1 else (2 * l + 1) / (2 * l)))
        yield row
        before, last = last, row


def design_matrix(
    degree: int,
    latitude: torch.Tensor,
    longitude: torch.Tensor,
    radius: float,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Second radial derivatives of the potential of each spherical harmonic at each point.

    Parameters
    ----------
    degree : int
        Highest degree.
    latitude, longitude : Tensor, shape (m,), float64
        Geocentric positions, radians.
    radius : float
        Distance from the centre of the Earth, m.
    dtype : torch.dtype
        float64 or float32.

    Returns
    -------
    Tensor, shape (m, n), column-major
        On the device of ``latitude``; n = (degree + 1)^2 - 4 columns, Eoetvoes for a coefficient of 1.

    Notes
    -----
    The potential of degree l decays as ``r^-(l+1)``, so its second derivative is ``(l+1)(l+2)/r^2`` times itself. Beside
    the matrix, memory is needed for about ``7 (degree + 1) m`` numbers.
    """
    columns = torch.empty((coefficient_count(degree), len(latitude)), dtype=dtype, device=latitude.device)
    cosine, sine = _multiples(degree, longitude)
    for l, row in enumerate(legendre(degree, latitude)):
        if l < FIRST_DEGREE:
            continue
        first = l * l - FIRST_DEGREE**2
        scaled = row * _gradient_factor(l, radius)
        torch.mul(scaled, cosine[: l + 1], out=columns[first : first + l + 1])
        torch.mul(scaled[1:], sine[1 : l + 1], out=columns[first + l + 1 : first + 2 * l + 1])
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
) -> GravityProblem:
    """Simulate a satellite mission and set up the estimation of the gravity field from its observations.

    Parameters
    ----------
    degree : int
        Highest degree L of the field; n = (L + 1)^2 - 4 unknowns.
    observations : int, optional
        Number m of observations. By default 10 n, fewer where the matrix would grow beyond 2^31 numbers, but at
        least 4 n.
    noise : float
        Standard deviation of the white noise, Eoetvoes. The default of 5 mE is the level of GOCE's gradiometer.
    seed : int
        For the field, the times of observation and the noise, the same on every device.
    inclination : float
        Inclination of the orbit, degrees. GOCE's 96.7 leaves gaps of 6.7 degrees around the poles and a worse
        conditioned matrix, as real missions have it.
    device : torch.device or str
        Where the matrix is made.
    dtype : torch.dtype
        float64 or float32.

    Returns
    -------
    GravityProblem

    Raises
    ------
    ValueError
        If the degree is no integer of at least 2, ``observations`` is below n, the noise negative or the dtype not
        one of the two.

    Notes
    -----
    The orbit is circular at about 250 km with a repeating ground track; each of m equal intervals of the mission holds
    one observation at a random time. The field follows Kaula's rule: coefficients of degree l are normal with standard
    deviation ``1e-5 / l^2`` [1]_.

    References
    ----------
    .. [1] W. M. Kaula, Theory of Satellite Geodesy, Blaisdell, 1966.

    Examples
    --------
    >>> problem = gravity_problem(10)
    >>> tuple(problem.A.shape)
    (1170, 117)
    """
    n = coefficient_count(degree)
    m = max(4 * n, min(10 * n, 2**31 // n)) if observations is None else int(observations)
    _check(n, m, noise, dtype)
    rng = np.random.default_rng(seed)
    degrees, orders, is_sine = _coefficient_table(degree)
    truth = torch.from_numpy(rng.standard_normal(n) * 1e-5 / degrees**2).to(device)
    times = torch.from_numpy((np.arange(m) + rng.random(m)) / m).to(device)
    errors = torch.from_numpy(rng.standard_normal(m) * noise).to(device)
    latitude, longitude = _ground_track(times, math.radians(inclination))
    radius = _orbit_radius()
    A = design_matrix(degree, latitude, longitude, radius, dtype)
    b = A @ truth.to(dtype) + errors.to(dtype)
    return GravityProblem(A, b, truth, degrees, orders, is_sine, latitude, longitude, radius, noise)


def degree_errors(
    problem: GravityProblem, x: Any
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Size and error of the coefficients of each degree.

    Parameters
    ----------
    problem : GravityProblem
    x : array or Tensor, shape (n,)
        Estimated coefficients.

    Returns
    -------
    degrees : ndarray of int, shape (L - 1,)
        2 to L.
    signal, error : ndarray, shape (L - 1,)
        Root mean square over the orders of the true coefficients and of their errors, dimensionless.
    """
    truth = _vector(problem.truth)
    squares = np.stack([truth**2, (_vector(x) - truth) ** 2])
    degrees = np.arange(FIRST_DEGREE, problem.degree + 1)
    starts = degrees**2 - FIRST_DEGREE**2
    signal, error = np.sqrt(np.add.reduceat(squares, starts, axis=1) / (2 * degrees + 1))
    return degrees, signal, error


def geoid_rms(x: Any) -> float:
    """Root mean square over the sphere of the geoid height that coefficients describe.

    Parameters
    ----------
    x : array or Tensor, shape (n,)
        Fully normalized coefficients, or errors of them.

    Returns
    -------
    float
        Metres. By the normalization it is the Earth's radius times the norm of ``x``.
    """
    return EARTH_RADIUS * float(np.linalg.norm(_vector(x)))


def synthesize(x: Any, latitude: npt.ArrayLike, longitude: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Geoid height on a grid from coefficients of the gravity field.

    Parameters
    ----------
    x : array or Tensor, shape (n,)
        Fully normalized coefficients in the order of :class:`GravityProblem`; n tells the degree.
    latitude : array_like, shape (p,)
        Geocentric latitudes, degrees.
    longitude : array_like, shape (q,)
        Longitudes, degrees.

    Returns
    -------
    ndarray, shape (p, q)
        Height of the geoid above the reference surface, metres (Bruns' formula on the sphere).

    Raises
    ------
    ValueError
        If n is not (L + 1)^2 - 4 for an integer L.
    """
    coefficients = torch.from_numpy(_vector(x))
    degree = math.isqrt(len(coefficients) + FIRST_DEGREE**2) - 1
    if degree < FIRST_DEGREE or coefficient_count(degree) != len(coefficients):
        raise ValueError(
            f"x has {len(coefficients)} entries: give (L + 1)^2 - 4 coefficients of degrees 2 to L"
        )
    latitude_rad, longitude_rad = (
        torch.from_numpy(np.deg2rad(np.atleast_1d(v))) for v in (latitude, longitude)
    )
    even, odd = torch.zeros((2, degree + 1, len(latitude_rad)), dtype=torch.float64)
    for l, row in enumerate(legendre(degree, latitude_rad)):
        if l < FIRST_DEGREE:
            continue
        first = l * l - FIRST_DEGREE**2
        even[: l + 1] += coefficients[first : first + l + 1, None] * row
        odd[1 : l + 1] += coefficients[first + l + 1 : first + 2 * l + 1, None] * row[1:]
    cosine, sine = _multiples(degree, longitude_rad)
    return (EARTH_RADIUS * (even.T @ cosine + odd.T @ sine)).numpy()


def draw(problem: GravityProblem, x: Any, path: str | Path) -> None:
    """Draw the true geoid, the error of the recovered one, and signal and error of each degree.

    Parameters
    ----------
    problem : GravityProblem
    x : array or Tensor, shape (n,)
        Estimated coefficients.
    path : str or Path
        File to write; its suffix says the format (png, pdf, svg).

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    figure = _new_figure()
    grid = figure.add_gridspec(2, 2, height_ratios=(1.0, 0.95))
    latitude, longitude = np.linspace(-90, 90, 181), np.linspace(-180, 180, 361)
    truth = synthesize(problem.truth, latitude, longitude)
    error = synthesize(_vector(x) - _vector(problem.truth), latitude, longitude)
    _map(figure, grid[0, 0], (latitude, longitude, truth), "True geoid", "Geoid height (m)")
    _map(figure, grid[0, 1], (latitude, longitude, 100 * error), "Recovered minus true geoid", "Error (cm)")
    _degree_plot(figure, grid[1, :], problem, x)
    m, n = problem.A.shape
    figure.suptitle(
        f"Gravity field to degree {problem.degree} from simulated satellite gradiometry: "
        f"{m:,} observations, {n:,} unknowns",
        fontsize=15,
    )
    figure.savefig(path, dpi=150)


def _check(n: int, m: int, noise: float, dtype: torch.dtype) -> None:
    if m < n:
        raise ValueError(f"observations={m}: give at least {n}, one for each unknown")
    if not noise >= 0:
        raise ValueError(f"noise={noise!r}: give a standard deviation of at least 0 (Eoetvoes)")
    if dtype not in (torch.float64, torch.float32):
        raise ValueError(f"dtype={dtype}: choose torch.float64 or torch.float32")


def _coefficient_table(
    degree: int,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    range_of_degrees = np.arange(FIRST_DEGREE, degree + 1)
    degrees = np.repeat(range_of_degrees, 2 * range_of_degrees + 1)
    position = np.arange(len(degrees)) - (degrees**2 - FIRST_DEGREE**2)
    is_sine = position > degrees
    return degrees, np.where(is_sine, position - degrees, position), is_sine


def _orbit_radius() -> float:
    """Radius at which Kepler's third law gives the repeating ground track (the oblateness left out), m."""
    angular_velocity = EARTH_ROTATION * REPEAT_REVOLUTIONS / REPEAT_DAYS
    return (GM / angular_velocity**2) ** (1 / 3)


def _ground_track(times: torch.Tensor, inclination: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Latitude and longitude (radians) at times in units of the repeat period."""
    argument = 2 * math.pi * REPEAT_REVOLUTIONS * times
    rotation = 2 * math.pi * REPEAT_DAYS * times
    latitude = torch.asin(math.sin(inclination) * torch.sin(argument))
    node = torch.atan2(math.cos(inclination) * torch.sin(argument), torch.cos(argument))
    return latitude, torch.remainder(node - rotation, 2 * math.pi)


def _gradient_factor(degree: int, radius: float) -> float:
    """Second radial derivative of ``GM / r (R / r)^degree`` at the radius, Eoetvoes."""
    decay = (EARTH_RADIUS / radius) ** degree
    return GM / radius**3 * (degree + 1) * (degree + 2) * decay / EOTVOS


def _multiples(degree: int, longitude: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of 0, 1, ..., degree times the longitude, each of shape (degree + 1, points)."""
    orders = torch.arange(degree + 1, dtype=longitude.dtype, device=longitude.device)
    angles = orders[:, None] * longitude
    return torch.cos(angles), torch.sin(angles)


def _vector(x: Any) -> npt.NDArray[np.float64]:
    on_host = x.detach().cpu() if isinstance(x, torch.Tensor) else x
    return np.asarray(on_host, dtype=np.float64).ravel()


def _new_figure() -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'neula[plot]'") from error
    return Figure(figsize=(13, 8.6), layout="constrained")


def _map(
    figure: Figure, place: Any, field: tuple[npt.NDArray[np.float64], ...], title: str, label: str
) -> None:
    latitude, longitude, values = field
    limit = float(np.abs(values).max()) or 1.0
    axes = figure.add_subplot(place, projection="mollweide")
    image = axes.pcolormesh(
        np.deg2rad(longitude),
        np.deg2rad(latitude),
        values,
        cmap="RdBu_r",
        vmin=-limit,
        vmax=limit,
        shading="gouraud",
        rasterized=True,
    )
    axes.set_title(title, pad=12)
    axes.grid(color="black", alpha=0.15, linewidth=0.5)
    axes.set_xticklabels([])
    axes.tick_params(axis="y", labelsize=8, colors="0.35")
    figure.colorbar(image, ax=axes, orientation="horizontal", shrink=0.7, aspect=30, pad=0.04, label=label)


def _degree_plot(figure: Figure, place: Any, problem: GravityProblem, x: Any) -> None:
    degrees, signal, error = degree_errors(problem, x)
    axes = figure.add_subplot(place)
    axes.semilogy(
        degrees, 1e-5 / degrees**2, color="0.6", linestyle="--", label=r"Kaula's rule, $10^{-5} / l^2$"
    )
    axes.semilogy(degrees, signal, color="tab:blue", marker="o", markersize=3.5, label="True coefficients")
    axes.semilogy(degrees, error, color="tab:red", marker="s", markersize=3.5, label="Error of the estimate")
    axes.set_title("Coefficients by degree")
    axes.set_xlabel(r"Degree $l$")
    axes.set_ylabel("RMS over orders (dimensionless)")
    axes.set_xlim(degrees[0], degrees[-1])
    axes.grid(which="major", alpha=0.3)
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
