"""Chains of methods for batches: which matrices each link gets, what is kept, and who is believed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import neula
from neula.algorithms.scaling import SAFE_NORMS
from neula.engines import FP32, FP64, CpuEngine, Engine
from neula.engines.shipped import cuda_tuning
from neula.io.matrices import random_matrix
from neula.kernels.qr import cholesky_qr_host
from neula.problems.orthogonal import ways
from neula.problems.orthogonal.factorize import begin, factorize, factorize_together
from neula.problems.orthogonal.problem import QRFactors, QRMatrices, QROptions
from neula.problems.orthogonal.ways import QRLink, together

ENGINE = CpuEngine("cpu")


class OneByOne(CpuEngine):
    """A CPU that takes the steps of a GPU, of matrices so large that they are factorized one by one."""

    tuning = replace(
        cuda_tuning((9, 0), replayed_bytes=1 << 28),
        corrected=False,
        arithmetics=("fp32", "fp64"),
        batched_elements=0,
    )


Factors = tuple[torch.Tensor, torch.Tensor]


def normal(batch: int, m: int, n: int) -> torch.Tensor:
    return torch.stack([random_matrix("normal", m, n, seed=i, dtype=torch.float32) for i in range(batch)])


def exact(a: torch.Tensor) -> Factors:
    return torch.linalg.qr(a)


class Recorded:
    """A method that errs by a relative ``error`` for some of its matrices, and remembers what it got."""

    def __init__(self, error: float = 0.0, bad: tuple[int, ...] = ()) -> None:
        self.error, self.bad = error, list(bad)
        self.given: list[torch.Tensor] = []

    def __call__(self, a: torch.Tensor) -> Factors:
        self.given.append(a.clone())
        q, r = exact(a)
        r[self.bad] *= 1 + self.error
        return q, r

    def link(self, label: str, *, scaled: bool = True) -> QRLink:
        return together(label, torch.float32, self, scaled=scaled)


def factorized(a: torch.Tensor, chain: list[QRLink], **options: Any) -> QRFactors:
    return factorize_together(a, chain, QROptions(**{"target": FP32, "engine": ENGINE} | options))


def test_columns_are_scaled_for_those_who_need_it() -> None:
    scales = 2.0 ** torch.tensor([-90.0, 0, 90])
    a = normal(2, 20, 3) * scales
    plain, scaled = Recorded(), Recorded()
    factors = factorized(a, [plain.link("as it is", scaled=False), scaled.link("scaled")])
    assert torch.equal(plain.given[0], a)
    largest = scaled.given[0].abs().amax(1)
    assert ((largest >= 0.5) & (largest < 1)).all()
    # The first is exact as well, but no certificate can be had of squares that overflow.
    assert [x.accepted for x in factors.attempts] == [False, True]
    torch.testing.assert_close(factors.q @ factors.r / scales, a / scales)


@pytest.mark.parametrize("dtype", SAFE_NORMS, ids=str)
def test_norms_out_of_range_are_not_trusted(dtype: torch.dtype) -> None:
    low, high = SAFE_NORMS[dtype]
    sizes = torch.tensor([low / 2, low * 2, 1.0, high / 2, high * 2], dtype=dtype)
    a = torch.eye(4, 3, dtype=dtype).repeat(5, 1, 1)
    a[:, 1, 1] = sizes
    target = FP64 if dtype == torch.float64 else FP32
    link = together("exact", dtype, exact, scaled=False)
    found = factorized(a, [link], target=target).certificates
    assert [c.accepted for c in found] == [False, True, True, True, False]


def test_scales_of_a_batch() -> None:
    """Powers of two, also for float16 columns whose scales float16 could not hold; 1 for zeros."""
    a = torch.tensor([[[3.0, 0.0, 6e-8], [1.0, 0.0, 0.0]]], dtype=torch.float16)
    assert QRMatrices(a, QROptions(FP32, ENGINE)).scales().tolist() == [[0.25, 1.0, 2.0**23]]


@pytest.mark.parametrize("engine", ["cpu", "emulated"])
@pytest.mark.parametrize("accuracy", ["fp16", "fp32"])
@pytest.mark.parametrize("size", [1e-280, 1e-200, 1e-40, 1e200])
@pytest.mark.parametrize("shape", [(3, 3), (4, 1), (5, 4, 3)])
def test_float64_that_does_not_fit_float32(
    shape: tuple[int, ...], size: float, accuracy: str, engine: str
) -> None:
    """Rounded to float32, A would be zero or infinite, and zero is its own QR factorization."""
    a = size * torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    q, r = result = neula.qr(a, accuracy=accuracy, engine=engine)
    assert result.converged
    error = torch.linalg.matrix_norm(a / size - q.double() @ (r / size)) / torch.linalg.matrix_norm(a / size)
    assert float(error.max()) <= 12 * {"fp16": 2.0**-11, "fp32": 2.0**-24}[accuracy]


@pytest.mark.parametrize("engine", ["cpu", "emulated"])
@pytest.mark.parametrize("accuracy", ["fp16", "fp32", "fp64"])
@pytest.mark.filterwarnings("ignore::neula.AccuracyWarning")
def test_an_r_that_overflows_is_not_accepted(accuracy: Any, engine: str) -> None:
    """Columns of A are longer than any number, and so are those of R; others are none the worse."""
    largest = torch.finfo(torch.float64).max
    a = torch.rand(3, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    a[1] = largest
    result = neula.qr(a, accuracy=accuracy, engine=engine)
    assert result.accepted.tolist() == [True, False, True]
    assert result.R[[0, 2]].isfinite().all()


def test_an_r_that_overflows_is_not_accepted_where_nobody_looks() -> None:
    """Neither the asynchronous first links nor the factorization after them accept an R that overflows."""
    a = torch.rand(2, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    a[1] = torch.finfo(torch.float64).max
    begun = begin(a, QROptions(target=FP32, engine=ENGINE))
    assert begun is not None
    _, accepted, found = begun
    assert accepted.tolist() == [True, False]
    factors = factorize(a, "reduced", QROptions(target=FP32, engine=ENGINE), found)
    assert factors.accepted.tolist() == [True, False]
    assert not factors.attempts[-1].accepted


@pytest.mark.parametrize("count", [2, 3, 4])
def test_two_large_ones_side_by_side(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """First links of two at a time; what they do not solve goes on by itself, and NaN lets none begin."""
    pairs, original = [], Engine.concurrently

    def counted(self: Engine, launch: Callable[[], None], other: Callable[[], object]) -> object:
        pairs.append(1)
        return original(self, launch, other)

    monkeypatch.setattr(Engine, "concurrently", counted)
    engine = OneByOne("cpu")
    a = normal(count, 90, 40)
    a[1, :, 7] = a[1, :, 2]
    together = neula.qr(a, engine=engine)
    assert len(pairs) == count // 2
    assert together.converged
    for i in range(count):
        alone = neula.qr(a[i], engine=engine)
        assert torch.equal(alone.Q, together.Q[i])
        assert torch.equal(alone.R, together.R[i])
    a[0, 3, 4] = math.nan
    with pytest.warns(neula.AccuracyWarning):
        assert neula.qr(a, engine=engine).accepted.tolist() == [False] + [True] * (count - 1)
    assert len(pairs) == count // 2


def test_only_those_of_a_batch_that_the_core_leaves_are_reflected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others keep their factors."""
    a = normal(5, 60, 9).double()

    def without_one(a: torch.Tensor, g: np.ndarray, enough: float) -> Any:
        q, r, found = cholesky_qr_host.cholesky_qr(a, g, enough)
        if len(a) == 5:
            q[3], r[3], found[:, 3] = torch.nan, torch.nan, np.nan
        return q, r, found

    monkeypatch.setattr(ways, "cholesky_qr", without_one)
    found, alone = neula.qr(a), neula.qr(a[2])
    assert bool(found.accepted.all())
    torch.testing.assert_close(found.Q @ found.R, a, rtol=0, atol=1e-13)
    torch.testing.assert_close(
        found.Q.mT @ found.Q, torch.eye(9).double().expand(5, 9, 9), rtol=0, atol=1e-13
    )
    assert torch.equal(found.Q[2], alone.Q)
