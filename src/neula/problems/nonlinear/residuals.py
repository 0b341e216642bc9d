"""Residuals and their Jacobian near a point: what the method of Levenberg and Marquardt asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from neula.algorithms.nonlinear.damped import norm, triangle
from neula.algorithms.nonlinear.differentiate import MEASURED, PROBES, SHORT
from neula.algorithms.nonlinear.feasible import Bounds
from neula.algorithms.nonlinear.levenberg_marquardt import Iterates, Linearization
from neula.algorithms.nonlinear.losses import Loss
from neula.engines import Engine
from neula.kernels.precision import exact_matmul, plain_arithmetic
from neula.problems.nonlinear.evidence import Errors
from neula.problems.nonlinear.functions import Call, Jacobian, real_rows, refuse_dependence
from neula.problems.orthogonal.certified import certified_triangle

REFLECTED = 1e7
"""Work ``m n^2`` up to which reflections of the library take less than the evidence for anything else."""


@dataclass
class Residuals:
    """Residuals of a batch of problems, all at once or block by block."""

    call: Call
    jacobian: Jacobian
    loss: Loss
    engine: Engine
    # Arguments of the function, one after the other: only one block of the Jacobian is in memory.
    blocks: Sequence[Any] | None = None
    # fun, jac: of each problem at the point where it was linearized last, shapes (P, m) and (P, m, n); the
    # second is scaled by the loss.
    fun: torch.Tensor | None = None
    jac: torch.Tensor | None = None
    uncertified: str = ""  # why the last triangular factor is not certified, if it is not
    rows: int = 0  # residuals of a problem; complex ones count twice
    _trial: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float32, device="cpu"))
    _of: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float32, device="cpu"))

    def cost(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        """Half the sum of losses, shape (P,)."""
        if self.blocks is not None:
            found = torch.zeros(len(x), dtype=torch.float64, device=self.engine.device)
            rows = 0
            for item in self.blocks:
                f = self._residuals(x, which, item)
                found += self.loss.cost(f)
                rows += f.shape[1]
            self._check_rows(rows)
            return found
        self._trial, self._of = self._residuals(x, which, None), which
        self._check_rows(self._trial.shape[1])
        return self.loss.cost(self._trial)

    def linearize(self, x: torch.Tensor, which: torch.Tensor) -> Linearization:
        """At points for which :meth:`cost` was called last, or some of them."""
        if self.blocks is not None:
            return self._merged(x, which)
        f = self._trial if len(which) == len(self._of) else self._trial[torch.searchsorted(self._of, which)]
        j = self._scaled_jacobian(x, which, None, f)
        if self.fun is None or self.jac is None or len(which) == len(self.fun):
            self.fun, self.jac = f, j
        else:
            self.fun[which], self.jac[which] = f, j
        scaled, size = f * self.loss.weights(f)[1], self.loss.size(f)
        with plain_arithmetic(self.engine.device):
            gradient = exact_matmul(j.mT, scaled[..., None])[..., 0]
            return Linearization(*self._factor(j, scaled), gradient, norm(j, dim=1), size)

    def _merged(self, x: torch.Tensor, which: torch.Tensor) -> Linearization:
        """From block to block: R of what came before, above the rows that come."""
        count, n = x.shape
        whole: Linearization | None = None
        for item in self.blocks or ():
            f = self._residuals(x, which, item)
            j = self._scaled_jacobian(x, which, item, f)
            size, f = self.loss.size(f), f * self.loss.weights(f)[1]
            with plain_arithmetic(self.engine.device):
                gradient = exact_matmul(j.mT, f[..., None])[..., 0]
                norms = norm(j, dim=1)
                if whole is not None:
                    j, f = torch.cat([whole.r, j], 1), torch.cat([whole.c, f], 1)
                    gradient, norms = gradient + whole.gradient, torch.hypot(norms, whole.norms)
                    size = torch.hypot(size, whole.size)
                whole = Linearization(*self._factor(j, f), gradient, norms, size)
        if whole is None:
            zeros = torch.zeros(count, n, dtype=torch.float64, device=self.engine.device)
            whole = Linearization(torch.diag_embed(zeros), zeros, zeros, zeros, zeros.sum(1))
        return whole

    def _residuals(self, x: torch.Tensor, which: torch.Tensor, item: Any) -> torch.Tensor:
        # The first time as autograd sees it.
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.rows):
            found = self.call(x, which, item)
            refuse_dependence(found, "fun")
        self.jacobian.values = found.dtype
        found = real_rows(found.detach())
        # A copy: a function may write into the same memory each time.
        return found.to(self.engine.device, torch.float64, copy=True)

    def errors(self, at: Iterates, bounds: Bounds) -> Errors:
        """Errors of the residuals and of the Jacobian at the points where it was computed last.

        Differences: truncation and rounding errors together, by how much shorter steps change them.
        """
        x, near, left = at.x, at.near, self._unexplained(at, bounds)
        least = torch.full_like(near.norms, self.jacobian.noise)
        if not self.jacobian.approximate:
            return Errors(left, least, least * near.size[:, None])
        everyone, square = torch.arange(len(x), device=x.device), torch.zeros_like(least)
        slope = square.clone()
        for item in (None,) if self.blocks is None else self.blocks:
            f = self._residuals(x, everyone, item) if self.fun is None else self.fun
            j = self._scaled_jacobian(x, everyone, item, f) if self.jac is None else self.jac
            change = self._scaled_jacobian(x, everyone, item, f, SHORT) - j
            square += change.square().sum(1)
            slope += (change * (f * self.loss.weights(f)[1])[..., None]).sum(1)
        columns = _bounded(MEASURED * square.sqrt() / near.norms, least)
        # Rounding errors are nearly orthogonal to the residuals, truncation errors may not be.
        products = (
            MEASURED * slope.abs() / near.norms + columns * (near.size / max(self.rows, 1) ** 0.5)[:, None]
        )
        return Errors(left, columns, _bounded(products, least * near.size[:, None]))

    def _unexplained(self, at: Iterates, bounds: Bounds) -> torch.Tensor:
        """Length of what changes residuals, other than the Jacobian, where x changes by nearly nothing."""
        worst = torch.zeros_like(at.near.size)
        if self.fun is None or self.jac is None:
            return worst
        x, everyone = at.x.double(), torch.arange(len(at.x), device=at.x.device)
        signed = x * (1 - 2 * (torch.arange(x.shape[1], device=x.device) % 2))
        rows, weights = self.loss.weights(self.fun)
        for probe in PROBES:
            point = bounds.clip(x + probe * at.eps * signed).to(at.x.dtype)
            slope = (self.jac @ (point - x)[..., None])[..., 0]
            change = (self._residuals(point, everyone, None) - self.fun) * rows
            left = norm((change - slope) * (weights / rows).nan_to_num(0.0), dim=1)
            worst = torch.fmax(worst, left)
            if not bool((2 * left > norm(slope, dim=1)).any()):
                break
        return worst

    def _scaled_jacobian(
        self, x: torch.Tensor, which: torch.Tensor, item: Any, f: torch.Tensor, part: float = 1.0
    ) -> torch.Tensor:
        """Column-major: derivatives come by columns, and so do factorizations go."""
        count, n = x.shape
        j = torch.empty(count, n, f.shape[1], dtype=torch.float64, device=self.engine.device).mT
        with torch.no_grad():
            self.jacobian.write(x, which, item, f.to(x.device, x.dtype), j, part)
        if self.loss.rho is not None:
            j *= self.loss.weights(f)[0][..., None]
        return j

    def _factor(self, j: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count, m, n = j.shape
        small = j.device.type == "cpu" and count * m * n * n <= REFLECTED * count
        if small or m < n or not j.numel():
            return triangle(torch.cat([j.mT, f[:, None]], 1).mT)  # by columns, as they are
        found = certified_triangle(j, f[..., None], self.engine)
        accepted = found.accepted or not bool(j.isfinite().all())
        self.uncertified = "" if accepted else f"the Jacobian's QR: {found.attempts[-1].reason}"
        return found.r, found.c[..., 0]

    def _check_rows(self, rows: int) -> None:
        if self.rows and rows != self.rows:
            raise ValueError(f"fun returned {self.rows} residuals before, and now {rows}")
        self.rows = rows


def _bounded(errors: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Errors that are measured; Inf where they cannot be."""
    return torch.maximum(least, torch.nan_to_num(errors, torch.inf))
