"""Householder in a low format: block reflectors, and both algorithms that are built of them.

What the papers compare Gram-Schmidt with. Unlike there, neither the backward error nor the orthogonality of Q
depends on the condition number.
"""

import math
from collections.abc import Callable

import pytest
import torch
from qr_measures import (
    U32,
    U64,
    column_residuals,
    emulated,
    normal,
    orthogonality,
    orthogonality_bound,
    panel_bound,
    residual,
    spectrum,
    with_widths,
)

from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.algorithms.scaling import power_of_two_scales
from neula.engines import Engine
from neula.papers.qr.householder import (
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
SHAPES = [(1, 1), (300, 1), (33, 33), (257, 33), (300, 129)]


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


# ---------------------------------------------------------------- both algorithms


def check(name: str, a: torch.Tensor, engine: Engine, width: int, more: float = 0.0) -> HouseholderQR:
    """Backward error and orthogonality are those of the theory, whatever A is."""
    (m, n), before = a.shape, a.clone()
    factors = ALGORITHMS[name](a, engine, width)
    q, r = factors.q(engine), factors.r
    assert torch.equal(a, before)
    assert (q.shape, r.shape, q.dtype, r.dtype) == ((m, n), (n, n), engine.storage, engine.storage)
    assert torch.equal(r, r.triu()), "exact zeros below the diagonal"
    limit = bound(engine, name, m, n, width) + more
    assert residual(a, q, r) <= limit
    assert deviation(q) <= limit
    return factors


@EACH
@pytest.mark.parametrize(("m", "n", "width"), with_widths(SHAPES, [1, 32, 1000]))
@pytest.mark.parametrize("format", ["fp16", "fp64"])
def test_every_shape_and_width(name: str, m: int, n: int, width: int, format: str) -> None:
    engine = emulated(format)
    for reflector in check(name, normal(m, n).to(engine.storage), engine, width).reflectors:
        assert torch.equal(reflector.y, reflector.y.tril())
        assert (reflector.y.diagonal() == 1).all()
        assert torch.equal(reflector.t, reflector.t.triu())


def repeated() -> torch.Tensor:
    """The second half of the columns is the first."""
    return torch.cat([normal(300, 64)] * 2, 1)


def with_zeros() -> torch.Tensor:
    a = normal(300, 129)
    a[:, [0, 1, 40, 127, 128]] = 0
    return a


HARD: dict[str, Callable[[], torch.Tensor]] = {
    "geometric": lambda: spectrum("geometric", 512, 160, 1e6).float(),
    "cluster_large": lambda: spectrum("cluster_large", 512, 160, 1e6).float(),
    "repeated columns": repeated,
    "zero columns": with_zeros,
    "a view": lambda: normal(600, 240)[::2, ::3],
}


@EACH
@pytest.mark.parametrize("a", HARD.values(), ids=HARD)
def test_nothing_depends_on_the_condition(name: str, a: Callable[[], torch.Tensor]) -> None:
    given = a()
    factors = check(name, given, emulated("fp16"), 32)
    assert not factors.r[:, ~given.any(0)].any(), "zero columns stay zero"


@EACH
def test_gram_schmidt_loses_what_householder_keeps(name: str) -> None:
    """Beyond 1/u, 2048 for fp16, one pass of Gram-Schmidt leaves columns that are orthogonal in no digit."""
    hard = spectrum("geometric", 512, 256, 1e4).float()
    assert orthogonality(rgsqrf(hard, emulated("fp16"), cutoff=32)[0]) > 0.1
    check(name, hard, emulated("fp16"), 32)


@EACH
@pytest.mark.parametrize("format", ["fp16", "fp64"])
@pytest.mark.parametrize("m", [40, 300])
def test_a_triangular_matrix_is_its_own_r(name: str, format: str, m: int) -> None:
    """No reflector anywhere, tau = 0: nothing is changed, not even by rounding."""
    engine = emulated(format)
    for a in (normal(m, 40).to(engine.storage).triu(), torch.zeros(m, 40, dtype=engine.storage)):
        factors = ALGORITHMS[name](a, engine, 16)
        assert torch.equal(factors.r, a[:40])
        assert torch.equal(factors.q(engine), torch.eye(m, 40, dtype=engine.storage))
        assert not any(reflector.t.any() for reflector in factors.reflectors)


@EACH
def test_scaled_columns_of_any_size(name: str) -> None:
    """Powers of two for the columns, undone exactly in R; the error counts in each column. Without them R is
    not finite: never a silently wrong answer.
    """
    m, n, engine = 300, 129, emulated("fp16")
    a = normal(m, n, seed=4, dtype=torch.float64) * torch.logspace(-30, 30, n, dtype=torch.float64)
    scales = power_of_two_scales(engine.column_max(a))
    factors = ALGORITHMS[name](engine.fill(engine.empty(m, n), a, scales), engine, 32)
    r = factors.r.double() / scales
    assert (column_residuals(a, factors.q(engine), r) <= bound(engine, name, m, n, 32)).all()
    assert not torch.isfinite(ALGORITHMS[name](normal(300, 64) * 1e5, engine, 32).r).all()


def test_panels() -> None:
    """One reflector or one a panel; with two panels the same R, and with a single one that of the library."""
    a, engine = normal(300, 100), emulated("fp16")
    assert len(rhouqr(a, engine, cutoff=32).reflectors) == 1
    shapes = [h.y.shape for h in blocked_householder(a, engine, block=32).reflectors]
    assert shapes == [(300, 32), (268, 32), (236, 32), (204, 4)]
    two = [algorithm(a[:, :64], engine, 32).r for algorithm in ALGORITHMS.values()]
    assert torch.equal(*two)
    for algorithm in ALGORITHMS.values():
        assert torch.equal(algorithm(a, engine, 128).r, torch.geqrf(a)[0][:100].triu())
    assert torch.equal(rhouqr(a, engine).r, rhouqr(a, engine, cutoff=engine.tuning.single.cutoff).r)


def test_what_is_refused() -> None:
    a, engine = normal(30, 4), emulated("fp32")
    with pytest.raises(ValueError, match=r"cutoff must be at least 1, got 0"):
        rhouqr(a, engine, cutoff=0)
    with pytest.raises(ValueError, match=r"block must be at least 1, got -128"):
        blocked_householder(a, engine, block=-128)
    for algorithm in (rhouqr, blocked_householder):
        message = f"{algorithm.__name__} needs at least as many rows as columns, got 4 x 30"
        with pytest.raises(ValueError, match=message):
            algorithm(a.T, engine)
