"""Verdicts on pseudoinverses, Cholesky and polar factors, pivoted QR, and least squares with bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from tests.bounded import exact as bounded

from . import ratios
from .calls import Answer, as_array
from .exact import balls, real_form
from .matrices import exponent_of, ldexp
from .oracle import LeastSquares, System
from .recipes import Example, bounds_of
from .spectrum import eigen, values_of
from .verdict import Verdict, limits_of, spacing_of, unit_roundoff

SURE = 0.1
"""Without a warning errors of solutions are at most this."""

SOLVABLE = 0.01
"""With an expected error below nobody needs a warning."""

KNOWN = 0.01
"""Condition number, in units of ``1 / (n u)``, below which the numerical rank is not in question."""

REVEALING = 10.0
"""Limit on the block of R below the rank, in units of ``sqrt(n)`` singular values (``neula.qr``)."""


def _cholesky(a: np.ndarray, parts: list[np.ndarray], u: float, tiny: float) -> Iterator[tuple[str, float]]:
    (lower,) = parts
    yield "upper triangle", math.inf if np.triu(lower, 1).any() else 0.0
    yield "diagonal", 0.0 if (np.diag(lower).imag == 0).all() else math.inf
    # Symmetric scaling to a diagonal of one rounds nothing, and small rows are as accurate as large ones.
    powers = -(np.frexp(np.diag(a).real)[1] // 2)
    scaled = ldexp(ldexp(a, powers), powers[:, None])
    left = ldexp(lower, powers[:, None])
    yield "residual", ratios.pot01(scaled, left, u, float(np.ldexp(tiny, 2 * powers.max(initial=0))))


def _polar(a: np.ndarray, parts: list[np.ndarray], u: float, tiny: float) -> Iterator[tuple[str, float]]:
    polar, symmetric, rank = parts
    values = values_of(polar)
    count = max(a.shape)
    yield "values of U", float(np.minimum(np.abs(values - 1), np.abs(values)).max()) / (count * u)
    yield "rank", 0.0 if int((values > 0.5).sum()) == int(rank) else math.inf
    yield "symmetry", 0.0 if np.array_equal(symmetric, symmetric.T.conj()) else math.inf
    yield "residual", ratios.residual_ratio(a, polar, symmetric, u, tiny)
    power = -exponent_of(symmetric)
    least = float(eigen(real_form(balls(ldexp(symmetric, power)))).values[-1].mid())
    yield "negative", max(0.0, -least) / (count * (u + np.ldexp(tiny, power)))


def _pivoted(a: np.ndarray, parts: list[np.ndarray], u: float, tiny: float) -> Iterator[tuple[str, float]]:
    q, r, order = parts
    columns = order.astype(int)
    yield "permutation", 0.0 if np.array_equal(np.sort(columns), np.arange(a.shape[1])) else math.inf
    yield "triangle", math.inf if np.tril(r, -1).any() or np.diag(r).imag.any() else 0.0
    # Square ones are certified by an estimate from random vectors.
    yield "orthogonality", ratios.orthogonality_ratio(q, 2 * u)
    yield "residual", ratios.qrt02(a[:, columns], q, r, u, tiny)[0]
    power = -exponent_of(a)
    values = values_of(ldexp(a, power))
    k = int((values > max(a.shape) * u * values[0]).sum())
    rest = np.linalg.norm(ldexp(r[k:, k:], power), 2) if k < min(a.shape) else 0.0
    allowed = REVEALING * a.shape[1] ** 0.5 * (values[k] if k < len(values) else 0.0)
    room = max(a.shape) * (u * values[0] + np.ldexp(tiny, power))
    yield "rank revealed", max(0.0, rest - allowed) / room if room else 0.0


def _pinv(a: np.ndarray, parts: list[np.ndarray], u: float, tiny: float) -> Iterator[tuple[str, float]]:
    """Without a warning at least a digit is right, of the inverse of one of the right ranks."""
    truth, x = _truth_of_inverse(a, u), parts[0].T if a.shape[0] > a.shape[1] else parts[0]
    error = min(float(truth.errors(x, rank).max()) for rank in truth.ranks)
    yield "error", ratios.THRESHOLD * error / SURE


RATIOS = {"cholesky": _cholesky, "polar": _polar, "pivoted": _pivoted, "pinv": _pinv}
"""Test ratios of the parts of one result, as those of LAPACK: below 30 it has passed."""


def _truth_of_inverse(a: np.ndarray, u: float) -> LeastSquares:
    wide = a.T if a.shape[0] > a.shape[1] else a
    rcond = max(max(a.shape) * 2.0**-52, 2 * u)
    return LeastSquares(wide, np.eye(len(wide)), rcond=rcond)


def deserves_warning(example: Example) -> bool:
    """Where no accuracy can be promised: singular values that rounding errors decide on, and underflow."""
    problem, u = example.recipe.problem, unit_roundoff(example, None)
    if problem == "pinv":
        spacing = spacing_of(example.a.dtype)
        known = [(t, r) for t in (_truth_of_inverse(a, u) for a in as_array(example.a)) for r in t.ranks]
        return any(
            (t.bounds(r, u) >= SOLVABLE).any() or (t.underflow(r, spacing) > u).any() for t, r in known
        )
    if problem == "polar":
        return any(_in_question(a, u) for a in as_array(example.a))
    return False


def _in_question(a: np.ndarray, u: float) -> bool:
    values = values_of(ldexp(a, -exponent_of(a)))
    least = KNOWN * max(a.shape) * u * values[0]
    return bool(((values > least) & (values < least / KNOWN**2)).any())


def may_raise(example: Example, error: Exception) -> bool:
    """Indefinite matrices have no Cholesky factor, and inverses of small ones overflow."""
    u = unit_roundoff(example, None)
    a = as_array(example.a)
    if example.recipe.problem == "cholesky":
        return isinstance(error, np.linalg.LinAlgError) and any(_nearly_indefinite(x) for x in a)
    if example.recipe.problem == "pinv" and isinstance(error, OverflowError):
        top = float(np.log2(float(limits_of(example.a.dtype).max))) - 1e-3
        truths = [_truth_of_inverse(x, u) for x in a]
        return any((t.largest_component(rank) >= top).any() for t in truths for rank in t.ranks)
    return isinstance(error, OverflowError) and _near_the_top(example)


def _near_the_top(example: Example) -> bool:
    """Whether norms of columns may overflow."""
    size = float(limits_of(example.a.dtype).max)
    return float(np.abs(as_array(example.a)).max(initial=0.0)) * max(example.a.shape) >= size


def _nearly_indefinite(a: np.ndarray) -> bool:
    truth = System(a, np.zeros((len(a), 1)))
    if not truth.definite:
        return True
    norms = np.sqrt(np.diag(a).real)
    return bool(values_of(a / norms / norms[:, None])[-1] < 100 * len(a) * 2.0**-53)


# --- bounds ---


def judge_bounded(example: Example, answer: Answer, verdict: Verdict) -> None:
    """Hold solutions with bounds against those in rational numbers."""
    if answer.error is not None:
        told = f"{type(answer.error).__name__}: {answer.error}"
        if not isinstance(answer.error, OverflowError):  # of solutions
            verdict.add("violation", "raised", told)
        return
    lower, upper = bounds_of(example)
    x = as_array(answer.result.x).reshape(len(example.a), example.a.shape[2], -1)
    claimed = as_array(answer.result.forward_errors).reshape(len(example.a), -1)
    accepted = as_array(answer.result.accepted).reshape(claimed.shape).astype(bool)
    for i, (a, b) in enumerate(zip(as_array(example.a), as_array(example.b), strict=True)):
        for j in range(b.shape[1]):
            if not ((x[i, :, j] >= lower) & (x[i, :, j] <= upper)).all():
                verdict.add("violation", "outside", f"{x[i, :, j]} is not between {lower} and {upper}")
            truth = bounded.solution(a, b[:, j], lower, upper)
            if truth is None:  # of many minimizers one
                if accepted[i, j] and claimed[i, j] < SURE and _is_free_to_move(a, x[i, :, j], lower, upper):
                    verdict.add("unsound", "not unique", f"forward_error {claimed[i, j]}")
                continue
            error = bounded.error(a, x[i, :, j], truth)
            verdict.numbers.append(
                {
                    "errors": [error],
                    "forward_errors": [float(claimed[i, j])],
                    "accepted": bool(accepted[i, j]),
                    "warned": answer.warned,
                }
            )
            doubted = answer.warned and not (accepted[i, j] and claimed[i, j] < SURE)
            if not doubted and not error <= claimed[i, j] * (1 + 1e-9):
                verdict.add("unsound", "error", f"error {error}, and forward_error {claimed[i, j]}")


def _is_free_to_move(a: np.ndarray, x: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> bool:
    """Whether columns of unknowns between bounds are dependent exactly: another x has the same residual."""
    free = np.ascontiguousarray(a[:, (x > lower) & (x < upper)])
    return free.size > 0 and bounded.matrix(free).rank() < free.shape[1]
