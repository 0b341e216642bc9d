"""Jacobians of functions: by derivatives of torch, in the mode with fewer directions, or by differences.

A function takes points, shape (batch, n), and returns residuals, shape (batch, m), each row from its point
alone. So one tangent or one difference serves all problems of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from neula.algorithms.nonlinear.feasible import Bounds

Function = Callable[[torch.Tensor], torch.Tensor]

Derivative = Callable[[torch.Tensor], torch.Tensor]
"""From directions, shape (k, batch, count), to what a derivative makes of them."""

INTERMEDIATES = 16
"""Arrays as large as the residuals that a function is taken to hold at a time, of each tangent."""

HOST_BYTES = 1 << 28  # bytes of tangents at a time on a CPU: more is not faster

LARGE = 1 << 16
"""Elements of a Jacobian from which on it is worth a look at each operation, some microseconds, to have one
product with a matrix in place of many with vectors."""

DEVICE_PART = 4  # of the free memory of a GPU tangents take one part in so many


def columns(function: Function, x: torch.Tensor, out: torch.Tensor) -> None:
    """Columns of the Jacobian by reverse mode twice, as many at a time as fit in memory.

    ``J^T v`` is linear in v, and the transpose of its derivative is J again. The function is evaluated once,
    where forward mode does so for each chunk of tangents, and needs half the calls. Raises a TypeError if the
    function does not depend on x in a way that torch knows.
    """
    with torch.enable_grad():
        point, f = _traced(function, x)
        weights = torch.zeros_like(f, requires_grad=True)
        (pulled,) = torch.autograd.grad(f, point, weights, create_graph=True)
        push = partial(_batched_gradient, pulled, weights)
        _in_chunks(push, x.shape, out, lambda found, part: out[:, :, part].copy_(found.permute(1, 2, 0)))


def rows(function: Function, x: torch.Tensor, out: torch.Tensor) -> None:
    """Rows of the Jacobian by reverse mode, as many at a time as fit in memory; see :func:`columns`."""
    with torch.enable_grad():
        point, f = _traced(function, x)
        pull = partial(_batched_gradient, f, point)
        _in_chunks(pull, f.shape, out, lambda found, part: out[:, part].copy_(found.permute(1, 0, 2)))


def rows_one_by_one(function: Function, x: torch.Tensor, out: torch.Tensor) -> None:
    """The Jacobian of a function that vmap cannot vectorize, one row after the other."""
    with torch.enable_grad():
        point, f = _traced(function, x)
        for row in range(f.shape[1]):
            out[:, row] = torch.autograd.grad(f[:, row].sum(), point, retain_graph=True)[0]


def forward(function: Function, x: torch.Tensor, out: torch.Tensor) -> None:
    """Columns of the Jacobian by forward mode, which keeps nothing of the function; see :func:`columns`."""
    push = torch.vmap(lambda tangent: torch.func.jvp(function, (x,), (tangent,))[1], randomness="same")
    _in_chunks(push, x.shape, out, lambda found, part: out[:, :, part].copy_(found.permute(1, 2, 0)))


def _traced(function: Function, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A point and the residuals there, with the graph between them."""
    point = x.detach().clone().requires_grad_()
    f = function(point)
    if not f.requires_grad:
        raise TypeError(
            "torch cannot differentiate fun: compute with functions of torch alone, without "
            "detach(), item() or numpy(), or pass jac='3-point'"
        )
    return point, f


def _batched_gradient(f: torch.Tensor, x: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(f, x, basis, retain_graph=True, is_grads_batched=True, materialize_grads=True)[
        0
    ]


def _in_chunks(
    derivative: Derivative,
    shape: torch.Size,
    out: torch.Tensor,
    write: Callable[[torch.Tensor, slice], object],
) -> None:
    """Derivatives along every unit vector, one basis for all problems, shape (k, batch, count)."""
    batch, count = shape
    basis = torch.eye(count, dtype=out.dtype, device=out.device)
    start, width = 0, chunk(count, out[:, :, 0].nbytes, out.device)
    while start < count:
        part = slice(start, min(start + width, count))
        try:
            with _OneMatrix() if out.numel() >= LARGE else nullcontext():
                found = derivative(basis[part, None].expand(-1, batch, -1))
            write(found, part)
        except torch.OutOfMemoryError:  # what a function holds is a guess
            if width == 1:
                raise
            width = -(-width // 2)
            continue
        start += width


class _OneMatrix(TorchDispatchMode):
    """Replaces vmap's batched products ``A @ x``, each of which reads all of A, by one product."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.bmm.default:
            a, b = args
            if a.stride(0) == 0 and b.shape[2] == 1:
                return (b[:, :, 0] @ a[0].mT)[..., None]
            if b.stride(0) == 0 and a.shape[1] == 1:
                return (a[:, 0] @ b[0])[:, None]
        return func(*args, **(kwargs or {}))


def chunk(count: int, nbytes: int, device: torch.device) -> int:
    """How many of so many tangents, each with so many bytes of results, should fit in memory at a time.

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
    """Quotients of differences, as SciPy names them."""

    # {"2-point", "3-point", "5-point", "cs"}: one-sided; central; central of fourth order; or with imaginary
    # steps, which have no rounding error.
    scheme: str
    bounds: Bounds  # within which the function may be called
    # Of the size of x, broadcast with it; by default what balances rounding errors and curvature.
    relative_step: torch.Tensor | None = None
    eps: float = 0.0  # relative rounding errors of the function, where they are larger than those of x
    part: torch.Tensor | float = 1.0  # factor of the steps

    def __call__(
        self, function: Function, x: torch.Tensor, f: torch.Tensor, typical: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Write the Jacobian to ``out``, shape (batch, m, n), with f at x, and ``typical`` sizes that x has
        had.
        """
        h = self.steps(x, typical)
        if self.scheme == "cs":
            _by_imaginary_steps(function, x, h.abs(), out)
            return
        # All that does not depend on f at once: of a small problem it is most of the work.
        parts = [(by.split(1, 1), weight.split(1, 1)) for by, weight in self._quotients(x, h)]
        for j, (place, column) in enumerate(zip(_places(x), out.unbind(2), strict=True)):
            changes = [(function(x.index_add(1, place, by[j])) - f) * weight[j] for by, weight in parts]
            column.copy_(sum(changes[1:], changes[0]))

    def _quotients(self, x: torch.Tensor, h: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of how far to go from x, and with what weights the changes of f add up to a derivative."""
        if self.bounds.none:
            return [(far * h, weight / h) for far, weight in QUOTIENTS[self.scheme]]
        above, below = self.bounds.upper - x, x - self.bounds.lower
        room = torch.where(above >= below, above, -below)
        if self.scheme == "2-point":
            fits = torch.where(h > 0, h <= above, -h <= below)
            h = torch.where(fits, h, torch.where(h.abs() <= room.abs(), h.abs() * room.sign(), room))
            return [(h, 1 / h)]
        h = h.abs()
        inside = (h <= above) & (h <= below)
        # At a bound: a parabola through x and two points on the side with more room.
        side = torch.minimum(h, room.abs() / 2) * torch.where(room >= 0, 1.0, -1.0)
        first, second = torch.where(inside, -h, side), torch.where(inside, h, 2 * side)
        central = torch.where(inside, 0.5, 2.0) / torch.where(inside, -h, side)
        found = [(first, central), (second, torch.where(inside, 0.5 / h, -0.5 / side))]
        if self.scheme == "3-point":
            return found
        # Richardson's extrapolation from two central quotients, where both fit.
        inside = (2 * h <= above) & (2 * h <= below)
        wider = torch.where(inside, h, 0.0)
        third = torch.where(inside, 1 / (12 * h), 0.0)
        found = [(by, torch.where(inside, 4 / 3 * weight, weight)) for by, weight in found]
        return [*found, (-2 * wider, third), (2 * wider, -third)]

    def steps(self, x: torch.Tensor, typical: torch.Tensor) -> torch.Tensor:
        """Their lengths, away from zero: relative to x, unless x has fallen to nearly nothing."""
        part = self.part * max(torch.finfo(x.dtype).eps, self.eps) ** STEPS[self.scheme]
        size = x.abs()
        size = torch.where(size > NEGLIGIBLE * typical, size, typical)
        usual = torch.copysign(part * torch.where(size > 0, size, 1.0), x)
        if self.relative_step is not None:
            named = torch.copysign(self.part * self.relative_step * x, x)
            usual = torch.where(x + named == x, usual, named)
        return (x + usual) - x  # what is a difference of floating-point numbers


STEPS = {"2-point": 1 / 2, "3-point": 1 / 3, "5-point": 1 / 4, "cs": 1 / 2}
"""By SciPy's names, and one that SciPy has not: powers of the unit roundoff that are relative steps. That of
fourth order is shorter than what balances its errors, so that it is better than the central one also where
functions are far from polynomials."""

QUOTIENTS = {
    "2-point": ((1, 1.0),),
    "3-point": ((1, 0.5), (-1, -0.5)),
    "5-point": ((1, 2 / 3), (-1, -2 / 3), (2, -1 / 12), (-2, 1 / 12)),
}
"""How many steps to go from x, and with what weights the changes of f add up to a step times a derivative."""

NEGLIGIBLE = 1e-5  # part of its usual size below which a variable is taken to pass through zero


def noise(scheme: str, eps: float) -> float:
    """Relative error of columns that are found by differences of functions with rounding errors of eps, where
    steps are short compared with what the function does.
    """
    return eps if scheme == "cs" else eps ** (1 - STEPS[scheme])


SHORT = 0.45
"""Factor of the steps with which differences are taken again, to measure their error. Not 1/2: of a function
that changes by a few rounding errors half the step has the same error."""

MEASURED = 2.0
"""Times the change of a column with shorter steps bounds its error: truncation of 2-point differences falls
to 0.45 of itself, of all others to 0.2 or less, and rounding errors of the second one are twice as large."""

UNKNOWN = 0.5  # relative error of a column beyond which nothing is known of it

PROBES = tuple(17.0**k for k in range(1, 8))
"""Relative changes of x, in units of the rounding errors, one after the other until residuals change as their
Jacobian says: what is left are their rounding errors, which hide smaller changes."""


def _places(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.arange(x.shape[1], device=x.device).split(1)


def _by_imaginary_steps(function: Function, x: torch.Tensor, h: torch.Tensor, out: torch.Tensor) -> None:
    point, steps = x.to(torch.promote_types(x.dtype, torch.complex64)), (1j * h).split(1, 1)
    for j, place in enumerate(_places(x)):
        f = function(point.index_add(1, place, steps[j]))
        if f.numel() and not f.is_complex():
            raise TypeError(
                "fun(x) returned real numbers for a complex x, and jac='cs' needs imaginary parts: pass "
                "jac='3-point'"
            )
        out[:, :, j] = f.imag / h[:, j, None] if f.numel() else 0.0
