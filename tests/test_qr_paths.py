"""neula.qr on every path for every kind of matrix: accepted, and as accurate as its certificate says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.matrices import normal, normal_complex
from tests.qr_bounds import check

import neula
from half_engine import HalfEngine
from neula.algorithms.orthogonal.cholesky_qr import solved_cholesky_qr
from neula.engines import FORMATS, CpuEngine, EmulatedEngine, Engine
from neula.engines.shipped import EMULATED, cuda_tuning
from neula.engines.tuning import Recursion
from neula.io.matrices import SPECTRA, random_matrix
from neula.kernels.few_vectors import probes_host

GRAM = replace(cuda_tuning((9, 0), replayed_bytes=1 << 22, corrected=False), by_host=0)
TOGETHER = cuda_tuning((9, 0))
QUEUED = replace(EMULATED, single=Recursion("cholesky32", 16), replayed_bytes=1 << 20)


def tuned(kind: type[Engine], tuning: Any, **others: Any) -> Engine:
    """A CPU that takes the steps of another machine."""
    return type("Tuned", (kind,), {"tuning": tuning, **others})("cpu")


PATHS: dict[str, dict[str, Any]] = {
    "cpu": {"engine": "cpu"},
    "emulated": {"engine": "emulated", "cutoff": 16},
    "emulated fp16": {"engine": "emulated", "accuracy": "fp16", "cutoff": 16},
    "emulated bf16": {"engine": "emulated", "accuracy": "bf16", "cutoff": 16},
    "stored in half precision": {"engine": HalfEngine("cpu"), "accuracy": "fp16"},
    "Gram matrices": {"engine": tuned(CpuEngine, GRAM)},
    "Gram matrices that are looked at": {"engine": tuned(CpuEngine, replace(GRAM, replayed_bytes=1))},
    "Gram matrices after panels": {"engine": tuned(CpuEngine, replace(GRAM, gram_passes=1 << 24))},
    "Gram matrices fp16": {"engine": tuned(EmulatedEngine, GRAM), "accuracy": "fp16"},
    "queued": {"engine": tuned(EmulatedEngine, QUEUED, replayed_bytes=1 << 20)},
    "queued fp16": {"engine": tuned(EmulatedEngine, QUEUED, replayed_bytes=1 << 20), "accuracy": "fp16"},
    "corrected in part": {
        "engine": tuned(EmulatedEngine, replace(QUEUED, partly_corrected=1), replayed_bytes=1 << 20)
    },
    **{
        f"panels by {name}": {"panel": name, "cutoff": 8}
        for name in ("caqr", "cholesky", "cholesky2", "cholesky32")
    },
    "panels by householder": {"panel": "householder", "cutoff": 40},
    "householder": {"algorithm": "householder"},
    "in place": {"engine": "cpu", "overwrite_a": True},
    "in place, emulated": {"engine": "emulated", "overwrite_a": True, "cutoff": 16},
    "batch, lapack": {"engine": "cpu"},
    "batch, fp32": {"engine": tuned(CpuEngine, TOGETHER, preconditioners=("fp32",))},
    "batch, fp64": {"engine": tuned(CpuEngine, TOGETHER, preconditioners=("fp64",))},
}

Matrix = Callable[[], torch.Tensor]


def changed(
    m: int, n: int, change: Callable[[torch.Tensor], Any], made: Callable[..., Any] = normal
) -> Matrix:
    """Normal numbers, of which something is changed in place."""

    def make() -> torch.Tensor:
        a = made(m, n)
        change(a)
        return a

    return make


def with_condition(m: int, n: int, cond: float) -> torch.Tensor:
    u, v = (torch.linalg.qr(normal_complex(size, n, seed=size))[0] for size in (m, n))
    return (u * torch.logspace(0, -math.log10(cond), n, dtype=torch.float64)) @ v.mH


def repeated(a: torch.Tensor) -> None:
    a[:, a.shape[1] // 2 :] = a[:, : a.shape[1] // 2]


CASES: dict[str, Matrix] = {
    **{f"{m} x {n}": lambda m=m, n=n: normal(m, n) for m, n in [(1, 1), (5, 1), (1, 5), (7, 7), (60, 90)]},
    "square": lambda: normal(160, 160),
    "tall": lambda: normal(390, 130),
    "positive": lambda: normal(390, 130).abs(),
    "few columns": lambda: normal(300, 40),
    **{x: lambda x=x: random_matrix(x, 120, 60, cond=1e6) for x in SPECTRA},
    "ill-conditioned": lambda: random_matrix("geometric", 390, 130, cond=1e12, seed=1),
    "few ill-conditioned": lambda: random_matrix("geometric", 60, 9, cond=1e15, seed=1),
    "zero": lambda: torch.zeros(60, 30).double(),
    "zero columns": changed(120, 60, lambda a: a[:, [0, 7, 59]].zero_()),
    "columns of zeros": changed(120, 60, lambda a: a[:, 40:].zero_()),
    "one dependent": changed(390, 130, lambda a: a[:, 7].copy_(a[:, 3] - a[:, 5])),
    "half dependent": changed(120, 60, repeated),
    "each four times": lambda: normal(120, 15).repeat_interleave(4, 1),
    "one column": lambda: normal(120, 1).expand(120, 60),
    "rank one": lambda: normal(120, 1) @ normal(1, 60),
    "vandermonde": lambda: torch.linalg.vander(torch.linspace(0, 1, 120).double(), N=60),
    "hilbert": lambda: 1 / (torch.arange(120)[:, None] + torch.arange(60) + 1.0).double(),
    "in units": lambda: normal(120, 15) * 10.0 ** torch.linspace(-30, 30, 15).double(),
    "triangle": lambda: normal(90, 60).triu(),
}
COMPLEX: dict[str, Matrix] = {
    **{f"{m} x {n}": lambda m=m, n=n: normal_complex(m, n) for m, n in [(1, 1), (1, 5), (60, 90)]},
    "square": lambda: normal_complex(130, 130),
    "tall": lambda: normal_complex(390, 130),
    "few columns": lambda: normal_complex(300, 40),
    "one phase": lambda: torch.polar(normal(120, 60).abs(), 0.1 * normal(120, 60, seed=1)),
    "imaginary": lambda: 1j * normal(120, 60),
    "nearly dependent": lambda: with_condition(390, 130, 1e12),
    "few nearly dependent": lambda: with_condition(60, 9, 1e15),
    "zero columns": changed(120, 60, lambda a: a[:, ::29].zero_(), normal_complex),
    "one dependent": changed(390, 130, lambda a: a[:, 7].copy_(1j * a[:, 3] - a[:, 5]), normal_complex),
    "rank one": lambda: normal_complex(120, 1) @ normal_complex(1, 60),
    "fourier": lambda: torch.fft.fft(torch.eye(64, dtype=torch.complex128))[:, :60],
    "in units": lambda: normal_complex(120, 15) * 10.0 ** torch.linspace(-30, 30, 15).double(),
    "triangle": lambda: normal_complex(90, 60).triu(),
    "conjugated": lambda: normal_complex(60, 90).mH,
    "strided": lambda: normal_complex(240, 120)[::2, ::2],
}
CASES |= {f"complex, {name}": made for name, made in COMPLEX.items()}


PAIRS = [
    (path, case)
    for i, path in enumerate(PATHS)
    for j, case in enumerate(CASES)
    if (i + j) % 2 == 0 or path in ("cpu", "Gram matrices")
]
"""All matrices on two paths; every other one on others, in turns."""


@pytest.mark.parametrize(("path", "case"), PAIRS)
def test_every_path_for_every_matrix(path: str, case: str) -> None:
    options, whole = PATHS[path], CASES[case]()
    dtypes = [torch.complex64, torch.complex128] if whole.is_complex() else [torch.float32, torch.float64]
    if {"accuracy", "panel"} & options.keys():
        dtypes = dtypes[:1]
    elif options == {"engine": "cpu"} and not whole.is_complex() and case != "in units":
        dtypes.append(torch.float16)
    for dtype in dtypes:
        a = whole.to(dtype)
        batch = torch.stack([a, -a.flip(0)]) if path.startswith("batch") else a[None]
        given = batch if path.startswith("batch") else a.clone()
        if "overwrite_a" in options:
            given = given.T.contiguous().T
        result = neula.qr(given, **options)
        assert result.converged
        assert result.Q.dtype == result.R.dtype == dtype
        if "overwrite_a" in options:
            large = len(a) >= a.shape[1] >= 16 and case not in ("few columns", "triangle")
            assert result.Q.data_ptr() == given.data_ptr() or not large or whole.is_complex()
        else:
            assert torch.equal(given, batch.reshape(given.shape))
        format = options.get("accuracy")
        u = max(torch.finfo(dtype).eps / 2, FORMATS[format].u if format else 0.0)
        factors = (x.reshape(len(batch), *x.shape[-2:]) for x in result)
        for one, q, r in zip(batch, *factors, strict=True):
            check(one, q, r, u)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("m", "n"), [(60, 40), (390, 130)])
def test_nan_is_refused_with_its_place(path: str, m: int, n: int) -> None:
    a = changed(m, n, lambda a: a[17, 5].fill_(torch.nan))()
    a = a.T.contiguous().T
    before = a.clone()
    with pytest.raises(ValueError, match=r"A\[17, 5\] is nan"):
        neula.qr(a, **PATHS[path])
    assert torch.equal(a.isnan(), before.isnan())
    assert torch.equal(a.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_arrays_without_the_core(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes_host, "core", lambda: None)
    for case in ("tall", "positive", "few columns"):
        a = CASES[case]().to(dtype)
        found = neula.qr(a.numpy())
        assert isinstance(found.Q, np.ndarray)
        check(a, *map(torch.from_numpy, found), torch.finfo(dtype).eps / 2)


def loss(q: torch.Tensor) -> float:
    wide = q.double()
    return float(torch.linalg.matrix_norm(wide.mT @ wide - torch.eye(q.shape[1]))) / q.shape[1] ** 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_two_passes_of_cholesky_qr_are_as_good_as_reflections(dtype: torch.dtype) -> None:
    """Nearly parallel columns: one pass exceeds the bound by ten on every CPU, with a small residual."""
    a, u = (CASES["positive"]() + 2).to(dtype), torch.finfo(dtype).eps / 2
    once = torch.empty_like(a)
    r = solved_cholesky_qr(a, out=once)
    assert r is not None
    assert loss(once) > 10 * 6 * u * (2 + math.log2(130))
    assert torch.linalg.matrix_norm(a.double() - once.double() @ r.double()) <= 150**0.5 * u * a.norm()
    assert loss(neula.qr(a).Q) <= 2 * loss(torch.linalg.qr(a)[0])
