"""Ranks and estimates of singular values against LAPACK's."""

from __future__ import annotations

import math

import pytest
import torch

from neula.algorithms.spectra import numerical_rank
from neula.algorithms.spectra.numerical_rank import (
    columns_of_norm_one,
    largest_singular_values,
    numerical_ranks,
    smallest_singular_values,
)
from neula.io.matrices import SPECTRA, random_matrix


def factors(kind: str, n: int, conds: tuple[float, ...]) -> torch.Tensor:
    matrices = [random_matrix(kind, 2 * n, n, cond=cond, seed=i) for i, cond in enumerate(conds)]
    return torch.stack([torch.linalg.qr(a.double(), mode="r").R for a in matrices])


@pytest.mark.parametrize("kind", ["normal", *SPECTRA])
@pytest.mark.parametrize("n", [1, 5, 60, 200])
def test_estimates(kind, n):
    r = factors(kind, n, (10.0, 1e4, 1e8))
    s = torch.linalg.svdvals(r)
    largest, smallest = largest_singular_values(r), smallest_singular_values(r)
    rounding = 1 + 100 * n * 2.0**-53 * s[:, 0] / s[:, -1]
    assert (largest <= s[:, 0] * (1 + 1e-12)).all()
    assert (largest >= s[:, 0] / 2).all()
    assert (smallest >= s[:, -1] / rounding).all()
    # The tenth root of n, and twice that for a direction that is not quite the usual one.
    assert (smallest <= 2 * n**0.1 * s[:, -1] * rounding).all()


def test_complex_matrices_whose_transpose_times_them_vanishes():
    r = torch.tensor([[[1, 2], [1j, 2j]]], dtype=torch.complex128)
    assert largest_singular_values(r).tolist() == pytest.approx([math.sqrt(10)])


@pytest.mark.parametrize("kind", ["normal", *SPECTRA])
@pytest.mark.parametrize("n", [1, 5, 60])
@pytest.mark.parametrize("exact_columns", [1024, 0])
def test_ranks(kind, n, exact_columns, monkeypatch):
    monkeypatch.setattr(numerical_rank, "EXACT_COLUMNS", exact_columns)
    r = factors(kind, n, (10.0, 1e4, 1e8, 1e12))
    s = torch.linalg.svdvals(r)
    for rcond in (1e-14, 3e-10, 3e-6, 3e-3):
        expected = (s > rcond * s[:, :1]).sum(1)
        assert torch.equal(numerical_ranks(r, rcond), expected)
        estimated = numerical_ranks(r, rcond, exact=False)
        assert torch.equal(estimated, expected if exact_columns else expected.clamp_min(n - 1))


def test_what_is_smaller_than_an_error_does_not_count():
    r = torch.diag(torch.tensor([1.0, 1e-3, 1e-6])).repeat(3, 1, 1)
    assert numerical_ranks(r, 1e-9, torch.tensor([0.0, 1e-4, 0.5])).tolist() == [3, 2, 1]


@pytest.mark.parametrize("n", [3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singular_zero_and_not_finite(n, dtype):
    r = torch.eye(n, dtype=dtype).repeat(5, 1, 1)
    r[1, n - 1, n - 1] = 0
    r[2] = 0
    r[3, 0, 1] = math.nan
    r[4, 0, 1] = math.inf
    for matrices in (r, columns_of_norm_one(r)):
        assert numerical_ranks(matrices, 1e-6).tolist() == [n, n - 1, 0, n, n]
    assert smallest_singular_values(r)[1:3].tolist() == [0, 0]


def test_columns_of_any_size_have_norm_one():
    r = torch.tensor([[[1e-30, 3e30, 0.0], [0.0, 4e30, 0.0]]])
    torch.testing.assert_close(columns_of_norm_one(r), torch.tensor([[[1.0, 0.6, 0.0], [0.0, 0.8, 0.0]]]))
