"""Sources that are not what they said, or not what they were: errors that say where, and nothing lost."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import neula
from neula.engines import CpuEngine
from neula.io.sources import row_blocks

M, N, STEP = 100, 4, 30


@dataclass
class Faulty:
    """Blocks of 30 rows; ``fault(a, number of the pass, number of the block)`` gives the rows of each."""

    a: np.ndarray
    fault: Callable[[np.ndarray, int, int], Any]
    passes: int = 0

    @property
    def shape(self) -> Any:
        return (M, *self.a.shape[1:])

    @property
    def dtype(self) -> Any:
        return self.a.dtype

    def blocks(self) -> Iterator[Any]:
        self.passes += 1
        for number, start in enumerate(range(0, len(self.a), STEP)):
            yield self.fault(self.a[start : start + STEP], self.passes, number)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuEngine, "tuning", replace(CpuEngine("cpu").tuning, streamed_bytes=1 << 9))


def at(the_pass: int, the_block: int, other: Callable[[np.ndarray], Any]) -> Any:
    return lambda x, number, block: other(x) if (number, block) == (the_pass, the_block) else x


def changed(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[-1, 1] *= 1 + 2.0**-52
    return x


def fail(x: np.ndarray) -> Any:
    raise OSError("the disk is gone")


FAULTS = [
    (
        at(1, 2, lambda x: x[:, :3]),
        r"block 2 of A, from row 60 on, has shape \(30, 3\) in pass 1, and must have",
    ),
    (at(2, 1, lambda x: x[:, 0]), r"block 1 of A, from row 30 on, has shape \(30,\) in pass 2"),
    (at(1, 3, lambda x: x[:7]), "A ends early in pass 1: after 97 of 100 rows"),
    (at(2, 3, lambda x: x[:0]), "A ends early in pass 2: after 90 of 100 rows"),
    (at(1, 3, lambda x: np.vstack([x, x])), "A goes on beyond its 100 rows in pass 1"),
    (at(2, 3, changed), "A has changed: rows 9[0-9] to 99 are not in pass 2 what they were in pass 1"),
    (at(2, 0, lambda x: np.full_like(x, np.nan)), "A has changed: rows 0 to"),
    (at(1, 1, lambda x: x.astype(complex)), "block 1 of A has dtype complex128: pass real numbers"),
    (at(1, 1, lambda x: x.astype(str)), "block 1 of A has dtype <U32"),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS, ids=range(len(FAULTS)))
def test_sources_that_are_not_what_they_said(fault: Any, message: str, rng: np.random.Generator) -> None:
    a = rng.standard_normal((M, N))
    with pytest.raises((ValueError, TypeError), match=message):
        neula.lstsq(Faulty(a, fault), np.ones(M))
    assert not [thread for thread in threading.enumerate() if thread.name == "neula-reader"]


def test_what_a_source_raises(rng: np.random.Generator) -> None:
    """Its own error, with a note of the place."""
    with pytest.raises(OSError, match="the disk is gone") as caught:
        neula.lstsq(Faulty(rng.standard_normal((M, N)), at(2, 2, fail)), np.ones(M))
    assert caught.value.__notes__ == ["while row 60 of A was read, in pass 2"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("operand", ["A", "b", "weights"])
def test_numbers_that_are_not_finite(rng: np.random.Generator, value: float, operand: str) -> None:
    a, b, w = rng.standard_normal((M, N)), rng.standard_normal(M), np.ones(M)
    {"A": a[:, 3], "b": b, "weights": w}[operand][77] = value
    place = "A[77, 3]" if operand == "A" else f"{operand}[77]"
    with pytest.raises(ValueError, match=f"{operand} must be finite") as caught:
        neula.lstsq(row_blocks(a), b, weights=w)
    assert str(caught.value) == f"{place} is {value}: {operand} must be finite"
    two = np.stack([np.ones(M), b], 1)
    if operand == "b":
        with pytest.raises(ValueError, match=r"b\[77, 1\] is"):
            neula.lstsq(row_blocks(a), two)


def test_a_file_that_becomes_shorter(rng: np.random.Generator, tmp_path: Path) -> None:
    """It is noticed before pages beyond its end are read, which would end the process."""
    path = tmp_path / "a.npy"
    np.save(path, rng.standard_normal((M, N)))
    source = row_blocks(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 8)
    with pytest.raises(ValueError, match=r"a.npy has become shorter: it has \d+ bytes"):
        neula.lstsq(source, np.ones(M))


def test_shapes_that_do_not_fit(rng: np.random.Generator) -> None:
    a = row_blocks(rng.standard_normal((M, N)))
    for b, message in (
        (np.ones(M - 1), r"A has 100 rows, and b has shape \(99,\)"),
        (np.ones((2, M, 1)), "it must be"),
        (np.ones((M, 0)), "have no numbers to read"),
    ):
        with pytest.raises(ValueError, match=message):
            neula.lstsq(a, b)
    with pytest.raises(ValueError, match=r"weights must have shape \(100,\)"):
        neula.lstsq(a, np.ones(M), weights=np.ones(M + 1))
    with pytest.raises(
        ValueError, match="solutions of minimum norm need A in memory; load it, or pass damp="
    ):
        neula.lstsq(row_blocks(np.ones((3, 5))), np.ones(3))
    with pytest.raises(ValueError, match="A must be one matrix"):
        neula.lstsq(row_blocks(np.ones(3)), np.ones(3))
    with pytest.raises(ValueError, match="requires a gradient"):
        neula.lstsq(a, torch.ones(M, requires_grad=True))


def test_interruption_leaves_no_thread(rng: np.random.Generator) -> None:
    def interrupt(stage: str, fraction: float) -> None:
        if fraction > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        neula.lstsq(row_blocks(rng.standard_normal((M, N))), np.ones(M), progress=interrupt)
    assert not [thread for thread in threading.enumerate() if thread.name == "neula-reader"]


BLOCK = 1 << 21

MEASURED = f"""
import sys
from dataclasses import replace
import numpy as np, torch, neula
from neula.engines import CpuEngine
from neula.io.sources import row_blocks

torch.set_num_threads(1)
CpuEngine.tuning = replace(CpuEngine("cpu").tuning, streamed_bytes={BLOCK})
folder, kind = sys.argv[1:]

def own():
    fields = open("/proc/self/status").read().split()
    return int(fields[fields.index("RssAnon:") + 1]) << 10

def solved(m, n=100):
    path = f"{{folder}}/{{m}}.npy"
    a = np.lib.format.open_memmap(path, "w+", np.float64, (m, n))
    rng = np.random.default_rng(0)
    for start in range(0, m, 10_000):
        a[start : start + 10_000] = rng.random((10_000, n))
    if kind == "deficient":
        a[:, 1] = a[:, 0]
    a.flush()
    del a
    most = own()

    def look(stage, fraction):
        nonlocal most
        most = max(most, own())

    result = neula.lstsq(row_blocks(path), np.ones(m), progress=look)
    assert result.converged
    return most, result.passes

few, _ = solved(20_000)
most, passes = solved(100_000)
print(passes, most - few)
"""


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the memory of a process is read from /proc"
)
@pytest.mark.parametrize(("kind", "passes"), [("regular", 2), ("deficient", 3)])
def test_memory(kind: str, passes: int, tmp_path: Path) -> None:
    """A of 80 MB takes no more than one of 16 MB, in blocks of 2 MB both, but for vectors as long as A.

    What counts is memory that is not of the mapped file. The smaller problem comes first, so that libraries
    and what they keep are there. glibc's allocator is told to give back what is freed.
    """
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path), kind],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found, more = map(int, done.stdout.split())
    assert found == passes
    # Some vectors, of which each takes 0.64 MB more, and a block or two that another allocator has kept.
    assert more < 4 * BLOCK, more
