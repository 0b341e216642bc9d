"""Systems in float32 whose factors are in single precision: updates that underflow there are not exact."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from tests.campaign.oracle import System

import neula


@pytest.mark.parametrize(
    ("of_a", "of_b"), [(1e34, 1.0), (1.0, 1e-37), (1.0, 1e-43), (1e-30, 1e-36), (1.0, 1e30)]
)
@pytest.mark.parametrize(("count", "n", "structure"), [(1, 65, "pos"), (1, 401, "gen"), (2, 401, "gen")])
def test_units(of_a: float, of_b: float, count: int, n: int, structure: str) -> None:
    rng = np.random.default_rng(n)
    root = rng.standard_normal((n, n))
    a = (
        (root @ root.T / n + np.eye(n) if structure == "pos" else root + 4 * n**0.5 * np.eye(n)) * of_a
    ).astype("f4")
    a, b = np.tril(a) + np.tril(a, -1).T, (rng.standard_normal((n, 1)) * of_b).astype("f4")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", neula.AccuracyWarning)
        result = neula.solve(np.stack([a] * count) if count > 1 else a, b, assume_a=structure)
    if result.converged:
        x = result.x[0] if count > 1 else result.x
        # The residual in double precision shows errors far above its own.
        exact = (
            np.linalg.solve(a.astype(float), b.astype(float)) if n > 65 else System(a, b).rounded_solution(n)
        )
        sizes = np.linalg.norm(a.astype(float), axis=0)[:, None]
        error = np.linalg.norm(sizes * (x - exact)) / np.linalg.norm(sizes * exact)
        assert error <= result.forward_error + 1e-12
