"""LAPACK's factors of one matrix without the front end, and solutions measured along random vectors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np
import torch

from neula.algorithms.elimination.factorization import growth_of
from neula.algorithms.elimination.lu import SMALL, VARIANTS, PackedLU, is_lapacks, largest_of
from neula.algorithms.elimination.lu_panels import Interchanges
from neula.algorithms.krylov.lu_refinement import KeptMatrix, RefinedSolution
from neula.certificates.bounds import solve_bound
from neula.certificates.forward_error import SURE
from neula.certificates.orthogonality import PROBES, gaussian_probes
from neula.certificates.verdict import Evidence, Limits
from neula.engines import FP16, Engine, Format, format_named, format_of
from neula.engines.formats import in_double
from neula.errors import check_name
from neula.kernels import scipy_linalg
from neula.pipeline.call import Call
from neula.pipeline.factors import LUMethods
from neula.pipeline.inputs import Taken, check_matrix, take
from neula.pipeline.plans import Given, host_arrays
from neula.pipeline.result import LUFactors

RefinedSolutions = dict[tuple[int, ...], RefinedSolution]
"""Refined solutions by the index of the matrix in the batch."""


def check_square(a: torch.Tensor) -> None:
    """Refuse what is neither a square matrix nor a batch of such; (0, 0) is one."""
    if a.shape[-2:] != (0, 0):
        check_matrix(a, "A")
    if a.shape[-2] != a.shape[-1]:
        raise ValueError(
            f"A must be square, got shape {tuple(a.shape)}: for least squares use neula.lstsq, for other "
            "shapes neula.qr"
        )


def choose_formats(
    variant: str, compute: str | None, storage: str | None, engine: Engine, dtype: torch.dtype
) -> tuple[Engine, Format]:
    """The engine in the format of the products, and the format of the matrix."""
    if compute is None and storage is None and engine.tuning.lapack:  # half the precision gains nothing there
        compute = format_of(torch.promote_types(dtype, torch.float32)).name
    kept = None if storage is None else format_named(storage)
    if engine.is_complex:
        return _choose_complex(compute, kept, engine)
    if variant != "3.1":
        chosen = engine.using(next(x for x in (compute, storage, engine.format) if x is not None))
        if kept not in (None, chosen.format):
            raise ValueError(
                f"variant {variant!r} keeps the matrix in the format of its products: "
                f"got compute={compute!r} and storage={storage!r}; leave one out, or pass variant='3.1'"
            )
        return chosen, chosen.format
    wide = kept is not None and kept == format_of(kept.storage)
    chosen = engine.using(compute if compute is not None else engine.format if wide or kept is None else kept)
    kept = kept or format_of(chosen.storage)
    if kept not in (chosen.format, format_of(chosen.storage)):
        raise ValueError(
            f"variant '3.1' with products in {chosen.format.name} keeps the matrix in "
            f"{chosen.format.name!r} or {format_of(chosen.storage).name!r}, got storage={storage!r}"
        )
    return chosen, kept


def _choose_complex(compute: str | None, kept: Format | None, engine: Engine) -> tuple[Engine, Format]:
    """Products round the parts of their operands; the factors stay in the precision of sums."""
    chosen = engine if compute is None else engine.using(compute)
    stored = format_of(chosen.storage)
    if kept not in (None, stored):
        raise ValueError(
            f"factors of complex matrices with products in {chosen.format.name} are kept in {stored.name!r}, "
            f"got storage={kept.name!r}: leave it out"  # type: ignore[union-attr]
        )
    return chosen, stored


def check_range(a: torch.Tensor, largest: float, kept: Format) -> None:
    # Numbers up to half a unit in the last place above the largest one are rounded down to it.
    if largest < kept.largest * (1 + kept.u / 2):
        return
    row, column = divmod(int(a.abs().argmax()), a.shape[1])
    _refuse_overflow(f"A[{row}, {column}] is {a[row, column].item():.4g}, which", kept)


def check_factors(packed: PackedLU, engine: Engine, pivot: str) -> None:
    """Refuse factors that are singular or not finite: the only wait for the device."""
    lu, kept = packed.lu, packed.storage
    diagonal = lu.diagonal()
    if bool(diagonal.all() & (largest_of(lu) < torch.inf)):
        return
    unusable, infinite = (diagonal == 0) | ~diagonal.isfinite(), ~engine.column_max(lu).isfinite()
    first = int(unusable.int().argmax())
    if diagonal[first].item() != 0.0:
        column = int(infinite.int().argmax())
        # A float32 matrix overflows where its elements become operands.
        _refuse_overflow(f"column {column} of L and U", min(kept, engine.format, key=lambda f: f.largest))
    where = f"pivot {first} is exactly zero in {kept.name}"
    if pivot != "partial":
        raise np.linalg.LinAlgError(f"{where}, and there was no pivoting: pass pivot='partial'")
    raise np.linalg.LinAlgError(
        f"A is singular: {where}, also after interchanges; if A is not singular, its elements are too small "
        f"or too close to each other for {kept.name}: scale A, or pass a wider compute format"
    )


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
            unsure=True,
        )
    if unknown:
        condition = max(e.condition for e in unknown.values())
        call.report_missed(
            "the number of correct digits of the solution is unknown",
            f"the condition number of A is at least {condition:.1e}, and these factors do not tell how much "
            "larger it is: use neula.solve, or neula.lstsq if A is singular",
            x,
            list(unknown),
            unsure=True,
        )


def _refuse_overflow(what: str, kept: Format) -> NoReturn:
    wider = ", or pass compute='bf16', which has the range of float32" if kept is FP16 else ""
    raise OverflowError(
        f"{what} overflows {kept.name}, whose largest number is {kept.largest:.6g}: scale A down{wider}"
    )


SINGLE = 40_000
"""Elements of right-hand sides below which OpenBLAS substitutes in one thread, and leaves torch its cores."""

SUBSTITUTE = {"d": "dgetrs", "f": "sgetrs", "D": "zgetrs", "F": "cgetrs"}
"""LAPACK's substitution, by the characters of NumPy's dtypes."""


class LUPlanOptions(NamedTuple):
    engine: Engine  # in the format of the factors
    storage: Format  # that of A
    keep_a: bool


class LUPlan:
    """Factorizes single matrices of order n."""

    def __init__(self, options: LUPlanOptions) -> None:
        self.options = options

    def __call__(self, given: Given) -> LUFactors[Any] | None:
        """The factors; None for what is not finite, singular, or so small that LAPACK needs it scaled."""
        engine, storage, keep_a = self.options
        a = torch.from_numpy(given.arrays[0])
        top = float(largest := largest_of(a))
        if not 2.0 ** (-SMALL * storage.max_exponent) < top < torch.inf:
            return None
        kept = KeptMatrix.from_matrix(a, top, engine) if keep_a else None
        lu, pivots, info = torch.linalg.lu_factor_ex(a)
        if int(info) or not bool(lu.sum().isfinite()):  # of finite numbers, unless it overflows
            return None
        wrap = torch.Tensor.numpy if given.wrap is not torch.from_numpy else lambda x: x
        return _factors(lu, pivots.long().sub_(1), largest, self.options, kept, wrap, given.begun)


def factors_of(a: np.ndarray, lu: np.ndarray, pivots: np.ndarray, image: np.ndarray) -> LUFactors[Any] | None:
    """LAPACK's factors of A as :func:`neula.lu_factor` has them; None where it has none.

    ``a``, shape (n, n): float64 or float32, with numbers near 1, in the memory of the user. ``lu`` and
    ``pivots``: as of SciPy. ``image``, shape (n, 1): ``A v`` when it was factorized, for the fixed v of
    :class:`KeptMatrix`.
    """
    begun, plan = perf_counter(), plan_of(a, compute={4: "fp32", 8: "fp64"}[a.real.itemsize])
    if plan is None:
        return None
    tensor, options, wrap = take(a, "A").tensor, plan.options, torch.Tensor.numpy
    kept = KeptMatrix(tensor, options.engine, 1.0, torch.from_numpy(image))
    packed, where = torch.from_numpy(lu), torch.from_numpy(pivots).long()
    return _factors(packed, where, largest_of(tensor), options, kept, wrap, begun)


def _factors(
    lu: torch.Tensor,
    pivots: torch.Tensor,
    largest: torch.Tensor,
    options: LUPlanOptions,
    kept: KeptMatrix | None,
    wrap: Callable[[torch.Tensor], Any],
    begun: float,
) -> LUFactors[Any]:
    engine, storage, _ = options
    interchanges, nothing = Interchanges(pivots), lu.new_empty(0)
    packed = PackedLU(lu, interchanges.permutation(), storage, interchanges)
    like = Taken(nothing, wrap, nothing)
    return LUFactors(
        packed=packed,
        variant="lapack",
        panel=None,
        inner_panel=None,
        compute=engine.format.name,
        storage=storage.name,
        engine=str(engine),
        dtype=lu.dtype,
        _measure_growth=partial(growth_of, lu, largest, engine),
        _give_back=like.give_back,
        _factors=None if kept is None else LUMethods(kept.a, packed, False, like, (kept,)),
        kept=kept,
        seconds=perf_counter() - begun,
    )


def plan_of(
    A: Any,
    variant: str = "5.2/5.1",
    *,
    engine: str | Engine = "auto",
    compute: str | None = None,
    storage: str | None = None,
    keep_a: bool = True,
    pivot: str = "partial",
    **others: Any,
) -> LUPlan | None:
    """Plan for one matrix that LAPACK factorizes in its own precision."""
    call = Call.begin({"A": A}, engine=engine)
    a = call.first.tensor
    check_square(a)
    check_name("variant", variant, VARIANTS)
    chosen, kept = choose_formats(variant, compute, storage, call.engine, a.dtype)
    by_lapack = pivot == "partial" and is_lapacks(chosen, kept, *others.values())
    single = a.ndim == 2 and a.numel() > 0 and kept.dtype == a.dtype.to_real()
    return LUPlan(LUPlanOptions(chosen, kept, keep_a)) if by_lapack and single else None


class MeasuredSubstitution:
    """Solves with LAPACK's factors of A, and measures solutions along random vectors.

    With Gaussian vectors G and ``G^T A``, which is made once, ``G^T b - (G^T A) x`` estimates the norm of the
    residual in a few operations a row. The backward error is that for perturbations of A measured in the
    Frobenius norm.

    ``factors``: of a matrix that is kept, and whose condition number is known.
    """

    def __init__(self, factors: LUFactors[Any]) -> None:
        kept = factors.kept
        assert kept is not None
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
        if factors.variant != "lapack" or kept is None or factors._solvers.better is not None:
            return None
        if not kept.a.is_cpu or kept.a.is_neg() or kept.a.is_conj():
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
