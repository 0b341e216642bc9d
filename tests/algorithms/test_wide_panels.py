"""Cholesky QR of wide panels, whose Gram matrix is factorized in blocks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from neula.algorithms.orthogonal.cholesky_qr import LOST, cholesky_inverse_in_blocks
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.engines import EmulatedEngine
from neula.engines.shipped import EMULATED
from neula.engines.tuning import Recursion
from neula.io.matrices import random_matrix

U = 2.0**-24


@pytest.mark.parametrize(("n", "width"), [(1, 128), (128, 128), (129, 128), (300, 128), (97, 32), (64, 1)])
@pytest.mark.parametrize("cond", [10.0, 1e3])
def test_factor_and_inverse(n: int, width: int, cond: float) -> None:
    a = random_matrix("geometric", 3 * n + 5, n, cond=cond, seed=n)
    gram = (a.mT @ a).float().triu()
    before = gram.clone()
    r, inverse, norms = cholesky_inverse_in_blocks(gram, width)
    assert torch.equal(gram, before)
    assert torch.equal(r, r.triu())
    assert torch.equal(inverse, inverse.triu())
    assert (r.diagonal() > 0).all()
    whole, r, inverse = (gram + gram.triu(1).mT).double(), r.double(), inverse.double()
    size = norms.double()[:, None] * norms.double()
    # Higham 2002, theorem 10.3, and section 14.2: a product with the inverse of a block in place of
    # substitution adds the condition number of that block, and inverses of blocks are products of such.
    blockwise = 1.0 if width == 1 else cond
    assert ((r.mT @ r - whole).abs() <= (n + 4) * blockwise * U * size).all()
    unity = torch.eye(n, dtype=torch.float64)
    assert ((r @ inverse - unity).abs() <= (n + 4) * blockwise * U * (r.abs() @ inverse.abs())).all()


@pytest.mark.parametrize("value", [math.nan, 0.0])
@pytest.mark.parametrize("column", [0, 31, 32, 70])
def test_nan_and_zero_columns_show(value: float, column: int) -> None:
    a = random_matrix("normal", 200, 71, seed=1).float()
    a[:, column] = value
    factors = cholesky_inverse_in_blocks(a.mT @ a, 32)
    assert not bool(factors.r.isfinite().all() & (factors.r.diagonal() > 0).all())


def test_dependent_columns() -> None:
    """Whatever a lost pivot becomes, the factor is that of a matrix that differs by what it may owe to it."""
    a = random_matrix("normal", 300, 64, seed=4)
    a[:, 40], a[:, 50:] = a[:, 3], a[:, 4:18]
    gram = (a.mT @ a).float()
    r, _, norms = cholesky_inverse_in_blocks(gram, 1)
    size = norms.double()[:, None] * norms.double()
    assert r.isfinite().all()
    assert ((r.double().mT @ r.double() - gram.double()).abs() <= (2 * LOST + 64 * U) * size).all()


class Wide(EmulatedEngine):
    """Factorizes wide panels."""

    tuning = replace(EMULATED, single=Recursion("cholesky32", 200))


@pytest.mark.parametrize(("m", "n"), [(1000, 200), (1000, 350), (700, 129), (430, 400), (200, 200)])
@pytest.mark.parametrize("format", ["fp16", "fp32"])
def test_factors(m: int, n: int, format: str) -> None:
    """Well-conditioned matrices; also where columns to come have hardly more rows, which takes two passes."""
    engine = Wide("cpu", format)
    a = random_matrix("geometric", m, n, cond=4.0, seed=2, dtype=torch.float32)
    q, r = rgsqrf(a, engine)
    u, norm = engine.format.u, torch.linalg.matrix_norm
    assert torch.equal(r, r.triu())
    # Three roundings a level of the recursion; orthogonality as the condition number has it.
    levels = 2 + math.ceil(math.log2(max(2, n / 200)))
    assert norm(q.double() @ r.double() - a.double()) <= 3 * levels * u * norm(a.double())
    loss = norm(q.double().mT @ q.double() - torch.eye(n, dtype=torch.float64))
    assert loss <= 6 * levels * 4.0**2 * u * n**0.5
