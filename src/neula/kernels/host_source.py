"""Kernels in C for the host, compiled by the machine's C compiler at the first call, kept in the user's cache
folder.

What they compute has a definition in NumPy or torch beside it, which serves where there is no compiler.
``CC`` names the compiler, as for Triton and for make; ``CC=false`` is none.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import platformdirs
import torch

from neula.kernels.whole_file import read_checked, write_checked

FLAGS = [
    # The next level takes a compiler twice the time, for little more than this where loops are over vectors.
    # Of what it adds, short loops that are peeled halve the time of least squares (600 x 100); loops without
    # questions in them, which systems gain a little from, double it again.
    *("-std=c11", "-O2", "-fpeel-loops", "-shared", "-fPIC"),
    # Each operation is rounded once, or there is no arithmetic in twice the working precision.
    "-ffp-contract=off",
    # These change no number: loops with square roots and comparisons become vectors, and so do sums that a
    # pragma allows to be added in another order.
    *("-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd"),
]

WIDE = ["-mavx2", "-mfma"]

INSTRUCTIONS = {
    "AVX2": WIDE,
    "AVX512": [*WIDE, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
}
"""By what torch found, or was told to use: a cache folder may be shared by different processors."""

SECONDS = 60
"""After so many the compiler is given up."""


_lock = threading.Lock()


def load(name: str) -> ctypes.CDLL | None:
    """The functions of ``name.c``, beside which other threads of Python run; None where there is no compiler
    for it.

    Parameters
    ----------
    name : str
        Of a file in this folder; others of it are parts whose names begin with this one and ``_``.
    """
    with _lock:  # one thread compiles, the others wait for it
        return _load(name)


@lru_cache
def _load(name: str) -> ctypes.CDLL | None:
    command = compiler()
    if command is None:
        return None
    folder = Path(__file__).parent
    parts = [folder / f"{name}.c", *sorted(folder.glob(f"{name}_*.c"))]
    sources = [*parts, *sorted(folder.glob("*.h"))]
    flags = [*FLAGS, *INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability(), [])]
    known = [_identity(command[0]), command[1:], flags, platform.machine(), platform.libc_ver()]
    texts = [source.read_bytes() for source in sources]
    digest = hashlib.sha256(repr([known, texts]).encode()).hexdigest()[:24]
    file = platformdirs.user_cache_path("neula") / "kernels" / f"{name}-{digest}.so"
    with suppress(OSError):
        read_checked(file)
        return _with_threads(ctypes.CDLL(str(file)))
    with suppress(OSError, subprocess.SubprocessError), tempfile.TemporaryDirectory() as room:
        made = Path(room) / file.name
        _compile([*command, *flags], parts, made)
        library = ctypes.CDLL(str(made))  # which stays when the file goes
        with suppress(OSError):
            write_checked(file, made.read_bytes())
        return _with_threads(library)
    return None


def _compile(command: list[str], parts: list[Path], made: Path) -> None:
    """Make a library of some parts, which compilers work on side by side."""
    objects = [str(made.with_name(f"{part.stem}.o")) for part in parts]
    commands = [[*command, "-c", str(part), "-o", kept] for part, kept in zip(parts, objects, strict=True)]
    with ThreadPoolExecutor(len(parts)) as threads:
        list(threads.map(_run, commands))
    _run([*command, *objects, "-o", str(made), "-lm"])


def _with_threads(library: ctypes.CDLL) -> ctypes.CDLL:
    """A library whose kernels share the threads of torch, if they have parts and torch has OpenMP."""
    if hasattr(library, "share_threads"):
        with suppress(AttributeError, OSError):
            # Only what is loaded already: another OpenMP would have threads of its own.
            openmp = ctypes.CDLL("libtorch_cpu.so", mode=os.RTLD_NOLOAD)
            library.share_threads(openmp.GOMP_parallel)
    return library


def _run(command: list[str]) -> None:
    """Compile without a word.

    What it says is read: at the end of that Python wakes, and without it would ask every 50 ms.
    """
    subprocess.run(command, check=True, timeout=SECONDS, stdin=subprocess.DEVNULL, capture_output=True)


def compiler() -> list[str] | None:
    """The command that compiles C, its path first; None where there is none.

    Examples
    --------
    >>> from neula.kernels.host_source import compiler
    >>> command = compiler()
    >>> command is None or command[0].startswith("/")
    True
    """
    named = shlex.split(os.environ.get("CC", ""))
    for candidate in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        path = shutil.which(candidate[0])
        if path is not None:
            return [os.path.abspath(path), *candidate[1:]]
    return None


def _identity(path: str) -> tuple[str, int, int]:
    """What is another for another version of a program, without the milliseconds that it takes to ask it."""
    found, status = os.path.realpath(path), os.stat(path)
    return found, status.st_size, status.st_mtime_ns
