"""Kernels run on the GPU where there is one (``pytest -m gpu``).

Elsewhere those in Triton run in its interpreter, which has to be chosen before Triton is imported, and those
in CUDA C++ are compiled for the CPU (``cuda_on_host.h``), where there is a compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from capabilities import LEVELS, core_of
from neula.kernels.cholesky import cholesky_tiles
from neula.kernels.cuda_source import laid_out, path_of
from neula.kernels.few_vectors import one_pass_host, probes_host
from neula.kernels.qr import cholesky_qr_host
from neula.kernels.small_problems import bounded_host, seminormal_host

# Nothing else in the tests imports Triton; if something has, the tests of kernels are skipped.
INTERPRETED = not torch.cuda.is_available() and "triton" not in sys.modules
if INTERPRETED:
    with pytest.MonkeyPatch.context() as environment, contextlib.suppress(ImportError):
        environment.setenv("TRITON_INTERPRET", "1")
        import triton.language  # noqa: F401


@pytest.fixture(scope="session")
def compiled_for_host(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ctypes.CDLL]:
    """Compiles a kernel in CUDA C++ for the CPU, given its name and macros, once; a GPU runs it as it is."""
    compiler = shutil.which("g++")
    if torch.cuda.is_available() or compiler is None:
        pytest.skip("no g++, or a GPU")
    probe = [compiler, "-std=c++17", "-E", "-x", "c++", "-include", "ucontext.h", "/dev/null"]
    if subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("g++ is older than C++17, or there are no coroutines in its C library")

    def compiled(name: str, **macros: object) -> ctypes.CDLL:
        library = tmp_path_factory.mktemp(name) / f"{name}.so"
        source, here = path_of(f"{name}.cu"), Path(__file__).parent
        folders = sorted({f"-I{file.parent}" for file in source.parents[1].rglob("*.cuh")} | {f"-I{here}"})
        # What fortified C libraries forbid is to jump from one stack to another.
        options = ["-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-shared", "-fPIC", f'-DSOURCE="{source}"']
        options += [f"-D{macro}={value}" for macro, value in macros.items()]
        (program,) = here.rglob(f"{name}_on_host.cpp")
        command = [compiler, *options, *folders, program, "-o", library]
        made = subprocess.run(command, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
        return ctypes.CDLL(str(library))

    return cache(compiled)


@pytest.fixture(scope="session")
def compiled_on_host(compiled_for_host: Callable[..., ctypes.CDLL]) -> Callable[..., Callable[..., None]]:
    """In the place of :func:`neula.kernels.cuda_source.compiled`, for kernels that are ``LAUNCHED``."""

    def compiled(name: str, function: str, device: torch.device, macros: str = "") -> Callable[..., None]:
        defined = dict(line.split()[1:] for line in macros.splitlines())
        launch = getattr(compiled_for_host(name, **defined), f"launch_{function}")

        def launched(grid: tuple, block: tuple, arguments: list[object]) -> None:
            room, _ = laid_out(arguments)
            launch(grid[0], block[0], ctypes.c_char_p(ctypes.addressof(room)))

        return launched

    return compiled


@pytest.fixture
def tiles_on_host(compiled_for_host: Callable[..., ctypes.CDLL], monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of the kernel that factorizes by tiles are calls on the CPU."""

    def compiled(name: str, _function: str, _device: object, macros: str, shared_bytes: int) -> Callable:
        defined = dict(line.split()[1:] for line in macros.splitlines())
        factorize = compiled_for_host(name, BYTES=shared_bytes, **defined).factorize

        def launch(_grid: object, _block: object, arguments: list, _bytes: int) -> None:
            values = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
            factorize(*map(ctypes.c_longlong, values))

        return launch

    monkeypatch.setattr(cholesky_tiles, "compiled", compiled)


@pytest.fixture(params=LEVELS)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled core with as many lanes as a processor has, or fewer."""
    compiled = core_of(request.param)
    for module in (bounded_host, cholesky_qr_host, one_pass_host, probes_host, seminormal_host):
        monkeypatch.setattr(module, "core", lambda: compiled)


@pytest.fixture
def sums_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial Gram matrices are added by torch where kernels are interpreted: row by row, that takes long."""
    if INTERPRETED and "triton" in sys.modules:
        for module in ("panel_gram", "projection", "tall"):
            place = f"neula.kernels.qr.{module}.sum_of_blocks"
            monkeypatch.setattr(place, lambda parts, total: total.copy_(parts.double().sum(0)))


@pytest.fixture
def uninitialized_is_nan() -> Iterator[None]:
    """New memory is filled with NaN, so that what a kernel reads before it is written shows."""
    debug = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), debug.fill_uninitialized_memory
    # cuBLAS is not deterministic unless the environment says so.
    torch.use_deterministic_algorithms(True, warn_only=True)
    debug.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    debug.fill_uninitialized_memory = before[1]


@cache
def _builtins_of(package: object) -> list[str]:
    """Names of what the interpreter replaces in a module or class of Triton, as found the first time."""
    from triton.language.core import is_builtin

    return [name for name, member in inspect.getmembers(package) if is_builtin(member)]


def _patch_builtin(package: object, *rest: object) -> None:
    """Faster form of Triton's function of this name, which goes through all members at each call in a kernel.

    That takes longer than the computation of the kernel, and only the first call has anything to do.
    """
    from triton.language.core import is_builtin
    from triton.runtime.interpreter import _patch_attr

    names = _builtins_of(package)
    if names and is_builtin(getattr(package, names[0])):
        for name in names:
            _patch_attr(package, name, getattr(package, name), *rest)


@cache
def _remembering(numpy_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Triton's function, which makes a table of all dtypes at each call, called once a dtype."""
    known: dict[str, Any] = {}

    def remembered(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = numpy_dtype(dtype)
        return known[name]

    return remembered


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton reads the choice again while a kernel runs."""
    if torch.cuda.is_available():
        return
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if "triton" in sys.modules:
        if not INTERPRETED:
            pytest.skip("Triton was imported before its interpreter could be chosen: run tests/kernels alone")
        from triton.language.semantic import TritonSemantic
        from triton.runtime import interpreter

        monkeypatch.setattr(interpreter, "_patch_builtin", _patch_builtin, raising=False)
        monkeypatch.setattr(interpreter, "_get_np_dtype", _remembering(interpreter._get_np_dtype))
        # Integer sums and products are computed again in 64 bits for an assertion that only debug mode makes.
        unused = "binary_op_sanitize_overflow_impl"
        monkeypatch.setattr(TritonSemantic, unused, lambda *_: None, raising=False)
