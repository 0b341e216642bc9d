"""Steps of refinement on a GPU: elementwise, one launch for all operations on an element.

All kernels here take the same types of arguments, whether they have use for them or not: what launches them
is compiled once for each list of types, and takes longer to compile than they do.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from neula.kernels.doubled_triton import two_sum
from neula.kernels.refining import Three, Two
from neula.kernels.tiles_triton import least_of, quotient

BLOCK = 256

INPUTS, OUTPUTS, NUMBERS = 7, 3, 3
"""How many of each the kernels take."""


def added_triton(high: torch.Tensor, low: torch.Tensor, update: torch.Tensor, active: torch.Tensor) -> Three:
    """:func:`neula.kernels.refining.added` by the kernel, queued on the current stream."""
    given = [x.contiguous() for x in (high, low, update)]
    found = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given]
    _launch(_added, given, found, active=active)
    return found[0], found[1], found[2]


def progress_triton(
    active: torch.Tensor,
    left: torch.Tensor,
    before: torch.Tensor,
    floor: torch.Tensor | float,
    size: torch.Tensor,
    tolerance: float,
    stagnation: float,
    least: float,
) -> Two:
    """:func:`neula.kernels.refining.progress` by the kernel, queued on the current stream."""
    assert isinstance(floor, torch.Tensor)
    found, goes_on = torch.empty_like(left, memory_format=torch.contiguous_format), torch.empty_like(active)
    numbers = (tolerance, stagnation, least)
    _launch(_progress, [left, before, floor, size], [found], numbers, active=active, to_active=goes_on)
    return found, goes_on


def uncertainty_triton(
    norms: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    rate: torch.Tensor,
    norm: torch.Tensor,
    inverse_norm: torch.Tensor,
    noise: float,
) -> Two:
    """:func:`neula.kernels.refining.uncertainty` by the kernel, queued on the current stream."""
    left, floor = (torch.empty_like(norms[2], memory_format=torch.contiguous_format) for _ in range(2))
    _launch(_uncertainty, [*norms, rate, norm, inverse_norm], [left, floor], (noise,))
    return left, floor


def relative_error_triton(
    left: torch.Tensor,
    size: torch.Tensor,
    low: torch.Tensor,
    rate: torch.Tensor,
    max_rate: float,
    computed: float,
) -> torch.Tensor:
    """:func:`neula.kernels.refining.relative_error` by the kernel, queued on the current stream."""
    found = torch.empty_like(left, memory_format=torch.contiguous_format)
    _launch(_relative_error, [left, size, low, rate], [found], (max_rate, computed))
    return found


def perturbations_triton(
    gradient: torch.Tensor,
    residual: torch.Tensor,
    projected: torch.Tensor,
    image: torch.Tensor,
    b: torch.Tensor,
    norm: torch.Tensor | float,
) -> Two:
    """:func:`neula.kernels.refining.perturbations` by the kernel, queued on the current stream."""
    assert isinstance(norm, torch.Tensor)
    error, optimality = (torch.empty_like(b, memory_format=torch.contiguous_format) for _ in range(2))
    _launch(_perturbations, [gradient, residual, projected, image, b, norm], [error, optimality])
    return error, optimality


def _launch(
    kernel: Any,
    given: list[torch.Tensor],
    found: list[torch.Tensor],
    numbers: Sequence[float] = (),
    *,
    active: torch.Tensor | None = None,
    to_active: torch.Tensor | None = None,
) -> None:
    """For each element of the results; all tensors are made contiguous, the results are."""
    first, shape = found[0], found[0].shape
    nothing = first.view(-1).view(torch.uint8)
    bools = [nothing if x is None else x.contiguous().view(torch.uint8) for x in (active, to_active)]
    given = [x.contiguous() for x in given]
    given += given[:1] * (INPUTS - len(given))
    with torch.cuda.device_of(first):
        kernel[(triton.cdiv(first.numel(), BLOCK),)](
            *(*bools, *given, *found, *found[:1] * (OUTPUTS - len(found))),
            *(*numbers, *(0.0,) * (NUMBERS - len(numbers))),
            *(shape[-2] * shape[-1], shape[-1], first.numel(), BLOCK),
            # Contracted to a multiply-add, a sum of rounded products has another rounding error.
            enable_fp_fusion=False,
        )


TENSORS = tuple(range(2 + INPUTS + OUTPUTS))
SIZES = ("each", "k", "count")


@triton.jit
def _places(count, BLOCK: tl.constexpr):
    """Elements of this program, and which of them there are."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return place, place < count


@triton.jit
def _at(x, place, inside):
    """Numbers at these places, zero where there are none."""
    return tl.load(x + place, mask=inside, other=0.0)


@triton.jit(do_not_specialize=[*TENSORS, *SIZES])
def _added(
    active, _1, high, low, update, _2, _3, _4, _5, to_high, to_low, to_update,
    _6: tl.float64, _7: tl.float64, _8: tl.float64, each, k, count, BLOCK: tl.constexpr,
):  # fmt: skip
    place, inside = _places(count, BLOCK)
    going = tl.load(active + place // each * k + place % k, mask=inside, other=0) != 0
    x = tl.where(going, _at(update, place, inside), 0.0)
    rest = x + _at(low, place, inside)
    total, lost = two_sum(_at(high, place, inside), rest)
    tl.store(to_high + place, total, mask=inside)
    tl.store(to_low + place, lost, mask=inside)
    tl.store(to_update + place, x, mask=inside)


@triton.jit(do_not_specialize=[*TENSORS, *SIZES])
def _progress(
    active, to_active, left, before, floor, size, _1, _2, _3, to_left, _4, _5,
    tolerance: tl.float64, stagnation: tl.float64, least: tl.float64, each, k, count, BLOCK: tl.constexpr,
):  # fmt: skip
    place, inside = _places(count, BLOCK)
    going = tl.load(active + place, mask=inside, other=0) != 0
    old = _at(before, place, inside)
    new = tl.where(going, _at(left, place, inside), old)
    goes_on = going & (new > tolerance * _at(size, place, inside))
    goes_on &= (new < stagnation * old) & (new > least * _at(floor, place, inside))
    tl.store(to_left + place, new, mask=inside)
    tl.store(to_active + place, goes_on.to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=[*TENSORS, *SIZES])
def _uncertainty(
    _1, _2, projected, size, b, residual, rate, norm, inverse_norm, to_left, to_floor, _3,
    noise: tl.float64, _4: tl.float64, _5: tl.float64, each, k, count, BLOCK: tl.constexpr,
):  # fmt: skip
    place, inside = _places(count, BLOCK)
    member = place // k
    speed = _at(rate, member, inside)
    of_b = _at(norm, member, inside)
    of_inverse = _at(inverse_norm, member, inside)
    lost = of_b * _at(size, place, inside) + _at(b, place, inside)
    lost = noise * (lost + of_b * of_inverse * _at(residual, place, inside))
    wrong = speed / (1.0 - speed) * _at(projected, place, inside) + lost
    tl.store(to_left + place, of_inverse * wrong, mask=inside)
    tl.store(to_floor + place, of_inverse * lost, mask=inside)


@triton.jit(do_not_specialize=[*TENSORS, *SIZES])
def _relative_error(
    _1, _2, left, size, low, rate, _3, _4, _5, to_error, _6, _7,
    max_rate: tl.float64, computed: tl.float64, _8: tl.float64, each, k, count, BLOCK: tl.constexpr,
):  # fmt: skip
    place, inside = _places(count, BLOCK)
    of_x = _at(size, place, inside)
    error = quotient(_at(left, place, inside), of_x)
    error += quotient(_at(low, place, inside), of_x)
    error = computed * error / (1.0 - error)
    trusted = _at(rate, place // k, inside) <= max_rate
    trusted &= (error >= 0.0) & (error < float("inf"))
    tl.store(to_error + place, tl.where(trusted, error, float("inf")), mask=inside)


@triton.jit(do_not_specialize=[*TENSORS, *SIZES])
def _perturbations(
    _1, _2, gradient, residual, projected, image, b, norm, _3, to_error, to_optimality, _4,
    _5: tl.float64, _6: tl.float64, _7: tl.float64, each, k, count, BLOCK: tl.constexpr,
):  # fmt: skip
    place, inside = _places(count, BLOCK)
    r = _at(residual, place, inside)
    of_x = _at(image, place, inside)
    of_a = _at(norm, place // k, inside)
    optimality = quotient(_at(gradient, place, inside), of_a * r)
    consistent = quotient(r, of_x + _at(b, place, inside))
    projection = quotient(_at(projected, place, inside), of_x)
    tl.store(to_error + place, least_of(least_of(optimality, consistent), projection), mask=inside)
    tl.store(to_optimality + place, optimality, mask=inside)
