"""Small systems: scaled without an error, solved to the last digit."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from tests.matrices import normal

import neula
from campaign.oracle import System
from neula.algorithms.krylov.doubled_refinement import Refinement
from neula.algorithms.krylov.factored_systems import FactoredSystems, Images
from neula.certificates.forward_error import COMPUTED
from neula.engines import FP64, CpuEngine
from neula.io.matrices import random_matrix
from neula.pipeline.batches import SingularMember
from neula.pipeline.chain import Answer, Declined
from neula.problems.systems.problem import Systems, SystemsOptions, SystemsSolutions
from neula.problems.systems.system import ALIKE, NEAR, ScaledSystems, SystemsJudge
from neula.problems.systems.together import VECTORS, library_solvers, solve_together

noise = partial(normal, seed=3)

U64 = 2.0**-53
LIBRARY = "lu fp64 with pivoting"
OPTIONS = SystemsOptions(
    engine=CpuEngine("cpu"),
    target=FP64,
    dtype=torch.float64,
    positive=False,
    pivot=None,
    compute=None,
    max_iterations=60,
    forward=False,
    progress=None,
)
UNITS = [0, 5, 100, 300]


def in_units(a: torch.Tensor, rows: float, columns: float) -> torch.Tensor:
    """Rows and columns scaled by powers of ten over so many decades."""
    n = a.shape[-1]
    r, c = (torch.linspace(-d / 2, d / 2, n, dtype=torch.float64) for d in (rows, columns))
    return a * 10.0 ** r[:, None] * 10.0 ** c[torch.arange(n) * 3 % n]


def solved(a: torch.Tensor, b: torch.Tensor, options: SystemsOptions = OPTIONS) -> SystemsSolutions:
    return solve_together(
        Systems(a, b, options), label="cholesky fp64" if options.positive else LIBRARY
    ).values


def check_exact(scaled: torch.Tensor, exponents: torch.Tensor, given: torch.Tensor) -> None:
    for x, e, v in zip(
        scaled.ravel().tolist(), exponents.ravel().tolist(), given.ravel().tolist(), strict=True
    ):
        assert Fraction(x) * Fraction(2) ** e == Fraction(v)


def check_sizes(largest: torch.Tensor, exponents: torch.Tensor) -> None:
    """Near 1 for each matrix that was scaled; others are alike, and not far from 1."""
    for sizes, scaling in zip(largest, exponents, strict=True):
        if scaling.any():
            assert ((sizes >= 0.5) & (sizes < 1)).all()
        else:
            e = torch.frexp(sizes)[1]
            assert e.amax() - e.amin() <= ALIKE
            assert e.amax().abs() <= NEAR


@pytest.mark.parametrize("rows", UNITS)
@pytest.mark.parametrize("columns", UNITS)
def test_scaled_systems_are_those_that_were_given(rows: int, columns: int) -> None:
    a, b = in_units(noise(2, 7, 7), rows, columns), noise(2, 7, 2)
    scaled = ScaledSystems.from_arrays(a, b)
    check_exact(scaled.a, scaled.rows + scaled.columns, a)
    check_exact(scaled.b, scaled.rows + scaled.b_columns, b)
    assert scaled.trivial == (rows == columns == 0)
    check_sizes(scaled.a.abs().amax(2), scaled.rows[..., 0])
    if scaled.given:
        assert torch.equal(scaled.b, b)
    else:
        assert ((scaled.b.abs().amax(1) >= 0.5) & (scaled.b.abs().amax(1) < 1)).all()
    y = noise(2, 7, 2)
    assert torch.equal(scaled.scale(scaled.unscale(y)), y)
    norms = torch.linalg.vector_norm(torch.ldexp(a, -scaled.columns), dim=1)
    assert torch.allclose(scaled.norms[..., 0], norms, rtol=1e-14, atol=0)


@pytest.mark.parametrize("rows", UNITS[:3])
@pytest.mark.parametrize("columns", UNITS[:3])
def test_backward_errors_are_those_in_both_units(rows: int, columns: int) -> None:
    """The larger one, each by its definition: of the systems that were given, and of the scaled ones."""
    a, b = in_units(noise(1, 7, 7), rows, columns), noise(1, 7, 1)
    scaled = ScaledSystems.from_arrays(a, b)
    for small in (2.0**-20, 1.0):  # the residual and y, each where it is largest in one of the units
        y = noise(1, 7, 1) * small ** torch.arange(7.0)[:, None]
        residual, x = noise(1, 7, 1), scaled.unscale(y)
        of = [
            (scaled.a, y, scaled.b, residual),
            (a, x, b, torch.ldexp(residual, scaled.rows + scaled.b_columns)),
        ]
        sizes = [[float(torch.linalg.matrix_norm(part[0], torch.inf)) for part in four] for four in of]
        expected = max(r / (norm * size + right) for norm, size, right, r in sizes)
        assert float(scaled.backward_error(y, residual)) == pytest.approx(expected, rel=1e-12)


def test_doubt_is_not_accepted() -> None:
    """Whatever was measured; without it, such numbers are."""
    judge, numbers = SystemsJudge.for_shape(4, OPTIONS), np.zeros((len(SystemsSolutions.names), 2))
    for doubt in ("", "A may be singular"):
        verdict = judge.verdict(Answer(None, LIBRARY, doubt), numbers)
        assert verdict.accepted.tolist() == verdict.final.tolist() == [not doubt] * 2
        assert doubt in verdict.reason


@pytest.mark.parametrize("sign", [-1, 0, 1])
def test_scaled_at_the_ends_of_the_range(sign: int) -> None:
    """And with zeros, which stay."""
    a = torch.ldexp(noise(1, 5, 5), torch.tensor(sign * 1015))
    b = torch.ldexp(noise(1, 5, 1), torch.tensor(-sign * 1015))
    if not sign:
        a[0, 2], a[0, :, 1], b = 0, 0, 0 * b
    scaled = ScaledSystems.from_arrays(a, b)
    check_exact(scaled.a, scaled.rows + scaled.columns, a)
    check_exact(scaled.b, scaled.rows + scaled.b_columns, b)
    assert scaled.norms[0, 1, 0] == 1 or sign


@pytest.mark.parametrize(
    ("cond", "doubled"), [(1e0, True), (1e4, True), (1e8, True), (1e12, True), (1e2, False), (1e6, False)]
)
def test_the_forward_error_is_that_of_the_format(cond: float, doubled: bool) -> None:
    """Without doubled residuals it grows with the condition number."""
    a = torch.stack([random_matrix("geometric", 12, 12, cond=cond, seed=s) for s in range(3)])
    b = noise(3, 12, 2)
    scaled = ScaledSystems.from_arrays(a, b)
    lu, pivots = torch.linalg.lu_factor(scaled.a)
    images = Images.from_matrix(scaled.a, scaled.norms, vectors=VECTORS, unit=True)
    square = FactoredSystems(
        scaled.a,
        library_solvers(lu, pivots),
        scaled.norms,
        scaled.b,
        scaled.frobenius,
        images,
        doubled=doubled,
    )
    found = Refinement(square, scaled.b, U64 / 2).solved()
    x = scaled.unscale(found.x)
    for i in range(3):
        errors = torch.from_numpy(System(a[i].numpy(), b[i].numpy()).errors(x[i].numpy(), 12))
        assert (errors <= found.forward_error[i]).all()
    # Rounding errors of the residual through the inverse, whose bound is n^(1/4) too large at most, and the
    # Frobenius norm of A.
    bound = COMPUTED * 1.5 * U64 if doubled else 2 * U64 * (1 + 12**1.25 * 2 * cond)
    assert (found.forward_error <= bound).all()


def test_history_of_a_batch() -> None:
    """One step more than there were corrections; the worst of all counts, also where parts take fewer."""
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((6, 30, 30)), rng.standard_normal((6, 30, 2))
    alone = [neula.solve(x, y) for x, y in zip(a, b, strict=True)]
    for one in alone:
        assert len(one.history) == one.iterations + 1
        assert one.history[-1] <= one.tolerance
        assert one.history[-1] < one.history[0] <= 30 * 2.0**-53
    together = neula.solve(a, b)
    assert len(together.history) == together.iterations + 1
    # Batched LAPACK may round in another order: the first ones are of the same size, and not more.
    assert together.history[0] == pytest.approx(max(one.history[0] for one in alone), rel=1)


def test_tiny_right_hand_sides_of_a_batch_are_scaled() -> None:
    """Matrices near 1 stay as they are, but for right-hand sides whose squares underflow beside others."""
    a = torch.eye(3, dtype=torch.float64).repeat(2, 1, 1)
    b = torch.ones(2, 3, 1, dtype=torch.float64)
    assert ScaledSystems.from_arrays(a, b).given
    assert ScaledSystems.from_arrays(a, 0 * b).given
    b[1] *= 1e-250
    assert not ScaledSystems.from_arrays(a, b).given
    assert torch.equal(solved(a, b).x, b)


def test_single_precision_factors_give_double_precision() -> None:
    """Where they solve; a zero pivot is for better ones."""
    a, b = noise(2, 40, 40) + 10 * torch.eye(40, dtype=torch.float64), noise(2, 40, 2)
    found = solve_together(Systems(a, b, OPTIONS), label="lu fp32 with pivoting")
    assert found.label == "lu fp32 with pivoting"
    assert bool(found.values.forward_error.amax() <= 1e-12)
    assert bool(found.values.backward_error.amax() <= 40**0.5 * U64)
    with pytest.raises(Declined, match="a pivot vanishes"):
        solve_together(Systems(0 * a, b, OPTIONS), label="lu fp32 with pivoting")


def test_places_count_over_pieces_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuEngine, "tuning", replace(CpuEngine("cpu").tuning, chunk_elements=50))
    a = noise(7, 5, 5)
    a[5, :, 0] = 0
    with pytest.raises(SingularMember) as caught:
        solved(a, noise(7, 5, 1))
    assert caught.value.place == 5
