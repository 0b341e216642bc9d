"""LU: formats that go together, what cannot be factorized, and solutions that are not what was requested."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch

from neula.algorithms.elimination.lu import PackedLU, largest_of
from neula.algorithms.krylov.lu_refinement import RefinedSolution
from neula.certificates.bounds import solve_bound
from neula.certificates.forward_error import SURE
from neula.certificates.verdict import Evidence, Limits
from neula.engines import FP16, Engine, Format, format_named, format_of
from neula.pipeline.call import Call
from neula.pipeline.inputs import check_matrix
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
    """Refuse an A that overflows the format of the matrix."""
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
    """Limits of the evidence for solutions with kept factors."""
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
