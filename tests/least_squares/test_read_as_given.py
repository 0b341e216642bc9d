"""Large float32 matrices on units that are not LAPACK's are multiplied without a copy in double precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import neula
from neula.problems.least_squares.problem import PreparedProblem


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def dtypes(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Dtypes of matrices that are prepared."""
    found: list[torch.dtype] = []
    from_arrays = PreparedProblem.from_arrays

    def noted(a: torch.Tensor, *others: Any) -> PreparedProblem:
        found.append(a.dtype)
        return from_arrays(a, *others)

    monkeypatch.setattr(PreparedProblem, "from_arrays", noted)
    return found


@pytest.mark.parametrize("shape", [(150, 60), (64, 64)])
def test_the_solution_is_that_of_the_copy(shape: tuple[int, int], dtypes: list[torch.dtype]) -> None:
    a, b = normal(*shape), normal(shape[0], 2, seed=1)
    a[:, 0] *= 1e10
    a[:, 1] *= 1e-10
    found = neula.lstsq(a, b, engine="emulated", algorithm="cgls")
    assert dtypes == [torch.float32]
    wide = a.double()
    x = torch.linalg.lstsq(wide, b.double(), driver="gels").solution
    sizes = torch.linalg.vector_norm(wide, dim=0)[:, None]
    error = torch.linalg.vector_norm(sizes * (found.x.double() - x), dim=0)
    # Householder reflections do not depend on the units of columns.
    assert found.converged
    assert (error <= (found.forward_error + 1e-9) * torch.linalg.vector_norm(sizes * x, dim=0)).all()


@pytest.mark.parametrize(
    ("shape", "engine", "given"),
    [
        ((150, 60), "emulated", {"damp": 0.1}),
        ((150, 60), "emulated", {"weights": torch.linspace(1, 2, 150)}),
        ((40, 90), "emulated", {}),
        ((150, 60), "cpu", {}),
    ],
    ids=["damping", "weights", "wide", "LAPACK"],
)
def test_others_take_a_copy(
    shape: tuple[int, int], engine: str, given: dict[str, Any], dtypes: list[torch.dtype]
) -> None:
    b = normal(shape[0], 1, seed=1)
    assert neula.lstsq(normal(*shape), b, engine=engine, algorithm="cgls", **given).converged
    assert dtypes == [torch.float64]
