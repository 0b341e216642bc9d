"""cuBLAS, called without torch where torch would take the arithmetic of a product from a process-wide
switch. cuBLAS itself takes it as an argument, or from the handle that torch has for each thread: the product
is the one that torch would launch, on the same stream and with the same workspace.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

import torch

from neula.kernels.launch import multiprocessors

_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
_FLOAT32, _TF32 = 68, 77  # cublasComputeType_t: CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32
_DEFAULT, _WHOLE_SUMS = 0, 16  # cublasMath_t: ..., CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
_ANY_ALGORITHM = -1  # CUBLAS_GEMM_DEFAULT
SQUARED = 1000  # columns from which on it makes Gram matrices in double precision; fewer take as long
SMALLEST = 128  # order of matrices from which on products of batches are left to it


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    tf32: bool = False,
) -> torch.Tensor:
    """``C = alpha A B + beta C``, summed in float32 to the end, also where C is narrower and k is cut up.

    A and B are of float32, float16 or bfloat16; C, in their dtype or in float32, is not read if ``beta`` is
    zero. With ``tf32`` float32 operands are cut off to TF32. Raises a RuntimeError with the status if cuBLAS
    refuses.
    """
    if 0 in (*c.shape, a.shape[1]):
        return c.zero_() if beta == 0.0 else c.mul_(beta)
    stored, transposed, _ = _stored(c)
    if transposed:  # C^T = B^T A^T is by columns
        gemm(b.T, a.T, stored.T, alpha=alpha, beta=beta, tf32=tf32)
        return c if stored is c else c.copy_(stored)
    if torch.cuda.current_device() == c.device.index:
        _launch(a, b, c, alpha, beta, tf32)
    else:
        with torch.cuda.device(c.device):
            _launch(a, b, c, alpha, beta, tf32)
    return c


@contextmanager
def leaving(share: float, device: torch.device) -> Iterator[None]:
    """Products that this thread launches leave so large a part of the multiprocessors to others."""
    if not runs(device):
        yield
        return
    units = multiprocessors(device)
    with torch.cuda.device(device):
        library, handle = _library(), torch.cuda.current_blas_handle()
        _check(library.cublasSetSmCountTarget(handle, units - round(share * units)))
        try:
            yield
        finally:
            library.cublasSetSmCountTarget(handle, 0)  # all of them


def multiplies(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether :func:`batched` is the fastest way to a product of batches: 64 of order 1024 take 0.22 ms on
    an H200, and 0.32 by a kernel of Triton, 8 of order 4096 1.5 and 1.6.
    """
    by_rows = a.stride(2) == b.stride(2) == 1
    return by_rows and min(*a.shape[1:], b.shape[2]) >= SMALLEST and runs(a.device)


def squares(a: torch.Tensor) -> bool:
    """Whether :func:`lower_square` is the fastest way to a Gram matrix, of a single matrix with some
    columns: 20000 x 2000 take 1.6 ms on an H200, and 3.2 by a product; 1000000 x 200 7.6 and 2.2.
    """
    kinds = torch.float64, torch.complex128
    if a.ndim != 3 or len(a) != 1 or a.dtype not in kinds or a.is_conj() or a.shape[2] < SQUARED:
        return False
    by_rows = a.stride(2) == 1 and a.stride(1) >= a.shape[2]
    by_columns = a.is_complex() and a.stride(1) == 1 and a.stride(2) >= a.shape[1]
    return (by_rows or by_columns) and runs(a.device)


def lower_square(a: torch.Tensor) -> torch.Tensor:
    """Lower triangle of ``A^H A`` in double precision, zero above, of A that :func:`squares` takes."""
    m, n = a.shape
    c = a.new_zeros(n, n)
    one, zero = (ctypes.byref(ctypes.c_double(x)) for x in (1.0, 0.0))
    with torch.cuda.device_of(a):
        library, handle = _library(), torch.cuda.current_blas_handle()
        square = library.cublasZherk_v2 if a.is_complex() else library.cublasDsyrk_v2
        # By columns rows of A are A^T, and C is the upper triangle of its transpose: CUBLAS_FILL_MODE_UPPER
        # and CUBLAS_OP_N; else CUBLAS_FILL_MODE_LOWER and CUBLAS_OP_C.
        by_rows = a.stride(1) == 1
        form, stride = ((1, 0), a.stride(0)) if by_rows else ((0, 2), a.stride(1))
        _check(square(handle, *form, n, m, one, a.data_ptr(), stride, zero, c.data_ptr(), n))
    return c if by_rows else c.mT


def batched(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``C = A B`` for batches in float16 or bfloat16 with contiguous rows, summed in float32 to the end."""
    (count, m, n), k, kind = c.shape, a.shape[2], _TYPES[c.dtype]
    # By columns these are C^T = B^T A^T.
    operands = [(x.data_ptr(), kind, x.stride(1), x.stride(0)) for x in (b, a, c)]
    with torch.cuda.device_of(c):
        library, handle = _library(), torch.cuda.current_blas_handle()
        arguments = (
            *(0, 0, n, m, k, _number(1.0), *operands[0], *operands[1], _number(0.0), *operands[2]),
            *(count, _FLOAT32, _ANY_ALGORITHM),
        )
        _check(library.cublasSetMathMode(handle, _WHOLE_SUMS))
        try:
            _check(library.cublasGemmStridedBatchedEx(handle, *arguments))
        finally:
            library.cublasSetMathMode(handle, _DEFAULT)  # as above
    return c


@lru_cache
def runs(device: torch.device) -> bool:
    """Whether cuBLAS can be called, tried once a device."""
    if device.type != "cuda":
        return False
    try:
        ones = torch.ones(16, 16, dtype=torch.float16, device=device)
        gemm(ones, ones, torch.empty_like(ones))
    except (AttributeError, OSError, RuntimeError) as error:
        warnings.warn(
            f"cuBLAS cannot be called on {device}; products with narrow results take another pass: {error}",
            RuntimeWarning,
            stacklevel=3,
        )
        return False
    return True


def _launch(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, alpha: float, beta: float, tf32: bool) -> None:
    library, handle = _library(), torch.cuda.current_blas_handle()
    (m, n), k = c.shape, a.shape[1]
    a, transposed_a, lda = _stored(a)
    b, transposed_b, ldb = _stored(b)
    arguments = (
        *(transposed_a, transposed_b, m, n, k),
        *(_number(alpha), a.data_ptr(), _TYPES[a.dtype], lda, b.data_ptr(), _TYPES[b.dtype], ldb),
        *(_number(beta), c.data_ptr(), _TYPES[c.dtype], c.stride(1) if n > 1 else m),
        *(_TF32 if tf32 else _FLOAT32, _ANY_ALGORITHM),
    )
    _check(library.cublasSetMathMode(handle, _WHOLE_SUMS))
    try:
        _check(library.cublasGemmEx(handle, *arguments))
    finally:
        # The mode that torch leaves; it sets the mode again before each of its products.
        library.cublasSetMathMode(handle, _DEFAULT)


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"a product by cuBLAS failed with status {status}")


def _stored(x: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """A matrix as BLAS wants it, or a copy, whether it is transposed, and its leading dimension."""
    (m, n), (down, across) = x.shape, x.stride()
    if (m == 1 or down == 1) and (n == 1 or across >= m):
        return x, 0, across if n > 1 else m
    if (n == 1 or across == 1) and (m == 1 or down >= n):
        return x, 1, down if m > 1 else n
    return x.clone(memory_format=torch.contiguous_format), 1, n


@lru_cache(maxsize=64)
def _number(x: float) -> Any:
    """Address of a number that cuBLAS reads before it returns."""
    return ctypes.byref(ctypes.c_float(x))


@cache
def _library() -> ctypes.CDLL:
    """The cuBLAS that torch has loaded; an OSError if it has loaded none by its usual name."""
    version = torch.version.cuda
    if version is None or not hasattr(os, "RTLD_NOLOAD"):
        raise OSError("there is no cuBLAS of NVIDIA's for Linux")
    library = ctypes.CDLL(f"libcublas.so.{version.split('.')[0]}", mode=os.RTLD_NOLOAD)
    pointer, number = ctypes.c_void_p, ctypes.c_int
    matrix: list[Any] = [pointer, number, number]
    library.cublasSetMathMode.argtypes = [pointer, number]
    library.cublasSetSmCountTarget.argtypes = [pointer, number]
    operand: list[Any] = [pointer, pointer, number]
    for square in (library.cublasDsyrk_v2, library.cublasZherk_v2):
        square.argtypes = [pointer, *4 * [number], *operand, *operand]
    product = [pointer, *matrix, *matrix, pointer, *matrix]
    library.cublasGemmEx.argtypes = [pointer, *5 * [number], *product, *2 * [number]]
    matrices = [*matrix, ctypes.c_longlong]
    product = [pointer, *matrices, *matrices, pointer, *matrices]
    library.cublasGemmStridedBatchedEx.argtypes = [pointer, *5 * [number], *product, *3 * [number]]
    return library
