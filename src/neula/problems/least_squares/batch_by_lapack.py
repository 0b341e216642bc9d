"""Batches of small least-squares problems on a CPU, by NumPy and LAPACK: in a few passes over the batch.

What is accepted here is what the judge of the chain accepts; what is not goes on to its next link.
"""

from __future__ import annotations

import numpy as np
import torch

from neula.algorithms.lapack.batches import ELEMENTS
from neula.algorithms.lapack.seminormals import Seminormals
from neula.certificates.forward_error import rounded_error
from neula.certificates.verdict import Evidence
from neula.engines import FP64
from neula.kernels.magnitudes import MODERATE
from neula.pipeline.chain import Answer
from neula.pipeline.in_numpy import FEW, IN_NUMPY, array_of
from neula.pipeline.progress import stage
from neula.problems.least_squares.prepared import LeastSquaresProblems, Way
from neula.problems.least_squares.problem import LeastSquaresOptions, LeastSquaresSolutions

LARGEST, WIDEST = 1 << 14, 64
"""Elements and columns of matrices that are taken together: of larger ones passes over the batch take longer
than the calls for each (on one core of an AMD EPYC 100 of 200 x 50 take 0.8 of the time, 20 of 300 x 100
1.2)."""


def batch_by_lapack(
    problems: LeastSquaresProblems, before: Answer[LeastSquaresSolutions] | None, *, label: str, together: Way
) -> Answer[LeastSquaresSolutions]:
    """All of a batch; many right-hand sides are better taken otherwise."""
    if problems.b.shape[2] > FEW:
        return together(problems, before)
    report, parts = stage(problems.options.progress, label), []
    step = max(1, ELEMENTS // problems.a[0].numel())
    for a, b in problems.chunks(step):
        parts.append(_solved(array_of(a), array_of(b), problems.options))
        report(min(1.0, len(parts) * step / len(problems)))
    values = LeastSquaresSolutions.joined(parts)
    return Answer(values, label, iterations=1)


def suits(m: int, n: int) -> bool:
    """Whether matrices are so small, and of so few columns, that this is the way for a batch of them."""
    return m >= n and m * n <= LARGEST and n <= WIDEST


@np.errstate(all="ignore")  # what is not finite is not accepted
def _solved(
    a: np.ndarray, b: np.ndarray, options: LeastSquaresOptions, slices: int = 2
) -> LeastSquaresSolutions:
    """Solutions; NaN if they are not accepted.

    Those that are not refined to the end with two slices of A are solved again with three.
    """
    m, n = a.shape[1:]
    a, b = (x.astype(np.float64, copy=False) for x in (a, b))
    doubled = options.refines_doubled(m, n)
    slices = slices if doubled and options.target is FP64 else 0
    system = Seminormals(a, slices)
    found = system.refined(b, IN_NUMPY[options.dtype])
    error, forward_error = found.backward_error, rounded_error(found.forward_error, found.rounding)
    refined = found.contracts & ((found.left <= options.digits) | (found.settled & (not doubled)))
    moderate = (found.b_norm >= 1 / MODERATE) & (found.b_norm <= MODERATE)
    doubtful = ~(system.good & refined & moderate).all(1)
    evidence = Evidence(
        doubtful=doubtful,
        residual=(found.residual_norm / found.b_norm).max(1),
        refined_error=error.max(1),
        backward_error=(error + found.rounding + found.low).max(1),
        forward_error=forward_error.max(1),
        condition_bound=system.condition_bound[:, 0],
    )
    accepted = options.limits((m, n)).accept(evidence)
    known = {
        "x": found.x,
        "forward_error": forward_error,
        "residual_norm": found.residual_norm,
        "residual": evidence.residual,
        "refined_error": evidence.refined_error,
        "backward_error": evidence.backward_error,
        "condition_bound": evidence.condition_bound,
        "condition": system.condition[:, 0],
        "optimality": found.optimality.max(1),
    }
    if not accepted.all():
        for x in known.values():
            x[~accepted] = np.nan
    members = LeastSquaresSolutions(
        **{name: torch.from_numpy(x) for name, x in known.items()},
        rank=torch.full((len(a),), n, dtype=torch.int64, device="cpu"),
        doubtful=torch.from_numpy(doubtful),
    )
    places = np.flatnonzero(~accepted & system.good[:, 0]) if slices == 2 else ()
    if len(places):
        members.put(torch.from_numpy(places), _solved(a[places], b[places], options, 3))
    return members
