"""LU with tournament pivoting in two parts of half precision, and systems that are solved with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch

import neula
from half_engine import HalfEngine
from neula.algorithms.elimination.equilibrate import equilibrate
from neula.algorithms.elimination.factorization import MixedLU, corrected_lu
from neula.engines import Engine, Tuning, select_engine
from neula.io.matrices import random_matrix
from neula.problems.systems import evidence, links

U22, U32, U64 = 2.0**-22, 2.0**-24, 2.0**-53
LABEL = "lu fp16_cor with pivoting"
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", torch.cuda.current_device()) if HAS_GPU else torch.device("cpu")


def tuned(tuning: Tuning) -> Tuning:
    """So that small systems go the way of large ones, in several panels."""
    return replace(tuning, queued=0, direct=0, direct_pivoted=0, by_host=0, pivoted_panel=64)


class Half(HalfEngine):
    tuning = tuned(HalfEngine.tuning)


@pytest.fixture(params=["half", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "half":
        return Half("cpu")
    found = select_engine("auto", DEVICE)
    found.tuning = tuned(found.tuning)  # type: ignore[misc]
    return found


def factorized(a: torch.Tensor, engine: Engine) -> MixedLU:
    scales = equilibrate(a, torch.linalg.vector_norm(a, 1, dim=1), engine)
    half = engine.using("fp16")
    parts = scales.in_two_parts(a, half.operand_dtype)
    return corrected_lu(parts, len(a), half)


@pytest.mark.parametrize("n", [1, 40, 64, 150, 300])
@pytest.mark.parametrize("graded", [False, True])
def test_factors_of_22_bits(n: int, graded: bool, engine: Engine) -> None:
    """``|A - L U|`` is that of factors with 22 bits, where diagonal blocks of L are inverted (Higham 2002,
    section 14.2): larger by the condition number of these.
    """
    a = random_matrix("normal", n, n, seed=n).to(DEVICE)
    if graded:
        a = a * torch.logspace(0, 8, n, dtype=torch.float64, device=DEVICE)[:, None]
    found = factorized(a, engine)
    scales = equilibrate(a, torch.linalg.vector_norm(a, 1, dim=1), engine)
    given = scales.rows[:, None] * a * scales.columns
    packed = found.substitution.factors
    assert sorted(packed.permutation.tolist()) == list(range(n))
    upper = packed.lu.double().triu()
    lower = packed.lu.double().tril(-1) + torch.eye(n, dtype=torch.float64, device=DEVICE)
    width = engine.using("fp16").tuning.pivoted_panel
    blocks = [lower[k : k + width, k : k + width] for k in range(0, n, width)]
    cond = max(float((block.abs() @ torch.linalg.inv(block).abs()).sum(1).max()) for block in blocks)
    given = given[packed.permutation.long()]
    size = given.abs() + lower.abs() @ upper.abs()
    # Rounding of A, L and U to two parts, of the product that leaves out one of four, and of sums.
    bound = (4 * U22 + 3 * n * U32) * (1 + cond) * size + 2.0**-25 * U22 * n
    assert ((given - lower @ upper).abs() <= bound).all()
    assert float(lower.abs().max()) <= 4


def exact_system(n: int, cond: float, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A with few bits (normal, or of some condition), whole numbers x, and b without a rounding error."""
    kind = {"kind": "geometric", "cond": cond} if cond else {"kind": "normal"}
    a = random_matrix(m=n, n=n, seed=seed, **kind)
    a = (a / a.abs().max() * 2.0**34).round() * 2.0**-34
    x = torch.randint(-8, 9, (n, k), generator=torch.Generator().manual_seed(seed)).double()
    return a, a @ x, x


@pytest.mark.parametrize(("n", "cond", "k"), [(170, 0, 1), (200, 0, 3), (200, 1e4, 2), (180, 1e8, 1)])
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("accurate", [False, True])
def test_forward_errors_are_bounds(
    n: int, cond: float, k: int, large: bool, accurate: bool, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With residuals in twice the working precision x is as accurate as it can be."""
    if large:
        monkeypatch.setattr(links, "COSTLY", 64)
        monkeypatch.setattr(evidence, "COSTLY", 64)
    a, b, exact = exact_system(n, cond, k, seed=n)
    certify: Literal["backward", "forward"] = "forward" if accurate else "backward"
    result = neula.solve(a.to(DEVICE), b.to(DEVICE), engine=engine, certify=certify)
    assert result.converged
    assert result.attempts[-1].method.startswith(LABEL)
    sizes = torch.linalg.vector_norm(a, dim=0)[:, None]
    norm = torch.linalg.vector_norm
    errors = norm(sizes * (result.x.cpu() - exact), dim=0) / norm(sizes * exact, dim=0)
    assert (errors <= torch.as_tensor(result.forward_errors).cpu()).all()
    assert not accurate or result.forward_error <= 2 * U64
    assert result.backward_error <= 4 * U64 + n**0.5 * U64


def test_what_it_does_not_solve_goes_on(engine: Engine) -> None:
    """A matrix near a singular one, and one that is singular."""
    a = random_matrix("geometric", 170, 170, cond=1e14).to(DEVICE)
    b = torch.ones(170, 1, dtype=torch.float64, device=DEVICE)
    with pytest.warns(neula.IllConditionedWarning):
        result = neula.solve(a, b, engine=engine)
    assert result.backward_error <= 4 * U64 + 170**0.5 * U64
    a[:, 70] = 0
    with pytest.raises(np.linalg.LinAlgError, match="singular"):
        neula.solve(a, b, engine=engine)
