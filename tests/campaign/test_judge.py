"""The judge: honest answers are sound, and every way to be wrong is found."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import scipy.linalg

import neula

from .backward import backward_errors, judge_backward
from .calls import Answer, call
from .fuzz import draw, snippet
from .judge import judge, truths
from .matrices import KINDS, ComplexRandom
from .oracle import LeastSquares, System
from .recipes import DEFINITE, OFTEN, PROBLEMS, SOLVERS, Member, Recipe, Scope, Seeded, build
from .verdict import Verdict

U = 2.0**-53
LSTSQ = Recipe("lstsq", 6, 3, 2, (Member("normal"),))
SINGULAR = Recipe("solve", 3, 3, 1, (Member("counting"),))
SYSTEM = Recipe("solve", 4, 4, 2, (Member("normal"),))
BATCH = replace(LSTSQ, members=(Member("normal"), Member("uniform"), Member("vandermonde")), batched=True)
ILL_CONDITIONED = Recipe("solve", 12, 12, 1, (Member("hilbert"),), seed=3)


@dataclass(frozen=True)
class Result:
    """Result of a solver, with the numbers that the judge reads."""

    x: np.ndarray
    forward_errors: np.ndarray
    condition: float
    ranks: np.ndarray
    accepted: np.ndarray
    accuracy: str = "fp64"
    tolerance: float = 1.0

    @property
    def backward_errors(self) -> np.ndarray:
        """Nothing is promised."""
        return np.ones(np.size(self.ranks))

    @property
    def forward_error(self) -> float:
        return float(self.forward_errors.max())

    @property
    def digits(self) -> float:
        with np.errstate(divide="ignore"):
            return float(-np.log10(self.forward_error))

    @property
    def rank(self) -> int:
        return int(self.ranks.min())


def honest(recipe: Recipe) -> Result:
    """SciPy's answers with bounds by the true condition: what backward stable methods can promise.

    Householder QR and LU are stable up to a multiple of ``m n u`` (Higham 2002, theorems 20.3 and 9.4).
    """
    example = build(recipe)
    exact = truths(example)
    square = recipe.problem != "lstsq"
    method = scipy.linalg.solve if square else lambda a, b: scipy.linalg.lstsq(a, b)[0]
    x = np.stack([method(a, b) for a, b in zip(example.a, example.b, strict=True)])
    bounds = np.stack([t.bounds(t.ranks[0], recipe.m * recipe.n * U) for t in exact])
    ranks = np.array([t.ranks[0] for t in exact])
    accepted = np.ones(len(exact), dtype=bool)
    if not recipe.batched:
        x, bounds, ranks, accepted = x[0], bounds[0], ranks[0], accepted[0]
    return Result(x, bounds, exact[0].condition(exact[0].ranks[0]), ranks, accepted)


def verdict_on(recipe: Recipe, result: Any, *categories: type[Warning]) -> Verdict:
    caught = []
    for category in categories:
        with warnings.catch_warnings(record=True) as more:
            warnings.simplefilter("always")
            warnings.warn("told", category, stacklevel=1)
        caught += more
    error = result if isinstance(result, Exception) else None
    return judge(build(recipe), Answer(None if error else result, error, tuple(caught)))


def found(verdict: Verdict) -> set[tuple[str, str]]:
    return {(f.kind, f.reason) for f in verdict.findings}


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("recipe", [LSTSQ, SYSTEM, BATCH])
def test_honest_answers_are_sound(recipe: Recipe, dtype: str) -> None:
    recipe = replace(recipe, dtype=dtype)
    verdict = verdict_on(recipe, honest(recipe))
    assert found(verdict) == set(), str(verdict)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_scipy_is_sound_where_its_rank_is_right(kind: str, dtype: str) -> None:
    recipe = Recipe("lstsq", 7, 3, 1, (Member(kind),), dtype=dtype, seed=5)
    example = build(recipe)
    its_rank = scipy.linalg.lstsq(example.a[0], example.b[0])[2]
    verdict = verdict_on(recipe, honest(recipe))
    # Truncation errors of numerically singular matrices are beyond this bound.
    assert not verdict.has("unsound") or min(its_rank, *truths(example)[0].ranks) < 3, str(verdict)


ERROR = ("unsound", "error")


@pytest.mark.parametrize(
    ("recipe", "change", "finding"),
    [
        (LSTSQ, lambda r: {"x": r.x * (1 + 1e-8)}, ERROR),
        (LSTSQ, lambda r: {"x": r.x * [1, 1 + 1e-8]}, ERROR),  # each right-hand side counts
        *((replace(x, dtype="complex128"), lambda r: {"x": r.x.conj()}, ERROR) for x in (LSTSQ, SYSTEM)),
        (LSTSQ, lambda r: {"ranks": r.ranks - 1}, ("unsound", "rank")),
        (LSTSQ, lambda r: {"forward_errors": r.forward_errors * np.nan}, ERROR),
        (LSTSQ, lambda r: {"forward_errors": r.forward_errors * 1e6}, ("false alarm", "bound")),
        (LSTSQ, lambda r: {"condition": r.condition * 11}, ("violation", "condition")),
        (LSTSQ, lambda r: {"condition": r.condition / 11}, ("violation", "condition")),
        (LSTSQ, lambda r: {"x": r.x * 1e3}, ("violation", "residual")),
        (LSTSQ, lambda r: {"x": r.x * np.inf}, ("violation", "not finite")),
    ],
)
def test_what_is_wrong_is_found(recipe: Recipe, change: Any, finding: tuple[str, str]) -> None:
    result = honest(recipe)
    assert finding in found(verdict_on(recipe, replace(result, **change(result))))


def test_warnings() -> None:
    result = honest(LSTSQ)
    promising = replace(result, x=2 * result.x, accepted=np.array(False))
    assert ("unsound", "error") in found(verdict_on(LSTSQ, promising, neula.AccuracyWarning))
    wrong = replace(promising, forward_errors=np.full_like(result.forward_errors, 2.0))
    assert found(verdict_on(LSTSQ, wrong, neula.AccuracyWarning)) == {("false alarm", "warning")}
    assert ("violation", "stray warning") in found(verdict_on(LSTSQ, result, RuntimeWarning))
    named = replace(LSTSQ, options=(("algorithm", "normal"),))
    assert found(verdict_on(named, wrong, neula.AccuracyWarning)) == set()


def test_a_warning_for_one_of_a_batch_does_not_excuse_another() -> None:
    result = honest(BATCH)
    result.x[1] *= 2
    assert ("unsound", "error") in found(verdict_on(BATCH, result, neula.AccuracyWarning))
    result.accepted[1] = False
    assert ("unsound", "error") in found(verdict_on(BATCH, result, neula.AccuracyWarning))
    result.forward_errors[1] = np.inf
    assert not verdict_on(BATCH, result, neula.AccuracyWarning).has("unsound")


def test_singular_systems_raise() -> None:
    assert found(verdict_on(SINGULAR, np.linalg.LinAlgError("singular"))) == set()
    assert found(verdict_on(SINGULAR, ValueError("what?"))) == {("violation", "raised")}
    numbers = honest(SYSTEM)
    result = replace(numbers, x=np.ones((3, 1)), forward_errors=np.ones(1))
    assert found(verdict_on(SINGULAR, result)) == {("unsound", "singular")}
    # Elimination with rounding errors need not find a pivot of zero.
    assert found(verdict_on(SINGULAR, result, neula.AccuracyWarning)) == set()


def test_errors_that_must_not_be() -> None:
    assert found(verdict_on(SYSTEM, np.linalg.LinAlgError("singular"))) == {("false alarm", "raised")}
    assert found(verdict_on(SYSTEM, OverflowError("large"))) == {("false alarm", "raised")}
    assert found(verdict_on(LSTSQ, np.linalg.LinAlgError("singular"))) == {("violation", "raised")}
    assert found(verdict_on(ILL_CONDITIONED, np.linalg.LinAlgError("singular"))) == set()
    huge = replace(SYSTEM, members=(Member("normal", whole=-200, rhs_power=200),))
    assert found(verdict_on(huge, OverflowError("large"))) == set()


def test_a_residual_longer_than_b_is_not_accepted() -> None:
    """Rounding the exact solution is enough for it where the condition exceeds the reciprocal of u."""
    numbers, truth = honest(SYSTEM), truths(build(ILL_CONDITIONED))[0]
    assert isinstance(truth, System)
    x = truth.rounded_solution(12)
    result = replace(numbers, x=x, forward_errors=np.ones(1), condition=truth.condition(12))
    ratios = truth.residual_ratios(x)
    assert (("violation", "residual") in found(verdict_on(ILL_CONDITIONED, result))) == bool(
        (ratios > 1).any()
    )


@pytest.mark.parametrize("problem", PROBLEMS)
def test_recipes_can_be_typed_again(problem: str) -> None:
    """The same seed, or the printed recipe, gives the same numbers in the layout that it says."""
    scope = Scope(problems=(problem,))
    for number in range(20):
        recipe = draw(Seeded(11, number), scope)
        assert recipe == draw(Seeded(11, number), scope)
        again = eval(repr(recipe))
        example, repeated = build(recipe), build(again)
        np.testing.assert_array_equal(example.a, repeated.a)
        np.testing.assert_array_equal(example.b, repeated.b)
        assert np.isfinite(example.a).all()
        assert np.isfinite(example.b).all()
        assert example.a.shape == (len(recipe.members), recipe.m, recipe.n)
        # Of complex recipes one of A and b may be real.
        assert str(np.result_type(example.a, example.b)) == recipe.dtype
        if problem in SOLVERS:
            text = snippet(example)
            compile(text, "snippet", "exec")
            # Streams and fits that are held open take more than one call.
            assert not text or ("neula.lstsq(" in text or "neula.solve(" in text) == (problem in OFTEN)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("layout", ["C", "F", "sliced", "reversed"])
def test_calls_do_not_depend_on_the_layout(layout: str, library: str) -> None:
    recipe = replace(BATCH, layout=layout, library=library)
    plain, other = (call(build(r)).result.x for r in (BATCH, recipe))
    np.testing.assert_allclose(np.asarray(other), plain, rtol=1e-10)


@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p not in SOLVERS])
def test_factorizations_are_judged(problem: str) -> None:
    square = problem in ("lu", *DEFINITE)
    kind = "gram" if problem in DEFINITE else "normal"
    recipe = Recipe(problem, 6, 6 if square else 4, 2, (Member(kind),))
    example = build(recipe)
    answer = call(example)
    verdict = judge(example, answer)
    assert found(verdict) == set(), str(verdict)
    first = answer.result[0] if isinstance(answer.result, tuple) else answer.result
    doctored = _doctored(problem, answer.result, first)
    assert judge(example, replace(answer, result=doctored)).has("unsound")


FIELDS = {"polar": "H", "cholesky": "factor", "svd": "s", "nnls": "x", "box": "x"}


def _doctored(problem: str, result: Any, first: Any) -> Any:
    """The same with an error of a percent, or what is worth a warning."""
    if problem == "lu":
        packed = replace(first.packed, lu=first.packed.lu * 1.5)
        return (replace(first, packed=packed), result[1])
    if problem in (*FIELDS, "qr", "tsqr", "pivoted"):
        field = FIELDS.get(problem, "R")
        return replace(result, **{field: 1.01 * getattr(result, field)})
    return (2 if problem == "pinv" else 1.01) * result


@pytest.mark.parametrize("scalars", ["real", "complex"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("error", [1e-3, 1.0])
def test_backward_errors_are_the_smallest(size: float, error: float, scalars: str) -> None:
    """As by the singular values of Walden, Karlson and Sun, of B alone, and of B and b."""
    rng: Any = np.random.default_rng(2)
    rng = ComplexRandom(rng) if scalars == "complex" else rng
    a = rng.standard_normal((7, 4)) @ np.diag([1, 1e-1, 1e-2, 1e-3]) @ rng.standard_normal((4, 4))
    a /= np.linalg.norm(a, axis=0)
    x = size * rng.standard_normal((4, 1))
    b = a @ x + rng.standard_normal((7, 1))
    x = np.linalg.lstsq(a, b, rcond=None)[0] + error * rng.standard_normal((4, 1))
    r, norm, size_of_b = (b - a @ x)[:, 0], np.linalg.norm(a, 2), np.linalg.norm(b)
    length, image = np.linalg.norm(r), norm * np.linalg.norm(x)
    found = [length / (image + size_of_b)]
    for ratio in (length / image, length / np.hypot(image, size_of_b)):
        away = np.eye(7) - np.outer(r, r.conj()) / length**2
        found += [ratio, np.linalg.svd(np.hstack([a / norm, ratio * away]), compute_uv=False).min()]
    assert backward_errors(LeastSquares(a, b, rcond=1e-15), x, 4) == pytest.approx(min(found), rel=1e-6)


@pytest.mark.parametrize("shape", [(7, 3), (3, 7), (4, 4)])
def test_backward_errors_that_are_claimed_too_small_are_found(shape: tuple[int, int]) -> None:
    """Nor does a solution count as accepted whose backward error is above the tolerance."""
    rng = np.random.default_rng(0)
    a, b = (
        rng.standard_normal(shape) * 10.0 ** rng.uniform(-6, 6, shape[1]),
        rng.standard_normal((shape[0], 1)),
    )
    truth, rank = LeastSquares(a, b, rcond=1e-15), min(shape)
    x = truth.rounded_solution(rank)
    (error,) = backward_errors(truth, x * (1 + 1e-6), rank)
    assert 1e-8 < error < 1e-5
    assert backward_errors(truth, x, rank)[0] < 1e-15
    for claimed, tolerance, reasons in (
        (error, 1.0, []),
        (1e-9, 1.0, ["backward"]),
        (error, 1e-9, ["tolerance"]),
    ):
        found = judge_backward(truth, x * (1 + 1e-6), rank, claimed, tolerance, accepted=True)
        assert [finding.reason for finding in found] == reasons
