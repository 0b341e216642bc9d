"""Eigenvalues, singular values and powers beside torch's, large, in batches and small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import neula
from benchmarks.harness import Results
from neula.papers.measuring import WARM, interleaved_seconds, steady_seconds

F32, F64, C64, C128 = torch.float32, torch.float64, torch.complex64, torch.complex128

LARGE = 1 << 20
"""Elements from which on a problem is timed alone, and not in turns with its peer."""

EIGH_PY = [
    *((20, 32, "dense 1"), (40, 176, "dense 1"), (40, 352, "dense 1"), (640, 512, "dense 2")),
    *((60, 1024, "dense 2"), (8, 2048, "dense 1"), (640, 512, "mixed"), (60, 1024, "mixed")),
    *((640, 512, "rank-deficient"), (640, 512, "clustered"), (60, 1024, "nearly rank-deficient")),
    *((640, 512, "even"), (60, 1024, "geometric")),
]
"""Sizes and spectra of GPU MODE's public set ``eigh_py``: numbers of matrices, orders, spectra."""

MIXED = ("dense 2", "rank-deficient", "clustered", "nearly rank-deficient", "even", "geometric")


@dataclass(frozen=True)
class SpectralProblem:
    """A function, the shape of its matrices (square ones are Hermitian, except for SVDs), and a spectrum."""

    function: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    spectrum: str = "normal"


def run(device: torch.device) -> Results:
    """Time all of them; on a CPU those that are small.

    Residual and orthogonality are the largest of a batch in double precision, ``||A V - V diag(w)||_F /
    ||A||_F`` and ``||V^H V - I||_F / sqrt(n)``; of values alone the residual is the largest difference
    from those that are computed with vectors in double precision, relative to the largest value, and of
    inverse square roots ``||X A X - I||_F / (||X||_F^2 ||A||_F)``.
    """
    results = Results("spectra", device)
    for case in problems(device):
        results.add(**row(case, device))
    return results


def row(case: SpectralProblem, device: torch.device) -> dict[str, Any]:
    """Times and errors of neula and of torch for a problem."""
    a = matrices(case, device)
    mine, peer, errors = FUNCTIONS[case.function](a)
    found: dict[str, Any] = {}

    def kept(name: str, function: Callable[[], Any]) -> Callable[[], None]:
        return lambda: found.update({name: function()})

    mine, peer = kept("mine", mine), kept("peer", peer)
    if a.numel() >= LARGE:
        seconds, peer_seconds = steady_seconds(mine), steady_seconds(peer, cold=False)
    else:
        for _ in range(WARM):
            mine()
            peer()
        seconds, peer_seconds = interleaved_seconds((mine, peer), 0.2)
    (residual, orthogonality), (torch_residual, torch_orthogonality) = map(errors, found.values())
    return {
        "function": case.function,
        "shape": "x".join(map(str, case.shape)),
        "spectrum": case.spectrum,
        "dtype": str(case.dtype).removeprefix("torch."),
        "ms": 1e3 * seconds,
        "torch_ms": 1e3 * peer_seconds,
        "speedup": peer_seconds / seconds,
        "residual": residual,
        "torch_residual": torch_residual,
        "orthogonality": orthogonality,
        "torch_orthogonality": torch_orthogonality,
        "method": found["mine"].attempts[-1].method,
        "certified": found["mine"].converged,
    }


def problems(device: torch.device) -> Iterator[SpectralProblem]:
    """Large ones only on a GPU."""
    if device.type == "cuda":
        yield from (SpectralProblem("eigh", (b, n, n), F32, spectrum) for b, n, spectrum in EIGH_PY)
        yield from (SpectralProblem("eigh", (n, n), F32) for n in (4096, 8192, 16384))
        yield from (SpectralProblem("eigh", (n, n), F64) for n in (4096, 8192))
        # cuSOLVER takes no 100,000.
        yield from (SpectralProblem("eigh", (20_000, n, n), F32) for n in (3, 8, 32))
        yield from (SpectralProblem("eigh", shape, C64) for shape in ((4096, 4096), (60, 1024, 1024)))
        yield SpectralProblem("eigvalsh", (4096, 4096), F32)
        shapes = [(4096, 4096), (8192, 8192), (32768, 2048)]
        batches = [(640, 512, 512), (1000, 256, 128), (100_000, 8, 8)]
        yield from (SpectralProblem("svd", shape, F32) for shape in (*shapes, *batches))
        yield SpectralProblem("svdvals", (4096, 4096), F32)
        yield from (
            SpectralProblem("inv_sqrt", (b, n, n), F32, "dense 2") for b, n in ((640, 512), (8, 2048))
        )
    for function in ("eigh", "eigvalsh", "inv_sqrt"):
        spectrum = "dense 2" if function == "inv_sqrt" else "normal"
        for shape in ((10, 10), (50, 50), (200, 200), (1000, 1000), (100, 32, 32)):
            yield SpectralProblem(function, shape, F64, spectrum)
    yield from (SpectralProblem("eigh", (200, 200), dtype) for dtype in (F32, C128))
    yield from (SpectralProblem("eigh", (200, 200), F64, spectrum) for spectrum in ("clustered", "geometric"))
    for function in ("svd", "svdvals"):
        for shape in ((64, 32), (300, 40), (2000, 50), (500, 500), (100, 32, 16)):
            yield SpectralProblem(function, shape, F64)


def matrices(case: SpectralProblem, device: torch.device) -> torch.Tensor:
    """Random matrices; Hermitian ones ``Q diag(w) Q^H`` where a spectrum is named."""
    generator = torch.Generator(device).manual_seed(5)
    a = torch.randn(case.shape, dtype=case.dtype, device=device, generator=generator)
    if case.function in ("svd", "svdvals"):
        return a
    if case.spectrum == "normal":
        return (a + a.mH) / 2
    q = torch.linalg.qr(a).Q
    count = case.shape[0] if len(case.shape) == 3 else 1
    names = MIXED if case.spectrum == "mixed" else (case.spectrum,)
    n, real = case.shape[-1], case.dtype.to_real()
    values = torch.stack([spectrum(names[i % len(names)], n, real) for i in range(count)])
    w = values.to(device).reshape(*case.shape[:-1])
    x = (q * w.unsqueeze(-2)) @ q.mH
    return (x + x.mH) / 2


def spectrum(name: str, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Eigenvalues: ``dense c`` are from 1 to 10^-c."""
    kind, _, decades = name.partition(" ")
    eps = torch.finfo(dtype).eps
    place = torch.linspace(0, 1, n, dtype=F64, device="cpu")
    w = 10.0 ** -(place * (float(decades) if kind == "dense" else 2.0))
    if name == "rank-deficient":
        w[3 * n // 4 :] = 0.0
    elif name == "nearly rank-deficient":
        w[3 * n // 4 :] *= 1e-5
    elif name == "clustered":
        w = torch.where(place < 0.5, 1.0, 4 * eps)
    elif name == "even":
        w = 1 - place * (1 - eps)
    elif name == "geometric":
        w = eps**place
    return w.to(dtype)


Judged = tuple[Callable[[], Any], Callable[[], Any], Callable[[Any], tuple[float, float | None]]]


def eigh(a: torch.Tensor) -> Judged:
    """With vectors."""
    wide = in_double(a)

    def errors(found: Any) -> tuple[float, float | None]:
        w, v = found
        return _decomposed(wide, v, w, v)

    return partial(neula.eigh, a), partial(torch.linalg.eigh, a), errors


def eigvalsh(a: torch.Tensor) -> Judged:
    """Without vectors."""
    exact = torch.linalg.eigh(in_double(a))[0]  # by another algorithm

    def errors(found: Any) -> tuple[float, float | None]:
        return _differences(getattr(found, "eigenvalues", found), exact), None

    return partial(neula.eigh, a, eigvals_only=True), partial(torch.linalg.eigvalsh, a), errors


def svd(a: torch.Tensor) -> Judged:
    """As many vectors as there are singular values."""
    wide = in_double(a)

    def errors(found: Any) -> tuple[float, float | None]:
        u, s, vh = found
        return _decomposed(wide, u, s, vh.mH)

    reduced = {"full_matrices": False}
    return partial(neula.svd, a, **reduced), partial(torch.linalg.svd, a, **reduced), errors


def svdvals(a: torch.Tensor) -> Judged:
    """Without vectors."""
    exact = torch.linalg.svd(in_double(a), full_matrices=False)[1]  # by another algorithm

    def errors(found: Any) -> tuple[float, float | None]:
        return _differences(getattr(found, "s", found), exact), None

    return partial(neula.svd, a, compute_uv=False), partial(torch.linalg.svdvals, a), errors


def inv_sqrt(a: torch.Tensor) -> Judged:
    """Beside eigenvectors of torch."""
    wide = in_double(a)

    def by_eigenvectors() -> torch.Tensor:
        w, v = torch.linalg.eigh(a)
        return (v * w.rsqrt().unsqueeze(-2)) @ v.mH

    def errors(found: Any) -> tuple[float, float | None]:
        x = in_double(getattr(found, "X", found))
        eye = torch.eye(a.shape[-1], dtype=x.dtype, device=x.device)
        return float((_norms(x @ wide @ x - eye) / (_norms(x).square() * _norms(wide))).max()), None

    return partial(neula.inv_sqrt, a), by_eigenvectors, errors


FUNCTIONS: dict[str, Callable[[torch.Tensor], Judged]] = {
    "eigh": eigh,
    "eigvalsh": eigvalsh,
    "svd": svd,
    "svdvals": svdvals,
    "inv_sqrt": inv_sqrt,
}


def in_double(x: torch.Tensor) -> torch.Tensor:
    """In double precision."""
    return x.to(C128 if x.is_complex() else F64)


def _norms(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.matrix_norm(x)


def _decomposed(
    a: torch.Tensor, u: torch.Tensor, s: torch.Tensor, v: torch.Tensor
) -> tuple[float, float | None]:
    """Residual and orthogonality of ``A V = U diag(s)``."""
    u, s, v = in_double(u), s.double(), in_double(v)
    residual = _norms(a @ v - u * s.unsqueeze(-2)) / _norms(a)
    eye = torch.eye(v.shape[-1], dtype=v.dtype, device=v.device)
    lost = torch.maximum(_norms(u.mH @ u - eye), _norms(v.mH @ v - eye))
    return float(residual.max()), float(lost.max()) / len(eye) ** 0.5


def _differences(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float(((found.double() - exact).abs().amax(-1) / exact.abs().amax(-1)).max())
