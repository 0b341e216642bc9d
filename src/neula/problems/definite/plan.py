"""Definite matrices of a shape that was factorized before: the first link, the residual, the result."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from neula.certificates.orthogonality import gaussian_probes
from neula.engines import FP64
from neula.engines.formats import in_double
from neula.errors import of_batch
from neula.kernels import scipy_linalg
from neula.kernels.phases import adjoint
from neula.kernels.precision import plain_arithmetic
from neula.pipeline.batches import SingularMember
from neula.pipeline.chain import Answer, Link
from neula.pipeline.factors import CholeskyMethods
from neula.pipeline.inputs import flattened
from neula.pipeline.memory import MemoryGuard
from neula.pipeline.plans import Given, accepted_result
from neula.pipeline.result import CholeskyResult
from neula.pipeline.result.deferred import Later
from neula.problems.definite.links import SAFE_EXPONENT, chain
from neula.problems.definite.problem import (
    CholeskyJudge,
    CholeskyOptions,
    CholeskyValues,
    Symmetric,
)

LARGEST = 255  # order up to which NumPy multiplies by a few vectors in one thread, and leaves torch its cores
BY_SCIPY = 95  # order up to which SciPy factorizes in one thread


class CholeskyPlan:
    """A plan for single matrices of order n. ``upper``: whether U is requested, of the upper triangle."""

    def __init__(self, n: int, options: CholeskyOptions, dtype: torch.dtype, *, upper: bool) -> None:
        self.options, self._upper, self._bound = options, upper, CholeskyJudge.for_shape(n, options).bound
        self._double = options.low.format is FP64
        routine = ("cpotrf", "zpotrf") if dtype.is_complex else ("spotrf", "dpotrf")
        by_scipy = getattr(scipy_linalg.lapack, routine[self._double])
        self._factorize = by_scipy if n <= BY_SCIPY else _by_torch
        self._label = f"cholesky {options.low.name}"
        self._vectors = gaussian_probes(n, torch.device("cpu"), dtype).numpy()

    def __call__(self, given: Given) -> CholeskyResult[Any] | None:
        (a,), upper = given.arrays, self._upper
        with np.errstate(all="ignore"):  # not accepted unless finite
            diagonal, most = a.diagonal().real, 2.0**SAFE_EXPONENT
            if self._double and not (diagonal.min() >= 1 / most and diagonal.max() <= most):
                return None
            # Rows of A are columns of what LAPACK sees.
            columns, failed = self._factorize(a.T, lower=upper, clean=1)
            if failed:
                return None
            factor = columns.T.astype(a.dtype, copy=False)
            residual = self._residual(a.T if upper else a, factor.T if upper else factor)
        if not residual <= self._bound:
            return None
        wrap, bound = given.wrap, self._bound
        known = wrap(factor), residual, wrap(np.array(residual)), lambda: wrap(np.array(True))
        reason = lambda: f"residual {residual:.1e} (bound {bound:.1e})"  # noqa: E731
        return _accepted(given, self.options, self._label, reason, *known, bound, upper)

    def _residual(self, a: np.ndarray, factor: np.ndarray) -> float:
        """As :func:`neula.certificates.cholesky.residuals_of_triangles`, for the lower triangle of A."""
        diagonal = a.diagonal().real.astype(np.float64)
        scales = np.ldexp(1.0, -(np.frexp(diagonal)[1] // 2))[:, None]
        below = in_double(torch.from_numpy(a).tril(-1)).numpy()  # in a part of the time of NumPy's
        lower = factor.astype(below.dtype, copy=False)
        vectors = self._vectors * scales
        image = below @ vectors + adjoint(below) @ vectors + diagonal[:, None] * vectors
        size = np.linalg.norm(image * scales)
        return float(np.linalg.norm((image - lower @ (adjoint(lower) @ vectors)) * scales) / size)


def _by_torch(a: np.ndarray, *, lower: bool, clean: int) -> tuple[np.ndarray, int]:
    """Factorize like SciPy's ``potrf``, with zeros in the other triangle."""
    factor, failed = torch.linalg.cholesky_ex(torch.from_numpy(a), upper=not lower)
    return factor.numpy(), int(failed)


class LaunchedCholeskyPlan:
    """A plan for matrices whose first link only launches its work, or is LAPACK.

    ``upper``: whether U is requested, of the upper triangle.
    """

    def __init__(
        self, link: Link[Symmetric, CholeskyValues], options: CholeskyOptions, *, upper: bool
    ) -> None:
        self.options, self._link, self._upper = options, link, upper

    def __call__(self, given: Given) -> CholeskyResult[Any] | Answer[CholeskyValues] | None:
        (a,) = given.arrays
        return self.solved(given, torch.from_numpy(a) if isinstance(a, np.ndarray) else a)

    def solved(
        self,
        given: Given,
        a: torch.Tensor,
        attached: Callable[[torch.Tensor], torch.Tensor] = lambda lower: lower,
    ) -> CholeskyResult[Any] | Answer[CholeskyValues] | None:
        """Factorize matrices of any shape; L, of the shape of A, may be attached to a graph."""
        device, options, upper, found = self.options.engine.device, self.options, self._upper, None
        matrices = flattened(a).to(device)
        problems = Symmetric(matrices.mH if upper else matrices, options)
        memory = MemoryGuard(device).attempt(self._link.label)
        with suppress(SingularMember), memory, plain_arithmetic(device):
            found = self._link.answer(problems, None)
        if found is None or found.measured is None:
            return found
        residual = float(found.measured[0].amax())  # NaN where there is no factor
        judge = CholeskyJudge.for_shape(a.shape[-1], options)
        if not judge.accept(residual):
            return found
        residuals = found.values.residual.reshape(a.shape[:-2])
        lower = attached(found.values.lower.reshape(a.shape))
        reason = of_batch(f"residual {residual:.1e} (bound {judge.bound:.1e})", 0, len(matrices), "matrices")
        factor = given.give(lower.mH if upper else lower)
        known = factor, residual, given.give(residuals), lambda: given.give(judge.accept(residuals))
        return _accepted(given, options, found.label, lambda: reason, *known, judge.bound, upper)


def _accepted(
    given: Given,
    options: CholeskyOptions,
    label: str,
    reason: Callable[[], str],
    factor: Any,
    residual: float,
    residuals: Any,
    accepted: Callable[[], Any],
    bound: float,
    upper: bool,
) -> CholeskyResult[Any]:
    fields = {"factor": factor, "upper": upper, "converged": True, "residual": residual, "bound": bound}
    fields |= {"residuals": residuals, "accepted": Later(accepted)}
    fields["_factors"] = CholeskyMethods(given.arrays[0], factor, upper, bound)
    return accepted_result(CholeskyResult, given, options, label, reason, fields)


def launched_plan(a: torch.Tensor, options: CholeskyOptions, *, upper: bool) -> LaunchedCholeskyPlan | None:
    """Plan for matrices like A; None if the first link reads their elements."""
    if a.numel() == 0 or options.progress is not None:
        return None
    n = a.shape[-1]
    link = chain(a.numel() // n**2, n, options)[0]
    fits = link.launches_only or options.tuning.lapack
    return LaunchedCholeskyPlan(link, options, upper=upper) if fits else None
