"""What factors in low precision say of the condition and the forward error of a system."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

import neula
from campaign.oracle import System
from neula.algorithms.elimination.equilibrate import Equilibrated, equilibrate
from neula.algorithms.elimination.factorization import mixed_lu
from neula.algorithms.krylov.iterative_refinement import Refined, classical, gmres_refinement
from neula.engines import FP64, EmulatedEngine
from neula.io.matrices import random_matrix
from neula.problems.systems.evidence import BLOCK, Evidence, column_norms
from neula.problems.systems.problem import Options

U64 = 2.0**-53
FORMATS = ["fp16", "fp32", "fp64"]


def graded(n: int) -> torch.Tensor:
    """Rows over six decades, and columns over twenty."""
    rows, columns = (torch.logspace(0, d, n, dtype=torch.float64) for d in (-6, 20))
    return rows[:, None] * random_matrix("normal", n, n, seed=2) * columns


def matrix(kind: str, n: int) -> torch.Tensor:
    if kind == "graded":
        return graded(n)
    return random_matrix("arithmetic", n, n, cond=1.0) if kind == "orthogonal" else random_matrix(kind, n, n)


def factors_of(a: torch.Tensor, format: str) -> Equilibrated:
    engine = EmulatedEngine(format=format)
    scales = equilibrate(a, torch.linalg.vector_norm(a, 1, dim=1), engine)
    work = scales.fill(engine.empty(*a.shape, dtype=engine.operand_dtype), a, engine)
    return Equilibrated(mixed_lu(work, engine, pivoting=True), scales)


@pytest.mark.parametrize("gmres", [False, True])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("n", [30, 100])
@pytest.mark.parametrize("kind", ["normal", "graded", "orthogonal"])
def test_condition(kind: str, n: int, format: str, gmres: bool) -> None:
    """Within a factor of ten, whatever the format of the factors."""
    a = matrix(kind, n)
    factors = factors_of(a, format)
    correct = gmres_refinement(a, factors) if gmres else None
    found = Evidence.of(a, factors, factors.scales, correct, 60, column_norms(a))
    true = float(torch.linalg.cond(a / torch.linalg.vector_norm(a, dim=0)))
    assert true / 10 <= float(found.condition) <= 10 * true
    assert found.is_regular


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("n", [30, 100])
def test_condition_beyond_the_format(n: int, format: str) -> None:
    """1e6: factors in fp16 do not solve with A, and GMRES does."""
    a = random_matrix("cluster_small", n, n, cond=1e6, seed=1)
    factors = factors_of(a, format)
    found = Evidence.of(a, factors, factors.scales, None, 60, column_norms(a))
    true = float(torch.linalg.cond(a / torch.linalg.vector_norm(a, dim=0)))
    assert true / 10 <= float(found.condition) <= 10 * true


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (BLOCK // 50 * 2 + 3, 50), (3, BLOCK + 1)])
def test_norms_of_columns(shape: tuple[int, int]) -> None:
    """In one block of rows and in several, the last of them shorter, and in single rows."""
    m, n = shape
    a = torch.randn(m, n, generator=torch.Generator("cpu").manual_seed(1), dtype=torch.float64)
    expected = torch.linalg.vector_norm(a, dim=0)
    torch.testing.assert_close(column_norms(a), expected, rtol=2 * m * U64 + 4 * U64, atol=0)


def test_a_singular_matrix_is_not_regular() -> None:
    a = random_matrix("normal", 40, 40)
    a[:, 7] = a[:, 3]
    factors = factors_of(a, "fp32")
    found = Evidence.of(a, factors, factors.scales, None, 60, column_norms(a))
    assert not found.is_regular
    refined = Refined(torch.ones(40, 1).double(), torch.zeros(40, 1).double(), torch.zeros(1).double())
    assert found.forward_error(torch.ones(40, 1).double(), refined).item() == np.inf


@pytest.mark.parametrize(("format", "cond"), [("fp16", 1e2), ("fp32", 1e4), ("fp32", 1e6), ("fp64", 1e10)])
def test_refined_to_the_forward_error_of_the_format(format: str, cond: float) -> None:
    a = random_matrix("geometric", 50, 50, cond=cond, seed=1)
    b = torch.from_numpy(np.random.default_rng(1).standard_normal((50, 2)))
    factors = factors_of(a, format)
    found = Evidence.of(a, factors, factors.scales, None, 60, column_norms(a))
    options = Options(EmulatedEngine(), FP64, torch.float64, False, None, None, 60, True, None)
    start = Refined(factors.solve(b), b, torch.full((2,), U64, dtype=torch.float64))
    refined, error = found.refine_forward(b, start, classical(factors), options)
    true = torch.from_numpy(System(a.numpy(), b.numpy()).errors(refined.x.numpy(), 50))
    assert (true <= error).all()
    assert (error <= 1.01 * 1.5 * U64).all()
    assert torch.equal(replace(found, measured=error).forward_error(b, refined), error)


@pytest.mark.parametrize("certify", ["backward", "forward"])
@pytest.mark.parametrize("cond", [1e2, 1e4, 1e6, 1e8])
@pytest.mark.parametrize("pivot", ["none", "partial", "rbt"])
def test_the_forward_error_is_a_bound(pivot: str, cond: float, certify: str) -> None:
    """With factors in fp16, whether they are any good or not."""
    n = 100
    a = random_matrix("geometric", n, n, cond=cond, seed=1).numpy()
    b = np.random.default_rng(1).standard_normal((n, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", neula.AccuracyWarning)
        try:
            result = neula.solve(a, b, engine="emulated", pivot=pivot, compute="fp16", certify=certify)
        except ArithmeticError:  # no answer is not a wrong one
            assert pivot == "none"
            return
    errors = System(a, b).errors(result.x, n)
    assert (errors <= result.forward_errors).all()
    if result.converged and certify == "forward":
        assert (result.forward_errors <= 2 * U64).all()
