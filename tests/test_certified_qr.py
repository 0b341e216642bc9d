"""R without Q or with it, as bounds, constraints and statistics take it: as good as Householder's in double
precision, and only believed where what is measured says so.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.matrices import normal, normal_complex

from neula.engines import FP16_COR, EmulatedEngine, Engine, select_engine
from neula.engines.shipped import cpu_tuning, cuda_tuning
from neula.problems.orthogonal import certified
from neula.problems.orthogonal.certified import certified_qr, certified_triangle, coarse_arithmetic

CPU = select_engine("cpu", torch.device("cpu"))
ENGINES = pytest.mark.parametrize("engine", [CPU, EmulatedEngine()], ids=str)
SCALARS = pytest.mark.parametrize("make", [normal, normal_complex], ids=["real", "complex"])
U = 2.0**-53
norm = torch.linalg.matrix_norm


def conditioned(m: int, n: int, condition: float, count: int = 1, make=normal) -> torch.Tensor:
    u, _, vh = torch.linalg.svd(make(count, m, n), full_matrices=False)
    return u * torch.logspace(0, -np.log10(condition), min(m, n), dtype=torch.float64) @ vh


def check_qr(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor) -> None:
    """Residual with columns of norm 1, and loss of orthogonality.

    Householder's errors grow at most with m n^(3/2) u (Higham, Theorem 19.4), and stay far below.
    """
    norms = torch.linalg.vector_norm(a, dim=0)
    norms = torch.where(norms > 0, norms, 1.0)
    bound = 10 * a.shape[1] * U
    assert norm((a - q @ r) / norms) < bound
    assert norm(torch.eye(q.shape[1]) - q.mH @ q) < bound
    assert torch.equal(r, r.triu())


def check_triangle(a: torch.Tensor, b: torch.Tensor, r: torch.Tensor, c: torch.Tensor) -> None:
    """``[R c]`` is the triangle of data that differ by a modest multiple of n u, and so do products, relative
    to norms (Higham, section 19.3).
    """
    assert torch.equal(r, r.triu())
    error = 8 * a.shape[-1] ** 1.5 * U
    assert bool((norm(r.mH @ r - a.mH @ a) <= error * norm(a) ** 2).all())
    assert bool((norm(r.mH @ c - a.mH @ b) <= error * norm(a) * norm(b)).all())


@ENGINES
@SCALARS
@pytest.mark.parametrize("condition", [1.0, 1e4, 1e9, 1e14])
def test_q_and_r(engine: Engine, make, condition: float) -> None:
    """The engine may be that for real matrices."""
    a = conditioned(130, 31, condition, make=make) * 2.0 ** torch.arange(-15, 16)
    for given in (a, a.to(torch.complex64 if a.is_complex() else torch.float32)):
        found = certified_qr(given, engine)
        assert found.accepted.all()
        assert found.r.dtype == a.dtype
        check_qr(given[0].to(a.dtype), found.q[0], found.r[0])


@ENGINES
@SCALARS
@pytest.mark.parametrize("condition", [1.0, 1e4, 1e9, 1e14])
@pytest.mark.parametrize(
    ("m", "n", "k", "count"), [(60, 20, 1, 1), (33, 33, 2, 1), (50, 7, 3, 2), (9, 20, 1, 1)]
)
def test_r_alone(engine: Engine, make, condition: float, m: int, n: int, k: int, count: int) -> None:
    a, b = conditioned(m, n, condition, count, make), make(count, m, k, seed=1)
    found = certified_triangle(a, b, engine)
    assert found.accepted
    assert found.r.shape == (count, min(m, n), n)
    check_triangle(a, b, found.r, found.c)


@pytest.mark.parametrize("shape", [(1, 1), (7, 7), (3, 8), (5, 1), (0, 3), (4, 0)])
def test_shapes(shape: tuple[int, int]) -> None:
    a, k = normal(2, *shape), min(shape)
    found = certified_qr(a, CPU)
    assert found.q.shape == (2, shape[0], k)
    assert found.r.shape == (2, k, shape[1])
    assert torch.allclose(found.q @ found.r, a, atol=1e-13)


def test_nan_spoils_its_own_matrix_alone() -> None:
    a = normal(3, 20, 4)
    a[1, 2, 3] = torch.nan
    found = certified_qr(a, CPU)
    assert found.accepted.tolist() == [True, False, True]
    assert found.r[1].isnan().all()
    check_qr(a[2], found.q[2], found.r[2])
    triangle = certified_triangle(a, a[:, :, :1], CPU)
    assert not triangle.accepted
    assert triangle.r[1].isnan().all()
    assert triangle.r[[0, 2]].isfinite().all()


def test_only_well_conditioned_ones_go_without_q() -> None:
    """Of normalized columns."""

    def without_q(a: torch.Tensor, k: int = 1) -> bool:
        attempts = certified_triangle(a, torch.ones(1, len(a[0]), k).double(), CPU).attempts
        return attempts[-1].method.endswith("without Q")

    well = conditioned(60, 20, 1e3)
    assert without_q(well)
    assert without_q(well * 10.0 ** torch.linspace(-100, 100, 20).double())
    for a in (conditioned(60, 20, 1e10), torch.zeros(1, 6, 3).double(), torch.ones(1, 6, 3).double()):
        assert not without_q(a)
    assert not without_q(well, k=20)


def test_a_wrong_triangle_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    a, usual = conditioned(60, 20, 10.0), torch.linalg.qr

    def wrong(x: torch.Tensor, mode: str = "reduced"):
        q, r = usual(x, mode=mode)
        if mode == "r":
            r[:, 3, 4] += 0.3
        return q, r

    monkeypatch.setattr(certified.torch.linalg, "qr", wrong)
    found = certified_triangle(a, a[:, :, :1], CPU)
    assert found.accepted
    check_triangle(a, a[:, :, :1], found.r, found.c)


@pytest.mark.parametrize("compute", ["fp16", "fp32"])
@pytest.mark.parametrize("condition", [1.0, 100.0, 1e6])
def test_by_a_coarse_gram_matrix(compute: str, condition: float) -> None:
    """R from a coarse Gram matrix, as for large ones on a GPU, is as good as Householder's, or given up."""
    a = conditioned(200, 30, condition) * 2.0 ** torch.arange(-15, 15)
    b = normal(1, 200, 1, seed=2)
    found = certified._by_cholesky(a, b, EmulatedEngine().using(compute))
    assert (found is None) == (condition == 1e6)
    if found is not None:
        d = torch.linalg.vector_norm(a, dim=1, keepdim=True)
        check_triangle(a / d, b, found.r / d, found.c)


def test_when_a_gram_matrix_comes_first() -> None:
    h200, cpu = cuda_tuning((9, 0), replayed_bytes=1 << 28), cpu_tuning(("fp32", "fp64"))
    assert coarse_arithmetic(1_000_000, 1000, h200) == FP16_COR
    assert coarse_arithmetic(1000, 1000, h200) is None
    assert coarse_arithmetic(100_000, 1000, cpu) is None
    assert coarse_arithmetic(5, 0, h200) is None
