"""How arrays reach the least-squares kernel of the core; ``test_seminormal.py`` tests its numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from by_seminormal import solved
from neula.algorithms.krylov.batched_lstsq import limits_of
from neula.kernels.small_problems.seminormal_host import NUMBERS, Probes, SeminormalHostSolutions

U = 2.0**-53
LIMITS = limits_of(U / 2, 5)
SHAPES = [(1, 1), (5, 5), (9, 3), (33, 17), (70, 41), (3, 7), (17, 33)]


def by_core(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype = torch.float64) -> SeminormalHostSolutions:
    m, n = a.shape[-2:]
    probes = Probes(np.random.default_rng(1).standard_normal((n, 8)) / 8**0.5, 3.0, 8 * U)
    found = solved(a, b, dtype, LIMITS, rcond=max(m, n) * 2 * U, probes=probes)
    assert found is not None
    return found


def equal(one: SeminormalHostSolutions, other: SeminormalHostSolutions) -> bool:
    return all(
        np.array_equal(getattr(one, name).ravel(), getattr(other, name).ravel(), equal_nan=True)
        for name in ("x", "numbers", "forward_error", "residual_norm")
    )


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_strides_do_not_matter(shape: tuple[int, int], dtype: torch.dtype, rng: np.random.Generator) -> None:
    m, n = shape
    a, b = (torch.from_numpy(rng.standard_normal((2, m, k))).to(dtype) for k in (n, 3))
    a[1, :, -1] = a[1, :, 0]  # dependent columns, unless there is one
    known = by_core(a, b, dtype)
    gaps = torch.zeros(2, 2 * m, 3 * n, dtype=dtype)[:, ::2, ::3].copy_(a)
    assert equal(by_core(a.mT.contiguous().mT, b.mT.contiguous().mT, dtype), known)
    assert equal(by_core(gaps, b.double(), dtype), known)
    numbers = known.numbers.reshape(len(NUMBERS), 2)
    for i in range(2):  # nothing of a problem is left for the next one
        one = by_core(a[i], b[i], dtype)
        assert np.array_equal(one.x[0], known.x[i], equal_nan=True)
        assert np.array_equal(one.numbers[:, 0], numbers[:, i], equal_nan=True)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("number", [np.nan, np.inf, 1e300])
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_beyond_the_safe_range(
    number: float, shape: tuple[int, int], rng: np.random.Generator
) -> None:
    m, n = shape
    a, b = torch.from_numpy(rng.standard_normal((3, m, n))), torch.from_numpy(rng.standard_normal((3, m, 1)))
    a[1, m // 2, n // 2] = number
    found = by_core(a, b)
    numbers = dict(zip(NUMBERS, found.numbers.reshape(-1, 3).tolist(), strict=True))
    assert numbers["doubtful"] == [0, 1, 0]
    assert numbers["forward_error"][1] == np.inf
    assert np.isnan(found.x[1]).all()
    assert np.isfinite(found.x[[0, 2]]).all()


@pytest.mark.usefixtures("instructions")
def test_empty_batches_and_no_right_hand_sides() -> None:
    assert by_core(torch.ones(0, 3, 2), torch.ones(0, 3, 1)).x.shape == (0, 2, 1)
    assert by_core(torch.ones(2, 3, 1), torch.ones(2, 3, 0)).x.shape == (2, 1, 0)
