"""Panels against their definitions: A = Q R, Q orthonormal, R triangular with nonnegative diagonal."""

import itertools
import math

import pytest
import qr_measures
import torch
from qr_measures import U32, U64, column_major, orthogonality, orthogonality_bound, panel_bound, residual

from half_engine import HalfEngine
from neula.algorithms.orthogonal.caqr import caqr
from neula.algorithms.orthogonal.cholesky_qr import (
    cholesky_qr2,
    cholesky_qr32_in_place,
    cholesky_qr_low,
    shifted_cholesky_r,
)
from neula.algorithms.orthogonal.panels import PANELS, panel_named
from neula.engines import ENGINES, Engine
from neula.io.matrices import SPECTRA

EACH_PANEL = pytest.mark.parametrize("panel", PANELS)
EACH_ENGINE = pytest.mark.parametrize("engine", ["emulated", "cpu"])
SHAPES = [(1, 1), (300, 1), (33, 33), (257, 32), (300, 129), (2049, 100)]


def make(name: str, format: str = "fp32") -> Engine:
    return ENGINES[name]("cpu", format)


def normal(m: int, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return column_major(qr_measures.normal(m, n)).to(dtype)


def spectrum(kind: str, m: int, n: int, cond: float) -> torch.Tensor:
    return column_major(qr_measures.spectrum(kind, m, n, cond)).float()


def test_names() -> None:
    assert list(PANELS) == ["caqr", "cholesky", "cholesky2", "cholesky32", "householder"]
    assert panel_named("cholesky2") is cholesky_qr2
    with pytest.raises(ValueError, match=r"unknown panel 'mgs'.*'caqr', .*'householder'"):
        panel_named("mgs")


@pytest.mark.parametrize(("m", "n"), [(130, 128), (300, 200)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("rounded", [False, True])
def test_the_last_block_twice(m: int, n: int, dtype: torch.dtype, rounded: bool) -> None:
    """Columns in fewer dimensions than a second pass is for: orthogonal to what Q is rounded to."""
    engine, a = HalfEngine("cpu", "fp16"), (normal(m, n) / 4).to(dtype)
    low = engine.empty(m, n, dtype=torch.float16) if rounded and dtype == torch.float32 else None
    found = []
    for twice in (False, True):
        q, r = a.T.clone().T, engine.empty(n, n).zero_()
        cholesky_qr32_in_place(q, r, engine, low, twice=twice)
        assert torch.equal(r, r.triu())
        assert residual(a, q, r) <= 4 * 2.0**-11
        assert low is None or torch.equal(low, q.half())
        last = slice((n - 1) // 128 * 128, n)
        found.append(orthogonality(q[:, last]))
    assert found[1] <= max(found[0], 2.0**-11)
    assert found[1] <= (8 * 2.0**-11 if dtype == torch.float16 else 1e-5)


@EACH_PANEL
@EACH_ENGINE
@pytest.mark.parametrize("format", ["fp32", "fp64"])
def test_every_shape(panel: str, engine: str, format: str) -> None:
    """Normal random matrices; the square ones are ill-conditioned, with cond up to n^2."""
    for m, n in SHAPES:
        chosen = make(engine, format)
        u = U64 if format == "fp64" else U32
        a = normal(m, n, dtype=chosen.storage)
        before = a.clone()
        q, r = PANELS[panel](a, chosen)

        assert torch.equal(a, before)
        assert (q.shape, r.shape, q.dtype, r.dtype) == ((m, n), (n, n), a.dtype, a.dtype)
        assert torch.equal(r, r.triu()), "exact zeros below the diagonal"
        assert (r.diagonal() >= 0).all()
        assert residual(a, q, r) <= panel_bound(u, n)
        cond = float(torch.linalg.cond(a.double()))
        # The panels with guaranteed orthogonality; one Gram-Schmidt pass loses it in proportion to cond, and
        # Cholesky QR with cond^2 times the precision of the Gram matrix, which is double here.
        squared = cond + cond**2 * U64 / u
        loss = {
            "householder": 1.0,
            "cholesky2": 1.0,
            "caqr": cond,
            "cholesky": squared,
            "cholesky32": squared,  # on a CPU
        }
        assert orthogonality(q) <= orthogonality_bound(u, m, n) * loss[panel]


def lost_orthogonality(panel: str, kind: str, cond: float) -> float:
    """Growth with the condition number: none where a second pass repairs it, by a shift if necessary; that of
    Gram-Schmidt, with its square if all singular values but one are small (section 3.6); and of ``R^-1`` in
    float32 and a Gram matrix in double, ``cond + cond^2 u64 / u32``.
    """
    if panel in ("cholesky2", "householder"):
        return 1.0
    if panel == "caqr":
        return cond**2 if kind == "cluster_large" else cond
    return cond + cond**2 * U64 / U32


@EACH_PANEL
@EACH_ENGINE
def test_errors_at_any_condition(panel: str, engine: str) -> None:
    for kind, cond in itertools.product(SPECTRA, (1.0, 1e2, 1e4, 1e7)):
        a = spectrum(kind, 257, 65, cond)
        q, r = PANELS[panel](a, make(engine))
        assert residual(a, q, r) <= panel_bound(U32, 65)
        assert orthogonality(q) <= orthogonality_bound(U32, 257, 65) * lost_orthogonality(panel, kind, cond)


# ---------------------------------------------------------------- tiles and trees


@pytest.mark.parametrize(("rows", "columns"), [(2, 1), (70, 13), (1000, 500)])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (65, 32), (129, 33), (257, 7)])
def test_tiles_of_any_size(rows: int, columns: int, m: int, n: int) -> None:
    """A tree of ``log(m / rows)`` levels: each multiplies once more."""
    a = normal(m, n)
    q, r = caqr(a, make("emulated"), tile_rows=rows, tile_columns=columns)
    levels = 1 + math.log2(1 + m / rows) / math.log2(rows / columns)
    cond = float(torch.linalg.cond(a.double()))
    assert torch.equal(r, r.triu())
    assert residual(a, q, r) <= panel_bound(U32, n) * levels
    assert orthogonality(q) <= orthogonality_bound(U32, m, n) * levels * cond


@pytest.mark.parametrize(("rows", "columns"), [(32, 32), (63, 32), (1, 1)])
def test_tiles_that_do_not_shrink_are_refused(rows: int, columns: int) -> None:
    with pytest.raises(ValueError, match=rf"tiles of {rows} x {columns}.*tile_rows >= {2 * columns}"):
        caqr(normal(300, 40), make("emulated"), tile_rows=rows, tile_columns=columns)


# ---------------------------------------------------------------- columns beyond repair


@EACH_PANEL
@EACH_ENGINE
@pytest.mark.parametrize("spoil", ["zero column", "zeros", "twice"])
def test_dependent_columns_are_factorized_or_show(panel: str, engine: str, spoil: str) -> None:
    """Never a silently wrong answer: a small residual, or NaN."""
    a = normal(300, 40)
    if spoil == "twice":
        a[:, 39] = a[:, 3]
    a[:, {"zero column": slice(17, 18), "zeros": slice(None), "twice": slice(0)}[spoil]] = 0
    q, r = PANELS[panel](a, make(engine))
    small = not (q @ r).any() if spoil == "zeros" else residual(a, q, r) <= panel_bound(U32, 40)
    assert bool(r.isnan().any()) or small


@pytest.mark.parametrize("where", [0, 39])
def test_caqr_of_a_zero_column_is_a_zero_column(where: int) -> None:
    a = normal(300, 40)
    a[:, where] = 0
    q, r = caqr(a, make("emulated"))
    assert not q[:, where].any()
    assert r[where, where] == 0
    rest = torch.arange(40) != where
    cond = float(torch.linalg.cond(a[:, rest].double()))
    assert orthogonality(q[:, rest]) <= orthogonality_bound(U32, 300, 40) * cond


def test_columns_of_zeros_beside_a_matrix_change_nothing() -> None:
    engine = make("emulated", "fp16")
    a = engine.operand(normal(200, 13))
    q, r = cholesky_qr_low(a, engine)
    wide_q, wide_r = cholesky_qr_low(torch.nn.functional.pad(a, (0, 3)), engine, 13)
    assert wide_q.shape == q.shape
    # Sums in another order, in float32, before Q is multiplied in half precision.
    assert (wide_r - r).norm() <= 200 * U32 * r.norm()
    assert (wide_q - q).norm() <= 13 * 2.0**-11 * q.norm()


@pytest.mark.parametrize("m", [300, 100_000])
def test_a_shifted_gram_matrix_always_has_a_factor(m: int) -> None:
    """The shift exceeds the error of a singular Gram matrix, and stays below a thousandth of it."""
    w = torch.ones(m, 4)
    gram = (w.T.double() @ w.double()).float().double()
    r = shifted_cholesky_r(w, gram)
    assert torch.isfinite(r).all()
    shift = r.T @ r - gram
    size = float(gram.trace())
    assert torch.linalg.matrix_norm(shift - shift.diagonal().diag()) <= 10 * U64 * size
    assert (shift.diagonal() > 0).all()
    assert (shift.diagonal() <= 1.001e-3 * size).all()


def test_a_shift_does_not_hide_nan() -> None:
    w = torch.full((5, 2), math.nan)
    assert shifted_cholesky_r(w, (w.T @ w).double()).isnan().all()
