"""QR and bases of ranges of one matrix of a shape that was factorized before: the core, the certificate, the
result.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
import torch
from scipy.linalg import lapack

from neula.algorithms.spectra.numerical_rank import SAFETY
from neula.certificates.bounds import Accuracy
from neula.engines import Engine
from neula.errors import part_of_one
from neula.kernels.core import core
from neula.pipeline.call import Call
from neula.pipeline.plans import Given
from neula.pipeline.result import Attempt, QRResult
from neula.pipeline.result.deferred import Later
from neula.problems.orthogonal.by_kernel import LABEL, factorized_by_core, is_for_core
from neula.problems.orthogonal.problem import QROptions


class QRPlan:
    """What single matrices of one shape are factorized with.

    Parameters
    ----------
    options : QROptions
    mode : {"reduced", "r"}
    """

    def __init__(self, options: QROptions, mode: str) -> None:
        self.options, self._mode = options, mode
        self._engine, self._target = str(options.engine), options.target.name

    def __call__(self, given: Given) -> QRResult[Any] | None:
        """The result; None where it is not accepted."""
        found = factorized_by_core(torch.from_numpy(given.arrays[0]), self.options.target)
        if found is None or not found.all_accepted:
            return None
        certificate, wrap = found.certificate, given.wrap
        return QRResult.from_fields(
            {
                "Q": None if self._mode == "r" else wrap(found.q.numpy()),
                "R": wrap(found.r.numpy()),
                "certificate": certificate,
                "attempts": Later(lambda: (Attempt(LABEL, True, certificate.in_words),)),
                "engine": self._engine,
                "accuracy": self._target,
                "seconds": perf_counter() - given.begun,
                "accepted": Later(lambda: wrap(np.array(True))),
            }
        )


class RangePlan:
    """What bases of ranges of single matrices of one shape are made with, where columns are independent.

    Parameters
    ----------
    options : QROptions
    rcond : float
    """

    def __init__(self, options: QROptions, rcond: float) -> None:
        self.options, self._rcond = options, rcond

    def __call__(self, given: Given) -> Any | None:
        """Q; None where it is not accepted, or the inverse of R does not show that the rank is full."""
        found = factorized_by_core(torch.from_numpy(given.arrays[0]), self.options.target)
        if found is None or not found.all_accepted:
            return None
        r = found.r.numpy().astype(np.float64, copy=False)
        inverse, singular = lapack.dtrtri(r.T, lower=1)
        # The reciprocal of this norm is at most the smallest singular value, the other at least the largest.
        if singular or not SAFETY * self._rcond * np.linalg.norm(r) * np.linalg.norm(inverse) < 1:
            return None
        return given.wrap(found.q.numpy())


def plan_of(A: Any, mode: str = "reduced", **asked: Any) -> QRPlan | None:
    """That of one matrix which the core takes."""
    options = _options_for(A, **asked) if mode in ("reduced", "r") else None
    return None if options is None else QRPlan(options, mode)


def range_plan_of(
    A: Any, *, rcond: float | None = None, method: str = "qr", wait: bool = True, **asked: Any
) -> RangePlan | None:
    """The same of :func:`neula.orth` with ``rcond``."""
    rcond = part_of_one("rcond", rcond)
    options = _options_for(A, **asked) if rcond is not None and method == "qr" and wait else None
    return None if options is None or rcond is None else RangePlan(options, rcond)


def _options_for(
    A: Any,
    *,
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    strict: bool = False,
    wait: bool = True,
    **others: Any,
) -> QROptions | None:
    """What is asked for, if the core's factors come first."""
    call = Call.begin({"A": A}, engine=engine, accuracy=accuracy, strict=strict)
    a, target = call.first.tensor, call.target
    if a.ndim != 2 or any(others.values()):
        return None
    m, n = a.shape
    by_core = a.dtype == target.dtype and is_for_core(m, n, target) and core() is not None
    here = call.engine.device.type == "cpu" and call.engine.tuning.lapack_first(m, n)
    return QROptions(target, call.engine) if here and by_core else None
