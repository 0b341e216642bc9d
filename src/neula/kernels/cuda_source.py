"""Kernels in CUDA C++, compiled by NVRTC at the first call on a machine, and kept in the user's cache folder.

torch compiles and launches them, too (``torch.cuda._compile_kernel``), but imports what builds extensions
for that, half a second in each process, keeps nothing, and makes objects of each argument of a launch: 22
of them take 40 us more on the host of an H200.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import platformdirs
import torch

from neula.kernels.whole_file import write_whole

Launch = Callable[..., None]
"""``launch(grid, block, arguments, shared_bytes=0)`` queues a kernel on the current stream of its device."""

NEEDED = ("_get_gpu_rtc_library", "_get_gpu_runtime_library", "_cuda_load_module", "_check_cuda")
"""What torch has for its own way, of ``torch.cuda._utils``; without, that way is taken."""


@lru_cache
def compiled(
    name: str, function: str, device: torch.device, macros: str = "", shared_bytes: int = 0
) -> Launch:
    """A function of ``name.cu``, ``extern "C"``, to be launched on a device, which is to be the current one.

    Parameters
    ----------
    name, function : str
    device : torch.device
    macros : str
        What comes before the source.
    shared_bytes : int
        Dynamic shared memory of a thread block, where it is more than a kernel may have unasked.

    Raises
    ------
    ImportError
        Without a torch that compiles CUDA.
    """
    if not hasattr(torch.cuda, "_compile_kernel"):
        raise ImportError("compiling CUDA needs torch >= 2.9")
    source = macros + Path(__file__).with_name(f"{name}.cu").read_text()
    utils: Any = torch.cuda._utils
    with torch.cuda.device(device):
        if torch.version.hip or not all(hasattr(utils, needed) for needed in NEEDED):
            kernel = torch.cuda._compile_kernel(source, function)
        else:
            kernel = _loaded(source, function, torch.cuda.get_device_capability(device), utils)
        if shared_bytes:
            kernel.set_shared_memory_config(shared_bytes)
    return kernel if torch.version.hip or not hasattr(kernel, "func") else _launching(kernel, utils)


def _loaded(source: str, function: str, capability: tuple[int, int], utils: Any) -> Any:
    """The kernel, from the cache folder if it is there and in order."""
    digest = hashlib.sha256(repr((capability, torch.version.cuda, source)).encode()).hexdigest()[:24]
    file = platformdirs.user_cache_path("neula") / "kernels" / f"{function}-{digest}.cubin"
    with suppress(OSError, RuntimeError):
        return utils._cuda_load_module(file.read_bytes(), [function])[function]
    binary = by_nvrtc(source, capability, utils._get_gpu_rtc_library())
    with suppress(OSError):
        write_whole(file, binary)
    return utils._cuda_load_module(binary, [function])[function]


def by_nvrtc(source: str, capability: tuple[int, int], library: Any) -> bytes:
    """Machine code for GPUs of a compute capability.

    Raises
    ------
    RuntimeError
        With what the compiler says.
    """
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    text = [source.encode(), b"kernel.cu", 0, None, None]
    if library.nvrtcCreateProgram(ctypes.byref(program), *text):
        raise RuntimeError("NVRTC cannot begin")
    try:
        option = ctypes.c_char_p("--gpu-architecture=sm_{}{}".format(*capability).encode())
        failed = library.nvrtcCompileProgram(program, 1, ctypes.byref(option))
        kind = "ProgramLog" if failed else "CUBIN"
        getattr(library, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
        found = ctypes.create_string_buffer(size.value)
        getattr(library, f"nvrtcGet{kind}")(program, found)
        if failed:
            raise RuntimeError(f"NVRTC: {found.value.decode()}")
        return found.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _launching(kernel: Any, utils: Any) -> Launch:
    library, check = utils._get_gpu_runtime_library(), utils._check_cuda

    def launch(
        grid: Sequence[int], block: Sequence[int], arguments: Sequence[Any], shared_bytes: int = 0
    ) -> None:
        # Each has eight bytes, of which an int takes the first four.
        values = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
        room = (ctypes.c_int64 * len(values))(*values)
        first = ctypes.addressof(room)
        places = (ctypes.c_void_p * len(values))(*range(first, first + 8 * len(values), 8))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        check(library.cuLaunchKernel(kernel.func, *grid, *block, shared_bytes, stream, places, None))

    return launch
