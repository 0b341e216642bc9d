"""Measures of the solution of a linear system, from vectors: steps of refinement and evidence in one launch.

Plain torch takes a launch for each norm and for each operation on a few numbers, in all some two hundred for
a system that is refined twice; for a single one of order 500 that is most of what a GPU has to do. A program
has a column, or a system: vectors are read once, and every number that is wanted of them is summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.doubled.doubled_triton import two_sum
from neula.kernels.magnitudes import largest_magnitude, two_norms
from neula.kernels.small_problems.refining import added, over, progress, relative_error
from neula.kernels.small_problems.tiles_triton import most_of, quotient
from neula.kernels.triton_source import jit, tl

FEW = 16
"""Right-hand sides at most: an element of each vector is read by a thread of its own."""


@dataclass(frozen=True)
class Trust:
    """Bounds on the errors of a solver's updates."""

    sizes: torch.Tensor  # shape (batch, n, 1): the diagonal of D
    wrong: torch.Tensor  # shape (batch, 1): ||D e|| / ||d|| for the error e of an update d, at most
    inverse_norm: torch.Tensor  # shape (batch, 1): ||D A^-1||
    norm: torch.Tensor  # shape (batch, 1): ||A||
    length: torch.Tensor  # shape (batch, k): ||b||
    noise: float  # rounding errors of a residual, relative to ||A|| ||x|| + ||b||

    @property
    def numbers(self) -> tuple[torch.Tensor, ...]:
        """All fields except the last one."""
        return self.sizes, self.wrong, self.inverse_norm, self.norm, self.length

    def floor(self, high: torch.Tensor) -> torch.Tensor:
        """The error that no update reduces, shape (batch, k)."""
        image = self.norm * two_norms(high, 1) + self.length
        return self.noise * self.inverse_norm * image

    def left(self, update: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
        """Remaining error after an update, shape (batch, k)."""
        return self.wrong * two_norms(update, 1) + floor


class Stepped(NamedTuple):
    """Unknowns after a step of refinement."""

    # high, low, update, shape (batch, n, k): as neula.kernels.small_problems.refining.added returns them.
    high: torch.Tensor
    low: torch.Tensor
    update: torch.Tensor
    left: torch.Tensor  # shape (batch, k): bound on the error
    active: torch.Tensor  # bool, shape (batch, k): which columns another step would improve


class MeasuredSystems(NamedTuple):
    """Measures of solutions of linear systems."""

    forward_error: torch.Tensor  # shape (batch, k)
    # Shape (9, batch): of the worst column the six numbers of the verdict (neula.certificates.verdict), the
    # condition number, the largest element, and 1.
    numbers: torch.Tensor


@trial("The kernels of the evidence of linear systems", "a launch for each operation takes their place")
def _tried(device: torch.device) -> None:
    vector = torch.ones(1, 65, 1, dtype=torch.float64, device=device)  # longer than the shortest
    number, margins = vector[:, 0], EvidenceMargins(0.25, 1.0, 3.0)
    one, active = number[0], torch.ones_like(number, dtype=torch.bool)
    trust = Trust(vector, number, number, number, number, 1.0)
    stepped.kernel(vector, vector, vector, active, number, trust, 0.5, 0.5, 2.0)
    measured_systems.kernel(*(vector,) * 5, number, active, number, number, one, one, margins)


def _steps(high: torch.Tensor, *_: object) -> bool:
    return high.dtype == torch.float64 and high.numel() > 0 and high.shape[2] <= FEW


@kernel("stepped_triton", trial=_tried, when=_steps)
def stepped(
    high: torch.Tensor,
    low: torch.Tensor,
    update: torch.Tensor,
    active: torch.Tensor,
    before: torch.Tensor,
    trust: Trust,
    tolerance: float,
    stagnation: float,
    least: float,
) -> Stepped:
    """A step of refinement, given the update (batch, n, k) and a bound on the error before, for columns that
    are ``active``, and whether another one is worthwhile.

    The last three are as for :func:`neula.kernels.small_problems.refining.progress`.
    """
    floor = trust.floor(high)
    left = trust.left(update, floor)
    high, low, update = added(high, low, update, active)
    size = two_norms(trust.sizes * high, 1)
    left, goes_on = progress(active, left, before, floor, size, tolerance, stagnation, least)
    return Stepped(high, low, update, left, goes_on)


@dataclass(frozen=True)
class EvidenceMargins:
    """Safety factors of updates and estimates as evidence."""

    max_rate: float  # rate of convergence up to which updates show the error
    computed: float  # for the rounding errors of a bound
    estimated: float  # factor between an estimate of a condition number and a bound


@kernel("measured_systems_triton", trial=_tried, when=_steps)
def measured_systems(
    high: torch.Tensor,
    low: torch.Tensor,
    sizes: torch.Tensor,
    residual: torch.Tensor,
    b: torch.Tensor,
    left: torch.Tensor,
    unfinished: torch.Tensor,
    size_of_a: torch.Tensor,
    size_of_b: torch.Tensor,
    rate: torch.Tensor,
    condition: torch.Tensor,
    margins: EvidenceMargins,
) -> MeasuredSystems:
    """The evidence of solutions that are not rounded any further, of systems as given.

    ``high`` (batch, n, k) is x, and ``low`` what it lacks; the residual of their sum is measured, and that of
    x differs by what ``low`` makes of it. ``sizes`` (batch, n, 1) is the diagonal of D, and ``left`` a bound
    on the error of the sum. Columns that are ``unfinished`` are doubtful, whatever is measured. Sizes of A
    (batch, 1) and of b are in the infinity norm.
    """
    norm = torch.linalg.vector_norm
    size, low_size = norm(sizes * high, dim=1), norm(sizes * low, dim=1)
    forward_error = relative_error(left, size, low_size, rate[:, None], margins.max_rate, margins.computed)
    largest = largest_magnitude(high, 1)
    measured = over(largest_magnitude(residual, 1), size_of_a * largest + size_of_b)
    measured = measured.nan_to_num(torch.inf, torch.inf)
    relative_residual = over(norm(residual, dim=1), norm(b, dim=1))
    condition = condition.nan_to_num(torch.inf, torch.inf).clamp_min(1.0)
    backward_error = measured + over(low_size, size)
    errors = unfinished.double(), relative_residual, measured, backward_error, forward_error
    worst = [x.amax(1) for x in errors]
    of_matrix = margins.estimated * condition, condition
    numbers = (*worst, *of_matrix, largest.amax(1), torch.ones_like(condition))
    return MeasuredSystems(forward_error, torch.stack(numbers))


BLOCK, WARPS = 1024, 8
"""Elements of a vector at a time."""

NARROW, FEW_WARPS = 64, 1
"""Elements at a time of shorter vectors."""


def stepped_triton(high, low, update, active, before, trust, tolerance, stagnation, least):
    count, n, k = high.shape
    vectors = [x.contiguous() for x in (high, low, update)]
    room = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (*vectors, before, active)]
    found = Stepped._make(room)
    bools = [x.contiguous().view(torch.uint8) for x in (active, found.active)]
    _stepped[(count * k,)](
        *(*vectors, *found[:3], *bools, before.contiguous(), found.left),
        *(x.contiguous() for x in trust.numbers),
        *(n, k, trust.noise, tolerance, stagnation, least, *_block(n)),
        num_warps=_warps(n),
        # Contracted to a multiply-add, a sum of rounded products has another rounding error.
        enable_fp_fusion=False,
    )
    return found


def measured_systems_triton(
    high, low, sizes, residual, b, left, unfinished, size_of_a, size_of_b, rate, condition, margins
):
    count, n, k = high.shape
    found = MeasuredSystems(high.new_empty(count, k), high.new_empty(9, count))
    given = [x.contiguous() for x in (high, low, sizes, residual, b, left, size_of_a, size_of_b)]
    _measured_systems[(count,)](
        *(*given, rate.contiguous(), condition.contiguous(), unfinished.contiguous().view(torch.uint8)),
        *(found.forward_error, found.numbers, n, k, count),
        *(margins.max_rate, margins.computed, margins.estimated, *_block(n)),
        num_warps=_warps(n),
    )
    return found


def _block(n: int) -> tuple[int]:
    return (NARROW if n <= NARROW else BLOCK,)


def _warps(n: int) -> int:
    return FEW_WARPS if n <= NARROW else WARPS


# Otherwise they would be compiled anew for sizes that are 1 or divisible by 16, and where memory begins at
# multiples of 16 bytes.
STEPPED = (
    *("high", "low", "update", "to_high", "to_low", "to_update", "active", "to_active", "before", "to_left"),
    *("sizes", "wrong", "inverse_norm", "norm", "length", "n", "k"),
)


@jit(do_not_specialize=[*STEPPED])
def _stepped(
    high, low, update, to_high, to_low, to_update, active, to_active, before, to_left,
    sizes, wrong, inverse_norm, norm, length, n, k,
    noise: tl.float64, tolerance: tl.float64, stagnation: tl.float64, least: tl.float64, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0).to(tl.int64)
    member = column // k
    first = member * n * k + column % k
    going = tl.load(active + column) != 0
    of_high, of_update = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    of_found = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, n, BLOCK):
        j = start + tl.arange(0, BLOCK)
        inside, place = j < n, first + j * k
        x, d = tl.load(high + place, mask=inside, other=0.0), tl.load(update + place, mask=inside, other=0.0)
        of_high += x * x
        of_update += d * d
        d = tl.where(going, d, 0.0)
        total, lost = two_sum(x, d + tl.load(low + place, mask=inside, other=0.0))
        size = total * tl.load(sizes + member * n + j, mask=inside, other=0.0)
        of_found += size * size
        tl.store(to_high + place, total, mask=inside)
        tl.store(to_low + place, lost, mask=inside)
        tl.store(to_update + place, d, mask=inside)
    image = tl.load(norm + member) * tl.sqrt(tl.sum(of_high, axis=0)) + tl.load(length + column)
    floor = noise * tl.load(inverse_norm + member) * image
    old = tl.load(before + column)
    new = tl.where(going, tl.load(wrong + member) * tl.sqrt(tl.sum(of_update, axis=0)) + floor, old)
    goes_on = going & (new > tolerance * tl.sqrt(tl.sum(of_found, axis=0)))
    goes_on &= (new < stagnation * old) & (new > least * floor)
    tl.store(to_left + column, new)
    tl.store(to_active + column, goes_on.to(tl.uint8))


MEASURED = (
    *("high", "low", "sizes", "residual", "b", "left", "size_of_a", "size_of_b", "rate", "condition"),
    *("unfinished", "to_forward", "numbers", "n", "k", "count"),
)


@jit(do_not_specialize=[*MEASURED])
def _measured_systems(
    high, low, sizes, residual, b, left, size_of_a, size_of_b, rate, condition,
    unfinished, to_forward, numbers, n, k, count,
    max_rate: tl.float64, computed: tl.float64, estimated: tl.float64, BLOCK: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(0).to(tl.int64)
    speed, norm = tl.load(rate + member), tl.load(size_of_a + member)
    zero = tl.full((), 0.0, tl.float64)
    doubtful, shortened, refined, forward, backward, largest = zero, zero, zero, zero, zero, zero
    for column in range(k):
        place, first = member * k + column, member * n * k + column
        of_high, of_low = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
        of_r, of_b = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
        most_x, most_r = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
        for start in range(0, n, BLOCK):
            j = start + tl.arange(0, BLOCK)
            inside = j < n
            x = tl.load(high + first + j * k, mask=inside, other=0.0)
            d = tl.load(sizes + member * n + j, mask=inside, other=0.0)
            rest = d * tl.load(low + first + j * k, mask=inside, other=0.0)
            r = tl.load(residual + first + j * k, mask=inside, other=0.0)
            y = tl.load(b + first + j * k, mask=inside, other=0.0)
            of_high += (d * x) * (d * x)
            of_low += rest * rest
            of_r += r * r
            of_b += y * y
            most_x, most_r = most_of(most_x, tl.abs(x)), most_of(most_r, tl.abs(r))
        size, low_size = tl.sqrt(tl.sum(of_high, axis=0)), tl.sqrt(tl.sum(of_low, axis=0))
        r_norm, b_norm = tl.sqrt(tl.sum(of_r, axis=0)), tl.sqrt(tl.sum(of_b, axis=0))
        # The largest of numbers and NaN is a number here, but no sum is.
        biggest = _most(most_x)
        small = quotient(_most(most_r), norm * biggest + tl.load(size_of_b + place))
        small = tl.where(small != small, float("inf"), small)
        lost = quotient(low_size, size)
        error = quotient(tl.load(left + place), size) + lost
        error = computed * error / (1.0 - error)
        trusts = (speed <= max_rate) & (error >= 0.0) & (error < float("inf"))
        error = tl.where(trusts, error, float("inf"))
        doubtful = tl.maximum(doubtful, tl.load(unfinished + place).to(tl.float64))
        shortened = most_of(shortened, quotient(r_norm, b_norm))
        refined, forward = most_of(refined, small), most_of(forward, error)
        backward, largest = most_of(backward, small + lost), most_of(largest, biggest)
        tl.store(to_forward + place, error)
    known = tl.load(condition + member)
    known = tl.where(known != known, float("inf"), tl.where(known < 1.0, 1.0, known))
    numbers += member
    tl.store(numbers, doubtful)
    tl.store(numbers + count, shortened)
    tl.store(numbers + 2 * count, refined)
    tl.store(numbers + 3 * count, backward)
    tl.store(numbers + 4 * count, forward)
    tl.store(numbers + 5 * count, estimated * known)
    tl.store(numbers + 6 * count, known)
    tl.store(numbers + 7 * count, largest)
    tl.store(numbers + 8 * count, zero + 1.0)


@jit
def _most(x):
    """The largest of some magnitudes; NaN if one of them is."""
    return tl.where(tl.sum(x, axis=0) != tl.sum(x, axis=0), float("nan"), tl.max(x, axis=0))
