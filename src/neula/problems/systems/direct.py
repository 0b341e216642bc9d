"""Systems for which the library's factors in double precision are the cheapest: all of a batch together."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from neula.algorithms.krylov.batched_lstsq import MARGIN, ROUNDING, lengths, probes
from neula.algorithms.krylov.doubled_refinement import (
    MAX_STEPS,
    DoubledSolution,
    Refinement,
    Trusting,
    refine_doubled,
)
from neula.algorithms.spectra.inverse_norm import SharedSolves, inverse_norm, norm_of
from neula.certificates.backward_error import Measures
from neula.certificates.forward_error import COMPUTED, ESTIMATED, MAX_RATE, rounded_error
from neula.certificates.residuals import residual_noise
from neula.certificates.verdict import Evidence
from neula.engines import FP64, Format
from neula.kernels.doubled import Doubled
from neula.kernels.refining import over
from neula.kernels.systems import EvidenceMargins, Margins, MeasuredSystems, Trust, measured_systems, trusted
from neula.pipeline.chain import Answer
from neula.pipeline.left_to_host import host_for
from neula.pipeline.progress import stage
from neula.pipeline.refusals import Declined
from neula.problems.systems.by_kernel import batch_by_kernel
from neula.problems.systems.library_factors import (
    LibraryFactors,
    SingularMember,
    cholesky_factors,
    lu_factors,
)
from neula.problems.systems.problem import Systems, SystemsOptions, SystemsSolutions
from neula.problems.systems.scaled import ScaledSystems

VECTORS = 3
"""Random vectors that show how well factors solve; with LAPACK's that is more than is needed."""


def solve_directly(
    systems: Systems, before: Answer[SystemsSolutions] | None = None, format: Format = FP64
) -> Answer[SystemsSolutions]:
    """All systems by LU with partial pivoting in single or double precision, or Cholesky factors in double.

    Raises
    ------
    SingularMember
        If there are no factors in double precision.
    Declined
        If there are none in single precision.
    """
    answer = batch_by_kernel(systems, format)
    if answer is None:
        return _in_steps(systems, format)
    measured = answer.measured
    assert isinstance(measured, np.ndarray)
    limits = systems.options.limits(systems.b.shape[1])
    if len(systems) == 1 and limits.accept(Evidence.from_numbers(measured[:, 0].tolist())):
        return answer  # of numbers a verdict takes a tenth of the time
    accepted = limits.accept(Evidence.from_numbers(measured))
    if accepted.all():
        return answer
    places = torch.from_numpy(np.flatnonzero(~accepted))
    rest = _in_steps(systems.at(places), format)
    answer.values.put(places, rest.values)
    return replace(answer, iterations=rest.iterations, history=rest.history, measured=None)


def solve_by_host(systems: Systems, before: Answer[SystemsSolutions] | None) -> Answer[SystemsSolutions]:
    """The same on the host, where the launches of these steps take longer."""
    n, k = systems.b.shape[1:]
    host = host_for(systems.options, len(systems), n * n * (n + k))
    if host is None:
        raise Declined
    there = replace(systems.to(torch.device("cpu")), options=replace(systems.options, engine=host))
    answer = solve_directly(there)
    return replace(answer, values=answer.values.to(systems.device))


def _in_steps(systems: Systems, format: Format) -> Answer[SystemsSolutions]:
    """All together, each step one launch."""
    options, n, k = systems.options, *systems.b.shape[1:]
    report = stage(options.progress, f"factorizing in {format.name}")
    size = max(1, options.engine.tuning.chunk_elements // (n * max(n, k)))
    parts, histories = [], []
    for start in range(0, len(systems), size):
        part = slice(start, start + size)
        try:
            members, history = _solved(systems.a[part], systems.b[part], options, format)
        except SingularMember as error:
            if format is not FP64:
                raise Declined("a pivot vanishes") from None
            raise SingularMember(systems.place(error.place + start), error.why) from None
        parts.append(members)
        histories.append(history)
        report(min(1.0, (start + size) / len(systems)))
    errors = _worst(histories).tolist()
    label = "cholesky fp64" if options.positive else f"lu {format.name} with pivoting"
    return Answer(SystemsSolutions.joined(parts), label, "", len(errors) - 1, tuple(errors))


def _worst(histories: list[torch.Tensor]) -> torch.Tensor:
    """The largest backward error of all parts of a batch after each step; some parts take fewer."""
    steps = max(map(len, histories))
    padded = [torch.cat([h, h[-1:].expand(steps - len(h))]) for h in histories]
    return torch.stack(padded).amax(0)


class Images(NamedTuple):
    """What is measured of matrices before there are factors.

    Attributes
    ----------
    z : Tensor, shape (batch, n, p)
        Random vectors.
    norm : Tensor, shape (batch,)
        ``||A D^-1||``, estimated.
    images : Tensor, shape (batch, n, p)
        ``A Z``.
    """

    z: torch.Tensor
    norm: torch.Tensor
    images: torch.Tensor

    @classmethod
    def from_matrix(
        cls, a: torch.Tensor, sizes: torch.Tensor, *, vectors: int = VECTORS, unit: bool = True
    ) -> Images:
        """Of matrices with columns of some sizes.

        Parameters
        ----------
        a : Tensor, shape (batch, n, n)
        sizes : Tensor, shape (batch, n, 1)
        vectors : int
            How many random ones there are.
        unit : bool
            Whether they may be unit vectors: not where A times these is made of what was factorized, rounding
            errors included, as ``A^T A`` is.
        """
        z = probes(a.shape[-1], a.device, vectors, unit=unit).expand(len(a), -1, -1)
        return cls(z, *norm_of(a, sizes, beside=z))


class FactoredSystems:
    """Linear systems with factors, for :func:`neula.algorithms.krylov.doubled_refinement.refine_doubled`.

    Factors are read four times for the norm of the inverse. Beside that they show how well they solve, find
    the first solutions, and what to update these by: ten columns take a GPU hardly longer than one.

    Parameters
    ----------
    a : Tensor, shape (batch, n, n)
        float64.
    factors : LibraryFactors
    sizes : Tensor, shape (batch, n, 1)
        The diagonal of D.
    b : Tensor, shape (batch, n, k)
    norm : Tensor, shape (batch,)
        ``||A||_F``.
    doubled : bool
        Whether residuals are in twice the working precision.
    u : float
        Unit roundoff of the factors.
    power : int
        Of the condition number, by which a solve with them magnifies rounding errors.
    measured : Images, optional
        Where that is known.
    """

    def __init__(
        self,
        a: torch.Tensor,
        factors: LibraryFactors,
        sizes: torch.Tensor,
        b: torch.Tensor,
        norm: torch.Tensor,
        *,
        doubled: bool,
        u: float = FP64.u,
        power: int = 1,
        measured: Images | None = None,
    ) -> None:
        self.a, self.factors, self.sizes, self.power = a, factors, sizes, power
        self.doubled = Doubled.from_matrix(a) if doubled else None
        z, self.scaled_norm, images = Images.from_matrix(a, sizes) if measured is None else measured
        solves = SharedSolves(factors.solve, self._first_steps(b, z, images))
        inverse = inverse_norm(solves, factors.solve_transposed, sizes)[0]
        solves.finish()
        norms = norm, self.scaled_norm, inverse, self._left
        self.rate, wrong = trusted(sizes, *norms, Margins(ESTIMATED, ROUNDING * u, power, MARGIN))
        self.condition = inverse * self.scaled_norm.clamp_min(1.0)  # columns have norm 1
        noise = residual_noise(a.shape[-1], doubled=doubled, random=True)
        self._trust = Trust(sizes, wrong, inverse[:, None], norm[:, None], lengths(b), noise)

    def _first_steps(
        self, b: torch.Tensor, z: torch.Tensor, images: torch.Tensor
    ) -> Generator[torch.Tensor, torch.Tensor, None]:
        """What is solved for before norms are known."""
        found = yield torch.cat([images, b], 2)
        self._left = torch.linalg.matrix_norm(z - found[..., : z.shape[2]])
        self._start = found[..., z.shape[2] :]
        residual = self._residual(b, self._start)
        self._first = residual, (yield residual)

    def start(self, b: torch.Tensor) -> torch.Tensor:
        return self._start

    def solution(self, unknowns: torch.Tensor) -> torch.Tensor:
        return unknowns

    def size(self, unknowns: torch.Tensor) -> torch.Tensor:
        return lengths(self.sizes * unknowns)

    def evaluate(self, b: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> Trusting:
        """``A^-1 r`` by the factors."""
        if high is self._start:
            residual, update = self._first
        else:
            residual = self._residual(b, high, low)
            update = self.factors.solve(residual)
        return Trusting(update, residual, self._trust)

    def _residual(self, b: torch.Tensor, high: torch.Tensor, low: torch.Tensor | None = None) -> torch.Tensor:
        # Without doubled products low is below the rounding errors of the residual.
        return b - self.a @ high if self.doubled is None else self.doubled.residual(high, b, low)[0]

    def updated(
        self, b: torch.Tensor, unknowns: torch.Tensor, residual: torch.Tensor, update: torch.Tensor
    ) -> tuple[torch.Tensor, Measures]:
        """Normwise, in the matrix as it is scaled."""
        residual, trust = residual - self.a @ update, self._trust
        error = over(lengths(residual), trust.norm * lengths(unknowns) + trust.length)
        return residual, Measures(error, error)


def _solved(
    a: torch.Tensor, b: torch.Tensor, options: SystemsOptions, format: Format
) -> tuple[SystemsSolutions, torch.Tensor]:
    """Solutions, and their largest backward error after each step."""
    scaled = ScaledSystems.from_arrays(a, b)
    if options.positive:
        factors, growth = cholesky_factors(a, scaled, options.engine)
    else:
        factors, growth = lu_factors(scaled, format, options.engine.tuning)
    doubled = options.doubled(*b.shape[1:])
    system = FactoredSystems(
        scaled.a, factors, scaled.norms, scaled.b, scaled.frobenius, doubled=doubled, u=format.u
    )
    history: list[torch.Tensor] = []  # stays on the device until the end
    found = refine_doubled(
        system,
        scaled.b,
        tolerance=options.digits,
        max_steps=min(MAX_STEPS, options.max_iterations),
        on_step=lambda x, residual: history.append(scaled.backward_error(x, residual).amax()),
    )
    members = members_of(scaled, system, found, growth, options)
    history.append(members.refined_error.amax())
    return members, torch.stack(history)


def members_of(
    scaled: ScaledSystems,
    system: FactoredSystems,
    found: DoubledSolution,
    growth: torch.Tensor,
    options: SystemsOptions,
) -> SystemsSolutions:
    """Refined solutions as they are given back, with what is known of them."""
    # Of x as it is returned.
    if scaled.given and options.dtype == torch.float64:
        x, residual, rounding = found.x, found.residual, torch.zeros_like(found.forward_error)
    else:
        x = scaled.unscale(found.x).to(options.dtype).double()
        lost = found.x - scaled.scale(x)
        residual, rounding = found.residual + scaled.a @ lost, over(system.size(lost), system.size(found.x))
    measured, condition = scaled.backward_error(found.x, found.residual), _condition(scaled, system)
    return SystemsSolutions(
        x=x,
        forward_error=rounded_error(found.forward_error, rounding),
        doubtful=torch.zeros_like(condition, dtype=torch.bool),
        residual=scaled.relative_residual(residual).amax(1),
        refined_error=measured.amax(1),
        backward_error=(measured + rounding + found.rounding).amax(1),
        condition_bound=ESTIMATED * condition,
        condition=condition,
        growth=growth,
    )


def measured_as_given(
    scaled: ScaledSystems, system: FactoredSystems, refinement: Refinement, *, finished: bool
) -> MeasuredSystems:
    """What is known of solutions in double precision of systems that were not scaled, without much else.

    Parameters
    ----------
    finished : bool
        Whether those are doubtful that another step would improve.
    """
    # Of x alone, as it is returned.
    residual = refinement.residual - scaled.a @ (refinement.update - refinement.low)
    unfinished = refinement.active if finished else torch.zeros_like(refinement.active)
    return measured_systems(
        *(refinement.high, refinement.low, scaled.norms, residual, scaled.b, refinement.left, unfinished),
        *(*scaled.sizes, system.rate, system.condition, EvidenceMargins(MAX_RATE, COMPUTED, ESTIMATED)),
    )


def _condition(scaled: ScaledSystems, system: FactoredSystems) -> torch.Tensor:
    """Condition number of ``B = A D^-1`` with the rows of A in their own units, shape (batch,)."""
    if not scaled.has_rows:
        condition = system.condition
    else:
        # Units below the smallest normal number: singular for all that matters.
        units, factors = scaled.units, system.factors
        inverse = inverse_norm(factors.solve, factors.solve_transposed, scaled.norms, 1 / units)[0]
        condition = inverse * norm_of(units * scaled.a, scaled.norms)[0]
    return condition.nan_to_num(torch.inf, torch.inf).clamp_min(1.0)
