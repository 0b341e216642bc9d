"""The R that bounds, constraints and statistics work on: as good as Householder's in double precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests import matrices

from neula.engines import FP16_COR, EmulatedEngine, select_engine
from neula.engines.shipped import cpu_tuning, cuda_tuning
from neula.problems.orthogonal.certified import certified_qr, coarse_arithmetic

CPU = select_engine("cpu", torch.device("cpu"))
U = 2.0**-53


def errors(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor) -> tuple[float, float]:
    """Residual with columns of norm 1, and loss of orthogonality, in the Frobenius norm."""
    norms = torch.linalg.vector_norm(a, dim=0)
    norms = torch.where(norms > 0, norms, 1.0)
    residual = torch.linalg.matrix_norm((a - q @ r) / norms)
    return float(residual), float(torch.linalg.matrix_norm(torch.eye(q.shape[1]) - q.T @ q))


def with_condition(m: int, n: int, condition: float, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(matrices.with_condition(np.random.default_rng(seed), m, n, condition))


@pytest.mark.parametrize("engine", [CPU, EmulatedEngine()], ids=str)
@pytest.mark.parametrize("condition", [1.0, 1e4, 1e9, 1e14])
def test_as_good_as_householder(engine, condition) -> None:
    a = with_condition(130, 31, condition) * 2.0 ** torch.arange(-15, 16)
    found = certified_qr(a[None], engine)
    assert found.accepted.all()
    # Householder's errors grow at most with m n^(3/2) u (Higham, Theorem 19.4), and stay far below.
    assert max(errors(a, found.q[0], found.r[0])) < 10 * 31 * U
    assert found.r[0].tril(-1).abs().max() == 0


@pytest.mark.parametrize("shape", [(1, 1), (7, 7), (3, 8), (5, 1), (0, 3), (4, 0)])
def test_shapes(shape) -> None:
    a = torch.from_numpy(np.random.default_rng(1).standard_normal((2, *shape)))
    found = certified_qr(a, CPU)
    k = min(shape)
    assert found.q.shape == (2, shape[0], k)
    assert found.r.shape == (2, k, shape[1])
    assert torch.allclose(found.q @ found.r, a, atol=1e-13)


def test_of_a_coarse_dtype() -> None:
    a = with_condition(200, 20, 1e3).half()
    found = certified_qr(a[None], CPU)
    assert found.r.dtype == torch.float64
    assert max(errors(a.double(), found.q[0], found.r[0])) < 10 * 20 * U


def test_nan_spoils_its_own_matrix_alone() -> None:
    a = torch.randn(3, 20, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    a[1, 2, 3] = torch.nan
    found = certified_qr(a, CPU)
    assert found.accepted.tolist() == [True, False, True]
    assert found.r[1].isnan().all()
    assert max(errors(a[2], found.q[2], found.r[2])) < 10 * 4 * U


def test_when_a_gram_matrix_comes_first() -> None:
    h200, cpu = cuda_tuning((9, 0), replayed_bytes=1 << 28), cpu_tuning(("fp32", "fp64"))
    assert coarse_arithmetic(1_000_000, 1000, h200) == FP16_COR
    assert coarse_arithmetic(1000, 1000, h200) is None
    assert coarse_arithmetic(100_000, 1000, cpu) is None
    assert coarse_arithmetic(5, 0, h200) is None
