"""CUDA graphs of functions that are called again and again: one launch instead of dozens.

Python takes longer to launch a factorization of small matrices than the GPU to run it. After ``BEFORE``
calls for a shape the next one captures them in a CUDA graph, which it and the following ones replay on a
copy of the input; they return copies of the results.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeVar

import torch

LARGEST = 280 << 20
"""Bytes of inputs up to which functions are replayed: larger ones keep a GPU busy for longer than Python
takes to launch them."""

PART = 256  # inputs are at most this part of the GPU's memory, since a graph keeps a few times its input

KEPT = 3
"""Inputs of the largest size whose graphs are kept, or more of smaller ones: the QR of a square matrix has
two of that size, and its column pivots some more."""

LEAST = 1 << 21  # bytes that a graph takes, however small: what torch's allocator reserves at a time
MOST = 1024  # keys that are remembered, of what was called once, and of what is replayed or cannot be
SMALL = 1 << 16  # bytes of a result up to which it is copied together with others
ALIGNED = 16  # bytes at multiples of which results begin in the buffer that they share
BEFORE = 2  # calls for a shape before one captures: that takes as long as ten calls

OFTEN = 8
"""Calls for one shape after which more are to be expected. Of a thousand problems with shapes near each other
hardly one comes up so often, and a capture takes as long as dozens of calls."""

STREAMS = 128  # streams of callers that are remembered

Result = TypeVar("Result")

_lock = threading.Lock()
_recording = threading.local()  # a call during a capture becomes a part of that graph

_calls = itertools.count()
_seen: OrderedDict[Hashable, tuple[int, int]] = OrderedDict()
"""Calls without a graph, and which of all calls was the first of them."""
_graphs: OrderedDict[Hashable, _Graph | None] = OrderedDict()
_last: dict[Hashable, int] = {}  # which call has used a graph last
_asked: OrderedDict[Hashable, int] = OrderedDict()
_pools: OrderedDict[tuple[torch.device, int], torch.cuda.CUDAGraph] = OrderedDict()
"""For each stream of a caller an empty graph, in whose memory all others for this stream work.

Memory of a graph's own would stay reserved when the graph is gone. Graphs may share it where one is replayed
after the other, and its results are copied before the next one.
"""


Tensors = tuple[torch.Tensor, ...]

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]  # shape, strides and dtype of a tensor


class Written(NamedTuple):
    """Inputs that are not there yet: a graph has them written where it reads them, and nothing is copied."""

    shapes: tuple[torch.Size, ...]  # of tensors in row-major order
    like: tuple[torch.Tensor, ...]  # whose dtypes and device they have
    write: Callable[[Tensors], object]  # writes all elements of such tensors, without synchronizing


Inputs = Tensors | Written

Replay = Callable[[Callable[..., Tensors], Inputs, Hashable], Tensors]
"""``function(*inputs)``, replayed from a graph if there is one for the key."""


@lru_cache(maxsize=256)
def row_major(shape: torch.Size) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def device_of(inputs: Inputs) -> torch.device:
    return (inputs.like if isinstance(inputs, Written) else inputs)[0].device


def layouts_of(inputs: Inputs) -> list[Layout]:
    if isinstance(inputs, Written):
        pairs = zip(inputs.shapes, inputs.like, strict=True)
        return [(shape, row_major(shape), x.dtype) for shape, x in pairs]
    return [(x.shape, x.stride(), x.dtype) for x in inputs]


def nbytes_of(inputs: Inputs) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, _, dtype in layouts_of(inputs))


def made(inputs: Inputs) -> Tensors:
    if not isinstance(inputs, Written):
        return inputs
    room = tuple(x.new_empty(shape) for shape, x in zip(inputs.shapes, inputs.like, strict=True))
    inputs.write(room)
    return room


def called(
    function: Callable[..., Tensors], inputs: Inputs, key: Hashable = None, out: Tensors | None = None
) -> Tensors:
    """``function(*inputs)``, without a graph, its results in ``out`` if that can hold them."""
    results = function(*made(inputs))
    return results if out is None else put(out, results)


def copied(inputs: Inputs) -> Tensors:
    return made(inputs) if isinstance(inputs, Written) else tuple(_clone(x) for x in inputs)


def put(targets: Tensors, inputs: Inputs) -> Tensors:
    """Inputs in tensors of their layouts, some of which may be the inputs themselves."""
    if isinstance(inputs, Written):
        inputs.write(targets)
        return targets
    for target, source in zip(targets, inputs, strict=True):
        if target is not source:
            target.copy_(source)
    return targets


def _clone(x: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of the original if it is dense, or a matrix with gaps between its columns."""
    if x.ndim == 2 and x.stride(0) == 1 and x.stride(1) >= x.shape[0]:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
    return x.clone()


@dataclass(frozen=True)
class _Packed:
    """Results of a graph, the small ones in one buffer: to copy each by itself would take launches."""

    results: Tensors  # in memory of the graph
    buffer: torch.Tensor  # bytes
    places: tuple[int, ...]  # where each result begins in the buffer; -1 for those that are too large for it

    @cached_property
    def _layouts(self) -> list[tuple[int, torch.dtype, torch.Size, tuple[int, ...]]]:
        """Offset in the buffer, in elements, dtype, shape and strides of each result."""
        return [
            (place // x.itemsize, x.dtype, x.shape, row_major(x.shape))
            for x, place in zip(self.results, self.places, strict=True)
        ]

    @classmethod
    def from_tensors(cls, results: Tensors) -> _Packed:
        places, end = [], 0
        for x in results:
            small = 0 < x.nbytes <= SMALL and x.is_contiguous()
            places.append(end if small else -1)
            end += -(-x.nbytes // ALIGNED) * ALIGNED if small else 0
        packed = cls(results, results[0].new_empty(end, dtype=torch.uint8), tuple(places))
        for x, copy, place in zip(results, packed._views(packed.buffer), places, strict=True):
            if place >= 0:
                copy.copy_(x)
        return packed

    def clone(self) -> Tensors:
        """Copies for the caller; the small ones are views of one."""
        return self._views(self.buffer.clone(), copy=True)

    def _views(self, buffer: torch.Tensor, *, copy: bool = False) -> Tensors:
        typed = {dtype: buffer.view(dtype) for dtype in {x.dtype for x in self.results}}
        return tuple(
            (x.clone() if copy else x) if place < 0 else typed[dtype].as_strided(shape, strides, place)
            for x, (place, dtype, shape, strides) in zip(self.results, self._layouts, strict=True)
        )


@dataclass(frozen=True)
class _Graph:
    inputs: Tensors
    outputs: _Packed
    kept: Tensors
    graph: torch.cuda.CUDAGraph

    @property
    def nbytes(self) -> int:
        return max(LEAST, sum(x.nbytes for x in self.inputs))

    def __call__(self, inputs: Inputs, out: Tensors | None) -> Tensors:
        put(self.inputs, inputs)
        self.graph.replay()
        return self.outputs.clone() if out is None else put(out, self.outputs.results)


def replay(
    function: Callable[..., Tensors], inputs: Inputs, key: Hashable, out: Tensors | None = None
) -> Tensors:
    """``function(*inputs)``, from a graph where there is one for this key, this stream and inputs like
    these.

    Launches must not depend on the numbers; nothing may synchronize. Another function for the same key would
    not be called. If ``out`` can hold the results, the function may overwrite its inputs, some
    of which may be in ``out``.
    """
    device = device_of(inputs)
    if is_recording():
        return called(function, inputs, key, out)
    stream = torch.cuda.current_stream(device.index)  # of a device it takes three times as long
    full_key = (key, *layouts_of(inputs), device, stream.stream_id)
    # No other thread may use the graph between the copies of input and results.
    with _lock:
        now, graph = next(_calls), None
        if full_key in _graphs:
            _graphs.move_to_end(full_key)
            graph, _last[full_key] = _graphs[full_key], now
        elif (nbytes := nbytes_of(inputs)) <= (largest := largest_input(device)):
            count, since = _seen.get(full_key, (0, now))
            if count >= BEFORE and _has_room(KEPT * largest - max(LEAST, nbytes), since, stream):
                graph = _graphs[full_key] = _captured(function, inputs, stream)
                _last[full_key] = now
                _seen.pop(full_key)
            else:
                _seen[full_key] = (count + 1, since) if count < BEFORE else (1, now)
                _seen.move_to_end(full_key)
            while len(_seen) > MOST:
                _seen.popitem(last=False)
        if graph is not None:
            return graph(inputs, out)
    return called(function, inputs, key, out)


def often(key: Hashable) -> bool:
    """Whether this is asked so often for one key that a graph pays which serves nothing else."""
    with _lock:
        _asked[key] = count = _asked.pop(key, 0) + 1
        while len(_asked) > MOST:
            _asked.popitem(last=False)
    return count > OFTEN


def recorded(
    function: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Capture a function in a CUDA graph, for tensors of one shape; the function itself if capture fails.

    Whoever keeps it must keep what the function reads, and have no two calls under way. Earlier calls with
    tensors ``like`` these have compiled its kernels, and filled its caches.
    """
    if is_recording():
        return function
    with _lock:
        stream = torch.cuda.current_stream(like.device)
        graph = _captured(lambda x: (function(x),), (like,), stream, called=True)
    if graph is None:
        return function

    def replayed(x: torch.Tensor) -> torch.Tensor:
        with _lock:  # graphs of other threads for this stream work in the same memory
            return graph((x,), None)[0]

    return replayed


def is_recording() -> bool:
    """Whether what is launched becomes a part of a graph, one of these or one of the user's."""
    return records() or torch.cuda.is_current_stream_capturing()


def records() -> bool:
    """Whether this thread is capturing one of these graphs."""
    return getattr(_recording, "kept", None) is not None


def kept(key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """``make()``; during a capture once for each key, and alive as long as the graph that reads it."""
    recording = getattr(_recording, "kept", None)
    if recording is None:
        return make()
    if key not in recording:
        recording[key] = make()
    return recording[key]


def on_stream(stream: torch.cuda.Stream, function: Callable[[], Result]) -> Result:
    """``function()`` with its launches on a stream; the current one is back afterwards, come what may."""
    device, before = torch.cuda.current_device(), torch.cuda.current_stream(stream.device)
    try:
        torch.cuda.set_stream(stream)
        return function()
    finally:
        torch.cuda.set_stream(before)
        torch.cuda.set_device(device)


@lru_cache(maxsize=16)
def largest_input(device: torch.device) -> int:
    return min(LARGEST, int(torch.cuda.get_device_properties(device).total_memory) // PART)


def clear() -> None:
    with _lock:
        if _graphs:
            torch.cuda.synchronize()
        _graphs.clear()
        _last.clear()
        _seen.clear()
        _asked.clear()
        _pools.clear()


def _captured(
    function: Callable[..., Tensors], inputs: Inputs, stream: torch.cuda.Stream, *, called: bool = False
) -> _Graph | None:
    """A graph of the function, or None if one of its steps cannot be captured. Unless ``called``, it is
    called once before, which compiles kernels and makes what is made once, neither of which a graph may do.
    """
    own = copied(inputs)
    side, graph = _beside(stream.device, stream.stream_id), torch.cuda.CUDAGraph()
    read: dict[Hashable, torch.Tensor] = {}
    try:
        _recording.kept = read
        if not called:
            function(*own)
        side.wait_stream(stream)
        memory = _pool(stream, side)
        outputs = on_stream(side, lambda: _capture(graph, function, own, memory))
    except _NotRecordedError as error:
        _pools.pop((stream.device, stream.stream_id), None)
        with contextlib.suppress(_NotRecordedError):
            _pool(stream, side)  # torch takes random numbers to be captured until a capture has succeeded
        if isinstance(error.__cause__, RuntimeError):
            return None
        raise error.__cause__ from None  # type: ignore[misc]
    finally:
        _recording.kept = None
    stream.wait_stream(side)
    return _Graph(own, outputs, tuple(read.values()), graph)


class _NotRecordedError(Exception):
    """A capture was broken off, by an error of torch or by the user."""


def _capture(
    graph: torch.cuda.CUDAGraph,
    function: Callable[..., Tensors],
    inputs: Tensors,
    memory: torch.cuda.CUDAGraph | None,
) -> _Packed:
    """Capture the function on the current stream, which captures nothing any more afterwards."""
    pool = None if memory is None else memory.pool()
    try:
        # Not torch.cuda.graph, which empties the caches of the user. Other threads may continue.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        outputs = _Packed.from_tensors(function(*inputs))
        graph.capture_end()
    except BaseException as error:
        with contextlib.suppress(RuntimeError):  # what has failed, has not begun or is at its end
            graph.capture_end()
        raise _NotRecordedError from error
    return outputs


def _pool(stream: torch.cuda.Stream, side: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """The graph in whose memory those for a stream work."""
    key = (stream.device, stream.stream_id)
    if key not in _pools:
        graph = torch.cuda.CUDAGraph()
        on_stream(
            side,
            lambda: _capture(
                graph, lambda: (torch.zeros((), dtype=torch.float32, device=side.device),), (), None
            ),
        )
        _pools[key] = graph
        while len(_pools) > STREAMS:
            _pools.popitem(last=False)
    _pools.move_to_end(key)
    return _pools[key]


@lru_cache(maxsize=STREAMS)
def _beside(device: torch.device, stream_id: int) -> torch.cuda.Stream:
    """The stream on which calls of another stream are captured: a workspace of cuBLAS, 32 MB, belongs to
    every stream that multiplies, also during a capture, and what is replayed on different streams must not
    share one.
    """
    return torch.cuda.Stream(device)


def _has_room(limit: int, since: int, stream: torch.cuda.Stream) -> bool:
    """Whether so many bytes are enough for the graphs that were used since a call; forgets older ones, those
    not used for longest first. Calls that take turns and do not fit together would else be captured each
    time.
    """
    total = sum(graph.nbytes for graph in _graphs.values() if graph is not None)
    while len(_graphs) >= MOST or total > limit:
        oldest = next(iter(_graphs), None)
        if oldest is None or _last[oldest] >= since:
            return False
        torch.cuda.synchronize(stream.device)  # one that still runs needs its memory
        graph = _graphs.pop(oldest)
        total -= 0 if graph is None else graph.nbytes
        del _last[oldest]
    return True


def _after_fork() -> None:
    """In a child: another thread of the parent may have held the lock. torch refuses CUDA there anyhow."""
    global _lock, _recording
    _lock, _recording = threading.Lock(), threading.local()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
