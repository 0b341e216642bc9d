"""Inputs of captured functions: tensors, or functions that write them in place without a copy."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import NamedTuple

import torch

Tensors = tuple[torch.Tensor, ...]

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor."""


class Written(NamedTuple):
    """Inputs that are not there yet: a graph has them written where it reads them, and nothing is copied.

    Examples
    --------
    >>> x = torch.ones(2)
    >>> made(Written((torch.Size([3]),), (x,), lambda room: room[0].fill_(7.0)))
    (tensor([7., 7., 7.]),)
    """

    shapes: tuple[torch.Size, ...]  # of tensors in row-major order
    like: tuple[torch.Tensor, ...]  # whose dtypes and device they have
    write: Callable[[Tensors], object]  # writes all elements of such tensors, without synchronizing

    def layouts(self) -> list[Layout]:
        """Shapes, strides and dtypes of the tensors that will be written."""
        pairs = zip(self.shapes, self.like, strict=True)
        return [(shape, row_major(shape), x.dtype) for shape, x in pairs]


Inputs = Tensors | Written

Replay = Callable[[Callable[..., Tensors], Inputs, Hashable], Tensors]
"""``function(*inputs)``, replayed from a graph if there is one for the key."""


@lru_cache(maxsize=256)
def row_major(shape: torch.Size) -> tuple[int, ...]:
    """Strides of a tensor without gaps."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def device_of(inputs: Inputs) -> torch.device:
    """Device of the inputs."""
    return (inputs.like if isinstance(inputs, Written) else inputs)[0].device


def layouts_of(inputs: Inputs) -> list[Layout]:
    """Shapes, strides and dtypes that a graph depends on."""
    if isinstance(inputs, Written):
        return inputs.layouts()
    return [(x.shape, x.stride(), x.dtype) for x in inputs]


def nbytes_of(inputs: Inputs) -> int:
    """Bytes that the inputs take."""
    if isinstance(inputs, Written):
        return sum(math.prod(shape) * dtype.itemsize for shape, _, dtype in inputs.layouts())
    return sum(x.nbytes for x in inputs)


def made(inputs: Inputs) -> Tensors:
    """The tensors themselves."""
    if not isinstance(inputs, Written):
        return inputs
    room = tuple(x.new_empty(shape) for shape, x in zip(inputs.shapes, inputs.like, strict=True))
    inputs.write(room)
    return room


def called(
    function: Callable[..., Tensors], inputs: Inputs, key: Hashable = None, out: Tensors | None = None
) -> Tensors:
    """``function(*inputs)``, without a graph, its results in ``out`` where there is room for them."""
    results = function(*made(inputs))
    return results if out is None else put(out, results)


def copied(inputs: Inputs) -> Tensors:
    """New tensors of their layouts."""
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
