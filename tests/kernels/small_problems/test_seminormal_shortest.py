"""Minimum-norm solutions by the compiled core, against rational arithmetic: few rows, dependent columns."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from by_seminormal import solved
from exact_solutions import error_of
from neula.algorithms.krylov.batched_lstsq import limits_of
from neula.certificates.forward_error import SURE
from neula.certificates.verdict import Evidence, Limits
from neula.engines import FP64
from neula.kernels.small_problems.seminormal_host import (
    NUMBERS,
    Probes,
    SeminormalHostSolutions,
    SolutionMethod,
)
from shortest_solutions import UNITS, integers, scaled, shortest

pytestmark = pytest.mark.usefixtures("instructions")

U = FP64.u
LIMITS = limits_of(U / 2, 5)
SHAPES = [(3, 2, 1), (9, 6, 4), (12, 12, 7), (5, 9, 3), (25, 20, 11)]


def by_kernel(
    a: np.ndarray, b: np.ndarray, rcond: float | None = None, *, probes: bool = True, count: int = 8
) -> tuple[SeminormalHostSolutions, dict[str, np.ndarray]]:
    """Solutions and evidence of the kernel for a batch, or for one problem."""
    m, n = a.shape[-2:]
    rcond = max(m, n) * 2 * U if rcond is None else rcond
    vectors = np.random.default_rng(1).standard_normal((n, count)) / count**0.5
    limits = Limits.for_shape((m, n), 8 * min(m, n) ** 0.5 * U, SURE, rcond)
    found = solved(
        *(torch.from_numpy(x) for x in (a, b)),
        torch.float64,
        LIMITS,
        backward=limits.backward_error,
        condition=limits.condition,
        rcond=rcond,
        probes=Probes(vectors, 3.0, 8 * U) if probes else None,
    )
    assert found is not None
    numbers = found.numbers.reshape(len(NUMBERS), -1)
    accepted = limits.accept(Evidence.from_numbers(numbers))
    return found, dict(zip(NUMBERS, numbers, strict=True), accepted=accepted)


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize(("m", "n", "rank"), SHAPES)
def test_dependent_columns(m: int, n: int, rank: int, units: str, rng: np.random.Generator) -> None:
    """One after the other in a batch: nothing of one is left for the next, whose rank is another."""
    problems = [scaled(rng, integers(rng, m, n, r), UNITS[units]) for r in (rank, min(rank, 2), rank)]
    a, b = np.stack([left @ right for left, right in problems]), rng.standard_normal((3, m, 2))
    found, of = by_kernel(a, b)
    assert of["accepted"].all()
    assert (of["way"] == SolutionMethod.DEPENDENT).all()
    assert of["rank"].tolist() == [rank, min(rank, 2), rank]
    assert (of["backward_error"] <= 8 * max(m, n) * U).all()
    for i, factors in enumerate(problems):
        sizes = np.linalg.norm(a[i], axis=0)
        s = np.linalg.svd(a[i] / sizes, compute_uv=False)
        condition = s[0] / s[int(of["rank"][i]) - 1]
        assert 1 / (n * m) ** 0.5 <= of["condition"][i] / condition <= (n * m) ** 0.5
        # The spread of the columns comes twice, by rows and by columns, and multiplies U^2.
        grows = 100 * ((m + n) * UNITS[units]) ** 2 * of["condition"][i] ** 3
        for c in range(2):
            x, error = found.x[i, :, c], found.forward_error.reshape(3, 2)[i, c]
            assert error_of(a[i], x, shortest(factors, b[i, :, c])) <= error <= 2 * U + U**2 * grows
            residual = np.linalg.norm(b[i, :, c] - a[i] @ x)
            known = found.residual_norm.reshape(3, 2)[i, c]
            assert abs(known - residual) <= (m + n) * U * (residual + np.linalg.norm(sizes * x))


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize(("m", "n"), [(1, 2), (2, 3), (4, 7), (6, 20), (9, 10), (3, 150)])
def test_fewer_rows_than_columns(m: int, n: int, units: str, rng: np.random.Generator) -> None:
    left, right = scaled(rng, integers(rng, m, n, m), UNITS[units])
    a, b = left @ right, rng.standard_normal((m, 2))
    a[:, -1] = right[:, -1] = 0.0
    found, of = by_kernel(a, b, probes=n <= 128)
    assert of["accepted"] == 1
    assert of["way"] == SolutionMethod.FEW_ROWS
    assert of["rank"] == m
    assert of["backward_error"] <= 2 * U
    for c in range(2):
        exact = shortest((left, right), b[:, c])
        assert error_of(a, found.x[0, :, c], exact) <= found.forward_error[0, c] <= 2 * U


def test_dependent_rows(rng: np.random.Generator) -> None:
    """Fewer rows than columns, and fewer that count: only where columns are looked at."""
    factors = integers(rng, 6, 9, 4)
    a, b = factors[0] @ factors[1], rng.standard_normal((6, 1))
    found, of = by_kernel(a, b)
    assert (of["accepted"], of["way"], of["rank"]) == (1, SolutionMethod.DEPENDENT, 4)
    assert error_of(a, found.x[0, :, 0], shortest(factors, b[:, 0])) <= found.forward_error[0] <= 4 * U
    found, of = by_kernel(a, b, probes=False)
    assert of["accepted"] == 0
    assert np.isnan(found.x).all()


def test_columns_of_zeros(rng: np.random.Generator) -> None:
    factors = integers(rng, 12, 7, 3)
    factors[1][:, [2, 6]] = 0.0
    a, b = factors[0] @ factors[1], rng.standard_normal((12, 1))
    found, of = by_kernel(a, b)
    assert (of["accepted"], of["rank"]) == (1, 3)
    assert not found.x[0, [2, 6]].any()
    assert error_of(a, found.x[0, :, 0], shortest(factors, b[:, 0])) <= found.forward_error[0] <= 4 * U


@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6, 1e8])
@pytest.mark.parametrize(("m", "n", "rank"), [(40, 16, 12), (30, 60, 20)])
def test_ill_conditioned_columns_that_count(
    m: int, n: int, rank: int, condition: float, rng: np.random.Generator
) -> None:
    """Errors are bounded, or nothing is said: a Gram matrix may not show which columns count."""
    q, p = (np.linalg.qr(rng.standard_normal((k, rank)))[0] for k in (m, n))
    left, right = np.round(2.0**20 * q * np.geomspace(1, 1 / condition, rank)), np.round(2.0**20 * p.T)
    a, b = left @ right, rng.standard_normal((m, 1))  # integers below 2^44
    found, of = by_kernel(a, b)
    assert of["accepted"] == 1 or condition > 1e3
    if of["accepted"]:
        assert of["rank"] == rank
        error = error_of(a, found.x[0, :, 0], shortest((left, right), b[:, 0]))
        assert error <= found.forward_error[0]


def test_rates_are_measured(rng: np.random.Generator) -> None:
    """Along unit vectors, or by random ones: both say that refinement converges, and find the same x."""
    factors = integers(rng, 30, 14, 7)
    a, b = factors[0] @ factors[1], rng.standard_normal((30, 1))
    (one, of_one), (other, of_other) = (by_kernel(a, b, count=count) for count in (8, 4))
    assert of_one["accepted"] == of_other["accepted"] == 1
    assert np.linalg.norm(one.x - other.x) <= 4 * U * np.linalg.norm(one.x)
    blind = solved(
        torch.from_numpy(a),
        torch.from_numpy(b),
        torch.float64,
        LIMITS,
        rcond=60 * U,
        probes=Probes(np.ones((14, 8)), 3.0, 1.0),
    )
    assert blind is not None
    assert blind.numbers[0] == 1  # by rounding errors that are far too large


@pytest.mark.parametrize("m", [30, 214])
def test_bounds_beyond_one_are_none(m: int, rng: np.random.Generator) -> None:
    """A b that is nearly orthogonal to the range has a solution below all rounding errors.

    Where it is no longer accepted it is not accepted again further down: a bound beyond one is none, whatever
    is added to it.
    """
    v, b = rng.standard_normal(m), rng.standard_normal(m)
    v[-3:] = 1.0, 2.0**-30, 2.0**-60
    size = float(np.linalg.norm(v) * np.linalg.norm(b))
    known = sum(
        (Fraction(x) * Fraction(y) for x, y in zip(v[:-3].tolist(), b.tolist(), strict=False)), Fraction(0)
    )
    a, accepted = np.stack([v, v], 1), []
    for exponent in np.arange(-85.0, -105.0, -1 / 64):
        rest = Fraction(2.0**exponent * size) - known
        for i in (-3, -2, -1):
            b[i] = float(rest / Fraction(v[i]))
            rest -= Fraction(v[i]) * Fraction(b[i])
        accepted.append(bool(by_kernel(a, b[:, None])[1]["accepted"]))
    assert accepted == sorted(accepted, reverse=True)
    assert accepted[0]
    assert not accepted[-1]
