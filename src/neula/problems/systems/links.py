"""The table of links for linear systems.

Factors in any arithmetic are followed by iterative refinement, by conjugate gradients or by GMRES. Small
systems are solved together, and on a GPU launched as a whole; what is left goes one by one through the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from neula.engines import FORMATS, FP64, Arithmetic, Tuning
from neula.pipeline.chain import Link
from neula.pipeline.table import HOST, LAUNCHED, Row, Table, chain_of, unless
from neula.problems.systems import ways
from neula.problems.systems.direct import solve_by_host, solve_directly
from neula.problems.systems.problem import Systems, SystemsOptions, SystemsSolutions
from neula.problems.systems.queued import solve_queued
from neula.problems.systems.system import EquilibratedSystem

TogetherLink = Link[Systems, SystemsSolutions]

SingleLink = Link[EquilibratedSystem, SystemsSolutions]


@dataclass(frozen=True)
class SystemsCase:
    """Systems of one order, without numbers.

    Attributes
    ----------
    count, n : int
    options : SystemsOptions
    together : bool
        Whether all are solved at once; else it is one of them that is left.
    """

    count: int
    n: int
    options: SystemsOptions
    together: bool

    @property
    def tuning(self) -> Tuning:
        """That of the engine."""
        return self.options.engine.tuning

    @cached_property
    def launched(self) -> bool:
        """Whether all that is done first is launched as a whole, with factors that need no pivots."""
        most = self.tuning.queued_definite if self.options.positive else self.tuning.queued
        return not self.asks and self.n <= most

    @cached_property
    def begun(self) -> bool:
        """Whether there are links for all systems together: where cheaper factors are no faster."""
        order = self.tuning.direct_definite if self.options.positive else self.tuning.direct
        return self.launched or (not self.asks and self.n < order)

    @property
    def asks(self) -> bool:
        """Whether pivots or a format are named."""
        return self.options.pivot is not None or self.options.compute is not None

    @cached_property
    def mixed(self) -> bool:
        """Whether a general system, alone, is mixed by butterflies in what is launched."""
        return self.launched and self.count == 1 and not self.options.positive

    @cached_property
    def normal(self) -> bool:
        """Whether normal equations are launched before."""
        few = self.count > 1 or self.n <= self.tuning.normal_equations
        return self.launched and few and not self.options.positive


def chain_together(count: int, n: int, options: SystemsOptions) -> list[TogetherLink]:
    """What is tried for all of ``count`` systems at once; nothing where they are solved one by one."""
    return chain_of(TABLE, SystemsCase(count, n, options, True))


def chain_alone(n: int, options: SystemsOptions, count: int = 1) -> list[SingleLink]:
    """What is tried for one of ``count`` systems that is left."""
    return chain_of(TABLE, SystemsCase(count, n, options, False))


# ---------------------------------------------------------------- conditions


def _together(case: SystemsCase) -> bool:
    """All systems of a call together"""
    return case.together


_one_left = unless(_together, "one system, also of those that are left")


def _definite(case: SystemsCase) -> bool:
    """Positive definite"""
    return case.options.positive


_general = unless(_definite, "general")


def _launched(case: SystemsCase) -> bool:
    """On a GPU that is fast in fp64, up to order 18000 (definite: 17000)"""
    return case.launched


def _normal(case: SystemsCase) -> bool:
    """batches, and one system up to order 256"""
    return case.normal


def _single(case: SystemsCase) -> bool:
    """One system"""
    return case.count == 1


_batch = unless(_single, "batches")


def _may_be_harmless(case: SystemsCase) -> bool:
    """From order 8192 on, if the leading block grows by at most 8 without pivoting"""
    large = case.n >= case.tuning.harmless and not case.normal
    return case.mixed and large and case.options.may_wait


def _not_replayed(case: SystemsCase) -> bool:
    """From order 6000 on"""
    return case.mixed and FP64.dtype.itemsize * case.n**2 > case.tuning.replayed_bytes


def _begun(case: SystemsCase) -> bool:
    """Where cheaper factors are no faster: below order 6000 on a CPU (definite: 4500), and after a launch"""
    return case.begun


_not_begun = unless(_begun, "larger systems, and those whose format is named")


def _without_pivots(case: SystemsCase) -> bool:
    """Where interchanges cost time, ``pivot="none"``"""
    pivot = case.options.pivot
    return pivot == "none" or (pivot is None and not case.tuning.swaps)


def _butterflies(case: SystemsCase) -> bool:
    """Where interchanges cost time and growth by n^1.5 leaves digits, ``pivot="rbt"``"""
    pivot = case.options.pivot
    return pivot == "rbt" or (pivot is None and not case.tuning.swaps)


def _pivots(case: SystemsCase) -> bool:
    """By default, ``pivot="partial"``"""
    return case.options.pivot in (None, "partial")


def _default(case: SystemsCase) -> bool:
    """No pivots are named"""
    return not case.options.named


def _swaps_cost(case: SystemsCase) -> bool:
    """On a GPU that is fast in fp64"""
    return bool(case.tuning.queued)


def _unmixed(case: SystemsCase) -> bool:
    """If no link has solved it, on other machines or in batches"""
    return not case.mixed if case.begun else not case.tuning.queued


def _is_general_or_new(case: SystemsCase) -> bool:
    """Unless a definite one was tried together: nothing is better than Cholesky"""
    return not (case.begun and case.options.positive)


# ---------------------------------------------------------------- arithmetics that depend on the case


def _low(case: SystemsCase) -> Sequence[str]:
    """From fp16 on those of the machine, or ``compute``"""
    return [format.name for format in case.options.formats]


def _first_low(case: SystemsCase) -> Sequence[str]:
    """fp16"""
    return _low(case)[:1]


def _low_for_butterflies(case: SystemsCase) -> Sequence[str]:
    """Those of the machine from fp32 on"""
    # They make any matrix like a random one, whose elements grow by about n^1.5 without pivoting: in half
    # precision that leaves nothing of a matrix of more than a hundred or two columns.
    named = case.options.pivot == "rbt"
    return [format.name for format in case.options.formats if named or case.n**1.5 * format.u <= 1]


def _low_with_pivots(case: SystemsCase) -> Sequence[str]:
    """fp16 by tournaments on a GPU, fp32 on a CPU, or ``compute``"""
    options, tuning = case.options, case.tuning
    if options.pivot == "partial":
        return _low(case)
    if case.n < tuning.direct_pivoted and options.compute is None:
        return []
    formats = [format for format in options.formats if tuning.pivoted_lu or tuning.has_tournaments(format)]
    return [format.name for format in formats if format is not FP64]  # in which it is the library's


def _definite_formats(case: SystemsCase) -> Sequence[str]:
    """fp16, fp16_cor, fp64 on a GPU, fp32, fp64 on a CPU"""
    return case.options.definite


def _library(case: SystemsCase) -> Sequence[str]:
    """fp64; before it fp32 on a CPU where no more is asked for, from order 400 on"""
    options, tuning = case.options, case.tuning
    enough = options.target is not FP64 and case.n >= tuning.direct_single
    return ["fp32", "fp64"] if enough and not case.launched else ["fp64"]


# ---------------------------------------------------------------- links


def _launch(case: SystemsCase, label: str, name: str) -> TogetherLink:
    return Link(label, partial(solve_queued, label=label), launches_only=not case.options.may_wait)


def _directly(case: SystemsCase, label: str, name: str) -> TogetherLink:
    return Link(label, partial(solve_directly, format=FORMATS[name]) if name == "fp32" else solve_directly)


def _on_host(case: SystemsCase, label: str, name: str) -> TogetherLink:
    return Link(label, solve_by_host)


def _gmres(case: SystemsCase, label: str, name: str) -> TogetherLink:
    return Link(label, ways.mixed_with_gmres, inherits=True)


def _cholesky(case: SystemsCase, label: str, name: str) -> SingleLink:
    return Link(label, partial(ways.by_cholesky, arithmetic=Arithmetic.named(name)))


def _in(way: Callable[..., ways.Solution]) -> Callable[[SystemsCase, str, str], Link]:
    """A way in the format of the row."""
    return lambda case, label, name: Link(label, partial(way, format=FORMATS[name]))


def _in_double(way: Callable[..., ways.Solution]) -> Callable[[SystemsCase, str, str], SingleLink]:
    return lambda case, label, name: Link(label, way)


def _if_unsolved(case: SystemsCase, label: str, name: str) -> SingleLink:
    return Link(label, ways.mixed_if_unsolved, inherits=True)


LU, PIVOTED, BUTTERFLIES, CHOLESKY = "lu {}", "lu {} with pivoting", "rbt + lu {}", "cholesky {}"

TABLE: Table[SystemsCase] = (
    Row("cholesky of the normal equations {}", _launch, (_together, _launched, _normal), place=LAUNCHED),
    Row("cholesky {}, inverted", _launch, (_together, _launched, _definite), place=LAUNCHED),
    Row(LU, _in(ways.lu_if_harmless), (_together, _launched, _may_be_harmless), arithmetics=_first_low),
    Row(BUTTERFLIES, _launch, (_together, _launched, _general, _single), place=LAUNCHED),
    Row(BUTTERFLIES, _gmres, (_together, _launched, _general, _single, _not_replayed), "gmres"),
    Row(PIVOTED, _on_host, (_together, _launched, _general, _batch), place=HOST),
    Row(CHOLESKY, _on_host, (_together, _launched, _definite, _batch), place=HOST),
    Row(PIVOTED, _directly, (_together, _begun, _general), arithmetics=_library),
    Row(CHOLESKY, _directly, (_together, _begun, _definite)),
    Row(CHOLESKY, _cholesky, (_one_left, _not_begun, _definite), arithmetics=_definite_formats),
    (
        Row(LU, _in(ways.lu), (_one_left, _not_begun, _general, _without_pivots), arithmetics=_low),
        Row(
            BUTTERFLIES,
            _in(ways.mixed_by_butterflies),
            (_one_left, _not_begun, _general, _butterflies),
            arithmetics=_low_for_butterflies,
        ),
        Row(
            PIVOTED,
            _in(ways.pivoted_lu),
            (_one_left, _not_begun, _general, _pivots),
            arithmetics=_low_with_pivots,
        ),
    ),
    Row(BUTTERFLIES, _in_double(ways.mixed_in_double), (_one_left, _not_begun, _default, _swaps_cost)),
    Row(PIVOTED, _in_double(ways.by_library), (_one_left, _not_begun, _default)),
    Row(BUTTERFLIES, _if_unsolved, (_one_left, _default, _is_general_or_new, _unmixed)),
)
"""Cheapest first."""
