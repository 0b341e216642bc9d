"""Test matrices: exact singular values, reproducible, and nobody else's random numbers are used."""

import math

import numpy as np
import pytest
import torch

from neula.matrices import ENTRIES, KINDS, SPECTRA, random_matrix, random_orthonormal, singular_values

U32, U64 = 2.0**-24, 2.0**-53
SHAPES = [(1, 1), (7, 1), (1, 7), (33, 33), (129, 7), (7, 129), (300, 257), (257, 300)]


@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize("n", [1, 2, 3, 7, 257])
@pytest.mark.parametrize("cond", [1.0, 10.0, 1e6, 1e15])
def test_spectra_run_from_one_to_one_over_cond(kind: str, n: int, cond: float) -> None:
    s = singular_values(kind, n, cond)
    assert s.shape == (n,)
    assert s.dtype == torch.float64
    assert s[0] == 1
    assert (s.diff() <= 0).all()
    if n > 1:
        assert float(s[-1]) == pytest.approx(1 / cond, rel=1e-14, abs=4 * U64)


def test_spectra_are_what_their_names_say() -> None:
    s = {kind: singular_values(kind, 5, 1e4) for kind in SPECTRA}
    assert s["geometric"].tolist() == pytest.approx([1, 1e-1, 1e-2, 1e-3, 1e-4], rel=1e-14)
    assert s["arithmetic"].tolist() == pytest.approx([1, 0.750025, 0.50005, 0.250075, 1e-4], rel=1e-11)
    assert s["cluster_small"].tolist() == [1, 1, 1, 1, 1e-4]
    assert s["cluster_large"].tolist() == [1, 1e-4, 1e-4, 1e-4, 1e-4]


@pytest.mark.parametrize("cond", [0.99, 0.0, -5.0, math.nan])
def test_a_condition_number_below_one_is_refused(cond: float) -> None:
    with pytest.raises(ValueError, match=f"a condition number is at least 1, got {cond}"):
        singular_values("geometric", 5, cond)
    with pytest.raises(ValueError, match="a condition number is at least 1"):
        random_matrix("arithmetic", 5, 5, cond=cond)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown spectrum 'normal'.*'geometric', 'arithmetic'"):
        singular_values("normal", 5, 10.0)
    with pytest.raises(ValueError, match=r"unknown kind of matrix 'hilbert'.*'uniform01', .*'cluster_large'"):
        random_matrix("hilbert", 5, 5)


@pytest.mark.parametrize(("m", "n"), [(0, 5), (5, 0), (-1, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_empty_matrices_are_refused(kind: str, m: int, n: int) -> None:
    with pytest.raises(ValueError, match=f"at least one row and one column, got {m} x {n}"):
        random_matrix(kind, m, n)


@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize(("m", "n"), SHAPES)
@pytest.mark.parametrize("cond", [1.0, 1e3, 1e10])
def test_singular_values_are_exact_to_rounding(kind: str, m: int, n: int, cond: float) -> None:
    """Two QR factorizations, each orthogonal to a multiple of ``sqrt(m) u``, and a product of k terms: by
    Weyl every singular value is off by no more than their sum.
    """
    k = min(m, n)
    a = random_matrix(kind, m, n, cond=cond, seed=3)
    assert a.shape == (m, n)
    assert a.dtype == torch.float64
    error = (torch.linalg.svdvals(a) - singular_values(kind, k, cond)).abs().max()
    assert error <= 4 * (math.sqrt(m) + math.sqrt(n) + k) * U64


@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize("cond", [1.0, 1e3, 1e5])
def test_singular_values_in_float32(kind: str, cond: float) -> None:
    a = random_matrix(kind, 300, 129, cond=cond, dtype=torch.float32)
    assert a.dtype == torch.float32
    error = (torch.linalg.svdvals(a.double()) - singular_values(kind, 129, cond)).abs().max()
    assert error <= 4 * (2 * math.sqrt(300) + 129) * U32


@pytest.mark.parametrize("kind", ENTRIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_random_entries_have_their_distribution(kind: str, dtype: torch.dtype) -> None:
    a = random_matrix(kind, 400, 250, dtype=dtype).double()
    low, high, mean, variance = {
        "uniform01": (0, 1, 1 / 2, 1 / 12),
        "uniform": (-1, 1, 0, 1 / 3),
        "normal": (-math.inf, math.inf, 0, 1),
    }[kind]
    assert low <= float(a.min()) <= float(a.max()) <= high
    # 1e5 entries: mean and variance within five standard deviations.
    assert float(a.mean()) == pytest.approx(mean, abs=5 * math.sqrt(variance / 1e5))
    assert float(a.var()) == pytest.approx(variance, rel=5 * math.sqrt(2 / 1e5))
    # Neighbours in a row and in a column are independent.
    centered = a - mean
    for x, y in ((centered[:, 1:], centered[:, :-1]), (centered[1:], centered[:-1])):
        assert float((x * y).mean()) == pytest.approx(0, abs=5 * variance / math.sqrt(1e5 * 0.99))


@pytest.mark.parametrize("kind", KINDS)
def test_seeds(kind: str) -> None:
    a = random_matrix(kind, 40, 30, seed=5)
    assert torch.equal(a, random_matrix(kind, 40, 30, seed=5))
    assert not torch.equal(a, random_matrix(kind, 40, 30, seed=6))
    torch.manual_seed(99)
    torch.rand(7)
    assert torch.equal(a, random_matrix(kind, 40, 30, seed=5)), "whatever the global generator did"


@pytest.mark.parametrize("kind", KINDS)
def test_global_state_is_left_alone(kind: str) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    random_matrix(kind, 40, 30)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("default", [torch.float16, torch.float64])
def test_the_users_defaults_do_not_matter(kind: str, default: torch.dtype) -> None:
    expected = random_matrix(kind, 40, 30)
    torch.set_default_dtype(default)
    try:
        with torch.device("meta"):  # a default device that cannot compute: whoever uses it fails
            a = random_matrix(kind, 40, 30)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(a, expected)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (300, 1), (33, 33), (300, 129)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_random_orthonormal(m: int, n: int, dtype: torch.dtype) -> None:
    q = random_orthonormal(m, n, torch.Generator().manual_seed(1), dtype).double()
    u = U32 if dtype == torch.float32 else U64
    identity = torch.eye(n, dtype=torch.float64)
    assert q.shape == (m, n)
    assert torch.linalg.matrix_norm(q.T @ q - identity, 2) <= 4 * (math.sqrt(m) + n) * u


def test_singular_vectors_have_no_preferred_direction() -> None:
    """The leading right singular vector of 200 matrices: every coordinate squared is 1/n on average."""
    n = 5
    squares = torch.zeros(n, dtype=torch.float64)
    for seed in range(200):
        a = random_matrix("cluster_large", 8, n, cond=1e6, seed=seed)
        squares += torch.linalg.svd(a).Vh[0].square() / 200
    # Variance of a squared coordinate: 2 (n - 1) / (n^2 (n + 2)); five standard deviations of the mean.
    spread = math.sqrt(2 * (n - 1) / (n**2 * (n + 2)) / 200)
    assert (squares - 1 / n).abs().max() <= 5 * spread
