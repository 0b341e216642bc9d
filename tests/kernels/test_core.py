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

U = 2.0**-53
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


def random_matrix(m: int, n: int, dtype: type, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((m, n)).astype(dtype)
    return a + 1j * rng.standard_normal((m, n)) if dtype is complex else a


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [float, complex])
@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 33])
def test_kit_is_backward_stable(level: str, dtype: type, n: int) -> None:
    # Cholesky and QR: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2002, theorems 10.4 and
    # 19.5. The error of LU is proportional to the growth of its elements, below n^(2/3) for random matrices
    # (section 9.4).
    compiled, m, growth = core_of(level), n + 5, n ** (2 / 3)
    a, b = random_matrix(n, n, dtype), random_matrix(n, 1, dtype, 1)[:, 0]
    definite = a.conj().T @ a + n * np.eye(n)
    complex_operations = 4 if dtype is complex else 1  # those of a product, and of a quotient
    for name, matrix, factor in [("cholesky", definite, 4 * n), ("lu", a, 6 * n * growth)]:
        x = b.copy()
        assert compiled.kit_solve(name, matrix, x)
        size = np.linalg.norm(matrix) * np.linalg.norm(x) + np.linalg.norm(b)
        assert np.linalg.norm(b - matrix @ x) <= complex_operations * factor * n * U * size
    tall, right = random_matrix(m, n, dtype), random_matrix(m, 1, dtype, 1)[:, 0]
    x = right.copy()
    assert compiled.kit_solve("qr", tall, x)
    gradient = tall.conj().T @ (right - tall @ x[:n])
    size = np.linalg.norm(tall) * (np.linalg.norm(tall) * np.linalg.norm(x[:n]) + np.linalg.norm(right))
    assert np.linalg.norm(gradient) <= complex_operations * 10 * m * n * U * size


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [float, complex])
@pytest.mark.parametrize("n", [2, 9, 33])
def test_kit_refines_to_full_accuracy(level: str, dtype: type, n: int) -> None:
    """Residuals in twice the working precision: errors are below u for condition numbers below some 1e15 / n.

    Elements of A and x are small whole numbers, so that b is exact: x is the solution.
    """
    rng = np.random.default_rng(n)
    parts = [rng.integers(-1000, 1000, (n, n + 1)).astype(float) for _ in range(1 + (dtype is complex))]
    whole = parts[0] + 1j * parts[1] if dtype is complex else parts[0]
    a, exact = whole[:, :n].copy(), whole[:, n].copy()
    a[-1] = a[:-1].sum(0)
    a[-1, 0] += 1  # nearly dependent rows
    x = a @ exact
    assert core_of(level).kit_solve("lu", a, x)
    assert np.linalg.cond(a) > 1e3
    assert np.abs(x - exact).max() <= U * np.abs(exact).max()


@pytest.mark.parametrize("dtype", [float, complex])
def test_kit_finds_what_has_no_factor(dtype: type) -> None:
    compiled = core_of("baseline")
    zero, indefinite = np.zeros((3, 3), dtype), np.diag(np.array([1.0, -1.0, 1.0], dtype))
    assert not compiled.kit_solve("lu", zero, np.ones(3, dtype))
    assert not compiled.kit_solve("cholesky", indefinite, np.ones(3, dtype))
    with pytest.raises(ValueError, match=r"as many|square"):
        compiled.kit_solve("lu", np.ones((4, 3), dtype), np.ones(4, dtype))


def test_works_without_the_core() -> None:
    code = (
        "import numpy as np, neula; from neula.kernels.core import core; assert core() is None;"
        "A = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 7.0]]);"
        "assert neula.nnls(A, A @ [1.0, 2.0]).converged; assert neula.lstsq(A, A @ [1.0, 2.0]).converged"
    )
    environment = {**os.environ, "NEULA_CORE": "none"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=300)
