"""Each kernel alone beside its floor: the larger of the times for its operations and for its bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.floor import Machine
from benchmarks.harness import Results
from neula.kernels import mgs_into, probe_errors
from neula.kernels.doubled.doubled import Doubled
from neula.kernels.products.gemm import corrected_gemm
from neula.kernels.qr.householder import apply_tiles, factor_tiles
from neula.kernels.qr.tall import tall_gram, tall_product
from neula.papers.measuring import sustained_seconds


class Case(NamedTuple):
    """A kernel at work.

    Attributes
    ----------
    kernel, shape : str
    unit : str
        What does most of the operations: ``"fp16"`` or ``"fp64"`` matrix units, or ``"fp32"`` ones without.
    flops, bytes : float
        That it cannot do without.
    run : callable
    """

    kernel: str
    shape: str
    unit: str
    flops: float
    bytes: float
    run: Callable[[], Any]


def run(device: torch.device) -> Results:
    """Time the kernels on a GPU, many launches in a queue, beside rates measured in the same run."""
    if device.type != "cuda":
        raise SystemExit("the kernels run on a GPU: --device cuda")
    results = Results("kernels", device)
    machine = Machine.measured(device, ("fp16", "fp32", "fp64"))
    makers: list[Callable[[torch.device], Case]] = [_mgs, _probes, _gemm, _factor, _apply, _gram, _product]
    for m, n in ((32768, 16384), (2000, 500)):
        for maker in (_residual, _plain_residual, _transposed_product, _plain_transposed_product):
            makers.append(partial(maker, m=m, n=n))
    for make in makers:
        case = make(device)
        seconds = sustained_seconds(case.run)
        floor, bound = machine.floor(case.flops, case.bytes, case.unit)
        results.add(
            kernel=case.kernel,
            shape=case.shape,
            gflop=case.flops / 1e9,
            mbytes=case.bytes / 1e6,
            unit=case.unit,
            unit_tflops=machine.products[case.unit] / 1e12,
            copy_gbytes=machine.bandwidth / 1e9,
            floor_ms=1e3 * floor,
            bound_by=bound,
            ms=1e3 * seconds,
            gap=seconds / floor,
        )
    return results


def _uniform(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.rand(shape, device=device) * 2 - 1


def _mgs(device: torch.device) -> Case:
    """``n`` steps, each a sum and an update of what is left; a tile in, Q and R out."""
    count, m, n = 4096, 256, 32
    a, r = _uniform(device, count, m, n), torch.empty(count, n, n, device=device)
    size = 4 * count * (2 * m * n + n * n)
    run = partial(mgs_into, a, torch.empty_like(a), r)
    return Case("mgs", f"{count} of {m} x {n}", "fp32", 2.0 * count * m * n * n, size, run)


def _probes(device: torch.device) -> Case:
    """Four vectors, each times A, times Q twice and times Q^T."""
    count, m, n = 4096, 256, 32
    a = _uniform(device, count, m, n)
    q, r = torch.empty_like(a), torch.empty(count, n, n, device=device)
    mgs_into(a, q, r)
    g = torch.randn(n, 4, device=device, dtype=torch.float64)
    size = 4 * count * (2 * m * n + n * n)
    run = partial(probe_errors, a, q, r, torch.ones(count, n, device=device), g, g)
    return Case("probes", f"{count} of {m} x {n}", "fp32", 32.0 * count * m * n, size, run)


def _gemm(device: torch.device) -> Case:
    """Three products; operands are read twice, for scales and to be split, their halves written and read."""
    k = 8192
    run = partial(corrected_gemm, _uniform(device, k, k), _uniform(device, k, k))
    return Case("gemm, fp16_cor", f"{k} x {k} x {k}", "fp16", 6.0 * k**3, 36.0 * k * k, run)


def _factor(device: torch.device) -> Case:
    """Products of three parts; a tile in, V and R out."""
    count, m, n = 1024, 256, 128
    run = partial(factor_tiles, _uniform(device, count, m, n), m, "fp16_cor")
    size = 4 * count * (2 * m * n + n * n)
    return Case("householder: factor", f"{count} of {m} x {n}", "fp16", 6.0 * count * m * n * n, size, run)


def _apply(device: torch.device) -> Case:
    """Products of three parts; V and C in, Q out."""
    count, m, n = 1024, 256, 128
    reflectors, _ = factor_tiles(_uniform(device, count, m, n), m, "fp16_cor")
    run = partial(apply_tiles, reflectors, torch.eye(n, device=device).expand(count, n, n), "fp16_cor")
    size = 4 * count * (2 * m * n + n * n)
    return Case("householder: apply", f"{count} of {m} x {n}", "fp16", 6.0 * count * m * n * n, size, run)


def _gram(device: torch.device) -> Case:
    """``H^T (H + 2 L)``."""
    m, n = 4194304, 128
    run = partial(tall_gram, _uniform(device, m, n))
    return Case("tall: Gram matrix", f"{m} x {n}", "fp16", 4.0 * m * n * n, 4.0 * m * n, run)


def _product(device: torch.device) -> Case:
    """Three products without the lower left quarter of W; A in, Q out."""
    m, n = 4194304, 128
    w = torch.eye(n, device=device, dtype=torch.float64)
    run = partial(tall_product, _uniform(device, m, n), w, torch.full_like(w[0], 2048.0))
    return Case("tall: product", f"{m} x {n}", "fp16", 4.5 * m * n * n, 8.0 * m * n, run)


def _residual(device: torch.device, m: int, n: int) -> Case:
    """Eleven operations for each element, none of them on matrix units."""
    a, x, y = _doubles(device, m, n)
    return Case(
        "doubled: B - A X",
        f"{m} x {n}",
        "fp64",
        11.0 * m * n,
        a.nbytes,
        partial(Doubled.from_matrix(a).residual, x, y),
    )


def _transposed_product(device: torch.device, m: int, n: int) -> Case:
    """Two more operations than a residual, for the low part of Y."""
    a, _, y = _doubles(device, m, n)
    run = partial(Doubled.from_matrix(a).transposed_product, y, y * 2.0**-54)
    return Case("doubled: A^T Y", f"{m} x {n}", "fp64", 13.0 * m * n, a.nbytes, run)


def _plain_residual(device: torch.device, m: int, n: int) -> Case:
    """``B - A X`` by torch in plain float64, for comparison."""
    a, x, y = _doubles(device, m, n)
    return Case(
        "torch: B - A X",
        f"{m} x {n}",
        "fp64",
        2.0 * m * n,
        a.nbytes,
        partial(torch.baddbmm, y, a, x, alpha=-1),
    )


def _plain_transposed_product(device: torch.device, m: int, n: int) -> Case:
    a, _, y = _doubles(device, m, n)
    return Case("torch: A^T Y", f"{m} x {n}", "fp64", 2.0 * m * n, a.nbytes, partial(torch.bmm, a.mT, y))


def _doubles(device: torch.device, m: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A matrix and a vector for each of its sides."""
    return (
        _uniform(device, 1, m, n).double(),
        _uniform(device, 1, n, 1).double(),
        _uniform(device, 1, m, 1).double(),
    )
