"""neula.solve: certified answers on easy, hard and impossible systems."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
import torch
from tests.matrices import definite

import neula
from neula.engines import CpuEngine, EmulatedEngine
from neula.io.matrices import random_matrix
from neula.pipeline.result import AccuracyWarning
from neula.problems.systems.problem import asymmetry

U64 = 2.0**-53
N = 300
"""Large enough for the chain to begin with low precision."""

ENGINES = ["cpu", "emulated"]


@pytest.fixture(autouse=True)
def chain_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU systems must be larger than tests can afford before low precision pays."""
    tuning = CpuEngine("cpu").tuning
    assert EmulatedEngine.tuning.direct <= N < tuning.direct
    monkeypatch.setattr(CpuEngine, "tuning", replace(tuning, direct=N, direct_definite=N))


def backward_error(A: np.ndarray, b: np.ndarray, x: np.ndarray) -> float:
    """The normwise one in the infinity norm, computed here and not taken from the result."""
    A, b, x = (np.asarray(v, dtype=np.float64) for v in (A, b, x))
    r = np.abs(b - A @ x).max(0)
    return float(np.max(r / (np.abs(A).sum(1).max() * np.abs(x).max(0) + np.abs(b).max(0))))


def dominant(n: int, rng: np.random.Generator) -> np.ndarray:
    """The matrices of HPL-AI: uniform (0, 1), with n on the diagonal."""
    A = rng.random((n, n))
    np.fill_diagonal(A, n)
    return A


@pytest.mark.parametrize("engine", ENGINES)
def test_a_condition_number_beyond_double_precision_leaves_no_digit(engine, rng):
    """The backward error is as small as ever; the solution may be another one altogether."""
    A = random_matrix("geometric", N, N, cond=1e16).numpy()
    with pytest.warns(neula.IllConditionedWarning, match="no digit of x is guaranteed"):
        result = neula.solve(A, A @ rng.standard_normal(N), engine=engine)
    assert result.backward_error <= result.tolerance
    assert not result.converged
    assert result.digits < 1


def test_diagonally_dominant_matrices_need_no_pivoting(rng):
    A, b = dominant(N, rng), rng.standard_normal(N)
    result = neula.solve(A, b, engine="emulated")
    # Wilkinson's bound for diagonal dominance is 2.
    assert 1 <= result.growth <= 2
    assert len(result.attempts) == 1
    # Half precision gains three digits a step, double precision needs sixteen.
    assert result.iterations <= 6


def test_gmres_where_classical_refinement_does_not_converge(rng):
    A = random_matrix("geometric", N, N, cond=3e4).numpy()
    result = neula.solve(A, rng.standard_normal(N), engine="emulated")
    assert result.converged
    assert result.method == "lu fp16 with pivoting + gmres"
    assert result.iterations < 60


def test_falls_through_to_better_arithmetic(rng):
    A = random_matrix("geometric", N, N, cond=1e12).numpy()
    result = neula.solve(A, rng.standard_normal(N), engine="emulated")
    assert result.converged
    methods = [a.method for a in result.attempts]
    assert methods[0].startswith("lu fp16 with pivoting")
    assert methods[1].startswith("rbt + lu fp32")
    assert methods[2].startswith("lu fp32 with pivoting")
    assert methods[3] == result.method == "lu fp64 with pivoting"
    assert [a.accepted for a in result.attempts] == [False, False, False, True]
    assert all("backward error" in a.reason for a in result.attempts)


def test_butterflies_serve_matrices_with_singular_leading_blocks(rng):
    """Without them the first pivot is zero, with them single precision suffices."""
    A = np.roll(dominant(N, rng) + 20 * rng.standard_normal((N, N)), N // 2, axis=0)
    A[: N // 2, : N // 2] = 0
    b = rng.standard_normal(N)
    with pytest.raises(ArithmeticError, match=r"no attempt gave a solution: a pivot vanishes"):
        neula.solve(A, b, engine="emulated", pivot="none", compute="fp32")
    result = neula.solve(A, b, engine="emulated", pivot="rbt", compute="fp32")
    assert result.converged
    assert 1 < result.growth < N**1.5


def test_overflow_of_the_output_dtype_is_an_error():
    with pytest.raises(OverflowError, match="wider dtype"):
        neula.solve(np.full((1, 1), 1e-4, dtype=np.float16), np.full(1, 6e4, dtype=np.float16))
    with pytest.raises(OverflowError, match="does not fit float64"):
        neula.solve(np.full((1, 1), 1e-200), np.full(1, 1e200))


# --- symmetric positive definite --------------------------------------------------------------------------


@pytest.mark.parametrize("n", [20, N])
def test_not_positive_definite_is_said(n, rng):
    A = definite(rng, n, 10.0)
    A[:, 7] *= -1
    A[7] *= -1
    A[7, 7] *= -1
    with pytest.raises(np.linalg.LinAlgError, match=r"not positive definite: A\[7, 7\] is -"):
        neula.solve(A, np.ones(n), assume_a="pos")
    indefinite = 2 * np.eye(n)
    indefinite[4, 3] = indefinite[3, 4] = 3
    with pytest.raises(np.linalg.LinAlgError, match=r"leading minor of order 5 .* assume_a='gen'"):
        neula.solve(indefinite, np.ones(n), assume_a="pos", engine="emulated")


# --- singular ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [5, N])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("make", "index"),
    [
        (lambda n, rng: np.zeros((n, n)), 0),
        (lambda n, rng: np.ones((n, n)), 1),
        (lambda n, rng: np.diag([1.0] * 3 + [0.0] + [1.0] * (n - 4)), 3),
    ],
    ids=["zero", "ones", "diagonal"],
)
def test_exactly_singular(make, index, engine, n, rng):
    with pytest.raises(np.linalg.LinAlgError, match=rf"singular: pivot {index} is exactly zero.*lstsq"):
        neula.solve(make(n, rng), np.ones(n), engine=engine)


# --- input and output -------------------------------------------------------------------------------------


def test_an_empty_batch():
    result = neula.solve(np.zeros((2, 0, 3, 3)), np.zeros((2, 0, 3, 4)))
    assert result.x.shape == (2, 0, 3, 4)
    assert result.converged
    assert result.accepted.shape == (2, 0)


def test_each_system_of_a_batch_has_its_evidence(rng):
    A, b = rng.standard_normal((2, 2, N, N)), rng.standard_normal((2, 2, N))
    A[1, 0] = random_matrix("geometric", N, N, cond=1e10).numpy()
    options = {"pivot": "partial", "compute": "fp16", "engine": "emulated"}
    with pytest.warns(AccuracyWarning, match=r"fp64 accuracy for A\[1, 0\]: backward error"):
        result = neula.solve(A, b, **options)
    assert not result.converged
    assert result.accepted.tolist() == [[True, True], [False, True]]
    assert result.backward_error == result.backward_errors.max() == result.backward_errors[1, 0]
    alone = neula.solve(A[0, 1], b[0, 1], **options)
    assert alone.accepted.shape == ()
    assert alone.backward_errors == alone.backward_error == result.backward_errors[0, 1]
    with pytest.raises(neula.AccuracyError, match=r"A\[1, 0\]") as caught:
        neula.solve(A, b, **options, strict=True)
    assert caught.value.indices == ((1, 0),)
    np.testing.assert_array_equal(caught.value.result.x, result.x)
    with pytest.raises(neula.AccuracyError, match="accuracy: backward error") as caught:
        neula.solve(A[1, 0], b[1, 0], **options, strict=True)
    assert caught.value.indices == ((),)


def test_which_matrix_of_a_batch_is_singular(rng):
    A = rng.standard_normal((2, 3, 5, 5))
    A[1, 2, :, 3] = 0
    with pytest.raises(np.linalg.LinAlgError, match=r"A\[1, 2\] of the batch: A is singular: pivot 3 is"):
        neula.solve(A, np.ones((2, 3, 5)))
    indefinite = np.stack([np.eye(4), -np.eye(4)])
    with pytest.raises(np.linalg.LinAlgError, match=r"A\[1\] of the batch: .*A\[0, 0\] is -1.0"):
        neula.solve(indefinite, np.ones((2, 4)), assume_a="pos")
    permuted = np.stack([np.eye(4), np.roll(np.eye(4), 1, 0)])
    with pytest.raises(ArithmeticError, match=r"A\[1\] of the batch: no attempt gave a solution"):
        neula.solve(permuted, np.ones((2, 4)), pivot="none", compute="fp32")


@pytest.mark.parametrize(
    ("A", "error", "message"),
    [
        (np.ones((3, 4)), ValueError, "A must be square, got 3 x 4; use neula.lstsq"),
        (np.ones(3), ValueError, "A must be a matrix"),
        (scipy.sparse.eye(3).tocsr(), TypeError, "A is a sparse"),
        (np.diag([1, np.nan, 1]), ValueError, r"A\[1, 1\] is nan"),
        (np.diag([1, 1, -np.inf]), ValueError, r"A\[2, 2\] is -inf"),
    ],
)
def test_bad_matrices(A, error, message):
    with pytest.raises(error, match=message):
        neula.solve(A, np.ones(3))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"assume_a": "sym"}, "unknown structure assume_a 'sym': choose one of 'gen', 'pos'"),
        ({"accuracy": "double"}, "unknown accuracy 'double'"),
        ({"engine": "tpu"}, "unknown engine 'tpu'"),
        ({"pivot": "rook"}, "unknown pivot 'rook'"),
        ({"pivot": "none", "assume_a": "pos"}, "pivot='none' is for LU"),
        ({"compute": "int8"}, "unknown format 'int8'"),
        ({"max_iterations": 0}, "max_iterations must be a whole number, at least 1, got 0"),
    ],
)
def test_bad_parameters(kwargs, message):
    with pytest.raises(ValueError, match=message):
        neula.solve(np.eye(3), np.ones(3), **kwargs)


def test_nan_in_the_right_hand_side_and_in_a_batch(rng):
    with pytest.raises(ValueError, match=r"b\[1\] is nan"):
        neula.solve(np.eye(3), np.array([1, np.nan, 1]))
    A = np.stack([np.eye(3), np.eye(3)])
    A[1, 2, 0] = np.inf
    with pytest.raises(ValueError, match=r"A\[1, 2, 0\] is inf"):
        neula.solve(A, np.ones((2, 3)))


# --- good manners -----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1, 20])
def test_pivoted_lu_in_half_precision_on_a_gpu(columns, rng):
    """More right-hand sides than GMRES takes at a time, one of them zero."""
    A, b = rng.standard_normal((700, 700)), rng.standard_normal((700, columns))
    b[:, 11:12] = 0
    result = neula.solve(torch.from_numpy(A).cuda(), torch.from_numpy(b).cuda(), compute="fp16")
    assert result.converged
    x, other = result.x.cpu().numpy(), b.any(0)
    assert not x[:, ~other].any()
    assert backward_error(A, b[:, other], x[:, other]) <= 4 * U64 + math.sqrt(700) * U64


@pytest.mark.gpu
def test_only_formats_with_tournaments_are_pivoted_on_a_gpu(rng):
    A, b = rng.standard_normal((300, 300)), rng.standard_normal(300)
    result = neula.solve(torch.from_numpy(A).cuda(), torch.from_numpy(b).cuda(), compute="tf32")
    assert result.converged
    assert "lu tf32 with pivoting" not in [attempt.method for attempt in result.attempts]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["normal", "dominant", "geometric", "positive"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_on_a_gpu(kind, dtype, rng):
    A = {
        "normal": lambda: rng.standard_normal((700, 700)),
        "dominant": lambda: dominant(700, rng),
        "geometric": lambda: random_matrix("geometric", 700, 700, cond=1e8).numpy(),
        "positive": lambda: definite(rng, 700, 10.0),
    }[kind]().astype(dtype)
    b = rng.standard_normal((700, 3)).astype(dtype)
    assume_a = "pos" if kind == "positive" else "gen"
    result = neula.solve(torch.from_numpy(A).cuda(), torch.from_numpy(b).cuda(), assume_a=assume_a)
    assert result.converged
    assert result.x.is_cuda
    u = float(np.finfo(dtype).eps) / 2
    assert backward_error(A, b, result.x.cpu().numpy()) <= 5 * u + math.sqrt(700) * U64


@pytest.mark.parametrize("n", [3, 20])
def test_a_definite_matrix_that_is_not_symmetric_is_named_as_the_cause(n: int) -> None:
    """Only one triangle is factorized, and the warning says why that does not do."""
    root = np.random.default_rng(0).standard_normal((n, n))
    A = root @ root.T + n * np.eye(n)
    A[np.triu_indices(n, 1)] += 0.5 * n
    with pytest.warns(neula.AccuracyWarning, match=r"A is not symmetric, .* by up to .*: leave assume_a="):
        neula.solve(A, np.ones(n), assume_a="pos", engine="cpu")
    large = torch.eye(600)[None].repeat(2, 1, 1)
    assert asymmetry(large) == ""
    large[1, 3, 590] = 1
    assert "by up to 1.0e+00" in asymmetry(large)
