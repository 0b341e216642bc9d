"""Products with error correction by name: single precision wherever an algorithm multiplies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from neula.algorithms.spectra.gram import gram
from neula.engines import FP16_COR, FP32, CpuEngine, CudaEngine, EmulatedEngine, cuda
from neula.engines.shipped import EMULATED
from neula.io.matrices import random_matrix
from neula.kernels.dispatch import Kernel
from neula.kernels.products.gemm import corrected_projection

U32 = 2.0**-24


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(40, 30), (EMULATED.corrected_from, EMULATED.corrected_from + 8), (20000, 700)]
)
def test_products_are_as_accurate_as_in_single_precision(shape: tuple[int, int]) -> None:
    """Small ones, which are not corrected, and large ones."""
    engine, n = CudaEngine("cuda", FP16_COR), shape[1]
    a, b = (random_matrix("normal", *shape, seed=i).float().cuda() for i in (1, 2))
    exact = a.double().T @ b.double()
    size = a.double().abs().T @ b.double().abs()
    c = engine.empty(n, n).fill_(float("nan"))
    engine.gemm(a.T, b, c)
    # Two roundings of the parts dropped, and a sum of products.
    bound = (4 + shape[0]) * U32
    assert bool(((c - exact).abs() <= bound * size).all())
    before = c.double()
    engine.gemm(a.T, b, c, alpha=-2.0, beta=1.0)
    assert bool(((c - before + 2 * exact).abs() <= 3 * bound * size).all())


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n"), [(20000, 100), (9000, 1200), (20001, 2049)])
def test_gram_matrices_have_single_precision(m: int, n: int) -> None:
    """Below ``corrected_gram`` of :class:`neula.engines.Tuning` and beyond, A split once for all blocks."""
    a = random_matrix("normal", m, n, device=torch.device("cuda")).float()
    g = gram(a, CudaEngine("cuda", FP16_COR)).tril()
    wide = a.double()
    # Random errors of m products, and two parts dropped.
    bound = (4 + 4 * m**0.5) * U32 * (wide.abs().T @ wide.abs())
    assert bool(((g - (wide.T @ wide).tril()).abs() <= bound.tril()).all())


@pytest.mark.parametrize(
    ("m", "n", "corrected"), [(100, 70, True), (1000, 32, True), (900, 32, False), (20000, 10, False)]
)
def test_which_products_are_corrected(
    monkeypatch: pytest.MonkeyPatch, m: int, n: int, corrected: bool
) -> None:
    """Products of large dimensions are corrected, and narrower ones if there is much to multiply."""
    taken = []

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        taken.append(a.shape)
        return a @ b

    tuning = replace(EMULATED, corrected_from=64, projected_from=16, corrected_gram=1000 * 32**2)
    monkeypatch.setattr(CudaEngine, "tuning", tuning)
    monkeypatch.setattr(Kernel, "runs", lambda kernel, device: True)
    monkeypatch.setattr(cuda, "corrected_gemm", multiply)
    a, b = (random_matrix("normal", m, n, seed=i).float() for i in (1, 2))
    found = CudaEngine("cpu", FP16_COR).inner(a, b)
    assert torch.allclose(found, a.T @ b, atol=1e-3)
    assert bool(taken) == corrected


@pytest.mark.parametrize("large", [1, 1 << 40])
def test_columns_are_projected_in_halves_where_they_are_many(
    monkeypatch: pytest.MonkeyPatch, large: int
) -> None:
    widths = []

    def project(q: torch.Tensor, a: torch.Tensor, *others: object, columns: int, bound: float) -> None:
        widths.append(columns)
        corrected_projection(q, a, *others, columns=columns, bound=bound)

    monkeypatch.setattr(CudaEngine, "tuning", replace(EMULATED, projected_from=16))
    monkeypatch.setattr(cuda, "LARGE", large)
    monkeypatch.setattr(Kernel, "runs", lambda kernel, device: True)
    monkeypatch.setattr(cuda, "corrected_projection", project)
    q, a = torch.linalg.qr(random_matrix("normal", 90, 20).float()).Q, random_matrix("normal", 90, 31).float()
    before, r = a.clone(), torch.empty(20, 31)
    CudaEngine("cpu", FP16_COR).project_out(q, a, r)
    assert torch.linalg.matrix_norm(q.T @ a) <= 1e-5
    assert torch.linalg.matrix_norm(q @ r + a - before) <= 1e-4
    assert widths == [16 if large == 1 else 31]


def test_arithmetic_by_name() -> None:
    assert CpuEngine("cpu").using("fp64").format.name == "fp64"
    assert CudaEngine("cpu", "fp16").using(FP16_COR).format is FP32
    with pytest.raises(ValueError, match="the emulated engine has no products with error correction"):
        EmulatedEngine("cpu", FP16_COR)


def test_it_pays_only_where_a_kernel_runs() -> None:
    assert not CpuEngine("cpu").tuning.corrected
    large = torch.empty(1, 1).expand(5000, 5000)
    assert not CudaEngine("cpu", FP16_COR)._corrects(large, large)
