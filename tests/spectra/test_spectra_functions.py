"""eigh, svd and powers as functions: arrays in and out, shapes, errors, batches, warnings and progress."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.matrices import definite, normal_array

import neula
from neula.engines import EmulatedEngine
from neula.io.sources import row_blocks
from neula.pipeline.chain import Rule
from neula.problems.spectra import links
from neula.problems.spectra.links import chain
from neula.problems.spectra.problem import SpectralOptions

A = np.array([[4.0, 1.0, 0.0], [1.0, 3.0, 1.0], [0.0, 1.0, 2.0]])
EPS = 2.0**-52
EXACT = np.array([3 - 3**0.5, 3.0, 3 + 3**0.5])
FUNCTIONS = {
    "eigh": lambda a, **options: neula.eigh(a, **options),
    "svd": lambda a, **options: neula.svd(a, **options),
    "power": lambda a, **options: neula.fractional_matrix_power(a, 0.3, **options),
}
EVERY = pytest.mark.parametrize("function", FUNCTIONS)


def arrays(result: Any) -> tuple[Any, ...]:
    return (result.X,) if hasattr(result, "X") else tuple(result)


# --- arrays ---


@EVERY
def test_arrays_of_any_library(function: str) -> None:
    expected = arrays(FUNCTIONS[function](A))
    for given in (
        torch.from_numpy(A),
        np.asfortranarray(A),
        np.repeat(A, 2, 1)[:, ::2],
        A[::-1, ::-1][::-1, ::-1],
    ):
        before = np.asarray(given).copy()
        result = FUNCTIONS[function](given)
        for found, x in zip(arrays(result), expected, strict=True):
            assert isinstance(found, type(given))
            np.testing.assert_allclose(np.abs(np.asarray(found)), np.abs(x), atol=1e-14)
        assert np.array_equal(before, given)
        assert isinstance(getattr(result, "errors", None), type(given))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.complex128, np.complex64])
@pytest.mark.parametrize("power", [0.5, -0.5, 0.3, -1, 0])
@pytest.mark.parametrize("upper", [False, True])
def test_powers_of_shapes_that_were_seen_before(dtype: Any, power: float, upper: bool) -> None:
    """A plan computes them, within the bound on their errors; what it does not accept is the chain's."""
    rng = np.random.default_rng(7)
    a = rng.standard_normal((9, 9)) + 1j * rng.standard_normal((9, 9)) * (np.dtype(dtype).kind == "c")
    a = (1e3 * (a @ a.conj().T + np.eye(9))).astype(np.promote_types(dtype, np.float64))
    given = np.where(np.tri(9, k=-1) > 0 if upper else np.tri(9, k=-1).T > 0, np.nan, a.astype(dtype))
    whole = a.astype(dtype).astype(a.dtype)
    whole = np.triu(whole) if upper else np.tril(whole)
    whole = whole + whole.conj().T - np.diag(whole.diagonal().real)
    w, v = np.linalg.eigh(whole)
    expected = (v * w**power) @ v.conj().T
    for _ in range(3):
        result = neula.fractional_matrix_power(given.astype(dtype), power, upper=upper)
        size = np.linalg.norm(result.X - expected) / np.linalg.norm(expected)
        assert result.converged
        assert size <= result.error + 1e-14 <= 0.01
        assert result.X.dtype == dtype
        assert result.errors == result.error
        assert result.accepted.shape == ()
        assert np.allclose(result.eigenvalues, w, rtol=1e-4 if result.accuracy == "fp32" else 1e-12)
    assert isinstance(neula.fractional_matrix_power(torch.eye(9), power, upper=upper).residuals, torch.Tensor)
    with pytest.raises(np.linalg.LinAlgError, match="its smallest eigenvalue is"):
        neula.fractional_matrix_power(-given.astype(dtype), 0.5, upper=upper)


@EVERY
def test_views_of_torch(function: str) -> None:
    a = torch.from_numpy(A + 1j * np.triu(A, 1) - 1j * np.tril(A, -1))
    expected = arrays(FUNCTIONS[function](a))
    for given in (a.conj().resolve_conj().conj(), a.mT.contiguous().mT, a.mH.contiguous().mH):
        for found, x in zip(arrays(FUNCTIONS[function](given)), expected, strict=True):
            torch.testing.assert_close(found.abs(), x.abs())


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128])
@pytest.mark.parametrize("function", ["eigh", "svd"])
def test_views_of_shapes_that_were_seen_before(
    function: str, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One plan computes all layouts, also beyond what other functions copy."""
    rng, n = np.random.default_rng(3), 190
    a = rng.standard_normal((n, n)) + 1j * rng.standard_normal((n, n)) * (np.dtype(dtype).kind == "c")
    a = (a + a.conj().T if np.dtype(dtype).kind == "c" else (a + a.T).real).astype(dtype)
    views = [np.asfortranarray(a), np.repeat(a, 2, 1)[:, ::2], a[::-1, ::-1][::-1, ::-1]]
    views += [torch.from_numpy(np.asfortranarray(a)), torch.from_numpy(a.conj()).conj()]
    for x in (a, torch.from_numpy(a)):
        for _ in range(2):
            expected = FUNCTIONS[function](x)
    chained = f"neula.problems.spectra.{function}.decompose"
    monkeypatch.setattr(chained, lambda *_, **__: pytest.fail("no plan"))
    for x in views:
        found = FUNCTIONS[function](x)
        for i, y in enumerate(arrays(found)):
            assert type(y) is type(x)
            assert np.array_equal(np.asarray(y), np.asarray(arrays(expected)[i]))
        assert np.array_equal(np.asarray(found.errors), np.asarray(expected.errors))


@EVERY
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "int32", "bool"])
def test_dtypes(function: str, dtype: str) -> None:
    a = torch.from_numpy(A if dtype != "bool" else np.eye(3)).to(getattr(torch, dtype))
    result = FUNCTIONS[function](a)
    assert result.converged
    kept = a.dtype if a.is_floating_point() or a.is_complex() else torch.float64
    for x in arrays(result):
        assert x.dtype == (kept if x.ndim == 2 else kept.to_real())
    assert result.errors.dtype == torch.float64
    if function == "eigh" and dtype != "bool":
        eps = torch.finfo(kept).eps
        assert bool(((result.eigenvalues - torch.from_numpy(EXACT)).abs() <= result.errors).all())
        assert float(result.errors.max()) <= 30 * 3 * eps * 5


@EVERY
def test_the_other_triangle_is_not_read(function: str) -> None:
    if function == "svd":
        return
    hidden = np.where(np.triu(np.ones((3, 3)), 1) > 0, np.nan, A)
    options: list[dict[str, Any]] = [{}, {"accuracy": "fp32"}, {"engine": "emulated"}]
    options += [{"subset_by_index": (0, 0)}, {"subset_by_value": (0.0, 9.0)}] * (function == "eigh")
    for given in options:
        for x, y, z in zip(
            arrays(FUNCTIONS[function](hidden, **given)),
            arrays(FUNCTIONS[function](A, **given)),
            arrays(FUNCTIONS[function](hidden.T, upper=True, **given)),
            strict=True,
        ):
            assert np.array_equal(x, y)
            assert np.array_equal(x, z)
    # The imaginary part of the diagonal is not read either.
    imaginary = A.astype(complex)
    imaginary.imag[range(3), range(3)] = [np.nan, 5.0, np.inf]
    np.testing.assert_allclose(neula.eigvalsh(imaginary), EXACT, rtol=1e-14)
    np.testing.assert_allclose(neula.sqrtm(imaginary).X, neula.sqrtm(A).X, rtol=1e-14, atol=1e-15)
    np.testing.assert_allclose(
        neula.eigvalsh(hidden, np.where(np.tri(3) > 0, np.eye(3), np.nan)), EXACT, rtol=1e-14
    )


# --- shapes ---


@pytest.mark.parametrize("shape", [(0, 0), (0, 3, 3), (2, 0, 0), (0, 2, 0, 0)])
def test_nothing(shape: tuple[int, ...]) -> None:
    nothing = np.zeros(shape)
    for options in ({}, {"eigvals_only": True}, {"B": nothing}):
        result = neula.eigh(nothing, **options)
        assert result.converged
        assert result.eigenvalues.shape == result.errors.shape == shape[:-1]
        assert "eigvals_only" in options or result.eigenvectors.shape == shape
        assert result.accepted.shape == shape[:-2]
    for p in (0.5, -0.5, 2.0):
        power = neula.fractional_matrix_power(nothing, p)
        assert (power.X.shape, power.error, power.converged) == (shape, 0.0, True)


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        (0, 3),
        (3, 0),
        (0, 0),
        (0, 3, 2),
        (2, 0, 3),
        (2, 3, 0),
        (1, 1),
        (5, 3),
        (3, 5),
        (2, 1, 4),
        (2, 2, 7, 3),
    ],
)
def test_shapes_are_those_of_numpy(shape: tuple[int, ...], full: bool) -> None:
    a = normal_array(*shape)
    result = neula.svd(a, full_matrices=full)
    expected = np.linalg.svd(a, full_matrices=full)
    assert result.converged
    assert [x.shape for x in result] == [x.shape for x in expected]
    u, s, vh = result
    k = min(shape[-2:])
    np.testing.assert_allclose(u[..., :k] * s[..., None, :] @ vh[..., :k, :], a, atol=1e-13)
    for q in (u, vh.swapaxes(-1, -2)):
        np.testing.assert_allclose(
            q.swapaxes(-1, -2) @ q,
            np.broadcast_to(np.eye(q.shape[-1]), (*shape[:-2], *[q.shape[-1]] * 2)),
            atol=1e-13,
        )
    np.testing.assert_allclose(neula.svdvals(a), expected[1], atol=1e-13)
    alone = neula.svd(a, compute_uv=False)
    assert (alone.U, alone.Vh) == (None, None)


def test_one_by_one() -> None:
    for value in (3.0, -3.0, 0.0, 5e-324, 1e308):
        w, v = result = neula.eigh([[value]])
        assert (float(w[0]), abs(float(v[0, 0]))) == (value, 1.0)
        assert result.errors[0] <= max(8 * EPS * abs(value), 5e-324)
        assert (result.gaps[0], result.vector_errors[0]) == (math.inf, 0.0)
    assert neula.sqrtm([[9.0]]).X.tolist() == [[3.0]]


def test_batches_with_one_matrix_b() -> None:
    rng = np.random.default_rng(0)
    a = np.stack([[definite(rng, 4, 10.0) for _ in range(2)] for _ in range(3)])
    b = definite(rng, 4, 10.0)
    result = neula.eigh(a, b)
    assert result.eigenvectors.shape == (3, 2, 4, 4)
    for index in np.ndindex(3, 2):
        alone = neula.eigh(a[index], b)
        np.testing.assert_allclose(result.eigenvalues[index], alone.eigenvalues, rtol=1e-13)
    each = neula.eigh(a, np.stack([b, 4 * b]))
    np.testing.assert_allclose(each.eigenvalues[:, 1] * 4, result.eigenvalues[:, 1], rtol=1e-13)
    with pytest.raises(
        ValueError, match=r"B of shape \(2, 4, 4\) has more matrices than A of shape \(4, 4\)"
    ):
        neula.eigh(a[0, 0], np.stack([b, b]))


def test_lists_of_matrices() -> None:
    given = [torch.eye(2) * 4, torch.eye(3).double() * 9, torch.eye(2) * 25]
    found = neula.sqrtm(given)
    assert [x.X.diagonal().tolist() for x in found] == [[2, 2], [3, 3, 3], [5, 5]]
    assert [x.X.dtype for x in found] == [x.dtype for x in given]
    assert all(x.converged and x.error < 1e-6 for x in found)
    assert neula.inv_sqrt([]) == []
    with pytest.raises(np.linalg.LinAlgError, match=r"is not positive definite"):
        neula.inv_sqrt([torch.eye(2), -torch.eye(2)])


def test_parts_are_cut_out_of_the_whole() -> None:
    a = np.diag([1.0, 2.0, 2.0, 5.0, 7.0, 9.0])
    whole = neula.eigh(a)
    for first, last in [(0, 0), (1, 1), (1, 2), (2, 4), (5, 5), (0, 5)]:
        part = neula.eigh(a, subset_by_index=(first, last))
        np.testing.assert_allclose(part.eigenvalues, whole.eigenvalues[first : last + 1], rtol=1e-14)
        assert part.clusters[0] == 0
        half = {(1, 1): [0], (2, 4): [0]}.get((first, last), [])
        known = [i for i in range(len(part.gaps)) if i not in half]
        np.testing.assert_allclose(part.gaps[known], whole.gaps[first : last + 1][known], rtol=1e-14)
        assert np.flatnonzero(part.vector_errors == 1.0).tolist() == half  # a part of a cluster
    for interval, expected in [
        ((1.0, 2.0), [2, 2]),
        ((0.5, 1.0), [1]),
        ((5.0, 9.0), [7, 9]),
        ((3.0, 4.0), []),
    ]:
        found = neula.eigh(a, subset_by_value=interval)
        np.testing.assert_allclose(found.eigenvalues, expected, rtol=1e-14)
        assert found.eigenvectors.shape == (6, len(expected))
        assert found.errors.shape == found.clusters.shape == (len(expected),)
    for scale in (1e-310, 1e300):
        np.testing.assert_allclose(
            neula.eigvalsh(a * scale, subset_by_value=(1.5 * scale, 5.5 * scale)) / scale,
            [2, 2, 5],
            rtol=1e-12,
        )


# --- NaN, and what is wrong with the input ---


@EVERY
def test_nan_of_one_matrix(function: str) -> None:
    for value in (math.nan, math.inf):
        bad = A.copy()
        bad[2, 1] = value
        with pytest.raises(ValueError, match=rf"A\[2, 1\] is {value}: A must be finite"):
            FUNCTIONS[function](bad)
        if function == "svd":
            continue
        with pytest.raises(ValueError, match=rf"A\[1, 2\] is {value}"):
            FUNCTIONS[function](bad.T, upper=True)
        bad[0, 1] = math.nan  # is not read
        with pytest.raises(ValueError, match=rf"A\[2, 1\] is {value}"):
            FUNCTIONS[function](bad)


@EVERY
def test_nan_in_a_batch(function: str) -> None:
    batch = np.stack([A, A, 2 * A])
    batch[1, 2, 1] = np.nan
    with pytest.warns(
        neula.AccuracyWarning, match=r"for A\[1\]: 1 of 3 matrices rejected; .*: NaN or Inf in A"
    ):
        result = FUNCTIONS[function](batch)
    assert result.accepted.tolist() == [True, False, True]
    assert not result.converged
    for x in (*arrays(result), result.errors):
        assert np.isnan(x[1]).all()
        assert np.isfinite(x[[0, 2]]).all()
    for i in (0, 2):
        for x, y in zip(arrays(result), arrays(FUNCTIONS[function](batch[i])), strict=True):
            np.testing.assert_allclose(np.abs(x[i]), np.abs(y), atol=1e-14)
    if function == "power":
        assert result.error == result.residual == math.inf
    else:
        assert np.isnan(result.vector_errors[1]).all()
    with pytest.raises(ValueError, match=r"A\[1, 2, 1\] is nan"):
        FUNCTIONS[function](batch, strict=True)


B = np.eye(3)
WRONG: list[tuple[Any, type[Exception], str]] = [
    (lambda: neula.eigh(np.ones((2, 3))), ValueError, "A must be square, got 2 x 3; use neula.svd"),
    (lambda: neula.eigh(A, np.ones((2, 3))), ValueError, "B must be square"),
    (lambda: neula.eigh(np.ones(3)), ValueError, r"A must be a matrix \(or a batch"),
    (lambda: neula.svd(np.ones(3)), ValueError, r"A must be a matrix \(or a batch"),
    (lambda: neula.eigh(A, np.eye(2)), ValueError, "the same order, got 3 and 2"),
    (lambda: neula.eigh(A, subset_by_index=(1, 3)), ValueError, r"0 <= first <= last < 3, got \(1, 3\)"),
    (lambda: neula.eigh(A, subset_by_index=(2, 1)), ValueError, r"got \(2, 1\)"),
    (lambda: neula.eigh(A, subset_by_value=(1, 1)), ValueError, "the first below the second"),
    (lambda: neula.eigh(A[None], subset_by_value=(1, 2)), ValueError, "for a single matrix"),
    (lambda: neula.eigh(A, subset_by_value=(1, 2), subset_by_index=(0, 1)), ValueError, "not both"),
    (lambda: neula.eigh(A[None], B, subset_by_value=(1, 2)), ValueError, "for a single matrix"),
    (lambda: neula.eigh(A, subset_by_index=(1,)), ValueError, r"must be two indices, .*, got \(1,\)"),
    (lambda: neula.eigh(A, subset_by_index=(0, 0.5)), ValueError, "must be two indices"),
    (lambda: neula.eigh(A, subset_by_value=3), ValueError, "must be two numbers, .*, got 3"),
    (lambda: neula.eigh(A, certify="proof"), ValueError, "unknown certify 'proof'"),
    (lambda: neula.svd(A, certify="proof"), ValueError, "unknown certify 'proof'"),
    (lambda: neula.eigh(A, accuracy="fp65"), ValueError, "fp65"),
    (lambda: neula.eigh(A, accuracy=1e-18), ValueError, "accuracy 1e-18 is finer than can be certified"),
    (lambda: neula.svd(A.astype("float32"), accuracy="fp64"), ValueError, "finer than the dtype"),
    (lambda: neula.eigh(A, engine="abacus"), ValueError, "abacus"),
    (lambda: neula.fractional_matrix_power(A, math.inf), ValueError, "p must be a finite number"),
    (lambda: neula.fractional_matrix_power(A, "half"), TypeError, "p must be a finite number"),
    (lambda: neula.eigh(A, np.diag([1.0, np.nan, 1])), ValueError, r"B\[1, 1\] is not finite"),
    (lambda: neula.eigh(A, -B), np.linalg.LinAlgError, "B is not positive definite: leading minor 1"),
    (lambda: neula.eigh(A, np.zeros((3, 3))), np.linalg.LinAlgError, "B is not positive definite"),
    (lambda: neula.eigh([A, A], [B, -B]), np.linalg.LinAlgError, r"B\[1\] of the batch is not pos"),
    (lambda: neula.sqrtm(-A), np.linalg.LinAlgError, r"A is not positive semidefinite.* -4.73; add 9.46"),
    (lambda: neula.inv_sqrt(0 * A), np.linalg.LinAlgError, "smallest eigenvalue is 0$"),
    (lambda: neula.sqrtm([[A, -A]]), np.linalg.LinAlgError, r"A\[0, 1\] of the batch is not positive semi"),
    (lambda: neula.eigh(np.full((2, 2), 1.7e308)), OverflowError, "an eigenvalue does not fit torch.float64"),
    (lambda: neula.svd(np.full((2, 2), 1.7e308)), OverflowError, "a singular value does not fit"),
    (lambda: neula.eigh(np.full((2, 2), 6e4, "float16")), OverflowError, "does not fit torch.float16"),
    (lambda: neula.fractional_matrix_power(A * 1e300, 2), OverflowError, "does not fit torch.float64"),
    (lambda: neula.fractional_matrix_power(A * 1e-300, -2), OverflowError, "does not fit torch.float64"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), WRONG, ids=[x[2] for x in WRONG])
def test_wrong_input(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


# --- powers ---


@pytest.mark.parametrize("p", [0.5, -0.5, 0.25, -0.25, 0.3, 1.0, 2.0, 3.0, -1.0, 0.0])
def test_powers_of_a_known_matrix(p: float) -> None:
    """``A = 4 I - 3 P`` with a projector P onto one vector: ``A^p = 4^p I + (1 - 4^p) P``."""
    x = np.array([1.0, 2.0, 2.0])
    projector = np.outer(x, x) / 9
    a, exact = 4 * np.eye(3) - 3 * projector, 4.0**p * np.eye(3) + (1 - 4.0**p) * projector
    for scale in (1.0, 2.0**40, 2.0**-40):
        for dtype in ("float64", "float32", "float16", "complex128"):
            if dtype == "float16" and scale != 1:
                continue
            result = neula.fractional_matrix_power((a * scale).astype(dtype), p)
            assert result.converged
            off = np.linalg.norm(result.X.astype("complex128") - exact * scale**p) / np.linalg.norm(
                exact * scale**p
            )
            eps = float(np.finfo(dtype).eps)
            assert off <= result.error + (1 + abs(p)) * eps  # A is rounded
            assert result.error <= 100 * eps * 4 ** abs(p)
            assert np.array_equal(result.X, result.X.conj().T)


def test_powers_of_semidefinite_matrices() -> None:
    x = normal_array(6, 3)
    result = neula.sqrtm(x @ x.T)
    assert result.converged
    assert np.linalg.norm(result.X @ result.X - x @ x.T) <= 1e-13 * np.linalg.norm(x) ** 2
    assert 1e-9 < result.error < 1e-6  # of the order of sqrt(u)
    assert neula.sqrtm(np.zeros((2, 2))).error == 0
    assert (neula.eigvalsh(np.zeros((2, 2))) == 0).all()
    assert neula.fractional_matrix_power(np.zeros((2, 2)), 0.0).X.tolist() == np.eye(2).tolist()
    with pytest.warns(neula.IllConditionedWarning, match="no digit is guaranteed"):
        assert (
            neula.fractional_matrix_power(np.diag([1e-200, 2e-200]), 2.0).error == math.inf
        )  # it underflows


@pytest.mark.parametrize("scale", [1e-310, 1e-150, 1e150, 1e300])
def test_roots_of_small_and_large_matrices(scale: float) -> None:
    for p in (0.5, -0.5, 0.3):
        result = neula.fractional_matrix_power(A * scale, p)
        assert result.converged
        assert result.error < 1e-13
        values = EXACT**p * scale**p
        np.testing.assert_allclose(neula.eigvalsh(result.X), np.sort(values), rtol=1e-13)


# --- results, chains, fallback ---


def test_results_of_half_precision_include_its_rounding() -> None:
    a = torch.from_numpy(definite(np.random.default_rng(1), 8, 4.0))
    for dtype in (torch.float16, torch.bfloat16):
        given = a.to(dtype)
        w, v = result = neula.eigh(given)
        exact = torch.linalg.eigh(given.double())
        assert bool(((w.double() - exact[0]).abs() <= result.errors).all())
        sines = torch.linalg.vector_norm(v.double() - exact[1] * (exact[1] * v.double()).sum(0), dim=0)
        assert bool((sines <= result.vector_errors).all())
        assert float((sines / result.vector_errors).max()) > 0.05
        tiny = neula.eigh(given * 2.0**-20)
        assert bool(
            (
                (tiny.eigenvalues.double() - neula.eigvalsh((given * 2.0**-20).double())).abs() <= tiny.errors
            ).all()
        )


def test_accuracy_as_a_number() -> None:
    a = definite(np.random.default_rng(0), 20, 10.0)
    for accuracy, format in ((1e-2, "bf16"), (1e-4, "fp32"), (1e-12, "fp64")):
        result = neula.eigh(a, accuracy=accuracy)
        assert result.residual <= result.residual_bound <= accuracy
        if format != "bf16":
            assert result.accuracy == format
    assert neula.svd(a, accuracy=1e-4).accuracy == neula.sqrtm(a, accuracy=1e-4).accuracy == "fp32"


def tried(name: str, engine: Any = None, count: int = 1, n: int = 40, **options: Any) -> list[str]:
    target = neula.engines.FORMATS[name]
    engine = neula.engines.CpuEngine("cpu") if engine is None else engine
    return [link.label for link in chain(count, n, SpectralOptions(target, engine, **options))]


def test_what_is_tried() -> None:
    assert tried("fp64", symmetric=True) == ["eigh fp64"]
    assert tried("fp32", symmetric=True) == ["eigh fp32", "eigh fp64"]
    assert tried("fp16", symmetric=False) == ["svd fp32", "svd fp64"]
    assert tried("fp64", symmetric=True, part=(0, 4)) == ["some of eigh fp64", "eigh fp64"]
    assert tried("fp32", symmetric=True, part=(0, 4)) == ["some of eigh fp32", "eigh fp32", "eigh fp64"]
    for others in ({"part": (0, 30)}, {"part": (0, 4), "count": 2}):
        assert tried("fp64", symmetric=True, **others) == ["eigh fp64"]
    emulated = EmulatedEngine("cpu")
    assert tried("fp64", emulated, symmetric=False) == ["polar factor and eigh fp64", "svd fp64"]
    assert tried("fp64", emulated, symmetric=False, vectors=False) == ["svd fp64"]
    assert tried("fp32", emulated, symmetric=False)[0] == "polar factor and eigh fp32"


def test_a_link_that_fails_is_followed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first link returns a wrong vector for one matrix of the batch: only this one goes to the next."""
    a = np.stack([A, 2 * A]).astype("float32")
    exact, before = links.converged_eigh, []

    def spoilt(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w, v = exact(x)
        before.append(len(x))
        if x.dtype == torch.float32:
            v[-1, 0, 0] += 0.5
        return w, v

    monkeypatch.setattr(links, "converged_eigh", spoilt)
    result = neula.eigh(a)
    assert before == [2, 1]
    assert [(x.method, x.accepted) for x in result.attempts] == [("eigh fp32", False), ("eigh fp64", True)]
    assert result.converged
    np.testing.assert_allclose(result.eigenvalues[1], 2 * EXACT, rtol=1e-6)


@EVERY
def test_an_accuracy_that_is_missed(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = links.TABLE
    exact = links.converged_eigh

    def coarse(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w, v = exact(x)
        return w, v + 1e-9 * torch.arange(v[0].numel(), dtype=v.dtype).reshape(v[0].shape)

    monkeypatch.setattr(links, "converged_eigh", coarse)
    # Progress is not reported by plans, which call the library themselves.
    options = {"engine": "emulated" if function == "svd" else "cpu", "progress": lambda *_: None}
    symmetric = Rule("of eigenvalues", lambda case: case.options.symmetric)
    rows = [row for row in everything if row.factorization == "eigh {}"]
    library = [replace(row, when=(*row.when, symmetric)) for row in rows]
    polar = [row for row in everything if row.factorization.startswith("polar")]
    monkeypatch.setattr(links, "TABLE", polar + library)
    with pytest.warns(neula.AccuracyWarning, match=r"not certified to fp64 accuracy: residual"):
        result = FUNCTIONS[function](A, **options)
    assert not result.converged
    with pytest.raises(neula.AccuracyError):
        FUNCTIONS[function](A, **options, strict=True)
    if function == "eigh":
        assert 1e-10 < result.orthogonality < 1e-6
        assert bool((np.abs(result.eigenvalues - EXACT) <= result.errors).all())
        assert result.errors.max() < 1e-6
        assert bool((result.vector_errors > 1e-10).all())


def test_a_power_is_shown_once() -> None:
    shown = str(neula.sqrtm(2 * np.eye(3)))
    assert shown.count("(3, 3)") == 1
    assert "X = A**0.5" in shown


def test_values_alone() -> None:
    result = neula.eigh(A, eigvals_only=True)
    assert (result.evidence, result.eigenvectors) == ("a priori", None)
    assert (result.clusters, result.gaps, result.vector_errors) == (None, None, None)
    measured = neula.eigh(A, eigvals_only=True, certify="measured")
    assert (measured.evidence, measured.eigenvectors) == ("measured", None)
    assert (measured.errors < result.errors).all()
    values = neula.svd(A, compute_uv=False)
    vectors = neula.svd(A, compute_uv=False, certify="measured")
    assert (values.evidence, vectors.evidence) == ("a priori", "measured")
    for found in (
        result,
        measured,
        values,
        vectors,
    ):
        assert found.converged
        assert str(found)


def test_values_that_do_not_agree_with_trace_or_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    for change in ([1e-9, 0, 0], [1e-9, 0, -1e-9]):
        monkeypatch.setattr(
            links,
            "converged_eigvalsh",
            lambda x, c=change: torch.linalg.eigvalsh(x) + torch.tensor(c, dtype=x.dtype),
        )
        with pytest.warns(neula.AccuracyWarning):
            assert not neula.eigh(A, eigvals_only=True, progress=lambda *_: None).converged


def test_matrices_in_blocks() -> None:
    a = normal_array(40, 5)
    for options in ({"full_matrices": False}, {"compute_uv": False}):
        result = neula.svd(row_blocks(a), **options)
        assert result.converged
        assert (np.abs(result.s - np.linalg.svd(a)[1]) <= result.errors + 1e-15 * result.s[0]).all()
        assert (result.U is None) == ("compute_uv" in options)
    np.testing.assert_allclose(neula.svdvals(row_blocks(a)), np.linalg.svd(a)[1], rtol=1e-14)
    with pytest.raises(ValueError, match="pass full_matrices=False"):
        neula.svd(row_blocks(a))


@EVERY
def test_progress(function: str) -> None:
    steps: list[tuple[str, float]] = []
    FUNCTIONS[function](A, progress=lambda *step: steps.append(step))
    label = "svd fp64" if function == "svd" else "eigh fp64"
    assert steps == [(label, 0.0), (label, 1.0)]
    if function == "eigh":
        for options in ({"eigvals_only": True}, {"subset_by_index": (0, 0)}):
            steps.clear()
            neula.eigh(A, progress=lambda *step: steps.append(step), **options)
            assert [fraction for _, fraction in steps] == [0.0, 1.0]


def test_settings_and_warnings_are_left_alone() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for a in (A, A * 1e-310, A.astype("complex64"), np.zeros((4, 4)), np.ones((3, 3))):
            neula.eigh(a)
            neula.svd(a)
            neula.sqrtm(a)


def test_powers_that_single_precision_does_not_have() -> None:
    """The roots of a nearly singular Gram matrix are computed in double precision, and rounded once."""
    g = normal_array(30, 15, dtype=np.float32)
    a = (g @ g.T).astype(np.float32) + np.float32(1e-4) * np.eye(30, dtype=np.float32)
    result = neula.inv_sqrt(a)
    assert [x.method for x in result.attempts] == ["eigh fp32", "eigh fp64"]
    assert result.accuracy == "fp32"
    w, v = np.linalg.eigh((lambda low: low + np.tril(low, -1).T)(np.tril(a)).astype(float))
    exact = (v / w**0.5) @ v.T
    assert np.linalg.norm(result.X - exact) <= 1e-6 * np.linalg.norm(exact)
    assert result.error <= 1e-6


@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (40, 90)])
def test_vectors_are_the_same_whenever_they_are_computed(shape: tuple[int, int], dtype: type) -> None:
    """Signs and phases of a first call, of repeated ones, of views and of a batch."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal(shape).astype(dtype)
    if dtype is np.complex128:
        a += 1j * rng.standard_normal(shape)
    first, *others = (neula.svd(x, full_matrices=False) for x in (a, a, a, np.asfortranarray(a), a[None]))
    for other in others:
        for x, y in zip(first, other, strict=True):
            assert np.allclose(x, y, atol=100 * np.finfo(dtype).eps)
    a = a @ a.conj().T
    first, *others = (neula.eigh(x, upper=True) for x in (a, a, a, a.copy("F"), a[None]))
    assert all(
        np.allclose(first.eigenvectors, x.eigenvectors, atol=1e4 * np.finfo(dtype).eps) for x in others
    )
