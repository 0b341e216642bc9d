"""The first call of a fresh process, the second one, and new shapes, beside torch.

Each case has processes of its own: one for torch, one where nothing is kept, one with what that one has left.
They import torch, make the input, and then call; the import of neula counts, from bytecode as pip leaves it.
Caches are folders of their own: those of the user are not touched.
"""

from __future__ import annotations

import compileall
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import neula  # its functions are imported when they are first named

if TYPE_CHECKING:
    from benchmarks.harness import Results

NAME = "first"

NEW = 20
"""Shapes of a series, each called once."""

TOGETHER = 3
"""Cases at a time: most of a process is the import of torch, on a core of its own."""

Call = Callable[[Any, "Case", tuple[int, ...]], Any]


@dataclass(frozen=True)
class Case:
    """A function and a shape.

    Attributes
    ----------
    function : str
    shape : tuple of int
        Of A, with the number of matrices first for a batch.
    near : bool
        Whether a series of shapes near this one follows.
    dtype : str
    """

    function: str
    shape: tuple[int, ...]
    near: bool = False
    dtype: str = "float32"

    @property
    def label(self) -> str:
        return "x".join(map(str, self.shape))


CASES = (
    Case("qr", (4096, 1024)),
    Case("qr", (300, 40)),
    Case("qr", (100, 64, 32)),
    Case("solve", (1000, 1000), dtype="float64"),
    Case("cholesky", (2000, 2000), dtype="float64"),
    Case("svd_lowrank", (4000, 1000)),
    Case("polar", (1024, 1024)),
    Case("lstsq", (64, 32), dtype="float64"),
    Case("lstsq", (2000, 500), dtype="float64"),
    Case("eigh", (20, 512, 512)),
    Case("svd", (1024, 1024)),
    Case("qr", (3000, 700), near=True),
    Case("qr", (600, 80), near=True),
    Case("cholesky", (500, 500), near=True, dtype="float64"),
    Case("lstsq", (600, 80), near=True, dtype="float64"),
    Case("solve", (700, 700), near=True, dtype="float64"),
)

_BOTH = ("float32", "float64")
_COMPLEX = ("complex64", "complex128")
_TALL = ((300, 40), (999, 100), (3001, 701), (2048, 512), (20000, 2000), (1000, 16, 6), (64, 200, 50))
RECORDED = [
    Case(function, shape, dtype=dtype)
    for function, dtypes, shapes in (
        ("qr", _BOTH, (*_TALL, (50, 20), (320, 64), (500, 256, 128), (333, 30, 17))),
        ("qr", ("float32",), ((8192, 8192), (40000, 128), (64, 512, 512))),
        ("lstsq", _BOTH, _TALL),
        ("solve", _BOTH, tuple((n, n) for n in (50, 333, 512, 2048, 3001, 8192))),
        ("solve", _BOTH, tuple((100, n, n) for n in (16, 50, 64))),
        ("cholesky", _BOTH, tuple((n, n) for n in (64, 333, 500, 1024, 4096))),
        ("cholesky", _BOTH, tuple((100, n, n) for n in (16, 50, 128))),
        ("polar", ("float32",), tuple((n, n) for n in (200, 333, 2048))),
        ("svd_lowrank", ("float32",), ((999, 333), (2048, 2048))),
        ("lu_factor", ("float32",), tuple((n, n) for n in (333, 2048, 8192))),
        ("tsqr", ("float32",), ((32768, 128), (10001, 50))),
        ("matmul", ("float32",), ((1024, 1024), (999, 333))),
        (
            "eigh",
            ("float32",),
            ((100, 32, 32), (40, 176, 176), (40, 333, 333), (8, 1024, 1024), (6144, 6144)),
        ),
        ("eigh", ("float64",), ((100, 32, 32), (40, 333, 333))),
        ("svd", ("float32",), ((333, 333), (2048, 512), (100, 64, 32), (500, 8, 8))),
        ("qr", _COMPLEX, ((999, 100), (2048, 512))),
        ("solve", _COMPLEX, ((50, 50), (2048, 2048))),
        ("lstsq", _COMPLEX, ((999, 100), (2048, 512))),
        ("cholesky", _COMPLEX, ((500, 500), (2048, 2048))),
        ("pinv", ("float64",), ((300, 40), (999, 100))),
    )
    for dtype in dtypes
    for shape in shapes
]
"""Beside the cases, what the list of kernels to compile ahead is made from."""


def run(device: torch.device) -> Results:
    """Time all of them."""
    from benchmarks.harness import Results  # not in the processes that are timed: it knows much of neula

    results = Results(NAME, device)
    compileall.compile_dir(str(Path(neula.__file__).parent), quiet=1)
    with ThreadPoolExecutor(TOGETHER) as pool:
        for case, row in zip(CASES, pool.map(_row, CASES), strict=True):
            results.add(**row, within=_is_within(case, row))
    return results


def _row(case: Case) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        peer = _process("torch", case, Path(folder))
        nothing, kept = (_process("neula", case, Path(folder)) for _ in range(2))
    return {
        "function": case.function,
        "shape": ("near " if case.near else "") + case.label,
        "dtype": case.dtype,
        "peer_ms": peer["ms"],
        "import_ms": kept["import_ms"],
        "nothing_kept_ms": nothing["ms"],
        "kept_ms": kept["ms"],
        "worst_ms": kept["worst_ms"],
        "second_ms": kept["second_ms"],
        "steady_ms": kept["steady_ms"],
    }


def _is_within(case: Case, row: dict[str, Any]) -> bool:
    if case.near:
        return row["kept_ms"] <= 2 * row["steady_ms"] and row["worst_ms"] <= 50
    first = row["nothing_kept_ms"] <= 1000 and row["kept_ms"] <= 400
    return first and row["second_ms"] <= 3 * row["steady_ms"]


def record(together: int = 6) -> dict[str, list[Any]]:
    """Which kernels all cases ask for, in the form of ``neula/kernels/ahead.json``."""
    cases = [*CASES, *RECORDED]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(together) as pool:
        found = pool.map(lambda case: _process("record", case, Path(folder)), cases)
        lists = list(found)
    merged: dict[str, list[Any]] = {"triton": [], "cuda": []}
    for part in lists:
        for kind, entries in merged.items():
            entries += [entry for entry in part[kind] if entry not in entries]
    return {kind: sorted(entries, key=json.dumps) for kind, entries in merged.items()}


def _process(what: str, case: Case, folder: Path) -> dict[str, Any]:
    kept = {"TRITON_CACHE_DIR": "triton", "XDG_CACHE_HOME": "user", "CUDA_CACHE_PATH": "cuda"}
    environment = {**os.environ, **{name: str(folder / place) for name, place in kept.items()}}
    place = CASES.index(case) if case in CASES else len(CASES) + RECORDED.index(case)
    command = [sys.executable, "-m", "benchmarks.first", what, str(place)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{what} of {case}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _arguments(case: Case, shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    dtype = getattr(torch, case.dtype)
    a = torch.randn(*shape, device="cuda", dtype=dtype, generator=generator)
    if case.function == "cholesky":
        a = a @ a.mH / shape[-1] + torch.eye(shape[-1], device="cuda", dtype=dtype)
    b = torch.randn(*shape[:-1], 1, device="cuda", dtype=dtype, generator=generator)
    return {"lstsq": (a, b), "solve": (a, b), "matmul": (a, a.mT)}.get(case.function, (a,))


def _of_neula(case: Case, arguments: tuple[torch.Tensor, ...]) -> None:
    more = {"svd_lowrank": (20,)}.get(case.function, ())
    function: Any = getattr(neula, case.function)
    function(*arguments, *more)


def _of_torch(case: Case, arguments: tuple[torch.Tensor, ...]) -> None:
    if case.function == "polar":
        torch.linalg.svd(*arguments, full_matrices=False)
    elif case.function == "svd_lowrank":
        torch.svd_lowrank(arguments[0], 20)
    else:
        getattr(torch.linalg, case.function)(*arguments)


def _seconds(call: Callable[..., None], case: Case, shape: tuple[int, ...]) -> float:
    arguments = _arguments(case, shape)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call(case, arguments)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def _measured(call: Callable[..., None], case: Case) -> dict[str, float]:
    """Milliseconds of the first call, or the mean of a series of new shapes, and of what comes after it."""
    begin = time.perf_counter()
    if call is _of_neula:
        getattr(neula, case.function)
    imported = 1e3 * (time.perf_counter() - begin)
    calls = [1e3 * _seconds(call, case, case.shape) for _ in range(12)]
    new = [imported + calls[0]]
    if case.near:
        draw = random.Random(5)
        square = case.shape[-2] == case.shape[-1]
        new = []
        for _ in range(NEW):
            m, n = (int(size * draw.uniform(0.9, 1.1)) for size in case.shape[-2:])
            new.append(1e3 * _seconds(call, case, (n, n) if square else (m, n)))
    steady = statistics.median(calls[5:])
    return {
        "ms": statistics.mean(new),
        "import_ms": imported,
        "worst_ms": max(new),
        "second_ms": calls[1],
        "steady_ms": steady,
    }


def _recorded(case: Case) -> dict[str, list[Any]]:
    """Kernels that a case compiles, in the form of ``neula/kernels/ahead.json``."""
    from neula.kernels import cuda_source, triton_source

    def written(x: object) -> object:
        return {"dtype": str(x).removeprefix("torch.")} if isinstance(x, torch.dtype) else x

    for _ in range(4):  # from the second on in a graph, whose input lies elsewhere
        _seconds(_of_neula, case, case.shape)
    return {
        "triton": [
            [module, name, [written(x) for x in variant], dict(options)]
            for module, name, variant, options in triton_source.asked
        ],
        "cuda": [list(source) for source in cuda_source.asked_for],
    }


def main() -> None:
    """One process of a case."""
    what, place = sys.argv[1:]
    case = [*CASES, *RECORDED][int(place)]
    if what == "record":
        print(json.dumps(_recorded(case)))
    else:
        print(json.dumps(_measured(_of_neula if what == "neula" else _of_torch, case)))


if __name__ == "__main__":
    main()
