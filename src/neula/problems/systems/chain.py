"""What is tried for linear systems, cheapest first, and when a solution is accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from neula.certificates.forward_error import SURE
from neula.certificates.verdict import Evidence, Limits
from neula.engines import FP32, FP64, Arithmetic, Format, Tuning
from neula.errors import of_batch
from neula.pipeline.chain import Answer, Link, Verdict
from neula.problems.systems import links
from neula.problems.systems.direct import solve_by_host, solve_directly
from neula.problems.systems.links import MIXED
from neula.problems.systems.problem import Systems, SystemsOptions, SystemsSolutions, in_words
from neula.problems.systems.queued import DEFINITE, NORMAL_EQUATIONS, solve_queued
from neula.problems.systems.system import EquilibratedSystem

LIBRARY = "lu fp64 with pivoting", "lu fp32 with pivoting", "cholesky fp64"
"""Factors of the library, which are as good as others: what they leave, others do."""


def chain_together(count: int, n: int, options: SystemsOptions) -> list[Link[Systems, SystemsSolutions]]:
    """What is tried for some systems of order n together: the library's factors.

    Nothing where cheaper factors may be faster. Before it what is launched as a whole, where
    waiting for the host and for pivots takes longer.
    """
    tuning = options.engine.tuning
    if options.pivot is not None or options.compute is not None:
        return []
    order = tuning.direct_definite if options.positive else tuning.direct
    library = Link("cholesky fp64" if options.positive else "lu fp64 with pivoting", solve_directly)
    if (first := first_queued(count, n, options)) is not None:
        labels = [first, MIXED] if first == NORMAL_EQUATIONS and count == 1 else [first]
        tried = [
            Link(label, partial(solve_queued, label=label), launches_only=not options.may_wait)
            for label in labels
        ]
        if labels[0] == MIXED and n >= tuning.harmless and options.may_wait:
            format = options.formats[0]
            tried.insert(0, Link(f"lu {format.name}", partial(links.lu_if_harmless, format=format)))
        if labels[-1] == MIXED and FP64.dtype.itemsize * n**2 > tuning.replayed_bytes:
            tried.append(Link(f"{MIXED} + gmres", links.mixed_with_gmres, inherits=True))
        by_host = [Link(library.label, solve_by_host)] if count > 1 else []
        return [*tried, *by_host, library]
    if n >= order:
        return []
    if options.positive or options.target is FP64 or n < tuning.direct_single:
        return [library]
    return [Link("lu fp32 with pivoting", partial(solve_directly, format=FP32)), library]


def first_queued(count: int, n: int, options: SystemsOptions) -> str | None:
    """By which factors some systems are solved first that are launched as a whole; None where none are."""
    tuning = options.engine.tuning
    most = tuning.queued_definite if options.positive else tuning.queued
    if options.pivot is not None or options.compute is not None or n > most:
        return None
    if options.positive:
        return DEFINITE
    return NORMAL_EQUATIONS if count > 1 or n <= tuning.normal_equations else MIXED


def chain_alone(n: int, options: SystemsOptions) -> list[Link[EquilibratedSystem, SystemsSolutions]]:
    """What is tried for one system of order n."""
    tuning, tried = options.engine.tuning, []
    if options.positive:
        for name in options.definite:
            arithmetic = Arithmetic.named(name)
            tried.append(Link(f"cholesky {name}", partial(links.by_cholesky, arithmetic=arithmetic)))
    else:
        for format in options.formats:
            tried += _lu(n, format, options, tuning)
    return tried if options.named else [*tried, *_in_double(tuning)]


def chain_after_together(
    together: Sequence[Link[Any, Any]], options: SystemsOptions
) -> list[Link[EquilibratedSystem, SystemsSolutions]]:
    """What is tried for one system that these did not solve; nothing is better than Cholesky."""
    if options.positive or any(link.label == MIXED for link in together):
        return []
    return [Link(MIXED, links.mixed_if_unsolved)]


def _lu(
    n: int, format: Format, options: SystemsOptions, tuning: Tuning
) -> list[Link[EquilibratedSystem, SystemsSolutions]]:
    """LU in a low format, without interchanges where they are dear.

    Butterflies make any matrix like a random one, whose elements grow by about ``n^1.5`` without pivoting: in
    half precision that leaves nothing of a matrix of more than a hundred or two columns.
    """
    unpivoted = options.pivot is None and not tuning.swaps
    # In double precision pivoted LU is the library's.
    worth = tuning.pivoted_lu or tuning.has_tournaments(format)
    large = n >= tuning.direct_pivoted or options.compute is not None
    pivoted = options.pivot is None and worth and large and format is not FP64
    tried = []
    if unpivoted or options.pivot == "none":
        tried.append(Link(f"lu {format.name}", partial(links.lu, format=format)))
    if (unpivoted and n**1.5 * format.u <= 1) or options.pivot == "rbt":
        tried.append(Link(f"rbt + lu {format.name}", partial(links.mixed_by_butterflies, format=format)))
    if pivoted or options.pivot == "partial":
        tried.append(Link(f"lu {format.name} with pivoting", partial(links.pivoted_lu, format=format)))
    return tried


def _in_double(tuning: Tuning) -> list[Link[EquilibratedSystem, SystemsSolutions]]:
    """By butterflies first where interchanges are dear (order 24000 on an H200: 220 ms, and 333)."""
    library = Link("lu fp64 with pivoting", links.by_library)
    if tuning.queued:
        return [Link(MIXED, links.mixed_in_double), library]
    return [library, Link(MIXED, links.mixed_if_unsolved, inherits=True)]


@dataclass(frozen=True)
class SystemsJudge:
    """Solutions are accepted by backward error, forward error and residual.

    Attributes
    ----------
    limits : Limits
    improves : bool
        Whether better factors may help a solution with a small backward error of which no digit is sure.
    """

    limits: Limits
    improves: bool = True

    @classmethod
    def for_shape(cls, n: int, options: SystemsOptions, *, improves: bool = True) -> SystemsJudge:
        """The judge of systems of order n."""
        return cls(options.limits(n), improves)

    def measure(
        self, problems: Systems | EquilibratedSystem, answer: Answer[SystemsSolutions]
    ) -> torch.Tensor:
        """What :attr:`SystemsSolutions.names` says, for each system."""
        return answer.values.measured()

    def settled(self, largest: Sequence[float]) -> bool:
        """Whether all are accepted, from the largest of each number that was measured."""
        return bool(self.limits.accept(Evidence.from_numbers(largest)))

    def verdict(self, answer: Answer[SystemsSolutions], numbers: np.ndarray) -> Verdict:
        """Of solutions whose residual is small enough the one with the most digits is best."""
        of = dict(zip(SystemsSolutions.names, numbers, strict=True))
        error, forward, growth = of["refined_error"], of["forward_error"], of["growth"]
        evidence, bound = Evidence.from_numbers(numbers), self.limits.backward_error
        accepted = self.limits.accept(evidence) & (not answer.doubt)
        penalty = np.array([~accepted, np.maximum(error, bound), forward])
        improves = self.improves or answer.label not in LIBRARY
        # Other factors do not reach more digits where residuals in twice the working precision do not.
        enough = replace(self.limits, forward_error=SURE).accept(evidence) & (not answer.doubt)
        final = enough if improves else enough | (error <= bound)
        worst = int(np.lexsort(penalty[::-1])[-1])  # NaN comes last
        reason = in_words(error[worst], bound, forward.max(), answer.iterations, growth[worst])
        reason = ", ".join(filter(None, [reason, answer.doubt]))
        reason = of_batch(reason, int((~accepted).sum()), len(accepted), "systems")
        return Verdict(accepted, penalty, reason, final)
