"""Methods of factorizations: against exact arithmetic, finite differences and scikit-learn."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import flint
import numpy as np
import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import neula
from neula.io.matrices import random_matrix


def lower_triangle(a: np.ndarray) -> np.ndarray:
    """NaN above the diagonal, whose imaginary part is not read either."""
    spoilt = np.tril(a) + np.triu(np.full_like(a, np.nan), 1)
    return spoilt + 3j * np.eye(len(a), dtype=a.dtype) if np.iscomplexobj(a) else spoilt


FACTORIZE: dict[str, Callable[[Any], Any]] = {
    "cholesky": neula.cholesky,
    "cholesky upper": lambda a: neula.cholesky(a, upper=True),
    "cholesky fp16": lambda a: neula.cholesky(a, accuracy="fp16", engine="emulated"),
    "cholesky of one triangle": lambda a: neula.cholesky(lower_triangle(a)),
    "lu": neula.lu_factor,
    "lu fp16": lambda a: neula.lu_factor(a, engine="emulated"),
    "lu mixed": lambda a: neula.lu_factor(a, engine="emulated", pivot="rbt"),
    "qr": neula.qr,
}
TRIANGLES = {"cholesky": "L", "cholesky upper": "L", "lu": "U", "qr": "R"}
KINDS = pytest.mark.parametrize("kind", FACTORIZE)
LEADING_KINDS = pytest.mark.parametrize("kind", ["cholesky", "lu", "qr"])


def matrix(kind: str, n: int, cond: float, dtype: Any = np.float64, seed: int = 1) -> np.ndarray:
    a = random_matrix("geometric", n, n, cond=cond, seed=seed).double().numpy()
    if kind.startswith("cholesky"):
        q = np.linalg.qr(a)[0]
        a = (q * np.geomspace(1, 1 / cond, n)) @ q.T
    if np.issubdtype(dtype, np.complexfloating):
        left, right = np.exp(1j * np.random.default_rng(seed).uniform(0, 7, (2, n)))
        a = left[:, None] * a * (left.conj() if kind.startswith("cholesky") else right)
    if kind.startswith("cholesky"):
        a = np.tril(a) + np.tril(a, -1).conj().T
        a.flat[:: n + 1] = a.diagonal().real
    return a.astype(dtype)


def exactly(a: np.ndarray) -> flint.acb_mat:
    return flint.acb_mat([[flint.acb(complex(x).real, complex(x).imag) for x in row] for row in a])


def numbers(a: flint.acb_mat) -> np.ndarray:
    """Rounded, from balls that are smaller than a rounding error."""
    return np.array([[complex(x) for x in row] for row in a.tolist()]).reshape(a.nrows(), a.ncols())


@pytest.fixture(autouse=True)
def precision() -> Any:
    with flint.ctx.workprec(400):
        yield


@KINDS
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.complex128])
@pytest.mark.parametrize(("n", "cond"), [(1, 1.0), (6, 1e2), (20, 1e3), (20, 1e7)])
def test_errors_are_below_their_bounds(kind: str, n: int, cond: float, dtype: Any) -> None:
    """Errors come from exact arithmetic for the numbers as they are stored; real factors also take complex
    right-hand sides.
    """
    u = np.finfo(dtype).eps / 2
    if cond > 1e4 and (u > 1e-10 or "fp16" in kind):
        pytest.skip("the matrix, as it is rounded, need not be definite")
    a, rng = matrix(kind, n, cond, dtype), np.random.default_rng(2)
    factors, exact = FACTORIZE[kind](a), exactly(a)
    sign, logabsdet = found = factors.slogdet()
    det = exact.det()
    assert abs(sign - complex(det / abs(det))) <= (found.error if np.iscomplexobj(a) else 0)
    assert abs(float(logabsdet) - float(abs(det).log())) <= found.error
    assert factors.logdet().value == logabsdet
    assert np.isrealobj(logabsdet)

    scales = np.linalg.norm(a.astype(complex), axis=0)[:, None]
    real = rng.standard_normal((n, 2))
    for b in (
        real.astype(dtype),
        (real + 1j * rng.standard_normal((n, 2))).astype(np.result_type(dtype, 1j)),
    ):
        solved, truth = factors.solve(b), numbers(exact.solve(exactly(b)))
        errors = np.linalg.norm(scales * (solved.x - truth), axis=0) / np.linalg.norm(scales * truth, axis=0)
        # Norms with powers of two in the place of norms of columns: within a factor of 2 n^(1/2) each way.
        assert (errors <= 4 * math.sqrt(n) * solved.forward_errors).all()
        assert solved.converged
        assert solved.x.dtype == b.dtype
        assert solved.forward_error <= 4 * u + 1e3 * n * cond * 2.0**-53
        quadratic = factors.inv_quad(b)
        expected = numbers(exactly(b.conj().T) * exact.solve(exactly(b))).diagonal()
        assert (np.abs(quadratic.value - expected) <= quadratic.error).all()

    diagonal = factors.diag_inverse()
    assert (np.abs(diagonal.value - numbers(exact.inv()).diagonal()) <= diagonal.error).all()
    assert np.isrealobj(diagonal.value) == (np.isrealobj(a) or kind.startswith("cholesky"))


@LEADING_KINDS
def test_bounds_say_something(kind: str) -> None:
    """``log |det|`` changes by at most ``n ||A^-1|| ||A - M1 M2||``, and that norm is below ``n u ||A||``."""
    n, cond = 60, 1e6
    factors = FACTORIZE[kind](matrix(kind, n, cond))
    assert factors.logdet().error <= n**2 * cond * 2.0**-53


@pytest.mark.parametrize("kind", TRIANGLES)
@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_triangles(kind: str, dtype: Any) -> None:
    factors = FACTORIZE[kind](matrix(kind, 12, 1e3, dtype))
    t, b = getattr(factors, TRIANGLES[kind]), matrix("lu", 12, 10.0, dtype)[:, :2]
    for transposed in (False, True):
        found = factors.solve_triangular(b, transposed=transposed)
        truth = numbers(exactly(t.conj().T if transposed else t).solve(exactly(b)))
        assert found.converged
        errors = np.linalg.norm(found.x - truth, axis=0) / np.linalg.norm(truth, axis=0)
        assert (errors <= np.linalg.cond(t) * found.forward_errors).all()
        assert np.abs(found.x - truth).max() <= 1e3 * 2.0**-53 * np.linalg.cond(t) * np.abs(truth).max()


# ---------------------------------------------------------------- gradients

METHODS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "solve": lambda factors, b: factors.solve(b).x,
    "solve_triangular": lambda factors, b: factors.solve_triangular(b).x,
    "transposed": lambda factors, b: factors.solve_triangular(b, transposed=True).x,
    "inv_quad": lambda factors, b: factors.inv_quad(b).value,
    "logdet": lambda factors, b: factors.logdet().value,
    "slogdet": lambda factors, b: factors.slogdet().sign * factors.slogdet().logabsdet,
    "diag_inverse": lambda factors, b: factors.diag_inverse().value,
}


def definite(g: torch.Tensor) -> torch.Tensor:
    return g @ g.mH + torch.eye(g.shape[-1], dtype=g.dtype)


VARIABLE = {
    "cholesky": lambda g: neula.cholesky(definite(g)),
    "cholesky upper": lambda g: neula.cholesky(definite(g), upper=True),
    "lu": neula.lu_factor,
    "qr": neula.qr,
}


def variable(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("kind", VARIABLE)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("shape", "dtype"), [((4, 4), torch.float64), ((2, 3, 3), torch.complex128)], ids=str
)
def test_gradients(shape: tuple[int, ...], dtype: torch.dtype, method: str, kind: str) -> None:
    b = variable(*(shape if len(shape) > 2 else shape[1:]), seed=1, dtype=dtype)
    function = lambda g, b: METHODS[method](VARIABLE[kind](g), b)  # noqa: E731
    for check in (gradcheck, gradgradcheck):
        assert check(function, (variable(*shape, dtype=dtype), b), nondet_tol=1e-12, fast_mode=True)


@pytest.mark.parametrize("method", ["solve", "inv_quad", "logdet", "diag_inverse"])
def test_forward_mode(method: str) -> None:
    a, change, b = (x.detach() for x in (variable(5, 5), variable(5, 5, seed=1), variable(5, seed=2)))
    with forward_ad.dual_level():
        value = METHODS[method](neula.lu_factor(forward_ad.make_dual(a, change)), b)
        tangent = forward_ad.unpack_dual(value).tangent
    expected = torch.func.jvp(lambda x: _by_torch(method, x, b), (a,), (change,))[1]
    assert torch.allclose(tangent, expected, rtol=1e-9)


def _by_torch(method: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    x = torch.linalg.inv(a)
    expected = {"solve": x @ b, "inv_quad": b @ x @ b, "diag_inverse": x.diagonal()}
    return torch.linalg.slogdet(a).logabsdet if method == "logdet" else expected[method]


def test_the_gradient_of_one_triangle_is_symmetric() -> None:
    a = torch.tensor([[4.0, math.nan], [2.0, 5.0]], dtype=torch.float64, requires_grad=True)
    neula.cholesky(a).logdet().value.backward()
    assert torch.allclose(a.grad, torch.tensor([[5.0, -2.0], [-2.0, 4.0]], dtype=torch.float64) / 16)


def test_a_likelihood_factorizes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("cholesky_ex", "lu_factor_ex", "qr", "solve"):
        function = getattr(torch.linalg, name)
        monkeypatch.setattr(
            torch.linalg, name, lambda *a, f=function, n=name, **k: (calls.append(n), f(*a, **k))[1]
        )
    g = variable(300, 300)
    factors = neula.cholesky(g @ g.mT / 300 + torch.eye(300, dtype=torch.float64))
    y = variable(300, seed=1)
    (factors.inv_quad(y).value + factors.logdet().value).backward()
    assert calls == ["cholesky_ex"]
    assert g.grad is not None


# ---------------------------------------------------------------- shapes and kinds of arrays


@LEADING_KINDS
def test_batches_are_broadcast(kind: str) -> None:
    a = np.stack([matrix(kind, 5, 10.0, seed=i) for i in range(6)]).reshape(2, 3, 5, 5)
    factors, rng = FACTORIZE[kind](a), np.random.default_rng(4)
    for shape, values in [((5,), (2, 3)), ((5, 4), (2, 3, 4)), ((7, 1, 3, 5, 2), (7, 2, 3, 2))]:
        b = rng.standard_normal(shape)
        full = b[:, None] if b.ndim == 1 else b
        expected = np.linalg.solve(a, full)
        expected = expected[..., 0] if b.ndim == 1 else expected
        found = factors.solve(b)
        assert found.x.shape == expected.shape
        assert np.allclose(found.x, expected, rtol=1e-10)
        assert found.accepted.all()
        assert factors.inv_quad(b).value.shape == factors.inv_quad(b).error.shape == values
        assert np.allclose(
            factors.inv_quad(b).value, (full * np.linalg.solve(a, full)).sum(-2).reshape(values)
        )
    assert factors.logdet().value.shape == (2, 3)
    assert np.allclose(factors.diag_inverse().value, np.diagonal(np.linalg.inv(a), axis1=-2, axis2=-1))
    with pytest.raises(ValueError, match="shape"):
        factors.solve(np.ones(4))
    with pytest.raises(ValueError, match="must be finite"):
        factors.solve(np.full(5, np.nan))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_tensors(dtype: torch.dtype) -> None:
    a = torch.tensor([[4.0, 2.0], [2.0, 5.0]], dtype=dtype)
    factors = neula.cholesky(a)
    assert factors.solve(torch.tensor([8.0, 12.0], dtype=dtype)).x.tolist() == pytest.approx([1, 2], rel=1e-6)
    assert factors.logdet().value.dtype == torch.promote_types(dtype, torch.float32)
    assert isinstance(factors.logdet().error, torch.Tensor)
    assert factors.inv_quad(torch.ones(2, dtype=torch.float64)).value.dtype == torch.float64


def test_badly_scaled_matrices_keep_their_digits() -> None:
    a, d = matrix("cholesky", 10, 1e2), np.logspace(-80, 80, 10)
    factors, plain = neula.cholesky(a * d[:, None] * d), neula.cholesky(a)
    assert factors.logdet().value == pytest.approx(plain.logdet().value + 2 * np.log(d).sum(), abs=1e-9)
    found = factors.solve(d)
    assert found.digits > 10
    assert np.allclose(found.x * d, plain.solve(np.ones(10)).x, rtol=1e-11)


@LEADING_KINDS
@pytest.mark.parametrize("power", [-1000, 1000])
def test_bounds_near_the_ends_of_the_range(power: int, kind: str) -> None:
    a, b = np.ldexp(matrix(kind, 6, 1e2), power), np.random.default_rng(2).standard_normal((6, 1))
    factors, exact = FACTORIZE[kind](a), exactly(a)
    diagonal, quadratic = factors.diag_inverse(), factors.inv_quad(b)
    expected = numbers(exact.inv()).diagonal().real
    assert (abs(diagonal.value - expected) <= diagonal.error).all()
    assert (diagonal.error <= 1e-10 * np.ldexp(1.0, -power)).all()
    expected = numbers(exactly(b.T) * exact.solve(exactly(b)))[0, 0].real
    assert abs(quadratic.value[0] - expected) <= quadratic.error[0] <= 1e-10 * np.ldexp(1.0, -power)


@LEADING_KINDS
@pytest.mark.parametrize(("dtype", "a", "b"), [(np.float64, 1e-310, 1.0), (np.float32, 1e-30, 1e20)])
def test_numbers_that_do_not_fit(dtype: Any, a: float, b: float, kind: str) -> None:
    factors, b = FACTORIZE[kind](np.full((1, 1), a, dtype)), np.full(1, b, dtype)
    for method in (factors.solve, factors.inv_quad):
        with pytest.raises(OverflowError, match="the solution does not fit"):
            method(b)
    if dtype is np.float32 and kind != "cholesky":  # whose triangle has the square root
        with pytest.raises(OverflowError, match="the solution does not fit"):
            factors.solve_triangular(b)
    with pytest.warns(neula.IllConditionedWarning, match="no digit"):  # it underflows
        assert FACTORIZE[kind](np.float32([[1e30]])).solve(np.float32([1e-20])).forward_error >= 1


@KINDS
def test_measured_errors_count_the_rounding_errors_of_the_measurement(kind: str) -> None:
    for seed in range(50):
        a = np.random.default_rng(seed).uniform(1, 2, (1, 1))
        if (found := FACTORIZE[kind](a).logdet()).error < 1e-10:  # else L is rounded to half precision
            assert abs(found.value - float(exactly(a).det().real.log())) <= found.error


@LEADING_KINDS
def test_without_elements(kind: str) -> None:
    factors, whole = (FACTORIZE[kind](a) for a in (np.zeros((0, 0)), np.eye(2)))
    assert factors.logdet().value == factors.inv_quad(np.zeros(0)).value == 0
    for method in ("solve", "solve_triangular"):
        assert getattr(factors, method)(np.zeros(0)).x.shape == (0,)
        assert getattr(whole, method)(np.zeros((2, 0))).x.shape == (2, 0)
    none = FACTORIZE[kind](np.zeros((0, 3, 3)))
    assert none.logdet().value.shape == none.inv_quad(np.ones(3)).value.shape == (0,)
    assert none.diag_inverse().value.shape == none.solve(np.ones(3)).x.shape == (0, 3)


# ---------------------------------------------------------------- what is not known


def test_a_matrix_that_was_changed() -> None:
    a = 0.75 * np.eye(20) + 0.01 * matrix("lu", 20, 10.0)  # columns that are not scaled are not copied
    factors = neula.lu_factor(a)
    factors.logdet()
    a += np.eye(20)
    with pytest.warns(neula.IllConditionedWarning, match="no digit of the solution is guaranteed"):
        factors.solve(np.ones(20))
    for kind in ("cholesky", "lu"):
        a = matrix(kind, 20, 10.0)
        factors = FACTORIZE[kind](a)
        a *= 3
        with pytest.raises(ValueError, match="A was changed since it was factorized"):
            factors.logdet()


def test_what_keeps_no_matrix() -> None:
    a = matrix("lu", 5, 10.0)
    results = [
        neula.lu_factor(a, keep_a=False),
        pickle.loads(pickle.dumps(neula.cholesky(np.eye(5)))),
        neula.qr(a, mode="r"),
        neula.qr(a, pivoting=True),
    ]
    for result in results:
        with pytest.raises(ValueError, match="this result does not keep A"):
            result.logdet()
    with pytest.raises(ValueError, match="only square matrices have inverses and determinants"):
        neula.qr(np.ones((5, 2)) + np.eye(5, 2)).logdet()
    vandermonde = np.vander(np.linspace(0, 1, 20))
    singular = neula.lu_factor(vandermonde @ vandermonde.T)
    with pytest.warns(neula.IllConditionedWarning, match="no digit of the solution is guaranteed"):
        assert not singular.solve(np.ones(20)).converged
    with pytest.warns(neula.IllConditionedWarning, match="no digit of the logarithm of the determinant"):
        assert singular.logdet().error == math.inf


# ---------------------------------------------------------------- jitter


def smooth_kernel(n: int, dtype: Any = np.float64) -> np.ndarray:
    x = np.linspace(0, 10, n)
    return np.exp(-0.5 * (x[:, None] - x) ** 2).astype(dtype)


NOT_DEFINITE = {
    "float64": smooth_kernel(200),
    "float32": smooth_kernel(100, np.float32),
    "float16": -np.eye(2, dtype=np.float16),
    "complex": smooth_kernel(60) * np.exp(1j * np.subtract.outer(np.arange(60), np.arange(60))),
    "negative": -np.eye(3),
    "indefinite": np.eye(2) - 1,
    "tiny": 1e-200 * (np.eye(3) - 2),
    "smaller": np.eye(3) * 1e-310 - 2e-310,
    "subnormal": np.array([[-1e-320]]),
    "large": -np.eye(3) * 1e300,
}


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("name", NOT_DEFINITE)
def test_jitter_is_near_the_least(name: str, upper: bool) -> None:
    a = NOT_DEFINITE[name]
    with pytest.raises(np.linalg.LinAlgError, match=r"not positive definite: .* to its diagonal") as error:
        neula.cholesky(a, upper=upper)
    jitter = float(str(error.value).split("; ")[1].split()[1])
    result = neula.cholesky(a, jitter="auto", upper=upper)
    assert result.jitter == pytest.approx(jitter, rel=1e-5)
    eye = np.eye(len(a), dtype=a.dtype)
    shifted = a + a.dtype.type(jitter) * eye
    assert neula.cholesky(shifted, upper=upper).converged
    with pytest.raises(np.linalg.LinAlgError):
        neula.cholesky(a + a.dtype.type(jitter / 10) * eye, upper=upper)
    lower, shifted = (x.astype(np.clongdouble) for x in (result.L, shifted))
    limit = max(1e-5, 4 * np.finfo(a.dtype).eps) * np.linalg.norm(shifted)
    assert np.linalg.norm(lower @ lower.conj().T - shifted) <= limit


def test_jitter_of_batches_and_where_none_is_needed_or_possible() -> None:
    k = smooth_kernel(60)
    result = neula.cholesky(np.stack([k, k + np.eye(60)]), jitter="auto")
    assert result.jitter[0] > 0 == result.jitter[1]
    assert neula.cholesky(np.eye(3), jitter="auto").jitter == 0
    for a, jitter, error, message in (
        (np.eye(3), "much", ValueError, "unknown jitter 'much'"),
        (np.full((2, 2), np.nan), "auto", ValueError, "must be finite"),
        (-np.eye(2) * 1.7e308, "auto", np.linalg.LinAlgError, r"is not positive$"),
        (-np.eye(2) * 1.7e308, None, np.linalg.LinAlgError, r"is not positive$"),
    ):
        with pytest.raises(error, match=message):
            neula.cholesky(a, jitter=jitter)


def test_jitter_has_gradients() -> None:
    a = torch.from_numpy(smooth_kernel(30)).requires_grad_()
    result = neula.cholesky(a, jitter="auto")
    result.L.sum().backward()
    assert bool(a.grad.isfinite().all())


# ---------------------------------------------------------------- Gaussian processes


def test_likelihood_and_gradient_of_scikit_learn() -> None:
    gaussian_process = pytest.importorskip("sklearn.gaussian_process")
    kernels = gaussian_process.kernels
    rng = np.random.default_rng(5)
    x = rng.uniform(0, 5, (80, 2))
    y = np.sin(x).sum(1) + 0.1 * rng.standard_normal(80)
    theirs = gaussian_process.GaussianProcessRegressor(
        kernels.ConstantKernel(2.0) * kernels.RBF([0.7, 1.3]) + kernels.WhiteKernel(0.02),
        alpha=0.0,
        optimizer=None,
    ).fit(x, y)
    theta = torch.from_numpy(theirs.kernel_.theta.copy()).requires_grad_()
    value, gradient = theirs.log_marginal_likelihood(theirs.kernel_.theta, eval_gradient=True)

    variance, lengths, noise = theta[0].exp(), theta[1:3].exp(), theta[3].exp()
    z = torch.from_numpy(x) / lengths
    k = variance * torch.exp(-0.5 * (z[:, None] - z).square().sum(-1))
    factors = neula.cholesky(k + noise * torch.eye(80, dtype=torch.float64))
    quadratic, logdet = factors.inv_quad(torch.from_numpy(y)), factors.logdet()
    ours = -0.5 * (quadratic.value + logdet.value + 80 * math.log(2 * math.pi))
    # Theirs has the rounding errors of a Cholesky factorization as well.
    assert abs(float(ours.detach()) - value) <= 2 * float(quadratic.error + logdet.error)
    ours.backward()
    assert np.allclose(theta.grad.numpy(), gradient, rtol=1e-9, atol=1e-9 * np.abs(gradient).max())
