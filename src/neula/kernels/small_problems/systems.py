"""Measures of the solution of a linear system, from vectors; each function is one launch.

Plain torch takes a launch for each norm and for each operation on a few numbers, in all some two hundred for
a system that is refined twice; for a single one of order 500 that is most of what a GPU has to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.magnitudes import largest_magnitude
from neula.kernels.small_problems.refining import added, over, progress, relative_error

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
        image = self.norm * torch.linalg.vector_norm(high, dim=1) + self.length
        return self.noise * self.inverse_norm * image

    def left(self, update: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
        """Remaining error after an update, shape (batch, k)."""
        return self.wrong * torch.linalg.vector_norm(update, dim=1) + floor


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
    number = vector[:, 0]
    one, active, margins = (
        number[0],
        torch.ones_like(number, dtype=torch.bool),
        EvidenceMargins(0.25, 1.0, 3.0),
    )
    turned.kernel(vector, vector)
    trusted.kernel(vector, one, one, one, one, Margins(3.0, 1.0, 1, 1.0))
    trust = Trust(vector, number, number, number, number, 1.0)
    stepped.kernel(vector, vector, vector, active, number, trust, 0.5, 0.5, 2.0)
    measured_systems.kernel(*(vector,) * 5, number, active, number, number, one, one, margins)


def _single(x: torch.Tensor) -> bool:
    return x.dtype == torch.float64 and x.numel() > 0


def _is_vector(x: torch.Tensor, sizes: torch.Tensor) -> bool:
    return _single(x) and x.shape == sizes.shape and x.shape[-1] == 1 and x.ndim == 3


@kernel("neula.kernels.small_problems.systems_triton:turned_triton", trial=_tried, when=_is_vector)
def turned(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """``D y / ||y||`` for ``y = D x``: what a step of the power method with ``D A^-1`` does between solves.

    Parameters
    ----------
    x : Tensor, shape (..., n, 1)
    sizes : Tensor, shape (..., n, 1)
        The diagonal of D.
    """
    y = sizes * x
    return sizes * (y / torch.linalg.vector_norm(y, dim=-2, keepdim=True))


@dataclass(frozen=True)
class Margins:
    """Safety factors that turn estimates into bounds."""

    estimated: float  # by how much an estimated norm may be too small
    # Relative error of a solve with factors for each unit of the condition number to some power.
    rounding: float
    power: int
    left: float  # by how much more than random vectors show a solve may leave


@kernel(
    "neula.kernels.small_problems.systems_triton:trusted_triton",
    trial=_tried,
    when=lambda sizes, *_: _single(sizes),
)
def trusted(
    sizes: torch.Tensor,
    norm: torch.Tensor,
    scaled_norm: torch.Tensor,
    inverse_norm: torch.Tensor,
    left: torch.Tensor,
    margins: Margins,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rate of convergence of a solver, shape (batch,), and :attr:`Trust.wrong`.

    Parameters
    ----------
    sizes : Tensor, shape (batch, n, 1)
        The diagonal of D.
    norm, scaled_norm, inverse_norm : Tensor, shape (batch,)
        ``||A||_F``, estimates of ``||A D^-1||`` and ``||D A^-1||``.
    left : Tensor, shape (batch,)
        Norm of what solves leave of random vectors.
    margins : Margins
    """
    largest, smallest = sizes.amax((1, 2)), sizes.amin((1, 2))
    norm = torch.minimum(norm, margins.estimated * scaled_norm * largest)
    condition = norm * inverse_norm / smallest
    # Rounding errors of a solve, also where none happen to be in what is measured.
    rate = margins.left * left + margins.rounding * condition**margins.power
    return rate, (largest * rate / (1 - rate))[:, None]


def _steps(high: torch.Tensor, *_: object) -> bool:
    return _single(high) and high.shape[2] <= FEW


@kernel("neula.kernels.small_problems.systems_triton:stepped_triton", trial=_tried, when=_steps)
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
    """A step of refinement, given the update, and whether another one is worth its while.

    Parameters
    ----------
    high, low, update : Tensor, shape (batch, n, k)
    active : Tensor of bool, shape (batch, k)
        Others have no step.
    before : Tensor, shape (batch, k)
        Bound on the error before.
    trust : Trust
    tolerance, stagnation, least : float
        As for :func:`neula.kernels.small_problems.refining.progress`.
    """
    floor = trust.floor(high)
    left = trust.left(update, floor)
    high, low, update = added(high, low, update, active)
    size = torch.linalg.vector_norm(trust.sizes * high, dim=1)
    left, goes_on = progress(active, left, before, floor, size, tolerance, stagnation, least)
    return Stepped(high, low, update, left, goes_on)


@dataclass(frozen=True)
class EvidenceMargins:
    """Safety factors of updates and estimates as evidence."""

    max_rate: float  # rate of convergence up to which updates show the error
    computed: float  # for the rounding errors of a bound
    estimated: float  # factor between an estimate of a condition number and a bound


@kernel("neula.kernels.small_problems.systems_triton:measured_systems_triton", trial=_tried, when=_steps)
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

    Parameters
    ----------
    high, low : Tensor, shape (batch, n, k)
        x, and what it lacks.
    sizes : Tensor, shape (batch, n, 1)
        The diagonal of D.
    residual, b : Tensor, shape (batch, n, k)
        The residual of high + low is measured; that of x differs by what ``low`` makes of it.
    left : Tensor, shape (batch, k)
        Bound on the error of the sum.
    unfinished : Tensor of bool, shape (batch, k)
        Which of them are doubtful, whatever is measured.
    size_of_a : Tensor, shape (batch, 1)
        In the infinity norm.
    size_of_b : Tensor, shape (batch, k)
    rate, condition : Tensor, shape (batch,)
    margins : EvidenceMargins
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
