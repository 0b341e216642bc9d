"""The thresholds that neula ships: of the emulated engine, of CPUs, of GPUs.

What ``neula tune`` has measured on a machine takes their place (``engines/tuned.py``). Where no other
machine is named, a number was measured on an H200 (CUDA) or on two cores of an AMD EPYC (CPU).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from neula.engines.formats import FP16_COR
from neula.engines.tuning import Recursion, Tuning

FAST_FP64 = frozenset({(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)})
"""Compute capabilities of P100, V100, A100, H100 and H200, B200. Others (6.1, 8.6, 8.9, 10.3, 12.0) multiply
fp64 at a 32nd of the rate of fp32 or less.

Source: throughput of native arithmetic instructions, in the CUDA C++ programming guide.
"""


GRAM_SCHMIDT = ("gram-schmidt fp32", "gram-schmidt fp64")
"""Where R comes from for small least-squares problems on a GPU with slow products in double precision."""

EMULATED = Tuning(
    ("fp16", "bf16", "tf32", "fp32", "fp64"), ("fp16", "fp32"), gram_part=0.0, cholesky=1, batched_cholesky=1
)
"""For the numerics of the papers, whose panels and widths it has; speed is no matter."""


@lru_cache(maxsize=2)
def cpu_tuning(formats: tuple[str, ...]) -> Tuning:
    """Thresholds of a CPU that multiplies in these formats."""
    return Tuning(
        formats,
        # bf16 halves the time of the products, but its iterations take longer than that saves.
        preconditioners=("fp32",),
        definite=("fp32", "fp64"),
        lapack=True,
        lapack_alone=1_000_000_000,
        cholesky_qr_columns=129,  # a kernel does the same for fewer
        in_torch=9216,  # where OpenBLAS takes threads for a product with one vector
        doubled_elements=1 << 12,  # what that takes is the time of calls: 64 x 32
        single=Recursion("cholesky2", 128),
        double=Recursion("cholesky2", 128),
        batched_elements=1 << 16,
        sketched_pivots=1200,
        lu_panel=384,  # narrower ones copy more of L for oneDNN, wider ones take longer than that saves
        lu_inner_panel=64,
        swaps=True,
        lu_in_blocks=1000,  # two cores of an Intel Xeon: 0.82 to 0.97 of the time by MKL; 1500: 0.95 to 1
        # 2000, one core of an AMD EPYC: 0.44 s, 0.41 by LU in single precision, whose bound is larger.
        direct=6000,
        direct_pivoted=256,
        direct_definite=4500,
        eigenvectors=20.0,
        direct_svd=4_000_000,
        direct_single=400,  # 256: 1.2 times the time of double precision; 512: 0.8
        doubled_order=64,
    )


def _orders_of_systems(*, fast_fp64: bool) -> dict[str, Any]:
    """From which order on, or up to which, linear systems are solved in which way."""
    orders: dict[str, Any] = {"direct": 6144, "direct_pivoted": 6144, "direct_definite": 16000}
    if not fast_fp64:
        return orders
    return orders | {
        "queued": 18000,  # 16384: 88 ms, and 98 by fp16 with pivoting, or 200 where that is too coarse
        "direct_definite": 17000,
        "queued_definite": 17000,  # 16384: 43 ms; by fp16 51, or 106 where that is too coarse
        "normal_equations": 256,  # 200: 0.78 ms, and 0.88 by mixed LU; 400: 0.73 and 0.77
        "harmless": 8192,  # 16384: 33 ms, and 87 by mixed LU
    }


@lru_cache(maxsize=8)
def cuda_tuning(
    capability: tuple[int, int],
    *,
    replayed_bytes: int = 0,
    corrected: bool = True,
    tournament_width: int = 32,
) -> Tuning:
    """Thresholds of a GPU.

    Parameters
    ----------
    capability : (int, int)
        Compute capability, ``(9, 0)`` for H100 and H200.
    replayed_bytes : int
        What CUDA graphs may take as an input.
    corrected : bool
        Whether the kernel for products with error correction runs.
    tournament_width : int
        Columns of a panel of the kernels for tournament pivoting; 0 where they do not run.
    """
    fast_fp64 = capability in FAST_FP64
    exact = ("fp32", "fp64")
    found = Tuning(
        ("fp16", "bf16", "tf32", *((FP16_COR, *exact) if corrected else exact)),
        # Data-center GPUs multiply fp64 on tensor cores, as fast as fp32 without them.
        preconditioners=("fp16", "fp64" if fast_fp64 else "fp32"),
        # Factors as accurate as float32 cost three times those in fp16, and those in fp64 twice as much
        # again.
        definite=("fp16", FP16_COR if corrected else "fp32", "fp64"),
        corrected=corrected,
        replayed_bytes=replayed_bytes,
        single=Recursion("cholesky32", 128),
        half=Recursion("cholesky32", 256) if corrected else None,
        # Panels in float64 are library calls, and 256 columns take half of the launches of 128.
        double=Recursion("cholesky", 256),
        # One of two H200, for 32768 x 16384 in fp16: 37 ms; by 512 columns 51, by 128 columns 120.
        spread=Recursion("cholesky32", 1024) if corrected else None,
        # 64 x 32: 0.48 ms, and 0.58. Beyond, BLAS takes several threads, and up to 44 ms on shared cores.
        by_host=250_000,
        by_host_kernel=1_000_000,
        by_host_system=3_000_000,
        left_to_host=32_000_000,  # 140 systems of order 50: 9 ms in steps, a third of that by a host
        gram_passes=1 << 36 if fast_fp64 else 0,
        batched_elements=1 << 22,
        chunk_elements=1 << 26,
        together=130_000_000_000 if fast_fp64 else 10_000_000,
        bordered=2_000_000_000 if replayed_bytes else 0,
        small_r=("cholesky fp64", "shifted cholesky fp64") if fast_fp64 else GRAM_SCHMIDT,
        prelaunched_steps=3,
        prelaunched_again=40_000_000_000 if fast_fp64 else 0,
        asynchronous_steps=1,
        one_launch=1 << 15 if corrected and fast_fp64 else 0,
        reflected_rows=512 if corrected else 0,
        partly_corrected=6000,
        gram_block=256,
        pivot_block=256,
        iteration=2.5e10,
        inverted=2048,
        inverted_from=512,
        cholesky_inverted=1024,
        cholesky=8192,
        batched_cholesky=32,
        tiled_cholesky=8192 if fast_fp64 else 0,
        double_cholesky=12000 if fast_fp64 else 1 << 30,
        lu_panel=1024,  # as fast as 512 up to 32768 columns, and half the launches
        lu_inner_panel=128,
        # Pivoted panels are library calls, and its LU in double takes no longer where fp64 is fast.
        pivoted_lu=not fast_fp64,
        at_a_time=8,
        **_orders_of_systems(fast_fp64=fast_fp64),
        doubled_order=1 << 14,
        doubled_columns=64,
        streamed_bytes=1 << 28,
        streams_doubled=True,
    )
    if not tournament_width:
        return found
    return replace(found, tournaments=True, pivoted_panel=512, pivoted_inner_panel=tournament_width)
