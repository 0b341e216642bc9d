"""Eigenvalues and eigenvectors of batches of small Hermitian matrices, each in registers of a GPU."""

from __future__ import annotations

from typing import Any

import torch

from neula.kernels.cuda_source import compiled
from neula.kernels.dispatch import kernel, trial
from neula.kernels.launch import ceil_div

MAX_ORDER = {torch.float32: 128, torch.float64: 64, torch.complex64: 64, torch.complex128: 32}
"""Largest order that registers hold; up to half of it a thread has two whole columns."""


@trial("The kernel for small eigenvalue problems", "the library's takes its place")
def _tried(device: torch.device, variant: int) -> None:
    order, place = divmod(variant, len(MAX_ORDER))
    small_eigh.kernel(torch.eye(order, dtype=list(MAX_ORDER)[place], device=device)[None])


def order_for(n: int) -> int:
    """Order that the kernel is compiled for, to decompose matrices of order n."""
    return max(4, 1 << (n - 1).bit_length())


@kernel(
    "small_eigh_cuda",
    trial=_tried,
    when=lambda a: a.numel() > 0 and a.shape[-1] <= MAX_ORDER.get(a.dtype, 0),
    variant=lambda a: order_for(a.shape[-1]) * len(MAX_ORDER) + list(MAX_ORDER).index(a.dtype),
    or_complex=True,
)
def small_eigh(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``A = V diag(w) V^H`` of Hermitian matrices (..., n, n), w ascending; on a GPU by Jacobi rotations,
    elsewhere by LAPACK.

    The kernel reads both triangles, LAPACK the lower one. Where A has NaN or Inf, the results of the kernel
    are NaN; LAPACK refuses it.
    """
    w, v = torch.linalg.eigh(a)
    return w, v


def macros_for(n: int, dtype: torch.dtype) -> dict[str, Any]:
    """The kernel's constants for matrices of order n."""
    order = order_for(n)
    split = 1 if 2 * order <= MAX_ORDER[dtype] else 4  # threads that share two columns
    single, lanes = dtype.to_real() == torch.float32, order // 2 * split
    return {
        "ORDER": order,
        "SPLIT": split,
        "PARTS": 1 + dtype.is_complex,
        "REAL": "float" if single else "double",
        # Of rounding errors of an inner product, as they usually are.
        "TOLERANCE": torch.finfo(dtype).eps * max(1.0, order**0.5 / 8),
        "LARGEST_EXPONENT": 120 if single else 1000,
        "THREADS": lanes if lanes > 32 else 128,  # of one matrix, or of several
    }


def small_eigh_cuda(a):
    a, n = a.resolve_conj().contiguous(), a.shape[-1]
    count, w, v = a.numel() // n**2, a.real.new_empty(a.shape[:-1]), torch.empty_like(a)
    macros = macros_for(n, a.dtype)
    source = "".join(f"#define {name} {text}\n" for name, text in macros.items())
    threads, lanes = macros["THREADS"], macros["ORDER"] // 2 * macros["SPLIT"]
    kernel = compiled("small_eigh", "small_eigh", a.device, source)
    kernel((ceil_div(count, threads // lanes), 1, 1), (threads, 1, 1), [a, w, v, count, n])
    return w, v
