"""Batches of small systems on a CPU: in a few passes, as far as that is certain; each by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import neula
from campaign.oracle import System
from neula.algorithms.lapack.batches import SlicedBatch
from neula.algorithms.lapack.doubled import SlicedMatrix, error_of
from neula.algorithms.lapack.squares import Squares, cholesky, lu
from neula.engines import FP32, FP64
from neula.engines.shipped import cpu_tuning
from neula.io.matrices import random_matrix
from neula.problems.systems.batch_by_lapack import batch_by_lapack
from neula.problems.systems.direct import solve_directly
from neula.problems.systems.library_factors import SingularMember
from neula.problems.systems.problem import Systems, SystemsSolutions

from .test_direct import OPTIONS, U64

pytestmark = pytest.mark.usefixtures("by_kernels_or_numpy")

CONDITIONS = (1e0, 1e2, 1e4)


def batch(n: int, conditions: tuple[float, ...] = CONDITIONS, k: int = 2) -> tuple[np.ndarray, np.ndarray]:
    a = [random_matrix("geometric", n, n, cond=cond, seed=seed) for seed, cond in enumerate(conditions)]
    return torch.stack(a).numpy(), np.random.default_rng(1).standard_normal((len(a), n, k))


def accepted_of(found: SystemsSolutions) -> torch.Tensor:
    return OPTIONS.limits(found.x.shape[1]).accept(found.evidence)


def systems(a: np.ndarray, b: np.ndarray, **asked: object) -> Systems:
    return Systems(torch.from_numpy(a), torch.from_numpy(b), replace(OPTIONS, **asked))


@pytest.mark.parametrize("n", [1, 3, 8, 9, 33, 70])
def test_forward_errors_are_bounds(n: int) -> None:
    a, b = batch(n)
    answer = batch_by_lapack(systems(a, b))
    assert answer is not None
    found = answer.values
    assert accepted_of(found).all()
    for i in range(len(a)):
        errors = torch.from_numpy(System(a[i], b[i]).errors(found.x[i].numpy(), n))
        assert (errors <= found.forward_error[i]).all()
    if n <= cpu_tuning(("fp32", "fp64")).doubled_order:
        assert (found.forward_error <= 2 * U64).all()


def test_the_ill_conditioned_are_refined_to_the_end() -> None:
    a, b = batch(8, (1e1, 1e8, 1e2))
    found = batch_by_lapack(systems(a, b)).values
    assert accepted_of(found).all()
    for i in range(3):
        errors = torch.from_numpy(System(a[i], b[i]).errors(found.x[i].numpy(), 8))
        assert (errors <= found.forward_error[i]).all()
        assert (found.forward_error[i] <= 2 * U64).all()


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
    assert np.array_equal(result.forward_errors[same], easy.forward_errors[same])


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("columns", [0, 4])
def test_units_are_no_reason_to_pass_on(rows: int, columns: int) -> None:
    """The backward error is that of equations in any units."""
    a, b = batch(7, (1e0, 1e1, 1e2), 2)
    units = 10.0 ** np.linspace(0, rows, 7)[:, None]
    a[1:], b[1:] = units * a[1:] * 10.0 ** np.linspace(-columns, 0, 7), units * b[1:]
    answer = batch_by_lapack(systems(a, b))
    assert answer is not None
    found = answer.values
    assert accepted_of(found).all()
    for i in range(len(a)):
        x = found.x[i].numpy()
        assert (torch.from_numpy(System(a[i], b[i]).errors(x, 7)) <= found.forward_error[i]).all()
        scaled = np.abs(b[i] / units - (a[i] / units) @ x).max(0)
        scaled /= np.abs(a[i] / units).sum(1).max() * np.abs(x).max(0) + np.abs(b[i] / units).max(0)
        assert (scaled <= found.backward_error[i].item() + 8 * U64).all()


def test_what_is_passed_on() -> None:
    """Only what needs it."""
    a, b = batch(12, (1e1, 1e13, 1e2), 1)
    answer = batch_by_lapack(systems(a, b))
    assert answer is not None
    assert accepted_of(answer.values).tolist() == [True, False, True]
    found = solve_directly(systems(a, b)).values
    assert accepted_of(found).all()
    errors = System(a[1], b[1]).errors(found.x[1].numpy(), 12)
    assert (torch.from_numpy(errors) <= found.forward_error[1]).all()


@pytest.mark.parametrize("n", [5, 20])
def test_the_singular_one_is_named(n: int) -> None:
    a, b = batch(n, (1.0,) * 4, 1)
    a[1] *= 1e-300
    a[2, :, 3] = 0
    with pytest.raises(SingularMember) as caught:
        solve_directly(systems(a, b))
    assert caught.value.place == 2


def test_nan_is_refused_where_it_is() -> None:
    a, b = batch(6, (1.0,) * 4, 1)
    a[2, 1, 1] = np.nan
    with pytest.raises(ValueError, match=r"A\[2, 1, 1\] is nan"):
        neula.solve(a, b)


@pytest.mark.parametrize("zero", ["b", "column"])
def test_zero_right_hand_sides(zero: str) -> None:
    a, b = batch(5, (1.0, 10.0, 2.0), 2)
    b[1, :, 0 if zero == "column" else slice(None)] = 0
    result = neula.solve(a, b)
    assert result.converged
    assert not result.x[1, :, 0].any()
    assert (result.forward_errors[1, 0] == 0).all()


@pytest.mark.parametrize("layout", ["columns", "strided", "one for all"])
def test_views(layout: str) -> None:
    a, b = batch(11, (1.0, 10.0, 100.0), 1)
    expected = neula.solve(a, b).x
    if layout == "columns":
        a = np.ascontiguousarray(a.transpose(0, 2, 1)).transpose(0, 2, 1)
    elif layout == "strided":
        wide = np.zeros((6, 22, 33))
        wide[::2, ::2, ::3] = a
        a = wide[::2, ::2, ::3]
    else:
        b = b[:1]
        expected = np.concatenate([expected[:1], neula.solve(a[1:], b).x])
    assert np.allclose(neula.solve(a, b).x, expected, rtol=4 * U64, atol=1e-300)


def test_more_than_fit_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = batch(9, (1.0, 10.0, 100.0, 3.0, 4.0), 1)
    whole = neula.solve(a, b)
    monkeypatch.setattr("neula.problems.systems.batch_by_lapack.ELEMENTS", 2 * 81)
    parts = neula.solve(a, b)
    assert np.allclose(parts.x, whole.x, rtol=U64, atol=0)
    assert parts.converged


@pytest.mark.parametrize("target", [FP32, FP64])
@pytest.mark.parametrize("n", [6, 24])
def test_conditions(n: int, target: object) -> None:
    a, b = batch(n, (1e0, 1e1, 1e3, 1e5), 1)
    doubled = target is FP64
    found = Squares(a, lu, slices=3 * doubled, updates=doubled).refined(b, np.float64)
    true = np.linalg.cond(a / np.linalg.norm(a, axis=1, keepdims=True))
    assert (found.condition[:, 0] >= true / 10).all()
    assert (found.condition[:, 0] <= 10 * true).all()


def test_growth() -> None:
    """Wilkinson's matrix, whose elements double in each step."""
    n = 10
    a = np.eye(n) - np.tril(np.ones((n, n)), -1)
    a[:, -1] = 1
    assert Squares(np.stack([a.T, np.eye(n)]), lu, slices=3, updates=True).growth.tolist() == [
        2.0**9,
        1.0,
    ]


def test_not_definite() -> None:
    a = np.stack([np.eye(3), np.diag([1.0, -1.0, 1.0])])
    found = Squares(a, cholesky, slices=3, updates=True).refined(np.ones((2, 3, 1)), np.float64)
    assert found.good[:, 0].tolist() == [True, False]


@pytest.mark.parametrize("slices", [2, 3])
def test_slices_of_a_batch_are_those_of_each(slices: int) -> None:
    rng = np.random.default_rng(0)
    a, x = (
        rng.standard_normal((3, 13, 7)) * 10.0 ** np.arange(3)[:, None, None],
        rng.standard_normal((3, 7, 2)),
    )
    b = a @ x
    largest = np.abs(a).max((1, 2))
    together = SlicedBatch(a, largest, np.empty((slices, *a.shape)))
    high, low = together.residual(x, b)
    gradient = together.gradient(high, low)
    small = error_of((13, 7), slices) * float(np.linalg.norm(x))
    for i in range(3):
        one = SlicedMatrix(a[i], float(largest[i]))
        for j in range(2):
            exact = one.residual(x[i, :, j], np.zeros(7), b[i, :, j])
            assert np.allclose(high[i, :, j], exact[0], rtol=1e-12, atol=small * largest[i])
            assert np.allclose(
                gradient[i, :, j], one.gradient(*exact), rtol=1e-10, atol=small * largest[i] ** 2
            )
