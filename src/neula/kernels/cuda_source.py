"""Kernels in CUDA C++, compiled by NVRTC ahead or at the first call on a machine, and kept.

torch compiles and launches them, too (``torch.cuda._compile_kernel``), but imports what builds extensions
for that, half a second in each process, keeps nothing, and makes objects of each argument of a launch: 22
of them take 40 us more on the host of an H200. What loads machine code here are private functions of
``torch.cuda._utils``.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from neula.kernels.dispatch import NotReadyError, launched
from neula.kernels.whole_file import cache_folder, keep, read_checked

Launch = Callable[..., None]
"""``launch(grid, block, arguments, shared_bytes=0)`` queues a kernel on the current stream of its device."""

INCLUDED = re.compile(r'^#include "(.+)"$', re.MULTILINE)
"""Lines of a source that include a common file."""

Capability = tuple[int, int]

asked_for: dict[tuple[str, str], None] = {}
"""Sources and macros of what this process has loaded."""

_lock = threading.Lock()


class _Rooms(threading.local):
    """Memory for arguments of each thread, by layout: the driver has copied them when it returns."""

    def __init__(self) -> None:
        self.of_layouts: dict[Any, tuple[Any, Any]] = {}


_rooms = _Rooms()

_DOUBLE, _BITS = struct.Struct("d"), struct.Struct("q")


@lru_cache
def compiled(
    name: str, function: str, device: torch.device, macros: str = "", shared_bytes: int = 0
) -> Launch:
    """A function of ``name.cu``, ``extern "C"``, to be launched on a device, compiled with macros before the
    source; NotReadyError where that cannot be.

    ``shared_bytes`` is the dynamic shared memory of a thread block, where it is more than a kernel may have
    unasked.
    """
    try:
        with torch.cuda.device(device), _lock:
            return _Launch(_module(name, macros, device), function, device, shared_bytes)
    except Exception as error:
        raise NotReadyError(str(error)) from error


@lru_cache
def driver() -> Any:
    """CUDA's driver, as torch has loaded it: once, since torch makes another object at each call."""
    return torch.cuda._utils._get_gpu_runtime_library()  # type: ignore[attr-defined]


def loaded(binary: bytes, function: str, device: torch.device, shared_bytes: int = 0) -> _Launch:
    """A function of machine code, to be launched on a device with so much dynamic shared memory."""
    utils: Any = torch.cuda._utils
    with torch.cuda.device(device):
        return _Launch(utils._cuda_load_module(binary), function, device, shared_bytes)


def kept_in(capability: Capability) -> list[Path]:
    """Folders of machine code for a compute capability: the user's, and what the package brings along."""
    ahead = Path(__file__).parent / "ahead"
    # GPUs of generation 8 run what is compiled for the first of them.
    alike = {capability, (8, 0)} if capability[0] == 8 else {capability}
    names = ["sm_{}{}".format(*found) for found in sorted(alike, reverse=True)]
    return [cache_folder() / "kernels" / names[0], *(ahead / name for name in names)]


@lru_cache
def source_of(name: str, macros: str = "") -> str:
    """The text of ``name.cu``, what it includes in its place: not every way to compile knows folders."""
    source = path_of(f"{name}.cu").read_text()
    return macros + INCLUDED.sub(lambda found: path_of(found[1]).read_text(), source)


def path_of(file: str) -> Path:
    """A source in CUDA C++, in whichever family: names are unique."""
    here = Path(__file__).parent
    (found,) = (*here.glob(file), *here.glob(f"*/{file}"))
    return found


@lru_cache
def _module(name: str, macros: str, device: torch.device) -> Any:
    """Module with all functions of a source, which are compiled together."""
    return _loaded(name, macros, torch.cuda.get_device_capability(device), torch.cuda._utils)


def _loaded(name: str, macros: str, capability: Capability, utils: Any) -> Any:
    """The module of a source, from where it is kept if it is there and in order."""
    asked_for[name, macros] = None
    file = file_name(name, macros)
    for folder in kept_in(capability):
        with suppress(OSError, RuntimeError):
            return utils._cuda_load_module(read_checked(folder / file))
    binary = by_nvrtc(source_of(name, macros), capability, utils._get_gpu_rtc_library())
    keep(kept_in(capability)[0] / file, binary)
    return utils._cuda_load_module(binary)


def file_name(name: str, macros: str) -> str:
    """Name of the file with the machine code of a source."""
    digest = hashlib.sha256(source_of(name, macros).encode()).hexdigest()[:24]
    return f"{name}-{digest}.cubin"


def by_nvrtc(source: str, capability: tuple[int, int], library: Any) -> bytes:
    """Machine code for GPUs of a compute capability; RuntimeError says what the compiler says."""
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


class _Launch:
    """A kernel that is launched on the current stream of its device."""

    def __init__(self, module: Any, function: str, device: torch.device, shared_bytes: int = 0) -> None:
        self._kernel = getattr(module, function)
        if shared_bytes:
            self._kernel.set_shared_memory_config(shared_bytes)
        utils: Any = torch.cuda._utils
        self._check, self._device = utils._check_cuda, device.index
        self._launch = utils._get_gpu_runtime_library().cuLaunchKernel

    def __call__(
        self, grid: Sequence[int], block: Sequence[int], arguments: Sequence[Any], shared_bytes: int = 0
    ) -> None:
        self._with(grid, block, laid_out(arguments)[1], shared_bytes)

    def of_words(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        words: list[int],
        begins: tuple[int, ...],
        shared_bytes: int,
    ) -> None:
        """Launch with arguments of eight bytes or more each, given as integers, that begin at these bytes."""
        room, places = _room(len(words), begins)
        room[:] = words
        self._with(grid, block, places, shared_bytes)

    def _with(self, grid: Sequence[int], block: Sequence[int], places: Any, shared_bytes: int) -> None:
        if torch._C._cuda_getDevice() == self._device:
            stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(self._device))
            self._check(self._launch(self._kernel.func, *grid, *block, shared_bytes, stream, places, None))
            launched.count += 1
        else:
            with torch.cuda.device(self._device):
                self._with(grid, block, places, shared_bytes)


def laid_out(arguments: Sequence[Any]) -> tuple[Any, Any]:
    """Arguments of a kernel as it reads them, in memory of this thread that the next launch overwrites, and
    pointers to where each begins.

    Tensors, doubles and ints have eight bytes each, of which an int takes the first four; those of a tuple
    are a struct.
    """
    values: list[int] = []
    begins = []
    for given in arguments:
        begins.append(8 * len(values))
        if type(given) is int:  # most are, and microseconds count
            values.append(given)
        elif isinstance(given, tuple):
            values += map(_eight_bytes, given)
        else:
            values.append(_eight_bytes(given))
    room, places = _room(len(values), tuple(begins))
    room[:] = values
    return room, places


def _room(count: int, begins: tuple[int, ...]) -> tuple[Any, Any]:
    rooms = _rooms.of_layouts
    if (found := rooms.get((count, begins))) is None:
        room = (ctypes.c_int64 * count)()
        first = ctypes.addressof(room)
        places = (ctypes.c_void_p * len(begins))(*[first + begin for begin in begins])
        found = rooms[count, begins] = room, places
    return found


def _eight_bytes(x: torch.Tensor | float) -> int:
    """Convert a tensor, double or int to the eight bytes of a kernel argument."""
    if isinstance(x, torch.Tensor):
        return x.data_ptr()
    found: int = _BITS.unpack(_DOUBLE.pack(x))[0] if isinstance(x, float) else x
    return found
