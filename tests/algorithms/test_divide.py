"""Spectral divide and conquer: eigenvectors by products on the emulated engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.matrices import normal

import neula
from neula.algorithms.spectra.divide import all_signs, corrected, divide, first_signs
from neula.certificates.spectra import measured
from neula.engines import EmulatedEngine, Engine
from neula.engines.complex import over

LEAF = 8

SPECTRA: dict[str, Callable[[int], torch.Tensor]] = {
    "even": lambda n: torch.linspace(-1, 1, n),
    "graded": lambda n: torch.logspace(0, -5, n),
    "two clusters": lambda n: torch.cat([torch.ones(n // 2), 1e-6 * torch.arange(n - n // 2)]),
    "three values": lambda n: torch.arange(n) % 3 - 1.0,
    "one value": torch.ones,
    "rank one": lambda n: torch.cat([torch.ones(1), torch.zeros(n - 1)]),
    "zero": torch.zeros,
    "far from zero": lambda n: torch.cat([torch.ones(n // 2), torch.full((n - n // 2,), 1.004)]),
    "near one": lambda n: 1 + 1e-3 * torch.linspace(-1, 1, n),
    "few large": lambda n: torch.cat([torch.tensor([1.0, 3e-3, 1e-4]), 1e-5 * torch.linspace(0.5, 1, n - 3)]),
    "one negative": lambda n: torch.cat([-torch.ones(1), torch.linspace(1, 2, n - 1)]),
}


def hermitian(name: str, n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """With a spectrum, and random eigenvectors."""
    x = normal(n, n, seed=seed).to(dtype)
    if dtype.is_complex:
        x = x + 1j * normal(n, n, seed=seed + 1).to(dtype)
    q = torch.linalg.qr(x)[0]
    a = (q * SPECTRA[name](n).to(dtype)) @ q.mH
    return (a + a.mH) / 2


def engine_for(dtype: torch.dtype) -> Engine:
    """The emulated engine in single precision."""
    return over(EmulatedEngine("cpu", "fp32"), dtype)


def orthonormal(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.qr(x)[0]


def errors(a: torch.Tensor, v: torch.Tensor) -> tuple[float, float]:
    """Relative residual and loss of orthogonality, in double precision, rounding errors included."""
    wide = a.to(torch.promote_types(a.dtype, torch.float64))
    vectors = v.to(wide.dtype)
    w = torch.linalg.vecdot(vectors, wide @ vectors, dim=1).real
    w, order = w.sort(1)
    found = measured(wide, vectors := vectors.gather(2, order[:, None].expand_as(vectors)), w, vectors)
    residual, lost = found.numbers.amax(1).tolist()
    return residual, lost


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("name", SPECTRA)
def test_eigenvectors_of_a_batch_with_every_other_spectrum(name: str, dtype: torch.dtype) -> None:
    """Matrices that split at different places stay together; two corrections make up for single precision."""
    n, u = 36, 2.0**-24
    a = torch.stack([hermitian(each, n, dtype, seed) for seed, each in enumerate((name, "even", name))])
    engine = engine_for(dtype)
    v = divide(a, orthonormal, LEAF, engine, engine.using("fp16"))
    for _ in range(2):
        _, v = corrected(a, v, LEAF, engine)
    residual, lost = errors(a, v)
    assert residual <= 30 * n**0.5 * u
    assert lost <= 30 * n * u


def test_a_failed_basis_stays_in_its_matrix() -> None:
    """The QR of one matrix of a batch breaks down: the other one is decomposed, and nothing is raised."""
    n, u = 20, 2.0**-24
    a = torch.stack([hermitian("even", n, torch.float32, seed) for seed in range(2)])
    engine = engine_for(torch.float32)

    def failing(x: torch.Tensor) -> torch.Tensor:
        q = orthonormal(x)
        q[0] = torch.nan
        return q

    v = divide(a, failing, LEAF, engine, engine.using("fp16"))
    for _ in range(2):
        _, v = corrected(a, v, LEAF, engine)
    assert bool(v[0].isnan().all())
    assert errors(a[1:], v[1:])[0] <= 30 * n**0.5 * u


def test_corrections_square_errors() -> None:
    """From 1e-4 to 1e-7 and to double precision, where eigenvalues are apart."""
    n = 24
    a = hermitian("even", n, torch.float64)[None]
    exact = torch.linalg.eigh(a)[1]
    turn = torch.linalg.matrix_exp(1e-4 * (lambda x: x - x.mT)(normal(n, n)))
    engine = EmulatedEngine("cpu", "fp64")
    v, sizes = exact @ turn, []
    for _ in range(3):
        sizes.append(errors(a, v)[0])
        w, v = corrected(a, v, LEAF, engine)
    assert sizes[0] > 1e-5
    assert sizes[1] <= 1e4 * sizes[0] ** 2  # the least gap is 1 / 12, and n elements are changed
    assert errors(a, v)[0] <= 30 * n**0.5 * 2.0**-53
    assert (w - torch.linalg.eigvalsh(a)).abs().max() <= 30 * n * 2.0**-53


def test_sign_of_eigenvalues_near_zero() -> None:
    """Eigenvalues from 1 down to 1e-5 of both signs have their sign; a zero stays between."""
    n = 20
    w = torch.logspace(0, -5, n).double() * (-1.0) ** torch.arange(n)
    w[-1] = 0.0
    q = orthonormal(normal(n, n))
    engine = EmulatedEngine("cpu", "fp64")
    found, _ = first_signs(((q * w) @ q.mT)[None], torch.ones(1, dtype=torch.float64), engine, engine)
    found = all_signs(found, engine, engine)[0]
    inner = q.mT @ found @ q
    assert (inner.diagonal()[:-1] - w[:-1].sign()).abs().max() < 1e-4
    assert inner[-1, -1].abs() < 0.1


def test_by_name_and_the_chain_of_a_batch() -> None:
    a = torch.stack([hermitian(name, 30, torch.float64) for name in ("even", "three values")])
    exact = torch.linalg.eigvalsh(a)
    by_name = neula.eigh(a, algorithm="divide")
    assert [x.method for x in by_name.attempts] == ["divide and conquer fp64"]
    for result in (by_name, neula.eigh(a, engine="emulated")):
        assert result.converged
        assert bool(((result.eigenvalues - exact).abs() <= result.errors + 30 * 30 * 2.0**-53).all())
    with pytest.raises(ValueError, match="unknown algorithm 'jacobi'"):
        neula.eigh(a, algorithm="jacobi")
    with pytest.raises(ValueError, match="without B"):
        neula.eigh(a, torch.eye(30).double().expand(2, 30, 30), algorithm="divide")


def test_spectra_below_single_precision_fall_back_to_the_library() -> None:
    """Single precision does not separate eigenvalues of 1e-8 to 1e-12; by name there is no fallback."""
    q = orthonormal(normal(60, 60))
    a = (q * torch.logspace(0, -12, 60).double()) @ q.mT
    a = torch.stack([(a + a.mT) / 2, torch.eye(60).double()])
    result = neula.eigh(a, engine="emulated")
    assert result.converged
    assert result.attempts[-1].method == "eigh fp64"
    with pytest.warns(neula.AccuracyWarning, match="not certified"):
        assert not neula.eigh(a, engine="emulated", algorithm="divide").converged
