"""neula.lu_factor and neula.lu_solve of batches, and of nothing."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import scipy.linalg
import torch
from tests.peers import of_new_peers

from lu_systems import backward_error, dominant, factor, silent
from neula.certificates.bounds import solve_bound
from neula.engines import FP32, FP64, format_of
from neula.io.matrices import random_matrix
from neula.pipeline.result import AccuracyWarning
from neula.problems.systems.lu import lu_factor
from neula.problems.systems.lu_solve import lu_solve


@of_new_peers
@pytest.mark.parametrize(
    ("of_a", "of_b"),
    [
        ((5, 5), (4, 5, 2)),
        ((5, 5), (2, 4, 5, 1)),
        ((3, 5, 5), (5,)),
        ((3, 5, 5), (5, 2)),
        ((3, 5, 5), (3, 5, 2)),
        ((1, 5, 5), (4, 5, 2)),
        ((2, 1, 5, 5), (3, 5, 2)),
        ((2, 3, 5, 5), (5,)),
        ((5, 5, 5), (5, 5)),
        ((2, 5, 5), (5, 0)),
        ((0, 0), (0,)),
        ((0, 0), (0, 3)),
        ((3, 0, 0), (0,)),
        ((3, 0, 0), (3, 0, 2)),
    ],
)
@pytest.mark.parametrize("refine", [True, False])
def test_leading_dimensions_broadcast_as_in_scipy(
    of_a: tuple[int, ...], of_b: tuple[int, ...], refine: bool, rng: np.random.Generator
) -> None:
    A, b = rng.standard_normal(of_a) + 4 * np.eye(of_a[-1]), rng.standard_normal(of_b)
    expected = scipy.linalg.lu_solve(scipy.linalg.lu_factor(A), b)
    x = silent(lambda: lu_solve(factor(A), b, refine=refine))
    assert (x.shape, x.dtype) == (expected.shape, expected.dtype)
    if len(of_b) == 1:
        x, b = x[..., None], b[:, None]
    # Factors in fp16 with partial pivoting: growth at most 2 for each of 4 columns, were it as bad as can be.
    bound = solve_bound(FP64, 5) if refine else 2**4 * 2.0**-11
    size = np.abs(A).sum(-1).max(initial=0) * np.abs(x).max(initial=0) + np.abs(b).max(initial=0)
    assert np.abs(A @ x - b).max(initial=0) <= bound * size


@pytest.mark.parametrize(
    ("of_a", "of_b", "of_x"),
    [
        ((0, 4, 4), (4,), (0, 4)),
        ((0, 4, 4), (4, 2), (0, 4, 2)),
        ((1, 4, 4), (0, 4, 2), (0, 4, 2)),
        ((4, 4), (0, 4, 2), (0, 4, 2)),
        ((2, 0, 4, 4), (4,), (2, 0, 4)),
        ((2, 4, 4), (4, 0), (2, 4, 0)),
    ],
)
def test_batches_of_nothing_are_those_of_torch(
    of_a: tuple[int, ...], of_b: tuple[int, ...], of_x: tuple[int, ...]
) -> None:
    A, b = torch.eye(4).expand(of_a), torch.ones(of_b)
    F = factor(A)
    assert lu_solve(F, b).shape == lu_solve(F, b, refine=False).shape == of_x
    assert lu_solve(F, b, refine=True).shape == of_x
    assert F.L.shape == F.U.shape == F.shape == of_a
    assert torch.linalg.solve(A, b[:, None] if b.ndim == 1 else b).shape[: len(of_x)] == of_x


@pytest.mark.parametrize("pivot", ["partial", "none", "rbt"])
def test_empty_matrices(pivot: str) -> None:
    F = factor(np.empty((0, 0)), pivot=pivot)
    assert F.L.shape == F.U.shape == F.shape == (0, 0)
    assert (F.pivots, F.permutation, F.growth, F.storage_bytes) == ([], [], 1.0, 0)
    assert factor(np.empty((0, 0, 0)), pivot=pivot).permutation.shape == (0, 0)
    F = factor(np.empty((2, 0, 0), dtype=np.float32), pivot=pivot, keep_a=False)
    assert F.L.shape == F.U.shape == F.shape == (2, 0, 0)
    assert F.pivots.shape == F.permutation.shape == (2, 0)
    assert F.growth.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("pivot", ["partial", "rbt"])
@pytest.mark.parametrize("variant", ["5.2/5.1", "3.1"])
def test_factors_of_a_batch(pivot: str, variant: str, rng: np.random.Generator) -> None:
    """Factors of a batch are those of its members, stacked."""
    A = rng.standard_normal((2, 3, 9, 9)).astype(np.float32)
    seen: list[float] = []
    F = factor(A, variant=variant, pivot=pivot, panel=4, progress=lambda _, done: seen.append(done))
    assert F.shape == A.shape
    assert type(F.L) is type(F.permutation) is type(F.growth) is np.ndarray
    assert F.L.dtype == F.U.dtype == np.float32
    singles = {i: factor(A[i], variant=variant, pivot=pivot, panel=4) for i in np.ndindex(2, 3)}
    for index, single in singles.items():
        assert np.array_equal(F.L[index], single.L)
        assert np.array_equal(F.U[index], single.U)
        assert F.pivots[index].tolist() == single.pivots
        assert F.permutation[index].tolist() == single.permutation
        assert F.growth[index] == single.growth
    assert F.storage_bytes == sum(single.storage_bytes for single in singles.values())
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    if pivot == "partial":
        permuted = np.take_along_axis(A, F.permutation[..., None], -2)
        assert np.linalg.norm(permuted - F.L @ F.U) <= 4 * 9**0.5 * 2.0**-11 * np.linalg.norm(A)


@pytest.mark.parametrize("dtype", ["float64", "float32", "complex64"])
def test_the_library_takes_a_batch_at_once(dtype: str, rng: np.random.Generator) -> None:
    """As one by one, also where one matrix is so small that reciprocals of its pivots overflow."""
    a = normal_batch(rng, dtype)
    a[1, 0] *= 4 * np.finfo(a.real.dtype).tiny
    together = lu_factor(a)
    for index in np.ndindex(a.shape[:2]):
        one = lu_factor(a[index])
        assert np.array_equal(together.permutation[index], one.permutation)
        u = a.shape[-1] * float(np.finfo(a.real.dtype).eps)
        assert np.abs(together.L[index] - one.L).max() <= 16 * u
        assert np.abs(together.U[index] - one.U).max() <= 16 * u * np.abs(one.U).max()
        assert together.growth[index] == pytest.approx(one.growth, rel=16 * u)


def normal_batch(rng: np.random.Generator, dtype: str) -> np.ndarray:
    a = rng.standard_normal((2, 3, 12, 12))
    return (a + 1j * rng.standard_normal(a.shape) if dtype.startswith("complex") else a).astype(dtype)


@pytest.mark.parametrize("dtype", ["float64", "float32", "complex64"])
@pytest.mark.parametrize("trans", [0, 1, 2])
def test_a_batch_is_solved_together(dtype: str, trans: int, rng: np.random.Generator) -> None:
    """Rows and columns of any size take no member apart; sizes far from 1 and ill conditions do."""
    a = normal_batch(rng, dtype)
    u, dtype_of = float(np.finfo(a.real.dtype).eps) / 2, a.dtype
    a[0, 1] *= 2.0 ** -np.arange(0, 24, 2)[:, None]
    a[1, 0] *= 2.0 ** np.arange(0, 24, 2)
    far = 2.0**-600 if a.real.dtype == np.float64 else 1.0
    a[0, 2] *= far
    a[1, 1] = random_matrix("geometric", 12, 12, cond=0.02 / u).numpy()
    b = normal_batch(rng, dtype)[..., :2]
    b[1, 2] = 0
    F = lu_factor(a)
    for _ in range(2):
        x = silent(lambda: lu_solve(F, b, trans=trans))
    assert x.dtype == dtype_of
    for index in np.ndindex(2, 3):
        turned = (a[index], a[index].T, a[index].conj().T)[trans]
        single = silent(lambda index=index: lu_solve(lu_factor(a[index]), b[index], trans=trans))
        scale = far if index == (0, 2) else 1.0
        A, y, c = turned.astype(complex) / scale, x[index].astype(complex) * scale, b[index]
        size = np.linalg.norm(A, np.inf) * np.abs(y).max(0) + np.abs(c).max(0)
        assert (np.abs(c - A @ y).max(0) <= (solve_bound(F_OF[u], 12) + u) * size).all()
        # Both have such backward errors, and 12 relates the norms.
        limit = 24 * solve_bound(F_OF[u], 12) * np.linalg.cond(A) * np.linalg.norm(y)
        assert np.linalg.norm(y - single * scale) <= limit
    assert set(F._solvers.members) <= {(0, 2), (1, 1)}
    assert np.array_equal(lu_solve(pickle.loads(pickle.dumps(F)), b, trans=trans), x)
    without = lu_solve(lu_factor(a, keep_a=False), b, trans=trans)
    assert np.linalg.norm(without[0, 0] - x[0, 0]) <= 1e4 * u * np.linalg.norm(x[0, 0])


def test_factors_in_single_precision_solve_wider_sides_together(rng: np.random.Generator) -> None:
    """Without A: by substitution in double precision, and not one by one."""
    F = lu_factor(rng.standard_normal((40, 5, 5)).astype(np.float32), keep_a=False)
    b = rng.standard_normal((40, 5, 2))
    permuted = np.take_along_axis(b, F.permutation[..., None], 1)
    x = lu_solve(F, b)
    assert x.dtype == np.float64
    exact = np.linalg.solve(F.U.astype(np.float64), np.linalg.solve(F.L.astype(np.float64), permuted))
    assert np.linalg.norm(x - exact) <= 1e-11 * np.linalg.norm(exact)
    assert not F._solvers.members


F_OF = {format.u: format for format in (FP32, FP64)}


def test_members_are_made_when_requested(rng: np.random.Generator) -> None:
    F = lu_factor(rng.standard_normal((2, 3, 4, 4)))
    assert not F._solvers.members
    one = F._member((1, 2))
    assert one is F.members[5]
    assert np.array_equal(one.L, F.L[1, 2])
    assert one.pivots == F.pivots[1, 2].tolist()
    assert one.growth == F.growth[1, 2]
    assert one.logdet().value == F.logdet().value[1, 2]
    assert len(F._solvers.members) == 6


def test_what_is_wrong_with_one_of_a_batch_is_said_with_its_index() -> None:
    A = np.stack([np.eye(3)] * 4)
    for bad, error, message in (
        (np.nan, ValueError, r"A\[3\] of the batch: A\[1, 1\] is nan"),
        (1e5, OverflowError, r"A\[3\] of the batch: A\[1, 1\] is 1e\+05, which overflows fp16"),
        (0.0, np.linalg.LinAlgError, r"A\[3\] of the batch: A is singular: pivot 1 is exactly zero"),
    ):
        wrong = A.copy()
        wrong[3, 1, 1] = bad
        with pytest.raises(error, match=message):
            factor(wrong)
    F, by_lapack = factor(A), lu_factor(A)
    A[2, 0, 1] = 1
    for changed in (F, by_lapack):
        with pytest.raises(ValueError, match=r"A\[2\] of the batch: A was changed"):
            lu_solve(changed, np.ones(3))
    with pytest.raises(ValueError, match=r"A is \(4, 3, 3\), b is \(2, 3, 1\).*\(4, 3, k\)"):
        lu_solve(F, np.ones((2, 3, 1)))
    with pytest.raises(ValueError, match=r"only a one-dimensional b is a vector: pass b\[..., None\]"):
        lu_solve(F, np.ones((4, 3)))


@pytest.mark.parametrize("engine", ["emulated", "cpu"])
@pytest.mark.parametrize(("dtype", "cond"), [("fp64", 1e17), ("fp64", 1e16), ("fp32", 1e7)])
def test_a_warning_names_the_matrices_of_a_batch(engine: str, dtype: str, cond: float) -> None:
    A = np.stack([np.eye(40), random_matrix("geometric", 40, 40, cond=cond).numpy(), 2 * np.eye(40)])
    A = A.astype({"fp64": np.float64, "fp32": np.float32}[dtype])
    F = lu_factor(A, engine=engine, compute=dtype)
    b = np.ones(40, A.dtype)
    for _ in range(2):
        with pytest.warns(
            AccuracyWarning, match=r"no digit of the solution is guaranteed for A\[1\]: A is singular"
        ):
            x = lu_solve(F, b)
        assert np.array_equal(x[2], np.full(40, 0.5))


def test_an_exact_solution_does_not_hide_a_condition_number() -> None:
    A = np.array([[[1, 1], [1, 1 + 2.0**-22]], np.eye(2)], np.float32)
    with pytest.warns(AccuracyWarning, match=r"no digit of the solution is guaranteed for A\[0\]"):
        x = lu_solve(lu_factor(A), A.sum(2, keepdims=True))
    assert np.array_equal(x, np.ones((2, 2, 1)))


@pytest.mark.gpu
def test_dtypes_and_batches_on_a_gpu() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        A = torch.stack([dominant(90, dtype, seed) for seed in range(3)]).cuda()
        b = torch.linspace(-1, 1, 90, device="cuda")
        x = silent(lambda A=A, b=b: lu_solve(lu_factor(A), b))
        assert x.shape == (3, 90)
        target = format_of(x.dtype)
        for matrix, solution in zip(A, x, strict=True):
            assert backward_error(matrix, solution, b) <= solve_bound(target, 90) + target.u
