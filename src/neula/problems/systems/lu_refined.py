"""Solving with the LU factors of a matrix that is kept.

Factors of LAPACK solve in NumPy, since calls for tensors would take longer than the work; what
:func:`neula.solve` accepts is accepted there. Other solutions are left to the refinement that serves all
factors.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from neula.algorithms.elimination.lu import PackedLU
from neula.algorithms.elimination.pivoting import Interchanges
from neula.algorithms.krylov.lu_refinement import MAX_ITERATIONS, RefinedSolution, refined_solution
from neula.algorithms.lapack.products import is_large
from neula.algorithms.lapack.square import SquareSystem, factors_of
from neula.algorithms.scaling import binary_exponents
from neula.algorithms.triangular.substitution import Substitution
from neula.certificates.forward_error import SURE
from neula.engines import FP64, Engine, Format, format_of
from neula.kernels.refining import over
from neula.kernels.shift import shift
from neula.pipeline.in_numpy import FEW, IN_NUMPY, array_of
from neula.pipeline.result import LUFactors
from neula.pipeline.result.lu import KeptSolvers
from neula.problems.systems.by_lapack import solutions_of
from neula.problems.systems.lu_checks import evidence_of, limits_of
from neula.problems.systems.problem import SystemsOptions


def solved_by_lapack(
    F: LUFactors, b: torch.Tensor, engine: Engine, target: Format, dtype: torch.dtype
) -> np.ndarray | None:
    """Solutions in the shape of b and in float64, rounded to the dtype; None where one is not accepted.

    Raises
    ------
    ValueError
        If A was changed since it was factorized.
    """
    right = b[:, None] if b.ndim == 1 else b
    if right.ndim != 2 or len(right) != F.shape[-1] or not 0 < right.shape[1] <= FEW:
        return None
    if not (b.is_cpu and dtype in IN_NUMPY):
        return None
    with np.errstate(all="ignore"):  # what is not finite is not accepted
        square = _square_of(F, engine)
        if square is None or square.condition * target.u >= SURE:
            return None
        assert F.kept is not None
        F.kept.products()  # that A is what it was
        system, columns = copy(square), list(np.ascontiguousarray(array_of(right).T, np.float64))
        system.first = [system.start(column) for column in columns]
        options = SystemsOptions(
            engine=engine,
            target=target,
            dtype=dtype,
            max_iterations=MAX_ITERATIONS,
            forward=False,
            progress=None,
            positive=False,
            pivot=None,
            compute=None,
        )
        found = solutions_of(system, columns, options)
    return None if found is None else np.array([column.x for column in found]).T.reshape(b.shape)


def _is_lapacks(F: LUFactors) -> bool:
    """Whether these are factors in a precision of LAPACK, of a matrix in the memory of the host."""
    if F.kept is None or F.transform is not None:
        return False
    lu, a = F.packed.lu, F.kept.a
    whole = lu.dtype in (torch.float32, torch.float64) and F.packed.storage == format_of(lu.dtype)
    return whole and lu.is_cpu and lu.mT.is_contiguous() and a.is_cpu and len(a) > 0


def _square_of(F: LUFactors, engine: Engine) -> SquareSystem | None:
    """The system of LAPACK's factors, made once."""
    solvers = F.solvers
    if solvers.system is None and not solvers.no_system:
        solvers.system = _factorized(F, engine) if _is_lapacks(F) else None
        solvers.no_system = solvers.system is None
    return solvers.system


def _factorized(F: LUFactors, engine: Engine) -> SquareSystem | None:
    assert F.kept is not None
    a, lu = array_of(F.kept.a), F.packed.lu
    pivots, largest = F.packed.pivots.numpy().astype(np.int32), float(np.abs(a).max())
    large = is_large(lu.numel(), engine.tuning)
    found = SquareSystem.factorize(
        a,
        [],
        positive=False,
        single=lu.dtype == torch.float32,
        doubled=len(a) <= engine.tuning.doubled_order,
        large=large,
        factors=factors_of(lu.numpy(), pivots, largest, large=large),
    )
    return None if found is None else found[0]


def refined(F: LUFactors, b: torch.Tensor, target: Format, dtype: torch.dtype) -> RefinedSolution:
    """With b near 1, or near A as far as it is from 1, of which x is a multiple by a power of two but where
    that underflows.
    """
    assert F.kept is not None
    exponents = binary_exponents(b.abs().amax(0)) + math.frexp(F.kept.scale)[1] - 1
    found = _refined(F, shift(b, -exponents), target)
    x = shift(found.x, exponents)
    rest = shift(x.to(dtype).double(), -exponents) - found.x
    lost = float(over(rest.abs().amax(0), found.x.abs().amax(0)).max())
    # To normal numbers x is rounded by less.
    return replace(found, x=x, backward_error=found.backward_error + (lost if lost > target.u else 0.0))


def _refined(F: LUFactors, b: torch.Tensor, target: Format) -> RefinedSolution:
    """With the factors, and where they do not do, with some in double precision that stay, too."""
    assert F.kept is not None
    solvers, limits = F.solvers, limits_of(target, F.shape[-1])
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
    lu, pivots, info = torch.linalg.lu_factor_ex(F.kept.a.to(F.packed.lu.device).double())
    if int(info):
        return None
    permutation = Interchanges(pivots.cpu().long() - 1).permutation().to(lu.device)
    packed, kept = PackedLU(lu, permutation, FP64), replace(F.kept)
    solvers = KeptSolvers(none_better=True)
    return replace(F, packed=packed, kept=kept, transform=None, storage="fp64", solvers=solvers)


def solver_of(F: LUFactors, dtype: torch.dtype) -> Substitution:
    """The factors to solve with, made once: of two threads that make them, one is heard by both."""
    kept = F.solvers.substitutions
    return kept.get(dtype) or kept.setdefault(dtype, Substitution.prepared(F.packed, dtype))
