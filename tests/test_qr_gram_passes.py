"""QR by Cholesky QR in double precision, as a GPU that is fast in it has small matrices factorized."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import neula
from neula.engines import CpuEngine, EmulatedEngine
from neula.engines.shipped import cuda_tuning
from neula.io.matrices import random_matrix

TWICE, SHIFTED = "cholesky-qr fp64, twice", "shifted cholesky-qr fp64"


class OnAGPU(CpuEngine):
    """A CPU that takes the steps of a GPU."""

    tuning = replace(cuda_tuning((9, 0), replayed_bytes=1 << 22, corrected=False), by_host=0)


class Emulated(EmulatedEngine):
    """The same in emulated half precision."""

    tuning = OnAGPU.tuning


def check(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor, u: float) -> None:
    """Residual and orthogonality of reflections, and R upper triangular."""
    (m, n), norm, q, r = a.shape, torch.linalg.matrix_norm, q.double(), r.double()
    assert norm(a.double() - q @ r) <= 4 * (m**0.5 + n**0.5) * u * norm(a.double())
    assert norm(q.T @ q - torch.eye(n)) <= 8 * n * u
    assert torch.equal(r, r.triu())


@pytest.mark.parametrize(("m", "n"), [(70, 70), (300, 40), (130, 129), (50, 3)])
@pytest.mark.parametrize("condition", [1.0, 1e3, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("by_columns", [False, True])
def test_two_passes(m: int, n: int, condition: float, dtype: torch.dtype, by_columns: bool) -> None:
    a = random_matrix("geometric", m, n, cond=condition).to(dtype)
    a = a.T.contiguous().T if by_columns else a
    before = a.clone()
    found = neula.qr(a, engine=OnAGPU("cpu"))
    assert found.converged
    assert [attempt.method for attempt in found.attempts] == [TWICE]
    assert (found.Q.dtype, found.R.dtype) == (dtype, dtype)
    assert torch.equal(a, before)
    check(a, found.Q, found.R, torch.finfo(dtype).eps / 2)


@pytest.mark.parametrize("condition", [1e10, 1e12])
@pytest.mark.parametrize(("m", "n"), [(300, 40), (200, 200)])
@pytest.mark.parametrize("replayed", [0, 22])
def test_three_passes_with_a_shift(
    m: int, n: int, condition: float, replayed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blind, or after a look at the first factor, for matrices that are not played back."""
    monkeypatch.setattr(OnAGPU, "tuning", replace(OnAGPU.tuning, replayed_bytes=1 << replayed))
    a = random_matrix("geometric", m, n, cond=condition)
    found = neula.qr(a, engine=OnAGPU("cpu"))
    assert found.converged
    tried = [attempt.method for attempt in found.attempts]
    assert tried == ([TWICE, SHIFTED] if replayed else [SHIFTED])
    check(a, found.Q, found.R, 2.0**-53)


def test_columns_in_any_units() -> None:
    units = 2.0 ** torch.linspace(-60, 60, 30, dtype=torch.float64).round()
    a = random_matrix("normal", 90, 30) * units
    found = neula.qr(a, engine=OnAGPU("cpu"))
    assert [attempt.method for attempt in found.attempts] == [TWICE]
    check(a / units, found.Q, found.R / units, 2.0**-53)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_has_not_full_rank_goes_on(dtype: torch.dtype) -> None:
    a = random_matrix("normal", 80, 30).to(dtype)
    for deficient in (torch.cat([a, a[:, :2]], 1), a * (torch.arange(30) != 7)):
        found = neula.qr(deficient, engine=OnAGPU("cpu"))
        assert found.converged
        assert found.attempts[0].method == TWICE
        assert found.attempts[-1].accepted
        check(deficient, found.Q, found.R, 4 * torch.finfo(dtype).eps)


def test_one_pass_does_for_half_precision() -> None:
    a = random_matrix("geometric", 200, 60, cond=1e5)
    found = neula.qr(a.float(), accuracy="fp16", engine=Emulated("cpu"))
    assert found.converged
    assert [attempt.method for attempt in found.attempts] == ["cholesky-qr fp64"]
    assert torch.linalg.matrix_norm(found.Q.double().T @ found.Q.double() - torch.eye(60)) <= 2.0**-11


@pytest.mark.parametrize("condition", [1e1, 1e6, 1e20])
def test_after_panels_that_have_lost_too_much(condition: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger matrices in float32 begin with panels; nearly dependent columns are left to a second pass."""
    monkeypatch.setattr(OnAGPU, "tuning", replace(OnAGPU.tuning, gram_passes=1 << 24))
    a = random_matrix("geometric", 300, 100, cond=condition).float()
    found = neula.qr(a, engine=OnAGPU("cpu"))
    tried = [attempt.method for attempt in found.attempts]
    assert found.converged
    if condition < 1e2:
        assert tried == ["rgsqrf fp32"]
    else:
        assert tried[-1] == (TWICE if condition < 1e10 else "rgsqrf fp32 + reortho")
    check(a, found.Q, found.R, 4 * 2.0**-24)
