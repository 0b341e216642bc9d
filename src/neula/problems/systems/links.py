"""The table of links for linear systems.

Factors in any arithmetic are followed by iterative refinement, by conjugate gradients or by GMRES. Small
systems are solved together, and on a GPU launched as a whole; unsolved ones go one by one through the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from neula.engines import FP64
from neula.engines.formats import FP16_COR, double_of
from neula.pipeline.chain import (
    CORE,
    HOST,
    LAUNCHED,
    Answer,
    Case,
    Chain,
    Declined,
    Link,
    Row,
    Rule,
    Table,
    computed,
    formatted,
    labelled,
    ruled,
    run_chain,
    way,
)
from neula.pipeline.solutions import host_for
from neula.problems.systems import ways
from neula.problems.systems.problem import (
    DirectTuning,
    QueuedTuning,
    Systems,
    SystemsOptions,
    SystemsSolutions,
)
from neula.problems.systems.system import EquilibratedSystem, SystemsJudge
from neula.problems.systems.together import SOURCES, solve_together

TogetherLink = Link[Systems, SystemsSolutions]
SingleLink = Link[EquilibratedSystem, SystemsSolutions]


@dataclass(frozen=True)
class SystemsCase(Case):
    """Systems of one order, without numbers."""

    count: int
    n: int
    options: SystemsOptions
    together: bool  # whether all are solved at once; else it is one of them that is left

    @cached_property
    def launched(self) -> bool:
        """Whether all that is done first is launched as a whole, with factors that need no pivots."""
        orders = self.tuning[QueuedTuning]
        most = self._with_kernels(orders.queued_definite) if self.options.positive else orders.queued
        return not self.asks and self.n <= most

    @cached_property
    def begun(self) -> bool:
        """Whether there are links for all systems together: where cheaper factors are no faster."""
        orders = self.tuning[DirectTuning]
        order = self._with_kernels(orders.direct_definite) if self.options.positive else orders.direct
        return self.launched or (not self.asks and self.n < order)

    def _with_kernels(self, order: float) -> float:
        """An order of definite matrices up to which kernels for real numbers make double precision cheap."""
        return min(order, self.tuning[DirectTuning].direct) if self.is_complex else order

    @property
    def is_complex(self) -> bool:
        """Whether matrices are complex: of LU without the library, tournaments are for real ones."""
        return self.options.dtype.is_complex

    @property
    def asks(self) -> bool:
        return self.options.pivot is not None or self.options.compute is not None

    @cached_property
    def mixed(self) -> bool:
        """Whether a general system, alone, is mixed by butterflies in what is launched."""
        return self.launched and self.count == 1 and not self.options.positive

    @cached_property
    def normal(self) -> bool:
        """Whether normal equations are launched before."""
        few = self.count > 1 or self.n <= self.tuning[QueuedTuning].normal_equations
        return self.launched and few and not self.options.positive

    def avoids(self, pivot: str) -> bool:
        """Whether a way without interchanges is named, or these cost time."""
        named = self.options.pivot
        return named == pivot or (named is None and not self.tuning[DirectTuning].swaps)


def chain_together(count: int, n: int, options: SystemsOptions) -> Sequence[TogetherLink]:
    """Links for all of ``count`` systems together; none if they are solved one by one."""
    return Chain(TABLE, SystemsCase(count, n, options, True))


def chain_alone(n: int, options: SystemsOptions, count: int = 1) -> Sequence[SingleLink]:
    """Links for one of ``count`` systems that are still open."""
    return Chain(TABLE, SystemsCase(count, n, options, False))


_when = Rule[SystemsCase, bool]
_together = _when("whole batch", lambda case: case.together)
_one_left = _when("each problem by itself", lambda case: not case.together)
_definite = _when("positive definite", lambda case: case.options.positive)
_general = _when("general", lambda case: not case.options.positive)

_launched = _when(
    "on a GPU that is fast in fp64, up to order 18000 (definite: 17000, complex 6144)",
    lambda case: case.launched,
)

_normal = _when("batches, and one system up to order 256", lambda case: case.normal)
_single = _when("one", lambda case: case.count == 1)
_batch = _when("batches", lambda case: case.count > 1)


@ruled("from order 8192 on, if the leading block grows by at most 8 without pivoting")
def _may_be_harmless(case: SystemsCase) -> bool:
    large = case.n >= case.tuning[QueuedTuning].harmless and not case.normal
    return case.mixed and large and case.options.may_wait


_not_replayed = _when(
    "from order 6000 on (complex: 4100)",
    lambda case: (
        case.mixed and double_of(case.options.dtype).itemsize * case.n**2 > case.tuning.replayed_bytes
    ),
)

_begun = _when(
    "below order 6000 on a CPU (definite: 4500), and after asynchronous links", lambda case: case.begun
)

_in_core = _when(
    "on a CPU; with ``certify='forward'`` up to order 208 and 32 right-hand sides, or 32768 numbers in x",
    lambda case: ways.is_for_core(case.n, case.options),
)

_not_begun = _when("larger systems, and with ``compute=`` or ``pivot=``", lambda case: not case.begun)


_without_pivots = _when("where interchanges cost time, ``pivot='none'``", lambda case: case.avoids("none"))
_butterflies = _when("where interchanges cost time, ``pivot='rbt'``", lambda case: case.avoids("rbt"))
_pivots = _when("by default, ``pivot='partial'``", lambda case: case.options.pivot in (None, "partial"))
_default = _when("without ``pivot=``", lambda case: not case.options.named)
_unmixed = _when("if no link has solved it, unless it was tried above", lambda case: not case.mixed)

_is_general_or_new = _when(
    "not definite ones that were tried together", lambda case: not (case.begun and case.options.positive)
)


_formats = Rule[SystemsCase, Sequence[str]]

_low = _formats(
    "from fp16 on those of the machine, or ``compute``",
    lambda case: [format.name for format in case.options.formats],
)

_first_low = _formats("fp16", lambda case: _low(case)[:1])


@ruled("those of the machine from fp32 on; complex, on a GPU: fp16_cor")
def _low_for_butterflies(case: SystemsCase) -> Sequence[str]:
    # They make any matrix like a random one, whose elements grow by about n^1.5 without pivoting: in half
    # precision that leaves nothing of a matrix of more than a hundred or two columns.
    named = case.options.pivot == "rbt"
    found = [format.name for format in case.options.formats if named or case.n**1.5 * format.u <= 1]
    if not (case.is_complex and case.tuning.corrected) or case.asks:
        return found
    return [FP16_COR]


@ruled("fp16 by tournaments on a GPU (real), fp32 on a CPU, or ``compute``")
def _low_with_pivots(case: SystemsCase) -> Sequence[str]:
    options, tuning = case.options, case.tuning
    if options.pivot == "partial":
        return _low(case)
    if case.n < tuning[DirectTuning].direct_pivoted and options.compute is None:
        return []
    formats = [
        format
        for format in options.formats
        if not tuning.fast_fp64 or (tuning.has_tournaments(format) and not case.is_complex)
    ]
    return [format.name for format in formats if format is not FP64]  # in which it is the library's


_definite_formats = _formats(
    "fp16, fp16_cor, fp64 on a GPU, fp32, fp64 on a CPU", lambda case: case.options.definite
)


@ruled("fp64; on a CPU from order 400 on after fp32, for accuracies up to fp32")
def _library(case: SystemsCase) -> Sequence[str]:
    return [FP64.name] if case.launched else case.options.library_formats(case.n)


def _steps(case: SystemsCase, label: str, name: str) -> TogetherLink:
    launches = not (SOURCES[label].synchronizes or case.options.may_wait)
    return Link(label, partial(solve_together, label=label), launches_only=launches)


def _by_host(systems: Systems, before: Answer[SystemsSolutions] | None) -> Answer[SystemsSolutions]:
    """Solve on the host, where a few launches take longer than the solution."""
    n, k = systems.b.shape[1:]
    host = host_for(systems.options, len(systems), n * n * (n + k))
    if host is None:
        raise Declined
    there = replace(systems.to(torch.device("cpu")), options=replace(systems.options, engine=host))
    judge = SystemsJudge.for_shape(n, there.options, improves=False)
    links = chain_together(len(there), n, there.options)
    run = run_chain(links, there, judge, settled=judge.settled)
    return Answer(run.found.to(systems.device), run.label, "", run.iterations, run.history)


_gmres = way(ways.mixed_with_gmres, inherits=True)
_if_unsolved = way(ways.mixed_if_unsolved, inherits=True)
_core = formatted(ways.by_core)
LU, PIVOTED, BUTTERFLIES, CHOLESKY = "lu {}", "lu {} with pivoting", "rbt + lu {}", "cholesky {}"

TABLE: Table[SystemsCase] = (
    Row("cholesky of the normal equations {}", _steps, (_together, _launched, _normal), place=LAUNCHED),
    Row("cholesky {}, inverted", _steps, (_together, _launched, _definite), place=LAUNCHED),
    Row(LU, formatted(ways.lu_if_harmless), (_together, _launched, _may_be_harmless), arithmetics=_first_low),
    Row(BUTTERFLIES, _steps, (_together, _launched, _general, _single), place=LAUNCHED),
    Row(BUTTERFLIES, _gmres, (_together, _launched, _general, _single, _not_replayed), "gmres"),
    Row(PIVOTED, way(_by_host), (_together, _launched, _general, _batch), place=HOST),
    Row(CHOLESKY, way(_by_host), (_together, _launched, _definite, _batch), place=HOST),
    (
        Row(PIVOTED, _core, (_together, _begun, _general, _in_core), arithmetics=_library, place=CORE),
        Row(PIVOTED, _steps, (_together, _begun, _general), arithmetics=_library),
    ),
    Row(CHOLESKY, _core, (_together, _begun, _definite, _in_core), place=CORE),
    Row(CHOLESKY, _steps, (_together, _begun, _definite)),
    Row(
        CHOLESKY,
        computed(ways.by_cholesky),
        (_one_left, _not_begun, _definite),
        arithmetics=_definite_formats,
    ),
    (
        Row(LU, formatted(ways.lu), (_one_left, _not_begun, _general, _without_pivots), arithmetics=_low),
        Row(
            BUTTERFLIES,
            computed(ways.mixed_by_butterflies),
            (_one_left, _not_begun, _general, _butterflies),
            arithmetics=_low_for_butterflies,
        ),
        Row(
            PIVOTED,
            formatted(ways.pivoted_lu),
            (_one_left, _not_begun, _general, _pivots),
            arithmetics=_low_with_pivots,
        ),
    ),
    Row(PIVOTED, labelled(ways.by_library), (_one_left, _not_begun, _default)),
    Row(BUTTERFLIES, _if_unsolved, (_one_left, _default, _is_general_or_new, _unmixed)),
)
"""Cheapest first."""
