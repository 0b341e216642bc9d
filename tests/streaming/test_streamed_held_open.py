"""Fits that are held open, beside those of all rows at once."""

from __future__ import annotations

import errno
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.campaign.matrices import KINDS, right_hand_side
from tests.campaign.oracle import LeastSquares

import neula
from exact_solutions import error_of, least_squares
from neula.io import files
from neula.io.sources import row_blocks

U = 2.0**-53


def data(rng: np.random.Generator, m: int = 600, n: int = 8, k: int | None = None) -> tuple[Any, Any]:
    a = rng.standard_normal((m, n))
    x = rng.standard_normal((n, k) if k else n)
    return a, a @ x + 0.1 * rng.standard_normal((m, k) if k else m)


def of_all(a: Any, b: Any, **asked: Any) -> neula.LeastSquares:
    fit = neula.LeastSquares(a.shape[1])
    fit.update(a, b, **asked)
    return fit


def same(result: Any, a: Any, b: Any, tolerance: float = 1e-13) -> bool:
    """Whether x is that of NumPy, up to rounding errors of a well-conditioned problem."""
    x, *_ = np.linalg.lstsq(a, b, rcond=None)
    assert np.linalg.norm(result.x - x) <= result.forward_error * np.linalg.norm(x) + 1e-14
    return bool(np.linalg.norm(result.x - x) <= tolerance * np.linalg.norm(x))


@pytest.mark.parametrize("step", [1, 7, 100, 600])
@pytest.mark.parametrize("k", [None, 1, 3])
def test_rows_in_parts(rng: np.random.Generator, step: int, k: int | None) -> None:
    a, b = data(rng, k=k)
    fit = neula.LeastSquares(8)
    for start in range(0, len(a), step):
        fit.update(a[start : start + step], b[start : start + step])
    result = fit.solve()
    assert result.converged
    assert same(result, a, b)
    assert fit.rows == 600
    assert result.x.shape == ((8,) if k is None else (8, k))
    norms = np.linalg.norm(b - a @ result.x, axis=0)
    assert np.allclose(result.residual_norm, norms, rtol=1e-12)


def test_weights_and_damping(rng: np.random.Generator) -> None:
    a, b = data(rng)
    w = rng.random(600)
    fit = of_all(a[:300], b[:300], weights=w[:300])
    fit.update(a[300:], b[300:], weights=w[300:])
    result = fit.solve(damp=2.0)
    assert result.converged
    stacked, right = np.vstack([w[:, None] * a, 2 * np.eye(8)]), np.concatenate([w * b, np.zeros(8)])
    assert same(result, stacked, right)
    assert abs(result.residual_norm - np.linalg.norm(right - stacked @ result.x)) <= 1e-12
    few = of_all(a[:3], b[:3])
    with pytest.raises(ValueError, match="3 rows do not determine 8 columns"):
        few.solve()
    assert few.solve(damp=1.0).converged


def test_forgetting_is_a_weight(rng: np.random.Generator) -> None:
    a, b = data(rng)
    fit, weights = neula.LeastSquares(8), np.ones(600)
    fit.forget(0.5)
    for start in range(0, 600, 100):
        fit.forget(0.9)
        weights[:start] *= 0.9**0.5
        fit.update(a[start : start + 100], b[start : start + 100])
    result = fit.solve()
    assert result.converged
    assert same(result, weights[:, None] * a, weights * b)
    for factor in (0.0, -1.0, 1.5, np.nan):
        with pytest.raises(ValueError, match="factor must be above 0 and at most 1"):
            fit.forget(factor)


def test_rows_that_leave(rng: np.random.Generator) -> None:
    a, b = data(rng, k=2)
    fit = of_all(a, b)
    fit.downdate(a[:200], b[:200])
    fit.downdate(a[200:201], b[200:201])
    result = fit.solve()
    assert result.converged
    assert fit.rows == 399
    assert same(result, a[201:], b[201:])
    norms = np.linalg.norm(b[201:] - a[201:] @ result.x, axis=0)
    assert np.allclose(result.residual_norm, norms, rtol=1e-11)


def test_rows_that_may_not_leave(rng: np.random.Generator) -> None:
    """Removals that would be unstable are refused, and change nothing."""
    a, b = data(rng)
    fit = of_all(a, b)
    before = fit.solve().x
    large, few = 1e5 * a[:1], of_all(a[:8], b[:8])
    with pytest.raises(ValueError, match=r"these 1 rows hold nearly all .* would be left"):
        fit.downdate(large, b[:1])
    with pytest.raises(ValueError, match=r"these 1 rows hold nearly all .* would be left"):
        few.downdate(a[:1], b[:1])
    with pytest.raises(ValueError, match="larger residuals than all rows of the fit"):
        fit.downdate(a[:5], b[:5] + 1e3)
    with pytest.raises(ValueError, match="601 rows cannot be removed from a fit of 600"):
        fit.downdate(np.ones((601, 8)), np.ones(601))
    assert np.array_equal(fit.solve().x, before)
    assert fit.rows == 600


def test_merging(rng: np.random.Generator) -> None:
    a, b = data(rng)
    fit = neula.LeastSquares(8)
    for part in (slice(0, 5), slice(5, 400), slice(400, 600)):
        fit.merge(of_all(a[part], b[part]))
    fit.merge(neula.LeastSquares(8))
    result = fit.solve()
    assert result.converged
    assert same(result, a, b)
    for other in (neula.LeastSquares(9), neula.LeastSquares(8, scales=np.full(8, 100.0))):
        with pytest.raises(ValueError, match="has other columns or scales"):
            fit.merge(other)
    with pytest.raises(ValueError, match="b was a vector before, and is 2 right-hand sides now"):
        fit.merge(of_all(a, np.stack([b, b], 1)))


def test_sources(rng: np.random.Generator) -> None:
    """Read block by block; one that fails changes nothing."""
    a, b = data(rng)
    fit = of_all(a[:100], b[:100])
    fit.update(row_blocks(a[100:]), row_blocks(b[100:]))
    assert same(fit.solve(), a, b)
    a[550, 3] = np.nan
    with pytest.raises(ValueError, match=r"A\[450, 3\] is nan: A must be finite"):
        fit.update(row_blocks(a[100:]), b[100:])
    assert fit.rows == 600
    assert fit.solve().converged


@pytest.mark.parametrize("condition", [1e2, 1e5, 1e8, 1e14])
def test_evidence(rng: np.random.Generator, condition: float) -> None:
    """Errors are below their bounds, and nothing is certified of which nothing is known."""
    u, v = (np.linalg.qr(rng.standard_normal((size, 8)))[0] for size in (600, 8))
    a = u * np.geomspace(1, 1 / condition, 8) @ v.T
    x = rng.standard_normal(8)
    residual = rng.standard_normal(600)
    residual -= u @ (u.T @ residual)
    fit, b = neula.LeastSquares(8), a @ x + 1e-3 * residual
    for start in range(0, 600, 50):
        fit.update(a[start : start + 50], b[start : start + 50])
    if condition <= 1e5:
        result = fit.solve()
        assert result.converged
        # The data, too, are rounded.
        slack = 100 * U * condition**2
        assert np.linalg.norm(result.x - x) <= (result.forward_error + slack) * np.linalg.norm(x)
    else:
        with pytest.warns(neula.IllConditionedWarning):
            assert not fit.solve().converged
        with pytest.raises(neula.AccuracyError):
            fit.solve(strict=True)


def test_evidence_finds_what_is_wrong(rng: np.random.Generator) -> None:
    """An R that is not that of the rows is not accepted."""
    a, b = data(rng)
    fit = of_all(a, b)
    fit._sums.r[2, 5] += 1e-9
    with pytest.warns(neula.AccuracyWarning):
        result = fit.solve()
    assert result.backward_error > 1e-12
    fit = of_all(a, b)
    fit._sums.r[2, 8] += 1e-6  # in Q^T b
    with pytest.warns(neula.AccuracyWarning):
        assert not fit.solve().converged


def test_files(rng: np.random.Generator, tmp_path: Path) -> None:
    a, b = data(rng)
    path = tmp_path / "fit.npz"
    neula.LeastSquares(8).save(path)
    assert neula.LeastSquares.load(path).rows == 0
    fit = of_all(a[:400], b[:400])
    fit.save(path)
    again = neula.LeastSquares.load(path)
    assert torch.equal(again._scales, fit._scales)
    assert np.array_equal(again.solve().x, fit.solve().x)
    assert again.solve().converged
    again.update(a[400:], b[400:])
    assert same(again.solve(), a, b)
    assert repr(again) == "LeastSquares(8): 600 rows, engine cpu"
    np.savez(path, x=a)
    with pytest.raises(ValueError, match="holds no LeastSquares, but x"):
        neula.LeastSquares.load(path)
    assert np.array_equal(pickle.loads(pickle.dumps(fit)).solve().x, fit.solve().x)


def test_a_full_disk_loses_nothing(
    rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = data(rng)
    path = tmp_path / "fit.npz"
    of_all(a[:400], b[:400]).save(path)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.np, "savez", full)
    with pytest.raises(files.FileError, match="No space left on device"):
        of_all(a, b).save(path)
    assert neula.LeastSquares.load(path).rows == 400
    assert [x.name for x in tmp_path.iterdir()] == ["fit.npz"]


def test_bad_input(rng: np.random.Generator) -> None:
    fit = neula.LeastSquares(3)
    for a, b, w, message in (
        (np.ones((4, 2)), np.ones(4), None, r"A must have shape \(m, 3\), got \(4, 2\)"),
        (np.ones(3), np.ones(3), None, r"A must have shape \(m, 3\), got \(3,\)"),
        (np.ones((4, 3)), np.ones(5), None, r"A has 4 rows, and b has shape \(5,\)"),
        (np.ones((4, 3)), np.ones(4), np.ones(3), r"weights must have shape \(4,\)"),
        (np.full((4, 3), np.nan), np.ones(4), None, r"A\[0, 0\] is nan: A must be finite"),
        (np.ones((4, 3)), np.array([0, 0, np.inf, 0]), None, r"b\[2\] is inf"),
        (np.full((4, 3), 1e200), np.ones(4), None, r"A\[0, 0\] is 1e\+200: A must be at most"),
    ):
        with pytest.raises(ValueError, match=message):
            fit.update(a, b, weights=w)
    assert fit.rows == 0
    with pytest.raises(ValueError, match="0 rows do not determine 3 columns"):
        fit.solve()
    fit.update(np.ones((0, 3)), np.ones(0))
    assert fit.rows == 0
    for n in (0, -1, 2.5):
        with pytest.raises(ValueError, match="n must be a number of columns"):
            neula.LeastSquares(n)
    with pytest.raises(ValueError, match="scales must be 3 positive numbers"):
        neula.LeastSquares(3, scales=[1.0, 0.0, 1.0])
    with pytest.raises(ValueError, match="damp must be finite"):
        of_all(np.eye(3), np.ones(3)).solve(damp=-1.0)


pytestmark = pytest.mark.filterwarnings("ignore::neula.AccuracyWarning")


def checked(a: np.ndarray, b: np.ndarray, scales: np.ndarray | None = None) -> neula.LstsqResult:
    """The result of a fit of two blocks of rows; its forward errors hold unless there was a warning."""
    fit = neula.LeastSquares(a.shape[1], scales=scales)
    for rows in np.array_split(np.arange(len(a)), 2):
        fit.update(a[rows], b[rows])
    result = fit.solve()
    if result.converged and result.rank == a.shape[1]:
        errors = LeastSquares(a, b, rcond=0.0).errors(result.x, result.rank)
        assert (errors <= result.forward_errors).all(), (errors, result.forward_errors)
    return result


@pytest.mark.parametrize(
    "kind", ["normal", "uniform", "graded", "diagonal", "kahan", "hilbert", "vandermonde"]
)
@pytest.mark.parametrize("rhs", ["range", "nearly orthogonal", "orthogonal", "unit"])
def test_of_every_kind(kind: str, rhs: str) -> None:
    rng = np.random.default_rng(8)
    for m, n in ((2, 1), (4, 1), (6, 2), (8, 3)):
        a = KINDS[kind](rng, m, n)
        checked(a, right_hand_side(rng, rhs, a, 2))


@pytest.mark.parametrize("unit", [1e-300, 1e-200, 1e-130, 1e-60, 1e100])
@pytest.mark.parametrize("scaled", ["A", "b", "both", "one column"])
def test_units(scaled: str, unit: float, rng: np.random.Generator) -> None:
    """Units of all numbers together do not matter."""
    a, b = rng.standard_normal((9, 3)), rng.standard_normal((9, 2))
    if scaled in ("A", "both"):
        a *= unit
    if scaled in ("b", "both"):
        b *= unit
    if scaled == "one column":
        a[:, 1] *= unit
    result = checked(a, b)
    assert result.converged or scaled == "one column"
    if scaled == "one column":
        assert checked(a, b, scales=np.array([1.0, unit, 1.0])).converged


@pytest.mark.parametrize("power", [3, 6, 9, 12])
def test_columns_of_different_sizes(power: int, rng: np.random.Generator) -> None:
    """The rounding errors of products of slices are those of the largest column."""
    sizes = 10.0 ** np.array([power, -power, 0.0])
    a, b = rng.standard_normal((12, 3)) * sizes, rng.standard_normal((12, 1))
    assert not checked(a, b).converged
    assert checked(a, b, scales=sizes).converged


@pytest.mark.parametrize("power", [-1040, -1000, -500, 0, 390])
def test_sequences_at_every_scale(power: int, tmp_path: Path) -> None:
    """A sequence of operations gives the same numbers at each scale of A and b."""
    rng = np.random.default_rng(2)
    a, b = rng.integers(-9, 10, (12, 3)).astype(float), rng.integers(-9, 10, 12).astype(float)
    fit, other = neula.LeastSquares(3), neula.LeastSquares(3)
    fit.update(np.ldexp(a[:6], power), np.ldexp(b[:6], power))
    fit.forget(0.25)
    fit.update(np.ldexp(a[6:9], power), np.ldexp(b[6:9], power), weights=[1.0, 2.0, 0.5])
    other.update(np.ldexp(a[9:], power), np.ldexp(b[9:], power))
    fit.merge(other)
    fit.downdate(np.ldexp(a[9:10], power), np.ldexp(b[9:10], power))
    fit.save(tmp_path / "fit.npz")
    result = neula.LeastSquares.load(tmp_path / "fit.npz").solve()
    weights = np.array([0.5] * 6 + [1.0, 2.0, 0.5] + [0.0, 1.0, 1.0])
    assert result.converged
    truth = LeastSquares(a, b[:, None], weights=weights, rcond=0.0)
    assert (truth.errors(result.x[:, None], 3) <= result.forward_errors).all()
    norm = np.linalg.norm(weights * (b - a @ result.x))
    assert np.ldexp(result.residual_norm, -power) == pytest.approx(norm, rel=1e-12)


def test_rows_that_are_far_larger_than_those_before() -> None:
    fit = neula.LeastSquares(2)
    fit.update([[1e-300, 2e-300], [3e-300, 1e-300]], [1e-300, 5e-300])
    fit.update([[3.0, 1.0], [1.0, -1.0], [2.0, 5.0]], [7.0, 1.0, 9.0])
    fit.forget(1e-300)
    fit.forget(1e-300)
    result = fit.solve()
    assert result.converged
    assert np.allclose(result.x, [2.0, 1.0], rtol=1e-13)


def test_a_fit_of_dependent_columns_keeps_its_rows() -> None:
    fit = neula.LeastSquares(2)
    fit.update([[1.0, 0.0], [2.0, 0.0]], [1.0, 1.0])
    with pytest.raises(ValueError, match="begin a new fit with the other rows"):
        fit.downdate([[2.0, 0.0]], [1.0])
    assert fit.rows == 2
    assert np.allclose(fit.solve().x, [0.6, 0.0])


def test_right_hand_sides_that_larger_ones_have_hidden() -> None:
    """Beside 1 nothing is known of ``2^-200``, even where removing the rows leaves zeros."""
    for seed in (31, 76):
        rng = np.random.default_rng(seed)
        a, more = rng.standard_normal((4, 2)), rng.standard_normal((5, 2))
        fit = neula.LeastSquares(2)
        fit.update(a, a @ np.ones((2, 2)))
        fit.update(more, 2.0**-200 * rng.standard_normal((5, 2)))
        fit.downdate(a, a @ np.ones((2, 2)))
        with pytest.warns(neula.AccuracyWarning):
            result = fit.solve()
        assert (result.forward_errors >= 1).all()


@pytest.mark.parametrize("damp", [1e-3, 1e6])
def test_damping_leaves_the_digits_of_householder(damp: float, rng: np.random.Generator) -> None:
    """A step with sums that were kept would bring the square of the condition number of A."""
    n, u, v = 4, *(np.linalg.qr(rng.standard_normal((m, 4)))[0] for m in (30, 4))
    a = u * np.geomspace(1, 1e-6, n) @ v.T
    b = a @ rng.standard_normal(n)
    fit = neula.LeastSquares(n)
    fit.update(a, b)
    result = fit.solve(damp=damp)
    stacked, right = np.vstack([a, damp * np.eye(n)]), np.concatenate([b, np.zeros(n)])
    sizes, exact = np.linalg.norm(stacked, axis=0), least_squares(stacked, right)
    condition, x = np.linalg.cond(stacked / sizes), np.array([float(y) for y in exact])
    ratio = np.linalg.norm(right - stacked @ x) / np.linalg.norm(sizes * x)
    error = error_of(stacked, result.x, exact)
    assert error <= result.forward_error
    assert error <= 8 * n * U * condition * (1 + condition * ratio)


def test_dependent_columns(rng: np.random.Generator) -> None:
    """The residual includes the part of b in rows of R that belong to dependent columns."""
    a, b = rng.standard_normal((50, 4)), rng.standard_normal((50, 2))
    a[:, 3] = a[:, 1]
    result = checked(a, b)
    assert (result.rank, result.converged) == (3, True)
    assert np.allclose(result.x, np.linalg.lstsq(a, b, rcond=1e-12)[0], atol=1e-12)
    norms = np.linalg.norm(b - a @ result.x, axis=0)
    assert np.allclose(result.residual_norm, norms, rtol=50 * 4 * U)
    nothing = checked(np.zeros((3, 2)), np.zeros((3, 1)))
    assert (nothing.rank, nothing.converged, nothing.x.any()) == (0, True, False)
