"""CUDA graphs of functions that are called again and again: one launch instead of dozens.

A factorization of small matrices is dozens of launches of microseconds each, and Python needs longer for them
than the GPU. The second call for a shape records them, and the following ones play them back, on a copy of
the input, and return copies of the results.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from neula.engines.engine import Tensors

LARGEST = 2048
"""Inputs of up to this part of the GPU's memory are played back, 70 MB on an H200. A graph keeps a few times
its input, and for larger ones copies take as long as what is saved: 134 MB in and out take 0.17 ms."""

KEPT = 2
"""Inputs of the largest size whose graphs are kept, or more of smaller ones."""

_lock = threading.Lock()
_seen: OrderedDict[Hashable, None] = OrderedDict()
_graphs: OrderedDict[Hashable, _Graph | None] = OrderedDict()


@dataclass(frozen=True)
class _Graph:
    input: torch.Tensor
    outputs: Tensors
    graph: torch.cuda.CUDAGraph

    def __call__(self, x: torch.Tensor) -> Tensors:
        self.input.copy_(x)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)


def replay(function: Callable[[torch.Tensor], Tensors], x: torch.Tensor, key: Hashable) -> Tensors:
    """``function(x)``, from a graph where there is one for this key, shape, dtype, device and stream.

    Parameters
    ----------
    function : callable
        Takes a tensor and returns some; its launches must not depend on the numbers, nor wait for them.
    x : Tensor
        On a GPU.
    key : hashable
        Says what function does: another function for the same key would not be called.
    """
    largest = torch.cuda.get_device_properties(x.device).total_memory // LARGEST
    if x.nbytes > largest or torch.cuda.is_current_stream_capturing():
        return function(x)
    stream = torch.cuda.current_stream(x.device)
    full_key = (key, x.shape, x.dtype, x.device, stream.stream_id)
    # Between the copy of the input and those of the results nobody else may use the graph.
    with _lock:
        if full_key in _graphs:
            _graphs.move_to_end(full_key)
            graph = _graphs[full_key]
        elif full_key in _seen:
            graph = _graphs[full_key] = _captured(function, x, stream)
            _make_room(KEPT * largest, stream)
        else:
            _seen[full_key] = graph = None
            while len(_seen) > 1024:
                _seen.popitem(last=False)
        if graph is not None:
            return graph(x)
    return function(x)


def clear() -> None:
    """Forget all graphs, and free their memory."""
    with _lock:
        if _graphs:
            torch.cuda.synchronize()
        _graphs.clear()
        _seen.clear()


def _captured(
    function: Callable[[torch.Tensor], Tensors], x: torch.Tensor, stream: torch.cuda.Stream
) -> _Graph | None:
    """A graph of the function, or None if one of its steps cannot be recorded."""
    given = torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)
    function(given)  # compiles kernels and makes what is made once, neither of which a graph may do
    side = torch.cuda.Stream(x.device)
    side.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(side):
            # Not torch.cuda.graph, which empties the caches of the user. Other threads may go on.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                outputs = function(given)
            finally:
                graph.capture_end()
    except RuntimeError:
        return None
    stream.wait_stream(side)
    return _Graph(given, outputs, graph)


def _make_room(limit: int, stream: torch.cuda.Stream) -> None:
    """Forget the graphs that were not used for longest."""
    while sum(graph.input.nbytes for graph in _graphs.values() if graph is not None) > limit:
        stream.synchronize()  # one that still runs needs its memory
        _graphs.popitem(last=False)
