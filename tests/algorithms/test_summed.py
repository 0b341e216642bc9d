"""Refinement of problems of which only sums over rows are known."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from tests.exact_solutions import error_of, least_squares

from neula.algorithms.krylov.doubled_refinement import Refinement
from neula.algorithms.krylov.streamed_lstsq import (
    Coordinates,
    RefinementSums,
    SummedGradient,
    SummedProblem,
    merged,
)

U = 2.0**-53


@pytest.mark.parametrize("rounded", [2.0**-53, 2.0**-20], ids=["R in double", "R in single"])
def test_a_step_is_one_sum_over_all_rows(rounded: float) -> None:
    g = torch.Generator(device="cpu").manual_seed(4)
    a, b = (torch.randn(40, k, generator=g, dtype=torch.float64, device="cpu") for k in (5, 2))
    a = a @ torch.diag(torch.logspace(0, -2, 5, dtype=torch.float64, device="cpu"))
    r = torch.linalg.qr(a, mode="r")[1]
    of, calls = Coordinates.from_factor(r * (1 + rounded * torch.rand_like(r))), 0

    def sums(x: torch.Tensor, low: torch.Tensor) -> SummedGradient:
        nonlocal calls
        calls += 1
        found = RefinementSums(of, x, low, doubled=True)
        for rows in torch.arange(40, device="cpu").split(7):
            found.add(a[rows], b[rows])
        return found.summed()

    system = SummedProblem(of, sums)
    refinement = Refinement(system, (of.inverse.T @ a.T @ b)[None], 0.0)
    for step in (1, 2, 3):
        refinement.advance(step, step)
        found = refinement.solution()
        assert calls == refinement.steps == step
        for j in range(2):
            error = error_of(a.numpy(), found.x[0, :, j].numpy(), least_squares(a.numpy(), b[:, j].numpy()))
            assert error <= found.forward_error[0, j]
    assert float(found.forward_error.max()) <= 2 * U  # x alone is rounded
    norms = torch.linalg.vector_norm(b - a @ found.x[0], dim=0)
    assert torch.allclose(found.residual[0], norms, rtol=40 * 5 * U, atol=0.0)


def rows_of(kind: str, m: int, n: int, g: torch.Generator) -> torch.Tensor:
    a = torch.randn(m, n, generator=g, dtype=torch.float64, device="cpu")
    if kind == "columns of all sizes":
        return a * 10.0 ** torch.arange(-60, 60, 120 // n, device="cpu")[:n]
    if kind == "dependent columns":
        a[:, -1] = a[:, 0] + a[:, 1]
    if kind == "nearly dependent columns":
        a[:, -1] = a[:, 0] + 1e-13 * a[:, -1]
    if kind == "a column of zeros":
        a[:, 1] = 0.0
    return a


KINDS = "normal", "columns of all sizes", "dependent columns", "nearly dependent columns", "a column of zeros"


@pytest.mark.parametrize("size", [1.0, 1e3, 1e9, 1e-9])
@pytest.mark.parametrize("count", [1, 4, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_r_is_merged_with_rows_as_exactly_as_by_reflections(kind: str, count: int, size: float) -> None:
    """``|R^T R - A^T A| <= c m n u`` for columns of length 1, beside products of rational numbers."""
    g, n = torch.Generator(device="cpu").manual_seed(5), 5
    parts = [rows_of(kind, m, n, g) * by for m, by in ((30, 1.0), (count, size), (20, size))]
    r = torch.linalg.qr(parts[0], mode="r")[1]
    for rows in parts[1:]:
        r = merged(r, rows)
        assert torch.equal(r, r.triu())
    a = torch.cat(parts)
    exact = [[[Fraction(x) for x in row] for row in of.tolist()] for of in (a.T, r.T)]
    lengths = np.linalg.norm(a.numpy(), axis=0)
    for i in range(n):
        for j in range(n):
            wanted, found = (sum(x * y for x, y in zip(of[i], of[j], strict=True)) for of in exact)
            assert abs(float(found - wanted)) <= 4 * len(a) * n * U * lengths[i] * lengths[j]
