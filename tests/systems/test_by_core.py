"""Linear systems by the compiled core: bounds that it returns hold, for any numbers, on any processor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.matrices import normal_array

import neula
from campaign.oracle import System, system
from capabilities import LEVELS, core_of
from neula.algorithms.elimination import compiled, factored
from neula.certificates.bounds import solve_bound
from neula.certificates.forward_error import SURE
from neula.certificates.verdict import Limits
from neula.engines import FP32, FP64, Format
from neula.engines.formats import in_double, matching_dtype
from neula.kernels.core import core
from scaled_errors import scaled_errors

normal = partial(normal_array, seed=1)
KINDS = [np.float64, np.complex128]


def numbers(kind: type, *shape: int, seed: int = 1) -> np.ndarray:
    """Normal numbers, of complex ones both parts."""
    found = normal(*shape, seed=seed)
    return found if kind is np.float64 else found + 1j * normal(*shape, seed=seed + 1000)


def turned(kind: type, a: np.ndarray) -> np.ndarray:
    """A in other units of rows and columns, which are complex and multiply without rounding errors."""
    units = np.resize([1, 1 + 1j, 1j, -1], len(a)) if kind is np.complex128 else np.ones(len(a))
    return units[:, None] * a * np.roll(units, 1)


@pytest.fixture(name="instructions", params=LEVELS)
def _instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instructions up to those that this processor has."""
    kernels = core_of(request.param)
    for module in (compiled, factored):
        monkeypatch.setattr(module, "core", lambda: kernels)


U64 = 2.0**-53

pytestmark = pytest.mark.skipif(core() is None, reason="no compiled core")


def with_condition(n: int, condition: float, seed: int, kind: type = np.float64) -> np.ndarray:
    left, right = (np.linalg.qr(numbers(kind, n, n, seed=2 * seed + i))[0] for i in range(2))
    return (left * np.geomspace(1, 1 / condition, n)) @ right


def growing(n: int) -> np.ndarray:
    """Wilkinson's, whose elements double in each step of the elimination."""
    a = np.eye(n) - np.tril(np.ones((n, n)), -1)
    a[:, -1] = 1
    return a


HOPELESS = ("a column of zeros", "infinite", "nan", "zero")
"""Matrices for which no solution is accepted."""

EASY = ("times 1", f"times {2.0**-180}", f"times {2.0**190}", "condition 1e3", "condition 1e7")
NOT_HERMITIAN = ("symmetric", "diagonal of complex numbers")
OTHERS = (
    *(*NOT_HERMITIAN, "negative", "permutation", "growth", "singular"),
    *("rounded", "indefinite", "not symmetric"),
)


def some(matrices: dict[str, np.ndarray], n: int) -> dict[str, np.ndarray]:
    """All of a small order; of a large one some, as exact solutions take long."""
    names = matrices if n < 100 else [x for x in matrices if x in (*HOPELESS, *EASY, *OTHERS)]
    return {name: matrices[name] for name in names}


def hard(n: int, kind: type = np.float64) -> dict[str, np.ndarray]:
    a = numbers(kind, n, n, seed=n)
    scales = 10.0 ** np.linspace(-6, 6, n)
    found = {
        **{f"times {unit}": a * unit for unit in (1, 1e-300, 1e300, 2.0**-180, 2.0**190)},
        "rows": scales[:, None] * a,
        "columns": a * scales,
        "growth": turned(kind, growing(n)),
        **{
            f"condition 1e{e}": with_condition(n, 10.0**e, e, kind)
            for e in (3, 7, 10, 12, 13, 14, 15, 16, 18)
        },
        "permutation": turned(kind, np.eye(n)[::-1]),
        "negative": 0 * a - np.eye(n),
        "zero": 0 * a,
        "vandermonde": np.vander(np.linspace(0, 1, n)) + 1e-9 * a,
        "hilbert": turned(kind, 1.0 / (1 + np.arange(n)[:, None] + np.arange(n))),
    }
    for name in ("a column of zeros", "infinite", "nan", "singular", "nearly singular"):
        found[name] = a.copy()
    found["a column of zeros"][:, 0] = 0
    found["infinite"][0, -1], found["nan"][-1, 0] = np.inf, np.nan
    found["singular"][-1], found["nearly singular"][-1] = a[0], a[0] * (1 + 1e-14)
    return some(found, n)


def sides(matrices: Iterable[np.ndarray], kind: type = np.float64) -> np.ndarray:
    """One that x is moderate for, a random one, and one that most of x does not matter for."""
    with np.errstate(all="ignore"):
        found = [
            np.column_stack([a @ np.ones(len(a)), numbers(kind, len(a)), np.eye(len(a))[0]]) for a in matrices
        ]
    return np.nan_to_num(np.stack(found), posinf=1, neginf=1)


def accepted_of(found: compiled.CompiledSolutions, n: int, target: Format = FP64) -> np.ndarray:
    """The verdict on each system."""
    return np.asarray(Limits.for_shape((n, n), solve_bound(target, n), SURE).accept(found.evidence))


def check(found: compiled.CompiledSolutions, a: np.ndarray, b: np.ndarray) -> None:
    """Accepted solutions are as accurate as their errors say."""
    accepted = accepted_of(found, a.shape[1], FP32)
    for i in np.flatnonzero(accepted):
        errors = system(a[i], b[i]).errors(found.x[i].numpy(), a.shape[1])
        assert (errors <= found.forward_errors[i]).all()
        residual = np.abs(b[i] - a[i] @ found.x[i].numpy()).max(0)
        size = np.abs(a[i]).sum(1).max() * np.abs(found.x[i].numpy()).max(0) + np.abs(b[i]).max(0)
        slack = 2 * len(a[i]) ** 0.5 * U64
        assert (residual / size <= found.evidence.backward_error[i].item() + slack).all()


def as_batch(found: compiled.CompiledSolutions) -> compiled.CompiledSolutions:
    return found._replace(
        x=found.x[None], forward_errors=found.forward_errors[None], numbers=found.numbers[:, None]
    )


@pytest.mark.parametrize("n", [1, 2, 5, 8, 9, 16, 17, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_hard_systems(n: int, kind: type, instructions: None) -> None:
    matrices = hard(n, kind)
    a, b = np.stack(list(matrices.values())), sides(matrices.values(), kind)
    found = compiled.solved(*map(torch.from_numpy, (a, b)), torch.float64, U64 / 2)
    assert found is not None
    check(found, a, b)
    accepted = dict(zip(matrices, accepted_of(found, n).tolist(), strict=True))
    assert not any(accepted[name] for name in HOPELESS)
    assert n == 1 or not accepted["singular"]
    assert all(accepted[name] for name in (*EASY, "negative"))


def definite(n: int, kind: type = np.float64) -> dict[str, np.ndarray]:
    """Definite matrices, and some that are not."""
    q = np.linalg.qr(numbers(kind, n, n, seed=n))[0]

    def symmetric(eigenvalues: np.ndarray) -> np.ndarray:
        a = (q * eigenvalues) @ q.conj().T
        return (a + a.conj().T) / 2

    scales, good = 10.0 ** np.linspace(-6, 6, n), symmetric(np.linspace(1, 3, n))
    found = {f"times {unit}": good * unit for unit in (1, 1e-300, 1e300, 2.0**-180, 2.0**190)}
    found |= {f"condition 1e{e}": symmetric(np.geomspace(1, 10.0**-e, n)) for e in (3, 7, 10, 12, 14, 16, 18)}
    found |= {"rows and columns": scales[:, None] * good * scales, "diagonal": 0 * good + np.diag(scales)}
    found["rounded"] = good * (1 + 2 * U64 * (np.arange(n) > np.arange(n)[:, None]))
    found |= {"negative": -good, "indefinite": symmetric(np.where(np.arange(n) == n // 2, -1e-3, 1.0))}
    found |= {"zero": 0 * good, "singular": symmetric(np.where(np.arange(n) == 0, 0.0, 1.0))}
    for name in ("not symmetric", "nan", "infinite"):
        found[name] = good.copy()
    found["not symmetric"][0, -1] += 1e-3 if n > 1 else -10
    if kind is np.complex128:
        found["symmetric"], found["diagonal of complex numbers"] = good.copy(), good.copy()
        found["symmetric"][0, -1] = found["symmetric"][-1, 0] = 1e-3j
        found["diagonal of complex numbers"][-1, -1] += 1e-3j
    found["nan"][-1, 0], found["infinite"][0, -1] = np.nan, np.inf
    return some(found, n)


@pytest.mark.parametrize(
    ("n", "kind"), [*itertools.product([1, 2, 5, 8, 9, 16, 17, 40], KINDS), (133, np.float64)]
)
@pytest.mark.parametrize("alone", [False, True])
def test_hard_definite_systems(n: int, alone: bool, kind: type, instructions: None) -> None:
    """If A is not symmetric, or not definite, a solution is not accepted, however accurate it is."""
    matrices = definite(n, kind)
    a, b = np.stack(list(matrices.values())), sides(matrices.values(), kind)
    accepted: list[bool] = []
    for part in np.split(np.arange(len(a)), len(a) if alone else 1):
        found = compiled.solved(
            *(torch.from_numpy(x[part]) for x in (a, b)),
            *(torch.float64, U64 / 2),
            definite=True,
        )
        assert found is not None
        check(found, a[part], b[part])
        accepted += accepted_of(found, n).tolist()
    known = dict(zip(matrices, accepted, strict=True))
    wrong = (*HOPELESS[1:], "negative", "indefinite", "not symmetric", *NOT_HERMITIAN)
    assert not any(known.get(name, False) for name in wrong)
    assert all(known[name] for name in (*EASY, "rounded"))


@pytest.mark.parametrize("kind", [np.float32, np.complex64])
@pytest.mark.parametrize(("asymmetry", "definite"), [(1.0, True), (1e4, False)])
def test_single_precision_is_symmetric_up_to_its_rounding_errors(
    asymmetry: float, definite: bool, kind: type, instructions: None
) -> None:
    """``X^T X`` of a matrix product is not symmetric to the last bit."""
    n, u = 20, 2.0**-24
    a = np.eye(n) + asymmetry * u * np.triu(np.ones((n, n)), 1)
    a, b = torch.from_numpy(a.astype(kind)), torch.ones(n, 1)
    found = compiled.solved(a, b, torch.float32, u / 2, definite=True)
    assert found is not None
    assert bool(found.evidence.doubtful == 0) is definite


def accepted_by_factors(
    matrices: dict[str, np.ndarray], n: int, kind: type, *, single: bool, **how: Any
) -> set[str]:
    """Names of those whose solutions are accepted, each of which is as good as is said."""
    accepted = set()
    for (name, a), b in zip(matrices.items(), sides(matrices.values(), kind), strict=True):
        with np.errstate(all="ignore"):
            found = factored.solved_by_factors(
                *map(torch.from_numpy, (a, b)),
                torch.float64,
                single=single,
                **how,
            )
        if found is not None and bool(accepted_of(found, n, FP32 if single else FP64)):
            accepted.add(name)
            check(as_batch(found), a[None], b[None])
    return accepted


@pytest.mark.parametrize(("n", "kind"), [*itertools.product([9, 40], KINDS), (133, np.float64)])
@pytest.mark.parametrize(
    "how", [{"single": True}, {"single": False}, {"single": False, "doubled": False}], ids=str
)
def test_hard_systems_with_factors(n: int, kind: type, how: dict[str, bool], instructions: None) -> None:
    accepted = accepted_by_factors(hard(n, kind), n, kind, **how)
    assert not accepted.intersection([*HOPELESS, "singular"])
    assert accepted >= {"times 1", "condition 1e3", "negative", "permutation"}


@pytest.mark.parametrize(
    ("n", "kind"), [*itertools.product([1, 2, 9, 33], KINDS), *((n, np.float64) for n in (31, 40, 133))]
)
@pytest.mark.parametrize("single", [False, True])
def test_hard_definite_systems_with_factors(n: int, kind: type, single: bool, instructions: None) -> None:
    """Solutions are as good as is said, and there are none for matrices that are not definite."""
    accepted = accepted_by_factors(definite(n, kind), n, kind, single=single, definite=True)
    assert not accepted.intersection([*HOPELESS, "negative", "indefinite"])
    assert accepted >= {"times 1", "condition 1e3"}


def check_large(a: torch.Tensor, b: torch.Tensor, single: bool, **how: bool) -> compiled.CompiledSolutions:
    """Solve by factors, and compare with LAPACK, which errs by some n u here."""
    found = factored.solved_by_factors(a, b, a.dtype, single=single, **how)
    assert found is not None
    assert bool(accepted_of(found, len(a), FP32 if single else FP64))
    exact = torch.linalg.solve(in_double(a), in_double(b))
    assert (scaled_errors(a, found.x, exact) <= found.forward_errors + 1e3 * len(a) * U64).all()
    return found


@pytest.fixture(params=[1, 3, 64])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many, also for small systems."""
    monkeypatch.setattr(factored, "THREADED", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("n", [250, 530])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_threads_share_a_definite_system(
    n: int, single: bool, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lines, and what becomes of the factor: `L D^-1` and `D L^T`, whose product is A."""
    rooms: list[torch.Tensor] = []
    factorize = factored.cholesky_in_place

    def seen(a: torch.Tensor) -> bool:
        rooms.append(a)
        return factorize(a)

    monkeypatch.setattr(factored, "cholesky_in_place", seen)
    half, u = torch.from_numpy(numbers(kind, n, n, seed=n)), (FP32 if single else FP64).u
    dtype = matching_dtype(torch.float32 if single else torch.float64, half.dtype)
    a = (half @ half.mH / n + torch.eye(n)).to(dtype)
    found = check_large(a, torch.from_numpy(numbers(kind, n, 2, seed=1)).to(dtype), single, definite=True)
    assert found.named()["growth"] == 1
    factors = in_double(rooms[0])
    lower, upper = factors.tril(-1) + torch.eye(n), factors.triu()
    assert ((lower @ upper - in_double(a).mT).abs() <= 2 * n * u * (lower.abs() @ upper.abs())).all()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("n", [250, 530])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_threads_share_a_system(n: int, single: bool, kind: type) -> None:
    """Its lines, in stripes of which there are several; elements of U beyond all others are seen wherever."""
    b = torch.from_numpy(numbers(kind, n, 3))
    dtype = matching_dtype(torch.float32 if single else torch.float64, b.dtype)
    for large in (None, (1, n - 1), (n - 2, n - 1)):
        a = torch.from_numpy(numbers(kind, n, n, seed=n)).to(dtype)
        if large is not None:
            a[large] = 100  # U has it where no pivot has passed, as P L U = A^T
        found = check_large(a, b.to(dtype), single)
        upper = torch.linalg.lu_factor(a.mT)[0].triu()
        growth = float(largest_part(upper) / largest_part(a))
        assert found.named()["growth"] == pytest.approx(growth, rel=1e-2)


@pytest.mark.filterwarnings("ignore::neula.AccuracyWarning")
@pytest.mark.parametrize("n", [1, 3, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_many_right_hand_sides(n: int, kind: type) -> None:
    """They are not refined one by one: errors are bounded by plain residuals."""
    a, b = numbers(kind, n, n), numbers(kind, n, 32768 // n + 9)
    found, refined = neula.solve(a, b), neula.solve(a, b, certify="forward")
    assert found.converged
    assert refined.converged
    assert [attempt.method for attempt in found.attempts] == ["lu fp64 with pivoting"]
    assert refined.forward_error < found.forward_error < 1e-6
    some = slice(None, None, 1000)
    errors = System(a, b[:, some]).errors(found.x[:, some], n)
    assert (errors <= found.forward_errors[some]).all()
    spoilt = with_condition(n, 1e15, 3, kind) if n > 1 else a
    hard = neula.solve(spoilt, b)
    errors = System(spoilt, b[:, some]).errors(hard.x[:, some], n)
    assert not hard.converged or (errors <= hard.forward_errors[some]).all()


def largest_part(x: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(x) if x.is_complex() else x).abs().max()


@pytest.mark.parametrize("exponent", [3, 5, 6, 7])
def test_random_vectors_are_refined_where_factors_solve_badly(exponent: int) -> None:
    """Else they would not tell how well factors in single precision do, from condition 1e6 on."""
    a, b = torch.from_numpy(with_condition(60, 10.0**exponent, 5)), torch.from_numpy(normal(60, 1))
    found = factored.solved_by_factors(a, b, torch.float32, single=True)
    assert found is not None
    assert bool(accepted_of(found, 60, FP32)) or exponent == 7
    check(as_batch(found), a.numpy()[None], b.numpy()[None])


def test_a_system_is_solved_as_if_it_were_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is beside it, and however many threads there are."""
    monkeypatch.setattr(compiled, "THREADED", 0)
    for n, kind in itertools.product((6, 20, 27), KINDS):
        a, b = (torch.from_numpy(numbers(kind, 61, n, k)) for k in (n, 2))

        def solved(
            a: torch.Tensor, b: torch.Tensor, threads: int, monkeypatch: pytest.MonkeyPatch = monkeypatch
        ) -> compiled.CompiledSolutions:
            monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
            found = compiled.solved(a, b, torch.float64, U64 / 2)
            assert found is not None
            return found

        one = solved(a, b, 1)
        assert accepted_of(one, n).all()
        for threads in (2, 5, 100):
            several = solved(a, b, threads)
            assert torch.equal(several.x, one.x)
            assert np.array_equal(several.numbers, one.numbers)
            assert np.array_equal(several.forward_errors, one.forward_errors)
        spoilt = a.clone()
        spoilt[::2] = torch.nan
        beside = solved(spoilt, b, 3)
        assert torch.equal(beside.x[1::2], one.x[1::2])
        assert accepted_of(beside, n).tolist() == [i % 2 == 1 for i in range(61)]


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda a: a,
    "columns": lambda a: a.mT.contiguous().mT,
    "strided": lambda a: torch.zeros(*(2 * s for s in a.shape), dtype=a.dtype)[
        tuple(slice(None, None, 2) for _ in a.shape)
    ].copy_(a),
    "negative": lambda a: torch.view_as_real(torch.complex(a, -a).conj().resolve_conj())[..., 1],
    "conjugate": lambda a: a.conj(),
    "one for all": lambda a: a[:1].expand(a.shape) if a.ndim == 3 else a,
}


REAL, COMPLEX = (torch.float64, torch.float32), (torch.complex128, torch.complex64)


@pytest.mark.parametrize(
    ("view", "dtype"),
    [
        *itertools.product([x for x in VIEWS if x != "conjugate"], REAL),
        *itertools.product([x for x in VIEWS if x != "negative"], COMPLEX),
    ],
)
@pytest.mark.parametrize("shape", [(7,), (30,), (240,), (5, 7), (5, 30)])
def test_views(view: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    kind = np.complex128 if dtype.is_complex else np.float64
    a, b = (torch.from_numpy(numbers(kind, *shape, k)).to(dtype) for k in (shape[-1], 2))
    seen, right = VIEWS[view](a), VIEWS[view](b)
    found, expected = neula.solve(seen, right), neula.solve(seen.clone(), right.clone())
    assert found.converged
    single = dtype in (torch.float32, torch.complex64)
    assert torch.allclose(found.x, expected.x, rtol=1e-5 if single else 1e-9)
    exact = torch.linalg.solve(in_double(seen), in_double(right))
    assert torch.allclose(in_double(found.x), exact, rtol=1e-4 if single else 1e-9)


class WithoutMemory:
    system_evidence = core().system_evidence if core() else {}

    def systems_setting(self, *_: Any, **__: Any) -> None:
        return None

    def solve_systems(self, *_: Any) -> bool:
        return False


def test_where_memory_does_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that says so is one that is not there."""
    monkeypatch.setattr(compiled, "core", WithoutMemory)
    assert neula.solve(normal(5, 5), normal(5)).converged
