"""Steps of refinement on a GPU: elementwise, one launch for all operations on an element.

CUDA rather than Triton, whose compiler takes as long for each of them as NVRTC for all.
"""

from __future__ import annotations

from typing import Any

import torch

from neula.kernels.cuda_source import compiled
from neula.kernels.small_problems.refining import Three, Two

THREADS = 256


def added_cuda(high: torch.Tensor, low: torch.Tensor, update: torch.Tensor, active: torch.Tensor) -> Three:
    """:func:`neula.kernels.small_problems.refining.added` by the kernel, queued on the current stream."""
    found = [_like(high) for _ in range(3)]
    _launch("added", high.numel(), active, high, low, update, *found, high[0].numel(), high.shape[2])
    return found[0], found[1], found[2]


def progress_cuda(
    active: torch.Tensor,
    left: torch.Tensor,
    before: torch.Tensor,
    floor: torch.Tensor,
    size: torch.Tensor,
    tolerance: float,
    stagnation: float,
    least: float,
) -> Two:
    """:func:`neula.kernels.small_problems.refining.progress` by the kernel, queued on the current stream."""
    found, goes_on = _like(left), _like(active)
    numbers = (tolerance, stagnation, least)
    _launch("progress", left.numel(), active, left, before, floor, size, found, goes_on, *numbers)
    return found, goes_on


def uncertainty_cuda(
    norms: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    rate: torch.Tensor,
    norm: torch.Tensor,
    inverse_norm: torch.Tensor,
    noise: float,
) -> Two:
    """``refining.uncertainty`` by the kernel, queued on the current stream."""
    left, floor = _like(norms[2]), _like(norms[2])
    given = (*norms, rate, norm, inverse_norm, left, floor, noise)
    _launch("uncertainty", left.numel(), *given, left.shape[1])
    return left, floor


def relative_error_cuda(
    left: torch.Tensor,
    size: torch.Tensor,
    low: torch.Tensor,
    rate: torch.Tensor,
    max_rate: float,
    computed: float,
) -> torch.Tensor:
    """``refining.relative_error`` by the kernel, queued on the current stream."""
    found = _like(left)
    given = (left, size, low, rate, found, max_rate, computed)
    _launch("relative_error", left.numel(), *given, left.shape[1])
    return found


def perturbations_cuda(
    gradient: torch.Tensor,
    residual: torch.Tensor,
    projected: torch.Tensor,
    image: torch.Tensor,
    b: torch.Tensor,
    norm: torch.Tensor,
) -> Two:
    """``refining.perturbations`` by the kernel, queued on the current stream."""
    error, optimality = _like(b), _like(b)
    given = (gradient, residual, projected, image, b, norm, error, optimality)
    _launch("perturbations", b.numel(), *given, b.shape[1])
    return error, optimality


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _launch(name: str, count: int, *given: Any) -> None:
    """For each element of the results; all tensors are made contiguous, the results are."""
    arguments = [x.contiguous() if isinstance(x, torch.Tensor) else x for x in given]
    first = next(x for x in arguments if isinstance(x, torch.Tensor))
    with torch.cuda.device_of(first):
        kernel = compiled("refining", name, first.device)
        kernel((-(-count // THREADS), 1, 1), (THREADS, 1, 1), [*arguments, count])
