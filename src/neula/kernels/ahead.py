"""Machine code to include in a wheel: ``python -m neula.kernels.ahead``, on any machine with Triton.

``ahead.json`` lists which variants of the kernels in Triton's language, and which sources in CUDA C++: what
``python -m benchmarks first --record`` has met on a GPU. They are compiled for :data:`CAPABILITIES` into the
folder ``ahead``; CUDA C++ is left out where there is no NVRTC.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from neula.kernels import cuda_source, triton_source
from neula.kernels.cuda_source import Capability
from neula.kernels.whole_file import write_checked

CAPABILITIES: tuple[Capability, ...] = ((8, 0), (9, 0), (10, 0))
"""A100, H100 and H200, B200; the first also serves others of its generation."""

LIST = Path(__file__).with_name("ahead.json")


def text(found: dict[str, list[Any]]) -> str:
    """Text of ``ahead.json``, with a line for each kernel."""
    parts = [
        f'"{kind}": [\n' + ",\n".join(json.dumps(entry) for entry in entries) + "\n]"
        for kind, entries in found.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def build(capability: Capability, *, index: int = 0, among: int = 1) -> int:
    """Compile for one compute capability every ``among``-th of the list, and say how many there are."""
    folder = LIST.parent / "ahead" / "sm_{}{}".format(*capability)
    known = json.loads(LIST.read_text())
    count = 0
    for module, name, variant, options in known["triton"][index::among]:
        if triton_source.only_by_triton(variant, capability):
            continue
        kernel = getattr(import_module(module), name)
        taken = tuple(map(_read, variant)), tuple(options.items())
        write_checked(folder / kernel.file_name(*taken), kernel.compiled(*taken, capability))
        count += 1
    for name, macros in known["cuda"][index::among] if nvrtc() else []:
        binary = cuda_source.by_nvrtc(cuda_source.source_of(name, macros), capability, nvrtc())
        write_checked(folder / cuda_source.file_name(name, macros), binary)
        count += 1
    return count


@lru_cache
def nvrtc() -> Any:
    """The compiler of CUDA C++ of this torch, or of the package nvidia-cuda-nvrtc; None without."""
    if torch.version.cuda:
        return torch.cuda._utils._get_gpu_rtc_library()  # type: ignore[attr-defined]
    spec = find_spec("nvidia")
    places = list(spec.submodule_search_locations or ()) if spec else []
    found = None
    for name in ("libnvrtc-builtins.so.*", "libnvrtc.so.*"):  # the second looks for the first
        for file in (file for place in places for file in Path(place).rglob(name)):
            found = ctypes.CDLL(str(file))
    return found


def _read(x: Any) -> Any:
    return getattr(torch, x["dtype"]) if isinstance(x, dict) else x


def main() -> None:
    """Compile all, in as many processes as there are cores."""
    among = os.cpu_count() or 1
    with ProcessPoolExecutor(among) as pool:
        for capability in CAPABILITIES:
            made = [pool.submit(build, capability, index=i, among=among) for i in range(among)]
            count = sum(part.result() for part in made)
            print("sm_{}{}: {} kernels".format(*capability, count), file=sys.stderr)
    if nvrtc() is None:
        print(
            "without those in CUDA C++, for which NVRTC is missing: pip install nvidia-cuda-nvrtc",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
