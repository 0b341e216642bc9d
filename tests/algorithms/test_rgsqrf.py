"""Algorithm 1 on the CPU engines: the error bounds of the paper's section 3.6 and its Figures 3 and 4."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from qr_measures import (
    U32,
    emulated,
    normal,
    orthogonality,
    orthogonality_bound,
    panel_bound,
    recursion_bound,
    residual,
    spectrum,
    with_widths,
)

from half_engine import HalfEngine
from neula.algorithms.orthogonal.rgsqrf import rgsqrf, split_columns
from neula.algorithms.scaling import power_of_two_scales
from neula.engines import EmulatedEngine, Engine

LOW = pytest.mark.parametrize("format", ["fp16", "bf16", "tf32"])
SHAPES = [(1, 1), (300, 1), (33, 33), (257, 257), (513, 129)]


def bound(engine: Engine, n: int) -> float:
    """Of the backward error: the low format's recursion and float32's panels, or all in one format."""
    if engine.format.u <= U32:
        return panel_bound(engine.format.u, n)
    return recursion_bound(engine.format.u, n) + panel_bound(U32, n)


# ---------------------------------------------------------------- any shape, any parameters


@pytest.mark.parametrize(("m", "n", "cutoff"), with_widths(SHAPES, [1, 32, 128]))
@pytest.mark.parametrize("format", ["fp16", "fp64"])
def test_every_shape_and_cutoff(m: int, n: int, cutoff: int, format: str) -> None:
    engine = emulated(format)
    a = normal(m, n).to(engine.storage)
    q, r = rgsqrf(a, engine, cutoff=cutoff)
    assert (q.shape, r.shape, q.dtype, r.dtype) == ((m, n), (n, n), engine.storage, engine.storage)
    assert q.stride() == (1, m), "column-major"
    assert torch.equal(r, r.triu()), "exact zeros below the diagonal"
    assert (r.diagonal() >= 0).all()
    assert residual(a, q, r) <= bound(engine, n)


@pytest.mark.parametrize("n", [64, 129])
def test_operands_a_few_columns_at_a_time(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the columns as operands, and some more: each element comes from the same sums."""
    a, engine = normal(300, n), emulated("fp16")
    q, r = rgsqrf(a, engine, cutoff=16)
    kept: list[int] = []
    buffer = EmulatedEngine.operand_buffer
    monkeypatch.setattr(
        EmulatedEngine, "operand_buffer", lambda self, x: (kept.append(x.shape[1]), buffer(self, x))[1]
    )
    monkeypatch.setattr(EmulatedEngine, "tuning", replace(engine.tuning, operand_columns=16))
    narrow_q, narrow_r = rgsqrf(a, engine, cutoff=16)
    assert max(kept) == split_columns(n, 16) + 16
    # Sums of products of fp16 numbers in float32, in another order.
    assert torch.allclose(narrow_q, q, atol=4 * 2.0**-11 * 300**-0.5)
    assert (narrow_q @ narrow_r - q @ r).norm() <= 4 * 2.0**-11 * a.norm()


def in_half(a: torch.Tensor, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Q and R of a matrix that stays in fp16."""
    engine = HalfEngine("cpu", "fp16")
    work = engine.padded(*a.shape, dtype=torch.float16)
    work.copy_(a)
    q, r = rgsqrf(work, engine, overwrite_a=True, **options)  # type: ignore[arg-type]
    assert q.data_ptr() == work.data_ptr()
    assert r.dtype == torch.float32
    return q, r


@pytest.mark.parametrize(
    ("m", "n", "cond"),
    [*((m, n, None) for m, n in ((1, 1), (300, 129), (256, 256))), *((900, 400, c) for c in (1e1, 1e3, 1e5))],
)
def test_a_matrix_that_stays_in_half_precision(m: int, n: int, cond: float | None) -> None:
    """One rounding more, that of A, at any condition; no more orthogonality is lost than in float32."""
    a = normal(m, n) / 4 if cond is None else spectrum("geometric", m, n, cond).float()
    a = a if cond is None else a * power_of_two_scales(a.abs().amax(0))
    q, r = in_half(a)
    assert torch.equal(r, r.triu())
    assert residual(a, q, r) <= recursion_bound(2.0**-11, n) + 2.0**-11
    wide = rgsqrf(a, HalfEngine("cpu", "fp16"), cutoff=None if cond is None else 128)[0]
    assert orthogonality(q) <= (2 if cond is None else 4) * orthogonality(wide) + 8 * 2.0**-11


@pytest.mark.parametrize(("n", "cutoff"), [(1, 1), (33, 32), (64, 32), (129, 1000), (300, 128)])
def test_progress_counts_up_to_n(n: int, cutoff: int) -> None:
    seen: list[int] = []
    rgsqrf(normal(300, n), emulated("fp16"), cutoff=cutoff, on_columns=seen.append)
    widths = np.diff([0, *seen])
    assert seen[-1] == n
    assert len(seen) == -(-n // cutoff), "as few panels as there can be"
    assert ((widths > 0) & (widths <= cutoff)).all()


def test_half_of_the_columns_can_end_it() -> None:
    """The diagonal of R is known for them, and nothing else has been done."""
    a, engine = normal(300, 150), emulated("fp16")
    seen: list[torch.Tensor] = []
    _, r = rgsqrf(a, engine, cutoff=32, on_half=lambda diagonal: seen.append(diagonal.clone()))
    assert len(seen) == 1
    assert torch.equal(seen[0], r.diagonal()[: len(seen[0])])
    assert len(seen[0]) == 96, "of five panels three"

    def end(diagonal: torch.Tensor) -> None:
        raise ArithmeticError("enough")

    done: list[int] = []
    with pytest.raises(ArithmeticError, match="enough"):
        rgsqrf(a, engine, cutoff=32, on_half=end, on_columns=done.append)
    assert done == [32, 64, 96]


def test_more_columns_than_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="at least as many rows as columns, got 3 x 4"):
        rgsqrf(normal(3, 4), emulated("fp16"))


# ---------------------------------------------------------------- the paper's Figures 3 and 4


@LOW
@pytest.mark.parametrize(
    ("kind", "cond", "cutoff"),
    [
        *(("geometric", cond, cutoff) for cond, cutoff in ((1.0, 128), (2.0, 128), (100.0, 32), (1e6, 32))),
        *(("cluster_small", cond, cutoff) for cond, cutoff in ((2.0, 128), (100.0, 32))),
        *(("cluster_large", cond, 32) for cond in (1.0, 2.0, 10.0, 1e6)),
    ],
)
def test_figures_3_and_4(format: str, kind: str, cond: float, cutoff: int) -> None:
    """The backward error is independent of the condition number, and orthogonality is lost like ``u cond``,
    as the paper observes. The constant: a level leaves a component of at most ``3 u ||A||_F`` of Q1 in A2,
    which is as small as ``||A||_2 / cond``, and ``||A||_F`` is 16 ``||A||_2`` at most; rounding errors are
    spread over 256 directions, which takes that factor back. There are 1 to 4 levels. One large singular
    value is the worst case, because all columns nearly coincide: ``u cond^2`` (section 3.6).
    """
    engine = emulated(format)
    a = spectrum(kind, 320, 256, cond).float()
    q, r = rgsqrf(a, engine, cutoff=cutoff)
    assert residual(a, q, r) <= recursion_bound(engine.format.u, 256)
    growth, levels = cond**2 if kind == "cluster_large" else cond, math.log2(256 / cutoff)
    own = 3 * levels * engine.format.u + orthogonality_bound(U32, 320, cutoff)
    assert orthogonality(q) <= own * growth


@LOW
@pytest.mark.parametrize("panel", ["caqr", "cholesky", "cholesky2"])
def test_figure_7_ablation_low_format_in_the_panel(format: str, panel: str) -> None:
    """Tensor cores in the panel too: more levels round, by the same unit roundoff."""
    engine = emulated(format)
    a = spectrum("geometric", 512, 256, 1e6).float()
    q, r = rgsqrf(a, engine, panel=panel, panel_format=format)
    assert residual(a, q, r) <= recursion_bound(engine.format.u, 256)
    assert not torch.equal(q, rgsqrf(a, engine, panel=panel)[0]), "the option does something"


# ---------------------------------------------------------------- emulated accumulation


def test_fp16_accumulation_has_its_own_bound() -> None:
    """TC16: the sum of m products is rounded to fp16 m / 8 times, so the bound grows with m. Worst case:
    ``m / 8 u`` of the sum of magnitudes, at each of 2 levels.
    """
    a = spectrum("arithmetic", 512, 128, 10).float()
    engine = emulated("fp16", accumulate="fp16", block=8)
    q, r = rgsqrf(a, engine, cutoff=32)
    error = residual(a, q, r)
    assert error <= recursion_bound(engine.format.u, 128) + 2 * 2 * 512 / 8 * engine.format.u
    assert error > residual(a, *rgsqrf(a, emulated("fp16"), cutoff=32)), "rounded sums cost accuracy"


# ---------------------------------------------------------------- columns of any size


def test_what_half_precision_does_not_hold_shows() -> None:
    """Never a silently wrong answer: R is not finite."""
    a = normal(300, 64) * 1e5
    _, r = rgsqrf(a, emulated("fp16"), cutoff=32)
    assert not torch.isfinite(r).all()
    q, r = rgsqrf(a, emulated("bf16"), cutoff=32)
    assert residual(a, q, r) <= bound(emulated("bf16"), 64)
    for value in (1e6, math.nan):
        a = normal(300, 200)
        a[100, 150] = value
        assert not in_half(a)[1].isfinite().all()


@pytest.mark.parametrize("where", [[0, 31, 32, 128], list(range(129))])
def test_zero_columns_stay_zero(where: list[int]) -> None:
    """A column that is there twice leaves rounding errors, orthogonal to nothing, and a small residual."""
    a, engine = normal(300, 129), emulated("fp16")
    a[:, 100] = a[:, 5]
    a[:, where] = 0
    q, r = rgsqrf(a, engine, cutoff=32)
    assert not q[:, where].any()
    assert not r[:, where].any()
    assert not a.any() or residual(a, q, r) <= bound(engine, 129)
