"""Solving with LU factors: right-hand sides broadcast to their matrices, refined with the A that is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self, Unpack, overload

import numpy as np
import torch

from neula.algorithms.elimination.lu import PackedLU
from neula.algorithms.elimination.lu_panels import Interchanges
from neula.algorithms.krylov.iterative_refinement import FAR, KeptMatrix, RefinedSolution, refined_solution
from neula.algorithms.krylov.kept_batch import BatchSolver, KeptBatch
from neula.algorithms.scaling import binary_exponents
from neula.algorithms.triangular.substitution import Substitution
from neula.certificates.bounds import solve_bound
from neula.certificates.forward_error import SURE
from neula.certificates.orthogonality import PROBES, gaussian_probes
from neula.certificates.verdict import Evidence, Limits
from neula.engines import FP32, FP64, Format, format_of, select_engine
from neula.engines.formats import double_of, in_double, matching_dtype
from neula.kernels import scipy_linalg
from neula.kernels.shift import shift
from neula.kernels.small_problems.refining import over
from neula.pipeline.call import Call
from neula.pipeline.inputs import check_finite, flattened, is_variable
from neula.pipeline.operators import eager
from neula.pipeline.plans import host_arrays
from neula.pipeline.result import LUFactors
from neula.pipeline.result.factorizations import KeptSolvers
from neula.pipeline.shapes import broadcast_system
from neula.pipeline.solutions import complex_columns, real_columns
from neula.problems.signatures import Array, ArrayLike, Kind, LUSolveKeywords
from neula.problems.systems.lu import naming
from neula.problems.systems.together import library_solvers

RefinedSolutions = dict[tuple[int, ...], RefinedSolution]
"""Refined solutions by the index of the matrix in the batch."""

SINGLE = 40_000
"""Elements of right-hand sides below which OpenBLAS substitutes in one thread, and leaves torch its cores."""

SUBSTITUTE = {"d": "dgetrs", "f": "sgetrs", "D": "zgetrs", "F": "cgetrs"}
"""LAPACK's substitution, by the characters of NumPy's dtypes."""


@overload
def lu_solve(F: LUFactors[Any], b: Kind, **keywords: Unpack[LUSolveKeywords]) -> Kind: ...


@overload
def lu_solve(F: LUFactors[Any], b: Any, **keywords: Unpack[LUSolveKeywords]) -> Any: ...


@eager
def lu_solve(
    F: LUFactors, b: ArrayLike, *, trans: int = 0, refine: bool | None = None, strict: bool = False
) -> Array:
    """Solve ``A x = b`` with the factors of A, refined to the accuracy of the dtype.

    Returns x; the warnings say if it is not certified.

    Parameters
    ----------
    F : LUFactors
        From :func:`lu_factor`. Any number of threads may solve with it.
    b : array_like, shape (n,) or (..., n, k)
        One or several right-hand sides; not modified. It is a vector only if it is one-dimensional, and goes
        with every matrix of a batch then; otherwise leading dimensions are broadcast with those of A, as in
        SciPy. Complex b with real factors count as twice as many real ones.
    trans : {0, 1, 2}, optional
        As in SciPy: 1 solves with the transpose of A, 2 with the conjugate transpose.
    refine : bool, optional
        By default if F keeps A. Without refinement the solution is as accurate as the factors are: with
        factors in fp16 three digits at best, of a matrix that is well-conditioned, and nothing is certified.
        Substitution is then in float64 if the result is, else in float32.
    strict : bool, optional
        Raise an :class:`~neula.pipeline.result.AccuracyError` instead of a warning.

    Returns
    -------
    array, shape (..., n) or (..., n, k)
        In the library and on the device of b, in the wider of the dtypes of A and b.

    Raises
    ------
    ValueError
        If b does not fit, or has NaN or Inf; if A was changed since it was factorized; for ``refine=True``
        with factors that do not keep A; for ``trans`` where a gradient is wanted.
    TypeError
        If F is not an LUFactors, and for sparse b.
    OverflowError
        If the solution is too large for its dtype.
    AccuracyError
        If there would be a warning and ``strict`` is set.

    Warns
    -----
    AccuracyWarning
        If refinement does not reach the accuracy of the dtype, even with factors in double precision, or if A
        is so ill-conditioned that no digit of the solution is guaranteed.

    See Also
    --------
    solve : solves a system with factors that it chooses.

    Notes
    -----
    The factors update the solution until its backward error, computed from the true residual in double
    precision, is that of the dtype: by classical refinement or, if that does not converge, as the
    preconditioner of GMRES ([1]_). If the factors are too inaccurate, A is factorized again in double
    precision with pivoting, and later solves use these factors. The first solve takes as long as several
    later ones: it estimates the condition number of A, and inverts diagonal blocks of half-precision
    factors, ``1024 n`` to ``4096 n`` numbers in each precision used.

    The backward error is ``||b - A x|| / (||A|| ||x|| + ||b||)`` in the infinity norm, as in :func:`solve`.
    Matrices of a batch with LAPACK's factors are solved with together, and those that need GMRES or scaling
    one by one. From the second solve with LAPACK's factors of one matrix on, the error is estimated from
    random vectors whose products with A are kept; x is refined if the estimate is too large. No digit is
    guaranteed if the condition number times the unit roundoff of the dtype exceeds a tenth.

    References
    ----------
    .. [1] E. Carson, N. J. Higham, "Accelerating the Solution of Linear Systems by Iterative Refinement in
       Three Precisions", SIAM J. Sci. Comput. 40, 2018.

    Examples
    --------
    >>> import numpy as np, neula
    >>> A = np.array([[4.0, 1.0], [2.0, 3.0]])
    >>> F = neula.lu_factor(A, engine="emulated")
    >>> neula.lu_solve(F, np.array([6.0, 8.0])).round(12)
    array([1., 2.])
    """
    if not isinstance(F, LUFactors):
        raise TypeError(f"F is a {type(F).__name__}: pass what neula.lu_factor returns")
    if trans not in (0, 1, 2):
        raise ValueError(f"trans is {trans!r}: pass 0 for A, 1 for A^T, 2 for A^H")
    if refine is not False and F._factors is not None and (F._factors.is_variable or is_variable(b)):
        if trans:
            turned = "A.mT" if trans == 1 else "A.mH"
            raise ValueError(f"lu_solve with trans has no gradient: use neula.solve({turned}, b)")
        return F.solve(b).x
    if not trans and F._solvers.measured is not None and F.kept is not None and refine in (None, True):
        F.kept.check()
        if (soon := F._solvers.measured(b)) is not None:
            return soon
    device = F.packed.lu.device
    call = Call.begin({"b": b}, engine=select_engine("auto", device), strict=strict)
    if refine and not F.keeps_a:
        raise ValueError("refine=True needs A, which these factors do not keep: factorize with keep_a=True")
    refine = F.keeps_a if refine is None else refine
    b = call.first.tensor
    dtype = torch.promote_types(F.dtype, call.dtype)
    if dtype.is_complex and not F.dtype.is_complex:
        parts = real_columns(b.unsqueeze(-1) if b.ndim == 1 else b)
        x = complex_columns(lu_solve(F, parts, trans=trans, refine=refine, strict=strict))
        return call.first.wrap(x.squeeze(-1) if b.ndim == 1 else x)
    target = format_of(dtype)
    shapes = broadcast_system(b.new_empty(()).expand(F.shape), b, stacks_vectors=False)
    work = matching_dtype(FP64.dtype if refine or target is FP64 else FP32.dtype, dtype)
    evidence: dict[tuple[int, ...], RefinedSolution] = {}
    x = torch.empty(shapes.columns.shape, dtype=work, device=device)
    with call.computing():
        if x.numel():
            check_finite(b, b.abs().amax(), "b")
            columns = shapes.columns.to(device, work)
            columns = columns.conj().resolve_conj() if trans == 1 else columns
            left: Sequence[int] = range(len(x))
            if len(F.shape) > 2 and F.variant == "lapack":
                left = _solve_together(F, columns, x, target if refine else None, dtype, adjoint=trans > 0)
            batch = F.shape[:-2]
            for i in left:
                index = tuple(map(int, np.unravel_index(i, batch))) if batch else ()
                with naming(index):
                    member = F._member(index)
                    if refine:
                        member = adjoint_of(member) if trans else member
                        evidence[index] = refined(member, columns[i], target, dtype)
                        x[i] = evidence[index].x
                    else:
                        x[i] = _substituted(member, columns[i], adjoint=trans > 0)
                    _check_solution(x[i])
            x = x.conj().resolve_conj() if trans == 1 else x
    if refine and not trans:
        F._solvers.measured = F._solvers.measured or MeasuredSubstitution.from_used(F)
    answer = call.give_back(shapes.solutions(x), dtype)
    report_solutions(evidence, answer, F, target, call)
    return answer


def _solve_together(
    F: LUFactors,
    b: torch.Tensor,
    x: torch.Tensor,
    target: Format | None,
    dtype: torch.dtype,
    *,
    adjoint: bool,
) -> Sequence[int]:
    """Solve with LAPACK's factors of a batch, refined if there is a ``target``.

    Writes solutions into x, shape (P, n, K), and returns the places of matrices that are to be solved with
    one by one: to be scaled or to be refined further, or to say what is wrong.
    """
    if target is None:
        x.copy_(_batch_solve(F, adjoint, b.dtype)(b))
        return (~x.isfinite().flatten(1).all(1)).nonzero()[:, 0].tolist()
    assert isinstance(F.kept, KeptBatch)
    a = flattened(F.kept.check())
    a = a.mH if adjoint else a
    known = F._solvers.together
    if adjoint not in known:
        near = (F.kept.scales == 1.0).flatten().to(a.device)
        known[adjoint] = BatchSolver.measured(a, near, _batch_solve(F, adjoint, F.packed.lu.dtype))
    limits = limits_of(target, a.shape[-1])
    aim = limits.backward_error / (1 if F.packed.storage.u <= limits.backward_error else 4)
    found = known[adjoint](a, b, aim)
    x.copy_(found.x)
    error, settled = found.backward_error, found.complete
    if format_of(dtype) is not FP64:
        lost = over((in_double(x.to(dtype)) - x).abs().amax(-2), x.abs().amax(-2))
        settled = settled & (lost <= target.u).all(-1)  # no result underflows or overflows
    evidence = Evidence.from_errors(error, found.condition * error.clamp_min(target.u))
    return (~(settled & limits.accept(evidence))).nonzero()[:, 0].tolist()


def _batch_solve(F: LUFactors, adjoint: bool, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Substitution with LAPACK's factors of a batch, in the arithmetic of ``dtype``."""
    lu = flattened(F.packed.lu).to(dtype)
    pivots = (F.packed.pivots + 1).int().reshape(lu.shape[:-1]).to(lu.device)
    solvers = library_solvers(lu, pivots)
    return solvers.solve_transposed if adjoint else solvers.solve


def _substituted(F: LUFactors, b: torch.Tensor, *, adjoint: bool) -> torch.Tensor:
    solver, transform = solver_of(F, b.dtype), F.transform
    solve = solver.solve_transposed if adjoint else solver.solve
    if transform is None:
        return solve(b)
    return (transform.mH if adjoint else transform).solve(solve, b)


def _check_solution(x: torch.Tensor) -> None:
    if not bool(x.isfinite().all()):
        given, wide = (str(dtype).removeprefix("torch.") for dtype in (x.dtype, double_of(x.dtype)))
        advice = "scale b down, or U is numerically singular" if given == wide else f"pass b in {wide}"
        raise OverflowError(f"the solution overflows {given}: {advice}")


def refined(F: LUFactors, b: torch.Tensor, target: Format, dtype: torch.dtype) -> RefinedSolution:
    """Refine, b scaled if it or A is far from 1; x is then unscaled, unless it underflows."""
    assert isinstance(F.kept, KeptMatrix)
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
    assert isinstance(F.kept, KeptMatrix)
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
    assert isinstance(F.kept, KeptMatrix)
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
        assert isinstance(F.kept, KeptMatrix)
        F.kept.check()
        kept = KeptMatrix.from_adjoint(F.kept)
        solvers = KeptSolvers(substitutions=F._solvers.substitutions, none_better=F._solvers.none_better)
        F._solvers.adjoint = replace(F, kept=kept, _solvers=solvers)
    return F._solvers.adjoint


def solver_of(F: LUFactors, dtype: torch.dtype) -> Substitution:
    """The factors to solve with, made once: of two threads that make them, one is heard by both."""
    kept = F._solvers.substitutions
    return kept.get(dtype) or kept.setdefault(dtype, Substitution.prepared(F.packed, dtype))


def limits_of(target: Format, n: int) -> Limits:
    return Limits.for_shape((n, n), solve_bound(target, n), SURE)


def evidence_of(solution: RefinedSolution, target: Format) -> Evidence[float]:
    """The forward error is what the condition number makes of the backward error, or of rounding b."""
    forward = solution.condition * max(target.u, solution.backward_error)
    return Evidence.from_errors(solution.backward_error, forward, float(not solution.known))


def report_solutions(found: RefinedSolutions, x: Any, F: LUFactors, target: Format, call: Call) -> None:
    """Warn of solutions that are not what was requested, or of which a small backward error says nothing."""
    limits = limits_of(target, F.shape[-1])
    inaccurate, singular, unknown = RefinedSolutions(), RefinedSolutions(), RefinedSolutions()
    for index, solution in found.items():
        evidence = evidence_of(solution, target)
        if limits.accept(evidence):
            continue
        certain = evidence._replace(doubtful=0.0)
        kind = unknown if limits.accept(certain) else singular if limits.accurate(evidence) else inaccurate
        kind[index] = solution
    if inaccurate:
        worst = max(e.backward_error for e in inaccurate.values())
        call.report_missed(
            f"the solution is not refined to {target.name} accuracy",
            f"backward error {worst:.1e}, asked for {limits.backward_error:.1e}, and factors in fp64 do not "
            "reach it: use neula.solve, or neula.lstsq if A is singular",
            x,
            list(inaccurate),
        )
    if singular:
        condition = max(e.condition for e in singular.values())
        call.report_missed(
            "no digit of the solution is guaranteed",
            f"A is singular to {target.name} accuracy, its condition number about {condition:.1e}; "
            "use neula.lstsq with rcond= for the minimum-norm solution",
            x,
            list(singular),
            no_digits=True,
        )
    if unknown:
        condition = max(e.condition for e in unknown.values())
        call.report_missed(
            "the number of correct digits of the solution is unknown",
            f"the condition number of A is at least {condition:.1e}, and these factors do not tell how much "
            "larger it is: use neula.solve, or neula.lstsq if A is singular",
            x,
            list(unknown),
            no_digits=True,
        )


class MeasuredSubstitution:
    """Solves with LAPACK's factors of A, and measures solutions along random vectors."""

    # With Gaussian vectors G and ``G^T A``, which is made once, ``G^T b - (G^T A) x`` estimates the norm of
    # the residual in a few operations a row. The backward error is that for perturbations of A measured in
    # the Frobenius norm.
    # ``factors``: of a matrix that is kept, and whose condition number is known.

    def __init__(self, factors: LUFactors[Any]) -> None:
        kept = factors.kept
        assert isinstance(kept, KeptMatrix)
        assert kept.conditioning is not None
        a = in_double(kept.a).numpy()
        self._lu = factors.packed.lu.numpy()
        self._pivots = factors.packed.pivots.numpy().astype(np.int32)
        self._probes = np.ascontiguousarray(gaussian_probes(len(a), kept.a.device, kept.a.dtype).numpy().T)
        self._images, self._norm = self._probes @ a, float(np.linalg.norm(a))
        self._target, self._condition = format_of(factors.dtype), kept.conditioning.condition
        self._limits = limits_of(self._target, len(a))

    @classmethod
    def from_used(cls, factors: LUFactors[Any]) -> Self | None:
        """For factors that have solved once; None where they are not LAPACK's, or A has to be scaled."""
        kept = factors.kept
        if (
            factors.variant != "lapack"
            or not isinstance(kept, KeptMatrix)
            or factors._solvers.better is not None
        ):
            return None
        on_host = kept.a.is_cpu and factors.packed.lu.is_cpu
        if not on_host or kept.a.is_neg() or kept.a.is_conj():
            return None
        known, same = kept.conditioning, factors.storage == format_of(factors.dtype).name
        if known is None or not known.known or len(known.scalings) > 1 or kept.scale != 1.0 or not same:
            return None
        return cls(factors)

    def __call__(self, b: Any) -> Any | None:
        """X in the library of b; None where it is not accepted, or is for the whole chain."""
        given = host_arrays((b,), 0.0)
        if given is None:
            return None
        (b,) = given.arrays
        if (
            b.dtype != self._lu.dtype
            or b.ndim not in (1, 2)
            or len(b) != len(self._lu)
            or not 0 < b.size < SINGLE
        ):
            return None
        x, _ = getattr(scipy_linalg.lapack, SUBSTITUTE[b.dtype.char])(self._lu, self._pivots, b)
        with np.errstate(all="ignore"):  # NaN is not accepted
            residual = self._probes @ b - self._images @ x
            size_x, size_b = self._norm * _lengths(x), _lengths(b)
            estimates = _lengths(residual) / PROBES**0.5
            error, condition = float((estimates / (size_x + size_b)).max()), float((size_x / size_b).max())
        found = RefinedSolution(x, error, max(self._condition, condition), known=True)
        return given.wrap(x) if self._limits.accept(evidence_of(found, self._target)) else None


def _lengths(x: np.ndarray) -> np.ndarray:
    """Norms of the columns, or of a vector."""
    squares: np.ndarray = x * x if x.dtype.kind == "f" else x.real * x.real + x.imag * x.imag
    return np.sqrt(squares.sum(0))
