"""The caller's function and its Jacobian, as functions of a batch of points."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from neula.algorithms.nonlinear import differentiate
from neula.algorithms.nonlinear.damped import picked, placed
from neula.algorithms.nonlinear.differentiate import STEPS, Differences, Function
from neula.errors import check_name
from neula.io.integers import in_float64
from neula.pipeline.chain import is_shortage
from neula.pipeline.inputs import FLOATS, has_tangent, take

MODES = ("forward", "reverse")
SCHEMES = tuple(STEPS)
TORCH = "torch"  # the mode with fewer directions


@dataclass
class Points:
    """Conversion of points for the caller's function, and of its residuals back."""

    batch: tuple[int, ...]  # leading dimensions of x
    wrap: Callable[[torch.Tensor], Any]  # makes an array of the caller's library
    # Shape (P, n). The last point of each problem. A function is called for all of them, also where only some
    # are open.
    whole: torch.Tensor

    def given(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        """The argument for the user's function, shape (*batch, n), if problems ``which`` are at x."""
        if len(which) < len(self.whole):
            x = self.whole.to(x.dtype).index_copy(0, which, x)
        return x.reshape(*self.batch, x.shape[-1])

    def taken(self, out: torch.Tensor, which: torch.Tensor, name: str = "fun") -> torch.Tensor:
        """The values of the user's function for problems ``which``, shape (len(which), ...)."""
        if not self.batch:
            return out[None]
        if out.shape[: len(self.batch)] != self.batch:
            raise ValueError(
                f"{name} returned shape {tuple(out.shape)} for x of shape "
                f"{(*self.batch, self.whole.shape[1])}: the leading dimensions must be {self.batch}, one "
                "row for each problem"
            )
        out = out.reshape(len(self.whole), *out.shape[len(self.batch) :])
        return out if len(which) == len(self.whole) else out[which]


RowFunction = Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]
"""From points, shape (P, n), the numbers of their problems and a block to residuals, shape (P, m)."""


def tensor_of(out: Any, name: str, *, or_complex: bool = False) -> torch.Tensor:
    """Convert the return value of a user's function to a tensor."""
    if isinstance(out, torch.Tensor) and (out.dtype in FLOATS or (or_complex and out.is_complex())):
        return out
    if isinstance(out, (list, tuple, float, int, complex)):
        out = np.asarray(out) if np.iscomplexobj(out) else in_float64(out, name)
    return take(out, name, or_complex=or_complex).tensor


def real_rows(f: torch.Tensor) -> torch.Tensor:
    """Residuals (P, m) or a Jacobian (P, m, n); of complex ones each real part before the imaginary."""
    if not f.is_complex():
        return f
    return torch.view_as_real(f.resolve_conj()).movedim(-1, 2).flatten(1, 2)


def complex_rows(f: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`real_rows`."""
    return torch.complex(f[:, ::2], f[:, 1::2])


def refuse_dependence(out: Any, name: str) -> None:
    """Make a gradient that is not computed an error, for an argument or a tensor that the function uses."""
    if not isinstance(out, torch.Tensor):
        return
    if torch._C._functorch.is_batchedtensor(out):
        raise ValueError(
            f"{name} depends on a tensor that torch.vmap maps over, and fits have no rule for it: fit all "
            "problems in one call, with leading dimensions of x0 or ydata"
        )
    if has_tangent(out) or (out.requires_grad and torch.is_grad_enabled()):
        raise ValueError(
            f"{name} depends on a tensor that requires a gradient or has a tangent, and fits have no "
            "derivatives for it: use its detach() there, or call within torch.no_grad()"
        )


def residuals(points: Points, fun: Callable[..., Any], *, blocked: bool) -> RowFunction:
    def call(x: torch.Tensor, which: torch.Tensor, item: Any) -> torch.Tensor:
        given = points.wrap(points.given(x, which))
        out = tensor_of(fun(given, *([item] if blocked else [])), "fun(x)", or_complex=True)
        if out.ndim == len(points.batch):  # a number for each problem
            out = out[..., None]
        if out.ndim != len(points.batch) + 1:
            raise ValueError(
                "fun must return one row of residuals for each problem, of at most 1 dimension, got shape "
                f"{tuple(out.shape)}: flatten it"
            )
        return points.taken(out.to(x.device), which)

    return call


def derivatives(points: Points, jac: Callable[..., Any], *, blocked: bool) -> RowFunction:
    def call(x: torch.Tensor, which: torch.Tensor, item: Any) -> torch.Tensor:
        given = points.wrap(points.given(x, which))
        out = tensor_of(jac(given, *([item] if blocked else [])), "jac(x)", or_complex=True)
        return points.taken(out.to(x.device), which, "jac")

    return call


def mode_of(jac: Any, *, is_tensor: bool) -> str:
    """How the Jacobian is found."""
    if jac is None or callable(jac):
        return TORCH if is_tensor else "2-point"
    check_name("jac", jac, (*MODES, *SCHEMES))
    if jac in MODES and not is_tensor:
        raise ValueError(f"jac={jac!r} differentiates functions of torch: pass x0 as a tensor")
    return str(jac)


@dataclass
class Jacobian:
    call: RowFunction  # the residuals
    given: RowFunction | None  # the caller's own: from points, numbers and a block to shape (P, m, n)
    mode: str  # one of MODES or SCHEMES, or TORCH
    differences: Differences  # their steps, and where the function may be called
    default: bool  # whether the mode was not named: another one may take its place
    typical: torch.Tensor  # shape (P, n): largest sizes that variables have had
    # Of what the function returns: one that computes in float32 is no more accurate for an x in float64. If
    # it is complex, rows are those of real and imaginary parts.
    values: torch.dtype = torch.float64
    part: torch.Tensor | None = None  # shape (P, n): factors of the steps of differences
    # To derivatives of torch; the first one works.
    ways: tuple[Callable[[Function, torch.Tensor, torch.Tensor], None], ...] = ()

    @classmethod
    def asked_for(
        cls,
        call: RowFunction,
        given: RowFunction | None,
        jac: Any,
        x: torch.Tensor,
        differences: Differences,
        *,
        is_tensor: bool,
    ) -> Jacobian:
        """Interpret the argument ``jac``, at first points of shape (P, n)."""
        return cls(call, given, mode_of(jac, is_tensor=is_tensor), differences, jac is None, x.abs())

    @property
    def noise(self) -> float:
        """Relative error of its columns, from below."""
        return differentiate.noise(self.mode, self.eps) if self.approximate else self.eps

    @property
    def approximate(self) -> bool:
        return self.given is None and self.mode in SCHEMES

    @property
    def eps(self) -> float:
        """Relative rounding errors of x and of the residuals."""
        return max(torch.finfo(dtype).eps for dtype in (self.typical.dtype, self.values))

    def take_care(self) -> bool:
        """Switch to the best differences unless one-sided ones were named; False if there are none."""
        found = self.default and self.mode == "2-point"
        if found:
            self.mode = "5-point"
        return found

    def write(
        self,
        x: torch.Tensor,
        which: torch.Tensor,
        item: Any,
        f: torch.Tensor,
        out: torch.Tensor,
        part: float = 1.0,
    ) -> None:
        """Write it to ``out``, shape (P, m, n), at x where the residuals are f."""
        # Differences take so large a part of their steps.
        if self.given is not None:
            out.copy_(self._checked(self.given(x, which, item), out))
        elif self.mode in SCHEMES:
            self._by_differences(x, which, item, f, out, part)
        else:
            self._by_derivatives(lambda point: real_rows(self.call(point, which, item)), x, out)

    def _checked(self, found: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        rows, columns = out.shape[1:]
        if self.values.is_complex:
            rows, found = rows // 2, found.to(found.dtype.to_complex())
        elif found.is_complex():
            raise TypeError("jac returned complex numbers, but fun real ones: return the real part of both")
        if found.shape[1:] != (rows, columns):
            raise ValueError(
                f"the return value of jac has wrong shape: expected {(rows, columns)} (a row for each "
                f"residual, a column for each variable), got {tuple(found.shape[1:])}"
            )
        return real_rows(found)

    def _by_differences(
        self, x: torch.Tensor, which: torch.Tensor, item: Any, f: torch.Tensor, out: torch.Tensor, part: float
    ) -> None:
        if self.mode == "cs" and self.values.is_complex:
            raise TypeError(
                "fun returned complex numbers, and jac='cs' reads derivatives from imaginary parts: pass "
                "jac='3-point'"
            )
        whole, step = self.differences, self.differences.relative_step
        typical = torch.maximum(picked(self.typical, which), x.abs())
        self.typical = placed(self.typical, which, typical)
        step = None if step is None else picked(step, which)
        parts = part if self.part is None else part * picked(self.part, which)
        here = Differences(self.mode, whole.bounds.at(which), step, self.eps, parts)

        def function(point: torch.Tensor) -> torch.Tensor:
            found = self.call(point, which, item)
            return found if point.is_complex() else real_rows(found)

        here(function, x, f, typical, out)

    def _by_derivatives(self, function: Function, x: torch.Tensor, out: torch.Tensor) -> None:
        """Differentiate by the first mode of torch that works, if none was named; found out once."""
        if not self.ways:
            by_columns = (differentiate.columns, differentiate.forward)
            by_rows = (differentiate.rows, differentiate.rows_one_by_one)
            usual = by_rows if out.shape[2] > out.shape[1] else (*by_columns, *by_rows)
            self.ways = {"forward": by_columns[1:], "reverse": by_rows[:1]}.get(self.mode, usual)
        here = torch.empty_like(out, dtype=x.dtype, device=x.device) if out.dtype != x.dtype else out
        while True:
            try:
                self.ways[0](function, x, here)
                break
            except (RuntimeError, NotImplementedError) as error:
                if is_shortage(error):
                    raise
                if len(self.ways) == 1:
                    raise TypeError(
                        f"torch cannot differentiate fun ({str(error).splitlines()[0]}): pass jac='3-point', "
                        "or a function that returns the Jacobian"
                    ) from error
                self.ways = self.ways[1:]
        if here is not out:
            out.copy_(here)
