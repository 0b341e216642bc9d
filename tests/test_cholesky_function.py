"""neula.cholesky against definitions: residuals in float64, LAPACK's own ratio, and what must fail loudly."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from tests.campaign import ratios
from tests.matrices import complex_array, normal_array
from tests.test_chains import engine_of

import neula
from neula.engines import FORMATS, FP32, FP64, CpuEngine, Format
from neula.engines.formats import in_double
from neula.engines.shipped import cpu_tuning, cuda_tuning
from neula.engines.tuning import Tuning
from neula.problems.definite.links import chain
from neula.problems.definite.problem import CholeskyOptions

ENGINES = ["cpu", "emulated"]


SCALARS = pytest.mark.parametrize("scalars", ["real", "complex"])


def definite(n: int, *batch: int, seed: int = 0, scalars: str = "real") -> np.ndarray:
    g = (complex_array if scalars == "complex" else normal_array)(*batch, n, n + 8, seed=seed)
    return g @ g.conj().swapaxes(-1, -2) / (n + 8)


def scaled_residual(a: np.ndarray, lower: np.ndarray) -> float:
    """``||D (A - L L^H) D|| / ||D A D||`` with a diagonal of ones; in double, and nothing overflows."""
    d = 1 / np.sqrt(a.diagonal().real.astype(float))
    factor = lower.astype(np.result_type(lower, float)) * d[:, None]
    scaled = a * d[:, None] * d
    return float(np.linalg.norm(scaled - factor @ factor.conj().T) / np.linalg.norm(scaled))


@SCALARS
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("accuracy", ["fp16", "bf16", "fp32", "fp64"])
@pytest.mark.parametrize("n", [1, 2, 31, 150])
def test_accuracy(n: int, accuracy: str, engine: str, scalars: str) -> None:
    a = definite(n, scalars=scalars)
    found = neula.cholesky(a, accuracy=accuracy, engine=engine)
    assert found.converged
    assert (found.engine, found.accuracy) == (engine, accuracy)
    lower = found.L
    assert np.array_equal(lower, np.tril(lower))
    assert (lower.diagonal().imag == 0).all()
    assert (lower.diagonal().real > 0).all()
    assert ratios.pot01(a, lower, FORMATS[accuracy].u) < ratios.THRESHOLD
    # The estimate is of the true residual: by four vectors within a factor of ten, but once in ten thousand
    # cases. Three products with these are rounded.
    true = scaled_residual(a, lower)
    assert true <= found.bound
    assert found.residual <= 10 * true + 3 * math.sqrt(n) * FP64.u
    assert true <= 10 * found.residual + 3 * math.sqrt(n) * FP64.u


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("engine", ENGINES)
def test_dtypes(dtype: torch.dtype, engine: str) -> None:
    a = torch.from_numpy(definite(40, scalars="complex" if dtype.is_complex else "real")).to(dtype)
    found = neula.cholesky(a, engine=engine)
    assert found.converged
    assert (found.L.dtype, found.L.device) == (dtype, a.device)
    assert scaled_residual(in_double(a).numpy(), in_double(found.L).numpy()) <= found.bound


def test_integers_lists_and_views() -> None:
    assert neula.cholesky([[4, 2], [2, 5]]).L.tolist() == [[2.0, 0.0], [1.0, 2.0]]
    a = definite(20)
    wide = np.zeros((40, 60))
    wide[::2, ::3] = a
    for view in (wide[::2, ::3], a[::-1, ::-1].copy()[::-1, ::-1], np.asfortranarray(a)):
        before = view.copy()
        assert np.allclose(neula.cholesky(view).L, np.linalg.cholesky(a), rtol=0, atol=1e-14)
        assert np.array_equal(view, before)


@SCALARS
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("upper", [False, True])
def test_one_triangle_is_read(upper: bool, engine: str, scalars: str) -> None:
    """Of a complex matrix not the imaginary part of the diagonal: a measured residual had its rounding."""
    a = definite(40, scalars=scalars)
    triangle = np.triu if upper else np.tril
    garbage = np.where(triangle(np.ones(a.shape)) > 0, a, np.nan)
    if scalars == "complex":
        garbage += 1e3j * np.eye(40)
    found = neula.cholesky(garbage, upper=upper, engine=engine)
    assert found.converged
    expected = scipy.linalg.cholesky(a, lower=not upper)
    assert np.allclose(found.factor, expected, rtol=0, atol=1e-13)
    assert np.allclose(found.U if upper else found.L, expected, rtol=0, atol=1e-13)
    assert np.array_equal(found.L, found.U.conj().T)
    assert np.array_equal(found.factor, triangle(found.factor))


@pytest.mark.parametrize("wrap", [lambda x: x, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("shape", [(3, 3), (2, 3, 3), (260, 260)], ids=str)
def test_complex_upper_factors_of_repeated_calls(shape: tuple[int, ...], wrap: Callable[[Any], Any]) -> None:
    """Later calls return arrays in memory as well, no lazily conjugated views."""
    a = np.broadcast_to(definite(shape[-1], scalars="complex"), shape).copy()
    for _ in range(3):
        u = np.asarray(neula.cholesky(wrap(a), upper=True).U)
        assert np.abs(u.conj().swapaxes(-1, -2) @ u - a).max() <= shape[-1] * 2.0**-52 * np.abs(a).max()


@SCALARS
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("accuracy", ["fp32", "fp64"])
def test_batches(accuracy: str, engine: str, scalars: str) -> None:
    a = definite(37, 2, 3, scalars=scalars)
    found = neula.cholesky(a, accuracy=accuracy, engine=engine)
    assert found.converged
    assert found.residuals.shape == found.accepted.shape == (2, 3)
    assert found.residual == found.residuals.max()
    for index in np.ndindex(2, 3):
        assert scaled_residual(a[index], found.L[index]) <= found.bound


@pytest.mark.parametrize("shape", [(0, 0), (3, 0, 0), (0, 4, 4), (2, 0, 5, 5)])
@pytest.mark.parametrize("dtype", [float, complex])
def test_nothing_to_do(shape: tuple[int, ...], dtype: type) -> None:
    found = neula.cholesky(np.zeros(shape, dtype))
    assert (found.L.shape, found.L.dtype) == (shape, dtype)
    assert found.converged
    assert found.residuals.shape == shape[:-2]


@SCALARS
@pytest.mark.parametrize("engine", ENGINES)
def test_badly_scaled(engine: str, scalars: str) -> None:
    """Rows and columns from 1e-100 to 1e100: the same factors, scaled."""
    a, d = definite(30, scalars=scalars), np.logspace(-100, 100, 30)
    for accuracy in (None, "fp16", "fp32"):
        found = neula.cholesky(a * d[:, None] * d, engine=engine, accuracy=accuracy)
        assert found.converged
        assert scaled_residual(a, found.L / d[:, None]) <= found.bound
    for scale in (1e-300, 1e290):
        assert neula.cholesky(a * scale, engine=engine).converged
    narrow = np.complex64 if scalars == "complex" else np.float32
    assert neula.cholesky((1e-37 * a).astype(narrow), engine=engine).converged


@pytest.mark.parametrize("engine", ENGINES)
def test_ill_conditioned(engine: str) -> None:
    """Condition 1e10 is too much for float32, in which the factorization breaks down: double follows."""
    n = 12
    q = np.linalg.qr(np.random.default_rng(1).standard_normal((n, n)))[0]
    a = (q * np.logspace(0, -10, n)) @ q.T
    found = neula.cholesky((a + a.T) / 2, accuracy="fp32", engine=engine)
    assert found.converged
    assert found.attempts[-1].method == "cholesky fp64"
    hilbert = scipy.linalg.hilbert(10)
    assert neula.cholesky(hilbert, engine=engine).converged


@SCALARS
@pytest.mark.parametrize("engine", ENGINES)
def test_not_positive_definite(engine: str, scalars: str) -> None:
    a, five = definite(50, scalars=scalars), definite(5, scalars=scalars)
    a[20, 20] = -1.0
    # By the tenth column nothing is left of a matrix of rank 9 but a negative pivot.
    deficient = np.pad(definite(9, scalars=scalars), (0, 1))
    unread = -np.eye(3, dtype=a.dtype)
    unread[0, 2] = np.nan
    batch = np.stack([five, five, -np.eye(5)]).reshape(1, 3, 5, 5)
    for given, accuracy, message in (
        (a, None, r"A is not positive definite: .* order 21 is"),
        (deficient, "fp32", "order 10 is not positive"),
        (unread, None, "order 1 is"),
        (1j * np.eye(2), None, "not positive definite"),  # of a Hermitian matrix the diagonal is real
        (batch, "fp32", r"A\[0, 2\] of the batch is not .* order 1 "),
    ):
        with pytest.raises(np.linalg.LinAlgError, match=message):
            neula.cholesky(given, engine=engine, accuracy=accuracy)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@SCALARS
def test_nan_and_infinity(bad: float, engine: str, scalars: str) -> None:
    for i, j in ((3, 3), (7, 2), (11, 0)):
        a = definite(12, scalars=scalars)
        a[i, j] = bad
        with pytest.raises(ValueError, match=rf"A\[{i}, {j}\]"):
            neula.cholesky(a, engine=engine)
        with pytest.raises(ValueError, match=rf"A\[1, {j}, {i}\]"):
            neula.cholesky(np.stack([definite(12), a.T]), upper=True, engine=engine, accuracy="fp32")


def test_messages() -> None:
    with pytest.raises(ValueError, match="A must be square, got 3 x 2"):
        neula.cholesky(np.ones((3, 2)))
    with pytest.raises(ValueError, match="1 dimension"):
        neula.cholesky(np.ones(3))
    with pytest.raises(ValueError, match="finer than"):
        neula.cholesky(np.eye(2, dtype=np.float32), accuracy="fp64")


def test_an_accuracy_that_is_missed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neula.problems.definite.problem.cholesky_bound", lambda target, n: 1e-30)
    a = definite(20, 2)
    with pytest.warns(neula.AccuracyWarning, match=r"not certified to fp64 accuracy for A\[0\], A\[1\]"):
        found = neula.cholesky(a)
    assert not found.converged
    assert not found.accepted.any()
    with pytest.raises(neula.AccuracyError):
        neula.cholesky(a, strict=True)


@pytest.mark.parametrize("upper", [False, True])
def test_gradients_are_those_of_torch(upper: bool) -> None:
    a = torch.from_numpy(definite(6, 2)).requires_grad_()
    weights = torch.randn(2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    grads = []
    for factor in (neula.cholesky(a, upper=upper).factor, torch.linalg.cholesky(a, upper=upper)):
        (first,) = torch.autograd.grad((weights * factor).sum(), a, create_graph=True)
        (second,) = torch.autograd.grad((first * weights).sum(), a)
        grads.append((first, second))
    for mine, other in zip(*grads, strict=True):
        assert torch.allclose(mine, other, rtol=1e-11, atol=1e-12)
    with torch.no_grad():
        assert not neula.cholesky(a).L.requires_grad


H200 = cuda_tuning((9, 0), replayed_bytes=1 << 28)


@pytest.mark.parametrize(
    ("tuning", "count", "n", "target", "labels"),
    [
        (H200, 1, 32768, FP32, ["fp16_cor", "fp64"]),
        (H200, 1, 32768, FORMATS["fp16"], ["fp16", "fp64"]),
        (H200, 1, 16384, FP32, ["fp16_cor", "fp64"]),
        (H200, 1, 4096, FP32, ["fp16_cor", "fp64"]),
        (H200, 1, 16, FP32, ["fp32", "fp64"]),
        (H200, 8, 2048, FP32, ["fp16_cor", "fp64"]),
        (H200, 640, 512, FP32, ["fp16_cor", "fp64"]),
        (H200, 640, 16, FP32, ["fp32", "fp64"]),
        (H200, 1, 32768, FP64, ["fp64"]),
        (cpu_tuning(("bf16", "fp32", "fp64")), 1, 5000, FORMATS["bf16"], ["fp32", "fp64"]),
        (cpu_tuning(("fp32", "fp64")), 1, 50, FP64, ["fp64"]),
    ],
)
def test_what_is_tried(tuning: Tuning, count: int, n: int, target: Format, labels: list[str]) -> None:
    options = CholeskyOptions(target, engine_of(tuning))
    assert [link.label for link in chain(count, n, options)] == [f"cholesky {name}" for name in labels]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("count", "n"), [(1, 9001), (1, 100), (40, 352), (3, 2048), (300, 32), (7, 1001), (2, 2500)]
)
@pytest.mark.parametrize("dtype", DTYPES[2:])
def test_on_a_gpu(count: int, n: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(n)
    g = torch.randn(count, n, n + 8, generator=generator, dtype=dtype, device="cuda")
    a = g @ g.mH / n
    wide, norm = in_double(a), torch.linalg.matrix_norm
    for _ in range(4):  # the third time from a graph
        found = neula.cholesky(a)
        assert found.converged
        lower = in_double(found.L)
        assert torch.equal(lower, lower.tril())
        assert (norm(wide - lower @ lower.mH) / norm(wide) <= 10 * found.bound).all()
    a[-1, n // 2, n // 2] = -1.0
    with pytest.raises(np.linalg.LinAlgError, match=f"order {n // 2 + 1} "):
        neula.cholesky(a)


class OnAGPU(CpuEngine):
    """A CPU that takes the steps of a GPU: first links that only launch, without a chain."""

    tuning = H200


@pytest.mark.parametrize(("n", "dtype"), [(16, torch.float32), (60, torch.float64)])
@pytest.mark.parametrize("upper", [False, True])
def test_what_was_launched_at_once_has_a_gradient(n: int, dtype: torch.dtype, upper: bool) -> None:
    """The logarithm of the determinant, whose gradient is the inverse."""
    g = torch.randn(n, 2 * n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a = (g @ g.T / n).to(dtype).requires_grad_()
    result = neula.cholesky(a, engine=OnAGPU("cpu"), upper=upper)
    factor = result.U if upper else result.L
    (gradient,) = torch.autograd.grad(2 * factor.diagonal().log().sum(), a)
    error = gradient.double() @ a.detach().double() - torch.eye(n)
    assert float(torch.linalg.matrix_norm(error)) <= n * torch.finfo(dtype).eps * 100  # condition about 30
