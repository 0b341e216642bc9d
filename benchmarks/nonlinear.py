"""An iteration of a non-linear fit beside what it is made of.

That is the Jacobian, ``neula.lstsq`` of it, and an R that is certified.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import neula
from benchmarks.harness import Results
from neula.algorithms.nonlinear import differentiate
from neula.engines import select_engine
from neula.papers.measuring import median_seconds
from neula.pipeline.result import AccuracyWarning
from neula.problems.orthogonal.certified import certified_triangle

SHAPES = {"cuda": [(100_000, 100), (1_000_000, 100), (1_000_000, 1000)], "cpu": [(2000, 20), (20_000, 100)]}


def run(device: torch.device) -> Results:
    """Fit saturated responses of many predictors, ``tanh(A x)``, from rather far away."""
    results = Results("nonlinear", device)
    for m, n in SHAPES[device.type]:
        generator = torch.Generator(device).manual_seed(11)
        options: dict[str, Any] = {"dtype": torch.float64, "device": device, "generator": generator}
        a = torch.randn(m, n, **options) / n**0.5
        truth = torch.randn(n, **options)
        y = torch.tanh(a @ truth) + 0.1 * torch.randn(m, **options)

        def residuals(x: torch.Tensor, a: torch.Tensor = a, y: torch.Tensor = y) -> torch.Tensor:
            return torch.tanh(a @ x) - y

        start = torch.zeros_like(truth)
        iteration, result = _iteration(residuals, start)
        jacobian = torch.empty(1, n, m, dtype=a.dtype, device=device).mT

        def differentiated(
            f: Callable[[torch.Tensor], torch.Tensor] = residuals,
            x: torch.Tensor = start[None],
            out: torch.Tensor = jacobian,
        ) -> None:
            differentiate.columns(lambda point: f(point[0])[None], x, out)

        derivatives = median_seconds(differentiated, 3)
        solve = median_seconds(partial(neula.lstsq, jacobian[0], y), 3)
        engine = select_engine("auto", device)
        certified = median_seconds(partial(certified_triangle, jacobian, y[None, :, None], engine), 3)
        results.add(
            m=m,
            n=n,
            iteration_ms=1e3 * iteration,
            jacobian_ms=1e3 * derivatives,
            lstsq_ms=1e3 * solve,
            certified_r_ms=1e3 * certified,
            ratio=iteration / (derivatives + solve + certified),
            ratio_to_lstsq=iteration / (derivatives + solve),
            iterations=int(result.nit),
            certified=result.converged,
            digits=result.digits,
            error_of_x=float((result.x - truth).norm() / truth.norm()),
        )
        del a, y, jacobian
    return results


def _iteration(residuals: Callable[[torch.Tensor], torch.Tensor], start: torch.Tensor) -> tuple[float, Any]:
    """Seconds of a step, with its Jacobian, in a fit: by those of two fits of different lengths.

    The fit to the end, in between, warms up.
    """
    result = neula.least_squares(residuals, start)
    short, few = _timed(residuals, start, max_nfev=2)
    long, more = _timed(residuals, start, max_nfev=5)
    steps = more.njev - few.njev
    return (long - short) / max(steps, 1), result


def _timed(
    residuals: Callable[[torch.Tensor], torch.Tensor], start: torch.Tensor, max_nfev: int
) -> tuple[float, Any]:
    best, result = float("inf"), None
    for _ in range(2):
        if start.is_cuda:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        with warnings.catch_warnings():
            # No test stops it, so that both take as many steps as they may.
            warnings.simplefilter("ignore", AccuracyWarning)
            result = neula.least_squares(
                residuals, start, ftol=1e-15, xtol=None, gtol=None, max_nfev=max_nfev
            )
        if start.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    return best, result
