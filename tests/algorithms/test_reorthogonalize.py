"""Second passes: the paper's Figure 4 after re-orthogonalization, and QR in double precision."""

import math
from dataclasses import replace

import pytest
import torch
from qr_measures import (
    U32,
    U64,
    column_major,
    orthogonality,
    orthogonality_bound,
    panel_bound,
    recursion_bound,
    residual,
    spectrum,
)
from tests.matrices import normal

from neula.algorithms.orthogonal import reorthogonalize as reorthogonalization
from neula.algorithms.orthogonal.panels import PANELS
from neula.algorithms.orthogonal.reorthogonalize import (
    NEARLY_ORTHONORMAL,
    correct,
    correct_last,
    refine_qr,
    reorthogonalize,
)
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.engines import EmulatedEngine, select_engine
from neula.io.matrices import SPECTRA, random_matrix

LOW = ("fp16", "bf16", "tf32")


@pytest.mark.parametrize(
    ("format", "kind", "cond", "panel"),
    [
        *(
            (f, *case, None)
            for f in LOW
            for case in (("arithmetic", 1.0), *((kind, 1e6) for kind in SPECTRA))
        ),
        *(("fp16", "geometric", 1e3, panel) for panel in PANELS),
    ],
)
def test_figure_4_twice_is_enough(format: str, kind: str, cond: float, panel: str | None) -> None:
    """Both errors at the level of the format, whatever the condition (issue: "on all spectra")."""
    engine = EmulatedEngine("cpu", format)
    a = spectrum(kind, 320, 257, cond).float()
    q, r = reorthogonalize(*rgsqrf(a, engine, panel=panel), engine, panel=panel)
    bound = recursion_bound(engine.format.u, 257) + (panel_bound(U32, 257) if panel else 0.0)
    assert residual(a, q, r) <= bound
    assert orthogonality(q) <= bound


# ---------------------------------------------------------------- a correction instead of a second pass


def loss(q: torch.Tensor) -> float:
    """``||I - Q^T Q||_F``, which the bounds of a correction are in."""
    identity = torch.eye(q.shape[1], dtype=torch.float64, device=q.device)
    return float(torch.linalg.matrix_norm(q.double().T @ q.double() - identity))


@pytest.mark.parametrize("engine", ["emulated", "cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("m", "n", "columns", "size"),
    [
        *((m, n, None, size) for m, n in ((1, 1), (70, 5), (300, 257)) for size in (1e-6, 1e-2, 0.1)),
        *((400, 300, columns, size) for columns, size in ((0, 1e-2), (1, 1e-4), (130, 1e-2), (300, 1e-4))),
    ],
)
def test_a_correction_squares_nothing_but_the_small(
    engine: str, m: int, n: int, columns: int | None, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q (I + N) with ``||N||_F`` of this size becomes orthonormal up to third powers and rounding errors. If
    only the last columns of N are not zero, others stay what they are.
    """
    monkeypatch.setattr(reorthogonalization, "FEWEST_ROWS", 64)  # several blocks of rows
    chosen = select_engine(engine, torch.device("cuda" if engine == "cuda" else "cpu")).using("fp32")
    monkeypatch.setattr(type(chosen), "tuning", replace(chosen.tuning, correction_block=16))
    basis, noise = torch.linalg.qr(normal(m, n, seed=m + n)).Q, normal(n, n, seed=m)
    first = 0 if columns is None else n - columns
    noise[:, :first] = 0
    noise *= size / max(float(torch.linalg.matrix_norm(noise)), size)
    q = column_major((basis + basis @ noise).float()).to(chosen.device)
    r = column_major(normal(n, n, seed=n).triu().float()).to(chosen.device)
    a, before, kept = q.double() @ r.double(), loss(q), q[:, :first].clone()
    new_q, new_r = correct(q, r, chosen) if columns is None else correct_last(q, r, chosen, columns)
    assert (new_q.data_ptr(), new_r.data_ptr()) == (q.data_ptr(), r.data_ptr())
    assert torch.equal(new_q[:, :first], kept)
    assert torch.equal(new_r, new_r.triu()), "exact zeros below the diagonal"
    # Terms that are left out: U of E up to |E|^3, and U^3 of the inverse, with |U|_F <= |E|_F / sqrt(2). A
    # product errs by the roundoffs of its two operands, times the size of the correction.
    low = 4 * chosen.using(chosen.formats[0]).format.u * before
    allowed = 3 * before**3 + low + orthogonality_bound(U32, m, n)
    assert loss(new_q) <= allowed
    assert residual(a.cpu(), new_q.cpu(), new_r.cpu()) <= allowed


@pytest.mark.parametrize("kind", ["far", "nan"])
def test_a_correction_that_is_not_small_changes_nothing(kind: str) -> None:
    engine = EmulatedEngine("cpu", "fp32")
    q = column_major(random_matrix("geometric", 100, 20, cond=3.0, seed=1).float())
    r = torch.ones(20, 20).triu()
    assert loss(q) > 2 * NEARLY_ORTHONORMAL
    if kind == "nan":
        q[3, 5] = math.nan
        assert correct(q, r, engine)[0].isnan().any()
        return
    before = q.clone()
    new_q, new_r = correct(q, r, engine)
    assert torch.equal(new_q, before)
    assert torch.equal(new_r, torch.ones(20, 20).triu())


@pytest.mark.parametrize("columns", [1, 130, 300])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_second_pass_of_the_last_columns(columns: int, overwrite: bool) -> None:
    """Where these have lost a direction for good, and all others are orthonormal and stay what they are."""
    engine = EmulatedEngine("cpu", "fp16")
    m, n, generator = 400, 300, torch.Generator().manual_seed(columns)
    basis = torch.linalg.qr(torch.randn(m, n, generator=generator, dtype=torch.float64)).Q
    basis[:, -1] = basis[:, :5].sum(1) / 5**0.5 + 1e-3 * basis[:, -1]
    q, r = column_major(basis.float()), column_major(torch.randn(n, n, generator=generator).triu())
    r[-1, -1] = 1e3  # most of A is in that direction
    a, before = q.double() @ r.double(), q.clone()
    new_q, new_r = reorthogonalize(q, r, engine, columns=columns, overwrite_q=overwrite)
    assert torch.equal(new_q[:, : n - columns], before[:, : n - columns])
    assert overwrite or torch.equal(q, before)
    assert torch.equal(new_r, new_r.triu())
    bound = recursion_bound(engine.format.u, n)
    assert loss(new_q) <= bound
    assert residual(a, new_q, new_r) <= bound


# ---------------------------------------------------------------- double precision from a low-precision R


@pytest.mark.parametrize("format", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("kind", "cond"),
    [
        *((kind, 1e4) for kind in SPECTRA),
        *((kind, 1e12) for kind in SPECTRA[:3]),
    ],
)
def test_qr_in_double_precision(format: str, kind: str, cond: float) -> None:
    """As good as Householder QR in double, from an R that is as bad as bf16 at any condition."""
    a = spectrum(kind, 513, 129, cond)
    before = a.clone()
    _, low = rgsqrf(a, EmulatedEngine("cpu", format), cutoff=32)
    given = low.clone()
    q, r = refine_qr(a, low)
    assert torch.equal(a, before)
    assert torch.equal(low, given)
    assert q.dtype == r.dtype == torch.float64
    assert torch.equal(r, r.triu())
    assert (r.diagonal() > 0).all()
    assert residual(a, q, r) <= panel_bound(U64, 129)
    # Cholesky QR of a matrix with cond^2 <= 3.
    assert orthogonality(q) <= 3 * orthogonality_bound(U64, 513, 129)


def test_rank_deficiency_shows() -> None:
    """NaN, or factors that a certificate can refuse: never a Q that only looks orthonormal."""
    half = random_matrix("normal", 300, 20, seed=3)
    a = torch.cat([half, half], 1)
    q, r = refine_qr(a, rgsqrf(a, EmulatedEngine("cpu", "fp16"))[1])
    good = orthogonality(q) <= 1e-10 and residual(a, q, r) <= 1e-10
    smallest = float((r.diagonal().abs() / torch.linalg.matrix_norm(r)).min())
    assert not good or smallest < 1e-10, "a factorization that is good shows the rank in R"


@pytest.mark.parametrize("r", [torch.zeros(20, 20), torch.full((20, 20), math.nan)])
def test_a_useless_r_gives_no_numbers(r: torch.Tensor) -> None:
    q, refined = refine_qr(random_matrix("normal", 300, 20), r)
    assert not torch.isfinite(q).all()
    assert not torch.isfinite(refined).all()
