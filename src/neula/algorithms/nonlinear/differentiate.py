"""Jacobians of functions: by derivatives of torch, in the mode with fewer directions, or by differences.

A function takes points, shape (batch, n), and returns residuals, shape (batch, m), each row from its point
alone. So one tangent or one difference serves all problems of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Function = Callable[[torch.Tensor], torch.Tensor]

INTERMEDIATES = 16
"""Arrays as large as the residuals that a function is taken to hold at a time, of each tangent."""

HOST_BYTES = 1 << 28
"""What tangents may take at a time on a CPU: more at once is not faster."""

DEVICE_PART = 4
"""Of the free memory of a GPU tangents take one part in so many."""


def columns(function: Function, x: torch.Tensor, out: torch.Tensor) -> None:
    """Columns of the Jacobian by reverse mode twice, as many at a time as fit in memory.

    ``J^T v`` is linear in v, and the transpose of its derivative is J again. The function is evaluated once,
    where forward mode does so for each chunk of tangents, and needs half the calls.

    Parameters
    ----------
    function : callable
    x : Tensor, shape (batch, n)
    out : Tensor, shape (batch, m, n)

    Raises
    ------
    TypeError
        If the function does not depend on x in a way that torch knows.
    """
    with torch.enable_grad():
        point, f = _traced(function, x)
        weights = torch.zeros_like(f, requires_grad=True)
        (pulled,) = torch.autograd.grad(f, point, weights, create_graph=True)

        def push(basis: torch.Tensor) -> torch.Tensor:
            return _batched_gradient(pulled, weights, basis)

        _in_chunks(push, x.shape, out, lambda found, part: out[:, :, part].copy_(found.permute(1, 2, 0)))


def rows(function: Function, x: torch.Tensor, out: torch.Tensor) -> None:
    """Rows of the Jacobian by reverse mode, as many at a time as fit in memory; see :func:`columns`."""
    with torch.enable_grad():
        point, f = _traced(function, x)

        def pull(basis: torch.Tensor) -> torch.Tensor:
            return _batched_gradient(f, point, basis)

        _in_chunks(pull, f.shape, out, lambda found, part: out[:, part].copy_(found.permute(1, 0, 2)))


def rows_one_by_one(function: Function, x: torch.Tensor, out: torch.Tensor) -> None:
    """The same of functions that cannot be vectorized: one row after the other."""
    with torch.enable_grad():
        point, f = _traced(function, x)
        for row in range(f.shape[1]):
            out[:, row] = torch.autograd.grad(f[:, row].sum(), point, retain_graph=True)[0]


def forward(function: Function, x: torch.Tensor, out: torch.Tensor) -> None:
    """Columns of the Jacobian by forward mode, which keeps nothing of the function; see :func:`columns`."""

    def push(basis: torch.Tensor) -> torch.Tensor:
        pushed = torch.vmap(lambda tangent: torch.func.jvp(function, (x,), (tangent,))[1], randomness="same")
        found: torch.Tensor = pushed(basis)
        return found

    _in_chunks(push, x.shape, out, lambda found, part: out[:, :, part].copy_(found.permute(1, 2, 0)))


def _traced(function: Function, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A point and the residuals there, with the graph between them."""
    point = x.detach().clone().requires_grad_()
    f = function(point)
    if not f.requires_grad:
        raise TypeError(
            "torch finds no way from fun(x) back to x: compute with functions of torch alone, without "
            "detach(), item() or numpy(), or pass jac='3-point'"
        )
    return point, f


def _batched_gradient(f: torch.Tensor, x: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.autograd.grad(
        f, x, basis, retain_graph=True, is_grads_batched=True, materialize_grads=True
    )[0]
    return found


def _in_chunks(
    derivative: Callable[[torch.Tensor], torch.Tensor],
    shape: torch.Size,
    out: torch.Tensor,
    write: Callable[[torch.Tensor, slice], object],
) -> None:
    """A derivative along every unit vector, the same for all of a batch, shape (k, batch, count)."""
    batch, count = shape
    basis = torch.eye(count, dtype=out.dtype, device=out.device)
    start, width = 0, chunk(count, out[:, :, 0].nbytes, out.device)
    while start < count:
        part = slice(start, min(start + width, count))
        try:
            write(derivative(basis[part, None].expand(-1, batch, -1)), part)
        except torch.OutOfMemoryError:  # what a function holds is a guess
            if width == 1:
                raise
            width = -(-width // 2)
            continue
        start += width


def chunk(count: int, nbytes: int, device: torch.device) -> int:
    """How many of so many tangents, each with so many bytes of results, should fit in memory at a time.

    Examples
    --------
    >>> chunk(5, HOST_BYTES // (2 * INTERMEDIATES), torch.device("cpu"))
    2
    """
    budget = HOST_BYTES
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        budget = (free + unused) // DEVICE_PART
    return max(1, min(count, budget // max(1, INTERMEDIATES * nbytes)))


@dataclass(frozen=True)
class Differences:
    """Quotients of differences, as SciPy names them.

    Attributes
    ----------
    scheme : {"2-point", "3-point", "5-point", "cs"}
        One-sided; central; central of fourth order; or with imaginary steps, which have no rounding error.
    lower, upper : Tensor, shape (batch, n)
        Within which the function may be called.
    relative_step : Tensor or None
        Of the size of x, broadcast with it; by default what balances rounding errors and curvature.
    """

    scheme: str
    lower: torch.Tensor
    upper: torch.Tensor
    relative_step: torch.Tensor | None = None

    def __call__(
        self, function: Function, x: torch.Tensor, f: torch.Tensor, typical: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Write the Jacobian to ``out``.

        Parameters
        ----------
        function : callable
        x : Tensor, shape (batch, n)
        f : Tensor, shape (batch, m)
            At x.
        typical : Tensor, shape (batch, n)
            Sizes that x has had.
        out : Tensor, shape (batch, m, n)
        """
        steps = self.steps(x, typical)
        for j in range(x.shape[1]):
            out[:, :, j] = getattr(self, "_" + NAMES[self.scheme])(function, x, f, steps[:, j], j)

    def steps(self, x: torch.Tensor, typical: torch.Tensor) -> torch.Tensor:
        """Their lengths, away from zero: relative to x, unless x has fallen to nearly nothing."""
        part = torch.finfo(x.dtype).eps ** STEPS[self.scheme]
        sign = torch.where(x >= 0, 1.0, -1.0).to(x.dtype)
        size = torch.where(x.abs() > NEGLIGIBLE * typical, x.abs(), typical)
        usual = part * sign * torch.where(size > 0, size, 1.0)
        if self.relative_step is not None:
            named = self.relative_step * sign * x.abs()
            usual = torch.where(x + named == x, usual, named)
        return (x + usual) - x  # what is a difference of floating-point numbers

    def _one_sided(
        self, function: Function, x: torch.Tensor, f: torch.Tensor, h: torch.Tensor, j: int
    ) -> torch.Tensor:
        above, below = self.upper[:, j] - x[:, j], x[:, j] - self.lower[:, j]
        fits = torch.where(h > 0, h <= above, -h <= below)
        room = torch.where(above >= below, above, -below)
        h = torch.where(fits, h, torch.where(h.abs() <= room.abs(), h.abs() * room.sign(), room))
        return (function(moved(x, j, h)) - f) / h[:, None]

    def _fourth_order(
        self, function: Function, x: torch.Tensor, f: torch.Tensor, h: torch.Tensor, j: int
    ) -> torch.Tensor:
        """Richardson's extrapolation from two central quotients; near a bound a parabola's."""
        once, twice = self._central(function, x, f, h, j), self._central(function, x, f, 2 * h, j)
        reach = 2 * h.abs()
        inside = (reach <= self.upper[:, j] - x[:, j]) & (reach <= x[:, j] - self.lower[:, j])
        return torch.where(inside[:, None], (4 * once - twice) / 3, once)

    def _central(
        self, function: Function, x: torch.Tensor, f: torch.Tensor, h: torch.Tensor, j: int
    ) -> torch.Tensor:
        above, below = self.upper[:, j] - x[:, j], x[:, j] - self.lower[:, j]
        h = h.abs()
        inside = (h <= above) & (h <= below)
        # At a bound: a parabola through x and two points on the side with more room.
        room = torch.where(above >= below, above, -below)
        side = torch.minimum(h, room.abs() / 2) * torch.where(room >= 0, 1.0, -1.0)
        first = torch.where(inside, -h, side)
        second = torch.where(inside, h, 2 * side)
        a, b = function(moved(x, j, first)), function(moved(x, j, second))
        one_sided = (4 * a - 3 * f - b) / (2 * side)[:, None]
        return torch.where(inside[:, None], (b - a) / (2 * h)[:, None], one_sided)

    def _imaginary(
        self, function: Function, x: torch.Tensor, f: torch.Tensor, h: torch.Tensor, j: int
    ) -> torch.Tensor:
        point = x.to(torch.promote_types(x.dtype, torch.complex64))
        return function(moved(point, j, 1j * h.abs())).imag / h.abs()[:, None]


NAMES = {"2-point": "one_sided", "3-point": "central", "5-point": "fourth_order", "cs": "imaginary"}
"""Methods of :class:`Differences`, by SciPy's names, and one that SciPy has not."""

STEPS = {"2-point": 1 / 2, "3-point": 1 / 3, "5-point": 1 / 4, "cs": 1 / 2}
"""Powers of the unit roundoff that are relative steps. The third is shorter than what balances errors of the
fourth order, so that it is better than the second also where functions are far from polynomials."""

NEGLIGIBLE = 1e-5
"""Part of its usual size below which a variable is taken to pass through zero."""


def noise(scheme: str, dtype: torch.dtype) -> float:
    """Relative error of columns that are found by differences of functions as accurate as their format."""
    eps = torch.finfo(dtype).eps
    return eps if scheme == "cs" else eps ** (1 - STEPS[scheme])


def moved(x: torch.Tensor, j: int, by: Any) -> torch.Tensor:
    """Points with one variable changed."""
    point = x.clone()
    point[:, j] += by
    return point
