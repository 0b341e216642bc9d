"""neula bench: small problems of every kind, measured, written, read, shown and drawn."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from neula.cli import bench
from neula.papers.errors import optimality
from neula.papers.measuring import interleaved_seconds, rested_seconds

CPU = torch.device("cpu")


def test_optimality_is_what_it_says() -> None:
    a = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    b = torch.tensor([[2.0], [1.0], [3.0]], dtype=torch.float64)
    assert optimality(a, b, torch.ones(2, 1, dtype=torch.float64)) == 0
    # r = (2, 1, 3), A^T r = (4, 1), ||A|| = 2.
    expected = math.sqrt(17) / (2 * math.sqrt(14))
    assert optimality(a, b, torch.zeros(2, 1, dtype=torch.float64)) == pytest.approx(expected, rel=1e-3)


def test_folders_without_results_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no bench-\*\.json; measure with: neula bench --out"):
        bench.read(tmp_path)
    (tmp_path / "bench-x.json").write_text('{"about": {"problem": "foo"}, "rows": []}')
    with pytest.raises(ValueError, match=r"bench-x.json does not hold what neula bench writes"):
        bench.read(tmp_path)


@pytest.fixture
def short_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size of each problem, single and in a batch."""
    monkeypatch.setattr(bench, "TALL", ((12, 3),))
    monkeypatch.setattr(bench, "LARGE", ())
    monkeypatch.setattr(bench, "SQUARE", (1500,))
    monkeypatch.setattr(bench, "ORDERS", (4, 3000))
    monkeypatch.setattr(bench, "LOW_RANK", ((40, 20, 3),))
    monkeypatch.setattr(bench, "BATCHES", ((5, 8, 4),))


def test_a_sweep_stands_beside_the_fastest_peer(short_sweep: None, tmp_path: Path) -> None:
    seen: list[str] = []
    data = bench.run(CPU, lambda row: seen.append(bench.line(row)), quick=True)
    # What takes more operations than a minute allows is left out.
    assert [(row["problem"], row["shape"]) for row in data.rows.where(dtype="float64")] == [
        *((problem, shape) for problem in ("qr", "lstsq") for shape in ("12x3", "5x8x4")),
        *(("solve", shape) for shape in ("4x4", "5x4x4")),
        ("svd_lowrank", "40x20x3"),
    ]
    assert len(data.rows) == 2 * 7 == len(seen)
    for row in data.rows:
        assert row["ratio"] == pytest.approx(row["peer_ms"] / row["ms"])
        assert row["within"] == (row["ms"] <= bench.SLOWER * row["peer_ms"] + bench.LATER)
        assert row["peer"].startswith(("torch", "scipy"))
        assert row["certified"] in (True, None)
        if row["problem"] != "svd_lowrank":
            unit = 2.0**-53 if row["dtype"] == "float64" else 2.0**-24
            assert 0 <= row["error"] <= 12 * unit
            assert 0 <= row["peer_error"] <= 12 * unit
    bench.write(data, tmp_path)
    some = bench.run(CPU, names=["qr", "solve"], quick=True)
    assert {row["problem"] for row in some.rows} == {"qr", "solve"}
    assert bench.write(some, tmp_path).name.startswith("bench-sweep-qr-solve-")
    assert bench.read(tmp_path) == [data, some]
    console = Console(width=150, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(bench.table(data))
    assert "5x8x4" in console.export_text()
    pytest.importorskip("matplotlib")
    bench.draw([data, some]).savefig(tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").stat().st_size > 1000


def test_a_sweep_of_a_condition_number(short_sweep: None, tmp_path: Path) -> None:
    """Of what float64 alone can hold, in a file of its own; low rank has singular values of its own."""
    data = bench.run(CPU, quick=True, condition=1e9)
    assert {row["dtype"] for row in data.rows} == {"float64"}
    assert {row["problem"] for row in data.rows} == {"qr", "lstsq", "solve"}
    assert all(row["certified"] for row in data.rows)
    with pytest.raises(ValueError, match="no problem of this kind is one of svd: leave out the names"):
        bench.run(CPU, names=["svd"], quick=True, condition=1e9)
    assert bench.write(data, tmp_path).name.startswith("bench-sweep-1e09-")
    assert bench.read(tmp_path) == [data]
    a = bench._matrix((3, 20, 6), torch.float64, CPU, 1e9)
    assert torch.allclose(torch.linalg.cond(a).log10(), torch.tensor(9.0).double(), atol=1e-3)


def test_a_sweep_of_special_problems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each is the problem that its peers solve: errors are those of its matrix."""
    monkeypatch.setattr(bench, "FEW_ROWS", ((4, 9),))
    monkeypatch.setattr(bench, "SOME", ((12, 5),))
    monkeypatch.setattr(bench, "ORDERS", (6,))
    data = bench.run(CPU, quick=True, special=True)
    assert [(row["problem"], row["shape"]) for row in data.rows] == [
        ("lstsq, fewer rows", "4x9"),
        *((f"lstsq, {kind}", "12x5") for kind in ("dependent", "damped", "weighted")),
        ("solve, definite", "6x6"),
    ]
    for row in data.rows:
        assert row["certified"]
        assert row["error"] <= 12 * 2.0**-53
        assert row["peer_error"] <= 1e-13
    assert bench.write(data, tmp_path).name.startswith("bench-sweep-special-")
    assert bench.read(tmp_path) == [data]
    assert "special problems" in str(bench.table(data).title)


def test_a_peer_that_is_not_as_accurate_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    a = torch.randn(20, 4, dtype=torch.float64)

    def calls() -> tuple:
        rough = torch.linalg.qr(a.half().double())
        ours, peers, error = bench._qr(lambda shape: a, (20, 4))
        return ours, {"rough": lambda: rough, **peers}, error

    assert bench._measure(bench.Task("qr", (20, 4), torch.float64, 1.0, calls), 0.0)["peer"] != "rough"


def test_calls_are_timed_in_turns_or_each_by_itself() -> None:
    order: list[str] = []
    calls = [lambda: order.append("a"), lambda: order.append("b")]
    assert len(interleaved_seconds(calls, 0.0, (3, 5))) == 2
    interleaved_seconds([lambda: order.append("c")], 60.0, (1, 2))
    assert len(rested_seconds(calls, 0.0, rounds=2)) == 2
    by_itself = ["a", "a", "b", "b"] * 2  # the first of each to warm up
    assert order == [*["a", "b"] * 3, "c", "c", *by_itself]
