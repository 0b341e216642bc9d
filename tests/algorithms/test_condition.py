"""Estimates of extreme singular values of triangular matrices against the SVD."""

import math

import pytest
import torch

from neula.algorithms.spectra.condition import (
    expected_decay,
    extreme_singular_values,
    largest_singular_value,
)
from neula.algorithms.triangular.triangular import BlockTriangular
from neula.io.matrices import SPECTRA, random_matrix

U64 = 2.0**-53


def triangular(kind: str, n: int, cond: float = 1e3, seed: int = 0) -> torch.Tensor:
    return torch.linalg.qr(random_matrix(kind, n + 5, n, cond=cond, seed=seed), mode="r").R


def smallest_singular_value(r: torch.Tensor) -> float:
    return float(extreme_singular_values(r, r)[1])


@pytest.mark.parametrize("kind", [*SPECTRA, "normal", "uniform01"])
@pytest.mark.parametrize(("n", "cond"), [(1, 1.0), (33, 1e14), (257, 1e8)])
@pytest.mark.parametrize("seed", [0])
def test_extreme_singular_values(kind: str, n: int, cond: float, seed: int) -> None:
    """Rayleigh quotients: the largest value from below, the smallest from above, up to rounding.

    A random vector of dimension n has a component of ``1 / sqrt(n)`` along the extreme direction. Five steps
    of the power method on ``R^T R`` lose at most ``n^(1/10)`` of the largest value, four of inverse iteration
    ``n^(1/8)`` of the smallest (Higham 2002, section 15.2); a third of that component happens in 3 of 4
    cases, a hundredth in 1 of 100.
    """
    r = triangular(kind, n, cond, seed)
    s = torch.linalg.svdvals(r)
    # What rounding does to singular values themselves.
    noise = 4 * n * U64 * float(s[0])
    slack = 100 ** (1 / 4)
    largest, smallest = largest_singular_value(r), smallest_singular_value(r)
    assert float(s[0]) / (slack * n ** (1 / 10)) <= largest <= float(s[0]) * (1 + n * U64) + noise
    assert (float(s[-1]) - noise) / (1 + 1e-8) <= smallest <= slack * n ** (1 / 8) * (float(s[-1]) + noise)


def test_complex_matrices_whose_transpose_times_them_vanishes() -> None:
    r = torch.tensor([[1, 2], [1j, 2j]], dtype=torch.complex128)
    assert largest_singular_value(r) == pytest.approx(math.sqrt(10))


@pytest.mark.parametrize("width", [None, 128])
def test_both_at_once(width: int | None) -> None:
    r = triangular("geometric", 150, 1e4)
    triangle = r if width is None else BlockTriangular.from_factor(r, width)
    both = extreme_singular_values(r, triangle).tolist()
    assert both[0] == largest_singular_value(r)
    assert both[1] == pytest.approx(smallest_singular_value(r), rel=1e-10)
    r[70, 70] = 0
    assert extreme_singular_values(r, r)[1] == 0


@pytest.mark.parametrize("n", [64, 300])
def test_the_decay_of_a_diagonal_is_seen_half_way(n: int) -> None:
    """A geometric spectrum makes the diagonal fall geometrically; a few large or small values do not."""
    for cond in (1e2, 1e4, 1e6):
        r = torch.linalg.qr(random_matrix("geometric", 2 * n, n, cond=cond, seed=1), mode="r").R
        diagonal = r.diagonal()
        expected = expected_decay(diagonal[: n // 2], n)
        # The logarithm grows in proportion; the ends of the diagonal, and random vectors, count for the rest.
        assert 0.4 <= math.log(expected) / math.log(cond) <= 1.2
    for kind in ("cluster_small", "cluster_large", "arithmetic", "uniform01", "normal"):
        r = torch.linalg.qr(random_matrix(kind, 2 * n, n, cond=1e5, seed=1), mode="r").R
        assert expected_decay(r.diagonal()[: n // 2], n) < 10


def test_a_step_in_the_diagonal_does_not_go_on() -> None:
    """A wide matrix with damping: as large as its elements are for its rank, then the damping."""
    diagonal = torch.cat([torch.full((100,), 20.0), torch.full((500,), 0.5)])
    assert expected_decay(diagonal, 1200) == 40


def test_exactly_singular() -> None:
    r = triangular("normal", 20)
    r[7, 7] = 0
    assert smallest_singular_value(r) == 0.0
    assert largest_singular_value(r) > 0
