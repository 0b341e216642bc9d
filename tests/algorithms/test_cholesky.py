"""Recursive Cholesky in every arithmetic: errors that hardly grow with n."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.half_engine import HalfEngine

from neula.algorithms.elimination.cholesky import (
    SHIFT,
    CholeskyFactorization,
    FallingPivotsError,
    cholesky,
    library_cholesky,
    working_matrices,
)
from neula.algorithms.elimination.cholesky_factor import CholeskyFactor
from neula.algorithms.triangular.inverted import InvertedTuning
from neula.engines import CpuEngine, EmulatedEngine, Engine
from neula.engines.cuda import CudaEngine
from neula.io.matrices import random_matrix
from neula.kernels.cholesky.cholesky import MAX_COLUMNS as LEAF
from neula.kernels.cholesky.cholesky_tiles import InvertedFactor, factor_inverted
from neula.kernels.products.kept import Kept

ENGINES = [CpuEngine("cpu", "fp32"), CpuEngine("cpu", "fp64")] + [
    EmulatedEngine(format=name) for name in ("fp16", "bf16", "tf32", "fp32", "fp64")
]


def definite(n: int, seed: int = 0) -> torch.Tensor:
    """Elements of order 1 and condition of order 10."""
    g = torch.randn(n, 2 * n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return g @ g.T / n


def factorized(a: torch.Tensor, engine: Engine, leaf: int = 32, **options: Any) -> CholeskyFactorization:
    a = a if a.ndim == 3 else a[None]
    work = working_matrices(len(a), a.shape[1], engine).copy_(a)
    return cholesky(work, engine, leaf=leaf, **options)


def checked(a: torch.Tensor, found: CholeskyFactorization, u: float, high: float) -> torch.Tensor:
    """L, whose backward error is small by components. A is rounded to the storage precision, L to the format,
    twice in a product; sums are in the storage precision (Higham 2002, theorem 10.3, and Lopez and Mary 2022,
    theorem 3). Leaves are inverted, which counts in the storage precision with their condition number, 10.
    """
    lower = found.lower[0].double().tril()
    size = a.abs() + lower.abs() @ lower.abs().T
    assert found.order.tolist() == [0]
    assert ((a - lower @ lower.T).abs() <= (2.1 * u + 10 * (len(a) + 1) * high) * size).all()
    return lower


@pytest.mark.parametrize("engine", ENGINES, ids=repr)
@pytest.mark.parametrize(("n", "leaf"), [(1, 8), (64, 16), (97, 8)])
def test_backward_error_of_the_factor(n: int, leaf: int, engine: Engine) -> None:
    a = definite(n)
    checked(a, factorized(a, engine, leaf), engine.format.u, torch.finfo(engine.storage).eps / 2)


def room(rows: int, columns: int, largest: torch.Tensor, *, exact: bool = False) -> Kept:
    """Storage for operands in parts, as on a GPU."""
    return Kept.empty(rows, columns, largest)


@pytest.mark.parametrize(("inverted", "n"), [(8, 100), (16, 128), (32, 137)])
def test_blocks_below_are_multiplied_in_parts(n: int, inverted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EmulatedEngine(format="fp32")
    monkeypatch.setattr(engine, "kept", room)
    monkeypatch.setattr(
        EmulatedEngine, "tuning", replace(engine.tuning, corrected_from=32, cholesky_inverted=inverted)
    )
    a = definite(n)
    found = factorized(a, engine, 8, block=32)
    lower = found.lower[0].double().tril()
    assert found.order.tolist() == [0]
    assert (a - lower @ lower.mT).abs().max() <= 100 * 2.0**-24 * a.max()
    a[70, 70] = -1.0
    assert factorized(a, engine, 8, block=32).order.tolist() == [71]


@pytest.mark.parametrize("give_up", [False, True])
@pytest.mark.parametrize("in_parts", [False, True])
def test_what_is_rounded_as_it_is_stored(
    give_up: bool, in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operands in half precision have memory of their own, and what is below their blocks comes there."""
    engine, n = HalfEngine("cpu", "fp16"), 150
    if in_parts:
        monkeypatch.setattr(engine, "kept", lambda *given, exact=False: room(*given) if exact else None)
    monkeypatch.setattr(engine, "pieces", a_few_rows)
    monkeypatch.setattr(HalfEngine, "tuning", replace(engine.tuning, cholesky_inverted=16))
    a = definite(n)
    found = factorized(a + torch.full_like(a, torch.nan).triu(1), engine, 16, block=32, give_up=give_up)
    assert found.lower.dtype == torch.float16
    checked(a, found, 2.0**-11, 2.0**-24)


def a_few_rows(m: int, n: int) -> Iterator[tuple[slice, slice]]:
    """Pieces as a GPU has them."""
    return ((slice(start, min(start + 40, m)), slice(0, n)) for start in range(0, m, 40))


def the_other_way_round(launch: Callable[[], None], other: Callable[[], None]) -> None:
    """Call ``other`` first: concurrent work may come in either order."""
    other()
    launch()


@pytest.mark.parametrize("name", ["fp16", "fp32"])
@pytest.mark.parametrize("block", [16, 32])
def test_what_runs_concurrently_with_a_diagonal_block_does_not_depend_on_it(
    name: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, a = HalfEngine("cpu", name), definite(150)
    monkeypatch.setattr(engine, "pieces", a_few_rows)
    expected = factorized(a, engine, 16, block=block).lower
    monkeypatch.setattr(engine, "concurrently", the_other_way_round)
    error = (factorized(a, engine, 16, block=block).lower - expected).tril().abs().max()
    assert error <= 10 * engine.format.u * expected.tril().max()


class AsOnAGPU:
    """The kernel of diagonal blocks: by the reference."""

    @staticmethod
    def takes(a: torch.Tensor, width: int) -> bool:
        return len(a) == 1

    def __call__(self, a: torch.Tensor, width: int) -> InvertedFactor:
        return factor_inverted.reference(a, width)


@pytest.mark.parametrize("give_up", [False, True])
@pytest.mark.parametrize("name", ["fp16", "fp32"])
def test_diagonal_blocks_by_a_kernel_are_rounded_once(
    name: str, give_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, n, block = HalfEngine("cpu", name), 5 * LEAF // 2, 2 * LEAF
    monkeypatch.setattr("neula.algorithms.elimination.cholesky.factor_inverted", AsOnAGPU())
    a = definite(n)
    u, rounding = engine.format.u if name == "fp16" else 0.0, 10 * (n + 1) * 2.0**-24
    lower = checked(a, factorized(a, engine, LEAF, block=block, give_up=give_up), u, 2.0**-24)
    exact = torch.linalg.cholesky(a[:block, :block])
    error = (lower[:block, :block] - exact).abs()
    assert (error <= u * exact.abs() + rounding * exact.amax()).all()


@pytest.mark.parametrize("name", ["fp16", "fp32"])
@pytest.mark.parametrize("count", [1, 2])
def test_blocks_of_columns_are_what_recursion_makes(name: str, count: int) -> None:
    engine, a = EmulatedEngine(format=name), torch.stack([definite(77, seed) for seed in range(count)])
    expected = factorized(a, engine, 8)
    for block in (8, 20, 32):
        found = factorized(a, engine, 8, block=block)
        error = (found.lower - expected.lower).tril().abs().max()
        assert error <= 10 * engine.format.u * expected.lower.tril().max()
        assert found.order.tolist() == [0] * count
    a[-1, 40, 40] = -1.0
    assert factorized(a, engine, 8, block=32).order.tolist() == [0] * (count - 1) + [41]


@pytest.mark.parametrize("engine", ENGINES, ids=repr)
@pytest.mark.parametrize("width", [0, 16])
def test_solves_to_the_accuracy_of_the_format(engine: Engine, width: int) -> None:
    a, n = definite(120), 120
    b = torch.randn(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    before = b.clone()
    factor = CholeskyFactor.from_factor(factorized(a, engine).lower[0], engine.storage, width)
    reference = torch.linalg.solve(a, b)
    bound = 10 * float(torch.linalg.cond(a)) * engine.format.u * math.sqrt(n)
    for factors in (factor, factor.in_double()):
        x = factors.solve(b)
        assert x.dtype == torch.float64
        assert torch.linalg.matrix_norm(x - reference) <= bound * torch.linalg.matrix_norm(reference)
        assert torch.equal(factors.solve_transposed(b), x)
    assert torch.equal(b, before)
    assert factor.growth == 1.0


@pytest.mark.parametrize(("index", "leaf"), [(0, 8), (16, 8), (40, 64), (49, 8)])
def test_says_which_minor_is_not_positive(index: int, leaf: int) -> None:
    a = torch.eye(50, dtype=torch.float64).repeat(2, 1, 1)
    a[1, index, index] = -1.0
    a[1, 49, 49] = -1.0
    for engine in (CpuEngine("cpu", "fp32"), EmulatedEngine(format="fp16")):
        assert factorized(a, engine, leaf).order.tolist() == [0, index + 1]
    assert library_cholesky(a).order.tolist() == [0, index + 1]


@pytest.mark.parametrize("index", [3, 20, 40])
def test_gives_up_early(index: int) -> None:
    """After the leading quarter, or half; the product of all columns is never reached."""
    engine = EmulatedEngine(format="fp32")
    a = 2 * torch.eye(64, dtype=torch.float64)
    a[index, index] = -1.0
    found = factorized(a, engine, 8, block=16, give_up=True)
    assert found.order.tolist() == [index + 1]
    untouched = torch.equal(found.lower[0, 32:, 32:], a[32:, 32:].float())
    assert untouched == (index < 32)


@pytest.mark.parametrize(
    ("decades", "name", "lost"), [(3, "fp16", False), (6, "fp16", True), (12, "fp32", True)]
)
def test_foresees_the_smallest_eigenvalue(decades: int, name: str, lost: bool) -> None:
    q = random_matrix("normal", 256, 256, dtype=torch.float64)
    q = torch.linalg.qr(q)[0]
    a = (q * torch.logspace(0, -decades, 256, dtype=torch.float64)) @ q.T
    d = a.diagonal().rsqrt()
    a = a * d * d[:, None]
    engine = EmulatedEngine(format=name)
    if not lost:
        assert factorized(a, engine, 8, block=16, give_up=True).order.tolist() == [0]
        return
    with pytest.raises(FallingPivotsError) as error:
        factorized(a, engine, 8, block=16, give_up=True)
    # By a quarter of the rows a tiny one seems smaller than it is.
    assert 1e-4 <= error.value.smallest / float(torch.linalg.eigvalsh(a)[0]) <= 100


def test_pivots_that_do_not_fall_any_further_are_no_reason_to_give_up() -> None:
    """A Gaussian kernel with noise: as many pivots as there are, none is smaller than the noise."""
    x = random_matrix("normal", 256, 3, dtype=torch.float64)
    a = torch.cdist(x, x).square().neg().exp() + 0.01 * torch.eye(256)
    found = factorized(a, EmulatedEngine(format="fp16"), 8, block=16, give_up=True, shift=SHIFT)
    assert found.order.tolist() == [0]


def test_rounding_alone_does_not_cost_definiteness() -> None:
    """Smallest eigenvalue u/4: rounding L in products can push it below zero, and the shift brings it
    back.
    """
    engine = EmulatedEngine(format="fp16")
    n, u = 24, engine.format.u
    off = (1 - u / 4) * torch.ones(2, 2, dtype=torch.float64).fill_diagonal_(0)
    a = torch.block_diag(*[torch.eye(2, dtype=torch.float64) + off for _ in range(n // 2)])
    assert torch.linalg.eigvalsh(a).min() > 0
    assert factorized(a, engine, 1, shift=SHIFT).order.tolist() == [0]


@pytest.mark.gpu
@pytest.mark.parametrize("arithmetic", ["fp16", "bf16", "fp32", "fp16_cor", "fp64"])
@pytest.mark.parametrize("count", [1, 3])
def test_on_a_gpu(arithmetic: str, count: int) -> None:
    engine = CudaEngine("cuda", arithmetic)
    n = 2600
    a = torch.stack([definite(n, seed) for seed in range(count)]).cuda()
    found = factorized(a, engine, 128)
    assert found.order.tolist() == [0] * count
    assert found.lower.dtype == engine.operand_dtype
    lower = found.lower.double().tril()
    error = torch.linalg.matrix_norm(a - lower @ lower.mT) / torch.linalg.matrix_norm(a)
    assert (error <= 20 * engine.format.u).all()
    width = engine.tuning[InvertedTuning].width(n)
    factor = CholeskyFactor.from_factor(found.lower[0], engine.storage, width)
    b = torch.ones(n, 2, dtype=torch.float64, device="cuda")
    bound = 10 * 20 * engine.format.u * math.sqrt(n)
    assert (a[0] @ factor.solve(b) - b).abs().max() <= bound
