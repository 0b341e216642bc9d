"""The papers' comparators: solvers that do not refine."""

from __future__ import annotations

import math

import torch

from neula.algorithms.direct import normal_equations, qr_solve
from neula.algorithms.krylov.refinement import Refined, Scale, norms_of
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.algorithms.spectra.condition import solve_rt
from neula.problems.least_squares.preconditioned import ESTIMATED, Outcome, Preconditioner, Problem


def unrefined(problem: Problem, algorithm: str) -> Outcome:
    """The papers' direct solver (``"direct"``) or the normal equations (``"normal"``), in one format."""
    options = problem.options
    if problem.wide:
        raise ValueError(f"algorithm {algorithm!r} needs at least as many rows as columns: use 'cgls'")
    compute = options.compute or "fp32"
    engine = options.engine.using(compute)
    work = problem.operator.fill(engine, problem.scales)
    rhs = problem.b.to(engine.storage)
    if algorithm == "direct":
        q, r = rgsqrf(work, engine, overwrite_a=True)
        y = qr_solve(q, r, rhs)
    else:
        y, r = normal_equations(work, rhs, engine)
    label = f"{algorithm} {compute}"
    if not bool(torch.isfinite(y).all()):
        why = "the factorization broke down: A is too ill-conditioned for it"
        return Outcome(label, None, problem.rank, why)
    preconditioner = Preconditioner.of(r.double(), r.double())
    largest, smallest = preconditioner.extremes.tolist()
    n, condition = problem.rank, largest / smallest if smallest > 0 else math.inf
    x = y.double() * problem.scales[:, None]
    residual = problem.b - problem.operator.matmul(x)
    gradient = problem.operator.rmatmul(residual)
    columns = problem.scales / preconditioner.columns
    scale = Scale(columns, largest)
    projected = solve_rt(r.double() / problem.scales, gradient)
    norms = norms_of(scale, problem.b, x, residual, gradient, projected)
    refined = Refined(x, norms.measures(scale.norm), norms.residual)
    # Rounding errors of this R move singular values by so much; the normal equations square them.
    errors = 4 * n**0.5 * engine.format.u * (condition if algorithm == "normal" else 1.0)
    doubt = ""
    if not ESTIMATED * condition * max(options.certain_rcond(problem.operator.shape), errors) < 1:
        doubt, smallest = f"condition number about {condition:.1e}: A may lack full rank", 0.0
    return Outcome(label, refined, n, doubt, scale=scale, smallest=smallest, sizes=1 / columns)
