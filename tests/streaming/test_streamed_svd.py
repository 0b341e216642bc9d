"""Low-rank approximation of matrices that are read in blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import neula
from neula.engines import CpuEngine
from neula.io.sources import row_blocks

U = 2.0**-53

SPECTRA = {
    "geometric": lambda k: np.geomspace(1, 1e-12, k),
    "gap": lambda k: np.r_[np.ones(5), np.full(k - 5, 1e-3)],
    "low rank": lambda k: np.r_[np.linspace(1, 0.1, 8), np.zeros(k - 8)],
}

CALLS: list[tuple[dict[str, Any], float]] = [
    ({"rank": 3}, U),
    ({"rank": 20}, U),
    ({"tol": 1e-2}, U),
    ({"rank": 10, "accuracy": "fp32"}, 2.0**-24),
    ({"rank": 5, "accuracy": 1e-3}, 1e-3),
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuEngine, "tuning", replace(CpuEngine("cpu").tuning, streamed_bytes=1 << 12))


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", [(400, 30), (60, 90)])
@pytest.mark.parametrize(("asked", "u"), CALLS)
def test_triplets(
    rng: np.random.Generator, spectrum: str, shape: tuple[int, int], asked: dict[str, Any], u: float
) -> None:
    m, n = shape
    k = min(shape)
    left, right = (np.linalg.qr(rng.standard_normal((size, k)))[0] for size in shape)
    a = left * SPECTRA[spectrum](k) @ right.T
    result = neula.svd_lowrank(row_blocks(a), **asked)
    assert result.converged
    assert result.passes == 3
    exact, norm, rank = np.linalg.svd(a, compute_uv=False), np.linalg.norm(a), len(result.s)
    assert result.U.shape == (m, rank)
    assert result.Vh.shape == (rank, n)
    # LAPACK's errors are a modest multiple of u ||A||, too.
    assert (np.abs(result.s - exact[:rank]) <= result.errors + 30 * U).all()
    assert (result.errors <= 50 * n**0.5 * max(u, U) * norm).all()
    assert np.linalg.norm(a.T @ result.U - result.Vh.T * result.s) <= 50 * rank * u * norm
    assert np.linalg.norm(result.U.T @ result.U - np.eye(rank)) <= 50 * n * U
    rest = np.linalg.norm(exact[rank:]) / norm
    assert abs(result.relative_error - rest) <= 1e-6 * rest + (50 * U if u == U else 1e-7)
    if "tol" in asked:
        assert rest <= asked["tol"] < np.linalg.norm(exact[rank - 1 :]) / norm


@pytest.mark.parametrize("scale", [2.0**900, 2.0**-900, 0.0])
def test_scales(rng: np.random.Generator, scale: float) -> None:
    a = rng.standard_normal((200, 6))
    result = neula.svd_lowrank(row_blocks(scale * a), rank=2)
    assert result.converged
    assert (np.abs(result.s - scale * np.linalg.svd(a, compute_uv=False)[:2]) <= 1e-13 * scale * 20).all()


def test_an_r_that_is_wrong_is_noticed(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    from neula.algorithms.krylov.streamed_lstsq import HouseholderSums

    parts = HouseholderSums.parts

    def wrong(sums: HouseholderSums) -> Any:
        r, *rest = parts(sums)
        r[3, 4] += 1e-7
        return r, *rest

    monkeypatch.setattr(HouseholderSums, "parts", wrong)
    with pytest.warns(neula.AccuracyWarning):
        assert not neula.svd_lowrank(row_blocks(rng.standard_normal((200, 6))), rank=2).converged


def test_bad_input(rng: np.random.Generator) -> None:
    a = rng.standard_normal((200, 6))
    a[150, 2] = np.inf
    with pytest.raises(ValueError, match=r"A\[150, 2\] is inf: A must be finite"):
        neula.svd_lowrank(row_blocks(a), rank=2)
    for asked, message in (
        ({"rank": 7}, "rank must be a whole number from 1 to"),
        ({"rank": 2, "algorithm": "iteration"}, "needs A in memory"),
        ({"rank": 2, "tol": 0.1}, "give rank or tol, not both"),
    ):
        with pytest.raises(ValueError, match=message):
            neula.svd_lowrank(row_blocks(a), **asked)
    with pytest.raises(ValueError, match="A must be one matrix"):
        neula.svd_lowrank(row_blocks(a[:, 0]), rank=1)
