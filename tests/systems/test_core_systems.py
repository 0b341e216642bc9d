"""The compiled core refuses systems whose arrays do not fit one another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from capabilities import LEVELS, core_of
from neula._core import Core, LargeSystem, SystemsSetting

N, K, NUMBERS = 9, 2, 14


def setting_of(core: Core, n: int = N, count: int = 5) -> SystemsSetting:
    return core.systems_setting(np.ones((count, n)), 8 * [1.0])


def test_names_are_places_of_all_numbers() -> None:
    places = core_of("baseline").system_evidence
    taken = [first + i for first, count in places.values() for i in range(count)]
    assert taken == list(range(NUMBERS))


SMALL: dict[str, dict[str, Any]] = {
    "not square": {"a": np.ones((N, N + 1))},
    "other rows": {"b": np.ones((N + 1, K))},
    "a batch for one": {"b": np.ones((1, N, K))},
    "no dimension": {"a": np.ones(N)},
    "a number": {"a": np.array(1.0), "b": np.array(1.0)},
    "empty": {"a": np.ones((0, 0)), "b": np.ones((0, K))},
    "no right-hand side": {"b": np.ones((N, 0))},
    "short x": {"x": np.ones((N - 1, K))},
    "few errors": {"errors": np.ones((1, K - 1))},
    "few numbers": {"numbers": np.ones((NUMBERS - 1, 1))},
    "long vectors": {"vectors": N + 1},
}


def small(core: Core, vectors: int = N, **other: np.ndarray) -> bool:
    arrays = {"a": np.eye(N), "b": np.ones((N, K)), "x": np.ones((N, K))}
    arrays |= {"errors": np.ones((1, K)), "numbers": np.ones((NUMBERS, 1)), **other}
    a, b, *memory = arrays.values()
    return core.solve_systems(a, b, setting_of(core, vectors), *memory, False, False, 1)  # type: ignore[arg-type,call-arg]


@pytest.mark.parametrize("kind", SMALL)
def test_small_systems(kind: str) -> None:
    core = core_of("baseline")
    assert small(core)
    with pytest.raises(ValueError, match=r".+"):
        small(core, **SMALL[kind])
    with pytest.raises(TypeError):
        small(core, a=np.eye(N, dtype=np.float16))


def test_types_of_numbers() -> None:
    core, of_complex = core_of("baseline"), np.ones((N, K), complex)
    assert small(core, a=np.eye(N) * 1j, x=of_complex)
    assert small(core, a=np.eye(N, dtype=np.complex64), b=of_complex, x=of_complex)
    with pytest.raises(ValueError, match="b must be real"):
        small(core, b=of_complex)
    for wrong in ({"a": np.eye(N) * 1j}, {"x": of_complex}, {"x": np.ones((N, K), np.float32)}):
        with pytest.raises(TypeError, match="x must be"):
            small(core, **wrong)
    with pytest.raises(TypeError, match="float64"):
        small(core, a=np.eye(N, dtype=np.clongdouble), x=of_complex)


LARGE: dict[str, dict[str, Any]] = {
    "no dimension": {"a": np.array(1.0)},
    "no contiguous rows": {"a": np.asfortranarray(np.arange(81.0).reshape(N, N))},
    "not square": {"a": np.ones((N, N + 1))},
    "other rows": {"b": np.ones((K, N + 1))},
    "few factors": {"factors": np.ones((N - 1, N))},
    "half factors": {"factors": np.ones((N, N), np.float16)},
    "complex factors": {"factors": np.ones((N, N), complex)},
    "b in single precision": {"b": np.ones((K, N), np.float32)},
    "no contiguous columns": {"b": np.asfortranarray(np.ones((K, N)))},
    "few pivots": {"pivots": np.ones(N - 1, np.int32)},
    "short x": {"x": np.ones((N - 1, K))},
    "few errors": {"errors": np.ones((1, K - 1))},
    "few numbers": {"numbers": np.ones((NUMBERS - 1, 1))},
    "few vectors": {"count": 4},
    "long vectors": {"vectors": N + 1},
}


def large(core: Core, vectors: int = N, count: int = 5, **other: np.ndarray) -> LargeSystem:
    arrays = {"a": np.eye(N), "b": np.ones((K, N)), "factors": np.ones((N, N))}
    arrays |= {"pivots": np.zeros(N, np.int32), "x": np.ones((N, K))}
    arrays |= {"errors": np.ones((1, K)), "numbers": np.ones((NUMBERS, 1)), **other}
    a, b, *memory = arrays.values()
    return core.large_system(a, b, setting_of(core, vectors, count), *memory, False, True, 1)  # type: ignore[arg-type,call-arg]


@pytest.mark.parametrize("kind", LARGE)
def test_large_systems(kind: str) -> None:
    core = core_of("baseline")
    assert large(core)
    with pytest.raises((ValueError, TypeError), match=r".+"):
        large(core, **LARGE[kind])


def test_pivots_are_rows() -> None:
    system = large(core_of("baseline"), pivots=np.full(N, N, np.int32))
    system.copy()
    with pytest.raises(ValueError, match="pivots"):
        system.solve(definite=False)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("n", [9, 40])
def test_a_vanishing_pivot_leaves_its_neighbours_alone(level: str, n: int) -> None:
    """Elimination ends early; the pivots behind are unknown, the workspace has those of another system."""
    core, rng = core_of(level), np.random.default_rng(n)
    a, x = rng.standard_normal((3, n, n)), rng.standard_normal((3, n, 1))
    a[1, :, n // 2] = 0.0
    errors, numbers, found = np.ones((3, 1)), np.ones((NUMBERS, 3)), np.ones((3 * n, 1))
    limits = 2.0**200, 16.0, 0.25, float(n), 1.0, 1.01, 3.0, np.inf
    setting = core.systems_setting(np.eye(n + 1, n) + np.eye(1, n), limits)
    assert core.solve_systems(a, a @ x, setting, found, errors, numbers, False, False, 1)
    doubtful = numbers[core.system_evidence["doubtful"][0]]
    assert doubtful.tolist() == [0.0, 1.0, 0.0]
    size = np.linalg.norm(np.linalg.inv(a[::2]), axis=(1, 2)) * np.linalg.norm(a[::2], axis=(1, 2))
    wrong = np.abs(found.reshape(3, n) - x[:, :, 0])[::2].max(1)
    assert (wrong <= 4 * n * 2.0**-53 * size * np.abs(x[::2]).max()).all()
