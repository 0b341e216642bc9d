"""Solving with the LU factors of a matrix that is kept."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch

from neula.algorithms.elimination.lu import PackedLU
from neula.algorithms.elimination.pivoting import Interchanges
from neula.algorithms.krylov.lu_refinement import FAR, KeptMatrix, RefinedSolution, refined_solution
from neula.algorithms.scaling import binary_exponents
from neula.algorithms.triangular.substitution import Substitution
from neula.engines import FP64, Format, format_of
from neula.engines.formats import in_double
from neula.kernels.shift import shift
from neula.kernels.small_problems.refining import over
from neula.pipeline.result import LUFactors
from neula.pipeline.result.lu import KeptSolvers
from neula.problems.systems.lu_checks import evidence_of, limits_of


def refined(F: LUFactors, b: torch.Tensor, target: Format, dtype: torch.dtype) -> RefinedSolution:
    """Refine with b scaled to near 1 if b or A is not; x is then multiplied by a power of two, unless it
    underflows.
    """
    assert F.kept is not None
    exponents = binary_exponents(b.abs().amax(0))
    given = F.kept.scale == 1.0 and not bool((exponents.abs() > FAR).any())
    found = _refined(F, b if given else shift(b, -exponents), target)
    if given and format_of(dtype) is FP64:
        return found
    exponents = torch.zeros_like(exponents) if given else exponents + math.frexp(F.kept.scale)[1] - 1
    x = found.x if given else shift(found.x, exponents)
    rest = shift(in_double(x.to(dtype)), -exponents) - found.x
    lost = float(over(rest.abs().amax(0), found.x.abs().amax(0)).max())
    # To normal numbers x is rounded by less.
    return replace(found, x=x, backward_error=found.backward_error + (lost if lost > target.u else 0.0))


def _refined(F: LUFactors, b: torch.Tensor, target: Format) -> RefinedSolution:
    """Refine with the factors; if they do not suffice, with factors in double precision, which are kept."""
    assert F.kept is not None
    solvers, limits = F._solvers, limits_of(target, F.shape[-1])
    if solvers.better is not None:
        return _refined(solvers.better, b, target)
    found = refined_solution(F.kept, F.packed, partial(solver_of, F), F.transform, b, limits.backward_error)
    reached = limits.accurate(evidence_of(found, target))
    if solvers.none_better or (reached and (found.known or F.storage == "fp64")):
        return found
    solvers.better = better = _refactorized(F)
    solvers.none_better = better is None
    again = None if better is None else _refined(better, b, target)
    lost = again is not None and reached and not limits.accurate(evidence_of(again, target))
    return found if again is None or lost else again


def _refactorized(F: LUFactors) -> LUFactors | None:
    """Pivoted factors of the A that is kept, in double precision; None where a pivot vanishes."""
    assert F.kept is not None
    lu, pivots, info = torch.linalg.lu_factor_ex(in_double(F.kept.a.to(F.packed.lu.device)))
    if int(info):
        return None
    permutation = Interchanges(pivots.cpu().long() - 1).permutation().to(lu.device)
    packed, kept = PackedLU(lu, permutation, FP64), replace(F.kept, adjoint=False)
    solvers = KeptSolvers(none_better=True)
    return replace(F, packed=packed, kept=kept, transform=None, storage="fp64", _solvers=solvers)


def adjoint_of(F: LUFactors) -> LUFactors:
    """The factors of A as those of its conjugate transpose, made once."""
    if F._solvers.adjoint is None:
        assert F.kept is not None
        F.kept.products()  # A is what it was
        kept = KeptMatrix.from_adjoint(F.kept)
        solvers = KeptSolvers(substitutions=F._solvers.substitutions, none_better=F._solvers.none_better)
        F._solvers.adjoint = replace(F, kept=kept, _solvers=solvers)
    return F._solvers.adjoint


def solver_of(F: LUFactors, dtype: torch.dtype) -> Substitution:
    """The factors to solve with, made once: of two threads that make them, one is heard by both."""
    kept = F._solvers.substitutions
    return kept.get(dtype) or kept.setdefault(dtype, Substitution.prepared(F.packed, dtype))
