"""Eigenvectors by reduction to tridiagonal form, on the emulated engine."""

from __future__ import annotations

import pytest
import torch
from tests.algorithms.test_divide import SPECTRA, engine_for, hermitian

from neula.algorithms.spectra.reduction import reduced_eigenvectors
from neula.certificates.spectra import SpectralBounds, measured
from neula.engines import FP32


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("name", SPECTRA)
def test_all_of_a_batch_have_small_errors(name: str, dtype: torch.dtype) -> None:
    """Also those of clusters, and of diagonal matrices."""
    n = 45
    a = torch.stack([hermitian(name, n, dtype), torch.diag(SPECTRA[name](n).to(dtype))])
    w, v = reduced_eigenvectors(a, engine_for(dtype))
    wide = a.to(torch.promote_types(dtype, torch.float64))
    residual, lost = measured(wide, v, w, v).numbers.amax(1).tolist()
    bounds = SpectralBounds.for_order(FP32, n, symmetric=True)
    assert (w.diff(dim=1) >= 0).all()
    assert residual <= bounds.residual
    assert lost <= bounds.orthogonality
    assert float((w - torch.linalg.eigvalsh(wide)).abs().max()) <= bounds.residual * float(wide.norm())
