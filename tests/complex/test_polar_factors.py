"""Polar factors of complex matrices, against the real embedding ``[[Re, -Im], [Im, Re]]`` in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.matrices import complex_array as normal

import neula
from neula.certificates.polar import PolarBounds, PolarNumbers, polar_measures
from neula.engines import FP32, EmulatedEngine
from neula.engines.complex import over

UNIT = {"complex64": 2.0**-24, "complex128": 2.0**-53}


def graded(m: int, n: int, smallest: float) -> np.ndarray:
    k = min(m, n)
    u, v = np.linalg.qr(normal(m, k))[0], np.linalg.qr(normal(n, k, seed=1))[0]
    return u * np.geomspace(1, smallest, k) @ v.conj().T


def factors(a: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """U and H by the real embedding, and the condition number; A in range."""
    (m, n), a = a.shape, a.astype(np.complex128)
    w, s, vh = np.linalg.svd(np.block([[a.real, -a.imag], [a.imag, a.real]]), full_matrices=False)
    u, h = w @ vh, vh.T * s @ vh
    return u[:m, :n] + 1j * u[m:, :n], h[:n, :n] + 1j * h[n:, :n], s[0] / s[-1]


CASES = {
    "square": normal(6, 6),
    "tall": normal(23, 7),
    "wide": normal(5, 16),
    "one": np.array([[3 - 4j]]),
    "column": normal(9, 1),
    "row": normal(1, 9),
    "real": normal(6, 4).real + 0j,
    "imaginary": normal(6, 4).real * 1j,
    "Hermitian": normal(6, 6) + normal(6, 6).conj().T,
    "unitary": np.linalg.qr(normal(8, 8))[0],
    "graded": graded(20, 11, 1e-2),
    "tiny imaginary parts": normal(9, 4).real + 1e-7j * normal(9, 4, seed=1).real,
    "small": normal(7, 4) * 1e-25,
    "large": normal(7, 4) * 1e25,
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("engine", ["cpu", "emulated"])
@pytest.mark.parametrize("accuracy", [None, "bf16", "fp16", "fp32"])
def test_factors(name, dtype, engine, accuracy):
    a, by_rows = CASES[name].astype(dtype), name == "row"
    size = np.abs(a.astype(np.complex128)).max()
    wanted, h, condition = factors((a / size).conj().T if by_rows else a / size)
    found = neula.polar(a, side="left" if by_rows else "right", engine=engine, accuracy=accuracy)
    assert (found.converged, found.rank, found.U.dtype, found.H.dtype) == (True, min(a.shape), dtype, dtype)
    room = 200 * max(a.shape) * UNIT[dtype]
    assert np.array_equal(found.H, found.H.conj().T)
    if accuracy is None:
        assert np.abs(found.U - (wanted.conj().T if by_rows else wanted)).max() <= room * condition
        assert np.abs(found.H / size - h).max() <= room
        assert np.linalg.eigvalsh(found.H / size).min() >= -room
    off = {"bf16": 2.0**-7, "fp16": 2.0**-9}.get(accuracy, 1e-5)
    s = np.linalg.svd(found.U.astype(np.complex128), compute_uv=False)
    assert np.abs(s - 1).max() <= 2 * off
    product = h @ found.U if by_rows else found.U @ h
    assert np.linalg.norm(a / size - product) <= 16 * off * np.linalg.norm(a / size)


@pytest.mark.parametrize("engine", ["cpu", "emulated"])
@pytest.mark.parametrize("dtype", UNIT)
def test_rank_deficient_matrices(engine, dtype):
    a = (normal(9, 3) @ normal(3, 6, seed=1)).astype(dtype)
    found = neula.polar(a, rcond=1e-5, engine=engine, side="right")
    assert (found.converged, found.rank) == (True, 3)
    s = np.linalg.svd(found.U.astype(np.complex128), compute_uv=False)
    assert np.abs(s - np.array([1, 1, 1, 0, 0, 0])).max() <= 200 * UNIT[dtype]
    assert np.abs(found.U @ found.H - a).max() <= 1e3 * UNIT[dtype] * np.abs(a).max()
    whole = neula.polar(a, rcond=1e-5, completion=True, engine=engine)
    s = np.linalg.svd(whole.U.astype(np.complex128), compute_uv=False)
    assert whole.converged
    assert np.abs(s - 1).max() <= 200 * UNIT[dtype]
    nothing = neula.polar(np.zeros((4, 3), dtype), engine=engine)
    assert (nothing.converged, nothing.rank) == (True, 0)
    a[:, 2] = 0
    assert neula.polar(a, engine=engine, rcond=1e-5).rank == 3


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("scale", [1.0, "subnormal"])
@pytest.mark.parametrize("n", [8, 12, 20, 30])
def test_small_integers_of_rank_one(n, scale, dtype):
    """Reflections of what is left come down to subnormal numbers, of which MKL's in complex64 are NaN."""
    rng = np.random.default_rng(n)
    left, right = rng.integers(1, 4, n + 3), rng.choice([-3, -2, -1, 1, 2, 3], n)
    unit = np.finfo(dtype).smallest_subnormal.item() if scale == "subnormal" else scale
    a = (np.outer(left, right) * unit * (1 + 1j)).astype(dtype)
    found = neula.polar(a, rcond=1e-3)
    u = np.outer(left, right) / (np.linalg.norm(left) * np.linalg.norm(right)) * (1 + 1j) / 2**0.5
    assert (found.converged, found.rank) == (True, 1)
    assert np.abs(found.U - u).max() <= 200 * UNIT[dtype]


@pytest.mark.parametrize("engine", ["cpu", "emulated"])
def test_batches_views_and_nan(engine):
    a = torch.from_numpy(normal(2, 3, 7, 4))
    whole = neula.polar(a, side="right", engine=engine)
    for view in (a.mH.contiguous().mH, a.conj().clone().conj(), a.mT.contiguous().mT):
        again = neula.polar(view, side="right", engine=engine)
        torch.testing.assert_close(again.U, whole.U, rtol=0, atol=1e-13)
    bad = a.clone()
    bad[1, 2, 3, 0] = complex(0, torch.nan)
    with pytest.warns(neula.AccuracyWarning):
        found = neula.polar(bad, engine=engine)
    assert found.accepted.tolist() == [[True] * 3, [True, True, False]]
    assert bool(found.U[1, 2].isnan().all())
    torch.testing.assert_close(found.U[0], whole.U[0], rtol=0, atol=1e-13)
    with pytest.raises(ValueError, match="must be finite"):
        neula.polar(bad[1, 2], engine=engine)
    for shape in ((0, 3), (3, 0), (0, 2, 2)):
        nothing = neula.polar(torch.empty(shape, dtype=torch.complex64), engine=engine)
        assert nothing.U.dtype == torch.complex64


def measured(a: torch.Tensor, u: torch.Tensor) -> bool:
    engine = over(EmulatedEngine(format="fp32"), a.dtype)
    wide, factor = (engine.parts(x[None]) for x in (a, u))
    numbers = PolarNumbers(*polar_measures(wide, factor, engine, exactly=True, within=False).numpy())
    return bool(numbers.accepted_by(PolarBounds.for_shape(FP32, *a.shape)).all())


@pytest.mark.parametrize("order", [12, 90])
def test_certificate_rejects_wrong_phases(order):
    """In one direction of many: a phase, a sign, a conjugate, and a factor of another matrix."""
    a = torch.from_numpy(normal(order, order + 3).astype(np.complex64))
    w, _, vh = torch.linalg.svd(a, full_matrices=False)
    assert measured(a, w @ vh)
    for phase in (-1.0, 1j, torch.polar(torch.tensor(1.0), torch.tensor(0.1))):
        turned = w.clone()
        turned[:, 0] *= phase
        assert not measured(a, turned @ vh)
    assert not measured(a, (w @ vh).conj())
    assert not measured(a, (w @ vh) * 1j)
    assert not measured(a, torch.linalg.qr(a.mH).Q.mH)
