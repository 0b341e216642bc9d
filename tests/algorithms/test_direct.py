"""Direct solvers against LAPACK, with the perturbation theory of least squares."""

import math

import pytest
import torch

from neula.algorithms.orthogonal.householder import normal_equations, qr_solve
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.engines import EmulatedEngine
from neula.io.matrices import random_matrix

U32, U64 = 2.0**-24, 2.0**-53
DOUBLE = EmulatedEngine("cpu", "fp64")


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.linalg.lstsq(a, b, driver="gelsd").solution


def solution_bound(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Wedin: what a relative change epsilon of A and b may do to each column of x."""
    norm = torch.linalg.vector_norm
    s = torch.linalg.svdvals(a)
    cond = s[0] / s[-1]
    residual, size = norm(b - a @ x, dim=0), s[0] * norm(x, dim=0)
    return epsilon * cond * (1 + norm(b, dim=0) / size + cond * residual / size) * norm(x, dim=0)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (300, 1), (33, 33), (257, 129), (300, 7)])
@pytest.mark.parametrize("k", [1, 3])
def test_qr_solve_is_that_of_householder(m: int, n: int, k: int) -> None:
    a, b = random_matrix("normal", m, n, seed=1), random_matrix("normal", m, k, seed=2)
    x = qr_solve(*torch.linalg.qr(a), b)
    expected = reference(a, b)
    assert x.shape == (n, k)
    error = torch.linalg.vector_norm(x - expected, dim=0)
    # Higham, theorem 20.3: backward stable with a multiple of m n u, observed as sqrt(m) n u.
    assert (error <= solution_bound(a, b, expected, 4 * n * math.sqrt(m) * U64)).all()


@pytest.mark.parametrize("format", ["fp16", "bf16", "tf32"])
def test_qr_solve_has_the_accuracy_of_its_factors(format: str) -> None:
    """Section 4.2.2: the direct solver has errors of the low format."""
    engine = EmulatedEngine("cpu", format)
    a, b = random_matrix("arithmetic", 600, 256, cond=5.0), random_matrix("normal", 600, 2, seed=3)
    q, r = rgsqrf(a, engine, cutoff=32)
    x = qr_solve(q, r, b.float()).double()
    expected = reference(a, b)
    error = torch.linalg.vector_norm(x - expected, dim=0)
    # Residual 3 u (2 + log2 n), and orthogonality that and cond times worse, which acts on b.
    epsilon = 3 * engine.format.u * (2 + 8)
    assert (error <= solution_bound(a, b, expected, epsilon * (1 + 5.0))).all()
    assert (error > 1e3 * U64 * torch.linalg.vector_norm(expected, dim=0)).all(), "it is not refined"


@pytest.mark.parametrize(("m", "n"), [(1, 1), (300, 1), (257, 129), (300, 7)])
def test_normal_equations(m: int, n: int) -> None:
    """Twice the sensitivity: an error of ``cond^2 u`` even for a consistent system (Higham, section 20.4)."""
    a, b = random_matrix("arithmetic", m, n, cond=100.0, seed=4), random_matrix("normal", m, 3, seed=5)
    x, r = normal_equations(a, b, DOUBLE)
    expected = reference(a, b)
    error = torch.linalg.vector_norm(x - expected, dim=0)
    cond = float(torch.linalg.cond(a))
    size = torch.linalg.vector_norm(expected, dim=0) + torch.linalg.vector_norm(b, dim=0)
    assert (error <= 4 * (n + math.sqrt(m)) * U64 * cond**2 * size).all()
    assert torch.equal(r, r.triu())
    gram = a.T @ a
    assert torch.linalg.matrix_norm(r.T @ r - gram) <= 4 * n * U64 * torch.linalg.matrix_norm(gram)


@pytest.mark.parametrize("format", ["fp16", "bf16", "tf32", "fp32"])
def test_normal_equations_in_a_low_format(format: str) -> None:
    """A is rounded, and float32 sums: an error of ``cond^2 u``, again."""
    engine = EmulatedEngine("cpu", format)
    a, b = random_matrix("arithmetic", 300, 40, cond=3.0, seed=8), random_matrix("normal", 300, 2, seed=9)
    x, r = normal_equations(a.float(), b.float(), engine)
    expected = reference(a, b)
    assert x.dtype == r.dtype == torch.float32
    # The rounding of A enters the Gram matrix twice; 300 products and 40 columns in float32 on top.
    epsilon = 2 * engine.format.u + 4 * (40 + math.sqrt(300)) * U32
    error = torch.linalg.vector_norm(x.double() - expected, dim=0)
    size = torch.linalg.vector_norm(expected, dim=0) + torch.linalg.vector_norm(b, dim=0)
    assert (error <= 3.0**2 * epsilon * size).all()


@pytest.mark.parametrize("format", ["fp16", "fp32", "fp64"])
def test_normal_equations_break_down_visibly(format: str) -> None:
    """Not positive definite, which shows without rounding: a column of zeros beside another, only zeros."""
    engine = EmulatedEngine("cpu", format)
    single = torch.tensor([0.5, 0.0], dtype=engine.storage).repeat(16, 1)
    x, r = normal_equations(single, torch.ones(16, 1, dtype=engine.storage), engine)
    assert x.isnan().all()
    assert r.isnan().all()
    zero = torch.zeros(8, 2, dtype=engine.storage)
    assert normal_equations(zero, torch.ones(8, 1, dtype=engine.storage), engine)[0].isnan().all()
