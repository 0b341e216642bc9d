"""Fixed random numbers, kept on the device, since a copy from the host would synchronize. They are bounded
in number, and CUDA graphs, which read a vector where it was when they were captured, keep those that they
read.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

from neula.engines.graphs import kept, records

MOST, MOST_BYTES = 128, 1 << 26  # largest number of arrays that are kept, and of their bytes together

_lock = threading.Lock()
_vectors: OrderedDict[Hashable, torch.Tensor] = OrderedDict()
_of_users_graphs: dict[Hashable, torch.Tensor] = {}
"""A graph that the user captures reads them as long as it lives, which is unknown here."""


def gaussian(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    seed: int,
    orthogonal_rows: bool = False,
) -> torch.Tensor:
    """Normally distributed numbers, the same for the same arguments; the user's random state stays as it is.
    They are shared, and not to be written to. ``orthogonal_rows``, no more of them than columns, have norm
    ``sqrt(columns)``.
    """

    def made() -> torch.Tensor:
        generator = torch.Generator("cpu").manual_seed(seed)
        vectors = torch.randn(rows, columns, generator=generator, dtype=dtype, device="cpu")
        if orthogonal_rows:
            vectors = columns**0.5 * torch.linalg.qr(vectors.T).Q.T.contiguous()
        return vectors.to(device)

    return remembered((rows, columns, dtype, device, seed, orthogonal_rows), made)


def remembered(key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """``make()``, a tensor that is not to be written to, or what it has made for that key, which says all
    that it depends on, the device among it: then nothing synchronizes.
    """
    vectors = kept(key, lambda: _found(key, make))
    if vectors.is_cuda and not torch.cuda.is_current_stream_capturing():
        # Another stream than the one it was made on may still read it when it is dropped.
        vectors.record_stream(torch.cuda.current_stream(vectors.device))
    elif vectors.is_cuda and not records():
        _of_users_graphs[key] = vectors
    return vectors


def _found(key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    with _lock:
        if key in _vectors:
            _vectors.move_to_end(key)
            return _vectors[key]
    vectors = make()
    with _lock:
        _vectors[key] = vectors
        while len(_vectors) > MOST or sum(x.nbytes for x in _vectors.values()) > MOST_BYTES:
            _vectors.popitem(last=False)
    return vectors


def _after_fork() -> None:
    """In a child: another thread of the parent may have held the lock."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
