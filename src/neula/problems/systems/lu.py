"""LU factorization: check the input, choose, run, look for what went wrong."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, NoReturn, Self, Unpack, overload

import numpy as np
import torch

from neula.algorithms.elimination.butterfly import TwoSided
from neula.algorithms.elimination.factorization import growth_of
from neula.algorithms.elimination.lu import (
    SMALL,
    VARIANTS,
    InnerPanel,
    LUTuning,
    PackedLU,
    by_library,
    is_lapacks,
    largest_of,
    lu_factorize,
    panel_widths,
)
from neula.algorithms.elimination.lu_panels import Interchanges
from neula.algorithms.krylov.iterative_refinement import KeptMatrix
from neula.algorithms.krylov.kept_batch import KeptBatch
from neula.engines import FP16, Engine, Format, format_named, format_of
from neula.engines.formats import matching_dtype
from neula.errors import check_name
from neula.kernels.magnitudes import largest_magnitude
from neula.pipeline.call import Call
from neula.pipeline.factors import LUMethods
from neula.pipeline.inputs import Taken, check_finite, check_matrix, itself, take
from neula.pipeline.operators import eager
from neula.pipeline.plans import Given, Plans
from neula.pipeline.progress import Progress
from neula.pipeline.result import LUFactors
from neula.problems.signatures import ArrayLike, Kind, LUKeywords


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
    variant: str, compute: str | None, storage: str | None, engine: Engine, dtype: torch.dtype, *, whole: bool
) -> tuple[Engine, Format]:
    """The engine in the format of the products, and the format of the matrix, by default that of the dtype if
    ``whole``.
    """
    if compute is None and storage is None and whole:
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


def _refuse_overflow(what: str, kept: Format) -> NoReturn:
    wider = ", or pass compute='bf16', which has the range of float32" if kept is FP16 else ""
    raise OverflowError(
        f"{what} overflows {kept.name}, whose largest number is {kept.largest:.6g}: scale A down{wider}"
    )


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
        if int(info) or not cmath.isfinite(lu.sum().item()):  # of finite numbers, unless it overflows
            return None
        wrap = torch.Tensor.numpy if given.wrap is not torch.from_numpy else itself
        return _factors(lu, pivots.long().sub_(1), largest, self.options, kept, wrap, given.begun)


def factors_of(a: np.ndarray, lu: np.ndarray, pivots: np.ndarray, image: np.ndarray) -> LUFactors[Any] | None:
    """LAPACK's factors of A as :func:`neula.lu_factor` has them; None where it has none."""
    # ``a``, shape (n, n): float64 or float32, with numbers near 1, in the memory of the user. ``lu`` and
    # ``pivots``: as of SciPy. ``image``, shape (n, 1): ``A v`` when it was factorized, for the fixed v of
    # :class:`KeptMatrix`.
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
        _largest=largest,
        _measure_growth=partial(_growth, engine, like.give_back),
        _give_back=like.give_back,
        _factors=None if kept is None else LUMethods(kept.a, packed, False, like, kept),
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
    lapack = call.engine.tuning.lapack
    chosen, kept = choose_formats(variant, compute, storage, call.engine, a.dtype, whole=lapack)
    by_lapack = lapack and pivot == "partial" and is_lapacks(chosen, kept, *others.values())
    single = a.ndim == 2 and a.numel() > 0 and kept.dtype == a.dtype.to_real()
    return LUPlan(LUPlanOptions(chosen, kept, keep_a)) if by_lapack and single else None


PIVOTING = ("partial", "none", "rbt")


@overload
def lu_factor(A: Kind, variant: str = ..., **keywords: Unpack[LUKeywords]) -> LUFactors[Kind]: ...
@overload
def lu_factor(A: Any, variant: str = ..., **keywords: Unpack[LUKeywords]) -> LUFactors[Any]: ...
@partial(eager, plans=Plans(plan_of, operands=1, fetches=False))
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

    Small matrices and complex ones keep their dtype there, too. Returns factors for :func:`lu_solve`, which
    refines solutions to the accuracy of the dtype. A is not scaled. The factors are as accurate as their
    format; in half precision they take half the memory of single precision.

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
        Where everything is in single or double precision, all variants are the same algorithm: pivoting, and
        without a width, they are LAPACK's or cuSOLVER's factorization, with widths of its own.
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
        default, without ``storage``, that of the dtype of A (float32 for a narrower one) on a CPU, and on a
        GPU below order 512 and for complex numbers unless a variant, pivots or widths are named; otherwise
        ``storage`` or the cheapest one of the engine. Of complex operands both parts are rounded to it.
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
    call = Call.begin({"A": A}, engine=engine, gradients=keep_a)
    a, graph = call.first.tensor, call.first.graph
    check_square(a)
    check_name("variant", variant, VARIANTS)
    check_name("pivot", pivot, PIVOTING)
    batch, n, tuning = tuple(a.shape[:-2]), a.shape[-1], call.engine.tuning
    named = variant != "5.2/5.1" or pivot != "partial" or panel is not None or inner_panel is not None
    # Half the precision gains nothing on a CPU, nor where a GPU is not busy.
    whole = tuning.lapack or (not named and tuning[LUTuning].direct(n, is_complex=a.is_complex()))
    chosen, kept = choose_formats(variant, compute, storage, call.engine, a.dtype, whole=whole)
    r = s = None
    direct = pivot == "partial" and is_lapacks(chosen, kept, panel, inner_panel, progress)
    if not direct:
        r, s = panel_widths(variant, chosen, panel, inner_panel, pivot == "partial")
    transform = TwoSided.random(n, chosen.device) if pivot == "rbt" else None
    how: Any = {"variant": variant, "panel": panel, "inner_panel": inner_panel, "pivot": pivot}
    how |= {"engine": chosen, "storage": kept, "transform": transform, "keep_a": keep_a}
    with call.computing():
        if direct and batch and a.numel():
            found = _factorize_together(a, chosen, kept, keep_a=keep_a)
        else:
            members, count = [], math.prod(batch)
            for i, index in enumerate(np.ndindex(*batch)):
                with naming(index):
                    members.append(_factorize(a[index], _part_of(progress, i, count, n), **how))
            found = _Factorized.stacked(members, a, chosen, kept, keep_a=keep_a) if batch else members[0]
    # Factors that do not keep A must not keep it alive.
    nothing = a.new_empty(0)
    like = replace(call.first, tensor=nothing, graph=nothing)
    methods = None
    if found.kept is not None:
        methods = LUMethods(graph, found.packed, transform is not None, like, found.kept)
    return LUFactors(
        packed=found.packed,
        variant="lapack" if direct else variant,
        panel=r,
        inner_panel=s,
        compute=chosen.format.name,
        storage=kept.name,
        engine=str(chosen),
        dtype=a.dtype,
        _largest=found.largest,
        _measure_growth=partial(_growth, chosen, like.give_back),
        _give_back=like.give_back,
        transform=transform,
        kept=found.kept,
        seconds=call.seconds,
        _factors=methods,
    )


def _growth(engine: Engine, give_back: Callable[..., Any], lu: torch.Tensor, largest: torch.Tensor) -> Any:
    """Growth of a matrix, or of each matrix of a batch as an array like A."""
    if lu.ndim == 2:
        return growth_of(lu, largest, engine)
    found = torch.ones_like(largest)
    if lu.numel():
        found = torch.where(largest > 0, largest_magnitude(lu.triu(), (-2, -1)) / largest, 1.0)
    return give_back(found.double(), torch.float64)


@dataclass(frozen=True)
class _Factorized:
    """Factors of a matrix or a batch, largest magnitudes in what was factorized, and the matrices to keep."""

    packed: PackedLU
    largest: torch.Tensor
    kept: KeptMatrix | KeptBatch | None

    @classmethod
    def stacked(
        cls, members: Sequence[Any], a: torch.Tensor, engine: Engine, storage: Format, *, keep_a: bool
    ) -> Self:
        """Factors of the matrices of a batch in one piece of memory, each column-major as it was."""
        kept = KeptBatch.stacked([each.kept for each in members], a, engine) if keep_a else None
        if not members:
            like = a.to(engine.device, matching_dtype(storage.dtype, a.dtype))
            packed = PackedLU(like, like.new_empty(a.shape[:-1], dtype=torch.int64), storage)
            return cls(packed, like.real.new_empty(a.shape[:-2]), kept)
        lu = torch.stack([each.packed.lu.T for each in members]).unflatten(0, a.shape[:-2]).mT
        permutation, largest = (
            torch.stack(x).unflatten(0, a.shape[:-2])
            for x in zip(*((each.packed.permutation, each.largest) for each in members), strict=True)
        )
        return cls(PackedLU(lu, permutation, storage), largest, kept)


def _factorize(
    a: torch.Tensor,
    on_columns: Callable[[int], None] | None,
    *,
    engine: Engine,
    storage: Format,
    pivot: str,
    transform: TwoSided | None,
    keep_a: bool,
    **how: Any,
) -> _Factorized:
    work = a.to(engine.device)
    if not len(a):
        nothing = PackedLU(work, torch.arange(0, device=engine.device), storage)
        kept = KeptMatrix.from_matrix(a, 0.0, engine) if keep_a else None
        return _Factorized(nothing, work.real.new_zeros(()), kept)
    largest = largest_of(work)
    if not math.isfinite(top := float(largest)):
        check_finite(work, largest, "A")
    check_range(work, top, storage)
    kept = KeptMatrix.from_matrix(a, top, engine) if keep_a else None
    if transform is not None:
        work = transform.mixed(work, engine)
        largest = largest_of(work)
    how |= {"storage": storage, "pivoting": pivot == "partial", "on_columns": on_columns}
    packed = lu_factorize(work, engine, **how)
    check_factors(packed, engine, pivot)
    return _Factorized(packed, largest, kept)


def _factorize_together(a: torch.Tensor, engine: Engine, storage: Format, *, keep_a: bool) -> _Factorized:
    """The matrices of a batch by the library, in its own launches for all of them."""
    here = a.to(engine.device)
    largest = largest_magnitude(here, (-2, -1))
    tops = largest.cpu()
    for index in (~(tops < storage.largest)).nonzero().tolist():
        with naming(index):
            each = here[tuple(index)]
            check_finite(each, largest_of(each), "A")
            check_range(each, tops[tuple(index)].item(), storage)
    kept = KeptBatch.from_matrices(a, tops, engine) if keep_a else None
    work = here.mT.to(
        matching_dtype(storage.dtype, a.dtype), copy=True, memory_format=torch.contiguous_format
    )
    packed = by_library(work.mT, tops, storage)
    usable = work.diagonal(0, -2, -1).all(-1) & (largest_magnitude(work, (-2, -1)) < torch.inf)
    for index in (~usable).nonzero().tolist():
        with naming(index):
            check_factors(packed.member(tuple(index)), engine, "partial")
    return _Factorized(packed, largest, kept)


def _part_of(progress: Progress | None, i: int, count: int, n: int) -> Callable[[int], None] | None:
    """A callback that reports the columns of one matrix as a part of the batch."""
    if progress is None:
        return None
    return lambda done: progress("lu", (i + min(1.0, done / n)) / count)


@contextmanager
def naming(index: Sequence[int]) -> Iterator[None]:
    """Add the index of a matrix in its batch to errors; the empty index is a single matrix."""
    try:
        yield
    except (np.linalg.LinAlgError, ArithmeticError, ValueError) as error:
        if not index:
            raise
        raise type(error)(f"A[{', '.join(map(str, index))}] of the batch: {error}") from None
