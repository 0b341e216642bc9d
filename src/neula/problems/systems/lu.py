"""LU factorization and solution: check the input, choose, run, look for what went wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack, overload

import numpy as np
import torch

from neula.algorithms.elimination.butterfly import TwoSided
from neula.algorithms.elimination.factorization import growth_of
from neula.algorithms.elimination.lu import (
    VARIANTS,
    InnerPanel,
    PackedLU,
    is_lapacks,
    largest_of,
    lu_factorize,
    panel_widths,
)
from neula.algorithms.krylov.lu_refinement import KeptMatrix, RefinedSolution
from neula.engines import FP32, FP64, Engine, Format, format_of, select_engine
from neula.engines.formats import double_of, matching_dtype
from neula.errors import check_name
from neula.pipeline.call import Call
from neula.pipeline.compilation import eager
from neula.pipeline.factors import LUMethods
from neula.pipeline.inputs import check_finite, is_variable
from neula.pipeline.parts import complex_columns, real_columns
from neula.pipeline.plans import Plans, for_each_shape
from neula.pipeline.progress import Progress
from neula.pipeline.result import LUFactors
from neula.problems.signatures import Array, ArrayLike, Kind, LUKeywords, LUSolveKeywords
from neula.problems.systems.lu_batch import RightHandSides, naming, stacked
from neula.problems.systems.lu_checks import (
    check_factors,
    check_range,
    check_square,
    choose_formats,
    report_solutions,
)
from neula.problems.systems.lu_plan import MeasuredSubstitution, plan_of
from neula.problems.systems.lu_refined import adjoint_of, refined, solver_of

PIVOTING = ("partial", "none", "rbt")


@overload
def lu_factor(A: Kind, variant: str = ..., **keywords: Unpack[LUKeywords]) -> LUFactors[Kind]: ...
@overload
def lu_factor(A: Any, variant: str = ..., **keywords: Unpack[LUKeywords]) -> LUFactors[Any]: ...
@partial(eager, plans=Plans(for_each_shape(plan_of), operands=1, fetches=False, or_complex=True))
def lu_factor(
    A: ArrayLike,
    variant: str = "5.2/5.1",
    *,
    panel: int | None = None,
    inner_panel: InnerPanel | None = None,
    pivot: str = "partial",
    compute: str | None = None,
    storage: str | None = None,
    engine: str | Engine = "auto",
    keep_a: bool = True,
    progress: Progress | None = None,
) -> LUFactors:
    """LU factorization with pivoting, in the dtype of A on a CPU and in half precision on a GPU.

    Returns factors for :func:`lu_solve`, which refines solutions to the accuracy of the dtype. A is not
    scaled. The factors are as accurate as their format; in half precision they take half the memory of single
    precision.

    Parameters
    ----------
    A : array_like, shape (..., n, n)
        NumPy array, torch tensor or DLPack object, float16 to float64, complex64, complex128; not modified.
        Leading dimensions are a batch.
    variant : str
        The algorithm of [1]_:

        - ``"5.2/5.1"``, ``"5.2/4.1"``: half-precision matrix, updates summed in a float32 buffer, panels that
          are partitioned again, with inner panels by Algorithm 5.1 or 4.1; ``"5.2/3.1"`` and
          ``"5.2/3.1-fp32"``: by Algorithm 3.1, with panels in half precision or in float32;
        - ``"5.1"``: the same with panels in float32; ``"4.1"``: with panels in half precision;
        - ``"3.1"``: right-looking, half-precision products of a float32 matrix, or of a half-precision one
          with ``storage="fp16"``;
        - ``"2.1"``, ``"2.2"``: everything in one precision, right- and left-looking.
    panel, inner_panel : int, optional
        Widths r and s. What suits the engine by default: 256 and 8, as in the paper, on ``"emulated"``. A
        tuple (s, t) partitions the inner panels once more.
        On a CPU all variants are the same algorithm where everything is in single or double precision:
        pivoting, and without a width, they are LAPACK's factorization, with widths of its own.
    pivot : {"partial", "none", "rbt"}
        ``"none"`` is faster, and safe only for matrices that do not need it, such as diagonally dominant
        ones: small pivots ruin the factors without a warning. ``"rbt"`` is ``"none"`` for A mixed by random
        butterflies [2]_, whose pivots are as good as those of a random matrix. L and U are then those of the
        mixed matrix ``W1^T A W2``, bordered by an identity to a multiple of four rows, and :func:`lu_solve`
        undoes it. ``"partial"`` on a GPU, with the default variant and ``inner_panel`` (32), is tournament
        pivoting: some rows are compared in groups instead of all with each other, and elements of L may
        exceed one, though not by much. Panels are multiples of 32 columns then, 1024 at most. Other widths
        and variants pivot partially, many times slower. Of complex matrices pivots are always partial, those
        of LAPACK: the largest ``|re| + |im|``.
    compute : str, optional
        Format of the operands of products, ``"fp16"`` or ``"bf16"`` or another that the engine has. By
        default that of the dtype of A on a CPU (float32 for a narrower dtype), and the cheapest one of the
        other engines. Of complex operands both parts are rounded to it.
    storage : str, optional
        Format of the matrix: that of ``compute``, except for Algorithm 3.1, which by default keeps the matrix
        in float32. Complex matrices stay in complex64, with products in fp64 in complex128.
    engine : {"auto", "cpu", "cuda", "emulated"} or Engine
        The engine that multiplies matrices. ``"auto"`` chooses it by the device of A.
    keep_a : bool
        Whether the factors remember A for :func:`lu_solve` to refine with, and to make better factors of: by
        reference, so that its memory is not freed before theirs, and A must stay as it is. That it does is
        checked before each solve by its product with a random vector. Without A solutions are as accurate as
        the factors, two or three digits of a well-conditioned system in half precision, and no accuracy is
        certified.
    progress : callable or bool, optional
        Called with the name of the stage and the completed fraction; True shows a progress bar.

    Returns
    -------
    LUFactors
        Holds ``L``, ``U``, ``pivots`` and ``storage_bytes``, of a batch as arrays of shape (..., n, n) and
        (..., n); pass it to :func:`lu_solve`.

    Raises
    ------
    ValueError
        If A is not square, or has NaN or Inf, for unknown names, and for panels or formats that do not go
        together.
    TypeError
        For sparse input.
    OverflowError
        If an element of A, L or U is too large for the format.
    numpy.linalg.LinAlgError
        If a pivot is exactly zero; of a batch all messages say which matrix it was.

    See Also
    --------
    lu_solve : solve with the factors.
    solve : solve systems whose matrices are not needed again.

    Notes
    -----
    The buffer has at most ``panel * n`` elements in float32, and four times as many with tournaments. Error
    bounds are in ``neula.certificates.lu.lu_bound``.

    References
    ----------
    .. [1] F. Lopez, T. Mary, "Mixed Precision LU Factorization on GPU Tensor Cores: Reducing Data Movement
       and Memory Footprint", Int. J. High Perform. Comput. Appl., 2022.
    .. [2] M. Baboulin, J. Dongarra, J. Herrmann, S. Tomov, "Accelerating Linear System Solutions Using
       Randomization Techniques", ACM Trans. Math. Softw. 39, 2013.

    Examples
    --------
    >>> import numpy as np, neula
    >>> A = np.random.default_rng(0).standard_normal((200, 200))
    >>> F = neula.lu_factor(A, engine="emulated")
    >>> bool(np.linalg.norm(A[F.permutation] - F.L @ F.U) < 2e-3 * np.linalg.norm(A))
    True
    >>> F.storage_bytes
    80000
    """
    call = Call.begin({"A": A}, engine=engine, gradients=keep_a, or_complex=True)
    a, graph = call.first.tensor, call.first.graph
    check_square(a)
    check_name("variant", variant, VARIANTS)
    check_name("pivot", pivot, PIVOTING)
    chosen, kept = choose_formats(variant, compute, storage, call.engine, a.dtype)
    r = s = None
    by_lapack = pivot == "partial" and is_lapacks(chosen, kept, panel, inner_panel, progress)
    if not by_lapack:
        r, s = panel_widths(variant, chosen, panel, inner_panel, pivot == "partial")
    batch, n = tuple(a.shape[:-2]), a.shape[-1]
    indices = list(np.ndindex(*batch))
    transform = TwoSided.random(n, chosen.device) if pivot == "rbt" else None
    options = _LUOptions(chosen, kept, variant, panel, inner_panel, pivot, transform, keep_a)
    found = []
    with call.computing():
        for i, index in enumerate(indices):
            with naming(index):
                found.append(_factorize(a[index], options, _part_of(progress, i, len(indices), n)))
    # Factors that do not keep A must not keep it alive.
    nothing = a.new_empty(0)
    like = replace(call.first, tensor=nothing, graph=nothing)
    make = partial(
        LUFactors,
        variant="lapack" if by_lapack else variant,
        panel=r,
        inner_panel=s,
        compute=chosen.format.name,
        storage=kept.name,
        engine=str(chosen),
        dtype=a.dtype,
        _give_back=like.give_back,
        transform=transform,
        seconds=call.seconds,
    )

    def methods(packed: PackedLU, index: tuple[int, ...], *of: _Factorized) -> LUMethods | None:
        kept = tuple(each.matrix for each in of if each.matrix is not None)
        return LUMethods(graph[index], packed, transform is not None, like, kept) if keep_a else None

    def one(packed: PackedLU, index: tuple[int, ...], of: _Factorized) -> LUFactors:
        growth = partial(growth_of, packed.lu, of.largest, chosen)
        return make(
            packed=packed, kept=of.matrix, _measure_growth=growth, _factors=methods(packed, index, of)
        )

    if not batch:
        return one(found[0].packed, (), found[0])
    packed = stacked([each.packed for each in found], batch, n, kept, a.to(chosen.device))
    members = tuple(
        one(PackedLU(packed.lu[index], packed.permutation[index], kept), index, each)
        for index, each in zip(indices, found, strict=True)
    )
    growths = partial(_growths, members, batch, like.give_back)
    return make(packed=packed, members=members, _measure_growth=growths, _factors=methods(packed, (), *found))


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
    preconditioner of GMRES. If the factors are too inaccurate, A is factorized again in double precision with
    pivoting, and later solves use these factors. The first solve takes as long as several later ones: it
    estimates the condition number of A, and inverts diagonal blocks of half-precision factors, ``1024 n`` to
    ``4096 n`` numbers in each precision used.

    The backward error is ``||b - A x|| / (||A|| ||x|| + ||b||)`` in the infinity norm, as in :func:`solve`.
    From the second solve with LAPACK's factors on, it is estimated from random vectors whose products with A
    are kept; x is refined if the estimate is too large. No digit is guaranteed if the condition number times
    the unit roundoff of the dtype exceeds a tenth.

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
        F.kept.products()  # A is what it was
        if (soon := F._solvers.measured(b)) is not None:
            return soon
    device = F.packed.lu.device
    call = Call.begin({"b": b}, engine=select_engine("auto", device), strict=strict, or_complex=True)
    if refine and not F.keeps_a:
        raise ValueError("refine=True needs A, which these factors do not keep: factorize with keep_a=True")
    refine = F.keeps_a if refine is None else refine
    batch, n = F.shape[:-2], F.shape[-1]
    b = call.first.tensor
    dtype = torch.promote_types(F.dtype, call.dtype)
    if dtype.is_complex and not F.dtype.is_complex:
        parts = real_columns(b.unsqueeze(-1) if b.ndim == 1 else b)
        x = complex_columns(lu_solve(F, parts, trans=trans, refine=refine, strict=strict))
        return call.first.wrap(x.squeeze(-1) if b.ndim == 1 else x)
    target = format_of(dtype)
    sides = RightHandSides.broadcast(b, batch, n)
    work = matching_dtype(FP64.dtype if refine or target is FP64 else FP32.dtype, dtype)
    evidence: dict[tuple[int, ...], RefinedSolution] = {}
    x = torch.empty(sides.columns.shape, dtype=work, device=device)
    with call.computing():
        if x.numel():
            check_finite(b, b.abs().amax(), "b")
            for i, (index, member) in enumerate(zip(np.ndindex(*batch), F.members or (F,), strict=True)):
                with naming(index):
                    columns = sides.of_matrix(i, device, work)
                    columns = columns.conj().resolve_conj() if trans == 1 else columns
                    if refine:
                        member = adjoint_of(member) if trans else member
                        evidence[index] = refined(member, columns, target, dtype)
                        solution = evidence[index].x
                    else:
                        solution = _substituted(member, columns, adjoint=trans > 0)
                    solution = solution.conj() if trans == 1 else solution
                    _check_solution(solution)
                    sides.put(x, i, solution)
    if refine and not trans:
        F._solvers.measured = F._solvers.measured or MeasuredSubstitution.from_used(F)
    answer = call.give_back(x.reshape(sides.shape), dtype)
    report_solutions(evidence, answer, F, target, call)
    return answer


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


def _growths(members: tuple[LUFactors, ...], batch: tuple[int, ...], give_back: Callable[..., Any]) -> Any:
    each = torch.tensor([member.growth for member in members], dtype=torch.float64, device="cpu")
    return give_back(each.reshape(batch), torch.float64)


@dataclass(frozen=True)
class _LUOptions:
    engine: Engine
    storage: Format
    variant: str
    panel: int | None
    inner_panel: InnerPanel | None
    pivot: str
    transform: TwoSided | None
    keep_a: bool


@dataclass(frozen=True)
class _Factorized:
    """Factors of one matrix, the largest magnitude in what was factorized, and the matrix to keep."""

    packed: PackedLU
    largest: torch.Tensor
    matrix: KeptMatrix | None


def _factorize(a: torch.Tensor, options: _LUOptions, on_columns: Callable[[int], None] | None) -> _Factorized:
    engine, storage = options.engine, options.storage
    work = a.to(engine.device)
    if not len(a):
        nothing = PackedLU(work, torch.arange(0, device=engine.device), storage)
        kept = KeptMatrix.from_matrix(a, 0.0, engine) if options.keep_a else None
        return _Factorized(nothing, work.real.new_zeros(()), kept)
    largest = largest_of(work)
    if not math.isfinite(top := float(largest)):
        check_finite(work, largest, "A")
    check_range(work, top, storage)
    kept = KeptMatrix.from_matrix(a, top, engine) if options.keep_a else None
    if options.transform is not None:
        work = options.transform.mixed(work, engine)
        largest = largest_of(work)
    packed = lu_factorize(
        work,
        engine,
        variant=options.variant,
        panel=options.panel,
        inner_panel=options.inner_panel,
        storage=storage,
        pivoting=options.pivot == "partial",
        on_columns=on_columns,
    )
    check_factors(packed, engine, options.pivot)
    return _Factorized(packed, largest, kept)


def _part_of(progress: Progress | None, i: int, count: int, n: int) -> Callable[[int], None] | None:
    """A callback that reports the columns of one matrix as a part of the batch."""
    if progress is None:
        return None
    return lambda done: progress("lu", (i + min(1.0, done / n)) / count)
