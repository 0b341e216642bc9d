"""Batched Gram-Schmidt against the definition of a QR, matrix by matrix."""

from __future__ import annotations

import math

import pytest
import torch
from qr_measures import batch_errors, check_triangular
from tests import matrices
from tests.devices import DEVICE

from neula.algorithms.orthogonal.batched_qr import batched_qr, batched_reorthogonalize
from neula.certificates.qr import certificates_of, qr_certificate, qr_measures
from neula.engines import FP32, FP64
from neula.io.matrices import random_matrix

DTYPES = [torch.float32, torch.float64]

# n = 1, square, odd sizes, one tile and trees of one, two and three levels, even and uneven tiles.
SHAPES = [(1, 1), (5, 1), (40, 33), (97, 97), (333, 31), (640, 70)]


def normal(batch: int, m: int, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return matrices.normal(batch, m, n, dtype=dtype).to(DEVICE)


LARGE = [(1024, 32), (1500, 100), (4096, 128), (300, 300)]


@pytest.mark.parametrize(
    ("m", "n", "tile_rows"),
    [
        *((m, n, rows) for m, n in SHAPES for rows in (None, 64)),
        *(pytest.param(m, n, None, marks=pytest.mark.gpu) for m, n in LARGE),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_shape(m: int, n: int, dtype: torch.dtype, tile_rows: int | None) -> None:
    """Residual ``4 n u`` a pass (each projection adds a few roundings of the column). Orthogonality with one
    pass ``4 (n + sqrt(m)) u cond`` (Björck 1967), with two that of a matrix of condition 1 and norm
    ``sqrt(n)``.
    """
    a = normal(3, m, n, dtype)
    before = a.clone()
    u = torch.finfo(dtype).eps / 2
    cond = torch.linalg.cond(a.double())
    for passes, growth in ((1, cond), (2, torch.ones_like(cond))):
        q, r = batched_qr(a, passes=passes, tile_rows=tile_rows)
        assert (q.shape, r.shape, q.dtype, r.dtype) == ((3, m, n), (3, n, n), dtype, dtype)
        check_triangular(r)
        residual, orthogonality = batch_errors(a, q, r)
        assert (residual <= passes * 4 * n * u).all()
        assert (orthogonality <= 4 * (n + math.sqrt(m)) * math.sqrt(n) * u * growth).all()
    assert torch.equal(a, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reorthogonalization_at_any_rank(dtype: torch.dtype) -> None:
    """Twice is enough at full rank, three passes without; columns that vanished leave zeros in R."""
    conditions = (1e2, 1e6, 1e9, 1e12)
    a = torch.stack([random_matrix("geometric", 90, 40, cond=c, seed=3) for c in conditions])
    a = torch.cat([a, torch.zeros(2, 90, 40, dtype=a.dtype)]).to(DEVICE, dtype)
    a[4] = a[0]
    a[4, :, [5, 33]] = 0
    a[4, :, 9] = a[4, :, 2]
    q, r = batched_qr(a)
    for _ in range(2):
        q, r = batched_reorthogonalize(q, r)
    check_triangular(r)
    u = torch.finfo(dtype).eps / 2
    residual, orthogonality = batch_errors(a, q, r)
    assert (residual <= 3 * 4 * 40 * u).all()
    assert (orthogonality <= 4 * (40 + math.sqrt(90)) * math.sqrt(40) * u).all()
    assert not r[4][:, [5, 33]].any()
    assert not r[5].any()


def test_tiles_that_do_not_shrink() -> None:
    with pytest.raises(ValueError, match="tile_rows >= 64"):
        batched_qr(normal(1, 10, 3), tile_rows=63)


# ---------------------------------------------------------------- certificates


@pytest.mark.parametrize(("m", "n"), [(50, 20), (20, 50), (300, 70), (1, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_certificates_are_those_of_single_matrices(m: int, n: int, dtype: torch.dtype) -> None:
    """Up to the ``4 u`` of sums in float32 (see ``probes``), where the kernel measures."""
    a = normal(3, m, n, dtype)
    q, r = torch.linalg.qr(a)
    q[1] *= 1.001
    r[2] *= 1.001
    scales = torch.rand(3, n, device=DEVICE) + 0.5
    target = FP32 if dtype == torch.float32 else FP64
    measures = qr_measures(a, q, r, scales)
    together = certificates_of(measures.numpy(), measures.dtype, a.shape[1:], target)
    assert len(together) == 3
    for i, one in enumerate(together):
        alone = qr_certificate(a[i], q[i], r[i], scales[i], target)
        for name in ("residual_bound", "orthogonality_bound", "accepted"):
            assert getattr(one, name) == getattr(alone, name)
        for name in ("residual", "orthogonality"):
            assert abs(getattr(one, name) - getattr(alone, name)) <= 4 * target.u
    assert together.accepted.tolist() == [True, False, False]
    assert together[-1] == together[2]
    assert together[:2] == (together[0], together[1])
    assert repr(together) == "<3 certificates, 1 accepted>"
