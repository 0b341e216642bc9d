"""Singular triplets of complex matrices, against NumPy in complex128 and against known ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.matrices import complex_array as normal

import neula
from neula.algorithms.spectra.ritz import ritz_triplets
from neula.certificates.low_rank import largest_beyond, upper_bounds
from neula.engines import CpuEngine
from neula.engines.complex import over
from neula.kernels.polar.svd import converged_eigh, converged_svd, svd

UNIT = {"complex64": 2.0**-24, "complex128": 2.0**-53}


def known(m: int, n: int, s: np.ndarray) -> np.ndarray:
    u, v = np.linalg.qr(normal(m, len(s)))[0], np.linalg.qr(normal(n, len(s), seed=1))[0]
    return u * s @ v.conj().T


MATRICES = {
    "decay": normal(60, 30) * 0.8 ** np.arange(30),
    "wide": normal(14, 40),
    "square": normal(9, 9),
    "one": np.array([[3 - 4j]]),
    "column": normal(7, 1),
    "real": normal(20, 10).real + 0j,
    "imaginary": normal(20, 10).real * 1j,
    "deficient": known(30, 20, np.geomspace(1, 0.1, 4)),
    "equal": known(25, 16, np.repeat([4.0, 1.0], 8)),
    "zero": np.zeros((8, 5), complex),
    "small": normal(20, 12) * 1e-30,
    "large": normal(20, 12) * 1e30,
    "batch": normal(2, 3, 12, 7),
    "large enough for products": known(400, 160, 0.95 ** np.arange(160)),
}

WAYS = {
    "all": {},
    "rank": {"rank": True},
    "tolerance": {"tol": 1e-2},
    "part": {"rank": True, "accuracy": 1e-2},
    "fp16": {"rank": True, "accuracy": "fp16"},
    "iteration": {"rank": True, "algorithm": "iteration"},
    "gram": {"rank": True, "algorithm": "gram-svd"},
    "qr": {"algorithm": "qr-svd"},
}


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("engine", "dtype"), [("cpu", "complex128"), ("emulated", "complex64")])
@pytest.mark.filterwarnings("ignore::neula.AccuracyWarning")
def test_triplets(name, way, dtype, engine):
    a = MATRICES[name].astype(dtype)
    k = min(a.shape[-2:])
    options = {**WAYS[way]} | ({"rank": -(-k // 6)} if "rank" in WAYS[way] else {})
    found = neula.svd_lowrank(a, engine=engine, **options)
    assert (found.U.dtype, found.s.dtype, found.Vh.dtype) == (dtype, np.finfo(dtype).dtype, dtype)
    wide = a.astype(complex)
    s = np.linalg.svd(wide, compute_uv=False)[..., : found.s.shape[-1]]
    top = s.max(initial=0.0) or 1.0
    noise = 100 * k * 2.0**-53 * top  # of NumPy
    assert found.converged or way in ("iteration", "gram") or name == "zero"
    u, vh = found.U.astype(complex), found.Vh.astype(complex)
    if found.converged:
        assert (np.abs(found.s - s) <= found.errors + UNIT[dtype] * found.s + noise).all()
        part = options.get("accuracy")
        off = 1e-2 if part == 1e-2 else 2.0**-8 if part == "fp16" else 300 * k * UNIT[dtype]
        scaled = (wide / top) @ vh.conj().swapaxes(-1, -2) - u * (found.s / top)[..., None, :]
        assert np.linalg.norm(scaled) <= off * np.sqrt(k) * max(1, np.linalg.norm(wide / top))
        one = np.eye(found.s.shape[-1])
        assert np.abs(u.conj().swapaxes(-1, -2) @ u - one).max(initial=0.0) <= 2 * off + 1e-5
    if options.get("tol") is not None and top != 1.0:
        rest = np.linalg.norm(wide / top - u * (found.s / top)[..., None, :] @ vh)
        assert rest <= 1.01e-2 * np.linalg.norm(wide / top)


def test_views_empty_and_bad_input():
    a = torch.from_numpy(MATRICES["decay"])
    expected = neula.svd_lowrank(a, 3).s
    for view in (a.mH, a.conj(), a.mT.contiguous().mT, a.mH.contiguous().mH):
        torch.testing.assert_close(neula.svd_lowrank(view, 3).s, expected)
    for shape in ((0, 3), (3, 0), (0, 2, 2)):
        found = neula.svd_lowrank(torch.empty(shape, dtype=torch.complex64))
        assert (found.U.dtype, found.s.dtype) == (torch.complex64, torch.float32)
    bad = a.clone()
    bad[3, 2] = complex(0, torch.inf)
    with pytest.raises(ValueError, match=r"A\[3, 2\].*must be finite"):
        neula.svd_lowrank(bad, 3)


class Blocks:
    """A source of blocks of rows."""

    def __init__(self, a: np.ndarray) -> None:
        self.a, self.shape, self.dtype = a, a.shape, a.dtype

    def blocks(self) -> Iterator[np.ndarray]:
        return (self.a[i : i + 40] for i in range(0, len(self.a), 40))


@pytest.mark.parametrize("accuracy", [None, "fp32"])
@pytest.mark.parametrize("size", [1.0, 1e200])
def test_streams(accuracy, size):
    a = known(90, 12, np.geomspace(1, 1e-3, 12)) * size
    found = neula.svd_lowrank(Blocks(a), tol=1e-2, accuracy=accuracy)
    assert (found.converged, found.passes, found.s.dtype) == (True, 3, np.float64)
    s = size * np.geomspace(1, 1e-3, 12)[: len(found.s)]
    assert (np.abs(found.s - s) <= found.errors + 1e-14 * size).all()
    rest = np.linalg.norm((a - found.U * found.s @ found.Vh) / size)
    assert rest <= 1.01e-2 * np.linalg.norm(a / size)
    single = neula.svd_lowrank(Blocks(known(90, 12, np.geomspace(1, 0.1, 12)).astype(np.complex64)), 3)
    assert (single.converged, single.U.dtype, single.s.dtype) == (True, np.complex64, np.float32)


@pytest.mark.parametrize("missed", [0, 2])
def test_a_missed_triplet_shows(missed):
    """Bounds on all singular values hold, and are large where a vector is left out; also those of a subspace
    that is not invariant.
    """
    s = np.array([5.0, 4.0, 3.0, 0.2, 0.1, 0.05])
    a = torch.from_numpy(known(30, 18, s))
    u, _, vh = torch.linalg.svd(a, full_matrices=False)
    kept = [i for i in range(4) if i != missed]
    engine = over(CpuEngine("cpu", "fp64"), a.dtype)
    beyond = largest_beyond(a, u[:, kept], vh[kept].mH, 0.2, 0.3, engine).bound
    assert s[missed] <= beyond
    assert (upper_bounds(s[kept], np.zeros((3, 3), complex), 2, beyond, 1e-3) >= s[:2]).all()
    assert 0.1 * (1 - 1e-12) <= largest_beyond(a, u[:, :4], vh[:4].mH, 0.1, 0.12, engine).bound <= 0.12
    found = ritz_triplets(a, vh.mH[:, :5] + 0.1 * torch.from_numpy(normal(18, 5)), engine)
    beyond = largest_beyond(a, found.u, found.v, float(found.s[-1]), 2.0, engine).bound
    assert (upper_bounds(found.s.numpy(), found.rest.numpy(), 2, beyond, 0.5) >= s[:2] * (1 - 1e-12)).all()
    assert (found.s.numpy()[:2] <= s[:2] * (1 + 1e-12)).all()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_where_the_library_does_not_converge(dtype, monkeypatch):
    a = torch.from_numpy(normal(2, 6, 4)).to(dtype)
    u, s, vh = svd(a.mT.contiguous())
    torch.testing.assert_close((u * s.unsqueeze(-2)) @ vh, a.mT)
    h = a.mH @ a

    def fails(*_, **__):
        raise torch.linalg.LinAlgError

    monkeypatch.setattr(torch.linalg, "svd", fails)
    monkeypatch.setattr(torch.linalg, "eigh", fails)
    u, s, vh = converged_svd(a)
    assert s.dtype == dtype.to_real()
    torch.testing.assert_close((u * s.unsqueeze(-2)) @ vh, a)
    values, vectors = converged_eigh(h)
    assert values.dtype == dtype.to_real()
    torch.testing.assert_close((vectors * values.unsqueeze(-2)) @ vectors.mH, h)
