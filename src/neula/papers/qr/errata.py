"""Algorithm 3 of the QR paper as it is printed in both versions, and as it was meant.

Literal transcriptions, to be run beside each other. :func:`neula.algorithms.krylov.cgls.cgls` is the one that
the library uses. ``docs/experiments/errata.md`` lists these and the other corrections.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.algorithms.scaling import power_of_two_scales
from neula.papers.data import Measurements, Row
from neula.papers.drawing import Canvas, lines
from neula.papers.figure import Figure, Setting
from neula.papers.qr.least_squares import gradient_norm, right_hand_side
from neula.papers.verdicts import ClaimCheck, cases, claim, within

STEPS = 40
DIVERGED, CONVERGED = 1e10, 1e-10
"""Factors by which the norm of the gradient has grown, or has fallen, after all steps."""


# item: Q Algorithm 3; V Algorithm 5
@dataclass(frozen=True)
class PrintedCGLS:
    """A version of Algorithm 3: what its three disputed lines say."""

    name: str
    starts_preconditioned: bool  # s = R'\(A'*r) instead of s = A'*r
    divides_by_delta: bool  # alpha = gamma/delta instead of alpha = gamma/gamma1
    solves_for_x: bool  # x = R\x at the end: the loop finds R x

    def run(self, a: torch.Tensor, b: torch.Tensor, r_factor: torch.Tensor) -> Iterator[tuple[float, float]]:
        """Yield ``||A^T r||`` of the updated residual and of the x that would be returned after each step."""
        x = torch.zeros_like(a[0])[:, None]
        r = b.clone()
        s = a.T @ r
        if self.starts_preconditioned:
            s = torch.linalg.solve_triangular(r_factor.T, s, upper=False)
        p, gamma, gamma1 = s, s.square().sum(), s.new_tensor(math.nan)  # gamma1 has no value before line 18
        for _ in range(STEPS):
            q = a @ torch.linalg.solve_triangular(r_factor, p, upper=True)
            delta = q.square().sum()
            alpha = gamma / (delta if self.divides_by_delta else gamma1)
            x = x + alpha * p
            r = r - alpha * q
            s = torch.linalg.solve_triangular(r_factor.T, a.T @ r, upper=False)
            gamma1, gamma = gamma, s.square().sum()
            p = s + gamma / gamma1 * p
            found = torch.linalg.solve_triangular(r_factor, x, upper=True) if self.solves_for_x else x
            yield float(torch.linalg.vector_norm(a.T @ r)), gradient_norm(a, b, found)


HPDC = PrintedCGLS("HPDC 2020, as printed", False, True, False)
ARXIV = PrintedCGLS("arXiv 2019, as printed", False, False, False)
MEANT = PrintedCGLS("as meant", True, True, True)


def measure_errata(setting: Setting, shape: tuple[int, int] | None = None) -> Iterator[Row]:
    """Gradients after every step of the three versions, on one matrix with the same R."""
    m, n = shape or setting.shape(small=(512, 128), paper=(8192, 2048), bytes_an_entry=64)
    a = setting.random("normal", m, n, seed=3)
    b, scales = right_hand_side(a), power_of_two_scales(setting.numerics.column_max(a))
    r = rgsqrf((a * scales).float(), setting.numerics)[1].double() / scales
    start = gradient_norm(a, b, torch.zeros_like(b[:n]))
    for version in setting.track((HPDC, ARXIV, MEANT), lambda version: version.name):
        for step, (updated, returned) in enumerate(version.run(a, b, r), 1):
            yield {
                "version": version.name,
                "step": step,
                "m": m,
                "n": n,
                "updated gradient": updated / start,
                "gradient of x": returned / start,
            }


def draw_errata(rows: Measurements, canvas: Canvas) -> None:
    """Both norms against the step, one line a version; NaN is not drawn."""
    axes = canvas.subplots(1, 2, sharex=True)
    for place, quantity in zip(axes, ("updated gradient", "gradient of x"), strict=True):
        lines(place, rows, "step", quantity, "version")
        place.set(yscale="log", xlabel="step", title=f"{quantity} / ||A$^T$b||")
        place.grid(alpha=0.3)
    axes[0].legend()


def _last(rows: Measurements, version: PrintedCGLS) -> Row:
    return rows.where(version=version.name)[-1]


@claim("(neula) as printed at HPDC, without R^-T in line 6, it diverges")
def _diverges(rows: Measurements) -> ClaimCheck:
    growth = _last(rows, HPDC)["updated gradient"]
    text = f"the gradient has grown by {growth:.1e} after {STEPS} steps" if growth else "not finite, 0 digits"
    return within([growth], (DIVERGED, math.inf), text)


@claim("(neula) as printed on arXiv, with alpha = gamma/gamma1, it has no first step")
def _undefined(rows: Measurements) -> ClaimCheck:
    lost = [row["updated gradient"] is None for row in rows.where(version=ARXIV.name)]
    return cases(lost, f"NaN after {sum(lost)} of {len(lost)} steps: gamma1 has no value before line 21")


@claim("(neula) as meant, with R^-T in line 6, alpha = gamma/delta and x = R^-1 x at the end, it converges")
def _converges(rows: Measurements) -> ClaimCheck:
    left = [math.inf if x is None else x for x in rows.where(version=MEANT.name).column("gradient of x")]
    best = left.index(min(left))
    return within(
        [left[best]], (0.0, CONVERGED), f"{left[best]:.1e} of the gradient left after {best + 1} steps"
    )


ERRATA = Figure(
    name="errata",
    title="Errata: Algorithm 3 as printed and as meant",
    shows="Algorithm 3 (Algorithm 5 of the first version), transcribed line by line, "
    "with R of RGSQRF in fp16, for random normal A and b: `||A^T r||` of the updated residual, and of the x "
    "that the algorithm returns, relative to `||A^T b||`.",
    scaled_down="512 x 128 instead of 8192 x 2048, tensor cores emulated",
    measure=measure_errata,
    draw=draw_errata,
    claims=(_diverges, _undefined, _converges),
    size=(11, 5),
)
