"""Files that do not fit into memory, on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from neula.cli import app, large
from neula.pipeline import memory


def test_a_file_that_does_not_fit(
    rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = rng.standard_normal((500, 4)), rng.standard_normal(500)
    for name, x in (("a", a), ("b", b), ("w", np.ones(500))):
        np.save(tmp_path / f"{name}.npy", x)
    files = [str(tmp_path / "a.npy"), str(tmp_path / "b.npy"), "-o", str(tmp_path / "x.npy"), "--json"]
    run = CliRunner()
    fits = run.invoke(app.app, ["lstsq", *files])
    assert json.loads(fits.stdout)["passes"] == 0
    monkeypatch.setattr(large, "available", lambda: 3 * a.nbytes - 1)
    found = run.invoke(app.app, ["lstsq", *files, "--weights", str(tmp_path / "w.npy")])
    assert found.exit_code == 0, found.output
    said = json.loads(found.stdout)
    assert said["passes"] == 2
    assert said["inputs"]["A"]["shape"] == [500, 4]
    assert "does not fit into memory, and is read block by block" in found.stderr
    assert np.allclose(np.load(tmp_path / "x.npy"), np.linalg.lstsq(a, b, rcond=None)[0])
    shown = run.invoke(app.app, ["lstsq", *files[:2]])
    assert "passes over A" in shown.stderr


@pytest.mark.parametrize(
    "option", [["--report", "r.html"], ["--nonnegative"], ["--bounds=0,1"], ["--intercept"]]
)
def test_what_needs_all_of_a_reads_it(
    rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("a.npy", rng.standard_normal((50, 4)))
    np.save("b.npy", rng.standard_normal(50))
    monkeypatch.setattr(large, "available", lambda: 0)
    found = CliRunner().invoke(app.app, ["lstsq", "a.npy", "b.npy", *option])
    assert found.exit_code == 0, found.output
    assert "block by block" not in found.stderr


def test_memory_that_is_left() -> None:
    assert memory.available() > 1 << 20
