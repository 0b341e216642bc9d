"""Least squares of one matrix with several dampings, beside exact solutions of each."""

from __future__ import annotations

import pytest
import torch
from tests.exact_solutions import error_of, least_squares

from neula.algorithms.krylov.batched_lstsq import DampedProblems
from neula.algorithms.krylov.doubled_refinement import MAX_STEPS, Refinement

U = 2.0**-53


def problem(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator(device="cpu").manual_seed(m)
    a, b = (torch.rand(m, c, generator=g, dtype=torch.float64, device="cpu") - 0.5 for c in (n, k))
    a[:, n - 1] = a[:, 0] + 2.0**-20 * a[:, n - 1]
    return a, b


@pytest.mark.parametrize(("m", "n"), [(12, 4), (5, 5), (3, 6)])
@pytest.mark.parametrize("dampings", [[2.0**-12], [2.0**-20, 0.3, 64.0]])
def test_solutions_and_residuals(m: int, n: int, dampings: list[float]) -> None:
    a, b = problem(m, n, 2)
    damps = torch.tensor(dampings, dtype=torch.float64, device="cpu")[:, None, None].expand(-1, n, 1)
    below = torch.cat([b, b.new_zeros(n, 2)])
    system, right = DampedProblems(a, damps), below.expand(len(dampings), -1, -1)
    refinement = Refinement(system, right, U / 2)
    refinement.advance(MAX_STEPS)
    found, residual = refinement.solution(), system.residual(right, refinement.high, refinement.low)
    for i, damp in enumerate(dampings):
        stack = torch.cat([a, damp * torch.eye(n, dtype=torch.float64, device="cpu")])
        for j in range(2):
            exact = least_squares(stack.numpy(), below[:, j].numpy())
            error = error_of(stack.numpy(), found.x[i, :, j].numpy(), exact)
            assert error <= float(found.forward_error[i, j]) <= 3 * U
        # Of x alone, as plain products with the stacked matrix have it.
        left = below - stack @ found.x[i]
        noise = (m + n) * U * (stack.abs() @ found.x[i].abs() + below.abs())
        assert bool(((found.residual[i] - left).abs() <= 2 * noise).all())
        assert bool(((residual[i] - left[:m]).abs() <= 2 * noise[:m]).all())
