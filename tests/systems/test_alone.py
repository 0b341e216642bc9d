"""One linear system beyond the orders whose inverse is formed: what is measured is a bound."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

import numpy as np
import pytest
from tests.campaign.oracle import system

import neula
from neula.algorithms.spectra.inverse_norm import EXPLICIT
from neula.engines.shipped import machine
from scaled_errors import scaled_errors

pytestmark = [
    pytest.mark.usefixtures("with_core_and_without"),
    pytest.mark.filterwarnings("ignore::neula.AccuracyWarning"),
]

N = EXPLICIT + 3


def with_values(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A random matrix with these singular values."""
    left, right = (np.linalg.qr(rng.standard_normal((N, N)))[0] for _ in range(2))
    return (left * values) @ right


def one_small(condition: float) -> np.ndarray:
    return np.append(np.ones(N - 1), 1 / condition)


KINDS = {
    "normal": lambda rng: rng.standard_normal((N, N)),
    "orthogonal": lambda rng: with_values(np.ones(N), rng),
    "geometric 1e8": lambda rng: with_values(np.logspace(0, -8, N), rng),
    "one small 1e11": lambda rng: with_values(one_small(1e11), rng),
    "one large 1e11": lambda rng: with_values(1 / one_small(1e11)[::-1] * 1e-11, rng),
    "half small 1e7": lambda rng: with_values(np.where(np.arange(N) < N // 2, 1.0, 1e-7), rng),
    "growth": lambda rng: np.asfortranarray(np.eye(N) - np.tril(np.ones((N, N)), -1) + np.eye(N)[:, -1:]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_the_forward_error_is_a_bound(kind: str, dtype: str) -> None:
    rng = np.random.default_rng(5)
    a = KINDS[kind](rng).astype(dtype, order="K") * 2.0**20
    sides = [rng.standard_normal(N), a.astype(float) @ rng.standard_normal(N), np.eye(N)[0]]
    b = np.array(sides).T.astype(dtype)
    result = neula.solve(a, b)
    assert (scaled_errors(a, result.x, system(a, b).rounded_solution(N)) <= result.forward_errors).all()


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("n", [N, machine("cpu").numbers["core_order"] + 3])
def test_singular_matrices_are_not_solved(n: int, dtype: str, order: Literal["C", "F"]) -> None:
    """Rounding errors make their factors regular, and a b in the range hides that from residuals."""
    rng = np.random.default_rng(6)
    for rank in (n - 1, n - 2, n // 2):
        a = rng.integers(-3, 4, (n, n)).astype(float)
        a[rank:] = rng.integers(-1, 2, (n - rank, 3)) @ a[:3] + a[3:4]
        b = (a @ np.ones(n)).astype(dtype)
        a = np.array(a, dtype, order=order)
        with suppress(np.linalg.LinAlgError):
            assert not neula.solve(a, b).converged


@pytest.mark.parametrize(
    ("of_a", "of_b"), [(1e34, 1.0), (1.0, 1e-37), (1.0, 1e-43), (1e-30, 1e-36), (1.0, 1e30)]
)
@pytest.mark.parametrize(("count", "n", "structure"), [(1, 65, "pos"), (1, 401, "gen"), (2, 401, "gen")])
def test_updates_that_underflow_in_single_precision(
    of_a: float, of_b: float, count: int, n: int, structure: str
) -> None:
    rng = np.random.default_rng(n)
    root = rng.standard_normal((n, n))
    a = root @ root.T / n + np.eye(n) if structure == "pos" else root + 4 * n**0.5 * np.eye(n)
    a, b = (of_a * a).astype("f4"), (rng.standard_normal((n, 1)) * of_b).astype("f4")
    a = np.tril(a) + np.tril(a, -1).T
    result = neula.solve(np.stack([a] * count) if count > 1 else a, b, assume_a=structure)
    if result.converged:
        x = result.x[0] if count > 1 else result.x
        # The residual in double precision shows errors far above its own.
        exact = (
            system(a, b).rounded_solution(n)
            if n == 65
            else np.linalg.solve(*(y.astype(float) for y in (a, b)))
        )
        assert (scaled_errors(a, x, exact) <= result.forward_error + 1e-12).all()
