"""The Gram matrix of an engine, and its R."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from neula.algorithms.spectra.gram import gram, gram_r
from neula.engines import CpuEngine, EmulatedEngine, Engine
from neula.io.matrices import random_matrix

ENGINES = [
    (EmulatedEngine("cpu", "fp16"), 2.0**-11),
    (CpuEngine("cpu", "fp32"), 2.0**-24),
    (CpuEngine("cpu", "fp64"), 2.0**-53),
]


@pytest.mark.parametrize(("engine", "u"), ENGINES, ids=["fp16", "fp32", "fp64"])
@pytest.mark.parametrize("narrowest", [7, 32, 512])
def test_the_lower_triangle_is_that_of_the_product(
    engine: Engine, u: float, narrowest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(engine), "tuning", replace(engine.tuning, gram_block=narrowest))
    a = random_matrix("normal", 200, 50)
    g = gram(engine.operand(a.to(engine.storage)), engine)
    # Two roundings of each operand, and a sum of 200 products, in the norms of two columns.
    lengths = a.norm(dim=0)
    error = (g.double() - a.T @ a).tril().abs() / (lengths[:, None] * lengths)
    assert float(error.max()) <= 2 * u + 200 * min(u, 2.0**-24)


@pytest.mark.parametrize(("engine", "u"), ENGINES, ids=["fp16", "fp32", "fp64"])
def test_r_is_a_preconditioner_as_good_as_the_square_of_the_condition_allows(
    engine: Engine, u: float
) -> None:
    cond = 5.0
    a = random_matrix("arithmetic", 300, 40, cond=cond)
    r = gram_r(engine.operand(a.to(engine.storage)), engine).double()
    w = torch.linalg.solve_triangular(r, a, upper=True, left=False)
    # ||W^T W - I|| <= ||R^-T (A^T A - R^T R) R^-1|| <= cond^2 times the relative error of the Gram matrix.
    loss = torch.linalg.matrix_norm(w.T @ w - torch.eye(40, dtype=torch.float64), 2)
    assert float(loss) <= cond**2 * (2 * 40**0.5 + 300) * u
    assert not r.tril(-1).any()


def test_a_gram_matrix_that_is_not_definite_gives_nan() -> None:
    a = random_matrix("geometric", 100, 30, cond=1e6).float()
    assert bool(gram_r(a, CpuEngine("cpu", "fp32")).isnan().any())
