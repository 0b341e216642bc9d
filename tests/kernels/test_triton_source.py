"""Kernels in Triton's language: what machine code depends on, where it is kept, what a launch is given."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from neula.kernels import ahead, triton_source
from neula.kernels.triton_source import Tiles, TritonKernel, jit, tl

FACTOR = 3


@jit
def _helper(x):
    return FACTOR * x


@jit(do_not_specialize=["n"])
def _scale(x, out, n, stride, limit, precise: tl.float64, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    i = tl.arange(0, BLOCK)
    y = _helper(tl.load(x + i * stride, mask=i < n, other=0.0).to(WIDE)) * precise
    tl.store(out + i, tl.minimum(y, limit), mask=i < n)


def _variant(*args: Any) -> tuple[tuple, list]:
    assert isinstance(_scale, TritonKernel)
    return _scale._variant(args)


def test_what_machine_code_depends_on() -> None:
    x = torch.zeros(8)
    variant, values = _variant(x, x[1:], 16, 1, 0.5, 2, 32, torch.float64)
    assert variant == ("*fp32:16", "*fp32", "i32", 1, "fp32", "fp64", 32, torch.float64)
    half, two = (
        ctypes.c_int32.from_buffer(ctypes.c_float(0.5)),
        ctypes.c_int64.from_buffer(ctypes.c_double(2)),
    )
    assert values == [x.data_ptr(), x.data_ptr() + 4, 16, half.value, two.value]


@pytest.mark.parametrize(
    ("stride", "kind"),
    [
        (1, 1),
        (0, "i32:16"),
        (7, "i32"),
        (48, "i32:16"),
        (-16, "i32:16"),
        (2**31, "i64:16"),
        (2**31 + 1, "i64"),
    ],
)
def test_numbers_that_are_worth_machine_code_of_their_own(stride: int, kind: int | str) -> None:
    x = torch.zeros(1)
    variant, values = _variant(x, None, 1, stride, True, 0.0, 32, torch.float32)
    assert variant[1:5] == (None, "i32", kind, "u1")
    assert values[1:-1] == ([1, 1] if kind == 1 else [1, stride, 1])


def test_names_of_files_follow_what_a_kernel_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = TritonKernel(_scale.function, ("n",))
    assert {reached.__name__ for reached in kernel.reached()} == {"_scale", "_helper"}
    before = kernel.file_name((1,), ())
    assert before == TritonKernel(_scale.function, ("n",)).file_name((1,), ())
    assert before != kernel.file_name((2,), ())
    assert before != kernel.file_name((1,), (("num_warps", 8),))
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 5)
    assert before != TritonKernel(_scale.function, ("n",)).file_name((1,), ())


COMPILED = """
import os, sys
sys.path.insert(0, {folder!r})
import torch
from test_triton_source import _scale
from neula.kernels import triton_source
torch.cuda.get_device_capability = lambda device: (9, 0)
triton_source.loaded = lambda code, name, *_: print(name, code[:4] == b"\\x7fELF", "triton" in sys.modules)
_scale._made_ready(("*fp32:16", "*fp32", "i32", 1, "fp32", "fp64", 32, torch.float64), (), None)
"""


def test_compiled_without_a_gpu_and_kept(tmp_path: Path) -> None:
    """The second process does not import Triton."""
    pytest.importorskip("triton")
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    }
    environment.pop("TRITON_INTERPRET", None)
    script = COMPILED.format(folder=str(Path(__file__).parent))
    for imported in (True, False):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["_scale", "True", str(imported)]


class Driver:
    """Stand-in for the functions of CUDA's driver that are called."""

    def __init__(self, result: int = 0) -> None:
        self.result, self.given = result, []

    def cuTensorMapEncodeTiled(self, room: ctypes.c_void_p, *given: Any) -> int:
        ctypes.memset(room, 7, 128)
        self.room, self.given = room, list(given)
        return self.result


def test_tiles_are_encoded_from_the_last_dimension_on() -> None:
    x = torch.zeros(4, 64, 32, dtype=torch.float16)
    driver = Driver()
    tiles = Tiles(x, (1, 16, 32))
    assert tiles.type == "tensordesc<fp16[1, 16, 32]>"
    words = tiles.words(2, (1, 16, 32), driver)
    assert words == (*[0x0707070707070707] * 16, 4, 64, 32, 2048, 32, 1)
    assert driver.room.value % 64 == 0
    kind, rank, address, shape, strides, box, steps, *rest = driver.given
    assert (kind, rank, address.value) == (6, 3, x.data_ptr())
    assert (list(shape), list(strides)[:2], list(box), list(steps)) == (
        [32, 64, 4],
        [64, 4096],
        [32, 16, 1],
        [1] * 3,
    )
    assert rest == [0, 2, 2, 0]
    triton_source._encoded.cache_clear()
    with pytest.raises(RuntimeError, match=r"cannot be moved in tiles of \(1, 16, 32\)"):
        tiles.words(2, (1, 16, 32), Driver(result=1))


def test_a_launch_says_where_arguments_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    class Launch:
        def of_words(self, *given: Any) -> None:
            self.given = given

    monkeypatch.setattr(triton_source, "driver", Driver)
    launch, x = Launch(), torch.zeros(2, 3, 8, dtype=torch.float16)
    ready = triton_source._Ready(launch, (128, 1, 1), 64, [(2, (1, 16, 32))])
    ready((5, 1), [11, Tiles(x, (1, 16, 32)), 12])
    grid, block, words, begins, shared_bytes = launch.given
    assert (grid, block, shared_bytes) == ((5, 1, 1), (128, 1, 1), 64)
    assert words == [11, *[0x0707070707070707] * 16, 2, 3, 8, 24, 8, 1, 12, 0, 0]
    assert begins == (0, 8, *range(8 + 128, 8 + 128 + 8 * 9, 8))
    launch.given = ()
    ready((0,), [])
    assert launch.given == ()


def test_the_list_of_what_is_compiled_ahead_names_kernels_that_are_there() -> None:
    known = json.loads(ahead.LIST.read_text())
    for module, name, variant, options in known["triton"]:
        kernel = getattr(import_module(module), name)
        assert len(kernel.names) == len(variant), name
        assert set(options) <= {"num_warps", "num_stages", "maxnreg", "enable_fp_fusion"}
    for name, macros in known["cuda"]:
        assert "__global__" in ahead.cuda_source.source_of(name, macros)
    assert ahead.text(known) == ahead.LIST.read_text()
