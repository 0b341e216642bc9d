"""neula.lu_factor and neula.lu_solve: what users rely on, and every input that cannot be used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
import torch

from neula.algorithms.elimination.lu import VARIANTS
from neula.engines import CpuEngine, EmulatedEngine
from neula.io.matrices import hpl_ai_matrix, no_pivoting_matrix, random_matrix
from neula.problems.systems.lu import lu_factor
from neula.problems.systems.lu_solve import lu_solve

U16 = 2.0**-11
EACH = pytest.mark.parametrize("variant", VARIANTS)


def backward_error(A: Any, x: Any, b: Any) -> float:
    A, x, b = (np.asarray(y, dtype=np.float64) for y in (A, x, b))
    norm = np.linalg.norm
    return float(norm(A @ x - b) / (norm(A) * norm(x) + norm(b)))


# ---------------------------------------------------------------- what comes back


@EACH
@pytest.mark.parametrize("engine", ["emulated", "cpu"])
@pytest.mark.parametrize("n", [1, 9, 130])
def test_factor_and_solve(variant: str, engine: str, n: int, rng: np.random.Generator) -> None:
    """A backward stable solver to the format: growth with partial pivoting is below ``n^(2/3)`` for random
    matrices (Trefethen and Schreiber 1990), and ``||L||`` at most n.
    """
    A, b = rng.standard_normal((n, n)), rng.standard_normal(n)
    before = A.copy()
    F = lu_factor(A, variant, engine=engine, panel=32)
    L, U = F.L, F.U
    if engine == "cpu":  # random elements, of which no two are nearly the largest
        assert F.pivots == scipy.linalg.lu_factor(A)[1].tolist()
    assert type(L) is type(U) is np.ndarray
    assert L.dtype == U.dtype == np.float64
    assert np.array_equal(L, np.tril(L))
    assert np.array_equal(U, np.triu(U))
    assert (np.diagonal(L) == 1).all()
    assert np.abs(L).max() <= 1
    u = EmulatedEngine().using(F.compute).format.u
    assert np.linalg.norm(A[F.permutation] - L @ U) <= 4 * max(n, 1) ** 0.5 * u * np.linalg.norm(A)
    assert backward_error(A, lu_solve(F, b, refine=False), b) <= 4 * max(n, 1) ** 0.5 * u
    assert F.shape == (n, n)
    assert np.array_equal(A, before)


@pytest.mark.parametrize(
    ("options", "compute", "storage", "element"),
    [
        ({}, "fp16", "fp16", 2),
        ({"compute": "bf16"}, "bf16", "bf16", 2),
        ({"storage": "bf16"}, "bf16", "bf16", 2),
        ({"compute": "fp32"}, "fp32", "fp32", 4),
        ({"compute": "fp64"}, "fp64", "fp64", 8),
        ({"variant": "3.1"}, "fp16", "fp32", 4),
        ({"variant": "3.1", "storage": "fp16"}, "fp16", "fp16", 2),
        ({"variant": "3.1", "storage": "fp32", "compute": "bf16"}, "bf16", "fp32", 4),
        ({"variant": "3.1", "compute": "tf32"}, "tf32", "fp32", 4),
        ({"variant": "3.1", "storage": "bf16"}, "bf16", "bf16", 2),
        ({"variant": "3.1", "compute": "fp64"}, "fp64", "fp64", 8),
        ({"variant": "2.2", "storage": "fp32"}, "fp32", "fp32", 4),
    ],
)
def test_formats(options: dict[str, str], compute: str, storage: str, element: int) -> None:
    F = lu_factor(hpl_ai_matrix(30), engine="emulated", **options)
    assert (F.compute, F.storage, F.engine) == (compute, storage, "emulated")
    assert F.storage_bytes == 30 * 30 * element


def test_panels_are_those_of_the_paper_by_default() -> None:
    F = lu_factor(hpl_ai_matrix(30), engine="emulated")
    assert (F.variant, F.panel, F.inner_panel) == ("5.2/5.1", 256, 8)
    assert lu_factor(hpl_ai_matrix(30), "4.1", engine="emulated", panel=7).inner_panel is None


@EACH
def test_unpivoted_factors_need_no_interchanges(variant: str) -> None:
    A = no_pivoting_matrix(90, 100.0)
    F = lu_factor(A, variant, engine="emulated", pivot="none", panel=16)
    assert F.pivots == F.permutation == list(range(90))
    b = A.sum(1)
    assert backward_error(A, lu_solve(F, b, refine=False), b) <= 4 * 90**0.5 * U16


@EACH
@pytest.mark.parametrize("n", [1, 4, 50, 131])
def test_random_butterflies_instead_of_pivots(variant: str, n: int) -> None:
    """In single precision they bear what half precision would not: growth of about ``n^1.5``."""
    A, b = random_matrix("normal", n, n, seed=n), torch.ones(n, dtype=torch.float64)
    A[0, 0] = 0.0 if n > 1 else 1.0
    F = lu_factor(A, variant, engine="emulated", compute="fp32", pivot="rbt", panel=32)
    assert F.shape == (n, n)
    assert F.L.shape == F.U.shape == (-(-n // 4) * 4,) * 2
    assert F.permutation == list(range(-(-n // 4) * 4))
    mixed = F.transform.mixed(A, EmulatedEngine(format="fp64"))
    # Four roundings of each element in mixing.
    bound = (4 + n) ** 2 * 2.0**-24
    assert torch.linalg.norm(mixed - F.L @ F.U) <= bound * torch.linalg.norm(mixed)
    assert F.growth == pytest.approx(float(F.U.abs().max() / mixed.abs().max()), rel=bound)
    assert backward_error(A, lu_solve(F, b, refine=False), b) <= bound
    several = torch.stack([b, 2 * b], 1).float()
    assert lu_solve(F, several).shape == (n, 2)


@pytest.mark.parametrize("pivot", ["partial", "none"])
def test_growth(pivot: str) -> None:
    A = random_matrix("normal", 100, 100, seed=1)
    F = lu_factor(A, engine="emulated", compute="fp32", pivot=pivot, panel=32)
    assert F.growth == pytest.approx(float(F.U.abs().max() / A.abs().max()), rel=2.0**-23)
    assert (F.growth < 10) == (pivot == "partial")
    assert lu_factor(np.zeros((3, 3)) + np.eye(3)).growth == 1


# ---------------------------------------------------------------- what cannot be used


@pytest.mark.parametrize(
    ("A", "error", "message"),
    [
        (np.ones((3, 4)), ValueError, r"A must be square, got shape \(3, 4\)"),
        (np.ones(3), ValueError, r"A must be a matrix"),
        (np.ones((2, 3, 4)), ValueError, r"A must be square, got shape \(2, 3, 4\)"),
        (np.ones((0, 3)), ValueError, r"A is empty, shape \(0, 3\)"),
        (np.array([[1.0, np.nan], [0.0, 1.0]]), ValueError, r"A\[0, 1\] is nan"),
        (np.array([[1.0, 0.0], [-np.inf, 1.0]]), ValueError, r"A\[1, 0\] is -inf"),
        (scipy.sparse.eye_array(3), TypeError, r"A is a sparse"),
        (torch.eye(3).to_sparse(), TypeError, r"A is a sparse"),
        (np.array([["a"]]), TypeError, r"A has dtype"),
    ],
)
def test_unusable_matrices(A: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        lu_factor(A, engine="emulated")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "5.2"}, r"unknown variant '5.2': choose one of '2.1'.*'5.2/5.1'"),
        ({"pivot": "full"}, r"unknown pivot 'full': choose one of 'partial', 'none', 'rbt'"),
        ({"engine": "tpu"}, r"unknown engine 'tpu'"),
        ({"compute": "fp8"}, r"unknown format 'fp8'"),
        ({"storage": "fp8"}, r"unknown format 'fp8'"),
        ({"storage": "fp32", "compute": "fp16"}, r"keeps the matrix in the format of its products"),
        (
            {"variant": "3.1", "storage": "bf16", "compute": "fp16"},
            r"in 'fp16' or 'fp32', got storage='bf16'",
        ),
        ({"panel": 0}, r"panel must be a whole number, at least 1, got 0"),
        ({"panel": "wide"}, r"panel must be a whole number, at least 1, got 'wide'"),
        ({"inner_panel": 1.5}, r"inner_panel must be a whole number, at least 1, got 1.5"),
        (
            {"panel": 8, "inner_panel": 8},
            r"does not fit twice into panel=8: pass an inner_panel of at most 4",
        ),
        ({"variant": "4.1", "inner_panel": 4}, r"variant '4.1' has no inner panels"),
    ],
)
def test_unusable_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        lu_factor(np.eye(10), **{"engine": "emulated", **options})


@EACH
@pytest.mark.parametrize("engine", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("where", [0, 13, 19])
def test_a_zero_pivot_without_pivoting(variant: str, where: int, engine: str) -> None:
    A = np.eye(20) + np.tri(20, k=-1)
    A[where, where] = 0.0
    with pytest.raises(np.linalg.LinAlgError, match=rf"pivot {where} is exactly zero.*pass pivot='partial'"):
        lu_factor(A, variant, engine=engine, panel=8, pivot="none")


@EACH
@pytest.mark.parametrize("pivot", ["partial", "none"])
def test_singular_matrices(variant: str, pivot: str) -> None:
    """Zero columns, in exact arithmetic: no rounding hides them."""
    A = np.eye(12)
    A[:, 7] = 0.0
    with pytest.raises(np.linalg.LinAlgError, match=r"pivot 7 is exactly zero"):
        lu_factor(A, variant, engine="emulated", panel=4, pivot=pivot)
    with pytest.raises(np.linalg.LinAlgError, match=r"A is singular: pivot 0 is exactly zero in"):
        lu_factor(np.zeros((5, 5)), variant, engine="emulated")


@EACH
def test_matrices_beyond_the_range_of_fp16(variant: str) -> None:
    A = np.eye(4)
    A[2, 1] = -1e5
    with pytest.raises(OverflowError, match=r"A\[2, 1\] is -1e\+05, which overflows fp16.*65504"):
        lu_factor(A, variant, engine="emulated", storage="fp16")
    assert np.isfinite(lu_factor(A, variant, engine="emulated", storage="bf16").U).all()


def test_the_ends_of_the_range_of_fp16() -> None:
    with pytest.raises(np.linalg.LinAlgError, match=r"too small.*for fp16: scale A"):
        lu_factor(1e-9 * np.eye(5), engine="emulated")
    assert lu_factor(65519.0 * np.eye(2), engine="emulated").U[1, 1] == 65504
    with pytest.raises(OverflowError, match="overflows fp16"):
        lu_factor(65520.0 * np.eye(2), engine="emulated")
    # A float32 matrix holds its elements, its products do not.
    A = np.diag([1.0, 1.0, 1.0]) + np.diag([1e5, 1.0], 1) + np.tri(3, k=-1)
    with pytest.raises(OverflowError, match=r"column 1 of L and U overflows fp16"):
        lu_factor(A, "3.1", engine="emulated", panel=1, pivot="none")


@EACH
@pytest.mark.parametrize("pivot", ["partial", "none"])
def test_factors_beyond_the_range_of_fp16(variant: str, pivot: str) -> None:
    """Elements of U that double at every step (Wilkinson's example), up to 2^19."""
    A = 2 * np.eye(20) - np.tri(20)
    A[:, -1] = 1.0
    with pytest.raises(OverflowError, match=r"column 19 of L and U overflows fp16.*compute='bf16'"):
        lu_factor(A, variant, engine="emulated", storage="fp16", panel=4, pivot=pivot)
    F = lu_factor(A, variant, engine="emulated", storage="bf16", panel=4, pivot=pivot)
    assert F.U[-1, -1] == 2**19


def test_unusable_right_hand_sides() -> None:
    F = lu_factor(np.eye(4), engine="emulated")
    with pytest.raises(ValueError, match=r"A has 4 rows and b 5; b must have shape \(4,\), \(4, k\)"):
        lu_solve(F, np.ones(5))
    with pytest.raises(ValueError, match=r"b is \(1, 3, 1\)"):
        lu_solve(F, np.ones((1, 3, 1)))
    with pytest.raises(ValueError, match=r"b must be a vector, .* shape \(\)"):
        lu_solve(F, np.array(1.0))
    with pytest.raises(ValueError, match=r"b\[2\] is nan"):
        lu_solve(F, np.array([0, 0, np.nan, 0]))
    with pytest.raises(ValueError, match=r"trans is 3: pass 0 for A"):
        lu_solve(F, np.ones(4), trans=3)
    with pytest.raises(TypeError, match=r"F is a tuple: pass what neula.lu_factor returns"):
        lu_solve((1, 2), np.ones(4))  # type: ignore[arg-type]


def test_solutions_that_overflow_say_so() -> None:
    A = 1e-4 * np.eye(2)
    with pytest.raises(OverflowError, match=r"does not fit torch.float16"):
        lu_solve(lu_factor(A.astype(np.float16), engine="emulated"), np.full(2, 1000, dtype=np.float16))
    F = lu_factor(A.astype(np.float32), engine="emulated")
    with pytest.raises(OverflowError, match=r"pass b in float64"):
        lu_solve(F, np.full(2, 1e36, dtype=np.float32), refine=False)
    with pytest.raises(OverflowError, match=r"does not fit torch.float32"):
        lu_solve(F, np.full(2, 1e36, dtype=np.float32))
    with pytest.raises(OverflowError, match=r"overflows float64: scale b down"):
        lu_solve(F, np.full(2, 1e306))


def test_an_engine_is_used_as_it_is() -> None:
    engine = EmulatedEngine("cpu", unit="v100", block=8)
    assert lu_factor(np.eye(3), engine=engine).engine == "emulated (v100, 8 products at a time)"
    assert lu_factor(np.eye(3), engine=CpuEngine("cpu"), compute="fp32").storage == "fp32"
    assert lu_factor(np.eye(3), engine=EmulatedEngine("cpu", "bf16")).storage == "bf16"
    F = lu_factor(np.eye(3), "3.1", engine=EmulatedEngine("cpu", "bf16"))
    assert (F.compute, F.storage) == ("bf16", "fp32")


@pytest.mark.gpu
@EACH
@pytest.mark.parametrize("pivot", ["partial", "none", "rbt"])
def test_on_a_gpu(variant: str, pivot: str) -> None:
    A = hpl_ai_matrix(600, dtype=torch.float32, device="cuda")
    if pivot == "partial":
        A = torch.randn(600, 600, generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    F = lu_factor(A, variant, pivot=pivot)
    assert (F.engine, F.compute) == ("cuda", "fp16")
    assert F.L.device == A.device
    b = A.sum(1)
    x = lu_solve(F, b, refine=False)
    assert x.device == A.device
    assert backward_error(A.cpu(), x.cpu(), b.cpu()) <= 4 * 600**0.5 * U16


@pytest.mark.gpu
@pytest.mark.parametrize("zero", [0, 130, 599])
def test_a_zero_pivot_by_blocks_on_a_gpu(zero: int) -> None:
    A = torch.eye(600, device="cuda") + torch.ones(600, 600, device="cuda").tril(-1)
    A[zero, zero] = 0.0
    with pytest.raises(np.linalg.LinAlgError, match=rf"pivot {zero} is exactly zero"):
        lu_factor(A, pivot="none", panel=256)


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
def test_memory_layouts_on_a_gpu(transposed: bool) -> None:
    A = hpl_ai_matrix(700, device="cuda")
    A = A.T.contiguous().T if transposed else A
    before = A.clone()
    F = lu_factor(A, pivot="none")
    assert torch.equal(A, before)
    b = A.sum(1)
    assert backward_error(A.cpu(), lu_solve(F, b, refine=False).cpu(), b.cpu()) <= 4 * 700**0.5 * U16


@pytest.mark.gpu
def test_switches_for_sums_are_restored_on_a_gpu() -> None:
    """The user may sum in half precision; neula does not."""
    switch = torch.backends.cuda.matmul
    name = "allow_fp16_reduced_precision_reduction"
    before = getattr(switch, name)
    A = hpl_ai_matrix(1100, device="cuda")
    try:
        factors = []
        for value in (True, False):
            setattr(switch, name, value)
            factors.append(lu_factor(A, pivot="none", panel=256).U)
            assert getattr(switch, name) == value
    finally:
        setattr(switch, name, before)
    assert torch.equal(*factors)
