"""The LU variants: error bounds of the paper's theorems, order of errors in its Figures 1 to 4, memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from itertools import product

import pytest
import torch

from memory_of_gpu import peak_beside, without_waiting
from neula.algorithms.elimination import calu, lu, lu_panels
from neula.algorithms.elimination.calu import by_pivoted_blocks
from neula.algorithms.elimination.lu import VARIANTS, PackedLU, by_blocks, lu_factorize, panel_widths
from neula.algorithms.triangular import substitution
from neula.algorithms.triangular.substitution import WIDTH, Substitution
from neula.certificates.lu import BlockFma, componentwise_backward_error, lu_bound
from neula.engines import (
    FORMATS,
    FP16,
    FP32,
    UNITS,
    CpuEngine,
    CudaEngine,
    EmulatedEngine,
    Engine,
)
from neula.engines import cpu as cpu_engine
from neula.io.matrices import hpl_ai_matrix, no_pivoting_matrix, random_matrix
from neula.kernels.lu import tournament
from neula.kernels.lu.lu_block import kernels_take

U32 = 2.0**-24
EACH = pytest.mark.parametrize("variant", VARIANTS)


class Half(CpuEngine):
    """A GPU's arithmetic on a CPU: fp16 matrices, products of which are summed in float32."""

    formats = ("fp16", "fp32")  # type: ignore[assignment]

    def _matmul(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.float() @ b.float()


@pytest.fixture(autouse=True)
def _bf16_on_any_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow it is there."""
    monkeypatch.setattr(cpu_engine, "why_no_bf16", lambda: "")


def volta(format: str = "fp16") -> EmulatedEngine:
    """The paper's unit, which adds four products at a time."""
    return EmulatedEngine("cpu", format, "v100")


ENGINES: dict[str, Callable[[str], Engine]] = {
    "emulated": volta,
    "half": lambda format: Half("cpu", format),
    "cpu": lambda format: CpuEngine("cpu", format),
    "cuda": lambda format: CudaEngine("cuda", format),
}
# One element, panels that end with the matrix, those that do not, of single columns, wider than the matrix.
SHAPES = [(1, 1, 1), (64, 16, 4), (100, 32, 1), (30, 1, 1), (100, 256, 8)]


def matrix(n: int, *, pivoting: bool) -> torch.Tensor:
    return random_matrix("normal", n, n, seed=n) if pivoting else hpl_ai_matrix(n)


def factorize(a: torch.Tensor, engine: Engine, variant: str, r: int, s: int, **options: object) -> PackedLU:
    inner = s if VARIANTS[variant].partitioned else None
    return lu_factorize(a, engine, variant=variant, panel=r, inner_panel=inner, **options)  # type: ignore


def unpack(factors: PackedLU) -> tuple[torch.Tensor, torch.Tensor]:
    lu = factors.lu.double().cpu()
    return lu.tril(-1) + torch.eye(len(lu), dtype=torch.float64), lu.triu()


def gamma(n: int, u: float) -> float:
    return n * u / (1 - n * u)


def theorem(variant: str, n: int, r: int, s: int, u: float) -> float:
    """Constant f of Theorems 1 to 4 and Table 2, for ``|dA| <= u |A| + f ((1 + u) |A| + |L| |U|)``."""
    sums, panel = gamma(n, U32), gamma(min(r, n), U32)
    match variant:
        case "2.1" | "2.2":
            return gamma(n, u)
        case "3.1":
            return 2 * u + u * u + max(gamma(min(r, n), u), sums + gamma(-(-n // 4), u)) * (1 + u) ** 2
        case "4.1":
            return max(u + sums + u * sums, gamma(min(r, n), u))
        case "5.2/4.1":
            return max(u + sums + u * sums, u + panel, gamma(min(s, n), u))
        case "5.2/3.1":
            rounded = max(gamma(min(s, n), u), panel + gamma(-(-min(r, n) // 4), u))
            return max(u + sums + u * sums, 2 * u + u * u + rounded * (1 + u) ** 2)
        case _:
            return max(u + sums + u * sums, 2 * u + u * u + panel * (1 + u) ** 2)


def excess(a: torch.Tensor, factors: PackedLU, f: float, u: float) -> float:
    """Largest element of ``|A - L U|`` relative to its bound; the smallest number of fp16 is 2^-24, and half
    of it is lost where an element of L or U is below the normal range.
    """
    lower, upper = unpack(factors)
    a = a.double().cpu()[factors.permutation.cpu()]
    size = lower.abs() @ upper.abs()
    lost = 2.0**-25 * (upper.abs().sum(0) + lower.abs().sum(1, keepdim=True) + len(a))
    bound = u * a.abs() + f * ((1 + u) * a.abs() + size) + lost
    return float(((lower @ upper - a).abs() / bound).max())


# ---------------------------------------------------------------- the theorems, any shape, any panels

THEOREMS = [
    *product(["emulated"], ["fp16"], [False, True], SHAPES),
    *[("emulated", *case, (100, 32, 8)) for case in (("bf16", True), ("fp32", False), ("fp64", True))],
    *product(["half"], ["fp16"], [False, True], [(5, 4, 2), (150, 32, 8)]),
    *product(["cpu"], ["bf16"], [False, True], [(150, 32, 8)]),
    *(
        pytest.param("cuda", format, pivoting, (700, 128, 32), marks=pytest.mark.gpu)
        for format, pivoting in product(["fp16", "bf16"], [False, True])
    ),
]


@EACH
@pytest.mark.parametrize(("engine", "format", "pivoting", "sizes"), THEOREMS)
def test_factors_meet_the_bound_of_their_theorem(
    variant: str, engine: str, format: str, pivoting: bool, sizes: tuple[int, int, int]
) -> None:
    """In fp32 and fp64 all variants are standard algorithms, with the bound of Higham's Theorem 9.3."""
    (n, r, s), u = sizes, FORMATS[format].u
    a = matrix(n, pivoting=pivoting)
    given = a.float().cuda() if engine == "cuda" else a
    factors = factorize(given, ENGINES[engine](format), variant, r, s, pivoting=pivoting)
    f = theorem(variant, n, r, s, u) if format in ("fp16", "bf16") else gamma(n, u)
    if engine == "cpu":  # products come out in bf16: one more rounding of every update
        f += 2 * -(-n // r) * u
    if engine == "cuda":  # sums on tensor cores are truncated: twice the unit roundoff of float32
        f += gamma(2 * n, U32)
    assert excess(a, factors, f, u) <= 1
    assert factors.storage is FORMATS[format]
    assert factors.storage_bytes == n * n * FORMATS[format].dtype.itemsize
    assert engine == "emulated" or factors.lu.dtype == FORMATS[format].dtype
    assert factors.lu.stride(0) == 1 or n == 1, "column-major"


@EACH
def test_factors_with_pivoting(variant: str) -> None:
    """Numbers of the format; multipliers are at most one in the arithmetic of the panel, and stay so rounded.
    Pivots of small integers, which tie nowhere, are those of LAPACK.
    """
    a, done = random_matrix("normal", 80, 80, seed=3, dtype=torch.float32).T.contiguous().T, []
    before = a.clone()
    factors = factorize(a, volta(), variant, 32, 4, pivoting=True, on_columns=done.append)
    assert torch.equal(a, before)
    assert torch.equal(factors.lu, factors.lu.half().float())
    assert float(unpack(factors)[0].abs().max()) <= 1
    assert done == [32, 64, 80]
    a = torch.tensor([[1.0, 7.0, 3.0], [2.0, 1.0, 5.0], [4.0, 2.0, 1.0]])
    factors = factorize(a, volta(), variant, 2, 1, pivoting=True)
    assert (factors.pivots + 1).tolist() == torch.linalg.lu_factor(a)[1].tolist()
    assert factors.permutation.tolist() == [2, 0, 1]


@EACH
def test_a_zero_pivot_shows_on_the_diagonal(variant: str) -> None:
    a = torch.eye(20)
    a[7, 7] = 0.0
    a[7, 9] = a[12, 7] = 1.0
    lu = factorize(a, volta(), variant, 8, 4).lu
    assert lu[7, 7] == 0
    assert not lu.isfinite().all()


def test_panels_that_do_not_fit_are_refused() -> None:
    engine = EmulatedEngine()
    assert panel_widths("5.2/5.1", engine) == (256, 8)
    assert panel_widths("5.2/5.1", engine, 4) == (4, 2)
    assert panel_widths("4.1", engine, 31) == (31, None)
    with pytest.raises(ValueError, match=r"inner_panel=9 does not fit twice into panel=16.*at most 8"):
        panel_widths("5.2/4.1", engine, 16, 9)
    with pytest.raises(ValueError, match=r"variant '5.1' has no inner panels, got inner_panel=8"):
        panel_widths("5.1", engine, 16, 8)
    for width in (0, -3, 2.5):
        with pytest.raises(ValueError, match=f"panel must be a whole number, at least 1, got {width}"):
            panel_widths("4.1", engine, width)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"unknown variant '5.3': choose one of '2.1', '2.2'"):
        lu_factorize(torch.eye(2), engine, variant="5.3")


# ---------------------------------------------------------------- errors ordered as in the paper's figures


@lru_cache
def errors(kind: str, format: str, n: int, r: int, s: int, *names: str) -> dict[str, float]:
    """Formula 2.2 for each variant, with the right-hand side of the paper: all solutions are one."""
    a = hpl_ai_matrix(n) if kind == "hpl-ai" else no_pivoting_matrix(n, 1e3)
    b = a.sum(1, keepdim=True)
    engine = volta(format)
    found = {}
    for name in names or ("3.1 fp32", *VARIANTS):
        variant, wide = name.split()[0], name == "3.1 fp32"
        factors = factorize(a, engine, variant, r, s, storage=FP32 if wide else None)
        x = Substitution(factors, torch.float32).solve(b.float())
        found[name] = componentwise_backward_error(a, x, b, *unpack(factors))
    return found


@EACH
@pytest.mark.parametrize("kind", ["hpl-ai", "fasi-higham"])
def test_backward_errors_are_below_the_constants_of_the_tables(variant: str, kind: str) -> None:
    """To those are added the rounding of A, and substitution in float32, ``gamma_n`` for each factor
    (Higham, Theorem 8.5).
    """
    n, r, s = 256, 64, 8
    found = errors(kind, "fp16", n, r, s)
    extra = FP16.u + 2 * gamma(n, U32)
    assert found[variant] <= lu_bound(variant, n, panel=r, inner_panel=s) + extra
    assert found["3.1 fp32"] <= lu_bound("3.1", n, panel=r, storage=FP32) + extra


def test_inner_panels_that_are_partitioned_again_have_the_bound_of_the_innermost_ones() -> None:
    """Section 5.2: ``t u16 + n u32`` instead of ``s u16 + n u32``, for t inside s inside r."""
    a, r, s, t = hpl_ai_matrix(256), 128, 64, 4
    found = {}
    for inner in (s, (s, t)):
        factors = lu_factorize(a, volta(), variant="5.2/4.1", panel=r, inner_panel=inner)
        f = BlockFma.on(UNITS["v100"]).lu("5.2/4.1", 256, panel=r, inner_panel=inner)
        assert excess(a, factors, f, FP16.u) <= 1
        lower, upper = unpack(factors)
        found[inner] = float((lower @ upper - a).abs().div(a.abs() + lower.abs() @ upper.abs()).max())
    assert found[s, t] < found[s]
    assert panel_widths("5.2/4.1", volta(), 64, (16, 4)) == (64, (16, 4))
    for wrong in ((16, 9), (33, 4)):
        with pytest.raises(ValueError, match=r"does not fit twice"):
            panel_widths("5.2/4.1", volta(), 64, wrong)


def test_errors_are_ordered_as_in_the_paper() -> None:
    """3.1 with fp32 < 5.1 ~ 5.2/5.1 < 4.1 < 3.1 with fp16 ~ 2.1: Figures 1 to 4.

    Panels are a quarter of this matrix, so the errors of Algorithm 4.1 and of 3.1 with an fp16 matrix are
    still the same here: both are those of the panel.
    """
    e = errors("hpl-ai", "fp16", 512, 128, 8, "2.1", "3.1 fp32", "3.1", "4.1", "5.1", "5.2/5.1")
    assert e["3.1 fp32"] < 0.2 * min(e["5.1"], e["5.2/5.1"])
    assert 0.5 < e["5.1"] / e["5.2/5.1"] < 2
    assert 3 * max(e["5.1"], e["5.2/5.1"]) < e["4.1"] <= 1.01 * e["3.1"]
    assert 0.25 < e["3.1"] / e["2.1"] <= 1


# ---------------------------------------------------------------- solving


@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (32, 2), (70, 3), (150, 1)])
def test_substitution_solves_with_the_factors_it_has(
    n: int, k: int, dtype: torch.dtype, inverted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the emulated engine by substitution, in the CPU's with inverted diagonal blocks."""
    monkeypatch.setattr(substitution, "WIDTH", 32)
    engine = CpuEngine("cpu", "bf16") if inverted else volta()
    factors = lu_factorize(random_matrix("geometric", n, n, cond=10.0), engine, panel=64, pivoting=True)
    b = random_matrix("normal", n, k, dtype=dtype)
    x = Substitution(factors, dtype).solve(b)
    assert x.dtype == dtype
    (lower, upper), permuted = unpack(factors), b.double()[factors.permutation]
    if inverted:
        check_norms(x, lower, upper, permuted)
        return
    # Higham, Theorem 9.4: 3 gamma_n of |L| |U|.
    error = componentwise_backward_error(lower @ upper, x, permuted, lower, upper)
    assert error <= 3 * gamma(n, torch.finfo(dtype).eps / 2)


def check_norms(x: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor, b: torch.Tensor) -> None:
    """Products with inverses err by ``gamma_n |X| |T| |X| |b|`` (Higham 2002, section 14.2): in norms."""
    exact = torch.linalg.solve(upper, torch.linalg.solve(lower, b))
    condition = float(torch.linalg.cond(lower) * torch.linalg.cond(upper))
    error = (x.double().cpu() - exact).norm()
    assert error <= len(b) * torch.finfo(x.dtype).eps * condition * exact.norm()


# ---------------------------------------------------------------- real half precision


@pytest.mark.parametrize(("n", "r", "s"), [(5, 4, 2), (100, 256, 8), (97, 64, 32)])
def test_by_blocks(n: int, r: int, s: int) -> None:
    """Diagonal blocks first and what lies beside them afterwards: the same theorem."""
    a, engine = hpl_ai_matrix(n), Half("cpu")
    matrix, done = engine.empty(n, n, dtype=torch.float16).copy_(a), []
    by_blocks(matrix, engine, r, s, done.append)
    assert done == [*range(r, n, r), n]
    factors = PackedLU(matrix, torch.arange(n), FP16)
    assert excess(a, factors, theorem("5.2/5.1", n, r, s, FP16.u), FP16.u) <= 1


@pytest.mark.parametrize("pivoting", [False, True])
@pytest.mark.parametrize("n", [1, 64, 65, 150])
def test_matrices_are_bordered_to_whole_blocks(
    n: int, pivoting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lu, "_in_whole_blocks", lambda *_: True)
    a, done = random_matrix("normal", n, n, seed=n) if pivoting else hpl_ai_matrix(n), []
    matrix = a.half().T.contiguous().T
    options = {"panel": 64, "inner_panel": 32, "pivoting": pivoting, "on_columns": done.append}
    factors = lu_factorize(matrix, Half("cpu"), overwrite=True, **options)  # type: ignore[arg-type]
    assert factors.lu.shape == (n, n)
    assert factors.lu.stride(1) % lu.WHOLE == 0
    assert (factors.lu.data_ptr() == matrix.data_ptr()) == (n % lu.WHOLE == 0)
    assert max(done) == n
    assert sorted(factors.permutation.tolist()) == list(range(n))
    assert excess(a, factors, theorem("5.2/5.1", n, 64, 32, FP16.u), FP16.u) <= 1


@pytest.mark.parametrize(("n", "r"), [(1, 4), (5, 4), (97, 64), (150, 32), (300, 128)])
def test_tournament_pivoting(n: int, r: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pivots by several rounds, rows above that do not play, and the same theorem."""
    monkeypatch.setattr(calu, "find_pivots", partial(tournament.find_pivots_reference, tile=64))
    a, engine = random_matrix("normal", n, n, seed=n), Half("cpu")
    matrix, done = engine.empty(n, n, dtype=torch.float16).copy_(a), []
    permutation = by_pivoted_blocks(matrix, engine, r, done.append)
    assert done == [*range(r, n, r), n]
    assert sorted(permutation.tolist()) == list(range(n))
    factors = PackedLU(matrix, permutation, FP16)
    assert excess(a, factors, theorem("5.2/5.1", n, r, 32, FP16.u), FP16.u) <= 1
    rows = list(range(n))
    for i, pivot in enumerate(factors.pivots.tolist()):
        rows[i], rows[pivot] = rows[pivot], rows[i]
    assert rows == permutation.tolist()
    lower, upper = unpack(factors)
    # Partial pivoting of normal matrices grows by about n^(2/3) (Trefethen and Schreiber), tournaments by not
    # much more, and multipliers hardly exceed one.
    assert float(lower.abs().max()) <= 4
    assert float(upper.abs().max() / a.abs().max()) <= 2 + 2 * n ** (2 / 3)


@pytest.mark.parametrize("zero", [0, 40, 99])
def test_singular_matrices_show_with_tournaments(zero: int) -> None:
    """The pivot that vanishes is on the diagonal, and everything before it is finite."""
    a = random_matrix("normal", 100, 100, seed=1)
    a[:, zero] = 0
    matrix = Half("cpu").empty(100, 100, dtype=torch.float16).copy_(a)
    by_pivoted_blocks(matrix, Half("cpu"), 64)
    assert matrix[zero, zero] == 0
    assert matrix[:, :zero].isfinite().all()


@pytest.mark.parametrize(("variant", "pivoting"), [("4.1", True), ("5.1", False), ("5.2/5.1", True)])
def test_peak_memory_is_the_matrix_and_the_buffer(
    variant: str, pivoting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 bytes for each element of the matrix and 4 for each of the buffer's ``n r``; small things are
    ``O(r^2)``. The results of products, which a CPU adds to the buffer in a second step, are kept small.
    """
    monkeypatch.setattr(cpu_engine, "MIN_COLUMNS", 8)
    monkeypatch.setattr(cpu_engine, "PRODUCT_ELEMENTS", 1 << 11)
    monkeypatch.setattr(lu_panels, "MOVED_ELEMENTS", 1 << 11)
    n, r, s = 512, 32, 8
    a = random_matrix("normal", n, n, dtype=torch.float32) if pivoting else hpl_ai_matrix(n).float()
    peak = peak_bytes(lambda: factorize(a, CpuEngine("cpu", "bf16"), variant, r, s, pivoting=pivoting))
    product = (2 + 4 + 3 * 2) * 8 * n  # a unit that is there reads copies of operands
    assert 2 * n * n + 3 * n * r <= peak <= 2 * n * n + 4 * n * r + product + 40 * r * r


def peak_bytes(function) -> int:  # type: ignore[no-untyped-def]
    """Most bytes that tensors on the CPU held at a time, from the allocator's own records."""
    with torch.profiler.profile(profile_memory=True) as profile:
        function()
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["5.1", "5.2/4.1", "5.2/5.1", "by blocks", "tournaments"])
def test_peak_memory_on_a_gpu(kind: str) -> None:
    """Beside the matrix the buffer of a variant. A GPU's own way without interchanges rounds updates as they
    are stored: copies of a diagonal block are all. With them, a panel in float32, its L in the low format,
    and copies of both.
    """
    engine, n, r = CudaEngine("cuda", "fp16"), 8192 if kind == "tournaments" else 4096, 256
    tuning, a = engine.tuning, hpl_ai_matrix(n, dtype=torch.float32, device="cuda")
    block = tuning.lu_panel
    beside = {
        "by blocks": 6 * 4 * block * tuning.lu_inner_panel + 4 * block * block + 8 * n,
        "tournaments": 16 * n * tuning.pivoted_panel,
    }.get(kind, 4 * n * r + 32 * r * r)

    def work() -> PackedLU:
        if kind in VARIANTS:
            return factorize(a, engine, kind, r, 64)
        return lu_factorize(a, engine, pivoting=kind == "tournaments")

    for _ in range(3):  # cuBLAS allocates its workspace, and graphs are recorded
        work()
    assert peak_beside(work)[1] <= 2 * n * n + beside


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["fp16", "bf16"])
@pytest.mark.parametrize(("n", "r"), [(100, 512), (1500, 512), (3001, 1024)])
def test_by_blocks_on_a_gpu(format: str, n: int, r: int) -> None:
    """A GPU's default, with the kernels and with concurrent products, meets the error bound. Each time the
    numbers are the same, as concurrent work is done before anything that is queued afterwards.
    """
    engine, a = CudaEngine("cuda", format), hpl_ai_matrix(n)
    s, given = engine.tuning.lu_inner_panel, a.float().cuda()
    assert kernels_take(engine.operand_dtype, engine.device, s)
    done: list[int] = []
    factors = lu_factorize(given, engine, panel=r, inner_panel=s, on_columns=done.append)
    assert done == [*range(r, n, r), n]
    f = theorem("5.2/5.1", n, r, s, engine.format.u) + gamma(2 * n, U32)
    # Products with inverses in two parts of bf16, 16 bits, where the theorem has substitution in float32.
    assert excess(a, factors, f + 4 * 2.0**-16, engine.format.u) <= 1
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        others = [lu_factorize(given, engine, panel=r, inner_panel=s).lu.clone() for _ in range(4)]
    torch.cuda.synchronize()
    assert all(torch.equal(factors.lu, other) for other in others)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["fp16", "bf16"])
@pytest.mark.parametrize(("n", "r"), [(100, 512), (700, 96), (3001, 512)])
def test_tournament_pivoting_on_a_gpu(format: str, n: int, r: int) -> None:
    """With a GPU's default pivoting, first call, recording and replay give the same accurate factors."""
    engine, a = CudaEngine("cuda", format), random_matrix("normal", n, n, seed=n)
    assert engine.tuning.tournaments
    assert engine.tuning.pivoted_inner_panel == tournament.WIDTH
    f = theorem("5.2/5.1", n, r, 32, engine.format.u) + gamma(2 * n, U32)
    results = [
        lu_factorize(a.float().cuda(), engine, panel=r, inner_panel=tournament.WIDTH, pivoting=True)
        for _ in range(3)
    ]
    for factors in results:
        assert sorted(factors.permutation.tolist()) == list(range(n))
        assert excess(a, factors, f, engine.format.u) <= 1
        assert torch.equal(factors.lu, results[0].lu)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_solves_on_a_gpu(dtype: torch.dtype) -> None:
    """Also that only the first solve may wait, for what it keeps, and that none converts the factors."""
    n = 3 * WIDTH + 100
    a = hpl_ai_matrix(n, dtype=torch.float32, device="cuda")
    solver = Substitution(lu_factorize(a, CudaEngine("cuda", "fp16")), dtype)
    b = torch.ones(n, 1, dtype=dtype, device="cuda")
    solver.solve(b)
    with without_waiting():
        x, peak = peak_beside(lambda: solver.solve(b))
    # A copy of the factors takes 2 n^2 bytes; a sweep has room for eight vectors, a few times.
    assert peak <= n * n // 4
    check_norms(x, *unpack(solver.factors), b.double().cpu())


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu() -> None:
    engine, a = CudaEngine("cuda", "fp16"), hpl_ai_matrix(1024, dtype=torch.float32, device="cuda")

    def work() -> None:
        for s in (64, engine.tuning.lu_inner_panel):
            lu_factorize(a, engine, panel=256, inner_panel=s)
        lu_factorize(a, engine, pivoting=True)

    work()
    with without_waiting():
        work()
