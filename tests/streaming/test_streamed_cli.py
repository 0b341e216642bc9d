"""Files that do not fit into memory, on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from neula.cli import app, large
from neula.io import memory


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


GROUPS = {
    2: ("", "", ("memory.max", "memory.current", "inactive_file")),
    1: ("memory", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("limited", ["job/step", "job", "", "of the host/job"])
def test_memory_that_control_groups_leave(version: int, limited: str, tmp_path: Path) -> None:
    """Of the process's own group, of one above it, or of the root of a container."""
    controllers, mounted, (most, used, cached) = GROUPS[version]
    path = "of the host/job" if limited == "of the host/job" else "job/step"
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(f"9:cpu:/\n3:{controllers}:/{path}\n")
    group = tmp_path / "groups" / mounted / ("" if path == limited == "of the host/job" else limited)
    group.mkdir(parents=True)
    (group / most).write_text("9000")
    (group / used).write_text("5000")
    (group / "memory.stat").write_text(f"cache 7\n{cached} 1000\n")
    assert memory.available(tmp_path, tmp_path / "groups") == 5000


def test_memory_that_the_shell_limits() -> None:
    program = "from neula.io import memory; print(memory.available())"
    command = ["sh", "-c", 'ulimit -v 8000000 && exec "$0" -c "$1"', sys.executable, program]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 0 < float(found.stdout) < 8000000 * 1024
