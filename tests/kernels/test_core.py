"""The compiled core: built from these sources, for every instruction set, with exact arithmetic."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from capabilities import LEVELS, core_of
from neula import _core
from neula.kernels import core as core_module
from neula.kernels.core import core

SOURCES = Path(__file__).parents[2] / "cpp"


def test_is_built_from_these_sources() -> None:
    files = sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".hpp", ".txt"))
    hashes = "".join(hashlib.sha256(path.read_bytes()).hexdigest() + "\n" for path in files)
    assert _core.source_hash == hashlib.sha256(hashes.encode()).hexdigest(), "make core"


@pytest.mark.parametrize("level", LEVELS)
def test_arithmetic_is_exact(level: str) -> None:
    compiled = core_of(level)
    assert compiled.level == level
    assert compiled.arithmetic_is_exact()


def test_unknown_instructions() -> None:
    with pytest.raises(ValueError, match="no instructions of level 'vax'"):
        _core.Core("vax")


def test_capping_torch_caps_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEULA_CORE", raising=False)
    for capability, level in [
        ("DEFAULT", "baseline"),
        ("AVX2", "avx2"),
        ("AVX512", "avx512"),
        ("?", "baseline"),
    ]:
        monkeypatch.setattr(
            torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability
        )
        found = core.__wrapped__()
        assert found is not None
        assert found.level == (level if level in _core.levels() else "baseline")
    monkeypatch.setenv("NEULA_CORE", "none")
    assert core.__wrapped__() is None


def test_a_core_with_other_arithmetic_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fast:
        level = "baseline"

        def arithmetic_is_exact(self) -> bool:
            return False

    monkeypatch.delenv("NEULA_CORE", raising=False)
    monkeypatch.setattr(_core, "Core", lambda level: Fast())
    with pytest.raises(ImportError, match="fast-math"):
        core_module.core.__wrapped__()


def test_instruction_sets_share_no_function() -> None:
    """The linker keeps one copy of a shared one, which other processors cannot run."""
    nm, objects = shutil.which("nm"), sorted(SOURCES.parent.glob("build/core-*/CMakeFiles/*.dir/*.o"))
    objects = [path for path in objects if path.parent.stem in LEVELS]
    if nm is None or not objects:
        pytest.skip("no nm, or the core was not built here")
    for path in objects:
        listed = subprocess.run([nm, "-C", path], capture_output=True, text=True, check=True).stdout
        shared = [line for line in listed.splitlines() if " W " in line or " V " in line]
        assert [line for line in shared if f"neula::{path.parent.stem}::" not in line] == [], path


def test_works_without_the_core() -> None:
    code = (
        "import numpy as np, neula; from neula.kernels.core import core; assert core() is None;"
        "A = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 7.0]]);"
        "assert neula.nnls(A, A @ [1.0, 2.0]).converged; assert neula.lstsq(A, A @ [1.0, 2.0]).converged"
    )
    environment = {**os.environ, "NEULA_CORE": "none"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=300)


TALL, SQUARE, PROBES = np.ones((5, 3)), np.ones((3, 3)), np.ones((3, 4))
UNFIT = [
    ("probe_errors", (TALL, TALL, SQUARE, PROBES, 0), "A, Q and R must"),
    ("probe_errors", (TALL, TALL, SQUARE[:2], PROBES, 1), "A and Q must"),
    ("probe_errors", (TALL, TALL[:4], SQUARE, PROBES, 1), "A and Q must"),
    ("probe_errors", (TALL, TALL, SQUARE, PROBES[:, :3], 1), "A and Q must"),
    ("probe_errors", (TALL.astype(np.float32), TALL, SQUARE, PROBES, 1), "A, Q and R must"),
    ("cholesky_qr", (TALL[:2], TALL[:2], SQUARE, PROBES, 0.0, 1), "no more columns than rows"),
    ("cholesky_qr", (TALL[None], TALL[None].repeat(2, 0), SQUARE[None], PROBES, 0.0, 1), "A and Q must"),
    ("one_pass", (TALL, None, None, None, None, 1), "one_pass takes"),
    ("one_pass", (TALL, np.ones(3), None, None, None, 0), "one_pass takes"),
    ("one_pass", (TALL, np.ones(5), None, None, None, 1), "one_pass takes"),
    ("one_pass", (TALL, np.ones(3), None, np.ones((2, 5)), None, 1), "one_pass takes"),
    ("one_pass", (TALL.T, np.ones(5), None, np.ones(3), None, 1), "one_pass takes"),
    ("one_pass", (TALL[None], np.ones(3), None, np.ones(5), None, 1), "one_pass takes"),
    (
        "seminormal",
        (TALL, np.ones((4, 1)), np.empty(99), None, 14 * [1.0], False),
        "seminormal takes|matrices",
    ),
    ("seminormal", (TALL[None], TALL[None], np.empty(1), None, 14 * [1.0], False), "written holds"),
]


@pytest.mark.parametrize(("function", "given", "message"), UNFIT)
def test_arrays_that_do_not_fit_one_another(function: str, given: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(core_of("baseline"), function)(*given)


def test_no_copy_is_written_to() -> None:
    fixed = TALL.copy()
    fixed.flags.writeable = False
    with pytest.raises(TypeError):
        core_of("baseline").probe_errors(TALL, fixed, SQUARE, PROBES, 1)
    with pytest.raises(TypeError):
        core_of("baseline").one_pass(TALL, np.ones(3), None, np.empty(10)[::2], None, 1)
