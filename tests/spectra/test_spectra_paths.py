"""eigh and svd on every path for every kind of matrix: LAPACK's test ratios, and errors within bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.campaign.areas.spectra import SYMMETRIC
from tests.campaign.exact import balls
from tests.campaign.hermitian import Spectrum
from tests.campaign.matrices import KINDS, ComplexRandom, exponent_of, ldexp
from tests.campaign.ratios import THRESHOLD
from tests.devices import OnGPU

import neula
from neula.engines import FORMATS, FP32, EmulatedEngine
from neula.pipeline.chain import Declined
from neula.problems.spectra import links
from neula.problems.spectra.problem import SpectralMatrices, SpectralOptions

U = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.complex64: 2.0**-24, torch.complex128: 2.0**-53}
DTYPES = list(U)

PATHS: dict[str, dict[str, Any]] = {
    "cpu": {"engine": "cpu"},
    "emulated": {"engine": "emulated"},
    "fp32": {"accuracy": "fp32"},
    "fp16": {"accuracy": "fp16"},
    "emulated fp16": {"accuracy": "fp16", "engine": "emulated"},
}
ONLY_EIGH: dict[str, dict[str, Any]] = {
    "upper": {"upper": True},
    "a few": {"subset_by_index": (2, 4)},
    "the last": {"subset_by_index": (6, 8)},
    "most": {"subset_by_index": (1, 7)},
}


def made(
    kinds: dict[str, Callable[..., np.ndarray]], kind: str, dtype: torch.dtype, *shape: int
) -> torch.Tensor:
    """A matrix whose largest element is near one."""
    rng: Any = np.random.default_rng(sum(shape))
    a = kinds[kind](ComplexRandom(rng) if dtype.is_complex else rng, *shape)
    return torch.from_numpy(ldexp(a, -exponent_of(a))).to(dtype)


def hermitian(kind: str, dtype: torch.dtype, n: int) -> torch.Tensor:
    a = made(SYMMETRIC, kind, dtype, n)
    return a.tril(-1) + a.tril(-1).mH + a.diagonal().real.diag()


@cache
def spectrum(kind: str, dtype: torch.dtype, n: int) -> Spectrum:
    a = hermitian(kind, dtype, n).numpy()
    return Spectrum.of(balls(a.astype(np.complex128 if dtype.is_complex else np.float64)))


def ratio(a: Any, v: Any, s: Any, u: Any, unit: float) -> float:
    """``||A V - U diag(s)|| / (n u ||A||)`` and ``||V^H V - I|| / (n u)``: the largest."""
    a, v, s, u = (x.to(torch.promote_types(x.dtype, torch.float64)) for x in (a, v, s, u))
    n, norm = max(a.shape), torch.linalg.matrix_norm
    lost = [norm(x.mH @ x - torch.eye(x.shape[1])) / (n * unit) for x in (u, v)]
    size = norm(a)
    return float(max(*lost, norm(a @ v - u * s) / (n * unit * (size if size > 0 else 1))))


def dtypes_of(path: str, kind: str) -> list[torch.dtype]:
    """All on the first path, and two on others, others for each kind."""
    return DTYPES if path == "cpu" else DTYPES[len(kind) % 2 :: 2]


@pytest.mark.parametrize("kind", SYMMETRIC)
@pytest.mark.parametrize("path", [*PATHS, *ONLY_EIGH])
def test_eigh(path: str, kind: str) -> None:
    options, n = (PATHS | ONLY_EIGH)[path], 9
    for dtype in dtypes_of(path, kind):
        a = hermitian(kind, dtype, n)
        hidden = a.tril() + torch.full_like(a, math.nan).triu(1)
        given = hidden.mH if "upper" in options else hidden
        result = neula.eigh(given, **options)
        assert result.converged
        unit = max(U[dtype], FORMATS[options["accuracy"]].u if "accuracy" in options else 0.0)
        first, last = options.get("subset_by_index", (0, n - 1))
        w, v = result
        assert (w.shape, v.shape) == ((last + 1 - first,), (n, last + 1 - first))
        assert ratio(a, v, w, v, unit) < THRESHOLD
        truth = spectrum(kind, dtype, n)
        allowed = THRESHOLD * (n + 1) * unit * max(1.0, float(a.norm()))
        for i, (x, error) in enumerate(zip(w.tolist(), result.errors.tolist(), strict=True)):
            assert truth.distance(first + i, x) <= error * (1 + 1e-9) + 1e-40
            assert error <= allowed
        alone = neula.eigvalsh(given, **options)
        assert bool(((alone - w).abs() <= 2 * allowed).all())


SHAPES = [(13, 13), (13, 5), (5, 13), (1, 4), (4, 1), (1, 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", PATHS)
def test_svd(path: str, kind: str) -> None:
    options = PATHS[path]
    for dtype, shape in zip([*DTYPES, *DTYPES[:2]], SHAPES, strict=True):
        a = made(KINDS, kind, dtype, *shape)
        result = neula.svd(a, full_matrices=False, **options)
        assert result.converged
        unit = max(U[dtype], FORMATS[options["accuracy"]].u if "accuracy" in options else 0.0)
        u, s, vh = result
        assert ratio(a, vh.mH, s, u, unit) < THRESHOLD
        wide = a.to(torch.promote_types(dtype, torch.float64))
        exact = torch.linalg.svdvals(wide)
        assert bool(((s - exact).abs() <= result.errors + 1e-14 * exact.max()).all())
        assert bool((result.errors <= THRESHOLD * max(shape) * unit * max(1.0, float(wide.norm()))).all())


def test_batches_without_a_kernel_are_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless division takes less time."""
    options = SpectralOptions(FP32, EmulatedEngine("cpu", "fp32"), symmetric=True)
    given = SpectralMatrices(torch.eye(30).expand(2, 30, 30).as_subclass(OnGPU), options)
    monkeypatch.setattr(links.tridiagonal, "takes", lambda a: False)
    monkeypatch.setattr(links, "by_division", lambda matrices, before, label, format: label)
    how = partial(links.by_reduction, given, None, "tridiagonal form fp32", FP32)
    assert how(divided=True) == "divide and conquer fp32"
    with pytest.raises(Declined):
        how(divided=False)


@pytest.mark.parametrize("engine", ["cpu", "emulated"])
@pytest.mark.parametrize("kind", ["random", "geometric", "clustered", "wilkinson_plus", "near"])
def test_test_ratios_of_moderate_orders(kind: str, engine: str) -> None:
    """LAPACK's: 30 times ``n u`` at most."""
    n = 130 if engine == "cpu" else 70
    for dtype in dtypes_of(engine, kind):
        a = hermitian(kind, dtype, n)
        w, v = result = neula.eigh(a, engine=engine)
        assert result.converged
        assert ratio(a, v, w, v, U[dtype]) < THRESHOLD
        given = a[: n // 2] if kind == "random" else a
        u, s, vh = triplets = neula.svd(given, engine=engine)
        assert triplets.converged
        k = len(given)
        assert ratio(given, vh.mH[:, :k], s, u, U[dtype]) < THRESHOLD
        assert float((vh @ vh.mH - torch.eye(n)).norm()) < THRESHOLD * n * U[dtype]
        if kind != "random":
            both = result.errors + triplets.errors.flip(0)
            assert bool(((w.abs().sort().values - s.flip(0)).abs() <= both.amax() + n * U[dtype]).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_spectrum_that_is_known(dtype: torch.dtype) -> None:
    """Second differences: ``2 - 2 cos(k pi / (n + 1))``, also without vectors and in parts."""
    n = 130
    a = (2 * torch.eye(n) - torch.ones(n - 1).diag(1) - torch.ones(n - 1).diag(-1)).to(dtype)
    exact = 4 * torch.sin(torch.arange(1, n + 1).double() * math.pi / (2 * n + 2)) ** 2
    for part, options in [
        (slice(None), {}),
        (slice(None), {"eigvals_only": True}),
        (slice(40, 51), {"subset_by_index": (40, 50)}),
        (slice(40, 51), {"subset_by_index": (40, 50), "eigvals_only": True}),
    ]:
        result = neula.eigh(a, **options)
        assert bool(((result.eigenvalues - exact[part]).abs() <= result.errors + 1e-15).all())
        assert result.evidence == ("a priori" if "eigvals_only" in options else "measured")
    low, high = float(exact[40] + exact[39]) / 2, float(exact[50] + exact[51]) / 2
    found = neula.eigvalsh(a, subset_by_value=(low, high))
    assert bool(((found - exact[40:51]).abs() <= 30 * n * U[dtype]).all())


@pytest.mark.parametrize("engine", ["cpu", "emulated"])
@pytest.mark.parametrize("part", ["", "index"])
def test_pencils(part: str, engine: str) -> None:
    rng = np.random.default_rng(0)
    for dtype in ("float64", "float32", "complex128", "complex64"):
        a, c = (
            rng.standard_normal((4, 13, 13)) + 1j * (dtype[0] == "c") * rng.standard_normal(13) for _ in "ab"
        )
        a, c = (x if dtype[0] == "c" else x.real for x in (a, c))
        a, b = (a + a.conj().swapaxes(1, 2)).astype(dtype), (c[0] @ c[0].conj().T + np.eye(13)).astype(dtype)
        result = neula.eigh(a, b, engine=engine, **({"subset_by_index": (2, 5)} if part else {}))
        assert result.converged
        w, v = result
        assert v.dtype == dtype
        unit = float(np.finfo(dtype).eps)
        scale = 13 * unit * np.linalg.norm(v, axis=1) * (np.linalg.norm(a) + np.abs(w) * np.linalg.norm(b))
        assert (np.linalg.norm(a @ v - b @ v * w[:, None], axis=1) < scale).all()
        gram = v.conj().swapaxes(1, 2) @ b @ v
        assert np.abs(gram - np.eye(w.shape[1])).max() < 30 * 13 * unit * np.linalg.cond(b)


def test_batches_of_few_columns_by_gram_matrices() -> None:
    """Of full rank, graded to 1e-7, dependent columns, rank one, zero: errors are within their bounds."""
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(6, 7, 4, generator=generator)
    a[1] *= torch.logspace(0, -7, 4)
    a[2, :, 1] = a[2, :, 0]
    a[3] = a[3, :, :1] @ a[3, :1]
    a[4] = 0.0
    result = neula.svd(a, full_matrices=False, engine="emulated")
    assert [attempt.method for attempt in result.attempts] == ["Gram matrix fp32"]
    exact = torch.linalg.svdvals(a.double())
    assert bool(((result.s.double() - exact).abs() <= result.errors).all())
    for one, u, s, vh in zip(a, *result, strict=True):
        assert ratio(one, vh.mH, s, u, U[torch.float32]) <= THRESHOLD


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_accepted_is_corrected_again(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one matrix of a batch whose eigenvectors are off by more than the others' are."""
    n = 60
    a = torch.stack([hermitian("even", dtype, n) for _ in range(3)])

    def rough(x: torch.Tensor, *_: Any) -> torch.Tensor:
        turn = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(1)).to(x)).Q
        skew = turn - turn.mT
        sizes = torch.tensor([1e-5, 0.05, 1e-5]).to(x)[:, None, None]
        return torch.linalg.eigh(x)[1] @ torch.linalg.matrix_exp(sizes * skew)

    monkeypatch.setattr(links, "divide", rough)
    result = neula.eigh(a, engine="emulated")
    assert [attempt.method.split()[0] for attempt in result.attempts] == ["divide", "corrected"]
    assert result.converged
    exact = torch.linalg.eigvalsh(a.double())
    assert bool(((result.eigenvalues.double() - exact).abs() <= result.errors + n * U[dtype]).all())
