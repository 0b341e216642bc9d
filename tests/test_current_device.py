"""Matrices on another GPU than the current one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import neula

pytestmark = pytest.mark.gpu2

HERE, THERE = torch.device("cuda", 0), torch.device("cuda", 1)


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, device=THERE)


def definite(*shape: int) -> torch.Tensor:
    a = normal(*shape)
    return a @ a.mT / shape[-1] + torch.eye(shape[-1], dtype=a.dtype, device=THERE)


def close(found: torch.Tensor, expected: torch.Tensor, u: float) -> None:
    """Up to ``100 n u``, relative to the whole: condition numbers here are far below 100 n."""
    error = torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected)
    assert error <= 100 * max(expected.shape) * u


U = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}


@pytest.fixture(autouse=True)
def another_is_current() -> Iterator[None]:
    with torch.cuda.device(HERE):
        yield
        assert torch.cuda.current_device() == HERE.index


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(64, 32), (2000, 300), (1500, 1500), (30, 100, 20)])
@pytest.mark.parametrize("times", [4])  # launched, recorded and played back
def test_factors(shape: tuple[int, ...], dtype: torch.dtype, times: int) -> None:
    for _ in range(times):
        a = normal(*shape, dtype=dtype)
        found = neula.qr(a)
        assert found.converged
        assert found.Q.device == THERE
        close(found.Q @ found.R, a, U[dtype])


SOLUTIONS: dict[str, tuple[Callable[..., Any], Callable[[], torch.Tensor]]] = {
    "lstsq small": (neula.lstsq, lambda: normal(40, 10)),
    "lstsq": (neula.lstsq, lambda: normal(3000, 400)),
    "lstsq tall": (neula.lstsq, lambda: normal(100000, 200)),
    "lstsq float32": (neula.lstsq, lambda: normal(20000, 300, dtype=torch.float32)),
    "lstsq batch": (neula.lstsq, lambda: normal(50, 60, 20)),
    "solve small": (neula.solve, lambda: definite(20, 20)),
    "solve": (neula.solve, lambda: definite(700, 700)),
    "solve batch": (neula.solve, lambda: definite(50, 30, 30)),
    "definite": (lambda a, b: neula.solve(a, b, assume_a="pos"), lambda: definite(900, 900)),
}


@pytest.mark.parametrize("name", SOLUTIONS)
def test_solutions(name: str) -> None:
    solve, make = SOLUTIONS[name]
    for _ in range(4):
        a = make()
        expected = torch.randn(*a.shape[:-2], a.shape[-1], 2, dtype=a.dtype, device=THERE)
        b = (a.double() @ expected.double()).to(a.dtype)
        found = solve(a, b)
        assert found.converged
        assert found.x.device == THERE
        close(found.x, expected, U[a.dtype])


def test_other_functions() -> None:
    a = normal(3000, 500, dtype=torch.float32)
    assert neula.qr(a[:, :300], pivoting=True).converged
    assert neula.tsqr(a[:, :100]).converged
    assert neula.polar(a, accuracy="fp32").converged
    assert neula.svd_lowrank(a, 10, accuracy=1e-2).converged
    close(neula.matmul(a.T, a, compute="fp16_cor"), a.T @ a, 2 * U[a.dtype])
    matrix = definite(2000, 2000)
    close(torch.tril(neula.cholesky(matrix).L), torch.linalg.cholesky(matrix), U[matrix.dtype])
    b = normal(2000, 1)
    close(matrix @ neula.lu_solve(neula.lu_factor(matrix), b), b, U[torch.float32])


def test_answers_that_nobody_waits_for() -> None:
    a = normal(20, 60, 40)
    found = neula.finish(neula.lstsq(a, a @ a.new_ones(40, 1), wait=False))
    close(found.x, found.x.new_ones(found.x.shape), U[a.dtype])
