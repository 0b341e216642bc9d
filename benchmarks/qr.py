"""QR against cuSOLVER or LAPACK (through torch), over the shapes of the paper."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import neula
from benchmarks.floor import Machine
from benchmarks.harness import Results
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.engines import select_engine
from neula.engines.formats import FormatName
from neula.papers.measuring import median_seconds

Shape = tuple[int, int]

GPU_SHAPES: list[Shape] = [
    (32768, 32768),
    (32768, 16384),
    (16384, 16384),
    (131072, 4096),
    (524288, 1024),
    (4194304, 128),
    (8192, 8192),
    (4096, 4096),
    (16384, 1024),
    (1024, 1024),
]
ODD_SHAPES: list[Shape] = [(12345, 6789), (40000, 10000), (100003, 257), (3000, 2999)]
"""Beside :data:`ROUND_SHAPES`, in one low-precision pass: there should be no cliffs."""
ROUND_SHAPES: list[Shape] = [(12288, 6656), (40960, 10240), (100352, 256), (3072, 3072)]
DOUBLE_SHAPES: list[Shape] = [(32768, 16384)]
CPU_SHAPES: list[Shape] = [(16384, 2048), (65536, 512), (4096, 4096), (262144, 64)]

PRODUCTS = {"fp16": ("fp16", 1), "fp32": ("fp16", 3), "fp64": ("fp64", 1)}
"""Format of the fastest products to an accuracy, and how many make one: error correction takes three."""


def run(device: torch.device, accuracies: tuple[FormatName, ...] | None = None, repeats: int = 5) -> Results:
    """Time ``neula.qr`` at each accuracy beside ``torch.linalg.qr`` (with Q) and ``torch.geqrf`` (without).

    Matrices are random normal and row-major, as users of torch have them; ``columns_ms`` is the time for a
    column-major one. ``tflops`` count ``2 m n^2`` operations, and the floor is the time for as many, by the
    fastest product to that accuracy, or for reading A and writing Q. ``rgsqrf_ms`` is one pass of the
    algorithm alone, in place and in the cheapest format: without the checks, the scaled copy and the
    certificate that ``neula.qr`` adds, and without a second pass.
    """
    gpu = device.type == "cuda"
    results = Results("qr", device)
    machine = Machine.measured(device, ("fp16", "fp64")) if gpu else None
    for (m, n), dtype, todo in _cases(gpu):
        a = torch.randn(m, n, device=device, dtype=dtype)
        columns = a.mT.contiguous().mT
        bare = _bare_rgsqrf(a, "fp16" if gpu else "fp32", repeats)
        few = 3 if m * n < 2**28 else 1
        peer = median_seconds(partial(torch.linalg.qr, columns), few)
        without_q = median_seconds(partial(torch.geqrf, columns), few)
        for accuracy in accuracies or todo:
            seconds = median_seconds(partial(neula.qr, a, accuracy=accuracy), repeats, warmup=3)
            factors = neula.qr(a, accuracy=accuracy)
            row: dict[str, Any] = {"m": m, "n": n, "accuracy": accuracy, "ms": 1e3 * seconds}
            row["columns_ms"] = 1e3 * median_seconds(
                partial(neula.qr, columns, accuracy=accuracy), repeats, 3
            )
            if machine is not None:
                format, number = PRODUCTS[accuracy]
                floor, bound = machine.floor(number * 2.0 * m * n * n, 2 * a.nbytes, format)
                row |= {"floor_ms": 1e3 * floor, "bound_by": bound, "gap": seconds / floor}
            results.add(
                **row,
                rgsqrf_ms=1e3 * bare,
                tflops=2 * m * n * n / seconds / 1e12,
                geqrf_ms=1e3 * without_q,
                torch_ms=1e3 * peer,
                speedup=without_q / seconds,
                speedup_with_q=peer / seconds,
                residual=factors.certificate.residual,
                orthogonality=factors.certificate.orthogonality,
                method=factors.attempts[-1].method,
                certified=factors.converged,
            )
            del factors
        del a, columns
    return results


def _cases(gpu: bool) -> Iterator[tuple[Shape, torch.dtype, tuple[FormatName, ...]]]:
    """Shapes, dtypes and accuracies."""
    if not gpu:
        yield from ((shape, torch.float32, ("fp32",)) for shape in CPU_SHAPES)
        return
    yield from ((shape, torch.float32, ("fp16", "fp32")) for shape in GPU_SHAPES)
    pairs = zip(ODD_SHAPES, ROUND_SHAPES, strict=True)
    yield from ((shape, torch.float32, ("fp16",)) for pair in pairs for shape in pair)
    yield from ((shape, torch.float64, ("fp64",)) for shape in DOUBLE_SHAPES)


def _bare_rgsqrf(a: torch.Tensor, format: str, repeats: int) -> float:
    engine = select_engine("auto", a.device).using(format)
    work = engine.empty(*a.shape)

    def copy() -> None:
        work.copy_(a)

    def copy_and_factorize() -> None:
        work.copy_(a)
        rgsqrf(work, engine, overwrite_a=True)

    return median_seconds(copy_and_factorize, repeats, warmup=2) - median_seconds(copy, repeats)
