"""The rank-revealing end of the chain: the SVD in double precision, for one problem of any shape."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from neula.algorithms.krylov.batched_lstsq import lengths
from neula.algorithms.spectra.rank_revealing import Deficient, MinimumNorm, minimum_norm
from neula.certificates.backward_error import Scale, norms_of, over
from neula.certificates.bounds import lstsq_bound
from neula.certificates.forward_error import SURE
from neula.pipeline.progress import stage
from neula.pipeline.result import Attempt
from neula.problems.least_squares.problem import Found, Members, Options, no_longer
from neula.problems.least_squares.scaled import ScaledProblems

LABEL = "svd fp64"


def solve_by_svd(a: torch.Tensor, b: torch.Tensor, before: Members, options: Options) -> Found:
    """The minimum-norm solution of one problem, unless the one that was found before has more digits.

    Parameters
    ----------
    a : Tensor, shape (1, m, n)
    b : Tensor, shape (1, m, k)
    before : Members
        Of one problem.
    options : Options
    """
    report = stage(options.progress, "SVD in fp64")
    members, solution, b_norm = _solved(a, b, options)
    full_rank = a.shape[2] if options.damp else min(a.shape[1:])
    report(1.0)
    # Refinement with residuals in double double has more digits where the rank is full after all.
    keeps = solution.rank == full_rank and not solution.doubt
    if keeps and bool((before.forward_error < members.forward_error).all()):
        bound = lstsq_bound(options.target, min(a.shape[1:]))
        good = (before.backward_error <= bound) & (before.forward_error <= SURE).all(1)
        good &= no_longer(before.residual_norm, b_norm, a.shape).all(1)
        members = replace(before, rank=members.rank, accepted=good)
    return Found(members, [_attempt(members, solution, a, options)], LABEL)


def _solved(a: torch.Tensor, b: torch.Tensor, options: Options) -> tuple[Members, MinimumNorm, torch.Tensor]:
    problems = ScaledProblems.of(a, b, options.weights, options.damp)
    norms = problems.norms[0]
    deficient = Deficient(
        problems.a[0],
        problems.b[0],
        norms[0],
        _at_most_one(problems.sizes[0, :, 0]),
        None if problems.a_low is None else problems.a_low[0],
        None if problems.b_low is None else problems.b_low[0],
    )
    solution = minimum_norm(deficient, options.rcond)
    x = problems.unscale((solution.y / norms.mT)[None]).to(options.dtype).double()
    again = problems.scale(x)[0] * norms.mT
    size = lengths(solution.y[None])
    rounding = over(lengths((again - solution.y)[None]), size)
    matrix, scale = problems.a[0] / norms, Scale(torch.ones_like(norms[0]), solution.norm)
    residual = solution.residual
    measures = norms_of(
        scale,
        problems.b[0],
        solution.y,
        residual,
        matrix.T @ residual,
        solution.range_basis.T @ residual,
    ).measures(scale.norm)
    backward_error = (measures.backward_error + rounding[0]).amax()[None]
    forward_error = solution.forward_error[None] + rounding
    bound = lstsq_bound(options.target, min(a.shape[1:]))
    residual = residual + matrix @ (solution.y - again)  # of x as it is returned
    b_norm, r_norm = lengths(problems.b), lengths(residual[None])
    good = (measures.backward_error.amax() <= bound) & (not solution.doubt)
    shorter = no_longer(r_norm, b_norm, a.shape)
    members = Members(
        x=x,
        residual_norm=problems.residual_norm(r_norm),
        forward_error=forward_error,
        backward_error=backward_error,
        optimality=measures.optimality.amax()[None],
        condition=torch.full_like(backward_error, solution.condition),
        rank=torch.full_like(backward_error, solution.rank, dtype=torch.int64),
        accepted=(good & (forward_error <= SURE).all() & shorter.all())[None],
    )
    return members, solution, problems.residual_norm(b_norm)


def _at_most_one(sizes: torch.Tensor) -> torch.Tensor:
    return sizes * 2.0 ** -math.ceil(math.log2(max(1.0, float(sizes.max()))))


def _attempt(members: Members, solution: MinimumNorm, a: torch.Tensor, options: Options) -> Attempt:
    bound = lstsq_bound(options.target, min(a.shape[1:]))
    parts = [
        f"backward error {float(members.backward_error):.1e} (bound {bound:.1e})",
        f"forward error {float(members.forward_error.max()):.1e}",
        f"rank {solution.rank}",
        f"condition number {float(members.condition):.1e}",
        solution.doubt,
    ]
    return Attempt(LABEL, bool(members.accepted), ", ".join(filter(None, parts)))
