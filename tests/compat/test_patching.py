"""Whole programs with neula's drop-ins in them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import torch

import neula.compat
import neula.compat.numpy
import neula.compat.scipy
import neula.compat.scipy.optimize
import neula.compat.torch
from neula.compat.__main__ import main
from neula.compat.patching import PEERS

A, B = np.array([[2.0, 1.0], [1.0, 3.0]]), np.array([4.0, 7.0])
SINGULAR_TO_ROUNDING = np.array([[1.0, 1.0], [1.0, 1.0 + 2.0**-52]])
"""A system with it has no correct digit: NumPy says nothing, and neula warns."""


def _warns(call: Callable[[], Any]) -> bool:
    """Whether neula answers a call that NumPy answers without a word."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return bool(seen)


def _solve() -> Any:
    return np.linalg.solve(SINGULAR_TO_ROUNDING, np.array([2.0, 2.0]))


def _functions() -> Iterator[tuple[ModuleType, str, Any]]:
    for peer, drop_ins in PEERS.items():
        for name, function in vars(sys.modules[drop_ins]).items():
            if hasattr(function, "__wrapped__") and hasattr(sys.modules[peer], name):
                yield sys.modules[peer], name, vars(sys.modules[peer])[name]


def test_every_drop_in_is_put_in_place_and_taken_out_again() -> None:
    before = list(_functions())
    assert len(before) >= 20
    with neula.compat.patched():
        for module, name, function in before:
            assert vars(module)[name] is not function
            assert vars(module)[name].__name__ == function.__name__
    assert list(_functions()) == before


def test_neula_answers_inside_and_numpy_outside() -> None:
    assert not _warns(_solve)
    with neula.compat.patched():
        assert _warns(_solve)
        with neula.compat.patched():
            assert _warns(_solve)
        assert _warns(_solve)
    assert not _warns(_solve)


def test_after_an_exception() -> None:
    before = list(_functions())
    with pytest.raises(np.linalg.LinAlgError, match="Singular"), neula.compat.patched():
        np.linalg.solve(np.zeros((2, 2)), B)
    assert list(_functions()) == before


def test_a_name_that_was_imported_before_and_one_that_was_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = ModuleType("a_program"), ModuleType("a_module_of_it")
    monkeypatch.setitem(sys.modules, "a_program", before)
    exec("from numpy.linalg import solve as mine", vars(before))
    system = (SINGULAR_TO_ROUNDING, np.array([2.0, 2.0]))
    original = before.mine  # type: ignore[attr-defined]
    with neula.compat.patched():
        exec("from numpy.linalg import solve as mine", vars(after))
        assert _warns(lambda: vars(before)["mine"](*system))
        assert _warns(lambda: vars(after)["mine"](*system))
    assert vars(before)["mine"] is original
    assert not _warns(lambda: vars(after)["mine"](*system))


@pytest.mark.parametrize("all_threads", [False, True])
def test_other_threads(all_threads: bool) -> None:
    found: list[Any] = []

    def work() -> None:
        found.append(np.linalg.qr(-np.eye(2))[1])

    plain = np.linalg.qr(-np.eye(2))[1]
    with neula.compat.patched(all_threads=all_threads):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    # R has a nonnegative diagonal if it is neula's.
    assert np.array_equal(found[0], np.eye(2) if all_threads else plain)


@pytest.mark.parametrize("drop_ins", ["numpy", "scipy", "torch"])
def test_drop_ins_put_in_place_by_hand(drop_ins: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drop-in that falls back to its peer reaches the function that was there, and not itself."""
    ours = getattr(neula.compat, drop_ins)
    peer = {"numpy": np.linalg, "scipy": scipy.linalg, "torch": torch.linalg}[drop_ins]
    for name, function in list(vars(ours).items()):
        if hasattr(function, "__wrapped__") and hasattr(peer, name):
            monkeypatch.setattr(peer, name, function)
    convert = torch.from_numpy if drop_ins == "torch" else np.asarray
    x = peer.solve(convert(A), convert(B))
    assert np.abs(np.asarray(x) - [1.0, 2.0]).max() < 4 * 2.0**-53 * np.linalg.cond(A)
    with pytest.raises(np.linalg.LinAlgError if drop_ins != "torch" else RuntimeError):
        peer.solve(convert(np.zeros((2, 2))), convert(B))
    hermitian = peer.pinv(convert(1j * np.eye(2)))
    assert np.abs(np.asarray(hermitian) + 1j * np.eye(2)).max() < 4 * 2.0**-53


PROGRAM = """
import sys, threading
import numpy as np

print(sys.argv[1:], __name__)
print(np.linalg.qr(-np.eye(2))[1][0, 0])
thread = threading.Thread(target=lambda: print(np.linalg.qr(-np.eye(2))[1][0, 0]))
thread.start()
thread.join()
sys.exit(3)
"""


SAID = ["['--its', 'own'] __main__", "1.0", "1.0"]


def test_a_program_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "neula.compat", str(tmp_path / "program.py"), "--its", "own"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.splitlines()) == (3, SAID), done.stderr


def test_a_program_that_is_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["neula.compat", "-m", "program", "--its", "own"])
    with pytest.raises(SystemExit, match="3"):
        main()
    assert capsys.readouterr().out.splitlines() == SAID


@pytest.mark.parametrize("arguments", [[], ["no-such-file.py"]])
def test_nothing_to_run(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["neula.compat", *arguments])
    assert main() == 2
    assert capsys.readouterr().err.startswith("usage: python -m neula.compat" if not arguments else "")
