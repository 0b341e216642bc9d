"""Descriptors of tiles of a tensor, which GPUs from compute capability 9.0 on move by themselves (TMA).

The driver encodes where the tensor lies and how large a tile is (``cuTensorMapEncodeTiled``). A kernel gets
the 128 bytes by value, and behind them the sizes and strides.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

OLDEST = (9, 0)
"""Compute capability."""

_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
_KINDS = {torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9}
_BYTES, _ALIGNED = 128, 64
_NOT_INTERLEAVED, _PROMOTED_TO_128_BYTES, _ZEROS_OUTSIDE = 0, 2, 0


@dataclass(frozen=True, eq=False)
class Tiles:
    """A tensor that a kernel reads or writes in tiles."""

    # Begins at a multiple of 16 bytes, as does each row; its last dimension is contiguous.
    tensor: torch.Tensor
    block: tuple[int, ...]  # sizes of a tile, one for each dimension

    @property
    def type(self) -> str:
        """The type of the argument in the signature of a Triton kernel."""
        return _type(self.tensor.dtype, self.block)

    @property
    def for_triton(self) -> Any:
        """Triton's own form."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor.from_tensor(self.tensor, list(self.block))

    def words(self, swizzle: int, box: tuple[int, ...], library: Any) -> tuple[int, ...]:
        """The words that a kernel reads, eight bytes each: the descriptor, sizes and strides.

        ``swizzle``, the layout of a tile in shared memory, and ``box``, the shape of one copy, are by the
        compiler; ``library`` is CUDA's driver.
        """
        x = self.tensor
        return _encoded(x.data_ptr(), x.dtype, x.shape, x.stride(), swizzle, box, library)

    def begins(self, start: int) -> Iterator[int]:
        """Where what :meth:`words` returns begins, in bytes: the descriptor, each size and each stride."""
        yield start
        yield from range(start + _BYTES, start + _BYTES + 16 * self.tensor.ndim, 8)


@lru_cache
def _type(dtype: torch.dtype, block: tuple[int, ...]) -> str:
    return f"tensordesc<{_NAMES[dtype]}{list(block)}>"


@lru_cache(maxsize=1024)
def _encoded(
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    swizzle: int,
    box: tuple[int, ...],
    library: Any,
) -> tuple[int, ...]:
    """Encode a tensor map. Dimensions are counted from the last one."""
    rank = len(shape)
    room = ctypes.create_string_buffer(_BYTES + _ALIGNED)
    place = -(-ctypes.addressof(room) // _ALIGNED) * _ALIGNED
    failed = library.cuTensorMapEncodeTiled(
        ctypes.c_void_p(place),
        _KINDS[dtype],
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*reversed(shape)),
        (ctypes.c_uint64 * rank)(*(dtype.itemsize * stride for stride in reversed(strides[:-1]))),
        (ctypes.c_uint32 * rank)(*reversed(box)),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        _NOT_INTERLEAVED,
        swizzle,
        _PROMOTED_TO_128_BYTES,
        _ZEROS_OUTSIDE,
    )
    if failed:
        raise RuntimeError(
            f"a tensor of shape {shape} and strides {strides} cannot be moved in tiles of {box}"
        )
    return (*(ctypes.c_int64 * (_BYTES // 8)).from_address(place), *shape, *strides)
