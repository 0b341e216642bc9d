"""Shapes of A x = b against NumPy's, and the way there and back."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
import torch

from neula.pipeline.shapes import broadcast_system

LEADING = [(), (1,), (3,), (0,), (2, 1), (1, 3), (2, 3), (2, 0), (1, 1, 3)]


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def by_numpy(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    try:
        return np.broadcast_shapes(left, right)
    except ValueError:
        return None


@pytest.mark.parametrize("m", [0, 1, 4])
@pytest.mark.parametrize("k", [0, 1, 2])
def test_products_come_back_as_numpy_broadcasts_them(m, k):
    """With A^T b in place of a solution: what is computed of columns lands where NumPy has it."""
    n = 5
    for left, right in itertools.product(LEADING, LEADING):
        a, b = numbers(*left, m, n), numbers(*right, m, k)
        batch = by_numpy(left, right)
        if b.shape == a.shape[:-1]:
            continue
        if batch is None:
            with pytest.raises(ValueError, match="leading dimensions"):
                broadcast_system(a, b)
            continue
        system = broadcast_system(a, b)
        assert (system.batch, system.is_vector) == (batch, False)
        assert system.matrices.shape == (math.prod(left), m, n)  # each matrix once
        assert system.columns.shape[:2] == (math.prod(left), m)
        x = system.solutions(system.matrices.mT @ system.columns)
        assert x.shape == (*batch, n, k)
        torch.testing.assert_close(x, a.mT @ b, rtol=0, atol=1e-13)
        sums = system.of_columns(system.columns.sum(1))
        torch.testing.assert_close(sums, b.sum(-2).expand(*batch, k), rtol=0, atol=1e-14)
        size = system.of_members(system.matrices.sum((1, 2)))
        torch.testing.assert_close(size, a.sum((-2, -1)).expand(batch), rtol=0, atol=1e-14)


@pytest.mark.parametrize("left", LEADING)
@pytest.mark.parametrize("m", [0, 1, 4])
def test_one_dimension_is_a_vector_for_every_matrix(left, m):
    a, b = numbers(*left, m, 3), numbers(m)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        system = broadcast_system(a, b)
    assert (system.batch, system.is_vector) == (left, True)
    x = system.solutions(system.matrices.mT @ system.columns)
    torch.testing.assert_close(x, a.mT @ b, rtol=0, atol=1e-13)
    assert system.of_columns(system.columns.sum(1)).shape == left


def test_where_both_readings_fit_it_is_numpys():
    a, b = numbers(4, 4, 4), numbers(4, 4)
    with pytest.warns(
        FutureWarning, match=r"4 right-hand sides.*one vector.*pass b\[\.\.\., None\]"
    ) as caught:
        system = broadcast_system(a, b)
    assert caught[0].filename == __file__
    x = system.solutions(torch.linalg.solve(system.matrices, system.columns))
    np.testing.assert_allclose(x, np.linalg.solve(a.numpy(), b.numpy()[None]), rtol=1e-10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again, other = broadcast_system(a, b[None]), broadcast_system(a, b[..., None])
    assert torch.equal(again.columns, system.columns)
    assert other.columns.shape == (4, 4, 1)


@pytest.mark.parametrize("leading", [(3,), (2, 3), (0,)])
def test_where_only_torchs_reading_fits_it_holds_for_one_release(leading):
    a, b = numbers(*leading, 4, 4), numbers(*leading, 4)
    with pytest.warns(FutureWarning, match=r"next release.*pass b\[\.\.\., None\]"):
        system = broadcast_system(a, b)
    assert (system.batch, system.is_vector) == (leading, True)
    x = system.solutions(torch.linalg.solve(system.matrices, system.columns))
    torch.testing.assert_close(x, torch.linalg.solve(a, b), rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        ((4,), (4,), r"A must be a matrix.*1 dimension\(s\), shape \(4,\)"),
        ((), (4,), r"A must be a matrix.*0 dimension"),
        ((4, 3), (), r"b must be a vector.*0 dimension\(s\), shape \(\)"),
        ((4, 3), (5,), r"A is \(4, 3\), b is \(5,\), and A has 4 rows and b 5; b must have shape \(4,\)"),
        ((2, 4, 3), (5, 2), r"A has 4 rows and b 5; .*\(4,\), \(4, k\) or \(2, 4, k\)"),
        ((2, 4, 3), (3, 4, 1), r"dimensions \(2,\) and \(3,\) are not equal"),
        ((4, 3), (1, 4), r"A has 4 rows and b 1"),
    ],
)
def test_what_does_not_fit(left, right, message):
    with pytest.raises(ValueError, match=message):
        broadcast_system(torch.ones(left), torch.ones(right))


def test_gradients_pass():
    a, b = numbers(3, 1, 2, 2).requires_grad_(), numbers(4, 2, 1).requires_grad_()
    system = broadcast_system(a, b)
    x = system.solutions(torch.linalg.solve(system.matrices, system.columns))
    loss = torch.autograd.grad(x.square().sum(), (a, b))
    expected = torch.autograd.grad(torch.linalg.solve(a, b).square().sum(), (a, b))
    for ours, theirs in zip(loss, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
