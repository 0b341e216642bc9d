"""Least squares with a covariance of b, and with equality constraints: both lead to the plain problem."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from neula.algorithms.scaling import binary_exponents, power_of_two_scales
from neula.algorithms.spectra.condition import extreme_singular_values
from neula.certificates.forward_error import (
    ESTIMATED,
    SURE,
    digits_of,
    least_squares_error,
    residual_ratio,
    rounded_error,
)
from neula.engines import FP64, Engine
from neula.kernels.magnitudes import MODERATE
from neula.kernels.refining import over
from neula.pipeline.call import Call
from neula.pipeline.gradients import stacked_problem
from neula.pipeline.inputs import Taken, check_finite, take
from neula.pipeline.result import Attempt, LstsqResult
from neula.pipeline.shapes import System, broadcast_system
from neula.problems.least_squares.fit import LinearFit
from neula.problems.least_squares.null_space import NullSpace
from neula.problems.least_squares.problem import Options
from neula.problems.least_squares.solution import Solved, solve_system

ALIKE = 10
"""Columns whose sizes differ by fewer powers of two are not scaled before they are mixed by a null space."""


@dataclass(frozen=True)
class General:
    """What makes a problem more than a plain one.

    Attributes
    ----------
    constraints : (Tensor, Tensor) or None
        C, shape (p, n), and d, shape (p, 1) or (p, k), in float64.
    factor : Tensor or None
        Lower Cholesky factor of the covariance, shape (m, m), or the square roots of variances, shape (m,).
    computed : bool
        Whether it was made here from a covariance, and not given.
    """

    constraints: tuple[torch.Tensor, torch.Tensor] | None
    factor: torch.Tensor | None
    computed: bool


def checked_general(call: Call, constraints: Any, covariance: Any, factor: Any) -> General | None:
    """Constraints and covariance on the device of the engine; None where there are none.

    Raises
    ------
    ValueError
        For shapes that do not fit, NaN or Inf, and a covariance that is not positive definite.
    """
    if constraints is None and covariance is None and factor is None:
        return None
    if call.engine.over_rows.spread:
        raise ValueError(
            "constraints and covariances are for whole matrices: pass A.full() and b.full(), or weights="
        )
    if covariance is not None and factor is not None:
        raise ValueError("covariance and covariance_factor say the same: pass one of them")
    if call.weights is not None and (covariance is not None or factor is not None):
        raise ValueError("weights and a covariance say the same: pass one of them")
    m, n = call.first.tensor.shape[-2:]
    pair = None if constraints is None else _checked_constraints(call, constraints, n)
    lower: torch.Tensor | None = None
    if covariance is not None:
        lower = _factor_of(_array(call, covariance, "covariance"), m)
    elif factor is not None:
        lower = _checked_factor(_array(call, factor, "covariance_factor"), m)
    return General(pair, lower, computed=factor is None)


def _array(call: Call, x: Any, name: str) -> torch.Tensor:
    found = call.here(take(x, name).tensor).double()
    check_finite(found, found, name)
    return found


def _checked_constraints(call: Call, constraints: Any, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(constraints, (tuple, list)) or len(constraints) != 2:
        raise ValueError("constraints must be a pair (C, d) of a matrix and a vector, for C x = d")
    c, d = (_array(call, x, name) for x, name in zip(constraints, "Cd", strict=True))
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
        if not bool((v > 0).all()):
            place = int((~(v > 0)).nonzero()[0])
            raise ValueError(
                f"covariance[{place}] is {float(v[place])}: variances must be positive; what is known "
                "exactly goes into constraints"
            )
        return v.sqrt()
    if v.shape != (m, m):
        raise ValueError(
            f"covariance must have shape ({m}, {m}) or ({m},), as A has rows, got {tuple(v.shape)}"
        )
    difference = (v - v.mT).abs().max() if m else v.new_zeros(())
    if bool(difference > 1e-6 * v.abs().max()):
        raise ValueError(
            f"covariance is not symmetric: elements differ from their mirror by {difference:.1e}"
        )
    lower, info = torch.linalg.cholesky_ex(v)
    if bool(info > 0):
        raise ValueError(
            f"covariance is not positive definite: its leading minor of order {int(info)} is not; what is "
            "known exactly goes into constraints"
        )
    return lower


def _checked_factor(lower: torch.Tensor, m: int) -> torch.Tensor:
    if lower.shape != (m, m):
        raise ValueError(
            f"covariance_factor must have shape ({m}, {m}), as A has rows, got {tuple(lower.shape)}"
        )
    if bool(lower.triu(1).any()):
        raise ValueError("covariance_factor must be lower triangular: pass the transpose of an upper one")
    if not bool((lower.diagonal() != 0).all()):
        place = int((lower.diagonal() == 0).nonzero()[0])
        raise ValueError(f"covariance_factor[{place}, {place}] is zero: the covariance would be singular")
    return lower


def solve_general(
    call: Call, shapes: System, options: Options, weights: torch.Tensor | None, general: General
) -> Solved:
    """Whiten, remove the constraints, solve what is left, and say what that has cost in digits."""
    a, b = (call.here(call.operands[name].graph).double() for name in ("A", "b"))
    if not shapes.batch:
        for name, x in (("A", a.detach()), ("b", b.detach())):
            check_finite(x, x, name)
    b = b.unsqueeze(-1) if shapes.is_vector else b
    zero = ~b.detach().any(-2)
    noise = 0.0
    if general.factor is not None:
        with call.computing():
            noise = _noise(general.factor, computed=general.computed)
        options = replace(options, unit=options.unit + noise)
        a, b = _whitened(general.factor, a), _whitened(general.factor, b)
    if general.constraints is None:
        solved = _solve(call, a, b, options, weights)
        result = _with_noise(solved.result, a.detach(), noise)
        return _given_back(call, shapes, replace(solved, result=result), result.x, a, zero)
    a, b = stacked_problem(a, b, weights, options.damp)
    return _constrained(call, shapes, options, a, b, general.constraints, zero, noise)


def _noise(factor: torch.Tensor, *, computed: bool) -> float:
    """Relative perturbation of A and b that whitening comes to.

    Rounding errors of the triangular solve, and of the factor, ``L L^T = V + E``, which become
    ``L^-1 E L^-T``.
    """
    if factor.ndim == 1 or not len(factor):
        return 2 * FP64.u
    rows = factor * power_of_two_scales(factor.abs().amax(1))[:, None]
    upper = rows.mT.contiguous()
    largest, smallest = extreme_singular_values(upper, upper).tolist()
    condition = ESTIMATED * largest / max(smallest, 1e-300)
    return condition * (1 + condition * computed) * len(factor) ** 0.5 * FP64.u


def _whitened(factor: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``L^-1 X``."""
    if factor.ndim == 1:
        return x / factor[:, None]
    return torch.linalg.solve_triangular(factor, x, upper=False)


def _solve(
    call: Call, a: torch.Tensor, b: torch.Tensor, options: Options, weights: torch.Tensor | None = None
) -> Solved:
    """The plain problem, for tensors on the engine's device."""
    b = b.expand(*_batch(a, b), *b.shape[-2:])
    operands = {name: Taken(x.detach(), lambda y: y, x) for name, x in (("A", a), ("b", b))}
    inner = replace(call, operands=operands)
    return solve_system(inner, broadcast_system(*inner.tensors), options, weights)


def _batch(a: torch.Tensor, b: torch.Tensor) -> torch.Size:
    return torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])


def _constrained(
    call: Call,
    shapes: System,
    options: Options,
    a: torch.Tensor,
    b: torch.Tensor,
    constraints: tuple[torch.Tensor, torch.Tensor],
    zero: torch.Tensor,
    noise: float,
) -> Solved:
    """A solution through the null space of C."""
    with call.computing():
        scales, null = _null_space(a.detach(), constraints, options.engine)
    a = a * scales
    unit = options.unit + null.noise
    plain = replace(options, damp=0.0, weights=None, dtype=torch.float64, unit=unit)
    solved = _solve(call, a @ null.basis, b - a @ null.shortest, plain)
    z = solved.result.x
    x = null.shortest + null.basis @ z
    result = _with_constraints(solved.result, null, a.detach(), b.detach(), x.detach(), z.detach(), noise)
    n, rank = a.shape[-1], null.rank
    how = Attempt(
        "null space of C by QR", True, f"{rank} of {len(null.c)} constraints on {n} unknowns independent"
    )
    result = replace(
        result,
        rank=result.rank + rank,
        full_rank=result.full_rank + rank,
        ranks=result.ranks + rank,
        attempts=(how, *result.attempts),
    )
    solved = replace(solved, result=result)
    zero = zero & ~constraints[1].any(0)
    return _given_back(call, shapes, solved, x, a, zero, scales, null.basis)


def _null_space(
    a: torch.Tensor, constraints: tuple[torch.Tensor, torch.Tensor], engine: Engine
) -> tuple[torch.Tensor, NullSpace]:
    """That of the scaled unknowns, and their scales.

    Raises
    ------
    ValueError
        Where no x fulfils all constraints.
    """
    c, d = constraints
    scales = _column_scales(a)
    null = NullSpace.of(c * scales, d, engine)
    if null.rank < len(c) and bool((scales != 1).any()):  # what scales have made of independent rows
        plain = NullSpace.of(c, d, engine)
        if plain.rank > null.rank:
            scales, null = torch.ones_like(scales), plain
    null.check(c * scales, d)
    return scales, null


def _column_scales(a: torch.Tensor) -> torch.Tensor:
    """Powers of two for the unknowns, by the columns of A; ones where these are alike, or zero."""
    n = a.shape[-1]
    ones = torch.ones(n, dtype=torch.float64, device=a.device)
    if not a.numel():
        return ones
    largest = a.nan_to_num().abs().reshape(-1, n).amax(0)
    if a.shape[-2] < n or not bool((largest > 0).all()):  # what is shortest is to be so in given units
        return ones
    exponents = binary_exponents(largest)
    return power_of_two_scales(largest) if int(exponents.max() - exponents.min()) > ALIKE else ones


def _with_constraints(
    result: LstsqResult,
    null: NullSpace,
    a: torch.Tensor,
    b: torch.Tensor,
    x: torch.Tensor,
    z: torch.Tensor,
    noise: float,
) -> LstsqResult:
    """Evidence for x from that for z, its part in the null space.

    To first order: what is off in the constraints moves x by the pseudoinverse of C, and by that of ``A Z``
    times A of it, and its product with their multipliers moves the minimum (Elden, "Perturbation theory for
    the least squares problem with linear equality constraints", SIAM J. Numer. Anal. 17, 1980). Rounding
    errors of ``A Z`` and ``b - A s``, and what is wrong with A and b, are perturbations of the problem for z.
    Errors are those of ``D x``, D being norms of columns of A.
    """
    norm, left = torch.linalg.vector_norm, null.basis.shape[1]
    columns = _sizes(a)
    lengths = norm(null.shortest, dim=0) + norm(x, dim=-2)
    total = null.noise * lengths
    if left:
        mixed = norm(a @ null.basis, dim=-2)
        least = mixed.amin(-1, keepdim=True).clamp(min=1e-300)
        inverse = ESTIMATED * result.conditions[..., None] / least
        of_a = torch.linalg.matrix_norm(a)[..., None]
        length = torch.as_tensor(result.residual_norm, dtype=a.dtype, device=a.device).reshape(lengths.shape)
        rounded = 2 * a.shape[-1] ** 0.5 * FP64.u + noise
        of_residual = inverse**2 * of_a * length
        total = null.noise * ((1 + inverse * of_a) * lengths + of_residual)
        total = total + rounded * (
            inverse * (of_a * (lengths + norm(z, dim=-2)) + norm(b, dim=-2)) + of_residual
        )
        total = total + result.forward_errors * norm(mixed[..., None] * z, dim=-2) / least
    size = norm(columns[..., None] * x, dim=-2)
    forward = over(columns.amax(-1, keepdim=True) * total, size)
    error = null.error(x).expand(forward.shape)
    return replace(
        result,
        forward_errors=forward,
        backward_errors=torch.maximum(result.backward_errors, worst_of(error)),
        constraint_error=float(error.max()) if error.numel() else 0.0,
    )


def _sizes(a: torch.Tensor) -> torch.Tensor:
    """Norms of the columns of A, shape (..., n); ones where all of A vanishes."""
    return torch.linalg.vector_norm(a, dim=-2).where(a.any(-1).any(-1)[..., None], 1.0)


def worst_of(columns: torch.Tensor) -> torch.Tensor:
    """The largest of what is known of right-hand sides, shape (..., k), of each problem."""
    return columns.amax(-1) if columns.shape[-1] else columns.new_zeros(columns.shape[:-1])


def _with_noise(result: LstsqResult, a: torch.Tensor, noise: float) -> LstsqResult:
    """Forward errors with what a relative perturbation of A and b comes to."""
    if not noise:
        return result
    norms = _sizes(a)[..., None]
    size = torch.linalg.vector_norm(norms * result.x.detach(), dim=-2)
    length = torch.as_tensor(result.residual_norm, dtype=torch.float64, device=a.device)
    ratio = residual_ratio(length.reshape(size.shape), 1.0, size)
    error = torch.full_like(size, noise)
    of_noise = least_squares_error(ESTIMATED * result.conditions[..., None], error, ratio)
    return replace(result, forward_errors=result.forward_errors + of_noise)


def _given_back(
    call: Call,
    shapes: System,
    solved: Solved,
    x: torch.Tensor,
    a: torch.Tensor,
    zero: torch.Tensor,
    scales: torch.Tensor | None = None,
    basis: torch.Tensor | None = None,
) -> Solved:
    """The result as the user gets it, x and a basis of what it may be in the user's units.

    Where ``A x`` is so small or so large that squares are lost, which norms are made of, nothing is known,
    but that the solution for ``zero`` data is zero.
    """
    result, bound = solved.result, solved.result.tolerance
    units = a.new_ones(a.shape[-1], 1) if scales is None else scales[:, None]
    solution, norms = units * x, _sizes(a.detach())[..., None]
    lost = x.detach() - solution.detach().to(call.dtype).double() / units
    rest, size = (torch.linalg.vector_norm(norms * y, dim=-2) for y in (lost, x.detach()))
    rounding = over(rest, size)
    largest = norms.amax(-2)
    known = (largest >= 1 / MODERATE) & (largest <= MODERATE) & (size >= 1 / MODERATE) & (size <= MODERATE)
    forward = rounded_error(result.forward_errors, rounding).where(zero | known, torch.inf)
    backward = result.backward_errors + worst_of(rounding)
    accepted = result.accepted & (worst_of(forward) <= SURE) & (backward <= bound)
    found = {
        "accepted": accepted,
        "backward_errors": backward,
        "conditions": result.conditions,
        "forward_errors": forward.squeeze(-1) if shapes.is_vector else forward,
        "ranks": result.ranks,
    }
    worst, of_data = (float(y.max()) if y.numel() else 0.0 for y in (forward, backward))
    why = solved.why or f"forward error {worst:.1e}, backward error {of_data:.1e} (bound {bound:.1e})"
    solution = solution.squeeze(-1) if shapes.is_vector else solution
    fit = result.fit
    if isinstance(fit, LinearFit):
        given_shapes = replace(fit.shapes, is_vector=shapes.is_vector)
        rows = shapes.matrices.shape[1] if basis is not None else None
        own = None if basis is None else units * basis
        fit = replace(fit, call=call, shapes=given_shapes, rows=rows, basis=own)
    result = replace(
        result,
        fit=fit,
        x=call.give_back(solution, call.dtype),
        converged=bool(accepted.all()),
        backward_error=of_data,
        forward_error=worst,
        digits=digits_of(worst, call.dtype),
        **{name: call.give_back(y.contiguous(), y.dtype) for name, y in found.items()},
    )
    missed = (~accepted).nonzero().tolist()
    return Solved(result, why, missed, bool((~(worst_of(forward) <= SURE)).any()))
