"""Combinations of rows, exactly, beside rational numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flint import fmpq, fmpq_mat

from neula.algorithms.exact_combinations import beyond_combinations


def _rank(a: np.ndarray) -> int:
    return int(fmpq_mat(*a.shape, [fmpq(*float(x).as_integer_ratio()) for x in a.ravel()]).rank())


@pytest.mark.parametrize("seed", range(40))
def test_rational_numbers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p, n = int(rng.integers(1, 6)), 6
    rows, factors = rng.integers(-9, 10, (p, n)).astype(float), rng.integers(-9, 10, (20, p))
    others = factors @ rows
    others[::3, int(rng.integers(n))] += 2.0 ** -float(rng.integers(40, 1060))
    others[1::3] = np.ldexp(others[1::3], int(rng.integers(-900, 900)))
    if _rank(rows) < p:
        return
    expected = [i for i, row in enumerate(others) if _rank(np.vstack([rows, row])) > p]
    assert beyond_combinations(torch.tensor(rows), torch.tensor(others)) == expected


def test_factors_that_are_no_floating_point_numbers() -> None:
    """Thirds of sums of integers."""
    rows = torch.tensor([[1.0, 5.0, 2.0], [2.0, 1.0, 7.0]], dtype=torch.float64)
    third = (rows[0] + rows[1]) / 3
    assert beyond_combinations(rows, third[None]) == []
    third[1] = third[1].nextafter(torch.zeros((), dtype=torch.float64))
    assert beyond_combinations(rows, third[None]) == [0]


def test_nothing_is_beyond_all() -> None:
    assert beyond_combinations(torch.zeros(0, 3).double(), torch.eye(3).double()) == [0, 1, 2]
    assert beyond_combinations(torch.eye(3).double(), torch.zeros(0, 3).double()) == []
