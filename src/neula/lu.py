"""LU factorization and solution: check the input, choose, run, look for what went wrong."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch

from neula.algorithms.butterfly import TwoSided
from neula.algorithms.factorization import growth_of
from neula.algorithms.lu import VARIANTS, PackedLU, lu_factorize, panel_widths
from neula.algorithms.substitution import Substitution
from neula.compilation import eager
from neula.engines import FP16, Engine, Format, format_named, format_of, select_engine
from neula.engines.precision import plain_arithmetic
from neula.errors import unknown_name
from neula.inputs import check_finite, check_matrix, take
from neula.progress import Progress
from neula.result import LUFactors

PIVOTING = ("partial", "none", "rbt")


@eager
def lu_factor(
    A: Any,
    variant: str = "5.2/5.1",
    *,
    panel: int | None = None,
    inner_panel: int | None = None,
    pivot: str = "partial",
    compute: str | None = None,
    storage: str | None = None,
    engine: str | Engine = "auto",
    progress: Progress | None = None,
) -> LUFactors:
    """LU factorization on matrix units, with the factors kept in half precision.

    The factors are as accurate as their format, and take half the memory of those in single precision. They
    are meant to be refined with, or to be studied: nothing is scaled, and no accuracy is certified.

    Parameters
    ----------
    A : array_like, shape (n, n)
        NumPy array, torch tensor or DLPack object; not modified.
    variant : str
        The algorithm of [1]_:

        - ``"5.2/5.1"``, ``"5.2/4.1"``: half-precision matrix, updates summed in a float32 buffer, panels that
          are partitioned again, with inner panels by Algorithm 5.1 or 4.1;
        - ``"5.1"``: the same with panels in float32; ``"4.1"``: with panels in half precision;
        - ``"3.1"``: right-looking, half-precision products of a float32 matrix, or of a half-precision one
          with ``storage="fp16"``;
        - ``"2.1"``, ``"2.2"``: everything in one precision, right- and left-looking.
    panel, inner_panel : int, optional
        Widths r and s. What suits the engine by default: 256 and 8, as in the paper, on ``"emulated"``.
    pivot : {"partial", "none", "rbt"}
        ``"none"`` is faster, and safe only for matrices that do not need it, such as diagonally dominant
        ones: small pivots spoil the factors without notice. ``"rbt"`` is ``"none"`` for A mixed by random
        butterflies [2]_, whose pivots are as good as those of a random matrix. L and U are then those of the
        mixed matrix ``W1^T A W2``, bordered by an identity to a multiple of four rows, and :func:`lu_solve`
        undoes it. ``"partial"`` on a GPU, with the default variant and ``inner_panel`` (32), is tournament
        pivoting: some rows are compared in groups instead of all with each other, and elements of L may
        exceed one, though not by much. Panels are multiples of 32 columns then, 1024 at most. Other widths
        and variants pivot partially, many times slower.
    compute : str, optional
        Format of the operands of products, ``"fp16"`` or ``"bf16"`` or another that the engine has; its
        cheapest one by default.
    storage : str, optional
        Format of the matrix: that of ``compute``, except for Algorithm 3.1, which by default keeps the matrix
        in float32.
    engine : {"auto", "cpu", "cuda", "emulated"} or Engine
        What multiplies. ``"auto"`` goes by the device of A.
    progress : callable, optional
        Called with the name of the stage and the part of it that is done.

    Returns
    -------
    LUFactors
        Holds ``L``, ``U``, ``pivots`` and ``storage_bytes``; pass it to :func:`lu_solve`.

    Raises
    ------
    ValueError
        If A is not square, is empty, or has NaN or Inf, for unknown names, and for panels or formats that do
        not go together.
    TypeError
        For complex or sparse input.
    OverflowError
        If an element of A, L or U is too large for the format.
    numpy.linalg.LinAlgError
        If a pivot is exactly zero.

    See Also
    --------
    lu_solve : solve with the factors.

    Notes
    -----
    The buffer has at most ``panel * n`` elements in float32, and four times as many with tournaments. Error
    bounds are in ``neula.accuracy.lu_bound``.

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
    taken = take(A, "A")
    a = taken.tensor
    _check_square(a)
    if variant not in VARIANTS:
        raise unknown_name("variant", variant, VARIANTS)
    if pivot not in PIVOTING:
        raise unknown_name("pivot", pivot, PIVOTING)
    chosen, kept = _choose_formats(variant, compute, storage, select_engine(engine, a.device))
    r, s = panel_widths(variant, chosen, panel, inner_panel, pivot == "partial")
    n = a.shape[0]
    with plain_arithmetic(chosen.device):
        work = a.to(chosen.device)
        largest = chosen.column_max(work)
        check_finite(work, largest, "A")
        _check_range(work, largest, kept)
        largest = largest.amax()
        transform = TwoSided.random(n, chosen.device) if pivot == "rbt" else None
        if transform is not None:
            work = transform.mixed(work, chosen)
            largest = chosen.column_max(work.T).amax()
        packed = lu_factorize(
            work,
            chosen,
            variant=variant,
            panel=r,
            inner_panel=s,
            storage=kept,
            pivoting=pivot == "partial",
            on_columns=None if progress is None else lambda done: progress("lu", min(1.0, done / n)),
        )
        _check_factors(packed, chosen, pivot)
    return LUFactors(
        packed=packed,
        variant=variant,
        panel=r,
        inner_panel=s,
        compute=chosen.format.name,
        storage=kept.name,
        engine=str(chosen),
        transform=transform,
        measure_growth=partial(growth_of, packed.lu, largest, chosen),
        give_back=partial(taken.give_back, dtype=a.dtype),
    )


@eager
def lu_solve(F: LUFactors, b: Any) -> Any:
    """Solve ``A x = b`` with the factors of A, by substitution in float32 or float64.

    The solution is as accurate as the factors are. The first solve inverts blocks on the diagonal of factors
    in half precision, which F keeps: ``1024 n`` to ``4096 n`` numbers in the precision of the substitution.

    Parameters
    ----------
    F : LUFactors
        From :func:`lu_factor`.
    b : array_like, shape (n,) or (n, k)
        One or several right-hand sides; not modified. Substitution is in float64 if b is, else in float32.

    Returns
    -------
    array, shape (n,) or (n, k)
        In the library, on the device and in the dtype of b.

    Raises
    ------
    ValueError
        If b does not fit, or has NaN or Inf.
    TypeError
        If F is not an LUFactors, and for complex or sparse b.
    OverflowError
        If the solution is too large for its dtype.

    Examples
    --------
    >>> import numpy as np, neula
    >>> A = np.array([[4.0, 1.0], [2.0, 3.0]])
    >>> F = neula.lu_factor(A, engine="emulated")
    >>> neula.lu_solve(F, np.array([6.0, 8.0])).round(3)
    array([1., 2.])
    """
    if not isinstance(F, LUFactors):
        raise TypeError(f"F is a {type(F).__name__}: pass what neula.lu_factor returns")
    taken = take(b, "b")
    n = F.shape[0]
    if taken.tensor.ndim not in (1, 2) or taken.tensor.shape[0] != n:
        raise ValueError(
            f"b has shape {tuple(taken.tensor.shape)}, and A {n} rows: pass b of shape ({n},) or ({n}, k)"
        )
    lu = F.packed.lu
    work = torch.float64 if taken.tensor.dtype == torch.float64 else torch.float32
    with plain_arithmetic(lu.device):
        columns = taken.tensor.reshape(n, -1).to(lu.device, work)
        if columns.shape[1] == 0:
            return taken.give_back(columns)
        check_finite(columns, columns.abs().amax(0), "b")
        solver = F.solvers.setdefault(work, Substitution(F.packed, work))
        x = solver.solve(columns) if F.transform is None else F.transform.solve(solver.solve, columns)
        if not bool(x.isfinite().all()):
            raise OverflowError(
                f"the solution overflows {work}: pass b in float64"
                if work == torch.float32
                else "the solution overflows float64: U is numerically singular"
            )
    return taken.give_back(x.reshape(taken.tensor.shape))


def _check_square(a: torch.Tensor) -> None:
    check_matrix(a, "A")
    if a.ndim > 2:
        raise ValueError(f"lu_factor takes one matrix at a time, got shape {tuple(a.shape)}")
    if a.shape[0] != a.shape[1]:
        raise ValueError(
            f"A must be square, got shape {tuple(a.shape)}: for least squares use neula.lstsq, for other "
            "shapes neula.qr"
        )


def _choose_formats(
    variant: str, compute: str | None, storage: str | None, engine: Engine
) -> tuple[Engine, Format]:
    """The engine in the format of the products, and the format of the matrix."""
    kept = None if storage is None else format_named(storage)
    if variant != "3.1":
        chosen = engine.using(compute or storage or engine.format)
        if kept not in (None, chosen.format):
            raise ValueError(
                f"variant {variant!r} keeps the matrix in the format of its products: "
                f"got compute={compute!r} and storage={storage!r}; leave one out, or pass variant='3.1'"
            )
        return chosen, chosen.format
    wide = kept is not None and kept == format_of(kept.storage)
    chosen = engine.using(compute or (engine.format if wide or kept is None else kept))
    kept = kept or format_of(chosen.storage)
    if kept not in (chosen.format, format_of(chosen.storage)):
        raise ValueError(
            f"variant '3.1' with products in {chosen.format.name} keeps the matrix in "
            f"{chosen.format.name!r} or {format_of(chosen.storage).name!r}, got storage={storage!r}"
        )
    return chosen, kept


def _check_range(a: torch.Tensor, column_max: torch.Tensor, kept: Format) -> None:
    """Refuse an A that overflows the format of the matrix."""
    # Numbers up to half a unit in the last place above the largest one are rounded down to it.
    if float(column_max.double().max()) < kept.largest * (1 + kept.u / 2):
        return
    row, column = divmod(int(a.abs().argmax()), a.shape[1])
    _refuse_overflow(f"A[{row}, {column}] is {float(a[row, column]):.4g}, which", kept)


def _check_factors(packed: PackedLU, engine: Engine, pivot: str) -> None:
    """Refuse factors that are singular or not finite: the only wait for the device."""
    lu, kept = packed.lu, packed.storage
    diagonal = lu.diagonal()
    unusable = (diagonal == 0) | ~diagonal.isfinite()
    infinite = ~engine.column_max(lu).isfinite()
    if not bool((unusable | infinite).any()):
        return
    first = int(unusable.int().argmax())
    if float(diagonal[first]) != 0.0:
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
