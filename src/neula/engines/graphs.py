"""CUDA graphs of functions that are called again and again: one launch instead of dozens.

A factorization of small matrices is dozens of launches of microseconds each, and Python needs longer for them
than the GPU. The second call for a shape records them, and it and the following ones play them back, on a
copy of the input, and return copies of the results.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache

import torch

from neula.engines.engine import Tensors

LARGEST = 512
"""Inputs of up to this part of the GPU's memory are played back, 290 MB on an H200. A graph keeps a few times
its input, and larger ones keep a GPU busy for longer than Python takes to launch them."""

KEPT = 2
"""Inputs of the largest size whose graphs are kept, or more of smaller ones."""

_lock = threading.Lock()
_recording = threading.local()
"""What is called while something is recorded becomes a part of that, and is not recorded itself."""

_seen: OrderedDict[Hashable, None] = OrderedDict()
_graphs: OrderedDict[Hashable, _Graph | None] = OrderedDict()


@dataclass(frozen=True)
class _Graph:
    inputs: Tensors
    outputs: Tensors
    graph: torch.cuda.CUDAGraph

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.inputs)

    def __call__(self, inputs: Tensors, out: Tensors | None) -> Tensors:
        _copy(self.inputs, inputs)
        self.graph.replay()
        if out is None:
            return tuple(output.clone() for output in self.outputs)
        return _copy(out, self.outputs)


def _copy(targets: Tensors, sources: Tensors) -> Tensors:
    for target, source in zip(targets, sources, strict=True):
        if target is not source:
            target.copy_(source)
    return targets


def replay(
    function: Callable[..., Tensors], inputs: Tensors, key: Hashable, out: Tensors | None = None
) -> Tensors:
    """``function(*inputs)``, from a graph where there is one for this key, this stream and inputs like these.

    Parameters
    ----------
    function : callable
        Takes tensors and returns some; its launches must not depend on the numbers, nor wait for them.
    inputs : tuple of Tensor
        On one GPU.
    key : hashable
        Says what function does: another function for the same key would not be called.
    out : tuple of Tensor, optional
        Room for the results. Then the function may overwrite its inputs, some of which may be in ``out``.
    """
    device = inputs[0].device
    largest = largest_input(device)
    too_large = sum(x.nbytes for x in inputs) > largest
    if too_large or getattr(_recording, "active", False) or torch.cuda.is_current_stream_capturing():
        return _called(function, inputs, out)
    stream = torch.cuda.current_stream(device)
    full_key = (key, *((x.shape, x.stride(), x.dtype) for x in inputs), device, stream.stream_id)
    # Between the copy of the input and those of the results nobody else may use the graph.
    with _lock:
        if full_key in _graphs:
            _graphs.move_to_end(full_key)
            graph = _graphs[full_key]
        elif full_key in _seen:
            _recording.active = True
            try:
                graph = _graphs[full_key] = _captured(function, inputs, stream)
            finally:
                _recording.active = False
            _make_room(KEPT * largest, stream)
        else:
            _seen[full_key] = graph = None
            while len(_seen) > 1024:
                _seen.popitem(last=False)
        if graph is not None:
            return graph(inputs, out)
    return _called(function, inputs, out)


def recorded(
    function: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same function for tensors of one shape, from a graph of its own; itself where it has none.

    Whoever keeps it must keep what the function reads, and have no two calls under way.

    Parameters
    ----------
    function : callable
        Its launches must not depend on the numbers, nor wait for them.
    like : Tensor
        What it is called for once.
    """
    if getattr(_recording, "active", False) or torch.cuda.is_current_stream_capturing():
        return function
    with _lock:
        _recording.active = True
        try:
            graph = _captured(lambda x: (function(x),), (like,), torch.cuda.current_stream(like.device))
        finally:
            _recording.active = False
    return function if graph is None else lambda x: graph((x,), None)[0]


def largest_input(device: torch.device) -> int:
    """Bytes of inputs up to which functions are played back."""
    return int(torch.cuda.get_device_properties(device).total_memory // LARGEST)


def _called(function: Callable[..., Tensors], inputs: Tensors, out: Tensors | None) -> Tensors:
    results = function(*inputs)
    return results if out is None else _copy(out, results)


def clear() -> None:
    """Forget all graphs, and free their memory."""
    with _lock:
        if _graphs:
            torch.cuda.synchronize()
        _graphs.clear()
        _seen.clear()


def _captured(function: Callable[..., Tensors], inputs: Tensors, stream: torch.cuda.Stream) -> _Graph | None:
    """A graph of the function, or None if one of its steps cannot be recorded."""
    own = tuple(_clone(x) for x in inputs)
    function(*own)  # compiles kernels and makes what is made once, neither of which a graph may do
    side = _beside(stream.device, stream.stream_id)
    side.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(side):
            # Not torch.cuda.graph, which empties the caches of the user. Other threads may go on.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                outputs = function(*own)
            finally:
                graph.capture_end()
    except RuntimeError:
        _recover(side)
        return None
    stream.wait_stream(side)
    return _Graph(own, outputs, graph)


@lru_cache
def _beside(device: torch.device, stream_id: int) -> torch.cuda.Stream:
    """Where what is called on a stream is recorded, always the same.

    A workspace of cuBLAS, 32 MB, belongs to every stream that multiplies, also while it records, and what is
    played back on different streams must not share one.
    """
    return torch.cuda.Stream(device)


def _clone(x: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of the original if it is dense, or a matrix with gaps between its columns."""
    if x.ndim == 2 and x.stride(0) == 1 and x.stride(1) >= x.shape[0]:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
    return x.clone()


def _recover(side: torch.cuda.Stream) -> None:
    """After a recording that failed: torch takes random numbers to be recorded until one has succeeded."""
    empty = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        empty.capture_begin(capture_error_mode="thread_local")
        torch.zeros((), device=side.device)
        empty.capture_end()


def _make_room(limit: int, stream: torch.cuda.Stream) -> None:
    """Forget the graphs that were not used for longest."""
    while sum(graph.nbytes for graph in _graphs.values() if graph is not None) > limit:
        torch.cuda.synchronize(stream.device)  # one that still runs needs its memory
        _graphs.popitem(last=False)
