"""Linear systems with complex numbers, compared with exact solutions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.campaign.oracle import system
from tests.matrices import complex_array as drawn

import neula

DTYPES = [np.complex64, np.complex128]
U = {np.complex64: 2.0**-24, np.complex128: 2.0**-53}


def definite(n: int, *batch: int, seed: int = 0) -> np.ndarray:
    g = drawn(*batch, n, n + 8, seed=seed)
    return g @ g.conj().swapaxes(-1, -2) / n


def backward(a: np.ndarray, b: np.ndarray, x: np.ndarray) -> float:
    """Normwise backward error in the infinity norm of the real embedding, in extended precision."""
    re, im = (part.astype(np.longdouble) for part in (a.real, a.imag))
    real = np.block([[re, -im], [im, re]])
    b, x = (np.concatenate([y.real, y.imag]).astype(np.longdouble) for y in (b, x))
    size = np.abs(real).sum(1).max() * np.abs(x).max(0) + np.abs(b).max(0)
    return float((np.abs(b - real @ x).max(0) / size).max())


MATRICES = {
    "normal": lambda n: drawn(n, n),
    "real values": lambda n: drawn(n, n).real + 0j,
    "imaginary values": lambda n: 1j * drawn(n, n).real,
    "symmetric": lambda n: drawn(n, n) + drawn(n, n).T,
    "columns": lambda n: drawn(n, n) * 10.0 ** np.linspace(-30, 30, n),
    "ill-conditioned": lambda n: drawn(n, n) @ np.diag(np.logspace(0, -3, n)) @ drawn(n, n, seed=1),
    "dominant": lambda n: drawn(n, n) + 3 * n * np.diag(np.exp(1j * np.arange(n))),
    "definite": definite,
}
WAYS = [
    {},
    {"engine": "emulated"},
    {"pivot": "partial"},
    {"pivot": "partial", "engine": "emulated"},
    {"pivot": "rbt", "compute": "fp32"},
    {"pivot": "rbt", "engine": "emulated", "compute": "fp64"},
    {"certify": "forward"},
]
DEFINITE_WAYS = [{"assume_a": "pos", **how} for how in (*WAYS[:2], {"engine": "emulated", "compute": "fp16"})]
PAIRS = [(name, way) for name in MATRICES for way in WAYS] + [("definite", way) for way in DEFINITE_WAYS]


@pytest.mark.parametrize(("name", "way"), PAIRS, ids=str)
@pytest.mark.parametrize("n", [1, 2, 9, 16])
def test_solutions_are_certified(n: int, name: str, way: dict[str, str]) -> None:
    a, b = MATRICES[name](n), drawn(n, 2, seed=7)
    for dtype in DTYPES:
        given = a.astype(dtype), b.astype(dtype)
        if name == "columns" and n > 1 and dtype == np.complex64:  # squares of 1e-30 and x are out of range
            continue
        found = neula.solve(*given, **way)
        wide = [y.astype(np.complex128) for y in given]
        assert found.converged, found.attempts
        assert found.x.dtype == dtype
        assert found.method.startswith("cholesky") or "assume_a" not in way
        assert backward(*wide, found.x) <= found.tolerance
        errors = system(*wide).errors(found.x, n)
        assert (errors <= found.forward_errors * (1 + 1e-9) + 1e-30).all()


@pytest.mark.parametrize("costly", [False, True])
@pytest.mark.parametrize("kind", ["normal", "ill-conditioned", "definite", "ill-conditioned definite"])
def test_larger_systems(monkeypatch: pytest.MonkeyPatch, kind: str, costly: bool) -> None:
    """Formats below double precision, GMRES, conjugate gradients; costly systems begin with Krylov methods,
    which also gather their evidence.
    """
    n = 280
    if costly:
        for module in ("ways", "evidence"):
            monkeypatch.setattr(f"neula.problems.systems.{module}.COSTLY", 100)
    a, b, assume_a = drawn(n, n), drawn(n, 1, seed=1), "pos" if "definite" in kind else "gen"
    u, _, v = np.linalg.svd(a)
    if kind.startswith("ill"):
        a = (u * np.logspace(0, -5, n)) @ (u.conj().T if assume_a == "pos" else v)
    elif assume_a == "pos":
        a = definite(n)
    for engine in ("emulated",) if costly else ("auto", "emulated"):
        found = neula.solve(a, b, assume_a=assume_a, engine=engine)
        assert found.converged, found.attempts
        assert backward(a, b, found.x) <= found.tolerance
        exact, size = np.linalg.solve(a, b), np.linalg.norm(a, axis=0)[:, None]
        lost = np.linalg.norm(size * (found.x - exact)) / np.linalg.norm(size * exact)
        assert lost <= found.forward_error + 1e-13 * np.linalg.cond(a)
        assert found.condition >= np.linalg.cond(a / size.T) / 3
        assert "fp16" in found.method or not costly or kind.startswith("ill")


def test_batches_and_shapes() -> None:
    a, b = drawn(3, 9, 9), drawn(9, 2, seed=1)
    found = neula.solve(a, b)
    assert found.accepted.all()
    for i in range(3):
        assert backward(a[i], b, found.x[i]) < 4 * U[np.complex128] * 2
    vector = neula.solve(a, b[:, 0])
    assert vector.x.shape == (3, 9)
    assert np.allclose(vector.x, found.x[..., 0], rtol=1e-10)
    assert neula.solve(definite(9, 3), b, assume_a="pos").accepted.all()
    assert neula.solve(np.zeros((0, 0), complex), np.zeros((0, 2), complex)).x.shape == (0, 2)
    assert neula.solve(a, np.zeros((9, 0), complex)).x.shape == (3, 9, 0)


@pytest.mark.parametrize("n", [1, 12])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_real_matrices_with_complex_right_hand_sides(dtype: type, n: int) -> None:
    """As twice as many real ones; the bound on the forward error holds for the complex solution."""
    a, b = drawn(n, n).real.astype(dtype), drawn(n, 3, seed=1).astype(np.complex64)
    found, vector = neula.solve(a, b), neula.solve(a, b[:, 0])
    assert found.x.dtype == vector.x.dtype == (np.complex128 if dtype == np.float64 else np.complex64)
    errors = system(a.astype(float), b.astype(complex)).errors(found.x.astype(complex), n)
    assert (errors <= found.forward_errors).all()
    assert np.array_equal(vector.x, neula.solve(a, b[:, :1]).x[:, 0])
    assert vector.forward_errors.shape == ()
    batch = neula.solve(np.stack([a, 2 * a]), b[:, 0])
    assert batch.x.shape == (2, n)
    assert batch.forward_errors.shape == batch.accepted.shape == (2,)
    waited = neula.finish(neula.solve(a, b, wait=False))
    assert np.array_equal(waited.x, found.x)
    assert neula.solve(a, b[:, :0]).x.dtype == found.x.dtype


@pytest.mark.parametrize("way", [{}, {"engine": "emulated"}, {"pivot": "partial"}, {"pivot": "rbt"}], ids=str)
@pytest.mark.parametrize("n", [3, 30, 80])
def test_singular_systems_are_not_certified(n: int, way: dict[str, str]) -> None:
    a = drawn(n, n)
    a[:, n - 1] = (1 + 2j) * a[:, 0] + 1j * a[:, 1]
    try:
        with pytest.warns(neula.AccuracyWarning):
            found = neula.solve(a, drawn(n, 1, seed=1), **way)
    except (np.linalg.LinAlgError, ArithmeticError):
        return
    assert not found.converged


def test_what_is_refused() -> None:
    a, b = drawn(5, 5), drawn(5, 1, seed=1)
    a[1, 2] = complex(1, np.nan)
    with pytest.raises(ValueError, match=r"A\[1, 2\] is \(1\+nanj\): A must be finite"):
        neula.solve(a, b)
    a[1, 2] = 0
    a[:, 3] = 0
    with pytest.raises(np.linalg.LinAlgError, match="pivot 3 is exactly zero"):
        neula.solve(a, b)
    with pytest.raises(np.linalg.LinAlgError, match="not positive definite"):
        neula.solve(definite(5) - 40 * np.eye(5), b, assume_a="pos")
    with pytest.warns(neula.AccuracyWarning, match="A is not Hermitian"):
        neula.solve(definite(5) + 1j * np.triu(np.ones((5, 5))), b, assume_a="pos")


@pytest.mark.gpu
@pytest.mark.parametrize("n", [40, 700, 6500])
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_systems_on_a_gpu(dtype: torch.dtype, positive: bool, n: int) -> None:
    """Every way there: the host, the library, and factors in half precision after butterflies."""
    generator = torch.Generator("cuda").manual_seed(n)
    g = torch.randn(n, n + 1, dtype=torch.complex128, device="cuda", generator=generator)
    a, b = g[:, :n], g[:, n:].to(dtype)
    a = (a @ a.mH / n + torch.eye(n, device="cuda") if positive else a).to(dtype)
    found = neula.solve(a, b, assume_a="pos" if positive else "gen")
    assert found.converged, found.attempts
    a, b, x = (y.to(torch.complex128) for y in (a, b, found.x))
    size = a.abs().sum(1).max() * x.abs().max() + b.abs().max()
    assert (b - a @ x).abs().max() <= found.tolerance * size
    exact, sizes = torch.linalg.solve(a, b), torch.linalg.vector_norm(a, dim=0)[:, None]
    lost = torch.linalg.vector_norm(sizes * (x - exact)) / torch.linalg.vector_norm(sizes * exact)
    assert lost <= found.forward_error + n * U[np.complex128] * found.condition
