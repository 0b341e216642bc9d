"""Errors of QR factorizations by the kernel for the host, compared with the definition in plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from neula.certificates.orthogonality import PROBES, gaussian_probes, margin
from neula.kernels import probe_errors
from neula.kernels.few_vectors import probes_host
from neula.kernels.few_vectors.probes_host import reflected_errors

CPU = torch.device("cpu")


def factors(a: torch.Tensor, wrong: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Q and R with diagonals of either sign, and errors."""
    q, r = torch.linalg.qr(a)
    signs = torch.tensor([(-1.0) ** i for i in range(a.shape[-1])], dtype=a.dtype)
    q, r = q * signs, r * signs[:, None]
    noise = torch.randn(2, *a.shape, dtype=a.dtype, generator=torch.Generator().manual_seed(1))
    return q + wrong * noise[0], r + wrong * noise[1][..., : a.shape[-1], :].triu()


def matrices(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 1), (2, 9, 9), (1, 64, 32), (4, 37, 6), (2, 130, 17)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("wrong", [0.0, 1e-3])
def test_the_same_as_the_definition(shape: tuple[int, int, int], dtype: torch.dtype, wrong: float) -> None:
    a = matrices(*shape, dtype=dtype)
    q, r = factors(a, wrong)
    given, n = (q.clone(), r.clone()), shape[2]
    g = gaussian_probes(n, CPU)
    found = reflected_errors(a, q, r, g.numpy())
    sign = torch.where(given[1].diagonal(dim1=1, dim2=2) < 0, -1.0, 1.0).to(dtype)
    assert torch.equal(q, given[0] * sign[:, None, :])
    assert torch.equal(r.triu(), given[1].triu() * sign[:, :, None])
    norms = torch.linalg.vector_norm(r.double(), dim=1)
    assert np.allclose(found[4:], [norms.amin(1), norms.amax(1)], rtol=1e-14)
    wide = [x.double() for x in (a, q, r)]
    *errors, spectral = probe_errors.reference(*wide, 1 / norms, g, g)
    expected = torch.stack(errors).numpy()
    size = float(g.norm())
    assert np.allclose(found[:3], expected, rtol=1e-12, atol=1e-15 * sum(shape) * size)
    least = 1e-15 * sum(shape) * size
    assert np.allclose(found[3] / margin(n, PROBES), spectral, rtol=1e-12, atol=least)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("by_rows", [False, True])
def test_large_ones_by_parts(
    threads: int, dtype: torch.dtype, by_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows and columns than are held together; R and Q in either order."""
    a = matrices(301, 203, dtype=dtype)
    q, r = factors(a, 1e-3)
    q, r = (x.contiguous() if by_rows else x.T.contiguous().T for x in (q, r))
    given, g = (q.clone(), r.clone()), gaussian_probes(203, CPU)
    monkeypatch.setattr(probes_host, "EACH", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found = reflected_errors(a, q, r, g.numpy())
    sign = torch.where(given[1].diagonal() < 0, -1.0, 1.0).to(dtype)
    assert torch.equal(q, given[0] * sign)
    assert torch.equal(r, given[1] * sign[:, None])
    wide = [x.double()[None] for x in (a, q, r)]
    norms = torch.linalg.vector_norm(wide[2], dim=1)
    *errors, spectral = probe_errors.reference(*wide, 1 / norms, g, g)
    expected = torch.stack(errors).numpy()
    assert found is not None
    assert np.allclose(found[:3], expected, rtol=1e-11)
    assert np.allclose(found[3], margin(203, PROBES) * spectral, rtol=1e-11)
    assert np.allclose(found[4:], [norms.amin(1), norms.amax(1)], rtol=1e-14)


def test_what_is_not_finite_is_seen() -> None:
    a = matrices(3, 9, 4)
    q, r = factors(a)
    q[0, 3, 1], r[1, 0, 2] = torch.nan, torch.inf
    found = reflected_errors(a, q, r, gaussian_probes(4, CPU).numpy())
    assert np.isnan(found[:4, :2]).any(0).all()
    assert np.isfinite(found[:, 2]).all()


def test_zero_has_a_sign() -> None:
    """A diagonal of R is made nonnegative also where it is the negative zero."""
    a = torch.zeros(3, 2, dtype=torch.float64)
    q, r = torch.eye(3, 2, dtype=torch.float64), -torch.zeros(2, 2, dtype=torch.float64)
    reflected_errors(a, q, r, gaussian_probes(2, CPU).numpy())
    assert not torch.signbit(r.diagonal()).any()
