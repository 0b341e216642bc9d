"""Checks of an installation with the required packages alone: ``python tests/smoke.py``.

Plain Python, since a new environment has no pytest. ``make dist-check`` runs it in one, ``make smoke`` where
other packages are hidden (:mod:`tests.required_only`).
"""

from __future__ import annotations

import io
import pkgutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points, version
from pathlib import Path
from unittest import mock

import numpy as np

import neula


def check_the_package() -> None:
    assert neula.__version__ == version("neula")
    assert (Path(neula.__file__).parent / "py.typed").is_file(), "types are not shipped"


def check_every_module() -> None:
    """Each can be imported, or says which extra it needs."""
    names = [module.name for module in pkgutil.walk_packages(neula.__path__, "neula.")]
    for name in names:
        if name.endswith(".__main__"):
            continue
        failed = import_error(partial(import_module, name))
        assert failed is None or "pip install 'neula[" in failed, f"{name}: {failed}"


def check_problems() -> None:
    rng = np.random.default_rng(0)
    A, b = rng.standard_normal((300, 40)), rng.standard_normal(300)
    result = neula.lstsq(A, b)
    assert result.converged
    assert np.allclose(result.x, np.linalg.lstsq(A, b, rcond=None)[0], rtol=1e-10)
    Q, R = neula.qr(A.astype(np.float32))
    assert np.allclose(Q @ R, A, atol=1e-5)
    assert neula.solve(A[:40], b[:40]).converged


def check_data() -> None:
    from neula.io.datasets import nist, nist_names

    assert all(nist(name).A.size for name in nist_names())


def check_command_line() -> None:
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/A.npy", np.eye(5, 3))
        np.save(f"{folder}/b.npy", np.arange(5.0))
        assert command("--version") == 0
        assert command("lstsq", f"{folder}/A.npy", f"{folder}/b.npy", "-o", f"{folder}/x.npy") == 0
        assert np.allclose(np.load(f"{folder}/x.npy"), [0, 1, 2])
        assert command("lstsq", f"{folder}/none.npy", f"{folder}/b.npy") == 2


def command(*words: str) -> int:
    """Exit code of the command line."""
    (script,) = entry_points(group="console_scripts", name="neula")
    silent = redirect_stdout(io.TextIOWrapper(io.BytesIO())), redirect_stderr(io.StringIO())
    with silent[0], silent[1], mock.patch.object(sys, "argv", ["neula", *words]):
        try:
            script.load()()
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def check_what_is_missing() -> None:
    """Without its extra a feature says how to get it."""
    from neula.papers.drawing import new_canvas

    assert import_error(partial(new_canvas, 1.0, 1.0)) in (
        None,
        "drawing needs matplotlib: pip install 'neula[plot]'",
    )


def import_error(call: Callable[[], object]) -> str | None:
    """Message of the ImportError that a call raises; None if there is none."""
    try:
        call()
    except ImportError as error:
        return str(error)
    return None


if __name__ == "__main__":
    checks = [check for name, check in list(globals().items()) if name.startswith("check_")]
    for check in checks:
        check()
    print(f"neula {neula.__version__} in {Path(neula.__file__).parent}: {len(checks)} passed, 0 failed")
