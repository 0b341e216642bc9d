"""LAPACK's factors of one matrix without the front end, and solutions measured along random vectors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from neula.algorithms.elimination.factorization import growth_of
from neula.algorithms.elimination.lu import SMALL, VARIANTS, PackedLU, is_lapacks, largest_of
from neula.algorithms.elimination.pivoting import Interchanges
from neula.algorithms.krylov.lu_refinement import KeptMatrix, RefinedSolution
from neula.certificates.orthogonality import PROBES, gaussian_probes
from neula.engines import Engine, Format, format_of
from neula.engines.formats import in_double
from neula.errors import check_name
from neula.kernels import scipy_linalg
from neula.pipeline.call import Call
from neula.pipeline.factors import LUMethods
from neula.pipeline.inputs import Taken, take
from neula.pipeline.plans import Given, host_arrays
from neula.pipeline.result import LUFactors
from neula.problems.systems.lu_checks import (
    check_square,
    choose_formats,
    evidence_of,
    limits_of,
)

SINGLE = 40_000
"""Elements of right-hand sides below which OpenBLAS substitutes in one thread, and leaves torch its cores."""

SUBSTITUTE = {"d": "dgetrs", "f": "sgetrs", "D": "zgetrs", "F": "cgetrs"}
"""LAPACK's substitution, by the characters of NumPy's dtypes."""


class LUPlanOptions(NamedTuple):
    """Options of a plan for LAPACK's LU."""

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
