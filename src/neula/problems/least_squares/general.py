"""Least squares with a covariance of b, and with equality constraints: both lead to the plain problem."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from neula.algorithms.scaled_problems import ScaledProblems, lengths
from neula.algorithms.scaling import power_of_two_scales
from neula.algorithms.spectra.condition import extreme_singular_values
from neula.certificates.forward_error import ESTIMATED, SURE, digits_of, rounded_error
from neula.certificates.verdict import Evidence
from neula.engines import FP64
from neula.engines.formats import double_of, in_double
from neula.errors import counted, warn
from neula.kernels.shift import shift
from neula.kernels.small_problems.refining import over
from neula.pipeline.call import Call
from neula.pipeline.inputs import Taken, check_finite, take
from neula.pipeline.result import IllConditionedWarning
from neula.pipeline.shapes import BatchedProblem, broadcast_system
from neula.pipeline.solutions import does_not_fit
from neula.problems.least_squares.constrained import ConstrainedSolution, Elimination, whitened, worst_of
from neula.problems.least_squares.problem import LeastSquaresOptions
from neula.problems.least_squares.run import LeastSquaresOutcome


@dataclass(frozen=True)
class General:
    """Constraints and covariance of a general problem."""

    # C, shape (p, n), and d, shape (p, 1) or (p, k), in double precision.
    constraints: tuple[torch.Tensor, torch.Tensor] | None
    # Lower Cholesky factor of the covariance, shape (m, m), or the square roots of variances, shape (m,).
    factor: torch.Tensor | None
    computed: bool  # whether it was made here from a covariance, and not given


def checked_general(
    call: Call, constraints: Any, covariance: Any, factor: Any, rows: int | None, *, intercept: bool
) -> General | None:
    """Constraints and covariance on the device of the engine; None where there are none."""
    # ``rows`` are data; those below are damping, of unit variance.
    if constraints is None and covariance is None and factor is None:
        return None
    if call.engine.over_rows.spread:
        raise ValueError(
            "constraints and covariances are for whole matrices: pass A.full() and b.full(), or weights="
        )
    if covariance is not None and factor is not None:
        raise ValueError("covariance and covariance_factor are the same covariance: pass one of them")
    if call.weights is not None and (covariance is not None or factor is not None):
        raise ValueError("weights and a covariance both weight the rows: pass one of them")
    (below, n), m = call.first.tensor.shape[-2:], rows or call.first.tensor.shape[-2]
    pair = None if constraints is None else checked_constraints(call, constraints, n, intercept=intercept)
    lower: torch.Tensor | None = None
    if covariance is not None:
        lower = _factor_of(_array(call, covariance, "covariance"), m)
    elif factor is not None:
        lower = _checked_factor(_array(call, factor, "covariance_factor"), m)
    if lower is not None and below > m:
        ones = lower.new_ones(below - m)
        lower = torch.cat([lower, ones]) if lower.ndim == 1 else torch.block_diag(lower, ones.diag())
    return General(pair, lower, computed=factor is None)


def _array(call: Call, x: Any, name: str) -> torch.Tensor:
    found = call.here(take(x, name, or_complex=True).tensor)
    double = double_of(call.dtype)
    if found.is_complex() and not double.is_complex:
        raise TypeError(f"{name} is complex, and A and b are real: pass a real {name}, or a complex A")
    check_finite(found, found, name)
    return found.to(double)


def checked_constraints(
    call: Call, constraints: Any, n: int, *, intercept: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """C, shape (p, n), and d, shape (p, 1) or (p, k), in double precision on the device of the engine."""
    if not isinstance(constraints, (tuple, list)) or len(constraints) != 2:
        raise ValueError("constraints must be a pair (C, d) of a matrix and a vector, for C x = d")
    c, d = (_array(call, x, name) for x, name in zip(constraints, "Cd", strict=True))
    c = with_intercept_of_constraints(c, n) if intercept else c
    if c.ndim != 2 or c.shape[1] != n:
        raise ValueError(f"C must have shape (p, {n}), a column for each unknown, got {tuple(c.shape)}")
    if d.ndim not in (1, 2) or len(d) != len(c):
        raise ValueError(
            f"d must have shape ({len(c)},) or ({len(c)}, k), as C has rows, got {tuple(d.shape)}"
        )
    return c, d if d.ndim == 2 else d[:, None]


def _factor_of(v: torch.Tensor, m: int) -> torch.Tensor:
    """Cholesky factor of a covariance, or square roots of variances."""
    if v.shape == (m,):
        if v.is_complex() and bool(v.imag.any()):
            raise ValueError("covariance has complex variances: pass their real values, or a matrix")
        v = v.real
        if not bool((v > 0).all()):
            place = int((~(v > 0)).nonzero()[0])
            raise ValueError(
                f"covariance[{place}] is {float(v[place])}: variances must be positive; pass "
                "observations without errors as constraints"
            )
        return v.sqrt()
    if v.shape != (m, m):
        raise ValueError(
            f"covariance must have shape ({m}, {m}) or ({m},), for {m} rows of A, got {tuple(v.shape)}"
        )
    difference, largest = (x.abs().max() if m else x.abs().sum() for x in (v - v.mH, v))
    if bool(difference > 1e-6 * largest):
        raise ValueError(
            f"covariance is not {'Hermitian' if v.is_complex() else 'symmetric'}: elements differ from their "
            f"{'conjugate ' * v.is_complex()}mirror by {difference:.1e}"
        )
    lower, info = torch.linalg.cholesky_ex(v)
    if bool(info > 0):
        raise ValueError(
            f"covariance is not positive definite: its leading minor of order {int(info)} is not; "
            "pass observations without errors as constraints"
        )
    return lower


def _checked_factor(lower: torch.Tensor, m: int) -> torch.Tensor:
    if lower.shape != (m, m):
        raise ValueError(
            f"covariance_factor must have shape ({m}, {m}), for {m} rows of A, got {tuple(lower.shape)}"
        )
    if bool(lower.triu(1).any()):
        raise ValueError("covariance_factor must be lower triangular: pass the transpose of an upper one")
    if not bool((lower.diagonal() != 0).all()):
        place = int((lower.diagonal() == 0).nonzero()[0])
        raise ValueError(f"covariance_factor[{place}, {place}] is zero: the covariance would be singular")
    return lower


def solve_general(
    call: Call, shapes: BatchedProblem, options: LeastSquaresOptions, general: General
) -> LeastSquaresOutcome:
    """Whiten, scale, eliminate the constraints, solve, and bound the digits lost by these steps."""
    a, b = (call.here(call.operands[name].graph).to(double_of(call.dtype)) for name in ("A", "b"))
    if not shapes.batch:
        for name, x in (("A", a.detach()), ("b", b.detach())):
            check_finite(x, x, name)
    weights = None if call.weights is None else call.weights.graph
    b, factor, noise = b.unsqueeze(-1) if shapes.is_vector else b, general.factor, 0.0
    if general.constraints is not None and (d := general.constraints[1]).shape[1] not in (
        1,
        k := b.shape[-1],
    ):
        raise ValueError(f"d must have shape ({len(d)},) or ({len(d)}, {k}), got {tuple(d.shape)}")
    if factor is not None:
        with call.computing():
            noise = _noise(factor, computed=general.computed)
    of_rows, lower = (weights, factor) if factor is None or factor.ndim == 2 else (1 / factor, None)
    problem = ScaledProblems.from_arrays(
        *(a, b, of_rows, options.damp),
        factor=lower,
        limits_damping=general.constraints is None,
        keeps_rounding=False,
    )
    if weights is not None:  # products are rounded, rows of the damping are not
        share = over(lengths(problem.a[..., : a.shape[-2], :]), lengths(problem.a))
        noise = 2 * FP64.u * float(share.max()) if share.numel() else 0.0
    unit = options.unit + noise
    plain = replace(options, damp=0.0, weights=None, dtype=a.dtype, unit=unit)
    if general.constraints is None:
        found = whitened(call, problem, plain, noise)
        if weights is not None and problem.limited is not None:
            known = found.solved.result.forward_errors + _rounded_products(found)
            found = replace(found, forward=torch.where(problem.limited, known, found.forward))
    else:
        found = Elimination(call, problem, plain, general.constraints, noise).solved()
        if found.remark and not found.doubt:
            warn(found.remark, IllConditionedWarning)
    return _given_back(call, shapes, options, found, a.shape[-2], factor)


def _noise(factor: torch.Tensor, *, computed: bool) -> float:
    """Relative perturbation of A and b that whitening comes to."""
    # Rounding errors of the triangular solve, and of the factor, ``L L^H = V + E``, which become ``L^-1 E
    # L^-H``.
    if factor.ndim == 1 or not len(factor):
        return 2 * FP64.u
    rows = factor * power_of_two_scales(factor.abs().amax(1))[:, None]
    upper = rows.mT.contiguous()
    largest, smallest = extreme_singular_values(upper, upper).tolist()
    condition = ESTIMATED * largest / max(smallest, 1e-300)
    return condition * (1 + condition * computed) * len(factor) ** 0.5 * FP64.u


def _rounded_products(found: ConstrainedSolution) -> torch.Tensor:
    """Relative error of x by rounded products with weights, where damping dominates, shape (..., k)."""
    # There x is ``A^H b`` divided by squares of the damping, each term of which is rounded three times.
    norms, scaled = found.norms[..., None], found.problem
    terms = scaled.a.detach().abs().mH @ scaled.b.detach().abs()
    return 3 * FP64.u * over(lengths(terms / norms), lengths(norms * found.x))


def _in_range(solution: torch.Tensor, dtype: torch.dtype, *, doubtful: bool) -> torch.Tensor:
    """A solution that fits a dtype, or an OverflowError."""
    # With doubtful constraints it is cut off: they may forbid the directions along which it is too large.
    if doubtful:
        largest = torch.finfo(dtype).max
        if solution.is_complex():
            return torch.view_as_complex(torch.view_as_real(solution).clamp(-largest, largest))
        return solution.clamp(-largest, largest)
    if bool(solution.detach().to(dtype).isinf().any()):
        raise does_not_fit(dtype)
    return solution


def _given_back(
    call: Call,
    shapes: BatchedProblem,
    options: LeastSquaresOptions,
    found: ConstrainedSolution,
    rows: int,
    factor: torch.Tensor | None,
) -> LeastSquaresOutcome:
    """The result as the user gets it: x, residuals and what statistics need in the user's units."""
    solved, x, norms = found.solved, found.x, found.norms[..., None]
    result, bound = solved.result, solved.result.tolerance
    of_x = found.of_x - found.problem.columns.mT
    of_b = found.problem.b_columns.expand(*x.shape[:-2], 1, x.shape[-1])
    solution = _in_range(shift(x, of_x), call.dtype, doubtful=bool(found.doubt))
    rounded = shift(in_double(solution.detach().to(call.dtype)), -of_x)
    rest, size = (lengths(norms * y) for y in (x.detach() - rounded, x.detach()))
    rounding = over(rest, size)
    forward = rounded_error(found.forward, rounding)
    backward = found.backward + worst_of(rounding)
    left = found.residuals(rounded, rounding)
    nothing = torch.zeros_like(backward)
    evidence = Evidence(
        doubtful=(~result.accepted).double(),
        # With constraints x = 0 need not be feasible.
        residual=nothing
        if found.constraint_rank is not None
        else worst_of(over(left, lengths(found.problem.b))),
        refined_error=found.backward,
        backward_error=backward,
        forward_error=worst_of(forward),
        condition_bound=nothing,
    )
    limits = options.limits((rows, x.shape[-2]))
    accepted = replace(limits, backward_error=bound, forward_error=SURE).accept(evidence)
    arrays = {
        "accepted": accepted,
        "backward_errors": backward,
        "conditions": result.conditions,
        "forward_errors": forward.squeeze(-1) if shapes.is_vector else forward,
        "ranks": result.ranks + (found.constraint_rank or 0),
    }
    worst, of_data = (float(y.max()) if y.numel() else 0.0 for y in (forward, backward))
    why = (
        found.doubt
        or solved.why
        or f"forward error {worst:.1e}, backward error {of_data:.1e} (bound {bound:.1e})"
    )
    left = shift(left, of_b.squeeze(-2))
    solution = solution.squeeze(-1) if shapes.is_vector else solution
    result = replace(
        result,
        _fit=found.fit_in_units(call, options.observations or rows, factor, is_vector=shapes.is_vector),
        x=call.give_back(solution, call.dtype),
        converged=bool(accepted.all()),
        backward_error=of_data,
        forward_error=worst,
        digits=digits_of(worst, call.dtype),
        residual_norm=left.item() if left.numel() == 1 else left.flatten().tolist(),
        rank=result.rank + (found.constraint_rank or 0),
        full_rank=result.full_rank + (found.constraint_rank or 0),
        constraint_rank=found.constraint_rank,
        constraint_error=found.constraint_error,
        attempts=(*found.before, *result.attempts),
        **{name: call.give_back(y.contiguous(), y.dtype) for name, y in arrays.items()},
    )
    missed = (~accepted).nonzero().tolist()
    return LeastSquaresOutcome(result, why, missed, bool((~(worst_of(forward) <= SURE)).any()))


def row_factors(weights: Any, sigma: Any, sample_weight: Any) -> Any:
    """Factors of the rows: ``weights``, the reciprocals of ``sigma``, or the roots of ``sample_weight``."""
    given = {"weights": weights, "sigma": sigma, "sample_weight": sample_weight}
    named = [name for name, x in given.items() if x is not None]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)} weight the rows: pass one of them")
    if not named or weights is not None:
        return weights
    (name,) = named
    x = take(given[name], name, differentiable=True).graph.double()
    wrong = ~(x > 0) if sigma is not None else ~(x >= 0)
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        wanted = "standard deviations must be positive" if sigma is not None else "must not be negative"
        raise ValueError(f"{name}{place} is {float(x[tuple(place)])}: {wanted}")
    return 1 / x if sigma is not None else x.sqrt()


def with_intercept(call: Call, damp: float) -> Call:
    """A call with a column of ones before those of A, and rows below that damp all other columns."""
    # The damped problem is ``min ||[1 A; 0 damp I] x - [b; 0]||``, in which nothing damps the intercept.
    if call.engine.over_rows.spread:
        raise ValueError("intercept=True is for whole matrices: put a column of ones into the rows of A")
    a, b = (x.graph for x in call.operands.values())
    shapes = broadcast_system(a, b)
    bordered = torch.cat([a.new_ones(*a.shape[:-1], 1), a], -1)
    w = call.weights
    if damp:
        n = a.shape[-1]
        rows = torch.nn.functional.pad(damp * torch.eye(n, dtype=torch.float64, device=a.device), (1, 0))
        bordered = torch.cat([in_double(bordered), rows.expand(*a.shape[:-2], n, n + 1)], -2)
        below = shapes.b.new_zeros(*shapes.b.shape[:-2], n, shapes.b.shape[-1])
        b = torch.cat([shapes.b, below], -2)
        b = b[..., 0] if shapes.is_vector else b
        w = None if w is None else _like(w, torch.cat([w.graph, w.graph.new_ones(n)]))
    given = zip(call.operands.items(), (bordered, b), strict=True)
    return replace(call, operands={name: _like(taken, x) for (name, taken), x in given}, weights=w)


def with_intercept_of_constraints(c: torch.Tensor, n: int) -> torch.Tensor:
    """C with a column of zeros for the intercept, unless it has one."""
    if c.ndim == 2 and c.shape[1] == n - 1:
        return torch.nn.functional.pad(c, (1, 0))
    if c.ndim != 2 or c.shape[1] != n:
        columns = counted(n - 1, "column")
        raise ValueError(
            f"C must have {columns}, as A has, or one more, the first, for the intercept, and has shape "
            f"{tuple(c.shape)}"
        )
    return c


def _like(taken: Taken, graph: torch.Tensor) -> Taken:
    return replace(taken, tensor=graph.detach().resolve_conj().resolve_neg(), graph=graph)
