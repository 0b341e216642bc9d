"""Complex least squares from blocks and kept sums, with covariances, constraints and dampings, exactly."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import neula
from complex.exact import error_of, least_squares
from neula.io.sources import row_blocks

RNG = np.random.default_rng(7)
M, N = 13, 4


def noise(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape) + 1j * RNG.standard_normal(shape)


A, B, C, D = noise(M, N), noise(M), noise(2, N), noise(2)
WEIGHTS = RNG.uniform(0.5, 2.0, M)
V = (lambda x: x @ x.conj().T + np.eye(M))(noise(M, M))
ILL = A @ np.diag(10.0 ** -np.arange(0, 2 * N, 2)) @ noise(N, N)
UNITS = A * np.exp2([-100.0, 0.0, 30.0, 100.0])

MATRICES: dict[str, tuple[Any, Any]] = {
    "complex128": (A, B),
    "complex64": (A.astype(np.complex64), B.astype(np.complex64)),
    "real A": (A.real.copy(), B),
    "real b": (A, B.real.copy()),
    "real values": (A.real + 0j, B.real + 0j),
    "imaginary": (1j * A.real, B),
    "units": (UNITS, B),
    "ill-conditioned": (ILL, B),
    "conjugated view": (torch.from_numpy(A).conj(), torch.from_numpy(B)),
    "strided": (noise(2 * M, 2 * N)[::2, ::2], B),
    "one column": (A[:, :1], B),
    "consistent": (A.round(1), A.round(1) @ np.arange(1.0, N + 1)),
}


def plain(x: Any) -> np.ndarray:
    return x.resolve_conj().numpy() if isinstance(x, torch.Tensor) else x


def held(a: Any, b: Any, **how: Any) -> Any:
    sizes = np.linalg.norm(plain(a), axis=0)
    fit = neula.LeastSquares(a.shape[1], scales=sizes)
    for rows in (slice(0, 5), slice(5, 6), slice(6, None)):
        fit.update(a[rows], b[rows], **{name: x[rows] for name, x in how.items()})
    return fit.solve()


WAYS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "stream": (lambda a, b: neula.lstsq(row_blocks(a), b), {}),
    "stream, forward": (lambda a, b: neula.lstsq(row_blocks(a), b, certify="forward"), {}),
    "stream, householder": (lambda a, b: neula.lstsq(row_blocks(a), b, algorithm="householder"), {}),
    "stream, weights": (lambda a, b: neula.lstsq(row_blocks(a), b, weights=WEIGHTS), {"weights": WEIGHTS}),
    "stream, damp": (lambda a, b: neula.lstsq(row_blocks(a), b, damp=0.5), {"damp": 0.5}),
    "held": (held, {}),
    "held, weights": (lambda a, b: held(a, b, weights=WEIGHTS), {"weights": WEIGHTS}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MATRICES)
def test_solutions(kind: str, way: str) -> None:
    (a, b), (solve, problem) = MATRICES[kind], WAYS[way]
    with warnings.catch_warnings():
        warnings.simplefilter("error" if kind != "ill-conditioned" else "ignore")
        result = solve(a, b)
    a, b = plain(a), plain(b)
    exact = least_squares(a, b, **problem)
    dtype = np.result_type(a.dtype, b.dtype)
    assert np.asarray(result.x).dtype == (np.complex128 if way.startswith("held") else dtype)
    w, damp = problem.get("weights", np.ones(M)), problem.get("damp", 0.0)
    stacked = np.concatenate([w[:, None] * a, damp * np.eye(a.shape[1])])
    assert error_of(stacked, result.x, exact) <= result.forward_error + 2 * 2.0**-53
    assert result.converged or kind == "ill-conditioned"
    if kind != "ill-conditioned":
        left = np.linalg.norm(w * (b - a @ exact))
        left = np.hypot(left, damp * np.linalg.norm(exact))
        size = np.linalg.norm(w * b)
        u = np.finfo(dtype).eps if not way.startswith("held") else 2.0**-52
        assert abs(result.residual_norm - left) <= 10 * N * u * size


def test_statistics_of_gone_rows() -> None:
    x = least_squares(A, B)
    variance = np.linalg.norm(B - A @ x) ** 2 / (M - N)
    covariance = variance * np.linalg.inv(A.conj().T @ A)
    for result in (neula.lstsq(row_blocks(A), B), held(A, B)):
        assert np.abs(result.covariance() - covariance).max() <= 1e-13 * np.abs(covariance).max()
        np.testing.assert_allclose(result.standard_errors(), np.diag(covariance).real ** 0.5, rtol=1e-12)
        np.testing.assert_allclose(result.residual_variance, variance, rtol=1e-13)
        assert result.degrees_of_freedom == M - N
        with pytest.raises(ValueError, match="those of real parameters, and these are complex"):
            result.confidence_intervals()


def test_rows_come_and_go() -> None:
    fit, other = neula.LeastSquares(N), neula.LeastSquares(N)
    fit.update(A[:6].real.copy(), B[:6].real.copy())  # and becomes complex with the next rows
    assert fit.solve().x.dtype == np.float64
    fit.update(A[6:9], B[6:9])
    fit.downdate(A[6:7], B[6:7])
    other.update(A[9:], B[9:])
    fit.merge(other)
    fit.forget(0.25)
    kept = [*range(6), *range(7, M)]
    a, b = A.copy(), B.copy()
    a[:6], b[:6] = a[:6].real, b[:6].real
    a, b = a[kept], b[kept]
    result = fit.solve(damp=0.5)
    exact = least_squares(a, b, damp=1.0)
    assert result.converged
    assert error_of(a, result.x, exact) <= result.forward_error < 1e-10


def test_kept_sums_are_saved(tmp_path: Any) -> None:
    fit = neula.LeastSquares(N)
    fit.update(A, B)
    fit.save(tmp_path / "fit.npz")
    again = neula.LeastSquares.load(tmp_path / "fit.npz")
    assert np.array_equal(again.solve().x, fit.solve().x)


class OfRealNumbers:
    """A source that says that it is real, and is not."""

    shape, dtype = (M, N), np.dtype(float)

    def blocks(self) -> Any:
        return iter([A])


def test_what_is_no_source_of_complex_rows() -> None:
    with pytest.raises(TypeError, match="block 0 of A has dtype complex128: pass real numbers"):
        neula.lstsq(OfRealNumbers(), B)
    with pytest.raises(TypeError, match="weights has dtype complex128: pass real numbers"):
        neula.lstsq(row_blocks(A), B, weights=row_blocks(WEIGHTS + 0j))
    with pytest.raises(TypeError, match="weights is complex"):
        neula.LeastSquares(N).update(A, B, weights=WEIGHTS + 0j)
    spoilt = A.copy()
    spoilt[3, 1] = complex(0, np.nan)
    with pytest.raises(ValueError, match=r"A\[3, 1\] is nanj: A must be finite"):
        neula.lstsq(row_blocks(spoilt), B)


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
@pytest.mark.parametrize("engine", ["auto", "emulated"])
@pytest.mark.parametrize("shape", [(M, N), (N, M), (N, N), (1, 1), (3, 1), (0, 2), (2, 3, 7, 5)])
def test_pseudoinverses(shape: tuple[int, ...], engine: str, dtype: Any) -> None:
    a = noise(*shape).astype(dtype)
    x = neula.pinv(a, engine=engine)
    assert x.dtype == dtype
    expected = np.linalg.pinv(a.astype(complex))
    condition = np.linalg.cond(a) if a.size else np.zeros(1)
    assert x.shape == expected.shape
    assert (np.abs(x - expected).max(initial=0) <= 20 * np.finfo(dtype).eps * condition.max() ** 2).all()


def test_pseudoinverses_below_full_rank() -> None:
    a = noise(7, 2) @ noise(2, 5)
    for matrix in (a, a.T, a[:3]):
        expected = np.linalg.pinv(matrix, rcond=1e-12)
        assert np.abs(neula.pinv(matrix, rcond=1e-10) - expected).max() <= 1e-12 * np.abs(expected).max()


L = np.linalg.cholesky(V)
VARIANCES = RNG.uniform(0.5, 2.0, M)
DEPENDENT = (np.vstack([C, C[0] + 1j * C[1]]), np.append(D, D[0] + 1j * D[1]))

GENERAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "covariance": ({"covariance": V}, {"covariance": V}),
    "its factor": ({"covariance_factor": L}, {"covariance": L}),
    "real covariance": ({"covariance": V.real.copy()}, {"covariance": V.real}),
    "variances": ({"covariance": VARIANCES}, {"covariance": np.diag(VARIANCES)}),
    "constraints": ({"constraints": (C, D)}, {"constraints": (C, D)}),
    "real constraints": ({"constraints": (C.real, D.real)}, {"constraints": (C.real, D.real)}),
    "as many as unknowns": ({"constraints": (noise(N, N), noise(N))}, {}),
    "none": ({"constraints": (C[:0], D[:0])}, {}),
    "all": (
        {"constraints": (C, D), "covariance": V, "damp": 0.5},
        {"constraints": (C, D), "covariance": V, "damp": 0.5},
    ),
    "weights and constraints": (
        {"constraints": (C, D), "weights": WEIGHTS},
        {"constraints": (C, D), "weights": WEIGHTS},
    ),
}
GENERAL["as many as unknowns"][1].update(GENERAL["as many as unknowns"][0])


@pytest.mark.parametrize("way", GENERAL)
@pytest.mark.parametrize("kind", [kind for kind in MATRICES if kind not in ("one column", "ill-conditioned")])
def test_covariances_and_constraints(kind: str, way: str) -> None:
    (a, b), (asked, problem) = MATRICES[kind], GENERAL[way]
    hard = kind == "units" and way in ("constraints", "real constraints", "weights and constraints")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if hard else "error")
        result = neula.lstsq(a, b, **asked)
    if hard:  # beside the largest column, what the constraints leave of A has rank 1
        assert not result.converged
        assert result.forward_error > 0.1
        return
    a, b = plain(a), plain(b)
    exact = least_squares_by_factor(a, b) if way == "its factor" else least_squares(a, b, **problem)
    assert result.converged
    assert np.asarray(result.x).dtype == np.result_type(a.dtype, b.dtype)
    w, damp = problem.get("weights", np.ones(M)), problem.get("damp", 0.0)
    v = problem.get("covariance", np.eye(M))
    v = v @ v.conj().T if way == "its factor" else v
    whitened = np.linalg.solve(np.linalg.cholesky(v), w[:, None] * a)
    stacked = np.concatenate([whitened, damp * np.eye(N)])
    assert error_of(stacked, result.x, exact) <= result.forward_error + 4 * 2.0**-53
    assert result.forward_error <= 1e-6
    if "constraints" in asked and len(asked["constraints"][0]):
        (c, d), x = asked["constraints"], np.asarray(result.x)
        u = np.finfo(x.dtype).eps
        assert (np.abs(c @ x - d) <= 30 * u * (np.abs(c) @ np.abs(x) + np.abs(d))).all()


def least_squares_by_factor(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """With unknowns ``L^-1 (b - A x)`` beside x, in rational numbers: ``A x + L y = b``, ``L^H z = y``."""
    n = a.shape[1]
    stacked = np.block([[np.zeros((M, n)), np.eye(M)]])
    return least_squares(stacked, np.zeros(M), constraints=(np.block([[a, L]]), b))[:n]


def test_a_constraint_that_follows_from_others() -> None:
    with pytest.warns(neula.IllConditionedWarning, match="of C is dropped as a combination of rows of C"):
        result = neula.lstsq(A, B, constraints=DEPENDENT)
    exact = least_squares(A, B, constraints=(C, D))
    assert result.converged
    assert error_of(A, result.x, exact) <= result.forward_error
    whole = np.array([[1, 1j, 2, 0], [0, 1, 1, 1j], [1j, 0, 1 + 2j, 1j]])
    result = neula.lstsq(A, B, constraints=(whole, [1, 1j, 2j]))  # exactly dependent: no doubt
    exact = least_squares(A, B, constraints=(whole[:2], [1, 1j]))
    assert result.converged
    assert result.constraint_rank == 2
    assert error_of(A, result.x, exact) <= result.forward_error


REFUSED: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "symmetric": (A, B, {"covariance": V.T * (1 + 1j * np.eye(M))}, "covariance is not Hermitian"),
    "complex symmetric": (A, B, {"covariance": V + 1j}, "covariance is not Hermitian"),
    "indefinite": (A, B, {"covariance": V - 9 * np.eye(M) * np.abs(V).max()}, "not positive definite"),
    "variances": (A, B, {"covariance": VARIANCES + 1j}, "complex variances"),
    "real data": (A.real, B.real, {"covariance": V}, "covariance is complex, and A and b are real"),
    "real x": (A.real, B.real, {"constraints": (C, D)}, "C is complex, and A and b are real"),
    "contradiction": (A, B, {"constraints": (DEPENDENT[0], DEPENDENT[1] + 1j)}, "contradict one another"),
    "NaN": (A, B, {"constraints": (C * complex(np.nan, 0), D)}, "C must be finite"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_refused(why: str) -> None:
    a, b, asked, message = REFUSED[why]
    with pytest.raises((ValueError, TypeError), match=message):
        neula.lstsq(a, b, **asked)


STATISTICS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weights": {"weights": WEIGHTS},
    "covariance": {"covariance": V},
    "constraints": {"constraints": (C, D)},
    "damp": {"damp": 0.5},
    "intercept": {"intercept": True},
}


@pytest.mark.parametrize("asked", STATISTICS)
@pytest.mark.parametrize("kind", ["complex128", "real A", "real b"])
def test_statistics(kind: str, asked: str) -> None:
    (a, b), how = MATRICES[kind], STATISTICS[asked]
    result = neula.lstsq(a, b, **how)
    design = np.column_stack([np.ones(M), a]) if asked == "intercept" else a
    v = how.get("covariance", np.diag(1 / how.get("weights", np.ones(M)) ** 2))
    root = np.linalg.inv(np.linalg.cholesky(v))
    white, n = root @ design, design.shape[1]
    basis, damp = np.eye(n), how.get("damp", 0.0)
    if asked == "constraints":
        basis = np.linalg.svd(C)[2].conj().T[:, 2:]
    mixed = white @ basis
    inverse = np.linalg.inv(mixed.conj().T @ mixed + damp**2 * np.eye(mixed.shape[1]))
    to_x, hat = basis @ inverse @ mixed.conj().T, mixed @ inverse @ mixed.conj().T
    left = root @ (b - design @ result.x)
    free = M - np.trace(hat).real
    variance = np.linalg.norm(left) ** 2 / free
    covariance = variance * to_x @ to_x.conj().T
    size = np.abs(covariance).max()
    assert np.abs(result.covariance() - covariance).max() <= 1e-11 * size
    np.testing.assert_allclose(result.standard_errors(), np.diag(covariance).real ** 0.5, rtol=1e-11)
    np.testing.assert_allclose(result.leverage(), np.diag(hat).real, rtol=1e-11)
    np.testing.assert_allclose(result.degrees_of_freedom, free, rtol=1e-12)
    np.testing.assert_allclose(result.residual_variance, variance, rtol=1e-11)
    np.testing.assert_allclose(result.residuals, b - result.predict(a), atol=1e-12)
    robust = to_x * np.abs(left) ** 2 @ to_x.conj().T
    assert np.abs(result.covariance(robust="HC0") - robust).max() <= 1e-11 * np.abs(robust).max()
    groups = np.arange(M) % 5
    scores = np.array([to_x[:, groups == g] @ left[groups == g] for g in range(5)]).T
    clustered = 5 / 4 * (M - 1) / free * scores @ scores.conj().T
    assert np.abs(result.covariance(groups=groups) - clustered).max() <= 1e-11 * np.abs(clustered).max()
    for number in ("r_squared", "f_statistic", "aic"):
        with pytest.raises(ValueError, match="those of real numbers, and x is complex"):
            getattr(result, number)
    assert "complex" in result.to_dict()["no_statistics"]


def test_statistics_of_a_batch() -> None:
    a, b = noise(2, 3, M, N), noise(M, 2)
    for matrix in (a, a.real.copy()):
        result = neula.lstsq(matrix, b)
        found = result.covariance()
        for place in np.ndindex(2, 3):
            alone = neula.lstsq(matrix[place], b).covariance()
            assert np.abs(found[place] - alone).max() <= 1e-12 * np.abs(alone).max()


def noise_of(a: np.ndarray, x: np.ndarray, b: np.ndarray) -> float:
    """Rounding errors of a residual."""
    return 10 * N * 2.0**-53 * float(np.linalg.norm(np.abs(a) @ np.abs(x) + np.abs(b)))


DAMPS = np.array([0.0, 1e-6, 0.1, 3.0])


@pytest.mark.parametrize("kind", [*MATRICES, "wide"])
def test_ridge_paths(kind: str) -> None:
    a, b = MATRICES[kind] if kind != "wide" else (noise(N, M), noise(N))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if kind in ("ill-conditioned", "units") else "error")
        path = neula.ridge_path(a, b, DAMPS)
    a, b = plain(a), plain(b)
    assert np.asarray(path.x).dtype == (np.complex64 if kind == "complex64" else np.complex128)
    for place, damp in enumerate(DAMPS):
        if kind == "wide" and not damp:
            continue
        exact = least_squares(a, b, damp=damp)
        stacked = np.concatenate([a, damp * np.eye(a.shape[1])])
        assert error_of(stacked, path.x[place], exact) <= path.forward_errors[place] + 4 * 2.0**-53
        assert path.accepted[place] or kind in ("ill-conditioned", "units")
        left = np.linalg.norm(b - a @ exact)
        known = path.residual_norm_errors[place]
        assert abs(path.residual_norms[place] - left) <= 2 * known * left + noise_of(a, exact, b)


@pytest.mark.parametrize("shape", [(M, N), (N, M)])
def test_errors_of_prediction(shape: tuple[int, int]) -> None:
    (m, n), damps = shape, DAMPS[2:]
    a, b = noise(m, n), noise(m)
    path = neula.ridge_path(a, b, damps)
    for place, damp in enumerate(damps):
        hat = a @ np.linalg.solve(a.conj().T @ a + damp**2 * np.eye(n), a.conj().T)
        left = b - hat @ b
        gcv = m * np.linalg.norm(left) ** 2 / (m - np.trace(hat).real) ** 2
        np.testing.assert_allclose(path.gcv[place], gcv, rtol=1e-10)
        errors = []
        for row in range(m):
            kept = np.arange(m) != row
            x = np.linalg.solve(a[kept].conj().T @ a[kept] + damp**2 * np.eye(n), a[kept].conj().T @ b[kept])
            errors.append(abs(b[row] - a[row] @ x) ** 2)
        np.testing.assert_allclose(path.squared_errors[place], errors, rtol=1e-9)
        np.testing.assert_allclose(path.effective_degrees_of_freedom[place], np.trace(hat).real, rtol=1e-11)


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_emulated_engine(dtype: Any) -> None:
    a, b, how = A.astype(dtype), B.astype(dtype), {"engine": "emulated"}
    for solve, problem in (
        (lambda: neula.lstsq(row_blocks(a), b, **how), {}),
        (lambda: neula.lstsq(a, b, covariance=V, **how), {"covariance": V}),
        (lambda: neula.lstsq(a, b, constraints=(C, D), **how), {"constraints": (C, D)}),
    ):
        result = solve()
        assert result.converged
        assert np.abs(result.x - least_squares(a, b, **problem)).max() <= 1e2 * np.finfo(dtype).eps
    path = neula.ridge_path(a, b, DAMPS, **how)
    assert path.converged
    assert np.abs(path.x[2] - least_squares(a, b, damp=DAMPS[2])).max() <= 1e2 * np.finfo(dtype).eps


def test_zeros_and_nothing() -> None:
    zero = A.copy()
    zero[:, 1] = 0
    for solve in (
        lambda a, b: neula.lstsq(row_blocks(a), b).x,
        lambda a, b: held(a + 0, b).x if a.all() else None,
        lambda a, b: neula.lstsq(a, b, covariance=V).x,
        lambda a, b: neula.lstsq(a, b, constraints=(C * [1, 0, 1, 1], 0 * D)).x,
        lambda a, b: neula.ridge_path(a, b, [0.0]).x[0],
        lambda a, b: neula.pinv(a) @ b,
    ):
        x = solve(zero, B)
        if x is not None:
            assert abs(x[1]) <= 1e-15
            assert x.any()
        assert not neula.lstsq(row_blocks(A), 0 * B).x.any()
    path = neula.ridge_path(A[:0], B[:0], [1.0])
    assert path.x.dtype == np.complex128
    assert not path.x.any()
    assert neula.pinv(A[:, :0]).shape == (0, M)
    result = neula.lstsq(A, B[:, None][:, :0], covariance=V)
    assert result.x.shape == (N, 0)


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_right_hand_sides_and_batches(dtype: Any) -> None:
    a, b = noise(2, M, N).astype(dtype), noise(2, M, 3).astype(dtype)
    c, d = C, noise(2, 3)
    for asked, problem in (
        ({"covariance": V}, {"covariance": V}),
        ({"constraints": (c, d)}, {"constraints": (c, d)}),
    ):
        result = neula.lstsq(a, b, **asked)
        assert result.converged
        for place in np.ndindex(2, 3):
            one = problem if "covariance" in problem else {"constraints": (c, d[:, place[1]])}
            exact = least_squares(a[place[0]], b[place[0], :, place[1]], **one)
            found = result.x[place[0], :, place[1]]
            assert np.abs(found - exact).max() <= 1e2 * np.finfo(dtype).eps * np.abs(exact).max()
    paths = neula.ridge_path(a[0], b[0], DAMPS)
    assert np.abs(paths.x[3, :, 1] - least_squares(a[0], b[0, :, 1], damp=3.0)).max() <= 1e-5
    fit = neula.LeastSquares(N)
    fit.update(a[0], b[0])
    x = fit.solve().x
    assert np.abs(x[:, 2] - least_squares(a[0], b[0, :, 2])).max() <= 1e-12


def test_formulas_of_complex_columns() -> None:
    pytest.importorskip("formulaic")
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"y": B, "x": A[:, 0].real, "z": A[:, 1]})
    result = neula.fit_formula("y ~ x + z", table)
    design = np.column_stack([np.ones(M), table.x, table.z])
    exact = least_squares(design, B)
    assert error_of(design, list(result.coefficients.values()), exact) <= 1e-14
    np.testing.assert_allclose(result.predict(table), design @ exact, rtol=1e-13)


def test_arrays_in_files(tmp_path: Any) -> None:
    exact = least_squares(A.astype(np.complex64), B)
    for kind in ("<c8", ">c8"):
        np.save(tmp_path / "a.npy", A.astype(np.complex64).astype(kind))
        result = neula.lstsq(row_blocks(tmp_path / "a.npy"), B)
        assert error_of(A, result.x, exact) <= 1e-6
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        data = file.create_dataset("A", data=A, chunks=(5, N))
        result = neula.lstsq(row_blocks(data), B)
        assert error_of(A, result.x, least_squares(A, B)) <= 1e-14


def test_a_ridge_path_of_a_real_matrix_is_that_of_the_complex_one() -> None:
    a, b = A.real.copy(), np.stack([B, 2 * B[::-1]], 1)
    for right in (b, B):
        found, expected = neula.ridge_path(a, right, DAMPS), neula.ridge_path(a + 0j, right, DAMPS)
        for name in ("x", "residual_norms", "solution_norms", "gcv", "leave_one_out", "squared_errors"):
            np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-11)
        for name in ("accepted", "effective_degrees_of_freedom", "damps", "forward_errors"):
            assert getattr(found, name).shape == getattr(expected, name).shape
        assert found.converged
        assert np.array_equal(found.best(), expected.best())
    assert neula.ridge_path(a, b[:, :0], DAMPS).x.shape == (4, N, 0)
    assert isinstance(neula.ridge_path(torch.from_numpy(a), B, DAMPS).gcv, torch.Tensor)
