"""Products with error correction as an engine: single precision wherever an algorithm multiplies."""

from __future__ import annotations

import pytest
import torch

from neula.algorithms.rgsqrf import rgsqrf
from neula.engines import CpuEngine, CudaEngine, EmulatedEngine
from neula.engines.corrected import FP16_COR, CorrectedEngine, arithmetic, corrects
from neula.engines.formats import FP32
from neula.matrices import random_matrix

U32 = 2.0**-24
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_products_are_as_accurate_as_in_single_precision(device: str) -> None:
    engine = CorrectedEngine(device)
    a, b = (random_matrix("normal", 40, 30, seed=i).float().to(device) for i in (1, 2))
    exact = a.double().T @ b.double()
    size = a.double().abs().T @ b.double().abs()
    c = engine.empty(30, 30).fill_(float("nan"))
    engine.gemm(a.T, b, c)
    # Two roundings of the parts dropped, and a sum of 40 products.
    assert bool(((c - exact).abs() <= (4 + 40) * U32 * size).all())
    assert torch.equal(engine.gemm(a.T, b), c)
    before = c.double()
    engine.gemm(a.T, b, c, alpha=-2.0, beta=1.0)
    assert bool(((c - before + 2 * exact).abs() <= 3 * (4 + 40) * U32 * size).all())


@pytest.mark.gpu
def test_a_qr_on_it_has_single_precision() -> None:
    m, n = 300, 150
    a = random_matrix("arithmetic", m, n, cond=100.0).float().cuda()
    q, r = rgsqrf(a, CorrectedEngine("cuda"), cutoff=32, panel="cholesky")
    residual = torch.linalg.matrix_norm(a.double() - q.double() @ r.double())
    # Four levels, three products in each, of 300 terms.
    assert float(residual) <= 4 * 3 * m**0.5 * 4 * U32 * float(a.double().norm())


def test_panels_and_other_formats_are_those_of_the_plain_engine() -> None:
    engine = CorrectedEngine("cpu")
    assert engine.format is FP32
    assert type(engine.using("fp64")) is CudaEngine
    assert repr(engine) == "cuda in fp16_cor"


def test_arithmetic_by_name() -> None:
    assert arithmetic(CpuEngine("cpu"), "fp64").format.name == "fp64"
    assert isinstance(arithmetic(CudaEngine("cpu", "fp32"), FP16_COR), CorrectedEngine)
    with pytest.raises(ValueError, match="the emulated engine has no products with error correction"):
        arithmetic(EmulatedEngine("cpu"), FP16_COR)


def test_it_pays_only_where_a_kernel_runs() -> None:
    assert not corrects(CpuEngine("cpu"))
    assert not corrects(CudaEngine("cpu", "fp32"))


@pytest.mark.gpu
def test_it_pays_on_a_gpu() -> None:
    assert corrects(CudaEngine("cuda"))
