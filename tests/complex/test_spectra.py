"""Singular values, norms and ranks of complex matrices, compared with those that were chosen."""

import numpy as np
import pytest
import torch

from neula.algorithms.krylov.batched_lstsq import Triangles
from neula.algorithms.spectra.condition import extreme_singular_values
from neula.algorithms.spectra.gram import gram, gram_r
from neula.algorithms.spectra.gram_svd import gram_svd
from neula.algorithms.spectra.inverse_norm import (
    norm_of,
    norm_of_triangle,
    sampled_inverse_norm,
    schatten_bounds,
    schatten_bounds_of_gram,
)
from neula.algorithms.spectra.numerical_rank import numerical_ranks, smallest_singular_values
from neula.algorithms.spectra.qr_svd import qr_svd, refined_svd
from neula.engines import CpuEngine, EmulatedEngine
from neula.engines.complex import over

C128 = torch.complex128
U = 2.0**-53


def normal(*shape, dtype=C128, seed=0):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape) + seed))


def with_singular_values(m, n, s):
    u, v = (torch.linalg.qr(normal(rows, len(s), seed=rows)).Q for rows in (m, n))
    return u * torch.as_tensor(s, dtype=torch.float64) @ v.mH


@pytest.mark.parametrize("s", [[3.0, 2.0, 1.0], [2.0, 2.0, 1e-8], [1.0, 1e-3, 0.0]], ids=str)
def test_a_refined_svd(s):
    a = with_singular_values(7, 3, s)
    u, found, vh = refined_svd(a)
    identity = torch.eye(3, dtype=C128)
    assert torch.allclose(found, torch.tensor(s, dtype=torch.float64), atol=8 * U)
    assert torch.linalg.matrix_norm(u.mH @ u - identity) <= 8 * U
    assert torch.linalg.matrix_norm(vh @ vh.mH - identity) <= 8 * U
    assert torch.linalg.matrix_norm(u * found @ vh - a) <= 16 * U * s[0]


@pytest.mark.parametrize("dtype", [torch.complex64, C128], ids=str)
def test_a_truncated_svd(dtype):
    a = with_singular_values(12, 6, [4.0, 3.0, 2.0, 1.0, 0.5, 0.25]).to(dtype)
    u, s, vh = qr_svd(*torch.linalg.qr(a), rank=3)
    u_unit = torch.finfo(dtype).eps
    assert s.tolist() == pytest.approx([4.0, 3.0, 2.0], rel=16 * u_unit)
    assert torch.linalg.matrix_norm(u.mH @ a @ vh.mH - torch.diag(s).to(dtype)) <= 64 * u_unit
    engine = over(CpuEngine("cpu", "fp32" if dtype == torch.complex64 else "fp64"), dtype)
    triplets = gram_svd(a, 3, engine, engine, 1e-6)
    assert triplets is not None
    found, beyond = triplets
    assert [*found.s.tolist(), beyond] == pytest.approx([4.0, 3.0, 2.0, 1.0], rel=1e-5)
    assert found.loss <= 1e-5


def test_norms():
    s = np.geomspace(1, 1e-4, 80)
    r = torch.linalg.qr(with_singular_values(80, 80, s)).R
    one = torch.ones(1, 80, 1, dtype=torch.float64)
    low, high = schatten_bounds(r[None], upper=True)
    assert low <= 1 + 1e-12 <= high + 1e-9
    low, high = schatten_bounds_of_gram((r.mH @ r)[None], one)
    assert low <= 1 + 1e-12 <= high + 1e-9
    assert 1 / 3 <= norm_of_triangle(r[None], one) <= 1 + 1e-9
    assert 1 / 3 <= norm_of(r[None], one)[0] <= 1 + 1e-9
    largest, smallest = extreme_singular_values(r, r).tolist()
    assert 0.9 <= largest <= 1 + 1e-9
    assert 1e-4 * (1 - 1e-9) <= smallest <= 1.5e-4
    estimated = Triangles.estimated(r[None], one)
    assert estimated.inverse_norm >= 1e4
    assert 1e4 / 3 <= sampled_inverse_norm(torch.linalg.solve_triangular(r, normal(80, 8), upper=True)) <= 3e4
    assert 1e-4 * (1 - 1e-9) <= smallest_singular_values(r[None]) <= 2e-4


def test_numerical_ranks():
    matrices = [with_singular_values(6, 6, [1.0] * rank + [1e-14] * (6 - rank)) for rank in (6, 4, 1)]
    r = torch.linalg.qr(torch.stack(matrices)).R
    assert numerical_ranks(r, 1e-10).tolist() == [6, 4, 1]


@pytest.mark.parametrize(
    "engine", [CpuEngine("cpu", "fp64"), CpuEngine("cpu", "fp32"), EmulatedEngine("cpu", "fp16")], ids=repr
)
def test_gram_matrices(engine):
    a, scales = normal(40, 9), 2.0 ** -torch.arange(9.0, dtype=torch.float64)
    engine, wanted = over(engine, C128), (a * scales).mH @ (a * scales)
    bound = 8 * 40 * engine.arithmetic.u * float(wanted.abs().max())
    for found in (gram(a, engine, scales), gram((a * scales).to(engine.operand_dtype), engine)):
        assert float((found - wanted).tril().abs().max()) <= bound
        assert not found.diagonal().imag.any()
    r = gram_r(a, engine, scales)
    assert float((r.mH @ r - wanted).abs().max()) <= 2 * bound
    assert not r.diagonal().imag.any()
