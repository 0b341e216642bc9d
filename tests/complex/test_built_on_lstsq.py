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
VARIANCES = RNG.uniform(0.5, 2.0, M)
DEPENDENT = (np.vstack([C, C[0] + 1j * C[1]]), np.append(D, D[0] + 1j * D[1]))

MATRICES: dict[str, tuple[Any, Any]] = {
    "complex128": (A, B),
    "complex64": (A.astype(np.complex64), B.astype(np.complex64)),
    "real A": (A.real.copy(), B),
    "real b": (A, B.real.copy()),
    "real values": (A.real + 0j, B.real + 0j),
    "imaginary": (1j * A.real, B),
    "units": (A * np.exp2([-100.0, 0.0, 30.0, 100.0]), B),
    "ill-conditioned": (A @ np.diag(10.0 ** -np.arange(0, 2 * N, 2)) @ noise(N, N), B),
    "conjugated view": (torch.from_numpy(A).conj(), torch.from_numpy(B)),
    "strided": (noise(2 * M, 2 * N)[::2, ::2], B),
    "one column": (A[:, :1], B),
    "consistent": (A.round(1), A.round(1) @ np.arange(1.0, N + 1)),
}


def plain(x: Any) -> np.ndarray:
    return x.resolve_conj().numpy() if isinstance(x, torch.Tensor) else x


def streamed(a: Any, b: Any, **how: Any) -> Any:
    return neula.lstsq(row_blocks(a), b, **how)


def held(a: Any, b: Any, **how: Any) -> Any:
    sizes = np.linalg.norm(plain(a), axis=0)
    fit = neula.LeastSquares(a.shape[1], scales=sizes)
    for rows in (slice(0, 5), slice(5, 6), slice(6, None)):
        fit.update(a[rows], b[rows], **{name: x[rows] for name, x in how.items()})
    return fit.solve()


WAYS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    *((streamed, how) for how in ({}, {"certify": "forward"}, {"algorithm": "householder"})),
    *((streamed, how) for how in ({"engine": "emulated"}, {"weights": WEIGHTS}, {"damp": 0.5})),
    *((held, how) for how in ({}, {"weights": WEIGHTS})),
    (neula.lstsq, {"covariance": V}),
    (neula.lstsq, {"covariance": V, "engine": "emulated"}),
    (neula.lstsq, {"covariance_factor": np.linalg.cholesky(V)}),
    (neula.lstsq, {"covariance": V.real.copy()}),
    (neula.lstsq, {"covariance": VARIANCES}),
    (neula.lstsq, {"constraints": (C, D)}),
    (neula.lstsq, {"constraints": (C, D), "engine": "emulated"}),
    (neula.lstsq, {"constraints": (C.real, D.real)}),
    (neula.lstsq, {"constraints": (noise(N, N), noise(N))}),
    (neula.lstsq, {"constraints": (C[:0], D[:0])}),
    (neula.lstsq, {"constraints": (C, D), "covariance": V, "damp": 0.5}),
    (neula.lstsq, {"constraints": (C, D), "weights": WEIGHTS}),
]
UNCONSTRAINED = ("one column", "ill-conditioned")
PAIRS = [
    pytest.param(kind, *way, id=f"{kind}, {way[0].__name__} {'+'.join(way[1])} {place}")
    for kind in MATRICES
    for place, way in enumerate(WAYS)
    if kind not in UNCONSTRAINED or way[0] is not neula.lstsq
]


def whitened(a: np.ndarray, asked: dict[str, Any]) -> np.ndarray:
    """The matrix of the problem without a covariance, weights and damping."""
    v = asked.get("covariance", np.eye(M))
    root = asked.get("covariance_factor", np.linalg.cholesky(np.diag(v) if v.ndim == 1 else v))
    white = np.linalg.solve(root, asked.get("weights", np.ones(M))[:, None] * a)
    return np.concatenate([white, asked.get("damp", 0.0) * np.eye(a.shape[1])])


@pytest.mark.parametrize(("kind", "solve", "asked"), PAIRS)
def test_solutions(kind: str, solve: Callable[..., Any], asked: dict[str, Any]) -> None:
    a, b = MATRICES[kind]
    constraints = asked.get("constraints", (C[:0], D[:0]))
    # Beside the largest column, what constraints leave of A in such units has rank 1.
    lost = kind == "units" and 0 < len(constraints[0]) < N and "covariance" not in asked
    hard = lost or kind == "ill-conditioned"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if hard else "error")
        result = solve(a, b, **asked)
    assert result.converged or hard
    if lost:
        assert not result.converged
        assert result.forward_error > 0.1
        return
    a, b, x = plain(a), plain(b), np.asarray(result.x)
    names = ("covariance", "covariance_factor", "weights", "constraints", "damp")
    exact = least_squares(a, b, **{name: asked[name] for name in names if name in asked})
    dtype = np.complex128 if solve is held else np.result_type(a, b)
    u = np.finfo(dtype).eps
    assert x.dtype == dtype
    assert error_of(whitened(a, asked), x, exact) <= result.forward_error + 4 * 2.0**-53
    assert result.forward_error <= 1e-6 or hard
    c, d = constraints
    if len(c):
        assert (np.abs(c @ x - d) <= 30 * u * (np.abs(c) @ np.abs(x) + np.abs(d))).all()
    if solve is not neula.lstsq and not hard:
        w = asked.get("weights", np.ones(M))
        left = np.append(w * (b - a @ exact), asked.get("damp", 0.0) * exact)
        assert abs(result.residual_norm - np.linalg.norm(left)) <= 10 * N * u * np.linalg.norm(w * b)


def test_statistics_of_gone_rows() -> None:
    expected = neula.lstsq(A, B)
    for result in (streamed(A, B), held(A, B)):
        for name in ("covariance", "standard_errors"):
            known = getattr(expected, name)()
            np.testing.assert_allclose(
                getattr(result, name)(), known, rtol=1e-12, atol=1e-13 * abs(known).max()
            )
        np.testing.assert_allclose(result.residual_variance, expected.residual_variance, rtol=1e-13)
        assert result.degrees_of_freedom == M - N
        with pytest.raises(ValueError, match="those of real parameters, and these are complex"):
            result.confidence_intervals()


def test_rows_come_and_go(tmp_path: Any) -> None:
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
    fit.save(tmp_path / "fit.npz")
    assert np.array_equal(neula.LeastSquares.load(tmp_path / "fit.npz").solve(damp=0.5).x, result.x)


class OfRealNumbers:
    """A source that says that it is real, and is not."""

    shape, dtype = (M, N), np.dtype(float)

    def blocks(self) -> Any:
        return iter([A])


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
@pytest.mark.parametrize("engine", ["auto", "emulated"])
@pytest.mark.parametrize("shape", [(M, N), (N, M), (N, N), (1, 1), (3, 1), (0, 2), (2, 3, 7, 5), "rank 2"])
def test_pseudoinverses(shape: tuple[int, ...] | str, engine: str, dtype: Any) -> None:
    deficient = shape == "rank 2"
    a = (noise(7, 2) @ noise(2, 5) if deficient else noise(*shape)).astype(dtype)
    options = {"rcond": 1e-4} if deficient else {}
    x = neula.pinv(a, engine=engine, **options)
    expected = np.linalg.pinv(a.astype(complex), **options)
    assert (x.dtype, x.shape) == (dtype, expected.shape)
    values = np.linalg.svd(a, compute_uv=False)[..., : 2 if deficient else None]
    condition = (values[..., 0] / values[..., -1]).max() if a.size else 1.0
    assert np.abs(x - expected).max(initial=0) <= 20 * np.finfo(dtype).eps * condition**2


def test_a_constraint_that_follows_from_others() -> None:
    with pytest.warns(neula.IllConditionedWarning, match="of C is dropped as a combination of rows of C"):
        result = neula.lstsq(A, B, constraints=DEPENDENT)
    whole = np.array([[1, 1j, 2, 0], [0, 1, 1, 1j], [1j, 0, 1 + 2j, 1j]])
    other = neula.lstsq(A, B, constraints=(whole, [1, 1j, 2j]))  # exactly dependent: no doubt
    assert other.constraint_rank == 2
    for found, constraints in ((result, (C, D)), (other, (whole[:2], [1, 1j]))):
        assert found.converged
        assert error_of(A, found.x, least_squares(A, B, constraints=constraints)) <= found.forward_error


INDEFINITE, SPOILT = V - 9 * np.eye(M) * np.abs(V).max(), A.copy()
SPOILT[3, 1] = complex(0, np.nan)
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: neula.lstsq(A, B, covariance=V.T * (1 + 1j * np.eye(M))), "covariance is not Hermitian"),
    (lambda: neula.lstsq(A, B, covariance=V + 1j), "covariance is not Hermitian"),
    (lambda: neula.lstsq(A, B, covariance=INDEFINITE), "not positive definite"),
    (lambda: neula.lstsq(A, B, covariance=VARIANCES + 1j), "complex variances"),
    (lambda: neula.lstsq(A.real, B.real, covariance=V), "covariance is complex, and A and b are real"),
    (lambda: neula.lstsq(A.real, B.real, constraints=(C, D)), "C is complex, and A and b are real"),
    (lambda: neula.lstsq(A, B, constraints=(DEPENDENT[0], DEPENDENT[1] + 1j)), "contradict one another"),
    (lambda: neula.lstsq(A, B, constraints=(C * complex(np.nan, 0), D)), "C must be finite"),
    (lambda: neula.lstsq(A, B, weights=B), "weights is complex"),
    (lambda: neula.lstsq(OfRealNumbers(), B), "block 0 of A has dtype complex128: pass real numbers"),
    (lambda: streamed(A, B, weights=row_blocks(B)), "weights has dtype complex128: pass real numbers"),
    (lambda: neula.LeastSquares(N).update(A, B, weights=WEIGHTS + 0j), "weights is complex"),
    (lambda: streamed(SPOILT, B), r"A\[3, 1\] is nanj: A must be finite"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()


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
    groups = np.arange(M) % 5
    scores = np.array([to_x[:, groups == g] @ left[groups == g] for g in range(5)]).T
    for found, expected in (
        (result.covariance(), covariance),
        (result.covariance(robust="HC0"), to_x * np.abs(left) ** 2 @ to_x.conj().T),
        (result.covariance(groups=groups), 5 / 4 * (M - 1) / free * scores @ scores.conj().T),
        (result.residuals, b - result.predict(a)),
    ):
        assert np.abs(found - expected).max() <= 1e-11 * np.abs(expected).max()
    np.testing.assert_allclose(result.standard_errors(), np.diag(covariance).real ** 0.5, rtol=1e-11)
    np.testing.assert_allclose(result.leverage(), np.diag(hat).real, rtol=1e-11)
    np.testing.assert_allclose(result.degrees_of_freedom, free, rtol=1e-12)
    np.testing.assert_allclose(result.residual_variance, variance, rtol=1e-11)
    for number in ("r_squared", "f_statistic", "aic"):
        with pytest.raises(ValueError, match="those of real numbers, and x is complex"):
            getattr(result, number)
    assert "complex" in result.to_dict()["no_statistics"]


DAMPS = np.array([0.0, 1e-6, 0.1, 3.0])


@pytest.mark.parametrize("engine", ["auto", "emulated"])
@pytest.mark.parametrize("kind", [*MATRICES, "wide"])
def test_ridge_paths(kind: str, engine: str) -> None:
    a, b = MATRICES[kind] if kind != "wide" else (noise(N, M), noise(N))
    hard = kind in ("ill-conditioned", "units")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if hard else "error")
        path = neula.ridge_path(a, b, DAMPS, engine=engine)
    a, b = plain(a), plain(b)
    assert np.asarray(path.x).dtype == (np.complex64 if kind == "complex64" else np.complex128)
    for place, damp in enumerate(DAMPS):
        if kind == "wide" and not damp:
            continue
        exact = least_squares(a, b, damp=damp)
        stacked = np.concatenate([a, damp * np.eye(a.shape[1])])
        assert error_of(stacked, path.x[place], exact) <= path.forward_errors[place] + 4 * 2.0**-53
        assert path.accepted[place] or hard
        left = np.linalg.norm(b - a @ exact)
        rounding = 10 * N * 2.0**-53 * np.linalg.norm(np.abs(a) @ np.abs(exact) + np.abs(b))
        known = path.residual_norm_errors[place]
        assert abs(path.residual_norms[place] - left) <= 2 * known * left + rounding


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
        errors = np.abs(left / (1 - hat.diagonal())) ** 2  # of predictions without the row
        np.testing.assert_allclose(path.squared_errors[place], errors, rtol=1e-9)
        np.testing.assert_allclose(path.effective_degrees_of_freedom[place], np.trace(hat).real, rtol=1e-11)


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


def test_zeros_and_nothing() -> None:
    zero = A.copy()
    zero[:, 1] = 0
    for x in (
        streamed(zero, B).x,
        neula.lstsq(zero, B, covariance=V).x,
        neula.lstsq(zero, B, constraints=(C * [1, 0, 1, 1], 0 * D)).x,
        neula.ridge_path(zero, B, [0.0]).x[0],
        neula.pinv(zero) @ B,
    ):
        assert abs(x[1]) <= 1e-15
        assert x.any()
    assert not streamed(A, 0 * B).x.any()
    path = neula.ridge_path(A[:0], B[:0], [1.0])
    assert path.x.dtype == np.complex128
    assert not path.x.any()
    assert neula.pinv(A[:, :0]).shape == (0, M)
    assert neula.lstsq(A, B[:, None][:, :0], covariance=V).x.shape == (N, 0)


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_right_hand_sides_and_batches(dtype: Any) -> None:
    a, b, d = noise(2, M, N).astype(dtype), noise(2, M, 3).astype(dtype), noise(2, 3)
    by_covariance = neula.lstsq(a, b, covariance=V)
    by_constraints = neula.lstsq(a, b, constraints=(C, d))
    path = neula.ridge_path(a[0], b[0], DAMPS)
    fit = neula.LeastSquares(N)
    fit.update(a[0], b[0])
    assert by_covariance.converged
    assert by_constraints.converged
    for i, j in np.ndindex(2, 3):
        one, right = a[i], b[i, :, j]
        found = [
            (by_covariance.x[i, :, j], least_squares(one, right, covariance=V)),
            (by_constraints.x[i, :, j], least_squares(one, right, constraints=(C, d[:, j]))),
        ]
        if i == 0:
            found.append((path.x[3, :, j], least_squares(one, right, damp=3.0)))
            found.append((fit.solve().x[:, j], least_squares(one, right)))
        for x, exact in found:
            assert np.abs(x - exact).max() <= 1e2 * np.finfo(dtype).eps * np.abs(exact).max()
    for matrix in (a, a.real.copy()):
        statistics = neula.lstsq(matrix, b).covariance()
        for i in range(2):
            alone = neula.lstsq(matrix[i], b[i]).covariance()
            limit = 1e3 * np.finfo(dtype).eps * np.abs(alone).max()
            assert np.abs(statistics[i] - alone).max() <= limit


def test_formulas_of_complex_columns() -> None:
    pytest.importorskip("formulaic")
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"y": B, "x": A[:, 0].real, "z": A[:, 1]})
    result = neula.fit_formula("y ~ x + z", table)
    design = np.column_stack([np.ones(M), table.x, table.z])
    exact = least_squares(design, B)
    assert error_of(design, list(result.coefficients.values()), exact) <= 1e-14
    np.testing.assert_allclose(result.predict(table), design @ exact, rtol=1e-13)
