"""Batches of complex matrices in planes, with the parts that a GPU has, and polar factors from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.matrices import complex_array, normal_complex

import neula
from neula.engines import CpuEngine, EmulatedEngine, Engine
from neula.engines.complex import over
from neula.engines.shipped import cuda_tuning
from neula.kernels.polar.batched_product import batched_product, joined, split


class PartsOfAGpu(EmulatedEngine):
    """Products of batches are those of a GPU's kernels, by their definitions in plain torch."""

    corrects = True
    tuning = cuda_tuning((9, 0), corrected=True, tournament_width=0)

    @property
    def _count(self) -> int:
        return 2 if self.arithmetic.corrected else int(self.format.dtype.itemsize == 2)

    def parts(self, x, scales=None, factor=1.0):
        if not self._count:
            return super().parts(x, scales, factor)
        return split.reference(x, self.arithmetic.operands.dtype, self._count, scales, factor)

    def joined(self, parts):
        return joined(parts) if self._count else super().joined(parts)

    def wide(self, a, b, *, symmetric=False):
        return batched_product.reference(a, b, wide=True)[0] if self._count else super().wide(a, b)

    def product(self, a, b, **options):
        multiply = batched_product.reference if self._count else super().product
        return multiply(a, b, **options)

    def thin(self, a, x, *, adjoint=False):
        leading = a[0].mT if adjoint else a[0]
        return leading.to(self.storage) @ x.to(a.dtype).to(self.storage)


ENGINES = [
    *(EmulatedEngine("cpu", name) for name in ("fp16", "bf16", "fp32", "fp64")),
    *(CpuEngine("cpu", name) for name in ("fp32", "fp64")),
    *(PartsOfAGpu("cpu", name) for name in ("fp16", "fp16_cor", "bf16", "fp32")),
]


def unit(engine: Engine) -> float:
    """Of parts: two of fp16 have 22 bits."""
    return 2.0**-22 if engine.arithmetic.corrected else engine.format.u


@pytest.mark.parametrize("engine", ENGINES, ids=repr)
def test_products_by_definition(engine: Engine) -> None:
    engine = over(engine, torch.complex64)
    u, a, b = unit(engine), normal_complex(3, 20, 30) / 8, normal_complex(3, 30, 20, seed=1) / 8
    parts, others = engine.parts(a), engine.parts(b)
    assert engine.members(parts) == 3
    x, y = engine.joined(parts), engine.joined(others)
    assert (x.dtype, x.shape) == (engine.storage, a.shape)
    assert ((x - a).abs() <= 2 * u * a.abs() + 2.0**-25).all()
    scales = torch.tensor([1.0, 0.5, 3.0], dtype=engine.storage.to_real())
    found = engine.joined(engine.product(parts, others, factor=0.3, shift=2.0, scales=scales))
    x, y = x.to(torch.complex128), y.to(torch.complex128)
    exact = scales[:, None, None] * (0.3 * (x @ y) + 2.0 * torch.eye(20))
    # Sums of parts are rounded to the format; tensor cores truncate sums of 30 products.
    room = (8 * u + 60 * 2.0**-23 * (u > 2.0**-50)) * (x.abs() @ y.abs() + 2) * 3 + 4 * u * exact.abs()
    assert ((found - exact).abs() <= room).all()


@pytest.mark.parametrize("engine", ENGINES, ids=repr)
def test_hermitian_products(engine: Engine) -> None:
    engine = over(engine, torch.complex64)
    u, a = unit(engine), normal_complex(2, 15, 31) / 8
    h = normal_complex(2, 15, 15, seed=1)
    h = (h @ h.mH / 30 + torch.eye(15)) @ a  # H A, so that (H A) A^H is no Hermitian matrix, and A A^H is
    parts, others = engine.parts(a), engine.parts(h)
    x, y = (engine.joined(z).to(torch.complex128) for z in (parts, others))
    room = 4 * u + 80 * 2.0**-23 * (u > 2.0**-50)
    for left, right, p, q in ((parts, parts, x, x), (parts, others, x, y)):
        found = engine.joined(engine.across(left, right, factor=-0.5, shift=1.0))
        exact = torch.eye(15) - 0.5 * (p @ q.mH)
        assert ((found - exact).abs() <= room * (p.abs() @ q.abs().mT + 1)).all()
    square = engine.across(parts, parts)
    s = engine.joined(square).to(torch.complex128)
    found = engine.joined(engine.product(square, square, factor=0.3, shift=2.0, symmetric=True))
    exact = 2 * torch.eye(15) + 0.3 * (s @ s)
    assert ((found - exact).abs() <= room * (s.abs() @ s.abs() + 2)).all()
    same = engine.joined(square)
    assert torch.equal(same.diagonal(dim1=1, dim2=2).imag, torch.zeros(2, 15, dtype=same.real.dtype))


@pytest.mark.parametrize("engine", ENGINES, ids=repr)
def test_the_rest_by_definition(engine: Engine) -> None:
    engine = over(engine, torch.complex64)
    u, a, v = engine.format.u, normal_complex(2, 25, 18), normal_complex(2, 18, 3, seed=1).to(engine.storage)
    w = normal_complex(2, 25, 3, seed=2).to(engine.storage)
    parts = engine.parts(a)
    x = engine.joined(parts).to(torch.complex128)
    low = 2.0**-11 if engine.arithmetic.corrected else u  # leading parts
    for found, p, q in ((engine.thin(parts, v), x, v), (engine.thin(parts, w, adjoint=True), x.mH, w)):
        bound = (6 * low + 50 * torch.finfo(found.dtype).eps) * (p.abs() @ q.to(torch.complex128).abs())
        assert ((found - p @ q.to(torch.complex128)).abs() <= bound).all()
    norms = engine.norms(parts)
    assert (norms.dtype, norms.shape) == (engine.storage.to_real(), (2,))
    rounding = 900 * 2.0**-53  # of the root of a sum of 900 squares, by each of two libraries
    exact = torch.linalg.vector_norm(x, dim=(1, 2))
    torch.testing.assert_close(norms.double(), exact, rtol=4 * low + rounding, atol=0)
    square = engine.parts(a[:, :18])
    scales = torch.tensor([0.5, -3.0], dtype=engine.storage.to_real())
    exact = scales[:, None, None] * engine.joined(square).to(torch.complex128) - 0.25 * torch.eye(18)
    adjusted = engine.joined(engine.adjusted(square, scales, -0.25))
    assert ((adjusted - exact).abs() <= 4 * u * (exact.abs() + 1)).all()
    scaled = engine.joined(engine.parts(a * 2.0**30, torch.tensor([2.0**-30] * 2).to(scales), 0.5))
    torch.testing.assert_close(scaled, (engine.joined(parts) / 2), rtol=4 * u, atol=2.0**-24)


@pytest.mark.parametrize(
    ("accuracy", "dtype", "condition", "method"),
    [
        ("bf16", np.complex64, 1e2, "polynomials fp16"),
        ("bf16", np.complex64, 900.0, "polynomials fp16"),
        ("fp32", np.complex64, 1e2, "polynomials fp16_cor"),
        ("fp32", np.complex64, 900.0, "polynomials fp16_cor"),
        ("fp32", np.complex64, 1e5, "more polynomials fp16_cor"),
        ("fp64", np.complex128, 1e2, "polynomials fp64"),
    ],
)
@pytest.mark.parametrize("shape", [(96, 96), (160, 60), (60, 160), (1, 1), (2, 40, 33)])
def test_polar_factors(accuracy, dtype, condition, method, shape):
    """The cheapest link is good enough up to the condition number that it is made for."""
    *_, m, n = shape
    k = min(m, n)
    u, v = (np.linalg.qr(complex_array(rows, k, seed=rows))[0] for rows in (m, n + 1000))
    v = np.linalg.qr(v[:n])[0]
    a = u * np.geomspace(1, 1 / condition, k) @ v.conj().T
    a = (np.stack([a, 1e-3j * a]) if len(shape) == 3 else a).astype(dtype)
    found = neula.polar(a, accuracy=accuracy, engine=PartsOfAGpu("cpu"), side="right")
    assert found.converged
    assert found.attempts[-1].method == method or k == 1
    wide = found.U.astype(complex)
    s = np.linalg.svd(wide, compute_uv=False)
    assert np.abs(s - 1).max() <= 1.01 * found.orthogonality_bound
    rest = np.linalg.norm(a - wide @ found.H, axis=(-2, -1)) / np.linalg.norm(a, axis=(-2, -1))
    assert rest.max() <= found.residual_bound
