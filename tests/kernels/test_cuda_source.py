"""Kernels in CUDA C++ are compiled once a machine, and launched with the arguments that were given."""

from __future__ import annotations

import ctypes
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import platformdirs
import pytest
import torch

from neula.kernels import cuda_source, dispatch
from neula.kernels.whole_file import cache_folder, keep, read_checked


class Nvrtc:
    """Stand-in for the functions of NVRTC that are called: machine code is the source in capitals."""

    def __init__(self) -> None:
        self.sources: list[bytes] = []
        self.options: list[bytes] = []
        self.alive = 0

    def nvrtcCreateProgram(self, program: Any, source: bytes, *rest: object) -> int:
        self.sources.append(source)
        self.alive += 1
        return 0

    def nvrtcCompileProgram(self, program: Any, count: int, options: Any) -> int:
        assert count == 1
        self.options.append(ctypes.cast(options, ctypes.POINTER(ctypes.c_char_p))[0])
        return int(b"error" in self.sources[-1])

    def _size(self, program: Any, size: Any) -> None:
        ctypes.cast(size, ctypes.POINTER(ctypes.c_size_t))[0] = len(self.sources[-1])

    def _text(self, program: Any, room: Any) -> None:
        room.raw = self.sources[-1].upper()

    nvrtcGetCUBINSize = nvrtcGetProgramLogSize = _size
    nvrtcGetCUBIN = nvrtcGetProgramLog = _text

    def nvrtcDestroyProgram(self, program: Any) -> None:
        self.alive -= 1


@pytest.fixture(name="utils")
def _utils(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """In the place of ``torch.cuda._utils``; binaries are loaded that are in capitals."""
    monkeypatch.setenv("NEULA_CACHE_DIR", str(tmp_path / "cache"))

    def load(binary: bytes) -> bytes:
        if binary != binary.upper():
            raise RuntimeError("no binary")
        return binary

    nvrtc = Nvrtc()
    utils = SimpleNamespace(_get_gpu_rtc_library=lambda: nvrtc, _cuda_load_module=load, nvrtc=nvrtc)
    monkeypatch.setattr(torch.cuda, "_utils", utils)
    monkeypatch.setattr(cuda_source, "source_of", lambda name, macros="": f"{name} {macros}")
    return utils


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("*.*"))


def test_compiled_once(utils: SimpleNamespace, tmp_path: Path) -> None:
    for _ in range(2):
        assert cuda_source._loaded("one", "kernel", (9, 0), utils) == b"ONE KERNEL"
    assert utils.nvrtc.options == [b"--gpu-architecture=sm_90"]
    assert utils.nvrtc.alive == 0
    (file,) = kept(tmp_path)
    assert read_checked(file) == b"ONE KERNEL"
    for macros, capability in (("other", (9, 0)), ("kernel", (8, 0))):
        assert cuda_source._loaded("one", macros, capability, utils) == f"ONE {macros}".upper().encode()
    assert len(utils.nvrtc.sources) == len(kept(tmp_path)) == 3


def test_what_is_kept_may_be_broken_or_impossible(utils: SimpleNamespace, tmp_path: Path) -> None:
    cuda_source._loaded("one", "kernel", (9, 0), utils)
    (file,) = kept(tmp_path)
    file.write_bytes(b"half of it")
    assert cuda_source._loaded("one", "kernel", (9, 0), utils) == b"ONE KERNEL"
    assert read_checked(file) == b"ONE KERNEL"
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("a file in the place of the folder")
    assert cuda_source._loaded("one", "kernel", (9, 0), utils) == b"ONE KERNEL"


def test_what_the_compiler_says(utils: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="AN ERROR"):
        cuda_source._loaded("an", "error", (9, 0), utils)
    assert utils.nvrtc.alive == 0
    assert not kept(tmp_path)


def test_a_folder_that_cannot_be_written_is_said_once(
    utils: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is where the folder would be."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("NEULA_CACHE_DIR", str(tmp_path / "file"))
    folder = cuda_source.kept_in((9, 0))[0]
    with pytest.warns(RuntimeWarning, match="NEULA_CACHE_DIR") as said:
        keep(folder / "kernel", b"code")
    assert [str(folder) in str(each.message) for each in said] == [True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cuda_source._loaded("one", "kernel", (9, 0), utils) == b"ONE KERNEL"


def test_the_cache_folder_of_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEULA_CACHE_DIR")
    assert cache_folder() == platformdirs.user_cache_path("neula")
    monkeypatch.setenv("NEULA_CACHE_DIR", "~/elsewhere")
    assert cache_folder() == Path.home() / "elsewhere"


def test_what_is_included_is_in_its_place() -> None:
    for file in Path(cuda_source.__file__).parent.glob("*.cu"):
        assert "#include" not in cuda_source.source_of(file.stem), file
    assert "two_sum" in cuda_source.source_of("doubled")
    assert cuda_source.source_of("doubled", "#define VECTORS 1\n").startswith("#define VECTORS 1\n")


def test_arguments_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pointers, and ints where the kernel reads four bytes."""
    seen: list[Any] = []

    def launched(*given: Any) -> int:
        function, *sizes, stream, places, extra = given
        assert (function, sizes, stream.value, extra) == ("function", [3, 1, 1, 64, 1, 1, 512], 7, None)
        seen.append(ctypes.cast(places[0], ctypes.POINTER(ctypes.c_void_p))[0])
        seen.extend(ctypes.cast(place, ctypes.POINTER(ctypes.c_int))[0] for place in list(places)[1:])
        return 0

    utils = SimpleNamespace(
        _get_gpu_runtime_library=lambda: SimpleNamespace(cuLaunchKernel=launched),
        _check_cuda=lambda status: seen.append(("status", status)),
    )
    monkeypatch.setattr(torch.cuda, "_utils", utils)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 6 + device, raising=False)
    x, before = torch.ones(3), dispatch.launched.count
    module = SimpleNamespace(name=SimpleNamespace(func="function"))
    launch = cuda_source._Launch(module, "name", torch.device("cuda", 1))
    launch((3, 1, 1), (64, 1, 1), [x, 5, -6, True], 512)
    assert dispatch.launched.count == before + 1
    assert seen == [x.data_ptr(), 5, -6, 1, ("status", 0)]


def test_arguments_as_they_lie() -> None:
    """Doubles are doubles, and a tuple is one struct."""
    x = torch.ones(3)
    room, places = cuda_source.laid_out([x, (x, 2, -3), 1.5, 7])
    assert [place - ctypes.addressof(room) for place in places] == [0, 8, 32, 40]
    assert list(room) == [x.data_ptr(), x.data_ptr(), 2, -3, room[4], 7]
    assert ctypes.cast(ctypes.byref(room, 32), ctypes.POINTER(ctypes.c_double))[0] == 1.5


def test_what_cannot_be_compiled_is_not_ready(
    utils: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(dispatch.NotReadyError, match="NVRTC: AN ERROR"):
        cuda_source.compiled("an", "kernel", torch.device("cuda", 0), "error")


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, and loaded from the cache folder."""
    monkeypatch.setenv("NEULA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cuda_source, "__file__", str(tmp_path / "cuda_source.py"))
    body = "{ if (threadIdx.x < n) x[threadIdx.x] += PLUS; }"
    source = f'extern "C" __global__ void add(double* x, int n) {body}'
    (tmp_path / "sum.cu").write_text(source)
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.zeros(3, dtype=torch.float64, device=device)
    for times in (1, 2):
        for known in (cuda_source.compiled, cuda_source._module, cuda_source.source_of):
            known.cache_clear()
        cuda_source.compiled("sum", "add", device, "#define PLUS 1.5\n")((1, 1, 1), (32, 1, 1), [x, 2])
        assert x.tolist() == [1.5 * times, 1.5 * times, 0]
        assert len(list((tmp_path / "kernels").rglob("*.cubin"))) == 1
    for known in (cuda_source.compiled, cuda_source._module, cuda_source.source_of):
        known.cache_clear()
