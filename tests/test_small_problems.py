"""Small problems on a CPU: bounds that hold, and what one link leaves to the others."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import neula
from exact_solutions import error_of, exactly, solved
from neula.kernels.few_vectors import probes_host

U = 2.0**-53


def test_bounds_count_what_third_slices_lose() -> None:
    """Condition number 6e11: what is left of the error in the end are rounding errors of the residual."""
    a = np.array([[0.6419927926899742, -0.47941427473902987], [-0.47941427473902987, 0.35800720731156804]])
    b = np.array([-9.940932306864445e-05, 7.650992003733073e-05])
    result, exact = neula.solve(a, b, assume_a="pos"), solved(exactly(a), [Fraction(x) for x in b.tolist()])
    assert result.converged
    assert error_of(a, result.x, exact) <= result.forward_error * (1 + 1e-9) <= 1e-15


@pytest.mark.parametrize("shape", [(600, 100), (130, 130), (400, 300), (700, 250), (400, 400)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_larger_problems_with_more_threads(
    shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results for several threads agree with those for one thread, on any machine."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator, dtype=dtype) for _ in range(2))
    b = b[:, :2]
    functions: list[Any] = [neula.lstsq, *([neula.solve] if shape[0] == shape[1] else [])]
    one = [function(a, b) for function in functions]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for function, expected in zip(functions, one, strict=True):
        found = function(a, b)
        assert found.converged
        noise = 8 * (torch.finfo(dtype).eps + found.condition * U)
        assert torch.linalg.vector_norm(found.x - expected.x) <= noise * torch.linalg.vector_norm(found.x)
        assert expected.condition / 2 <= found.condition <= 2 * expected.condition
    assert neula.qr(a).certificate.accepted


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_larger_qr_is_measured_as_a_small_one(
    threads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(700, 400, generator=generator, dtype=dtype)
    a[:, 3] *= 1e-9
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(probes_host, "core", lambda: None)
    result = neula.qr(a)
    high, q, r = a.double(), result.Q.double(), result.R.double()
    norm = torch.linalg.matrix_norm
    sizes = torch.linalg.vector_norm(high, dim=0)
    residual = norm((high - q @ r) / sizes) / norm(high / sizes)
    loss = norm(q.mT @ q - torch.eye(400, dtype=torch.float64)) / 20
    for measured, true in ((result.certificate.residual, residual), (result.certificate.orthogonality, loss)):
        assert measured == pytest.approx(float(true), rel=0.5)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("shape", [(30, 4), (300, 40), (70, 70)])
def test_one_problem_is_as_one_of_a_batch(
    shape: tuple[int, int], dtype: Any, rng: np.random.Generator
) -> None:
    a, b = rng.standard_normal(shape).astype(dtype), rng.standard_normal((shape[0], 3)).astype(dtype)
    alone, batch = neula.lstsq(a, b), neula.lstsq(np.stack([a, a]), b)
    assert alone.converged
    assert alone.x.dtype == dtype
    rounding = 8 * (np.finfo(dtype).eps + alone.condition * U)  # square ones are solved by LU, many by R
    assert np.linalg.norm(alone.x - batch.x[0]) <= rounding * np.linalg.norm(alone.x)
    assert batch.conditions[0] / 4 <= alone.condition <= 4 * batch.conditions[0]
    assert alone.rank == batch.ranks[0] == shape[1]
    # Of a system that is solved nothing is left but what rounding x has made of it.
    noise = np.finfo(dtype).eps * np.linalg.norm(a.astype(float)) * np.linalg.norm(alone.x.astype(float))
    noise = 4 * float(noise) if shape[0] == shape[1] else 0.0
    assert alone.residual_norm == pytest.approx(batch.residual_norm[:3], rel=1e-3, abs=noise)
    for name in ("accepted", "backward_errors", "conditions", "forward_errors", "ranks"):
        one, many = getattr(alone, name), getattr(batch, name)
        assert (one.shape, one.dtype) == (many.shape[1:], many.dtype)


def test_tensors_that_numpy_does_not_know(rng: np.random.Generator) -> None:
    a = torch.from_numpy(rng.standard_normal((60, 60)) + 1j * rng.standard_normal((60, 60))).conj().imag
    b = torch.from_numpy(rng.standard_normal((60, 2)))
    assert a.is_neg()
    assert neula.qr(a[:, :7]).converged
    for function in (neula.lstsq, neula.solve):
        expected = function(a.clone().resolve_neg(), b).x
        assert torch.linalg.vector_norm(function(a, b).x - expected) <= 1e-12 * torch.linalg.vector_norm(
            expected
        )
        # In so few digits the rank of a random matrix would be in doubt.
        narrow = (a + 20 * torch.eye(60, dtype=a.dtype)).bfloat16()
        for mine, right in (
            (narrow, b.float()),
            (narrow.expand(3, 60, 60), b.float()),
            (narrow, b.bfloat16()),
        ):
            assert function(mine, right).converged
    tall = narrow.repeat(3, 2, 1)
    assert neula.lstsq(tall, b.float().repeat(2, 1)).converged
