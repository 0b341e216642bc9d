"""Householder in a low format: block reflectors, and both algorithms that are built of them.

What the papers compare Gram-Schmidt with. Unlike there, neither the backward error nor the orthogonality of Q
depends on the condition number.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from qr_measures import (
    U32,
    U64,
    column_major,
    column_residuals,
    orthogonality,
    orthogonality_bound,
    panel_bound,
    residual,
    with_widths,
)

from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.algorithms.scaling import power_of_two_scales
from neula.engines import ENGINES, CpuEngine, EmulatedEngine, Engine
from neula.io.matrices import SPECTRA, random_matrix
from neula.papers.qr.householder import (
    BlockReflector,
    HouseholderQR,
    blocked_householder,
    householder_wy,
    rhouqr,
)

Algorithm = Callable[[torch.Tensor, Engine, int], HouseholderQR]

ALGORITHMS: dict[str, Algorithm] = {
    "rhouqr": lambda a, engine, width: rhouqr(a, engine, cutoff=width),
    "blocked": lambda a, engine, width: blocked_householder(a, engine, block=width),
}
EACH = pytest.mark.parametrize("name", ALGORITHMS)
LOW = pytest.mark.parametrize("format", ["fp16", "bf16", "tf32"])
FORMATS = ["fp16", "bf16", "tf32", "fp32", "fp64"]
SHAPES = [(1, 1), (5, 1), (300, 1), (7, 7), (33, 33), (257, 33), (100, 100), (300, 129)]


def emulated(format: str, **options: object) -> EmulatedEngine:
    return EmulatedEngine("cpu", format, **options)  # type: ignore[arg-type]


def normal(m: int, n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return random_matrix("normal", m, n, seed=seed, dtype=dtype)


@lru_cache(maxsize=64)
def spectrum(kind: str, m: int, n: int, cond: float) -> torch.Tensor:
    return random_matrix(kind, m, n, cond=cond, seed=1)


def deviation(q: torch.Tensor) -> float:
    """``||I - Q^T Q||_F / sqrt(n)``; infinite for NaN."""
    q = q.double()
    error = float(torch.linalg.matrix_norm(torch.eye(q.shape[1], dtype=torch.float64) - q.T @ q))
    return error / math.sqrt(q.shape[1]) if math.isfinite(error) else math.inf


def steps(name: str, n: int, width: int) -> float:
    """Number of steps over which rounding errors add up.

    Recursive: a level for each doubling of the panel, and the product that forms Q. Blocked: the root of the
    number of panels, because a reflector acts within the range of its own Y, and errors of both signs in
    different directions add up like that.
    """
    panels = -(-n // width)
    return 1 + math.ceil(math.log2(panels)) if name == "rhouqr" else math.sqrt(panels)


def bound(engine: Engine, name: str, m: int, n: int, width: int) -> float:
    """``12 u`` a step, for the backward error and for the orthogonality, and panels in storage precision.

    Computing ``Y T Y^T C`` takes six roundings (Y twice, T, C, and both inner products), of ``u / 2`` on
    average, and the norm of ``Y T Y^T = I - Q`` is at most 2: together ``6 u``. A step applies a reflector,
    and couples two T by six more roundings or applies once more to form Q. ``I - Q^T Q`` counts each error
    of Q twice, but not those of the updates, which are in R.
    """
    storage = U64 if engine.storage == torch.float64 else U32
    in_storage = panel_bound(storage, n) + orthogonality_bound(storage, m, n)
    return 12 * engine.format.u * steps(name, n, width) + in_storage


# ---------------------------------------------------------------- one panel in WY form


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_wy_of_a_panel(m: int, n: int, dtype: torch.dtype) -> None:
    a = normal(m, n, dtype=dtype)
    before = a.clone()
    y, t, r = householder_wy(a)
    u = torch.finfo(dtype).eps / 2
    assert torch.equal(a, before)
    assert (y.shape, t.shape, r.shape) == ((m, n), (n, n), (n, n))
    assert {y.dtype, t.dtype, r.dtype} == {dtype}
    assert torch.equal(y, y.tril()), "lower trapezoidal"
    assert (y.diagonal() == 1).all()
    assert torch.equal(t, t.triu()), "exact zeros below the diagonal"
    assert torch.equal(r, r.triu()), "exact zeros below the diagonal"
    y, t = y.double(), t.double()
    q = torch.eye(m, dtype=torch.float64) - y @ t @ y.T
    assert orthogonality(q) <= orthogonality_bound(u, m, n)
    assert residual(a, q[:, :n], r) <= panel_bound(u, n)


def test_wy_is_the_product_of_the_reflectors() -> None:
    """``H_1 H_2 ... H_n`` of LAPACK's tau and vectors, one after the other."""
    a = normal(40, 9, dtype=torch.float64)
    y, t, r = householder_wy(a)
    factors, tau = torch.geqrf(a)
    q = torch.eye(40, dtype=torch.float64)
    for j in range(9):
        v = torch.cat([torch.zeros(j), torch.ones(1), factors[j + 1 :, j]]).double()
        q -= tau[j] * (q @ v)[:, None] * v
    # Two computations with errors of orthogonality_bound each.
    error = torch.linalg.matrix_norm(q - (torch.eye(40, dtype=torch.float64) - y @ t @ y.T), 2)
    assert error <= 2 * orthogonality_bound(U64, 40, 9)
    assert torch.equal(r, factors[:9].triu())


@pytest.mark.parametrize("where", [[0], [4], [8], [0, 1, 5], list(range(9))])
def test_columns_without_a_reflector(where: list[int]) -> None:
    """Zero columns have tau = 0: row and column of T are zero, and nothing was divided by it."""
    a = normal(40, 9, dtype=torch.float64)
    a[:, where] = 0
    y, t, r = householder_wy(a)
    assert not t[where].any()
    assert not t[:, where].any()
    assert not r[:, where].any()
    q = torch.eye(40, dtype=torch.float64) - y @ t @ y.T
    assert orthogonality(q) <= orthogonality_bound(U64, 40, 9)


@pytest.mark.parametrize(("m", "n", "p"), [(40, 9, 5), (40, 9, 1), (40, 40, 7), (7, 1, 20), (1, 1, 1)])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("transpose", [False, True])
def test_a_block_reflector_is_applied_in_place(m: int, n: int, p: int, format: str, transpose: bool) -> None:
    """To a block of a larger column-major matrix, whose rest stays as it is."""
    engine = emulated(format)
    y, t, _ = householder_wy(normal(m, n).to(engine.storage))
    store = column_major(normal(m + 5, p + 4, seed=7).to(engine.storage))
    before = store.clone()
    block = store[3 : m + 3, 2 : p + 2]
    reflector = BlockReflector(y, t)
    found = reflector.apply(block, engine, transposed=transpose)
    assert found.data_ptr() == block.data_ptr()

    c, y, t = before[3 : m + 3, 2 : p + 2].double(), y.double(), t.double()
    expected = c - y @ ((t.T if transpose else t) @ (y.T @ c))
    error = torch.linalg.matrix_norm(block.double() - expected) / torch.linalg.matrix_norm(c)
    assert error <= bound(engine, "blocked", m, n, n)
    store[3 : m + 3, 2 : p + 2] = before[3 : m + 3, 2 : p + 2]
    assert torch.equal(store, before)


@pytest.mark.parametrize(("m", "n", "p"), [(40, 9, 5), (40, 9, 0), (40, 40, 0), (7, 1, 3)])
@pytest.mark.parametrize("format", FORMATS)
def test_a_bordered_matrix_only_saves_work(m: int, n: int, p: int, format: str) -> None:
    """The same as applying the reflector to ``diag(I, C2)``: ones and zeros are exact in every format, so
    only the order of sums differs, and what is rounded after them.
    """
    engine = emulated(format)
    y, t, _ = householder_wy(normal(m, n).to(engine.storage))
    c = column_major(torch.zeros(m, n + p, dtype=engine.storage))
    c[:n, :n] = torch.eye(n)
    if p:
        c[n:, n:] = normal(m - n, p, seed=7)
    expected = BlockReflector(y, t).apply(c.clone(), engine)
    BlockReflector(y, t).apply_to_bordered(c, engine)
    error = torch.linalg.matrix_norm(c - expected) / torch.linalg.matrix_norm(expected)
    assert error <= 2 * bound(engine, "blocked", m, n, n)


# ---------------------------------------------------------------- any shape, any parameters


@EACH
@pytest.mark.parametrize(("m", "n", "width"), with_widths(SHAPES, [1, 32, 1000]))
@pytest.mark.parametrize("format", ["fp16", "fp32"])
def test_every_shape_and_width(name: str, m: int, n: int, width: int, format: str) -> None:
    engine = emulated(format)
    a = normal(m, n).to(engine.storage)
    factors = ALGORITHMS[name](a, engine, width)
    q, r = factors.q(engine), factors.r
    assert (q.shape, r.shape, q.dtype, r.dtype) == ((m, n), (n, n), engine.storage, engine.storage)
    assert q.stride() == (1, m), "column-major"
    assert torch.equal(r, r.triu()), "exact zeros below the diagonal"
    for reflector in factors.reflectors:
        assert torch.equal(reflector.y, reflector.y.tril())
        assert (reflector.y.diagonal() == 1).all()
        assert torch.equal(reflector.t, reflector.t.triu())
    assert residual(a, q, r) <= bound(engine, name, m, n, width)
    assert deviation(q) <= bound(engine, name, m, n, width)


@EACH
@pytest.mark.parametrize(("m", "n"), SHAPES)
@pytest.mark.parametrize("format", ["bf16", "fp32", "fp64"])
def test_the_cpu_engine(name: str, m: int, n: int, format: str) -> None:
    if format not in CpuEngine("cpu").formats:
        pytest.skip("no bf16 unit")
    engine = CpuEngine("cpu", format)
    a = normal(m, n).to(engine.storage)
    factors = ALGORITHMS[name](a, engine, 32)
    q = factors.q(engine)
    # bf16 units also round products to bf16; the inner two are rounded anyway, so seven times instead of six.
    limit = bound(engine, name, m, n, 32) * (7 / 6 if format == "bf16" else 1)
    assert residual(a, q, factors.r) <= limit
    assert deviation(q) <= limit


@EACH
@pytest.mark.parametrize(("m", "n", "width"), [(300, 100, 7), (400, 129, 32), (100, 100, 300)])
@pytest.mark.parametrize("format", FORMATS)
def test_q_and_r_are_those_of_lapack(name: str, m: int, n: int, width: int, format: str) -> None:
    """Unique but for signs, which are LAPACK's here (Sun 1991: ``sqrt(2) cond`` times the backward error,
    which includes the lost orthogonality, for R, and as much again for Q).
    """
    engine, cond = emulated(format), 4.0
    a = spectrum("arithmetic", m, n, cond).to(engine.storage)
    reference_q, reference_r = torch.linalg.qr(a.double())
    factors = ALGORITHMS[name](a, engine, width)
    limit = math.sqrt(2) * cond * 2 * bound(engine, name, m, n, width)
    error = torch.linalg.matrix_norm(factors.r.double() - reference_r)
    assert error <= limit * torch.linalg.matrix_norm(reference_r)
    error = torch.linalg.matrix_norm(factors.q(engine).double() - reference_q)
    assert error <= 2 * limit * math.sqrt(n)


@EACH
def test_width_beyond_n_is_the_library_in_r(name: str) -> None:
    """One panel: R has no low precision at all."""
    a = normal(300, 40)
    assert torch.equal(ALGORITHMS[name](a, emulated("fp16"), 64).r, torch.geqrf(a)[0][:40].triu())


def test_one_reflector_or_one_a_panel() -> None:
    a = normal(300, 100)
    assert len(rhouqr(a, emulated("fp16"), cutoff=32).reflectors) == 1
    shapes = [h.y.shape for h in blocked_householder(a, emulated("fp16"), block=32).reflectors]
    assert shapes == [(300, 32), (268, 32), (236, 32), (204, 4)]


def test_the_engine_chooses_the_cutoff() -> None:
    engine, a = emulated("fp16"), normal(300, 200)
    assert torch.equal(rhouqr(a, engine).r, rhouqr(a, engine, cutoff=engine.tuning.single.cutoff).r)


def test_both_algorithms_agree_with_two_panels() -> None:
    """The same operations but for the coupling of T, which R does not see."""
    a, engine = normal(300, 64), emulated("fp16")
    assert torch.equal(rhouqr(a, engine, cutoff=32).r, blocked_householder(a, engine, block=32).r)


@EACH
def test_q_in_a_better_format(name: str) -> None:
    """Blocked Y and T come from panels in float32; the recursion's T comes from products in fp16."""
    factors = ALGORITHMS[name](normal(300, 129), emulated("fp16"), 32)
    limit = (
        orthogonality_bound(U32, 300, 129)
        if name == "blocked"
        else bound(emulated("fp16"), name, 300, 129, 32)
    )
    q = factors.q(emulated("fp64"))
    assert q.dtype == torch.float64
    assert deviation(q) <= limit


@EACH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_input_of_any_dtype_is_left_alone(name: str, dtype: torch.dtype) -> None:
    a = normal(300, 40).to(dtype)
    before = a.clone()
    engine = emulated("fp16")
    factors = ALGORITHMS[name](a, engine, 16)
    assert torch.equal(a, before)
    assert residual(a, factors.q(engine), factors.r) <= bound(engine, name, 300, 40, 16)


@EACH
@LOW
def test_views_give_what_their_copies_give(name: str, format: str) -> None:
    a, engine = normal(600, 240), emulated(format)
    before = a.clone()
    for view in (a[::2, ::3], a.T[:, :200], a[1:302, 7:140], a[:, 5:6], a[:7].T):
        factors = ALGORITHMS[name](view, engine, 32)
        copy = ALGORITHMS[name](view.contiguous(), engine, 32)
        assert torch.equal(factors.q(engine), copy.q(engine))
        assert torch.equal(factors.r, copy.r)
    assert torch.equal(a, before)


@pytest.mark.parametrize("engine", ["cpu", "emulated"])
def test_bad_parameters_are_named(engine: str) -> None:
    a, chosen = normal(30, 4), ENGINES[engine]("cpu", "fp32")
    with pytest.raises(ValueError, match=r"cutoff must be at least 1, got 0"):
        rhouqr(a, chosen, cutoff=0)
    with pytest.raises(ValueError, match=r"block must be at least 1, got -128"):
        blocked_householder(a, chosen, block=-128)


@pytest.mark.parametrize(("m", "n"), [(3, 4), (1, 2), (299, 300)])
def test_more_columns_than_rows_are_refused(m: int, n: int) -> None:
    with pytest.raises(ValueError, match=f"rhouqr needs at least as many rows as columns, got {m} x {n}"):
        rhouqr(normal(m, n), emulated("fp16"))
    with pytest.raises(
        ValueError, match=f"blocked_householder needs at least as many rows as columns, got {m} x {n}"
    ):
        blocked_householder(normal(m, n), emulated("fp16"))


# ---------------------------------------------------------------- any condition number


@EACH
@LOW
@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize("cond", [1.0, 1e6])
@pytest.mark.parametrize("width", [32])
def test_nothing_depends_on_the_condition(name: str, format: str, kind: str, cond: float, width: int) -> None:
    engine = emulated(format)
    a = spectrum(kind, 512, 256, cond).float()
    factors = ALGORITHMS[name](a, engine, width)
    q = factors.q(engine)
    assert residual(a, q, factors.r) <= bound(engine, name, 512, 256, width)
    assert deviation(q) <= bound(engine, name, 512, 256, width)


@EACH
@pytest.mark.parametrize("kind", ["arithmetic", "geometric", "cluster_large"])
def test_gram_schmidt_loses_what_householder_keeps(name: str, kind: str) -> None:
    """Beyond 1/u, 2048 for fp16, one pass of Gram-Schmidt leaves columns that are orthogonal in no digit.
    Householder loses at cond 1e4 what it loses at cond 1, but for the scatter of rounding errors.
    """
    engine = emulated("fp16")
    easy, hard = (spectrum(kind, 512, 256, cond).float() for cond in (1.0, 1e4))
    gram_schmidt, _ = rgsqrf(hard, engine, cutoff=32)
    before, after = (deviation(ALGORITHMS[name](a, engine, 32).q(engine)) for a in (easy, hard))
    assert orthogonality(gram_schmidt) > 0.1
    assert after <= bound(engine, name, 512, 256, 32)
    assert after <= 2 * before


@EACH
@LOW
def test_exact_rank_deficiency(name: str, format: str) -> None:
    """The second half repeats the first: Q is orthonormal all the same."""
    half = normal(300, 64)
    a, engine = torch.cat([half, half], 1), emulated(format)
    factors = ALGORITHMS[name](a, engine, 32)
    q = factors.q(engine)
    assert residual(a, q, factors.r) <= bound(engine, name, 300, 128, 32)
    assert deviation(q) <= bound(engine, name, 300, 128, 32)


# ---------------------------------------------------------------- columns of any size


@EACH
@LOW
@pytest.mark.parametrize("where", [[0], [31], [32], [63], [128], [0, 1, 40, 41, 127, 128], list(range(32))])
def test_zero_columns(name: str, format: str, where: list[int]) -> None:
    """They stay zero in R, and Q is orthonormal all the same."""
    a, engine = normal(300, 129), emulated(format)
    a[:, where] = 0
    factors = ALGORITHMS[name](a, engine, 32)
    q = factors.q(engine)
    assert not factors.r[:, where].any()
    assert residual(a, q, factors.r) <= bound(engine, name, 300, 129, 32)
    assert deviation(q) <= bound(engine, name, 300, 129, 32)


@EACH
@pytest.mark.parametrize("format", FORMATS)
def test_a_zero_matrix(name: str, format: str) -> None:
    engine = emulated(format)
    factors = ALGORITHMS[name](torch.zeros(300, 40), engine, 16)
    assert not factors.r.any()
    assert torch.equal(factors.q(engine), torch.eye(300, 40, dtype=engine.storage))


@EACH
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("m", [40, 300])
def test_a_triangular_matrix_is_its_own_r(name: str, format: str, m: int) -> None:
    """No reflector anywhere, tau = 0: nothing is changed, not even by rounding."""
    engine = emulated(format)
    a = normal(m, 40).to(engine.storage).triu()
    factors = ALGORITHMS[name](a, engine, 16)
    assert torch.equal(factors.r, a[:40])
    assert torch.equal(factors.q(engine), torch.eye(m, 40, dtype=engine.storage))
    assert not any(reflector.t.any() for reflector in factors.reflectors)


@EACH
@LOW
def test_scaled_columns_of_any_size(name: str, format: str) -> None:
    """Powers of two for the columns, undone exactly in R; the error counts in each column."""
    m, n = 300, 129
    sizes = torch.logspace(-30, 30, n, dtype=torch.float64)
    shuffled = torch.randperm(n, generator=torch.Generator().manual_seed(4))
    a = normal(m, n, seed=4, dtype=torch.float64) * sizes[shuffled]
    engine = emulated(format)
    scales = power_of_two_scales(engine.column_max(a))
    factors = ALGORITHMS[name](engine.fill(engine.empty(m, n), a, scales), engine, 32)
    r = factors.r.double() / scales
    assert (column_residuals(a, factors.q(engine), r) <= bound(engine, name, m, n, 32)).all()


@EACH
def test_without_scaling_fp16_overflows_and_shows_it(name: str) -> None:
    """Never a silently wrong answer: R is not finite."""
    r = ALGORITHMS[name](normal(300, 64) * 1e5, emulated("fp16"), 32).r
    assert not torch.isfinite(r).all()


# ---------------------------------------------------------------- sums as tensor cores make them


@EACH
@pytest.mark.parametrize("unit", ["v100", "a100", "h100"])
def test_truncating_tensor_cores(name: str, unit: str) -> None:
    """Each step adds what the unit's sums of 512 products may lose."""
    engine = emulated("fp16", unit=unit)
    a = spectrum("geometric", 512, 160, 1e4).float()
    factors = ALGORITHMS[name](a, engine, 32)
    q = factors.q(engine)
    limit = bound(engine, name, 512, 160, 32) + 2 * 5 * engine.unit.sum_error(512, engine.block)
    assert residual(a, q, factors.r) <= limit
    assert deviation(q) <= limit
