"""Square least-squares problems on a CPU: by LU where full rank is certain, else as others."""

from __future__ import annotations

import numpy as np
import pytest

import neula
from neula.algorithms.elimination.compiled import available
from scaled_errors import scaled_errors

pytestmark = pytest.mark.skipif(not available(), reason="no compiled core")

N = 260
"""Beyond the orders of which the core forms the Gram matrix."""


WIDE = np.clongdouble
"""Extended precision, in which residuals are those of x as it is returned."""


def whole(*shape: int, seed: int, imaginary: bool = False) -> np.ndarray:
    """Integers, whose products are exact."""
    rng = np.random.default_rng(seed)
    real = rng.integers(-9, 10, shape).astype(np.float64)
    return real + 1j * whole(*shape, seed=seed + 1) if imaginary else real


def system(dtype: str, *batch: int, k: int = 2) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A, b, and the x with ``A x = b``."""
    imaginary = dtype.startswith("complex")
    a, x = whole(*batch, N, N, seed=3, imaginary=imaginary), whole(*batch, N, k, seed=5, imaginary=imaginary)
    return a.astype(dtype), (a @ x).astype(dtype), x


def norms(x: np.ndarray) -> np.ndarray:
    return np.sqrt((np.abs(x) ** 2).sum(0))


@pytest.mark.parametrize("dtype", ["float64", "float32", "complex128", "complex64"])
def test_the_errors_of_lu_are_bounded(dtype: str) -> None:
    a, b, exact = system(dtype)
    result = neula.lstsq(a, b)
    assert result.converged
    assert result.rank == N
    assert result.factorization == "lu fp64"
    assert (scaled_errors(a, result.x, exact) <= result.forward_errors).all()
    condition = np.linalg.cond(a / np.linalg.norm(a, axis=0))
    assert condition / 3 <= result.condition <= 1.01 * condition
    residual = b.astype(WIDE) - a.astype(WIDE) @ result.x.astype(WIDE)
    assert result.residual_norm == pytest.approx(norms(residual).astype(float), rel=1e-3)
    scaled = a / norms(a)
    slope = norms(scaled.conj().T @ residual) / (np.linalg.norm(scaled, 2) * norms(residual))
    assert slope.max() * (1 - 1e-3) <= result.optimality <= min(2 * slope.max(), 1)


@pytest.mark.parametrize("dtype", ["float64", "float32", "complex64"])
def test_columns_of_different_size(dtype: str) -> None:
    a, b, exact = system(dtype)
    units = 2.0 ** np.where(np.arange(N) % 2, 4, -90 if dtype == "float64" else -9)
    plain, result = neula.lstsq(a, b), neula.lstsq((a * units).astype(dtype), b)
    assert result.converged
    assert result.factorization == "lu fp64"
    assert (scaled_errors(a, result.x * units[:, None], exact) <= result.forward_errors).all()
    assert result.backward_error <= result.tolerance
    assert result.condition == pytest.approx(plain.condition, rel=0.5)


def test_solutions_outside_the_range_of_their_dtype() -> None:
    a, b, _ = system("float32", k=1)
    a[:, 0] *= 2.0**-120
    with pytest.raises(OverflowError):
        neula.lstsq(a, b * 2.0**20)


def test_zero_right_hand_sides() -> None:
    a, b, exact = system("float64")
    b[:, 1] = 0
    result, nothing = neula.lstsq(a, b), neula.lstsq(a, b[:, 1])
    for one in (result, nothing):
        assert one.converged
        assert one.factorization == "lu fp64"
    assert scaled_errors(a, result.x[:, :1], exact[:, :1]) <= result.forward_errors[0]
    assert result.forward_errors[1] == result.residual_norm[1] == nothing.forward_error == 0
    assert not result.x[:, 1].any()
    assert not nothing.x.any()


def test_progress_takes_no_other_method() -> None:
    a, b, _ = system("float64")
    seen: list[tuple[str, float]] = []
    result = neula.lstsq(a, b, progress=lambda *stage: seen.append(stage))
    assert result.factorization == "lu fp64"
    assert seen == [("lu fp64", 0.0), ("lu fp64", 1.0)]


def test_single_precision_is_refined() -> None:
    n = 420
    a, x = whole(n, n, seed=7), whole(n, 1, seed=9)
    result = neula.lstsq(a.astype(np.float32), (a @ x).astype(np.float32))
    assert result.converged
    assert result.factorization == "lu fp32"
    assert scaled_errors(a, result.x, x) <= result.forward_errors


def test_a_batch_with_a_singular_matrix() -> None:
    a, _, exact = system("float64", 2)
    a[1, :, 4] = a[1, :, 7]
    result = neula.lstsq(a, a @ exact)
    assert result.ranks.tolist() == [N, N - 1]
    assert {attempt.method for attempt in result.attempts} >= {"lu fp64"}
    shortest = exact[1].copy()
    shortest[[4, 7]] = shortest[[4, 7]].mean(0)
    assert (scaled_errors(a[0], result.x[0], exact[0]) <= result.forward_errors[0]).all()
    assert (scaled_errors(a[1], result.x[1], shortest) <= result.forward_errors[1]).all()


@pytest.mark.parametrize(
    ("asked", "k"), [({"damp": 0.5}, 2), ({"weights": np.ones(N)}, 2), ({"certify": "forward"}, 2), ({}, 200)]
)
def test_what_lu_does_not_solve(asked: dict, k: int) -> None:
    a, b, exact = system("float64", k=k)
    result = neula.lstsq(a, b, **asked)
    assert result.converged
    assert not result.factorization.startswith("lu")
    if "damp" not in asked:
        assert (scaled_errors(a, result.x, exact) <= result.forward_errors).all()


def test_a_threshold_decides_the_rank() -> None:
    a, b, _ = system("float64")
    with pytest.warns(neula.IllConditionedWarning):
        result = neula.lstsq(a, b[:, :1], rcond=0.05)
    assert result.rank < N
