"""neula.lstsq: certified answers on easy, hard and impossible problems."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import neula
from memory_of_gpu import peak_beside
from neula.engines import CpuEngine, CudaEngine, Engine, graphs, select_engine
from neula.engines.shipped import cuda_tuning
from neula.io import datasets
from neula.io.matrices import KINDS, SPECTRA, random_matrix
from neula.pipeline.result import AccuracyError, AccuracyWarning
from neula.problems.least_squares import refined

U64 = 2.0**-53


class HalfFast(CudaEngine):
    """A GPU's engine on a CPU, which neither multiplies in fp16 nor plays anything back.

    Products with error correction count as fast, and matrices that tests can afford as large.
    """

    replay = Engine.replay
    replayed_bytes = 0

    tuning = replace(cuda_tuning((9, 0)), together=10_000_000)


class SlowDouble(CpuEngine):
    """The steps of a GPU where fp64 is slow, in plain torch."""

    tuning = cuda_tuning((8, 9))


HALF_FAST = HalfFast("cpu", "fp32")
TOGETHER: dict[str, dict[str, Any]] = {
    "batch by cholesky": {"engine": "cpu"},
    "batch by gram-schmidt": {"engine": SlowDouble("cpu")},
}
PATHS: dict[str, dict[str, Any]] = {
    "cpu": {"engine": "cpu"},
    "emulated": {"engine": "emulated"},
    "gpu": {"engine": HALF_FAST},
    **TOGETHER,
}
EACH_CHAIN = pytest.mark.parametrize("how", TOGETHER)
Problem = tuple[np.ndarray, np.ndarray, dict[str, Any]]


def normal(m: int, n: int, k: int = 2, *, weighted: bool = False, **options: Any) -> Problem:
    rng = np.random.default_rng(m + n)
    weights = {"weights": rng.random(m) + 0.1} if weighted else {}
    return rng.standard_normal((m, n)), rng.standard_normal((m, k)), options | weights


def with_spectrum(kind: str, cond: float) -> Problem:
    a, b, _ = normal(400, 120)
    return random_matrix(kind, *a.shape, cond=cond).numpy(), b, {}


def consistent(cond: float, columns: int) -> Problem:
    """A residual that vanishes must not leave the errors of gradients that do not."""
    a, b, _ = with_spectrum("geometric", cond)
    b[:, :columns] = a @ np.ones((120, columns))
    return a, b, {"algorithm": "householder"}


CASES: dict[str, Callable[[], Problem]] = {
    **{
        f"{m} x {n}": partial(normal, m, n)
        for m, n in [(1, 1), (5, 1), (7, 7), (33, 32), (257, 129), (300, 200), (1, 5), (4, 9), (129, 700)]
    },
    "three right-hand sides": partial(normal, 50, 4, 3),
    **{kind: partial(with_spectrum, kind, 1e4) for kind in KINDS},
    **{f"{x}, {cond:.0e}": partial(with_spectrum, x, cond) for x in SPECTRA for cond in (1e2, 1e6, 1e10)},
    **{f"consistent, {cond:.0e}": partial(consistent, cond, 2) for cond in (1e9, 1e11)},
    "one of two consistent": partial(consistent, 1e10, 1),
    **{name: lambda name=name: (*datasets.surveying(name), {}) for name in ("well1033", "illc1033")},
    **{f"{m} x {n}, damped": partial(normal, m, n, damp=3.0) for m, n in [(700, 150), (100, 300), (20, 5)]},
    **{f"{m} x {n}, weighted": partial(normal, m, n, weighted=True) for m, n in [(700, 150), (100, 300)]},
    "hardly damped": partial(normal, 100, 300, damp=1e-3),
    "weighted and damped": partial(normal, 400, 60, weighted=True, damp=0.5),
}
PAIRS = [
    (path, case)
    for i, path in enumerate(PATHS)
    for j, case in enumerate(CASES)
    if (i + j) % 2 == 0 or path == "cpu"
]
"""All problems on the first path; every other one on others, in turns."""


def forward_bound(cond: float, x_norm: float, r_norm: float, a_norm: float, eta: float) -> float:
    """Relative error of x that a backward error eta allows (Bjorck 1996, theorem 1.4.6)."""
    return 2 * eta * (2 * cond + cond**2 * r_norm / (a_norm * x_norm))


def check_solutions(A: np.ndarray, b: np.ndarray, x: np.ndarray, u: float) -> None:
    """Each within the error, and with the gradient, that a backward error of the documented bound allows."""
    m, n = A.shape[1], min(A.shape[1:])
    eta = 8 * u + 8 * math.sqrt(n) * U64 + u
    for a, right, got in zip(A.astype(float), b.astype(float), x.astype(float), strict=True):
        right, got = right.reshape(len(right), -1), got.reshape(len(got), -1)
        reference = np.linalg.lstsq(a, right, rcond=None)[0]
        cond, norm = np.linalg.cond(a), np.linalg.norm(a, 2)
        for y, z, c in zip(reference.T, got.T, right.T, strict=True):
            allowed = forward_bound(cond, np.linalg.norm(y), np.linalg.norm(c - a @ y), norm, eta)
            assert np.linalg.norm(z - y) <= allowed * np.linalg.norm(y)
            residual = c - a @ z
            size = norm * (np.linalg.norm(residual) + norm * np.linalg.norm(z))
            assert np.linalg.norm(a.T @ residual) <= (eta + m * U64) * size


@pytest.mark.parametrize(("path", "case"), PAIRS)
def test_every_path_for_every_problem(path, case):
    whole, right, options = CASES[case]()
    m, n = whole.shape
    plain = not options and "," not in case and case not in KINDS and "1033" not in case
    for dtype in ["float16", "float32", "float64"] if plain else ["float64"]:
        a, b = whole.astype(dtype), right.astype(dtype)
        if path in TOGETHER:
            a, b = np.stack([a, -a[:, ::-1]]), np.stack([b, b])
        before = a.copy(), b.copy()
        result = neula.lstsq(a, b, **PATHS[path], **options)
        assert result.converged
        assert result.accepted.all()
        assert (result.x.dtype, result.x.shape) == (a.dtype, (*a.shape[:-2], n, *b.shape[a.ndim - 1 :]))
        assert (result.ranks == (min(m, n) if "damp" not in options else n)).all()
        u = float(np.finfo(dtype).eps) / 2
        assert (result.backward_errors <= result.tolerance + u).all()
        assert result.backward_error == result.backward_errors.max()
        np.testing.assert_array_equal(a, before[0])
        np.testing.assert_array_equal(b, before[1])
        shape = a.shape[:-2]
        a, b, x = (y.astype(float).reshape(-1, *y.shape[len(shape) :]) for y in (a, b, result.x))
        b, x = (y.reshape(*y.shape[:2], -1) for y in (b, x))
        scales = options.get("weights", np.ones(m))[:, None]
        a, b = a * scales, b * scales
        if dtype == "float64" and "damp" not in options:
            residual = np.linalg.norm(b - a @ x, axis=1).ravel()
            rounding = m * U64 * np.linalg.norm(a) * np.linalg.norm(x)
            np.testing.assert_allclose(result.residual_norm, residual, rtol=1e-9, atol=rounding)
        if "damp" in options:
            below = np.broadcast_to(options["damp"] * np.eye(n), (len(a), n, n))
            a, b = np.concatenate([a, below], 1), np.concatenate([b, np.zeros((len(b), n, b.shape[2]))], 1)
        check_solutions(a, b, x, u)


@pytest.mark.parametrize("engine", ["cpu", "emulated"])
@pytest.mark.parametrize("transpose", [False, True], ids=["tall", "wide"])
@pytest.mark.parametrize("size", [(600, 150), (50, 12)], ids=["large", "small"])
def test_rank_deficient_gives_the_minimum_norm_solution(size, transpose, engine, rng):
    A = rng.standard_normal(size)
    A[:, 5] = A[:, 3] + A[:, 4]
    A[:, 9] = 0
    A = A.T if transpose else A
    b = rng.standard_normal(A.shape[0])
    result = neula.lstsq(A, b, engine=engine)
    reference = np.linalg.lstsq(A, b, rcond=None)[0]
    assert result.converged
    assert result.rank == size[1] - 2
    large = A.size > 10_000
    if engine == "cpu" and not (large and transpose):  # by the compiled core
        assert [x.method.split()[0] for x in result.attempts] == ["pivoted"]
    else:
        assert result.factorization == ("complete orthogonal fp64" if large else "svd fp64")
        assert len(result.attempts) > 1
    np.testing.assert_allclose(result.x, reference, atol=1e-10 * np.linalg.norm(reference))


def test_rcond_decides(rng):
    A = random_matrix("cluster_small", 300, 40, cond=1e6).numpy()
    b = rng.standard_normal(300)
    assert neula.lstsq(A, b).rank == 40
    assert neula.lstsq(A, b, rcond=1e-4).rank == 39


def test_no_right_hand_sides_are_shown(rng):
    assert "(5, 0)" in repr(neula.lstsq(rng.standard_normal((30, 5)), np.zeros((30, 0))))


def test_zero_matrix_and_zero_right_hand_side(rng):
    result = neula.lstsq(np.zeros((5, 3)), np.ones(5))
    assert result.rank == 0
    assert (result.x == 0).all()
    A = rng.standard_normal((500, 150))
    mixed = neula.lstsq(A, np.stack([np.zeros(500), rng.standard_normal(500)], 1))
    assert mixed.converged
    assert (mixed.x[:, 0] == 0).all()
    assert (mixed.x[:, 1] != 0).all()


@pytest.mark.parametrize("algorithm", ["cgls", "lsqr", "householder", "svd"])
def test_named_algorithms_reach_double_precision(algorithm, rng):
    A, b = rng.standard_normal((900, 120)), rng.standard_normal(900)
    result = neula.lstsq(A, b, algorithm=algorithm, engine="emulated")
    assert result.converged
    assert len(result.attempts) == 1
    assert algorithm in result.factorization


@pytest.mark.parametrize("algorithm", ["direct", "normal"])
def test_unrefined_algorithms_say_how_far_they_get(algorithm, rng):
    A, b = rng.standard_normal((900, 120)), rng.standard_normal(900)
    with pytest.warns(neula.AccuracyWarning, match="backward error"):
        result = neula.lstsq(A, b, algorithm=algorithm)
    assert not result.converged
    # Single precision arithmetic: far from double, not worse than single allows.
    assert 1e-13 < result.backward_error < 100 * 2.0**-24
    assert neula.lstsq(A, b, algorithm=algorithm, accuracy="fp32").converged


def test_direct_solver_in_half_precision_is_two_orders_worse(rng):
    """The paper's section 4.2.2: without refinement fp16 loses about two orders against single precision."""
    A, b = rng.standard_normal((900, 300)), rng.standard_normal(900)
    with pytest.warns(neula.AccuracyWarning):
        half = neula.lstsq(A, b, algorithm="direct", compute="fp16", engine="emulated")
    with pytest.warns(neula.AccuracyWarning):
        single = neula.lstsq(A, b, algorithm="direct", compute="fp32", engine="emulated")
    assert 10 * single.backward_error < half.backward_error < 2.0**-11


def test_fixed_variant_that_fails_is_not_replaced(rng):
    A = random_matrix("geometric", 600, 120, cond=1e8).numpy()
    with pytest.warns(neula.AccuracyWarning):
        result = neula.lstsq(A, rng.standard_normal(600), algorithm="cgls", engine="emulated")
    assert not result.converged
    assert [a.method for a in result.attempts] == ["rgsqrf fp16 + cgls"]


@pytest.mark.parametrize(
    ("kind", "cond", "given_up"),
    [
        *(("geometric", cond, cond > 1e3) for cond in (1e2, 1e3, 1e4, 1e6)),
        *((kind, 1e4, False) for kind in ("arithmetic", "cluster_small", "uniform01", "normal")),
    ],
)
def test_an_fp16_r_that_will_not_do_ends_half_way(kind, cond, given_up, rng):
    """Where many singular values are small, the diagonal of R falls steadily; a few cost few iterations."""
    A = random_matrix(kind, 700, 300, cond=cond).numpy()
    b = rng.standard_normal(700)
    result = neula.lstsq(A, b, engine="emulated")
    assert result.converged
    assert ("the diagonal of R will fall" in result.attempts[0].reason) == given_up
    assert result.attempts[0].accepted is not given_up
    with pytest.warns(AccuracyWarning):
        named = neula.lstsq(A, b, engine="emulated", algorithm="cgls", compute="fp16", max_iterations=1)
    assert "diagonal" not in named.attempts[0].reason, "who names a variant gets it"


CHAIN = [
    "cholesky fp16_cor + seminormal",
    "cholesky fp16_cor + cgls",
    "rgsqrf fp16_cor + cgls",
    "rgsqrf fp64 + cgls",
    "householder fp64 + cgls",
    "complete orthogonal fp64",
    "svd fp64",
]


@pytest.mark.parametrize(("cond", "links"), [(1e1, 1), (1e3, 1), (4e3, 2), (1e5, 3), (1e8, 4), (1e9, 5)])
def test_where_r_comes_from_on_a_gpu(cond, links, rng):
    """The Gram matrix in single precision up to 1e3 and, as a preconditioner, below 1e4, QR up to 1e6 or so,
    and double precision, whose panels are Cholesky QR, up to 1e8.
    """
    A = random_matrix("geometric", 600, 150, cond=cond)
    b = torch.from_numpy(rng.standard_normal((600, 2)))
    result = neula.lstsq(A, b, engine=HALF_FAST)
    assert result.converged
    assert [a.method for a in result.attempts] == CHAIN[:links]
    assert [a.accepted for a in result.attempts] == [False] * (links - 1) + [True]
    check_solutions(A.numpy()[None], b.numpy()[None], result.x.numpy()[None], U64)


def test_a_gram_matrix_that_is_too_coarse_is_not_iterated_with(monkeypatch, rng):
    monkeypatch.setitem(refined.LIMITS, ("cholesky", "fp16_cor"), refined.Limit(300.0, 0))
    A = random_matrix("geometric", 600, 150, cond=4e3).numpy()
    result = neula.lstsq(A, rng.standard_normal(600), engine=HALF_FAST)
    assert result.attempts[1].reason.endswith("too large for an R in this precision")
    assert result.attempts[2].accepted


def test_singular_values_on_both_sides_of_rcond_leave_no_digit(rng):
    """A geometric spectrum down to 1e-17 has no gap at rcond: neither the rank nor a digit of x is sure."""
    A = random_matrix("geometric", 600, 150, cond=1e17)
    with pytest.warns(neula.IllConditionedWarning, match="no digit of x is guaranteed"):
        result = neula.lstsq(A, torch.from_numpy(rng.standard_normal(600)), engine=HALF_FAST)
    assert not result.converged
    assert result.forward_error > 0.1
    assert [a.method for a in result.attempts] == [*CHAIN[:5], "complete orthogonal fp64, no gap"]
    by_svd = neula.lstsq(A, torch.ones(600, dtype=torch.float64), algorithm="svd")
    assert abs(by_svd.rank - result.rank) <= 1


def test_corrected_products_can_be_named(rng):
    A, b = random_matrix("geometric", 300, 40, cond=1e4).numpy(), rng.standard_normal(300)
    result = neula.lstsq(A, b, algorithm="cgls", compute="fp16_cor", engine=HALF_FAST)
    assert result.converged
    assert result.factorization == "rgsqrf fp16_cor + cgls"
    with pytest.raises(ValueError, match="the cpu engine has no products with error correction"):
        neula.lstsq(A, b, algorithm="cgls", compute="fp16_cor", engine="cpu")
    with pytest.raises(ValueError, match=r"unknown format 'fp12'.*fp16_cor"):
        neula.lstsq(A, b, compute="fp12")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "shape", "method"),
    [
        ("normal", (8192, 1024), "cholesky fp64 + seminormal"),
        ("normal", (140000, 1024), "cholesky fp16_cor + seminormal"),
        ("normal", (2000000, 150), "cholesky fp64 + seminormal"),
        ("normal", (32768, 2304), "cholesky fp16 + cgls"),
        ("uniform01", (32768, 2304), "cholesky fp16 + cgls"),
        ("normal", (16384, 4608), "rgsqrf fp16 + cgls"),
    ],
)
def test_the_first_r_does_on_a_gpu(kind, shape, method):
    A = random_matrix(kind, *shape, device=torch.device("cuda"))
    b = torch.randn(shape[0], 2, dtype=A.dtype, device="cuda")
    result = neula.lstsq(A, b)
    assert result.converged
    assert result.factorization == method
    # Normwise backward error of the larger of two right-hand sides, by optimality.
    residual = b - A @ result.x
    gradient = torch.linalg.vector_norm(A.T @ residual, dim=0) / torch.linalg.vector_norm(residual, dim=0)
    assert float(gradient.max()) <= 8 * shape[1] ** 0.5 * U64 * float(torch.linalg.matrix_norm(A))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"damp": 0.5}, {"weights": True}])
@pytest.mark.parametrize("shape", [(6000, 500), (500, 700)])
def test_what_is_played_back_is_what_was_computed(shape, options):
    """R comes from a CUDA graph at the third call; it belongs to the matrix of that call."""
    graphs.clear()
    if options.get("weights"):
        options = {"weights": torch.rand(shape[0], dtype=torch.float64, device="cuda") + 0.1}
    methods = set()
    for seed in range(4):
        A = random_matrix("normal", *shape, seed=seed, device=torch.device("cuda"))
        b = torch.randn(shape[0], 2, dtype=A.dtype, device="cuda")
        result = neula.lstsq(A, b, **options)
        by_householder = neula.lstsq(A, b, algorithm="householder", **options)
        assert result.converged
        assert torch.allclose(result.x, by_householder.x, rtol=0, atol=1e-11 * float(result.x.abs().max()))
        methods.add(result.factorization)
    assert len(methods) == 1
    assert methods & {key[0][0] for key, graph in graphs._graphs.items() if graph is not None}
    A[:, 1] = A[:, 0]
    assert neula.lstsq(A, b).rank == (500 - 1 if shape[0] > shape[1] else 500)
    A[7, 7] = math.nan
    with pytest.raises(ValueError, match=r"A\[7, 7\]"):
        neula.lstsq(A, b, **options)
    graphs.clear()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(20000, 900), (900, 20000), (3000, 2000)])
def test_ranks_by_tournaments_on_a_gpu(shape):
    """Twice: what is played back belongs to the matrix of its call."""
    for seed in range(2):
        generator = torch.Generator("cuda").manual_seed(seed)
        left, right, b = (
            torch.randn(size, generator=generator, dtype=torch.float64, device="cuda")
            for size in ((shape[0], 400), (400, shape[1]), (shape[0],))
        )
        A = left @ right
        result = neula.lstsq(A, b)
        assert result.converged
        assert result.rank == 400
        assert result.attempts[-1].method == "complete orthogonal fp64"
        expected = torch.linalg.pinv(right) @ (torch.linalg.pinv(left) @ b)
        assert float((result.x - expected).norm() / expected.norm()) <= 1e-9


@pytest.mark.gpu
def test_a_large_fp16_r_that_will_not_do_ends_half_way_on_a_gpu():
    A = random_matrix("geometric", 9000, 6000, cond=1e4, device=torch.device("cuda"))
    b = torch.randn(9000, dtype=A.dtype, device="cuda")
    result = neula.lstsq(A, b)
    assert "the diagonal of R will fall" in result.attempts[0].reason
    assert [a.method for a in result.attempts] == ["rgsqrf fp16 + cgls", "rgsqrf fp16_cor + cgls"]
    assert result.converged


def test_stops_by_itself_and_does_not_drift(rng):
    """Plain CGLS comes back up after convergence; this one stops, and more iterations change nothing."""
    A = random_matrix("arithmetic", 1500, 200, cond=1e3).numpy()
    b = rng.standard_normal(1500)
    few = neula.lstsq(A, b, engine="emulated", max_iterations=40)
    many = neula.lstsq(A, b, engine="emulated", max_iterations=4000)
    assert few.converged
    assert many.iterations == few.iterations < 40
    np.testing.assert_array_equal(few.x, many.x)


def test_the_batch_shape_is_that_of_the_evidence(rng):
    A, b = torch.randn(2, 3, 20, 4), torch.randn(2, 3, 20)
    result = neula.lstsq(A, b)
    for evidence, dtype in ((result.ranks, torch.int64), (result.accepted, torch.bool)):
        assert isinstance(evidence, torch.Tensor)
        assert (evidence.shape, evidence.dtype) == ((2, 3), dtype)
    assert result.backward_errors.shape == (2, 3)
    single = neula.lstsq(A[0, 0], b[0, 0])
    assert single.ranks.shape == single.backward_errors.shape == ()
    assert float(single.backward_errors) == single.backward_error


@EACH_CHAIN
def test_each_problem_of_a_batch_gets_what_it_needs(how, rng):
    """Good, ill-conditioned at several degrees, singular, zero, with columns in all units, in one batch."""
    spectra = [
        random_matrix("geometric", 80, 12, cond=c, seed=i).numpy()
        for i, c in enumerate([1e1, 1e4, 1e7, 1e10, 1e13])
    ]
    A = np.stack([*spectra, spectra[0], np.zeros((80, 12)), spectra[0] * 10.0 ** np.linspace(-30, 30, 12)])
    A[5, :, 3] = A[5, :, 4] + A[5, :, 1]
    b = rng.standard_normal((8, 80))
    result = neula.lstsq(A, b, **TOGETHER[how])
    assert result.converged
    assert result.ranks.tolist() == [12, 12, 12, 12, 12, 11, 0, 12]
    assert (result.backward_errors <= result.tolerance).all()
    assert result.rank == 0
    assert [a.accepted for a in result.attempts] == [False] * (len(result.attempts) - 1) + [True]
    check_solutions(A[:3], b[:3], result.x[:3], U64)
    np.testing.assert_allclose(result.x[5], np.linalg.lstsq(A[5], b[5], rcond=1e-12)[0], rtol=1e-9)
    assert (result.x[6] == 0).all()
    alone = neula.lstsq(A[7], b[7]).x
    np.testing.assert_allclose(result.x[7], alone, rtol=1e-10)


@EACH_CHAIN
def test_singular_problems_are_found_whatever_the_direction(how, rng):
    """200 null directions: the known solution has a component along each of them that is lost."""
    A = rng.standard_normal((200, 30, 6))
    weights = rng.standard_normal((200, 5, 1))
    A[:, :, 5:] = A[:, :, :5] @ weights
    b = rng.standard_normal((200, 30))
    result = neula.lstsq(A, b, **TOGETHER[how])
    assert result.converged
    assert (result.ranks == 5).all()
    np.testing.assert_allclose(result.x, (np.linalg.pinv(A, rcond=1e-12) @ b[..., None])[..., 0], rtol=1e-8)


@pytest.mark.parametrize("options", [{}, {"algorithm": "cgls"}, {"damp": 0.1}])
@pytest.mark.parametrize(
    ("a", "b", "bad"),
    [
        ((30, 4), (5, 30, 2), (3,)),  # one matrix
        ((1, 4, 30), (5, 4, 1), (3,)),  # wide
        ((3, 1, 30, 4), (3, 5, 30, 2), (2, 3)),  # each matrix with five
    ],
)
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_right_hand_sides_that_share_a_matrix_do_not_spoil_each_other(value, a, b, bad, options, rng):
    A, b = rng.standard_normal(a), rng.standard_normal(b)
    b[bad] = 0.0  # the same columns, with nothing in them
    clean = neula.lstsq(A, b, **options)
    b[(*bad, 1, 0)] = value
    with pytest.warns(neula.AccuracyWarning, match=f"1 of {clean.accepted.size} problems hold NaN or Inf"):
        result = neula.lstsq(A, b, **options)
    good = np.ones(clean.accepted.shape, bool)
    good[bad] = False
    assert not result.converged
    np.testing.assert_array_equal(result.accepted, good)
    np.testing.assert_array_equal(result.x[good], clean.x[good])
    np.testing.assert_array_equal(result.forward_errors[good], clean.forward_errors[good])
    np.testing.assert_array_equal(result.ranks, np.where(good, clean.ranks, 0))
    for missing in (result.x, result.forward_errors, result.backward_errors, result.conditions):
        assert np.isnan(missing[bad]).all()
        assert np.isfinite(missing[good]).all()
    assert math.isnan(result.backward_error)
    assert math.isnan(result.forward_error)
    with pytest.raises(ValueError, match=r"b\["):
        neula.lstsq(A, b, **options, strict=True)


@EACH_CHAIN
def test_accuracy_of_a_batch_decides_how_far_it_is_refined(how, rng):
    A, b = rng.standard_normal((8, 50, 10)), rng.standard_normal((8, 50))
    low, high = (neula.lstsq(A, b, accuracy=accuracy, **TOGETHER[how]) for accuracy in ("fp16", "fp64"))
    assert low.converged
    assert high.converged
    assert low.iterations <= high.iterations
    assert high.backward_error <= low.tolerance


@EACH_CHAIN
def test_a_batch_larger_than_a_chunk(how, rng, monkeypatch):
    A, b = rng.standard_normal((11, 30, 4)), rng.standard_normal((11, 30))
    whole = neula.lstsq(A, b, **TOGETHER[how])
    engine = select_engine(TOGETHER[how]["engine"], torch.device("cpu"))
    monkeypatch.setattr(type(engine), "tuning", replace(engine.tuning, chunk_elements=3 * 30 * 4))
    pieces = neula.lstsq(A, b, **TOGETHER[how])
    np.testing.assert_allclose(pieces.x, whole.x, rtol=1e-12)
    assert pieces.attempts[0].reason.startswith("0 of 11 problems rejected")


def test_strict_raises_with_the_index(rng):
    A, b = rng.standard_normal((2, 2, 300, 40)), rng.standard_normal((2, 2, 300))
    A[1, 0] = random_matrix("geometric", 300, 40, cond=1e3).numpy()
    options = {"algorithm": "normal", "accuracy": "fp32"}
    with pytest.warns(neula.AccuracyWarning, match=r"for A\[1, 0\]: backward error"):
        result = neula.lstsq(A, b, **options)
    with pytest.raises(AccuracyError, match=r"fp32 accuracy for A\[1, 0\]: backward error") as caught:
        neula.lstsq(A, b, **options, strict=True)
    assert caught.value.indices == ((1, 0),)
    np.testing.assert_array_equal(caught.value.result.x, result.x)
    assert result.accepted.tolist() == [[True, True], [False, True]]
    with pytest.raises(AccuracyError, match="not certified to fp64 accuracy: backward error") as caught:
        neula.lstsq(A[0, 0], b[0, 0], algorithm="direct", strict=True)
    assert caught.value.indices == ((),)
    assert neula.lstsq(A, b, strict=True).converged


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(50, 32, 32), (20, 256, 32), (20, 512, 128), (3, 4096, 128), (9, 7, 30)])
def test_a_batch_on_a_gpu(shape, dtype):
    A = torch.stack([random_matrix("normal", *shape[1:], seed=i) for i in range(shape[0])]).to("cuda", dtype)
    A[0, :, -1] = A[0, :, 0]
    b = torch.ones(*shape[:2], 2, dtype=dtype, device="cuda")
    result = neula.lstsq(A, b)
    assert result.converged
    assert result.x.is_cuda
    assert result.ranks.is_cuda
    # A wide matrix with two equal columns has full rank.
    assert result.ranks.tolist() == [min(shape[1], shape[2] - 1)] + [min(shape[1:])] * (shape[0] - 1)
    check_solutions(*(t[1:].cpu().numpy() for t in (A, b, result.x)), torch.finfo(dtype).eps / 2)


def test_overflow_of_the_output_dtype_is_an_error():
    with pytest.raises(OverflowError, match="wider dtype"):
        neula.lstsq(np.full((3, 1), 1e-4, dtype=np.float16), np.full(3, 6e4, dtype=np.float16))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"accuracy": "double"}, "unknown accuracy 'double'"),
        ({"engine": "tpu"}, "unknown engine 'tpu'"),
        ({"algorithm": "qr"}, "unknown algorithm 'qr'.*'cgls'"),
        ({"compute": "int8"}, "unknown format 'int8'"),
        ({"damp": -1.0}, "damp must be finite and not negative, got -1.0"),
        ({"damp": math.nan}, "damp"),
        ({"rcond": 2.0}, "rcond must be at least 0 and below 1, got 2.0"),
        ({"max_iterations": 0}, "max_iterations must be a whole number, at least 1, got 0"),
        ({"weights": np.ones(3)}, r"weights must have shape \(10,\).*got \(3,\)"),
        ({"weights": np.full(10, np.nan)}, r"weights\[0\] is nan"),
    ],
)
def test_bad_parameters(kwargs, message, rng):
    with pytest.raises(ValueError, match=message):
        neula.lstsq(rng.standard_normal((10, 3)), np.ones(10), **kwargs)


def test_nan_says_where(rng):
    A, b = rng.standard_normal((10, 3)), np.ones(10)
    A[4, 2] = np.nan
    with pytest.raises(ValueError, match=r"A\[4, 2\] is nan"):
        neula.lstsq(A, b)
    b[7] = np.inf
    with pytest.raises(ValueError, match=r"b\[7\] is inf"):
        neula.lstsq(rng.standard_normal((10, 3)), b)


def test_wide_refuses_unrefined_algorithms(rng):
    with pytest.raises(ValueError, match="'direct' needs at least as many rows as columns"):
        neula.lstsq(rng.standard_normal((3, 10)), np.ones(3), algorithm="direct")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_input_is_really_solved(dtype):
    """The zero vector has a backward error that a careless bound for bf16 would accept."""
    generator = torch.Generator("cpu").manual_seed(1)
    A = torch.randn(3000, 100, generator=generator, dtype=torch.float64).to(dtype)
    b = torch.randn(3000, generator=generator, dtype=torch.float64).to(dtype)
    result = neula.lstsq(A, b)
    reference = torch.linalg.lstsq(A.double(), b.double()[:, None]).solution[:, 0]
    u = torch.finfo(dtype).eps / 2
    assert result.converged
    assert (result.x.double() - reference).norm() <= 20 * u * reference.norm()


def test_accuracy_that_the_dtype_cannot_hold_is_refused(rng):
    A, b = rng.standard_normal((30, 4)).astype(np.float32), rng.standard_normal(30).astype(np.float32)
    with pytest.raises(ValueError, match=r"accuracy 'fp64' is finer .*float32: pass A in a wider"):
        neula.lstsq(A, b, accuracy="fp64")


@pytest.mark.gpu
def test_memory_of_a_square_matrix_on_a_gpu() -> None:
    """Beside A its scaled copy, R, half of the columns in parts, a quarter, and what is played back."""
    n = 16384
    a = torch.randn(n, n, device="cuda")
    b = torch.randn(n, device="cuda")
    for _ in range(4):  # what is played back is recorded by then
        torch.cuda.synchronize()
        result, peak = peak_beside(lambda: neula.lstsq(a, b))
    assert result.converged
    assert peak <= 3.0 * a.nbytes
