"""Positive definite systems: Cholesky factors in each arithmetic, refined by themselves or by conjugate
gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import neula
from neula.algorithms.elimination.factorization import LibraryLU, inverted_lu
from neula.algorithms.krylov.gmres import cg
from neula.algorithms.triangular.inverted import InvertedBlocks, InvertedLU
from neula.engines.shipped import cuda_tuning
from neula.io.matrices import random_matrix
from neula.problems.systems import evidence
from scaled_errors import scaled_errors

U64 = 2.0**-53


def conditioned(n: int, cond: float) -> np.ndarray:
    q = np.linalg.qr(np.random.default_rng(n).standard_normal((n, n)))[0]
    a = (q * np.geomspace(1, 1 / cond, n)) @ q.T
    return (a + a.T) / 2


def backward_error(a: np.ndarray, x: np.ndarray, b: np.ndarray) -> float:
    r = np.abs(b - a @ x).max(0)
    return float((r / (np.abs(a).sum(1).max() * np.abs(x).max(0) + np.abs(b).max(0))).max())


def test_conjugate_gradients_take_over() -> None:
    """Factors in fp16 of a condition number of 500: a step of their own leaves more than a tenth."""
    a = conditioned(300, 500.0)
    found = neula.solve(a, np.ones(300), assume_a="pos", engine="emulated")
    assert found.method == "cholesky fp16 + cg"
    assert found.converged
    assert found.iterations < 40


def test_a_matrix_that_is_not_symmetric_is_noticed() -> None:
    """Cholesky reads one triangle, and residuals all of A: LU comes to its rescue."""
    a = conditioned(300, 5.0) + np.triu(np.full((300, 300), 0.01), 1)
    b = np.ones(300)
    found = neula.solve(a, b, assume_a="pos", engine="emulated")
    assert found.converged
    assert backward_error(a, found.x[:, None], b[:, None]) <= 1.01 * found.tolerance


def residual_of(a: torch.Tensor, x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(b - a @ x, dim=0) / torch.linalg.vector_norm(b, dim=0)


def solved_late(
    a: torch.Tensor, b: torch.Tensor, waiting: list[tuple[torch.Tensor, float]]
) -> tuple[torch.Tensor, int]:
    """By conjugate gradients, which other right-hand sides join; all of them do."""
    found = cg(
        *(lambda p: a @ p, lambda r: r, b),
        tolerance=1e-10,
        max_iterations=100,
        late=lambda: waiting.pop(0) if waiting else None,
    )
    assert not waiting
    return found


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("tolerance", [1e-2, 1e-10])
def test_cg_reaches_the_tolerance(k: int, tolerance: float) -> None:
    a = torch.from_numpy(conditioned(60, 20.0))
    b = random_matrix("normal", 60, k, dtype=torch.float64)
    x, iterations = cg(lambda p: a @ p, lambda r: r.clone(), b, tolerance=tolerance, max_iterations=100)
    assert residual_of(a, x, b).max() <= 1.01 * tolerance
    # The textbook bound, 2 ((s - 1) / (s + 1))^j with s^2 = cond, for the error in the norm of A.
    rate = (20**0.5 - 1) / (20**0.5 + 1)
    assert iterations <= 1 + np.log(tolerance / (2 * 20**0.5)) / np.log(rate)


def test_cg_of_columns_that_end_early() -> None:
    a = torch.diag(torch.arange(1.0, 9.0, dtype=torch.float64))
    b = torch.stack([torch.zeros(8), torch.eye(8)[2], torch.ones(8)], 1).double()
    x, _ = cg(lambda p: a @ p, lambda r: r, b, tolerance=1e-12, max_iterations=20)
    assert torch.allclose(a @ x, b, rtol=0, atol=1e-10)
    x, iterations = cg(
        lambda p: a @ p, lambda r: r, torch.zeros(8, 2, dtype=a.dtype), tolerance=0.0, max_iterations=5
    )
    assert (float(x.abs().max()), iterations) == (0.0, 1)


def test_columns_that_join_conjugate_gradients() -> None:
    """Each is solved as if it had been there from the beginning, to a tolerance of its own."""
    a = torch.from_numpy(conditioned(60, 20.0))
    b = random_matrix("normal", 60, 4, dtype=torch.float64)
    x, _ = solved_late(a, b[:, :2], [(b[:, :0], 1e-3), (b[:, 2:], 1e-3)])
    assert (residual_of(a, x, b) <= torch.tensor([1.01e-10] * 2 + [1.01e-3] * 2)).all()
    # Late right-hand sides bring the information about the smallest eigenvalue.
    a, b = torch.diag(torch.tensor([1.0, 1.0, 1e-3], dtype=torch.float64)), torch.eye(3, dtype=torch.float64)
    x, iterations = solved_late(a, b[:, :1], [(b[:, :0], 1e-3), (b[:, :0], 1e-3), (b[:, 2:], 1e-3)])
    assert iterations == 4  # one for b alone
    assert torch.linalg.vector_norm(a @ x - b[:, [0, 2]]) <= 1e-3


@pytest.mark.usefixtures("by_krylov")
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(("cond", "rows"), [(1.0, 0), (2e3, 0), (2e3, 3)])
def test_large_systems_find_their_evidence_on_the_way(
    cond: float, rows: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norm of the inverse takes no solve, and no power method, of its own."""
    monkeypatch.setattr(evidence, "_by_preconditioned_gmres", lambda *_: pytest.fail("once more"))
    scales = np.logspace(0, -rows, 300)
    a = scales[:, None] * conditioned(300, cond) * scales
    x = np.random.default_rng(k).standard_normal((300, k))
    if not rows:
        monkeypatch.setattr(evidence.InverseProbe, "from_factors", lambda *_: pytest.fail("not on the way"))
    found = neula.solve(a, a @ x, assume_a="pos", engine="emulated")
    assert found.converged
    assert found.method == "cholesky fp16 + cg"
    condition = np.linalg.cond(a / np.linalg.norm(a, axis=0))
    assert condition / 3 <= found.condition <= 10 * condition
    # b is rounded: x is the solution for it up to the condition number times u.
    assert (scaled_errors(a, found.x, x) <= found.forward_error + condition * len(a) * U64).all()


@pytest.mark.usefixtures("by_krylov")
@pytest.mark.parametrize("accuracy", ["fp16", "fp32"])
@pytest.mark.parametrize("cond", [1e2, 1e4])
def test_coarse_accuracies_keep_the_factors_that_do(accuracy: str, cond: float) -> None:
    """A residual that is small beside ``||A|| ||x||`` alone would leave no sure digit of x."""
    a, x = conditioned(300, cond), np.random.default_rng(1).standard_normal(300)
    found = neula.solve(a, a @ x, assume_a="pos", engine="emulated", accuracy=accuracy)
    assert found.converged
    assert scaled_errors(a, found.x, x) <= found.forward_error + cond * len(a) * U64


@pytest.mark.usefixtures("by_krylov")
def test_a_probe_that_is_not_finite_leaves_the_iterations_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    known = evidence.symmetric_inverse_norm

    def not_finite(*given: Any) -> Any:
        norm, vector = yield from known(*given)
        return norm, vector * torch.nan

    monkeypatch.setattr(evidence, "symmetric_inverse_norm", not_finite)
    a = conditioned(300, 1e2)
    found = neula.solve(a, np.ones(300), assume_a="pos", engine="emulated")
    assert found.converged


INVERTING = replace(cuda_tuning((9, 0)), queued=0, queued_definite=0)


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize(("n", "width"), [(1, 8), (40, 8), (61, 16), (64, 64)])
def test_inverted_blocks_solve_as_substitution_does(
    n: int, width: int, k: int, batch: tuple[int, ...]
) -> None:
    a = random_matrix("normal", 3 * n, n, seed=n, dtype=torch.float64)[:n].expand(*batch, n, n)
    lu, pivots, _ = torch.linalg.lu_factor_ex(a)
    solver = inverted_lu(lu, pivots, replace(INVERTING, inverted_from=1))
    assert solver is not None
    solver = InvertedLU.from_factors(lu, solver.permutation[..., 0], width)
    factors = LibraryLU(lu, pivots, 1.0, solver)
    b = random_matrix("normal", n, k, seed=1, dtype=torch.float64).expand(*batch, n, k)
    before = b.clone()
    for found, matrix in ((factors.solve(b), a), (factors.solve_transposed(b), a.mT)):
        size = torch.linalg.matrix_norm(matrix) * torch.linalg.matrix_norm(found)
        assert (torch.linalg.matrix_norm(b - matrix @ found) <= 100 * n * U64 * size).all()
    assert torch.equal(b, before)


def test_blocks_in_two_precisions() -> None:
    t = torch.eye(70) + 0.1 * random_matrix("normal", 70, 70, dtype=torch.float32).tril(-1)
    blocks = InvertedBlocks.from_factor(t, torch.float64, upper=False, width=16)
    x = torch.ones(70, 2, dtype=torch.float64)
    assert torch.allclose(t.double() @ blocks.solve(x.clone()), x, rtol=0, atol=1e-13)
    assert torch.allclose(t.double().T @ blocks.mH.solve(x.clone()), x, rtol=0, atol=1e-13)


def test_what_is_not_finite_in_one_triangle_alone_is_found() -> None:
    a = conditioned(300, 10.0)
    a[7, 200] = np.nan
    with pytest.raises(ValueError, match=r"A\[7, 200\]"):
        neula.solve(a, np.ones(300), assume_a="pos", engine="emulated")
