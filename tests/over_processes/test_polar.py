"""Polar factors of matrices whose rows are spread over processes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import neula
from neula.engines.formats import in_double
from over_processes import tasks
from over_processes.problems import COUNTS, SPECTRA, matrix
from over_processes.processes import Processes


def check(result: Any, a: torch.Tensor) -> None:
    """U is orthonormal, H positive, and both make up A, as far as is asked for."""
    u, h, a, (m, n) = in_double(result.U), in_double(result.H), in_double(a), a.shape
    noise = 4 * max(m, n) ** 0.5 * (2.0**-53 if result.accuracy == "fp64" else 2.0**-24)
    if result.rank == min(m, n):
        values = torch.linalg.svdvals(u)
        assert float((values - 1).abs().max()) <= result.orthogonality_bound + noise
    assert float((a - u @ h).norm() / a.norm()) <= result.residual_bound + noise
    assert float(torch.linalg.eigvalsh(h).min()) >= -(result.residual_bound + noise) * float(h.norm())


CASES = [
    *itertools.product(["cpu"], [False], ["fp32", "fp64"], SPECTRA),
    *itertools.product(["cpu", "like a GPU"], [True], ["bf16", "fp32", "fp64"], ["geometric"]),
]


@pytest.mark.parametrize("size", COUNTS)
@pytest.mark.parametrize(("engine", "imaginary", "accuracy", "name"), CASES)
@pytest.mark.parametrize("shape", [(331, 40), (40, 90), (60, 60)])
def test_factors(
    processes: Processes,
    size: int,
    engine: str,
    imaginary: bool,
    accuracy: str,
    name: str,
    shape: tuple[int, int],
) -> None:
    """All spectra, tall and wide: the same on all processes, bit by bit."""
    a = matrix(max(shape), min(shape), name, imaginary=imaginary)
    a = a if shape[0] >= shape[1] else a.T.contiguous()
    asked = {"accuracy": accuracy, "side": "right"}
    asked |= {} if engine == "cpu" else {"engine": tasks.LikeAGpu("cpu")}
    found = processes.check(size, tasks.factors, "polar", a, asked)
    assert found[0].converged
    check(found[0], a)
    for other in found[1:]:
        assert torch.equal(other.U, found[0].U)
        assert torch.equal(other.H, found[0].H)
        assert (other.attempts, other.residual) == (found[0].attempts, found[0].residual)


def test_fewer_rows_than_processes(processes: Processes) -> None:
    for a in (torch.ones(2, 1, dtype=torch.float64), torch.ones(1, 3, dtype=torch.float64)):
        found = processes.check(3, tasks.factors, "polar", a, {"side": "right"})[0]
        assert found.converged
        check(found, a)
    zero = processes.check(3, tasks.factors, "polar", torch.zeros(30, 4), {})[0]
    assert zero.converged
    assert zero.rank == 0
    assert not zero.U.any()


def test_for_optimizers(processes: Processes) -> None:
    """In half precision, with the links of a GPU."""
    a = matrix(200, 30, "geometric", 1e2)
    asked = {"engine": tasks.LikeAGpu("cpu"), "accuracy": "bf16"}
    found = processes.check(2, tasks.factors, "polar", a, {**asked, "side": "right"})[0]
    assert [attempt.method for attempt in found.attempts] == ["polynomials fp16"]
    check(found, a)


def test_lists_of_dtensors(processes: Processes) -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(*shape, generator=generator) for shape in ((12, 8), (8, 12), (12, 8))]
    expected = [neula.polar(a, accuracy="fp32").U for a in matrices]
    expected += [expected[0], expected[0]]
    for found in processes.check(2, tasks.polar_of_dtensors, matrices):
        for u, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(u, exact, rtol=0, atol=2.0**-6)


def test_what_needs_the_whole_matrix(processes: Processes) -> None:
    for asked in ({"side": "left"}, {"wait": False}):
        failure = processes.run(2, tasks.factors, "polar", torch.ones(8, 4), asked)[0]
        assert "needs the whole matrix" in failure.message
    a = torch.ones(8, 4)
    a[5, 1] = torch.nan
    failure = processes.run(2, tasks.factors, "polar", a, {})[0]
    assert "A[5, 1] is nan" in failure.message
