"""Refinement of problems of which only sums over rows are known."""

from __future__ import annotations

import pytest
import torch
from tests.exact_solutions import error_of, least_squares

from neula.algorithms.krylov.doubled_refinement import Refinement
from neula.algorithms.krylov.streamed_lstsq import Coordinates, RefinementSums, SummedGradient, SummedProblem

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
