"""Vector operations of a refinement step, one launch each.

Plain torch takes a launch for each operation; where matrices are small, those on a few numbers are most of
what a GPU has to do. CUDA rather than Triton, whose compiler takes as long for each of them as NVRTC for all.
"""

from __future__ import annotations

from typing import Any

import torch

from neula.kernels.cuda_source import compiled
from neula.kernels.dispatch import kernel, trial

Two = tuple[torch.Tensor, torch.Tensor]
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@trial("The kernels of steps of refinement", "a launch for each operation takes their place")
def _tried(device: torch.device) -> None:
    one = torch.ones(1, 1, 1, dtype=torch.float64, device=device)
    active = torch.ones(1, 1, dtype=torch.bool, device=device)
    added.kernel(one, one, one, active)
    progress.kernel(active, one[0], one[0], one[0], one[0], 0.5, 0.5, 2.0)
    relative_error.kernel(one[0], one[0], one[0], one[0], 0.5, 1.0)
    uncertainty.kernel((one[0], one[0], one[0], one[0]), one[0], one[0], one[0], 0.5)


def _alike(first: torch.Tensor, *others: object) -> bool:
    """Whether tensors in double precision have one shape: kernels broadcast none of them."""
    shape = first.shape
    return (
        first.dtype == torch.float64
        and first.numel() > 0
        and all(isinstance(x, torch.Tensor) and x.dtype == torch.float64 and x.shape == shape for x in others)
    )


def _adds(high: torch.Tensor, low: torch.Tensor, update: torch.Tensor, active: torch.Tensor) -> bool:
    return _alike(high, low, update) and active.shape == high[:, 0].shape


def _goes_on(active: torch.Tensor, *numbers: object) -> bool:
    left = numbers[0]
    return isinstance(left, torch.Tensor) and _alike(left, *numbers[1:4]) and active.shape == left.shape


def _is_uncertain(norms: tuple[torch.Tensor, ...], *of_matrices: object) -> bool:
    return _alike(*norms) and _alike(norms[0][:, :1], *of_matrices[:3])


def _is_relative(left: torch.Tensor, size: torch.Tensor, low: torch.Tensor, rate: object, *_: object) -> bool:
    return _alike(left, size, low) and _alike(left[:, :1], rate)


@kernel("added_cuda", trial=_tried, when=_adds)
def added(high: torch.Tensor, low: torch.Tensor, update: torch.Tensor, active: torch.Tensor) -> Three:
    """``high + low + update`` (batch, n, k) as an unevaluated sum, and the update: zero where a column is not
    active.

    The second part is what rounding the first one lost (Knuth's TwoSum, which needs no order of sizes).
    """
    update = torch.where(active[:, None], update, 0.0)
    rest = update + low
    total = high + rest
    of_rest = total - high
    return total, (high - (total - of_rest)) + (rest - of_rest), update


@kernel("progress_cuda", trial=_tried, when=_goes_on)
def progress(
    active: torch.Tensor,
    left: torch.Tensor,
    before: torch.Tensor,
    floor: torch.Tensor | float,
    size: torch.Tensor,
    tolerance: float,
    stagnation: float,
    least: float,
) -> Two:
    """Remaining error of each column after a step, and whether another step is worthwhile.

    ``left`` and ``before`` are bounds on the error after the step, which columns that are ``active`` had, and
    before it; ``floor`` is an error that no step reduces, and ``size`` that of the solution. A relative error
    of ``tolerance`` is small enough. Part ``stagnation`` of the error before may be left, and at more than
    ``least`` times the floor there is something to gain.
    """
    left = torch.where(active, left, before)
    goes_on = (left > tolerance * size) & (left < stagnation * before) & (left > least * floor)
    return left, active & goes_on


@kernel("uncertainty_cuda", trial=_tried, when=_is_uncertain)
def uncertainty(
    norms: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    rate: torch.Tensor,
    norm: torch.Tensor,
    inverse_norm: torch.Tensor,
    noise: float,
) -> Two:
    """By how much a step of the corrected seminormal equations may be wrong, and the part that remains.

    Errors of the residual, of which ``noise`` is the relative one, reach x through ``B^+``, and those of the
    gradient through ``(B^T B)^-1``. ``norms`` are ``||R^-T g||``, ``||D x||``, ``||b||`` and ``||r||``;
    ``norm`` and ``inverse_norm`` are bounds on ``||B||`` and ``||B^+||``.
    """
    projected, size, b, residual = norms
    floor = noise * (norm * size + b + norm * inverse_norm * residual)
    wrong = rate / (1 - rate) * projected + floor
    return inverse_norm * wrong, inverse_norm * floor


@kernel("relative_error_cuda", trial=_tried, when=_is_relative)
def relative_error(
    left: torch.Tensor,
    size: torch.Tensor,
    low: torch.Tensor,
    rate: torch.Tensor,
    max_rate: float,
    computed: float,
) -> torch.Tensor:
    """Forward errors, relative to exact solutions; infinite where steps are not trusted to show them: at
    rates of convergence above ``max_rate``.

    ``left`` are bounds on the error of the sum of two numbers that x is, ``size`` and ``low`` sizes of both;
    ``computed`` is for the rounding errors of the bound itself.
    """
    error = over(left, size) + over(low, size)
    error = computed * error / (1 - error)
    trusted = (rate <= max_rate) & (error >= 0) & error.isfinite()
    return torch.where(trusted, error, torch.inf)


def over(a: torch.Tensor, b: torch.Tensor | float) -> torch.Tensor:
    """``a / b``, 0 where both vanish."""
    return (a / b).masked_fill(a == 0, 0.0)


THREADS = 256


def added_cuda(high, low, update, active):
    found = [_like(high) for _ in range(3)]
    _launch("added", high.numel(), active, high, low, update, *found, high[0].numel(), high.shape[2])
    return found[0], found[1], found[2]


def progress_cuda(active, left, before, floor, size, tolerance, stagnation, least):
    found, goes_on = _like(left), _like(active)
    numbers = (tolerance, stagnation, least)
    _launch("progress", left.numel(), active, left, before, floor, size, found, goes_on, *numbers)
    return found, goes_on


def uncertainty_cuda(norms, rate, norm, inverse_norm, noise):
    left, floor = _like(norms[2]), _like(norms[2])
    given = (*norms, rate, norm, inverse_norm, left, floor, noise)
    _launch("uncertainty", left.numel(), *given, left.shape[1])
    return left, floor


def relative_error_cuda(left, size, low, rate, max_rate, computed):
    found = _like(left)
    given = (left, size, low, rate, found, max_rate, computed)
    _launch("relative_error", left.numel(), *given, left.shape[1])
    return found


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _launch(name: str, count: int, *given: Any) -> None:
    """For each element of the results; all tensors are made contiguous, the results are."""
    arguments = [x.contiguous() if isinstance(x, torch.Tensor) else x for x in given]
    first = next(x for x in arguments if isinstance(x, torch.Tensor))
    kernel = compiled("refining", name, first.device)
    kernel((-(-count // THREADS), 1, 1), (THREADS, 1, 1), [*arguments, count])
