"""Kernels in C are compiled once a machine; where that is impossible, there is none."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import platformdirs
import pytest
import torch

from neula import kernels
from neula.kernels import host_source

SOURCE = """
#include "doubled.h"

double twice(double x) { return 2 * x; }

void sum(double a, double b, double *found) { two_sum(a, b, found, found + 1); }

void product(double a, double b, double *found) { two_product(a, b, found, found + 1); }

void inner(long n, const double *x, const double *y, double *found)
{
    found[0] = found[1] = 0;
    for (long i = 0; i < n; i++)
        add_product(x[i], y[i], found, found + 1);
}
"""

needs_compiler = pytest.mark.skipif(host_source.compiler() is None, reason="no C compiler")


@pytest.fixture(name="folder", autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In the place of the folder of kernels, with a cache of its own."""
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(host_source, "__file__", str(tmp_path / "host_source.py"))
    (tmp_path / "one.c").write_text(SOURCE)
    (tmp_path / "doubled.h").write_text(Path(kernels.__file__).with_name("doubled.h").read_text())
    host_source._load.cache_clear()
    yield tmp_path
    host_source._load.cache_clear()


@pytest.fixture(name="compilations")
def _compilations(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that compile, and link nothing."""
    commands: list[list[str]] = []
    run = host_source.subprocess.run

    def counted(command: list[str], **options: object) -> object:
        if "-c" in command:
            commands.append(command)
        return run(command, **options)

    monkeypatch.setattr(host_source.subprocess, "run", counted)
    return commands


def twice(x: float) -> float:
    library = host_source.load("one")
    assert library is not None
    library.twice.argtypes, library.twice.restype = [ctypes.c_double], ctypes.c_double
    return library.twice(x)


def again() -> float:
    host_source._load.cache_clear()
    return twice(1.5)


@needs_compiler
def test_compiled_once(folder: Path, compilations: list[list[str]]) -> None:
    assert twice(1.5) == 3
    (file,) = (folder / "cache").rglob("*.so")
    for length in (10, file.stat().st_size // 2, file.stat().st_size - 1):
        file.write_bytes(file.read_bytes()[:length])
        assert again() == 3
    assert len(compilations) == 4
    assert again() == 3
    assert len(compilations) == 4
    with (folder / "doubled.h").open("a") as header:
        header.write("/* another one */\n")
    assert again() == 3
    assert len(compilations) == 5
    assert len(list((folder / "cache").rglob("*"))) == 4  # two folders, two libraries


@needs_compiler
def test_threads_that_ask_at_the_same_time_compile_once(folder: Path, compilations: list[list[str]]) -> None:
    (folder / "cache").write_text("nothing is kept")
    with ThreadPoolExecutor(16) as threads:
        libraries = set(threads.map(lambda _: host_source.load("one"), range(16)))
    assert len(libraries) == len(compilations) == 1


@needs_compiler
def test_compiled_in_parts(folder: Path, compilations: list[list[str]]) -> None:
    """All of them are one library, and one that changes is compiled with the others."""
    (folder / "one_more.c").write_text("double thrice(double x) { return 3 * x; }")
    (folder / "oneself.c").write_text("no C")
    library = host_source.load("one")
    assert library is not None
    library.thrice.argtypes, library.thrice.restype = [ctypes.c_double], ctypes.c_double
    assert library.thrice(1.5) == 4.5
    assert twice(1.5) == 3
    assert len(compilations) == 2
    (folder / "one_more.c").write_text("no C")
    host_source._load.cache_clear()
    assert host_source.load("one") is None


@needs_compiler
def test_without_a_cache(folder: Path) -> None:
    (folder / "cache").write_text("a file in the place of the folder")
    assert twice(1.5) == 3


@needs_compiler
def test_what_does_not_compile(folder: Path) -> None:
    (folder / "one.c").write_text("no C")
    assert host_source.load("one") is None
    assert not (folder / "cache").exists()


@pytest.mark.parametrize("named", ["false", "no-such-compiler --fast"])
def test_without_a_compiler(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", named)
    assert host_source.load("one") is None


@needs_compiler
def test_a_compiler_that_is_named(monkeypatch: pytest.MonkeyPatch, compilations: list[list[str]]) -> None:
    monkeypatch.setenv("CC", f"{host_source.compiler()[0]} -DNAMED")
    assert twice(1.5) == 3
    assert compilations[0][1] == "-DNAMED"


def _numbers(seed: int) -> list[tuple[float, float]]:
    """Pairs of random numbers of sizes that differ by up to 2^120."""
    draw = random.Random(seed)
    return [tuple(draw.uniform(-1, 1) * 2.0 ** draw.randint(-60, 60) for _ in range(2)) for _ in range(2000)]


@needs_compiler
@pytest.mark.parametrize("capability", ["DEFAULT", "AVX2", "AVX512"])
def test_doubled(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums and products with their errors are exact, with fused operations and without."""
    order = ["DEFAULT", "AVX2", "AVX512"]
    if capability not in order[: 1 + order.index(_capability())]:
        pytest.skip("not on this processor")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    library = host_source.load("one")
    assert library is not None
    found = (ctypes.c_double * 2)()
    for function in (library.sum, library.product):
        function.argtypes = [ctypes.c_double, ctypes.c_double, ctypes.c_void_p]
    pairs = _numbers(1)
    for a, b in pairs:
        library.sum(a, b, found)
        assert (found[0], sum(map(Fraction, found))) == (a + b, Fraction(a) + Fraction(b))
        library.product(a, b, found)
        assert (found[0], sum(map(Fraction, found))) == (a * b, Fraction(a) * Fraction(b))
    n, (x, y) = len(pairs), zip(*pairs, strict=True)
    library.inner(ctypes.c_long(n), (ctypes.c_double * n)(*x), (ctypes.c_double * n)(*y), found)
    exact = sum(Fraction(a) * Fraction(b) for a, b in pairs)
    sizes = sum(abs(Fraction(a) * Fraction(b)) for a, b in pairs)
    assert abs(sum(map(Fraction, found)) - exact) <= (Fraction(n + 1, 2**53)) ** 2 * sizes


def _capability() -> str:
    found = torch.backends.cpu.get_cpu_capability()
    return found if found.startswith("AVX") else "DEFAULT"
