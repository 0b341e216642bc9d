"""Traces: the steps that an algorithm takes, without another number in its result."""

from __future__ import annotations

import pytest
import torch

from neula.algorithms.elimination.lu import lu_factorize
from neula.algorithms.krylov.cgls import LeastSquaresOperator, Stop, cgls, lsqr
from neula.algorithms.orthogonal.caqr import caqr
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.algorithms.trace import Trace, TraceEvent
from neula.engines import CpuEngine, EmulatedEngine
from neula.io.matrices import hpl_ai_matrix, random_matrix


@pytest.mark.parametrize("panel", ["caqr", "cholesky", "householder"])
def test_qr_is_the_sum_of_its_steps(panel: str) -> None:
    a, engine, trace = random_matrix("normal", 48, 12, dtype=torch.float32), EmulatedEngine(), Trace()
    q, r = rgsqrf(a, engine, panel=panel, cutoff=3, trace=trace)
    for traced, plain in zip((q, r), rgsqrf(a, engine, panel=panel, cutoff=3), strict=True):
        assert torch.equal(traced, plain)
    whole = [event for event in trace.only("panel") if event.columns]
    assert [event.columns for event in whole] == [(0, 3), (3, 6), (6, 9), (9, 12)]
    assert {(event.shape, event.format) for event in whole} == {((48, 3), "fp32")}
    updates = [(event.columns, event.right) for event in trace.only("update")]
    assert updates == [((0, 3), (3, 6)), ((0, 6), (6, 12)), ((6, 9), (9, 12))]
    built = torch.zeros_like(r)
    for event in trace.only("block of R"):
        assert event.columns is not None
        assert event.right is not None
        built[slice(*event.columns), slice(*event.right)] = event.value
    assert torch.equal(built, r)
    flops = sum(2 * e.shape[0] * e.shape[1] * e.shape[2] for e in trace.only("product") if e.format == "fp16")
    assert flops == 2 * 48 * 12 * 12 - 2 * 48 * 12 * 3  # all that are not in panels


def test_the_tree_of_a_panel() -> None:
    """64 rows in tiles of 8, whose stacked R are halved at each level."""
    trace, a = Trace(), random_matrix("normal", 64, 4, dtype=torch.float32)
    q, r = caqr(a, CpuEngine("cpu", "fp32"), tile_rows=8, tile_columns=4, trace=trace)
    assert [event.shape for event in trace.only("panel")] == [(8, 8, 4), (4, 8, 4), (2, 8, 4)]
    assert [event.shape for event in trace.only("product")] == [(2, 8, 4, 4), (4, 8, 4, 4), (8, 8, 4, 4)]
    assert torch.allclose(q @ r, a, atol=1e-5)


@pytest.mark.parametrize("variant", ["3.1", "4.1", "5.1", "5.2/5.1"])
def test_lu_tells_of_panels_and_products(variant: str) -> None:
    a, engine, trace, told = hpl_ai_matrix(12, dtype=torch.float32), EmulatedEngine(), Trace(), []
    inner = 2 if variant.startswith("5.2") else None
    options = {"variant": variant, "panel": 4, "inner_panel": inner}
    packed = lu_factorize(a, engine, trace=trace, on_columns=told.append, **options)
    assert torch.equal(packed.lu, lu_factorize(a, engine, **options).lu)
    assert [event.columns for event in trace.only("panel")] == [(0, 4), (4, 8), (8, 12)]
    assert told == [4, 8, 12]
    assert "fp16" in {event.format for event in trace.only("product")}


@pytest.mark.parametrize("solver", [cgls, lsqr])
def test_residuals_of_iterations(solver) -> None:
    a = random_matrix("geometric", 60, 12, cond=1e3, seed=1)
    b, identity, trace = torch.ones(60, 1, dtype=torch.float64), torch.eye(12, dtype=torch.float64), Trace()
    options = {"stop": Stop(torch.zeros(1, dtype=torch.float64)), "max_iterations": 5}
    found = solver(LeastSquaresOperator(a), identity, b, trace=trace, **options)
    assert len(trace) == found.iterations == 5
    # Without a preconditioner it is the gradient.
    assert trace[-1].value == pytest.approx(float((a.T @ (b - a @ found.x)).norm()), rel=1e-6)


def test_rows_and_picture() -> None:
    trace = Trace(
        [
            TraceEvent("panel", (0, 2), shape=(8, 2), format="fp32"),
            TraceEvent("update", (0, 2), (2, 4), (8, 2)),
            TraceEvent("block of R", (0, 2), (2, 4), value=torch.zeros(2, 2)),
            TraceEvent("iteration", value=0.00012345),
        ]
    )
    assert [list(row.values()) for row in trace.rows()] == [
        ["panel", "0 to 2", "8 x 2", "fp32", ""],
        ["update", "0 to 2 out of 2 to 4", "8 x 2", "", ""],
        ["block of R", "0 to 2, 2 to 4", "", "", ""],
        ["iteration", "", "", "", "0.0001234"],
    ]
    half = " " * 24
    assert trace.picture().splitlines() == [
        f"panel   |{'#' * 24}{half}| 0 to 2",
        f"update  |{'=' * 24}{'-' * 24}| 0 to 2 out of 2 to 4",
    ]
    assert Trace().picture() == ""
