"""The kernel of ``lu_block.factor_diagonal``, in CUDA C++, compiled by NVRTC at the first
call.

*Factorization* of 128 x 128 with both inverses: 5 Mflop, 10 us of what one multiprocessor can, and 128 pivots
one after the other, each of which needs a tenth of a microsecond: a row that other lanes read, a reciprocal,
a multiplication and a subtraction. Both go on at the same time, in different warps: 30 us on an H200, 22 for
the pivots alone (34 where eight warps follow them and not four: shared memory is what they wait for). CUDA
rather than Triton, for the reasons of :mod:`neula.kernels.cholesky.cholesky_cuda`.
"""

from __future__ import annotations

import torch

from neula.kernels.cuda_source import compiled

THREADS = 512

SHARED_BYTES = 4 * (128 * 132 + 128 * 20 + 16 * 132 + 16 * 20 + 4 * 64)
"""The block, what a step of 16 columns computes, and rows on their way."""


def factor_diagonal_cuda(
    work: torch.Tensor, out: torch.Tensor, l_inverse: torch.Tensor, u_inverse: torch.Tensor
) -> None:
    """:func:`neula.kernels.lu.lu_block.factor_diagonal` by the kernel, queued on the current stream.

    Raises
    ------
    ImportError
        Without a torch that compiles CUDA.
    """
    macros = "#define BFLOAT16\n" if out.dtype == torch.bfloat16 else ""
    with torch.cuda.device_of(work):
        kernel = compiled("lu_block", "lu_block", work.device, macros, shared_bytes=SHARED_BYTES)
        arguments = [work, out, l_inverse, u_inverse, len(out), *out.stride()]
        kernel((1, 1, 1), (THREADS, 1, 1), arguments, SHARED_BYTES)
