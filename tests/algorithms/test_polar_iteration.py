"""Polynomials for the polar decomposition, the iteration with them, and its certificate."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from neula.algorithms.polar.iteration import norm_bound, polar_factor
from neula.algorithms.polar.polynomials import FLOOR, composition
from neula.certificates.polar import PolarBounds, PolarNumbers, lanczos, polar_measures
from neula.engines import BF16, FP32, FP64, UNITS, EmulatedEngine

DOUBLE = EmulatedEngine("cpu", "fp64")


@pytest.mark.parametrize("smallest", [0.9, 0.1, 1e-3, 7e-4, 3e-8, 1e-16])
@pytest.mark.parametrize(("error", "margin"), [(5.5e-3, 2.0**-6), (2.0**-24, 2.0**-9), (2.0**-53, 2.0**-9)])
def test_composition(smallest: float, error: float, margin: float) -> None:
    """Steps that bring an interval near 1 keep large numbers large on the way, and below 1 by the margin."""
    x = np.concatenate([np.geomspace(smallest, 1, 20_000), np.linspace(smallest, 1, 20_000)])
    steps = composition(smallest, error, margin)
    for step in steps:
        before, x = x, step(x)
        near = abs(x - 1).max() <= 0.06  # the last ones close in from both sides
        assert x.max() <= 1 - margin + 1e-12 or near
        assert (x >= (FLOOR - margin) * before).all()
    assert abs(x - 1).max() <= error + 4 * 2.0**-53


def test_five_polynomials_for_optimizers() -> None:
    """Their products cost less than those of five Newton-Schulz steps: 11.5 and 15 of order n."""
    assert [p.degree for p in composition(7e-4, 5.5e-3, 2.0**-6)] == [9, 9, 9, 5, 5]


@pytest.mark.parametrize("k", [1, 7, 100])
@pytest.mark.parametrize("spectrum", ["flat", "falling", "dominant", "zero"])
def test_norm_bound(k: int, spectrum: str) -> None:
    values = {
        "flat": torch.ones(k),
        "falling": torch.logspace(0, -8, k),
        "dominant": torch.cat([torch.ones(1), torch.full((k - 1,), 1e-6)]),
        "zero": torch.zeros(k),
    }[spectrum].double()
    q = torch.linalg.qr(torch.randn(5, k, k, generator=torch.Generator().manual_seed(k)).double())[0]
    for size in (1.0, 1e3):
        found = norm_bound(((q * values * size) @ q.mT)[None], DOUBLE)
        assert (found >= 0.999 * size * values.max()).all()
        assert (found <= (4 * k) ** (1 / 12) * 1.1 * size * values.max()).all()


def measured(w: torch.Tensor, x: torch.Tensor, **asked: bool) -> PolarNumbers:
    """Of one matrix and its factor, in double precision."""
    found = polar_measures(w[None, None], x[None, None], DOUBLE, exactly=True, **{"within": False, **asked})
    return PolarNumbers(*found.numpy())


@pytest.mark.parametrize("kind", ["bad value", "larger value", "sign", "another", "good"])
@pytest.mark.parametrize("target", [BF16, FP32, FP64])
def test_one_bad_singular_value_is_seen(kind: str, target: object) -> None:
    """In a matrix whose Frobenius norm would not show it: of 300, one is wrong."""
    assert target in (BF16, FP32, FP64)
    k, generator = 300, torch.Generator().manual_seed(3)
    u, v = (torch.linalg.qr(torch.randn(n, k, generator=generator).double())[0] for n in (k, 320))
    values = torch.linspace(1, 0.5, k).double()
    gains, left = torch.ones(k).double(), u.clone()
    place = 0 if kind == "sign" else 150
    gains[place] = {"bad value": 0.97, "larger value": 1.03, "sign": -1.0}.get(kind, 1.0)
    if kind == "another":
        left[:, 10:20] = left[:, 10:20].flip(1)
    w, x = (u * values) @ v.T, (left * gains) @ v.T
    found = measured(w, x, weighted=target is BF16)
    bounds = PolarBounds.for_shape(target, k, 320)  # type: ignore[arg-type]
    orthonormal = found.orthogonality[0] <= bounds.orthogonality
    near = found.residual[0] <= bounds.residual
    assert orthonormal == (kind not in ("bad value", "larger value"))
    assert found.positive[0] == (kind not in ("sign", "another"))
    # One of 300 that is off by 0.03, or vectors of nearly equal singular values: no matter at that accuracy.
    assert near == (target is BF16 or kind in ("good", "sign"))


def test_small_singular_values_do_not_count_for_optimizers() -> None:
    k = 60
    q = torch.linalg.qr(torch.randn(2, k, k, generator=torch.Generator().manual_seed(1)).double())[0]
    values, gains = torch.ones(k).double(), torch.ones(k).double()
    values[30:], gains[30:] = 1e-4, torch.linspace(0, 1, 30).double()
    w, x = (q[0] * values) @ q[1].T, (q[0] * gains) @ q[1].T

    assert measured(w, x, weighted=True).orthogonality[0] <= 2.0**-7
    assert measured(w, x, weighted=False).orthogonality[0] >= 0.9


def test_partial_isometries() -> None:
    k = 50
    q = torch.linalg.qr(torch.randn(2, k, k, generator=torch.Generator().manual_seed(2)).double())[0]
    for worst in (1.0, 0.5, 1e-3):
        gains = torch.cat([torch.ones(20), torch.full((1,), worst), torch.zeros(29)]).double()
        x = (q[0] * gains) @ q[1].T
        found = measured(x, x, within=True).orthogonality[0]
        assert found == pytest.approx(worst * (1 - worst**2) / 2, rel=1e-2, abs=1e-14)


def test_lanczos_of_small_matrices_ends() -> None:
    a = torch.diag(torch.tensor([2.0, 2.0, -1.0])).double()[None]
    (diagonal, beside), basis = lanczos(lambda v: a @ v, torch.ones(1, 3, 1).double(), 3)
    assert torch.allclose(basis[0].T @ basis[0], torch.diag(torch.tensor([1.0, 1.0, 0.0])).double())
    assert beside[0, 1] == 0
    assert float(diagonal[0, 2]) == 0


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("shape", [(64, 64), (40, 100)])
def test_truncated_sums_do_no_harm(unit: str, shape: tuple[int, int]) -> None:
    """As tensor cores sum: the first link still has the accuracy of bf16."""
    engine = EmulatedEngine("cpu", "fp16", unit)
    a = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)) / 16
    x, size = polar_factor(engine.parts(a), composition(1e-2, 5.5e-3, 2.0**-6), engine)
    values = torch.linalg.svdvals(a)
    assert (size >= values[:, 0]).all()
    found = torch.linalg.svdvals(engine.joined(x).double())
    counts = values >= 1e-2 * size[:, None]
    assert float((found - 1).abs()[counts].max()) <= 2.0**-7
