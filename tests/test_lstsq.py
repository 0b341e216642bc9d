"""neula.lstsq: certified answers on easy, hard and impossible problems."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
import scipy.linalg
import torch

import neula
from neula import datasets
from neula.matrices import KINDS, SPECTRA, random_matrix

U64 = 2.0**-53


def optimality(A: np.ndarray, b: np.ndarray, x: np.ndarray) -> float:
    """``||A^T r|| / (||A||_2 ||r||)``, computed here and not taken from the result."""
    r = b - A @ x
    return float(np.linalg.norm(A.T @ r) / (np.linalg.norm(A, 2) * np.linalg.norm(r)))


def forward_bound(cond: float, n: int, x_norm: float, r_norm: float, a_norm: float, eta: float) -> float:
    """Relative error of x that a backward error eta allows (Bjorck 1996, theorem 1.4.6)."""
    return 2 * eta * (2 * cond + cond**2 * r_norm / (a_norm * x_norm))


@pytest.mark.parametrize("engine", ["cpu", "emulated"])
@pytest.mark.parametrize("kind", KINDS)
def test_double_precision_on_every_kind_of_the_paper(kind, engine, rng):
    A = random_matrix(kind, 1200, 150, cond=1e4).numpy()
    b = rng.standard_normal(1200)
    result = neula.lstsq(A, b, engine=engine)
    assert result.converged
    assert result.rank == 150
    assert result.backward_error <= 8 * math.sqrt(150) * U64
    reference = scipy.linalg.lstsq(A, b)[0]
    cond = np.linalg.cond(A)
    allowed = forward_bound(
        cond,
        150,
        np.linalg.norm(reference),
        np.linalg.norm(b - A @ reference),
        np.linalg.norm(A, 2),
        8 * math.sqrt(150) * U64,
    )
    assert np.linalg.norm(result.x - reference) <= allowed * np.linalg.norm(reference)


@pytest.mark.parametrize("cond", [1e2, 1e6, 1e10])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_converges_at_any_condition_number(spectrum, cond, rng):
    A = random_matrix(spectrum, 800, 120, cond=cond).numpy()
    b = rng.standard_normal(800)
    result = neula.lstsq(A, b, engine="emulated")
    direct = torch.linalg.lstsq(torch.from_numpy(A), torch.from_numpy(b)[:, None], driver="gels").solution
    assert result.converged
    assert result.rank == 120
    # As optimal as Householder QR in double precision, or within the bound where that is better by luck.
    assert optimality(A, b, result.x) <= max(10 * optimality(A, b, direct[:, 0].numpy()), 1e-13)


@pytest.mark.parametrize("name", datasets.nist_names())
def test_nist_digits_at_least_those_of_scipy(name):
    problem = datasets.nist(name)
    result = neula.lstsq(problem.A, problem.b)
    peer = scipy.linalg.lstsq(problem.A, problem.b)[0]
    digits = datasets.log_relative_error(result.x, problem.certified)
    # Beyond 14 digits the last bit of x decides: a tie.
    assert digits >= min(datasets.log_relative_error(peer, problem.certified), 14.0)
    assert result.converged
    assert result.rank == problem.A.shape[1]
    assert (result.x != 0).all()


@pytest.mark.parametrize("name", ["well1033", "illc1033"])
def test_surveying_problems(name):
    A, b = datasets.surveying(name)
    result = neula.lstsq(A, b)
    assert result.converged
    assert result.rank == A.shape[1]
    np.testing.assert_allclose(result.x, scipy.linalg.lstsq(A, b)[0], rtol=1e-8)


@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (7, 7), (33, 32), (257, 129), (300, 200)])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("engine", ["cpu", "emulated"])
def test_tall_shapes_and_dtypes(shape, dtype, engine, rng):
    A = rng.standard_normal(shape).astype(dtype)
    b = rng.standard_normal((shape[0], 3)).astype(dtype)
    before = A.copy(), b.copy()
    result = neula.lstsq(A, b, engine=engine)
    assert result.converged
    assert result.x.dtype == A.dtype
    assert result.x.shape == (shape[1], 3)
    np.testing.assert_array_equal(A, before[0])
    np.testing.assert_array_equal(b, before[1])
    reference = np.linalg.lstsq(A.astype(float), b.astype(float), rcond=None)[0]
    u = float(np.finfo(dtype).eps) / 2
    cond = np.linalg.cond(A.astype(float))
    error = np.linalg.norm(result.x.astype(float) - reference, axis=0)
    residual = np.linalg.norm(b - A.astype(float) @ reference, axis=0)
    sizes = np.linalg.norm(reference, axis=0)
    eta = 8 * math.sqrt(shape[1]) * u + u
    norm = np.linalg.norm(A.astype(float), 2)
    for e, size, r in zip(error, sizes, residual, strict=True):
        assert e <= forward_bound(cond, shape[1], size, r, norm, eta) * size


@pytest.mark.parametrize("shape", [(1, 5), (4, 9), (129, 700), (200, 1500)])
@pytest.mark.parametrize("engine", ["cpu", "emulated"])
def test_wide_gives_the_minimum_norm_solution(shape, engine, rng):
    A = rng.standard_normal(shape)
    b = rng.standard_normal((shape[0], 2))
    result = neula.lstsq(A, b, engine=engine)
    reference = np.linalg.pinv(A) @ b
    assert result.converged
    assert result.rank == shape[0]
    cond = np.linalg.cond(A)
    eta = 8 * math.sqrt(shape[0]) * U64
    assert np.linalg.norm(result.x - reference) <= 4 * cond * eta * np.linalg.norm(reference)


def test_wide_and_ill_conditioned(rng):
    A = random_matrix("geometric", 150, 600, cond=1e5).numpy()
    b = rng.standard_normal(150)
    result = neula.lstsq(A, b, engine="emulated")
    reference = np.linalg.pinv(A) @ b
    assert result.converged
    assert np.linalg.norm(result.x - reference) <= 1e5 * 1e-13 * np.linalg.norm(reference)
    assert np.linalg.norm(result.x) <= (1 + 1e-8) * np.linalg.norm(reference)


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
    assert result.factorization == "svd fp64"
    assert len(result.attempts) > 1
    np.testing.assert_allclose(result.x, reference, atol=1e-10 * np.linalg.norm(reference))


def test_product_of_thin_matrices(rng):
    A = rng.standard_normal((900, 20)) @ rng.standard_normal((20, 150))
    b = rng.standard_normal(900)
    result = neula.lstsq(A, b)
    assert result.rank == 20
    np.testing.assert_allclose(result.x, np.linalg.lstsq(A, b, rcond=None)[0], rtol=1e-9, atol=1e-12)


def test_single_precision_data_of_low_rank(rng):
    thin = rng.standard_normal((900, 20)) @ rng.standard_normal((20, 150))
    result = neula.lstsq(thin.astype(np.float32), rng.standard_normal(900).astype(np.float32))
    assert result.rank == 20


def test_rank_does_not_depend_on_the_units_of_columns(rng):
    A = rng.standard_normal((400, 30)) * 10.0 ** np.linspace(-30, 30, 30)
    b = rng.standard_normal(400)
    result = neula.lstsq(A, b)
    assert result.converged
    assert result.rank == 30
    scales = np.linalg.norm(A, axis=0)
    reference = np.linalg.lstsq(A / scales, b, rcond=None)[0] / scales
    np.testing.assert_allclose(result.x, reference, rtol=1e-10)


def test_rcond_decides(rng):
    A = random_matrix("cluster_small", 300, 40, cond=1e6).numpy()
    b = rng.standard_normal(300)
    assert neula.lstsq(A, b).rank == 40
    assert neula.lstsq(A, b, rcond=1e-4).rank == 39


def test_zero_matrix_and_zero_right_hand_side(rng):
    result = neula.lstsq(np.zeros((5, 3)), np.ones(5))
    assert result.rank == 0
    assert (result.x == 0).all()
    A = rng.standard_normal((500, 150))
    mixed = neula.lstsq(A, np.stack([np.zeros(500), rng.standard_normal(500)], 1))
    assert mixed.converged
    assert (mixed.x[:, 0] == 0).all()
    assert (mixed.x[:, 1] != 0).all()


def test_consistent_system_recovers_its_solution(rng):
    A = random_matrix("geometric", 900, 150, cond=1e3).numpy()
    x = rng.standard_normal(150)
    result = neula.lstsq(A, A @ x, engine="emulated")
    assert result.converged
    assert np.linalg.norm(result.x - x) <= 1e3 * 1e-13 * np.linalg.norm(x)


@pytest.mark.parametrize("shape", [(700, 150), (100, 300), (20, 5)])
@pytest.mark.parametrize("damp", [1e-3, 3.0])
def test_damping_solves_the_ridge_problem(shape, damp, rng):
    A = rng.standard_normal(shape)
    b = rng.standard_normal((shape[0], 2))
    result = neula.lstsq(A, b, damp=damp)
    stacked = np.vstack([A, damp * np.eye(shape[1])])
    reference = np.linalg.lstsq(stacked, np.vstack([b, np.zeros((shape[1], 2))]), rcond=None)[0]
    assert result.converged
    cond = np.linalg.cond(stacked)
    assert np.linalg.norm(result.x - reference) <= 1e-13 * cond**2 * np.linalg.norm(reference)


@pytest.mark.parametrize("shape", [(700, 150), (100, 300)])
def test_weights_scale_rows(shape, rng):
    A, b = rng.standard_normal(shape), rng.standard_normal(shape[0])
    weights = rng.random(shape[0]) + 0.1
    result = neula.lstsq(A, b, weights=weights)
    reference = np.linalg.lstsq(A * weights[:, None], b * weights, rcond=None)[0]
    assert result.converged
    np.testing.assert_allclose(result.x, reference, rtol=1e-8, atol=1e-12)


def test_weights_and_damping_together(rng):
    A, b = rng.standard_normal((400, 60)), rng.standard_normal(400)
    weights = rng.random(400)
    result = neula.lstsq(A, b, weights=weights, damp=0.5)
    normal = (A * weights[:, None] ** 2).T @ A + 0.25 * np.eye(60)
    np.testing.assert_allclose(result.x, np.linalg.solve(normal, A.T @ (weights**2 * b)), rtol=1e-9)


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


def test_stops_by_itself_and_does_not_drift(rng):
    """Plain CGLS comes back up after convergence; this one stops, and more iterations change nothing."""
    A = random_matrix("arithmetic", 1500, 200, cond=1e3).numpy()
    b = rng.standard_normal(1500)
    few = neula.lstsq(A, b, engine="emulated", max_iterations=40)
    many = neula.lstsq(A, b, engine="emulated", max_iterations=4000)
    assert few.converged
    assert many.iterations == few.iterations < 40
    np.testing.assert_array_equal(few.x, many.x)


def test_accuracy_levels_cost_what_they_should(rng):
    A, b = rng.standard_normal((900, 150)), rng.standard_normal(900)
    iterations = [
        neula.lstsq(A, b, accuracy=accuracy, engine="emulated").iterations
        for accuracy in ("bf16", "fp16", "fp32", "fp64")
    ]
    assert iterations == sorted(iterations)
    assert iterations[0] < iterations[-1]


def test_batches(rng):
    A, b = rng.standard_normal((2, 3, 20, 4)), rng.standard_normal((2, 3, 20))
    result = neula.lstsq(A, b)
    assert result.x.shape == (2, 3, 4)
    assert result.converged
    expected = np.linalg.lstsq(A[1, 2], b[1, 2], rcond=None)[0]
    np.testing.assert_allclose(result.x[1, 2], expected, rtol=1e-10)
    several = neula.lstsq(A, rng.standard_normal((2, 3, 20, 5)))
    assert several.x.shape == (2, 3, 4, 5)
    assert len(several.residual_norm) == 30


def test_residual_norm(rng):
    A, b = rng.standard_normal((90, 12)), rng.standard_normal((90, 2))
    result = neula.lstsq(A, b)
    np.testing.assert_allclose(result.residual_norm, np.linalg.norm(b - A @ result.x, axis=0), rtol=1e-12)


def test_mixed_dtypes_promote(rng):
    A, b = rng.standard_normal((50, 4)).astype(np.float32), rng.integers(0, 9, 50)
    assert neula.lstsq(A, b).x.dtype == np.float64


def test_overflow_of_the_output_dtype_is_an_error():
    with pytest.raises(OverflowError, match="wider dtype"):
        neula.lstsq(np.full((3, 1), 1e-4, dtype=np.float16), np.full(3, 6e4, dtype=np.float16))


def test_threads_do_not_disturb_each_other(rng):
    problems = [(rng.standard_normal((600, 120)), rng.standard_normal(600)) for _ in range(4)]
    alone = [neula.lstsq(A, b).x for A, b in problems]
    together: list = [None] * 4

    def work(i: int) -> None:
        together[i] = neula.lstsq(*problems[i]).x

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for x, y in zip(alone, together, strict=True):
        assert np.linalg.norm(x - y) <= 1e-13 * np.linalg.norm(x)


def test_global_state_is_left_alone(rng):
    torch.manual_seed(5)
    before = (
        torch.get_rng_state(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.is_grad_enabled(),
    )
    neula.lstsq(rng.standard_normal((600, 120)), rng.standard_normal(600))
    neula.qr(rng.standard_normal((600, 120)).astype(np.float32))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.is_grad_enabled(),
    )


def test_default_dtype_of_the_user_does_not_matter(rng):
    A, b = rng.standard_normal((600, 120)), rng.standard_normal(600)
    x = neula.lstsq(A, b).x
    torch.set_default_dtype(torch.float64)
    try:
        again = neula.lstsq(A, b)
        assert neula.qr(A.astype(np.float32)).converged
    finally:
        torch.set_default_dtype(torch.float32)
    assert again.converged
    np.testing.assert_array_equal(again.x, x)


def test_progress_reports_stages(rng):
    stages: dict[str, list[float]] = {}
    neula.lstsq(
        rng.standard_normal((900, 300)),
        rng.standard_normal(900),
        progress=lambda stage, fraction: stages.setdefault(stage, []).append(fraction),
    )
    assert list(stages) == ["factorizing in fp32", "refining"]
    for fractions in stages.values():
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1.0


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((7,), r"A is \(10, 3\), b is \(7,\); b must have shape \(10,\) or \(10, k\)"),
        ((10, 0), r"b is \(10, 0\)"),
        ((2, 10), r"b is \(2, 10\)"),
        ((), r"b is \(\)"),
    ],
)
def test_shapes_that_do_not_fit(shape, message, rng):
    with pytest.raises(ValueError, match=message):
        neula.lstsq(rng.standard_normal((10, 3)), np.zeros(shape))


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
        ({"max_iterations": 0}, "max_iterations must be at least 1, got 0"),
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


@pytest.mark.parametrize("size", [1e-200, 1e-30, 1e30, 1e200])
def test_tiny_and_huge_right_hand_sides(size, rng):
    A, b = rng.standard_normal((600, 150)), rng.standard_normal(600)
    result = neula.lstsq(A, size * b)
    assert result.converged
    np.testing.assert_allclose(result.x / size, neula.lstsq(A, b).x, rtol=1e-9)
    np.testing.assert_allclose(result.residual_norm / size, neula.lstsq(A, b).residual_norm, rtol=1e-9)


def test_accuracy_that_the_dtype_cannot_hold_is_refused(rng):
    A, b = rng.standard_normal((30, 4)).astype(np.float32), rng.standard_normal(30).astype(np.float32)
    with pytest.raises(ValueError, match=r"accuracy 'fp64' is finer .*float32: pass A in a wider"):
        neula.lstsq(A, b, accuracy="fp64")


def test_autocast_does_not_reach_inside(rng):
    A, b = rng.standard_normal((600, 150)), rng.standard_normal(600)
    expected = neula.lstsq(A, b, engine="emulated").x
    with torch.autocast("cpu", dtype=torch.bfloat16):
        np.testing.assert_array_equal(neula.lstsq(A, b, engine="emulated").x, expected)
