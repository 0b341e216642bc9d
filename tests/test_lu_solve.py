"""neula.lu_solve: the accuracy of the dtype or a warning, and what becomes of a matrix that changes."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from tests.matrices import normal

from lu_systems import backward_error, dominant, factor, silent
from neula.algorithms.krylov.iterative_refinement import FAR, KeptMatrix, RefinedSolution
from neula.certificates.bounds import solve_bound
from neula.engines import FP32, FP64, EmulatedEngine, format_of
from neula.io.matrices import hpl_ai_matrix, random_matrix
from neula.pipeline.result import AccuracyError, AccuracyWarning
from neula.problems.systems.lu import lu_factor
from neula.problems.systems.lu_solve import evidence_of, limits_of, lu_solve

U = FP64.u
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
System = tuple[torch.Tensor, torch.Tensor]


# ---------------------------------------------------------------- accuracy


def system(n: int, *, like: str = "normal", cond: float = 1e4) -> Callable[[], System]:
    """A random matrix and right-hand sides, or sums of rows where the matrix is ill-conditioned."""

    def make() -> System:
        A = dominant(n) if like == "dominant" else random_matrix(like, n, n, cond=cond, seed=n)
        return A, (A.sum(1) if like == "geometric" else normal(n, 3, seed=1))

    return make


def beyond_its_factors() -> System:
    """A right-hand side that refinement copes with, and a matrix whose condition number it does not see.

    So large that 20 iterations for 8 right-hand sides do not find all directions that the factors lack.
    """
    A = torch.block_diag(dominant(20), random_matrix("geometric", 600, 600, cond=1e10))
    return A, A[:, :20].sum(1)


CASES: list[tuple[Callable[[], System], list[str]]] = [
    *((system(n), ["fp16", "bf16", "fp32", "fp64", "fp32 rbt", "fp64 rbt"]) for n in (1, 2, 9, 120)),
    *((system(n, like="dominant"), ["fp16 none"]) for n in (1, 2, 9, 120)),
    # Too much for classical refinement in fp32, and little for GMRES; coarser factors are made again.
    (system(80, like="geometric", cond=1e8), ["fp32", "fp64"]),
    *((system(80, like="geometric", cond=cond), ["fp16", "bf16"]) for cond in (1e10, 1e13)),
    (beyond_its_factors, ["fp16"]),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("make", "compute", "pivot"),
    [(make, *f"{how} partial".split()[:2]) for make, formats in CASES for how in formats],
)
def test_solutions_have_the_accuracy_of_the_dtype(
    make: Callable[[], System], compute: str, pivot: str, device: str
) -> None:
    A, b = (x.to(device) for x in make())
    F = factor(A, compute=compute, pivot=pivot, engine="emulated" if device == "cpu" else "auto")
    assert F.compute == compute
    for _ in range(2):
        x = silent(lambda: lu_solve(F, b))
        assert x.device == A.device
        assert backward_error(A, x, b) <= solve_bound(FP64, len(A))
    A[-1, 0] += 1.0
    with pytest.raises(ValueError, match="A was changed"):
        lu_solve(F, b)


@pytest.mark.parametrize("of_a", DTYPES)
@pytest.mark.parametrize("of_b", DTYPES)
@pytest.mark.parametrize("compute", ["fp16", "fp32"])
def test_every_dtype(of_a: torch.dtype, of_b: torch.dtype, compute: str) -> None:
    """Solutions have the dtype of the wider operand, and are accurate for A as it is stored."""
    A, b = dominant(60, of_a), torch.linspace(-1, 1, 60, dtype=of_b)
    F = factor(A, compute=compute)
    assert F.L.dtype == F.U.dtype == of_a
    x = silent(lambda: lu_solve(F, b))
    assert x.dtype == torch.promote_types(of_a, of_b)
    target = format_of(x.dtype)
    # Rounding x is a change of the columns of A by u.
    assert backward_error(A, x, b) <= solve_bound(target, 60) + target.u


@pytest.mark.parametrize("compute", ["fp16", "fp32", "fp64"])
def test_ill_conditioned_matrices_are_solved_or_there_is_a_warning(compute: str) -> None:
    n = 80
    A = random_matrix("geometric", n, n, cond=1e8)
    b = A.sum(1)
    F = factor(A, compute=compute)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = backward_error(A, lu_solve(F, b), b)
    assert caught or error <= solve_bound(FP64, n)
    # Condition number times u32 is 6: too much for classical refinement, and little for GMRES.
    assert not caught or compute == "fp16"


def test_what_factors_cannot_tell_better_ones_do() -> None:
    """A right-hand side that refinement copes with, and a matrix whose condition number it does not see."""
    # So large that 20 iterations for 8 right-hand sides do not find all directions that the factors lack.
    A = torch.block_diag(dominant(20), random_matrix("geometric", 600, 600, cond=1e10))
    b = A @ torch.ones(620, dtype=torch.float64).index_fill(0, torch.arange(20, 620), 0.0)
    x = silent(lambda: lu_solve(factor(A), b))
    assert backward_error(A, x, b) <= solve_bound(FP64, 620)


@pytest.mark.parametrize("compute", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("side", ["rows", "columns"])
def test_graded_matrices(compute: str, side: str) -> None:
    """Equations, or unknowns, in small units are solved for as well as others."""
    scales, plain = torch.logspace(0, -12, 40, dtype=torch.float64), dominant(40)
    rows, columns = (scales, scales**0) if side == "rows" else (scales**0, scales)
    A, c = rows[:, None] * plain * columns, plain.sum(1)
    x = silent(lambda: lu_solve(factor(A, compute=compute), rows * c))
    assert backward_error(A, x, rows * c) <= solve_bound(FP64, 40)
    # Scales are powers of two, so that norms of scaled rows and columns differ by a factor of at most two.
    assert backward_error(plain, columns * x, c) <= 4 * solve_bound(FP64, 40)


@pytest.mark.parametrize("e", [1e-2, 1e-3, 1e-7, 2.0**-40])
@pytest.mark.parametrize("size", [2.0**-1060, 2.0**-1030, 1.0, 2.0**1018])
def test_two_equations_of_any_size(e: float, size: float) -> None:
    """A matrix that is regular in its dtype is not singular, nor one whose pivots have no reciprocals."""
    A, x = np.array([[5.0, 1.0], [-1.0, 2.0]]), np.array([[3.0, -2.0], [1.0, 4.0]])
    found = silent(lambda: lu_solve(lu_factor(size * A), size * (A @ x)))
    assert np.allclose(found, x, rtol=1e-15, atol=0)
    if size == 1:
        A, b, pivot = np.array([[1.0, 1.0], [1.0, 1.0 + e]]), np.array([1.0, 2.0]), Fraction(1 + e) - 1
        exact = np.array([float(1 - 1 / pivot), float(1 / pivot)])
        found = silent(lambda: lu_solve(lu_factor(A), b))
        assert np.abs(found - exact).max() <= 8 * U * np.linalg.cond(A) * np.abs(exact).max()


def test_a_refinement_that_fails_says_what_to_do() -> None:
    A = torch.tensor([[1.0, 2049.0], [3.0, 6147.0]], dtype=torch.float64)  # singular, but not in fp16
    b = torch.ones(2, dtype=torch.float64)
    F = factor(A)
    says = r"not refined to fp64.*asked for.*use neula.solve.*neula.lstsq|no digit .* neula.lstsq"
    with pytest.warns(AccuracyWarning, match=says):
        x = lu_solve(F, b)
    with pytest.raises(AccuracyError, match=says) as info:
        lu_solve(F, b, strict=True)
    assert torch.equal(info.value.result, x)
    assert info.value.indices == ((),)


@pytest.mark.parametrize("exponent", [-990, -FAR - 1, -FAR, 0, FAR - 1, FAR, 1020])
@pytest.mark.parametrize("of_b", [-1000, 0, 1000])
def test_norms_neither_overflow_nor_underflow(exponent: int, of_b: int) -> None:
    n = 20
    A, b = dominant(n), torch.linspace(-1, 1, n, dtype=torch.float64)
    x = torch.linalg.solve(A, b)
    F = factor(A * 2.0**exponent, compute="fp64", panel=8)
    if abs(of_b - exponent) < 1000:
        y = silent(lambda: lu_solve(F, b * 2.0**of_b)) * 2.0 ** (exponent - of_b)
        # Condition number about 2, in the infinity norm below 2 sqrt(n), of both solutions.
        assert (x - y).abs().max() <= 8 * n**0.5 * solve_bound(FP64, n) * x.abs().max()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int64])
@pytest.mark.parametrize("n", [1, 2, 70])
def test_the_cpu_factorizes_in_the_dtype_of_a(dtype: type, n: int, rng: np.random.Generator) -> None:
    A = (4 * rng.standard_normal((n, n)) + 20 * n**0.5 * np.eye(n)).astype(dtype)  # of condition about 2
    b = np.ones(n, dtype)
    F = lu_factor(A)
    kept = FP64 if dtype in (np.float64, np.int64) else FP32
    assert F.storage == F.compute == kept.name
    L, U = np.float64(F.L), np.float64(F.U)
    size = np.abs(L) @ np.abs(U)
    rounding = n * kept.u + (2.0**-10 if dtype is np.float16 else 0.0)  # L and U come in the dtype of A
    assert (np.abs(A.astype(np.float64)[F.permutation] - L @ U) <= rounding * size).all()
    x = silent(lambda: lu_solve(F, b))
    target = format_of(torch.from_numpy(np.asarray(x)).dtype)
    assert backward_error(A, x, b) <= solve_bound(target, n) + target.u


# ---------------------------------------------------------------- how many digits are sure


@pytest.mark.parametrize(("cond", "warns"), [(1e10, False), (1e17, True)])
def test_where_no_digit_is_sure_there_is_a_warning(cond: float, warns: bool) -> None:
    A = random_matrix("geometric", 60, 60, cond=cond)
    F = factor(A, compute="fp64")
    if not warns:
        silent(lambda: lu_solve(F, A.sum(1)))
        return
    for _ in range(2):
        with pytest.warns(AccuracyWarning, match=r"no digit .* singular to fp64 accuracy, its condition"):
            x = lu_solve(F, A.sum(1))
        assert backward_error(A, x, A.sum(1)) <= solve_bound(FP64, 60)
    with pytest.raises(AccuracyError, match="no digit"):
        lu_solve(F, A.sum(1), strict=True)


@pytest.mark.parametrize("compute", ["fp16", "fp32", "fp64"])
def test_singular_matrices_do_not_pass_for_regular_ones(compute: str) -> None:
    """Rank n - 1 but for rounding errors, and a b in the range of A."""
    A = np.random.default_rng(0).standard_normal((50, 50))
    A[:, 7] = A[:, :7] @ np.ones(7)
    with pytest.warns(AccuracyWarning):
        lu_solve(factor(A, compute=compute), A.sum(1))


def test_the_dtype_says_how_ill_conditioned_a_matrix_may_be() -> None:
    A = random_matrix("geometric", 50, 50, cond=1e8)
    F = factor(A.float(), compute="fp64")
    with pytest.warns(AccuracyWarning, match="singular to fp32 accuracy"):
        lu_solve(F, A.float().sum(1))
    silent(lambda: lu_solve(F, A.sum(1)))


# ---------------------------------------------------------------- the matrix that is kept


CHANGES = {
    "an element": (lambda A: A[3, 5] * (1 + 1e-9), (3, 5)),
    "two rows": (lambda A: A[[4, 2]], [2, 4]),
    "two columns": (lambda A: A[:, [4, 2]], (slice(None), [2, 4])),
    "NaN": (lambda A: np.nan, (0, 0)),
    "the sign": (lambda A: -A, ...),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("library", ["numpy", "torch", "view"])
def test_changed_matrices_are_an_error(change: str, library: str) -> None:
    A: Any = dominant(30).numpy().copy()
    A = {"numpy": A, "torch": torch.from_numpy(A), "view": np.asfortranarray(A)[::1, :]}[library]
    b = np.ones(30)
    F = factor(A)
    before, unrefined = lu_solve(F, b), lu_solve(F, b, refine=False)
    original = A.copy() if library != "torch" else A.clone()
    changed, place = CHANGES[change]
    A[place] = changed(A)
    with pytest.raises(ValueError, match=r"A was changed since it was factorized.*lu_factor\(A.copy\(\)\)"):
        lu_solve(F, b)
    assert np.array_equal(lu_solve(F, b, refine=False), unrefined)
    A[:] = original
    assert np.array_equal(lu_solve(F, b), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("factorial", [1.0, 2.0**-1000, 2.0**900])
def test_matrices_that_did_not_change_are_none(dtype: torch.dtype, factorial: float) -> None:
    """Rows of very different sizes, and subnormal numbers."""
    a = random_matrix("normal", 50, 50, seed=5)
    if dtype == torch.float64:
        a = a * factorial * torch.logspace(0, -60, 50, dtype=torch.float64)[:, None]
    a = a.to(dtype)
    kept = KeptMatrix.from_matrix(a, float(a.abs().max()), EmulatedEngine())
    assert kept.products().a.data_ptr() == a.data_ptr()
    # The same matrix with other sums, as another number of threads may make them.
    again = a[:, torch.arange(49, -1, -1)][:, torch.arange(49, -1, -1)].T.contiguous().T
    object.__setattr__(kept, "a", again)
    kept.products()


@pytest.mark.parametrize("n", [1, 40, 150])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_factors_of_the_library(n: int, dtype: type, rng: np.random.Generator) -> None:
    """Of one precision, on a CPU: they are those by panels up to rounding errors, and singular like those."""
    A = rng.standard_normal((n, n)).astype(dtype)
    compute = "fp32" if dtype is np.float32 else "fp64"
    F, by_panels = (lu_factor(A, "2.1", compute=compute, panel=panel) for panel in (None, 16))
    u = np.finfo(dtype).eps / 2
    assert F.pivots == by_panels.pivots
    assert F.permutation == by_panels.permutation
    for f in (F, by_panels):
        L, U = np.float64(f.L), np.float64(f.U)
        assert (np.abs(A[f.permutation] - L @ U) <= n * u * (np.abs(L) @ np.abs(U))).all()
    A[:, n // 2] = 0
    with pytest.raises(np.linalg.LinAlgError, match=f"pivot {n // 2} is exactly zero in {compute}"):
        lu_factor(A, "2.1", compute=compute)


def test_only_a_reference_is_kept() -> None:
    A = dominant(20)
    assert factor(A).kept.a.data_ptr() == A.data_ptr()
    batch = dominant(20).expand(3, 2, 20, 20).clone().transpose(0, 1)
    members = factor(batch).members
    assert members[1].kept.a.data_ptr() == batch[0, 1].data_ptr()
    packed = factor(batch).packed.lu
    assert packed.shape == (2, 3, 20, 20)


def test_factors_without_a_give_what_they_have() -> None:
    A = np.asfortranarray(dominant(40).numpy())
    b = np.ones(40)
    F, without = factor(A), factor(A, keep_a=False)
    assert F.keeps_a
    assert not without.keeps_a
    assert np.array_equal(lu_solve(without, b), lu_solve(F, b, refine=False))
    # Factors in fp16 of a matrix of condition number about 2.
    assert U < backward_error(A, lu_solve(without, b), b) < 2.0**-9
    with pytest.raises(ValueError, match=r"refine=True needs A.*factorize with keep_a=True"):
        lu_solve(without, b, refine=True)
    alive = weakref.ref(A)
    del A, F
    gc.collect()
    assert alive() is None
    assert lu_solve(without, b).shape == (40,)


def test_threads_share_factors() -> None:
    A = random_matrix("geometric", 60, 60, cond=1e3)
    b = A.sum(1)
    F = factor(A)
    together: list[torch.Tensor] = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        together.append(lu_solve(F, b))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(together) == 4
    assert all(backward_error(A, x, b) <= solve_bound(FP64, 60) for x in together)
    kept = dict(F._solvers.substitutions)
    lu_solve(F, b)
    assert all(F._solvers.substitutions[dtype] is solver for dtype, solver in kept.items())


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_streams_and_threads_share_factors_on_a_gpu() -> None:
    A = random_matrix("geometric", 500, 500, cond=1e3).cuda()
    b = A.sum(1)
    F = lu_factor(A)
    torch.cuda.synchronize()
    errors: list[float] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            x = lu_solve(F, b)
            torch.cuda.current_stream().synchronize()
            errors.append(backward_error(A, x, b))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 4
    assert max(errors) <= solve_bound(FP64, 500)


@pytest.mark.gpu
def test_arrays_of_the_cpu_on_a_gpu() -> None:
    A = dominant(200).numpy().copy()
    F = lu_factor(A, engine="cuda")
    x = silent(lambda: lu_solve(F, np.ones(200)))
    assert type(x) is np.ndarray
    assert backward_error(A, x, np.ones(200)) <= solve_bound(FP64, 200)
    A[0, 0] = 1
    with pytest.raises(ValueError, match="A was changed"):
        lu_solve(F, np.ones(200))


@pytest.mark.gpu
def test_hpl_ai_in_float16_on_a_gpu() -> None:
    A = hpl_ai_matrix(3000, dtype=torch.float16, device="cuda")
    b = A.double().sum(1)
    x = silent(lambda: lu_solve(lu_factor(A, pivot="none"), b))
    assert backward_error(A, x, b) <= solve_bound(FP64, 3000)


def test_a_condition_number_that_is_only_bounded_from_below_decides_nothing() -> None:
    solution = RefinedSolution(torch.ones(2, 1), backward_error=1e-17, condition=2.0, known=True)
    limits = limits_of(FP64, 2)
    assert limits.accept(evidence_of(solution, FP64))
    assert not limits.accept(evidence_of(replace(solution, known=False), FP64))
