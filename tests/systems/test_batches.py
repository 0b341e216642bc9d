"""Batches of systems on a CPU, with the compiled core and without: each is as good as is said of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import neula
from campaign.oracle import System
from neula.engines import CpuEngine
from neula.io.matrices import random_matrix
from neula.problems.systems.problem import Systems, SystemsSolutions
from neula.problems.systems.together import solve_together

from .test_direct import LIBRARY, OPTIONS, U64

pytestmark = pytest.mark.usefixtures("with_core_and_without")

CONDITIONS = (1e0, 1e2, 1e4)


def batch(n: int, conditions: tuple[float, ...] = CONDITIONS, k: int = 2) -> tuple[np.ndarray, np.ndarray]:
    a = [random_matrix("geometric", n, n, cond=cond, seed=seed) for seed, cond in enumerate(conditions)]
    return torch.stack(a).numpy(), np.random.default_rng(1).standard_normal((len(a), n, k))


def accepted_of(found: SystemsSolutions) -> torch.Tensor:
    return OPTIONS.limits(found.x.shape[1]).accept(found.evidence)


def systems(a: np.ndarray, b: np.ndarray, **asked: object) -> Systems:
    return Systems(torch.from_numpy(a), torch.from_numpy(b), replace(OPTIONS, **asked))


@pytest.mark.parametrize("n", [6, 20])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_narrow_ones_are_rounded_once(n: int, dtype: type[np.floating]) -> None:
    a, b = (x.astype(dtype) for x in batch(n, (1.0, 30.0)))
    result = neula.solve(a, b)
    assert result.converged
    assert result.x.dtype == dtype
    assert len(result.attempts) == 1
    u = np.finfo(dtype).eps / 2
    for i in range(len(a)):
        errors = System(a[i].astype(float), b[i].astype(float)).errors(result.x[i].astype(float), n)
        assert (errors <= result.forward_errors[i]).all()
    assert (result.forward_errors <= 1.2 * u).all()


@pytest.mark.parametrize("n", [7, 30])
@pytest.mark.parametrize("positive", [False, True])
def test_hard_members_are_left_to_others(n: int, positive: bool) -> None:
    """They change nothing for the rest, and are solved as well as they are alone."""
    a, b = batch(n, (1e1,) * 6, 1)
    a = a @ a.transpose(0, 2, 1) if positive else a
    easy = neula.solve(a, b, assume_a="pos" if positive else "gen")
    hard, scales = a.copy(), 10.0 ** np.linspace(-60, 60, n)
    hard[1] *= scales[:, None] * scales
    of_hard = b.copy()
    of_hard[1] *= scales[:, None]
    hard[3] *= 1e-200
    c = torch.linalg.qr(torch.from_numpy(a[4]))[0].numpy()
    hard[4] = (c * np.logspace(0, -11, n)) @ c.T
    hard[4] = (hard[4] + hard[4].T) / 2
    result = neula.solve(hard, of_hard, assume_a="pos" if positive else "gen")
    assert result.converged
    for i in range(len(a)):
        errors = System(hard[i], of_hard[i]).errors(result.x[i], n)
        assert (errors <= result.forward_errors[i]).all()
    same = [0, 2, 5]
    assert np.array_equal(result.x[same], easy.x[same])
    np.testing.assert_allclose(result.forward_errors[same], easy.forward_errors[same], rtol=1e-12)


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("columns", [0, 4])
def test_units_are_no_reason_to_pass_on(rows: int, columns: int) -> None:
    """The backward error is that of equations in any units."""
    a, b = batch(7, (1e0, 1e1, 1e2), 2)
    units = 10.0 ** np.linspace(0, rows, 7)[:, None]
    a[1:], b[1:] = units * a[1:] * 10.0 ** np.linspace(-columns, 0, 7), units * b[1:]
    found = solve_together(systems(a, b), label=LIBRARY).values
    assert accepted_of(found).all()
    for i in range(len(a)):
        x = found.x[i].numpy()
        assert (torch.from_numpy(System(a[i], b[i]).errors(x, 7)) <= found.forward_error[i]).all()
        scaled = np.abs(b[i] / units - (a[i] / units) @ x).max(0)
        scaled /= np.abs(a[i] / units).sum(1).max() * np.abs(x).max(0) + np.abs(b[i] / units).max(0)
        assert (scaled <= found.backward_error[i].item() + 8 * U64).all()


def test_more_than_fit_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = batch(9, (1.0, 10.0, 100.0, 3.0, 4.0), 1)
    whole = neula.solve(a, b)
    monkeypatch.setattr(CpuEngine, "tuning", replace(CpuEngine("cpu").tuning, chunk_elements=2 * 81))
    parts = neula.solve(a, b)
    assert np.allclose(parts.x, whole.x, rtol=U64, atol=0)
    assert parts.converged


@pytest.mark.parametrize("positive", [False, True])
def test_larger_ones_one_after_the_other(positive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as alone, and one that has no factors is named."""
    n, kind = 45, "pos" if positive else "gen"
    monkeypatch.setattr(CpuEngine, "tuning", replace(CpuEngine("cpu").tuning, core_order=n - 5))
    a, b = batch(n, (1e1, 1e3), 3)
    a = a @ a.transpose(0, 2, 1) if positive else a
    together = neula.solve(a, b, assume_a=kind)
    assert together.converged
    for i in range(2):
        alone = neula.solve(a[i], b[i], assume_a=kind)
        np.testing.assert_allclose(together.x[i], alone.x, rtol=0, atol=1e-8 * np.abs(alone.x).max())
    errors = System(a[1], b[1]).errors(together.x[1], n)
    assert (errors <= together.forward_errors[1]).all()
    a[1, 7] = a[1, :, 7] = 0
    with pytest.raises(np.linalg.LinAlgError, match=r"A\[1\] of the batch"):
        neula.solve(a, b, assume_a=kind)
