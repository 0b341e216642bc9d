"""neula bench: small problems of every kind, measured, written, read and drawn."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from neula.cli import bench

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes of milliseconds."""
    for name, problem in bench.PROBLEMS.items():
        monkeypatch.setitem(bench.PROBLEMS, name, dataclasses.replace(problem, cpu=[(96, 32)]))


@pytest.mark.parametrize("name", list(bench.PROBLEMS))
def test_a_row_says_what_was_measured(name: str, small: None) -> None:
    seen = []
    data = bench.run(name, CPU, seen.append)
    assert data.about["problem"] == name
    assert data.about["tflops"] > 0
    assert seen
    assert [row["shape"] for row in data.rows] == [row["shape"] for row in seen]
    for row in data.rows:
        assert row["shape"].startswith("96x32")
        assert row["ms"] > 0
        assert row["ratio"] == pytest.approx(row["torch_ms"] / row["ms"])
        assert row["of_rate"] == pytest.approx(row["tflops"] / data.about["tflops"])
        assert row["certified"] in (True, None)
        assert row["method"]
    # Both solve the same problem: the errors of float32 (of float64 for lstsq) by the same measure, up to
    # what backward-stable algorithms differ by; those of a truncation are the truncation.
    row = data.rows[0]
    if name == "svd":
        assert row["error"] == pytest.approx(row["torch_error"], rel=1e-3)
    else:
        unit = 2.0**-53 if name == "lstsq" else 2.0**-24
        assert 0 < row["error"] <= 96 * unit
        assert 0 < row["torch_error"] <= 96 * unit


def test_what_is_written_can_be_read_shown_and_drawn(small: None, tmp_path: Path) -> None:
    results = [bench.run(name, CPU) for name in ("qr", "gemm")]
    paths = [bench.write(data, tmp_path) for data in results]
    assert all(path.exists() and path.with_suffix(".csv").exists() for path in paths)
    assert bench.read(tmp_path) == results
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(bench.table(results[0]))
    text = console.export_text()
    assert "torch.linalg.qr" in text
    assert "96x32" in text
    pytest.importorskip("matplotlib")
    bench.draw(results).savefig(tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").stat().st_size > 1000


def test_optimality_is_what_it_says() -> None:
    a = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    b = torch.tensor([[2.0], [1.0], [3.0]], dtype=torch.float64)
    assert bench.optimality(a, b, torch.ones(2, 1, dtype=torch.float64)) == 0
    # r = (2, 1, 3), A^T r = (4, 1), ||A|| = 2.
    expected = math.sqrt(17) / (2 * math.sqrt(14))
    assert bench.optimality(a, b, torch.zeros(2, 1, dtype=torch.float64)) == pytest.approx(expected, rel=1e-3)


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no bench-\*\.json; measure with: neula bench --out"):
        bench.read(tmp_path)


def test_what_bench_has_not_written(tmp_path) -> None:
    (tmp_path / "bench-x.json").write_text('{"about": {"problem": "foo"}, "rows": []}')
    with pytest.raises(ValueError, match=r"bench-x.json does not hold what neula bench writes"):
        bench.read(tmp_path)
