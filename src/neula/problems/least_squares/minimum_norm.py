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
from neula.pipeline.chain import Answer
from neula.pipeline.progress import stage
from neula.problems.least_squares.prepared import Problems
from neula.problems.least_squares.problem import Members, Options, no_longer
from neula.problems.least_squares.scaled import ScaledProblems


def by_svd(problems: Problems, before: Answer[Members] | None, *, label: str) -> Answer[Members]:
    """The minimum-norm solution of one problem, unless the best that was found before has more digits."""
    a, b, options = problems.a, problems.b, problems.options
    vars(problems).pop("prepared", None)  # which may be a copy
    report = stage(options.progress, "SVD in fp64")
    members, solution, b_norm = _solved(a, b, options)
    full_rank = min(options.rows(*a.shape[1:]), a.shape[2])
    report(1.0)
    # Refinement with residuals in double double has more digits where the rank is full after all.
    known = None if before is None or solution.rank < full_rank or solution.doubt else before.values
    if known is not None and bool((known.forward_error < members.forward_error).all()):
        bound = lstsq_bound(options.target, min(a.shape[1:]))
        good = (known.backward_error <= bound) & (known.forward_error <= SURE).all(1)
        good &= no_longer(known.residual_norm, b_norm, a.shape).all(1)
        members = replace(known, rank=members.rank, accepted=good)
    return Answer(members, label, solution.doubt)


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
        refined_error=measures.backward_error.amax()[None],
        optimality=measures.optimality.amax()[None],
        condition=torch.full_like(backward_error, solution.condition),
        rank=torch.full_like(backward_error, solution.rank, dtype=torch.int64),
        accepted=(good & (forward_error <= SURE).all() & shorter.all())[None],
    )
    return members, solution, problems.residual_norm(b_norm)


def _at_most_one(sizes: torch.Tensor) -> torch.Tensor:
    return sizes * 2.0 ** -math.ceil(math.log2(max(1.0, float(sizes.max()))))
