"""The gravity problem against independent formulas: SciPy, orthogonality, statistics."""

import io
import math
import sys

import numpy as np
import pytest
import scipy.special
import torch
from rich.console import Console

from neula.cli import gravity
from neula.cli.demo import run_demo

U = 2.0**-53
LATITUDES = torch.deg2rad(torch.tensor([-89.0, -61.3, -20.0, 0.0, 1e-3, 33.3, 47.11, 75.0, 89.0]).double())


def normalization(degree: int, order: int) -> float:
    """Factor from the classical to the fully normalized function, from exact integers."""
    ratio = math.factorial(degree - order) / math.factorial(degree + order)
    return math.sqrt((1 if order == 0 else 2) * (2 * degree + 1) * ratio)


def scipy_legendre(degree: int, order: int, latitude: np.ndarray | float) -> np.ndarray:
    """Fully normalized function from SciPy's, whose Condon-Shortley sign is taken back."""
    return (-1) ** order * normalization(degree, order) * scipy.special.lpmv(order, degree, np.sin(latitude))


def potential(
    problem: gravity.GravityProblem, column: int, latitude: float, longitude: float, radius: float
) -> float:
    """Potential (m^2/s^2) of one coefficient of 1, with SciPy's Legendre functions."""
    degree, order = int(problem.degrees[column]), int(problem.orders[column])
    angle = order * longitude
    wave = math.sin(angle) if problem.is_sine[column] else math.cos(angle)
    decay = (gravity.EARTH_RADIUS / radius) ** degree
    return float(gravity.GM / radius * decay * scipy_legendre(degree, order, latitude) * wave)


def solve(problem: gravity.GravityProblem) -> np.ndarray:
    """Reference solution: columns scaled to norm 1, then LAPACK."""
    A = problem.A.double().cpu().numpy()
    scale = np.linalg.norm(A, axis=0)
    return np.linalg.lstsq(A / scale, problem.b.double().cpu().numpy())[0] / scale


@pytest.fixture(scope="module")
def small() -> gravity.GravityProblem:
    return gravity.gravity_problem(12)


@pytest.mark.parametrize("degree", [2, 7, 33, 60])
def test_legendre_against_scipy(degree):
    *_, row = gravity.legendre(degree, LATITUDES)
    # About three roundings in each step of either recursion. SciPy takes the sine of the latitude and makes
    # the cosine from it: rounding both moves the latitude by 2 U / cosine, the function by at most `degree`
    # times that (Bernstein) and its maximum, which is below sqrt(2 (2 degree + 1)) by the addition theorem.
    moved = 2 * U / torch.cos(LATITUDES).numpy()
    bound = degree * math.sqrt(2 * (2 * degree + 1)) * (2 * 3 * U + moved)
    for order in range(degree + 1):
        reference = scipy_legendre(degree, order, LATITUDES.numpy())
        assert np.all(np.abs(row[order].numpy() - reference) <= bound)


def test_columns_are_second_differences_of_the_potential(small):
    h = 1e4
    for row in (0, 17, 801, small.A.shape[0] - 1):
        latitude, longitude = float(small.latitude[row]), float(small.longitude[row])
        for column in (0, 1, 3, 4, 40, 77, 100, 120, 150, small.A.shape[1] - 1):
            values = [
                potential(small, column, latitude, longitude, small.radius + k * h) for k in (-2, -1, 0, 1, 2)
            ]
            second = np.dot([-1 / 12, 4 / 3, -5 / 2, 4 / 3, -1 / 12], values) / h**2 / gravity.EOTVOS
            # The formula's error is h^4 / 90 times the sixth derivative at a radius nearby (hence 1.1), in
            # units of the second derivative; dividing by h^2 magnifies the rounding of the values.
            degree = int(small.degrees[column])
            truncation = 1.1 * (h / small.radius) ** 4 / 90 * math.prod(range(degree + 3, degree + 7))
            scale = gravity.GM / small.radius * math.sqrt(2 * (2 * degree + 1))
            rounding = 100 * U * scale / h**2 / gravity.EOTVOS
            bound = truncation * abs(float(small.A[row, column])) + rounding
            assert abs(float(small.A[row, column]) - second) <= bound


def test_table_of_coefficients(small):
    entries = list(zip(small.degrees, small.orders, small.is_sine, strict=True))
    assert len(entries) == len(set(entries)) == gravity.coefficient_count(12) == 165
    assert entries[:5] == [(2, 0, False), (2, 1, False), (2, 2, False), (2, 1, True), (2, 2, True)]
    assert all(0 <= order <= degree for degree, order, _ in entries)
    assert not small.is_sine[small.orders == 0].any()
    assert small.degree == 12


def test_noise_free_problem_recovers_the_truth():
    problem = gravity.gravity_problem(12, noise=0.0)
    A = problem.A.numpy()
    scale = np.linalg.norm(A, axis=0)
    condition = np.linalg.cond(A / scale)
    error = np.linalg.norm(scale * (solve(problem) - problem.truth.numpy()))
    # Backward stable solution of a consistent system: error of about condition times rounding.
    m, n = problem.A.shape
    assert error <= m * n**0.5 * U * condition * np.linalg.norm(scale * problem.truth.numpy())
    assert condition < 100


def test_noise_makes_the_error_that_statistics_predict(small):
    A = small.A.numpy()
    m, n = A.shape
    error = solve(small) - small.truth.numpy()
    # A (x - truth) is the projection of the noise: chi-squared with n degrees of freedom, b - A x with m - n.
    projected = np.sum((A @ error) ** 2) / small.noise**2
    residual = np.sum((small.b.numpy() - A @ solve(small)) ** 2) / small.noise**2
    assert abs(projected - n) < 5 * math.sqrt(2 * n)
    assert abs(residual - (m - n)) < 5 * math.sqrt(2 * (m - n))


def test_truth_follows_kaula():
    problem = gravity.gravity_problem(30, observations=957)
    standard = problem.truth.numpy() * problem.degrees**2 / gravity.KAULA
    n = len(standard)
    assert abs(np.sum(standard**2) - n) < 5 * math.sqrt(2 * n)
    degrees, signal, error = gravity.degree_errors(problem, np.zeros(n))
    assert degrees.tolist() == list(range(2, 31))
    np.testing.assert_array_equal(signal, error)
    for ell in (2, 11, 30):
        values = problem.truth.numpy()[problem.degrees == ell]
        assert signal[ell - 2] == pytest.approx(math.sqrt(np.mean(values**2)), rel=1e-14)


def test_geoid(small):
    """Of C_20 = 1e-6, R sqrt(5) (3 sin^2 - 1) / 2, whatever the longitude; and its mean over the sphere."""
    x = np.zeros(gravity.coefficient_count(3))
    x[0] = 1e-6
    latitude, longitude = np.array([-90.0, 0.0, 30.0]), np.array([0.0, 123.0])
    zonal = gravity.EARTH_RADIUS * 1e-6 * math.sqrt(5) * (3 * np.sin(np.deg2rad(latitude)) ** 2 - 1) / 2
    found = gravity.synthesize(x, latitude, longitude)
    np.testing.assert_allclose(found, np.stack([zonal] * 2, 1), rtol=1e-14)
    nodes, weights = np.polynomial.legendre.leggauss(13)
    height = gravity.synthesize(small.truth, np.rad2deg(np.arcsin(nodes)), np.arange(0, 360, 360 / 26))
    mean_square = weights @ np.mean(height**2, axis=1) / 2
    assert gravity.geoid_rms(small.truth) == pytest.approx(math.sqrt(mean_square), rel=1e-12)


def test_picture_without_matplotlib(small, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'neula\[plot\]'"):
        gravity.draw(small, small.truth, tmp_path / "gravity.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gravity.gravity_problem(1), "degree=1"),
        (lambda: gravity.gravity_problem(3, observations=11), "observations=11.*12"),
        (lambda: gravity.gravity_problem(3, noise=-1.0), "noise=-1.0"),
        (lambda: gravity.gravity_problem(3, dtype=torch.float16), "float16.*float64"),
        (lambda: gravity.synthesize(np.zeros(11), 0, 0), "11 entries"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_demo_runs_and_reports(tmp_path):
    pytest.importorskip("matplotlib")
    output = io.StringIO()
    run_demo(tmp_path / "new" / "folder", degree=6, console=Console(file=output, width=100))
    text = output.getvalue()
    shown = ("filip", "illc1033", "rat43", "450 x 45", "backward error", "scipy (cpu)", "gravity.png")
    assert all(expected in text for expected in shown)
    assert "NOT certified" not in text
    assert {path.name for path in (tmp_path / "new" / "folder").iterdir()} == {"fit.png", "gravity.png"}


def test_demo_checks_the_degree_before_any_work(tmp_path):
    with pytest.raises(ValueError, match="degree=0"):
        run_demo(tmp_path / "new", degree=0, console=Console(file=io.StringIO()))
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_problem_on_the_gpu():
    on_gpu, on_cpu = (gravity.gravity_problem(20, device=device) for device in ("cuda", "cpu"))
    assert on_gpu.A.is_cuda
    # Longitudes of a mission are reduced from angles of 2 pi 979, whose last bit differs between devices.
    angle = 2 * math.pi * gravity.REPEAT_REVOLUTIONS
    bound = 20 * angle * 8 * U * on_cpu.A.abs().amax(dim=0)
    assert ((on_gpu.A.cpu() - on_cpu.A).abs() <= bound).all()
