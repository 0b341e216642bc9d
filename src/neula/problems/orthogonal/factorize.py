"""Q and R in working precision: one matrix, or a batch of them together or one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from neula.algorithms.spectra.numerical_rank import is_invertible, rank_tolerance
from neula.certificates.bounds import Accuracy
from neula.certificates.qr import accepted_by
from neula.certificates.qr_evidence import QRCertificate, QRCertificates
from neula.engines import FP32, FP64, Engine
from neula.engines.formats import in_double
from neula.errors import part_of_one
from neula.kernels.precision import plain_arithmetic
from neula.pipeline.call import Call
from neula.pipeline.chain import Answer, Link, Run, answer_of_first, first_answer, run_chain
from neula.pipeline.distributed import in_step
from neula.pipeline.inputs import check_finite, finite_members, flattened
from neula.pipeline.plans import Given
from neula.pipeline.result import Attempt, QRResult
from neula.pipeline.result.shown import Later
from neula.problems.orthogonal.links import MatrixLayout, chain_alone, chain_together, go_together
from neula.problems.orthogonal.problem import QRFactors, QRJudge, QRMatrices, QROptions, QRValues, as_accepted
from neula.problems.orthogonal.ways import QRLink, is_for_core, without_factors

Begun = Sequence[Answer[QRValues]]  # answers of first links: of a chain for all matrices, or of one for each


def factorize(matrices: torch.Tensor, mode: str, options: QROptions, begun: Begun | None = None) -> QRFactors:
    """Q and R of one matrix or a batch, by what suits it, on the engine's device."""
    # Shapes: matrices (batch, m, n). ``mode``: whether Q is to be square. ``begun``: from :func:`begin`.
    target = options.target
    with plain_arithmetic(options.engine.device):
        if matrices.numel() == 0:
            return QRFactors.of_nothing(matrices, mode, target)
        if _go_together(matrices, options):
            first = None if begun is None else begun[0]
            factors = factorize_together(matrices, links_for(matrices, options), options, first)
        else:
            factors = _one_after_the_other(matrices, options, begun)
        return factors.completed() if mode == "complete" else factors


def begin(matrices: torch.Tensor, options: QROptions) -> tuple[QRValues, torch.Tensor, Begun] | None:
    """Factors by the first links, and which are accepted, without waiting; None where a first link waits."""
    if matrices.numel() == 0:
        return None
    with plain_arithmetic(options.engine.device):
        parts = [matrices] if _go_together(matrices, options) else list(matrices.split(1))
        begun = _side_by_side(matrices, options) if len(parts) > 1 else None
        if begun is None:
            begun = []
            for a in parts:
                found = first_answer(links_for(a, options, wait=False), QRMatrices(a, options))
                if found is None:
                    return None
                begun.append(found)
        values = QRValues.joined([found.values for found in begun])
        accepted = accepted_by(values.measures.T, options.shape_of(matrices.shape), options.target)
        return values, accepted, begun


def _go_together(matrices: torch.Tensor, options: QROptions) -> bool:
    count, m, n = matrices.shape
    return not options.named and go_together(count, m, n, options.engine.tuning)


def links_for(matrices: torch.Tensor, options: QROptions, *, wait: bool = True) -> Sequence[QRLink]:
    """Links for a batch that is factorized together, or for each matrix of another batch."""
    if _go_together(matrices, options):
        m, n = matrices.shape[1:]
        return chain_together(m, n, options)
    return chain_alone(MatrixLayout.from_matrix(matrices[0]), options, wait=wait)


def factorize_together(
    matrices: torch.Tensor, links: Sequence[QRLink], options: QROptions, begun: Answer[QRValues] | None = None
) -> QRFactors:
    """Run a chain: each link for those matrices that were not accepted before."""
    over_rows = options.over_rows
    if over_rows.spread:  # NaN on one process is an error on all of them
        check_finite(matrices[0], options.engine.column_max(matrices[0]), "A", over_rows)
    batch = None if over_rows.spread else matrices
    judge = QRJudge(options.shape_of(matrices.shape), options.target, batch, over_rows=over_rows)
    return QRFactors.from_run(*_run(links, QRMatrices(matrices, options), judge, begun))


def _one_after_the_other(matrices: torch.Tensor, options: QROptions, begun: Begun | None) -> QRFactors:
    """Each by a chain of its own; the attempts are those of the first that is not accepted."""
    shape, over_rows = options.shape_of(matrices.shape), options.over_rows
    judge = QRJudge(shape, options.target, in_place=options.in_place, over_rows=over_rows)
    usable = finite_members(matrices).tolist() if len(matrices) > 1 else [True]
    runs: list[Run[QRValues]] = []
    certificates: list[QRCertificate] = []
    if begun is None and len(matrices) > 1 and all(usable):
        begun = _side_by_side(matrices, options)
    for place, finite in enumerate(usable):
        a = matrices[place : place + 1]
        links: Sequence[QRLink] = [Link("none", without_factors)]
        first = None
        if finite:
            links = links_for(a, options)
            first = None if begun is None else begun[place]
        run, found = _run(links, QRMatrices(a, options), judge, first)
        runs.append(run)
        certificates += found
    worst = next((run for run in runs if not run.accepted[0]), runs[-1])
    values = QRValues.joined([run.found for run in runs])
    return QRFactors(values.q, values.r, tuple(certificates), tuple(worst.attempts))


def _side_by_side(matrices: torch.Tensor, options: QROptions) -> Begun | None:
    """Answers of captured first links, two at a time: one chain of panels leaves most of the GPU idle."""
    links = links_for(matrices, options)
    if not links[0].launches_only or matrices[0].nbytes > options.engine.tuning.replayed_bytes:
        return None
    found: list[Answer[QRValues]] = []

    def begin(place: int) -> None:
        answer = first_answer(links, QRMatrices(matrices[place : place + 1], options))
        assert answer is not None
        found.append(answer)

    try:
        for place in range(0, len(matrices) - 1, 2):
            options.low_engine.concurrently(partial(begin, place), partial(begin, place + 1))
        if len(matrices) % 2:
            begin(len(matrices) - 1)
    except torch.OutOfMemoryError:  # one of them may fit into memory
        return None
    return found


def _run(
    links: Sequence[QRLink], matrices: QRMatrices, judge: QRJudge, begun: Answer[QRValues] | None = None
) -> tuple[Run[QRValues], Sequence[QRCertificate]]:
    links = in_step(links) if matrices.options.over_rows.spread else links
    run = run_chain(links, matrices, judge, begun=begun)
    return run, judge.certificates(run)


class QRPlan:
    def __init__(self, link: QRLink, options: QROptions, mode: str = "reduced") -> None:
        self.options, self._link, self._mode = options, link, mode

    def __call__(self, given: Given) -> QRResult[Any] | None:
        found = self.solved(given, torch.from_numpy(given.arrays[0]))
        return found if isinstance(found, QRResult) else None

    def solved(self, given: Given, a: torch.Tensor) -> QRResult[Any] | Answer[QRValues] | None:
        found, certificate = self.first(a)
        if found is None or certificate is None:
            return found
        q, r = (x.reshape(*a.shape[:-2], *x.shape[1:]) for x in (found.values.q, found.values.r))
        return as_accepted(given, self.options, self._mode, (q, r), certificate, found.label)

    def first(self, a: torch.Tensor) -> tuple[Answer[QRValues] | None, QRCertificate | QRCertificates | None]:
        """Answer of the link, and its certificate if all of it is accepted."""
        found = answer_of_first(
            [self._link], QRMatrices(a[None] if a.ndim == 2 else flattened(a), self.options)
        )
        if found is None:
            return None, None
        judge = QRJudge(a.shape[-2:], self.options.target)
        if a.ndim == 2:
            one = judge.certificate(found.values)
            return found, one if one.accepted else None
        several = judge.certificates_of_batch(found.values, found.values.measures.T.numpy())
        return found, None if several.rejected else several


def plan_for(a: torch.Tensor, options: QROptions, mode: str = "reduced") -> QRPlan | None:
    """The first link for matrices on a CPU that keep their dtype, all at once."""
    (m, n), target, tuning = a.shape[-2:], options.target, options.engine.tuning
    asked = options.named or options.in_place or options.progress is not None
    if asked or not a.numel() or a.dtype.to_real() != target.dtype or target not in (FP32, FP64):
        return None
    here = a.is_cpu and options.engine.device.type == "cpu" and tuning.lapack_first(m, n)
    matrices = flattened(a)
    at_once = len(matrices) == 1 or _go_together(matrices, options)
    if not (at_once and here):
        return None
    return QRPlan(links_for(matrices, options)[0], options, mode)


class RangePlan:
    """A plan for orthonormal bases of single matrices of one shape, with independent columns."""

    def __init__(self, plan: QRPlan, rcond: float | None) -> None:
        self.options, self._plan, self._rcond = plan.options, plan, rcond

    def __call__(self, given: Given) -> Any | None:
        """Q; None where it is not accepted, or the inverse of R does not show that the rank is full."""
        m, n = given.arrays[0].shape
        found, certificate = self._plan.first(torch.from_numpy(given.arrays[0])) if m >= n else (None, None)
        if found is None or certificate is None:
            return None
        r, rcond, error = found.values.r[0], self._rcond, 0.0
        if rcond is None:
            rcond, error = rank_tolerance(r.dtype, m, n), n**0.5 * certificate.residual
        if not is_invertible(in_double(r).resolve_conj().numpy(), rcond, error, unit=self._rcond is None):
            return None
        return given.wrap(found.values.q[0].numpy())


def plan_of(A: Any, mode: str = "reduced", **asked: Any) -> QRPlan | None:
    return _of_core(A, mode, **asked) if mode in ("reduced", "r") else None


def range_plan_of(
    A: Any, *, rcond: float | None = None, method: str = "qr", wait: bool = True, **asked: Any
) -> RangePlan | None:
    rcond = part_of_one("rcond", rcond)
    plan = _of_core(A, **asked) if method == "qr" and wait and A.ndim == 2 else None
    return None if plan is None else RangePlan(plan, rcond)


def _of_core(
    A: Any,
    mode: str = "reduced",
    *,
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    strict: bool = False,
    wait: bool = True,
    **others: Any,
) -> QRPlan | None:
    call = Call.begin({"A": A}, engine=engine, accuracy=accuracy, strict=strict)
    a, target = call.first.tensor, call.target
    if a.ndim < 2 or others or not a.is_cpu:
        return None
    (m, n), options = a.shape[-2:], QROptions(target, call.engine)
    return (
        plan_for(a, options, mode) if is_for_core(m, n, target, is_complex=a.is_complex()) or m < n else None
    )


def solved_by_plan(call: Call, options: QROptions, mode: str) -> QRResult[Any] | Answer[QRValues] | None:
    """The result where the first link is accepted, else what it has found, if anything."""
    plan = _of_call(call, options, mode)
    with call.computing():
        return None if plan is None else plan.solved(Given.of_call(call), call.first.tensor)


def factors_by_plan(call: Call, options: QROptions) -> QRFactors | None:
    """Factors where the first link is accepted, or the chain that continues from it; None without a plan."""
    plan = _of_call(call, options, "reduced")
    with call.computing():
        found, certificate = (None, None) if plan is None else plan.first(call.first.tensor)
    if found is None:
        return None
    if certificate is None:
        return factorize(call.matrices(), "reduced", options, [found])
    attempt = Attempt(found.label, True, Later(lambda: certificate.in_words))
    all_of_them = (certificate,) if isinstance(certificate, QRCertificate) else certificate
    return QRFactors(found.values.q, found.values.r, all_of_them, (attempt,))


def _of_call(call: Call, options: QROptions, mode: str) -> QRPlan | None:
    plain = not (call.differentiable or call.first.places)
    return plan_for(call.first.tensor, options, mode) if plain else None
