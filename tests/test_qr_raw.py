"""QR in Householder form: against the definition, and as torch goes on from it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.matrices import normal

import neula
import neula.compat.numpy
from neula.algorithms.orthogonal.reconstruction import complement_by_reflectors, householder_form
from neula.certificates.householder import Reflectors, householder_images, householder_measures
from neula.engines import CpuEngine, Engine
from neula.engines.shipped import cuda_tuning

SHAPES = [(1, 1), (5, 3), (3, 5), (40, 40), (70, 33), (33, 70), (3, 70, 40), (2, 2, 33, 70), (2, 100, 100)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


class FromQ(CpuEngine):
    """A CPU that takes the steps of a GPU for batches."""

    tuning = replace(cuda_tuning((9, 0)), corrected=False)


def factors(h: torch.Tensor, tau: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q and R as torch and LAPACK read them, in double precision."""
    k = tau.shape[-1]
    return torch.linalg.householder_product(h[..., :k].double(), tau.double()), h[..., :k, :].double().triu()


def errors(a: torch.Tensor, h: torch.Tensor, tau: torch.Tensor) -> tuple[float, float]:
    """Residual and loss of orthogonality as certificates have them."""
    q, r = factors(h, tau)
    a, identity = a.double(), torch.eye(q.shape[-1], dtype=torch.float64)
    return gap(q @ r, a), float((q.mT @ q - identity).norm()) / math.sqrt(tau.numel())


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def engines_for(shape: tuple[int, ...]) -> list[str | Engine]:
    return ["cpu", "emulated", *([FromQ("cpu")] if math.prod(shape[:-2]) > 1 else [])]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_and_dtype(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    a = normal(*shape, dtype=dtype)
    for engine in engines_for(shape):
        h, tau = found = neula.qr(a, mode="raw", engine=engine)
        assert found.converged
        assert found.Q is found.R is None
        assert h.dtype == tau.dtype == torch.promote_types(dtype, torch.float32)
        assert (h.shape, tau.shape) == (shape, (*shape[:-2], min(shape[-2:])))
        # The bounds of a certificate, whose random vectors may see a third of an error.
        bound = 9 * torch.finfo(dtype).eps / 2 * (2 + math.log2(max(shape[-1], 2)))
        residual, orthogonality = errors(a, h, tau)
        assert residual <= bound, engine
        assert orthogonality <= 2 * bound, engine


def measures(a: torch.Tensor, h: torch.Tensor, tau: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return householder_measures(a, scales, *householder_images(h, tau, scales))


def test_what_is_returned_is_what_is_measured() -> None:
    """A wrong vector shows, and a wrong factor, though Q and R that they came from were right."""
    a = normal(2, 50, 30)
    h, tau = neula.qr(a, mode="raw", engine=FromQ("cpu"))
    scales = torch.ones(2, 30, dtype=torch.float64)
    residual, size, loss, norm = measures(a, h, tau, scales)
    assert (residual <= 1e-14 * size).all()
    assert (loss <= 1e-13).all()
    assert (norm <= 1e-13).all()
    wrong = tau.clone()
    wrong[1, 7] *= 1.01
    assert (measures(a, h, wrong, scales)[2:] > 1e-4).tolist() == [[False, True]] * 2
    wrong = h.clone()
    wrong[0, 20, 3] += 0.01
    assert (measures(a, wrong, tau, scales)[0] > 1e-4 * size).tolist() == [True, False]


@pytest.mark.parametrize("engine", ["cpu", "emulated", FromQ("cpu")], ids=str)
def test_dependent_columns_and_scales(engine: str | Engine) -> None:
    """Q is orthonormal beyond the rank, too, and columns in any units count alike."""
    a = normal(3, 40, 12, dtype=torch.float32)
    a[0, :, 5], a[1, :, 7], a[2] = 0.0, a[1, :, 2], 0.0
    a *= torch.logspace(-30, 30, 12)
    h, tau = found = neula.qr(a, mode="raw", engine=engine)
    assert found.converged
    q, r = factors(h, tau)
    units = a.double().norm(dim=1, keepdim=True)
    units[units == 0] = 1
    assert float(((q @ r - a.double()) / units).norm(dim=(1, 2)).max()) <= 12 * 40 * 2.0**-24
    assert float((q.mT @ q - torch.eye(12)).norm()) <= 12 * 40 * 2.0**-24


def test_empty() -> None:
    for shape in ((0, 4, 3), (3, 0, 2), (4, 0)):
        h, tau = found = neula.qr(torch.zeros(shape), mode="raw")
        assert (h.shape, tau.shape) == (shape, (*shape[:-2], min(shape[-2:])))
        assert found.converged


def test_numpy_has_the_transpose() -> None:
    a = np.random.default_rng(0).standard_normal((2, 7, 4))
    result = neula.qr(a, mode="raw")
    assert isinstance(result.H, np.ndarray)
    h, tau = neula.compat.numpy.qr(a, mode="raw")
    assert np.array_equal(h, result.H.swapaxes(-2, -1))
    expected, expected_tau = np.linalg.qr(a, mode="raw")
    assert h.shape == expected.shape
    # LAPACK's, of columns that were scaled by powers of two.
    assert np.allclose(h, expected, rtol=1e-12, atol=1e-13)
    assert np.allclose(tau, expected_tau, rtol=1e-12)


def test_what_it_cannot_do() -> None:
    a = normal(5, 3)
    with pytest.raises(ValueError, match=r"mode='raw' has none: pass mode='reduced'"):
        neula.qr(a.clone().requires_grad_(), mode="raw")
    with pytest.raises(ValueError, match="pivoting=True has no Householder form"):
        neula.qr(a, mode="raw", pivoting=True)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 32, 32), (2, 33, 33), (2, 90, 70), (1, 8, 65)], ids=str)
def test_reconstruction_is_exact_to_rounding(shape: tuple[int, ...]) -> None:
    """Of any orthonormal Q, also where pivots vanish without signs."""
    m, k = shape[1], min(shape[1:])
    q = torch.linalg.qr(normal(shape[0], m, k))[0]
    q[0] = torch.eye(m, k).roll(1, 0)
    r = normal(shape[0], k, shape[2], seed=1).triu()
    h, tau = householder_form(q, r)
    found, signed = factors(h, tau)
    signs = (found * q).sum(1)
    assert float((signs.abs() - 1).abs().max()) <= 10 * m * 2.0**-53
    assert gap(found @ signed, q @ r) <= 10 * m * 2.0**-53
    assert ((tau >= 1 - 1e-12) & (tau <= 2)).all()


@pytest.mark.parametrize("shape", [(2, 3, 0), (3, 8, 4), (2, 5, 5), (1, 90, 70)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
def test_the_complement_is_orthonormal(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    m, k = shape[1:]
    q = torch.linalg.qr(normal(*shape).to(dtype))[0]
    q[0] = torch.eye(m, k).roll(1, 0)
    less = q * torch.linspace(0.95, 1.05, k).to(dtype)  # the complement lacks nothing of what that lacks
    rest = complement_by_reflectors(less)
    assert float((rest.mH @ q).norm()) <= 5 * m * torch.finfo(dtype).eps
    assert float((rest.mH @ rest - torch.eye(m - k, dtype=dtype)).norm()) <= 5 * m * torch.finfo(dtype).eps
    whole = torch.cat([q, complement_by_reflectors(q)], 2)
    assert whole.shape == (shape[0], m, m)
    assert gap(whole.mH @ whole, torch.eye(m, dtype=dtype)) <= 5 * m * torch.finfo(dtype).eps


@pytest.mark.parametrize("transposed", [False, True])
def test_products_with_reflectors(transposed: bool) -> None:
    h, tau = torch.geqrf(normal(2, 150, 130))
    tau[:, 3] = 0.0
    x = normal(2, 150, 4, seed=1)
    for reflectors in (Reflectors.from_householder(h, tau, torch.float64), Reflectors.in_blocks(h, tau)):
        found = reflectors.apply(x, transposed=transposed)
        assert gap(found, torch.ormqr(h, tau, x, transpose=transposed)) <= 150 * 2.0**-52
