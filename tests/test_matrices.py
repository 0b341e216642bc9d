"""Test matrices: exact singular values, reproducible, and nobody else's random numbers are used."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

from neula.io.matrices import (
    KINDS,
    SPECTRA,
    hpl_ai_matrix,
    journal_bearing_matrix,
    no_pivoting_matrix,
    random_matrix,
    random_orthonormal,
    singular_values,
    torsion_matrix,
    wathen_matrix,
)

U32, U64 = 2.0**-24, 2.0**-53
SHAPES = [(1, 1), (7, 1), (1, 7), (33, 33), (129, 7), (7, 129), (300, 257), (257, 300)]


@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize("cond", [1.0, 10.0, 1e6, 1e15])
def test_spectra_run_from_one_to_one_over_cond(kind: str, cond: float) -> None:
    for n in (1, 2, 3, 7, 257):
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


@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize("cond", [1.0, 1e3, 1e10])
def test_singular_values_are_exact_to_rounding(kind: str, cond: float) -> None:
    """Two QR factorizations, each orthogonal to a multiple of ``sqrt(m) u``, and a product of k terms: by
    Weyl every singular value is off by no more than their sum.
    """
    for m, n in SHAPES:
        k = min(m, n)
        a = random_matrix(kind, m, n, cond=cond, seed=3)
        assert a.shape == (m, n)
        assert a.dtype == torch.float64
        error = (torch.linalg.svdvals(a) - singular_values(kind, k, cond)).abs().max()
        assert error <= 4 * (math.sqrt(m) + math.sqrt(n) + k) * U64


@pytest.mark.parametrize("kind", KINDS)
def test_seeds(kind: str) -> None:
    a = random_matrix(kind, 40, 30, seed=5)
    assert torch.equal(a, random_matrix(kind, 40, 30, seed=5))
    assert not torch.equal(a, random_matrix(kind, 40, 30, seed=6))
    torch.manual_seed(99)
    torch.rand(7)
    assert torch.equal(a, random_matrix(kind, 40, 30, seed=5)), "whatever the global generator did"


@pytest.mark.parametrize(("m", "n"), [(1, 1), (300, 1), (33, 33), (300, 129)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_random_orthonormal(m: int, n: int, dtype: torch.dtype) -> None:
    q = random_orthonormal(m, n, torch.Generator().manual_seed(1), dtype).double()
    u = U32 if dtype == torch.float32 else U64
    identity = torch.eye(n, dtype=torch.float64)
    assert q.shape == (m, n)
    assert torch.linalg.matrix_norm(q.T @ q - identity, 2) <= 4 * (math.sqrt(m) + n) * u


# ---------------------------------------------------------------- LU without pivoting


@pytest.mark.parametrize("n", [1, 2, 200])
def test_hpl_ai_matrix(n: int) -> None:
    a = hpl_ai_matrix(n, seed=5)
    off = a - n * torch.eye(n, dtype=torch.float64)
    assert (a.diagonal() == n).all()
    assert ((off >= 0) & (off < 1)).all()
    assert (a.sum(1) < 2 * n).all(), "diagonally dominant"
    assert torch.equal(a, hpl_ai_matrix(n, seed=5))


@pytest.mark.parametrize(
    ("n", "cond", "ratio"),
    [(1, 1.0, 0.5), (2, 1.5, 0.5), (50, 1.0, 0.5), (50, 10.0, 1.0), (100, 1e3, 0.5), (300, 1e6, 0.1)],
)
def test_the_condition_number_is_the_one_asked_for(n: int, cond: float, ratio: float) -> None:
    """Measured by inverting, which loses ``n cond u``."""
    a = no_pivoting_matrix(n, cond, ratio=ratio)
    assert float(torch.linalg.cond(a, math.inf)) == pytest.approx(cond, rel=4 * n * cond * U64 + 1e-9)


@pytest.mark.parametrize(("n", "cond"), [(100, 1e3), (200, 1e8)])
def test_no_pivoting_is_needed(n: int, cond: float) -> None:
    """No interchanges, constant L and U off the diagonal (up to ``n cond u``), elements that do not grow."""
    a = no_pivoting_matrix(n, cond)
    lu, pivots = torch.linalg.lu_factor(a)
    assert torch.equal(pivots, torch.arange(1, n + 1, dtype=torch.int32))
    below, above = lu[1:, 0], lu[0, 1:]
    expected = torch.ones(n, n).double().tril(-1) * below[0] + torch.ones(n, n).double().triu(1) * above[0]
    expected += torch.eye(n, dtype=torch.float64)
    assert (lu - expected).abs().max() <= n * cond * U64
    assert below[0] == pytest.approx(above[0] / 2)
    assert lu.abs().max() <= a.abs().max()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        *(
            (partial(singular_values, "geometric", 5, cond), f"a condition number is at least 1, got {cond}")
            for cond in (0.99, 0.0, -5.0, math.nan)
        ),
        (partial(random_matrix, "arithmetic", 5, 5, cond=0.5), "a condition number is at least 1"),
        (partial(singular_values, "normal", 5, 10.0), "unknown spectrum 'normal'.*'geometric', 'arithmetic'"),
        (
            partial(random_matrix, "hilbert", 5, 5),
            "unknown kind of matrix 'hilbert'.*'uniform01', .*'cluster_large'",
        ),
        *(
            (partial(random_matrix, kind, m, n), f"at least one row and one column, got {m} x {n}")
            for kind in KINDS
            for m, n in [(0, 5), (5, 0), (-1, 3)]
        ),
        (partial(no_pivoting_matrix, 10, 0.5), r"a condition number is at least 1, got 0\.5"),
        (partial(no_pivoting_matrix, 3, 1e6), r"a 3 x 3 matrix .* at most .*, got 1e\+06: pass a larger n"),
        (partial(no_pivoting_matrix, 10, 5.0, ratio=2), "ratio is above 0 and at most 1, got 2"),
        (partial(no_pivoting_matrix, 0, 5.0), "got n=0"),
        (partial(torsion_matrix, 0), "got size=0"),
        (partial(journal_bearing_matrix, -1), "got size=-1"),
        (partial(journal_bearing_matrix, 3, eccentricity=1), "eccentricity is at least 0 and below 1, got 1"),
        (partial(wathen_matrix, 0, 2), "got 0 x 2"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], torch.Tensor], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize(("nx", "ny"), [(1, 1), (2, 3), (5, 4)])
def test_wathen_matrix(nx: int, ny: int) -> None:
    """Wathen's theorem: scaled by its diagonal, its eigenvalues lie in [1/4, 9/2], whatever the densities."""
    a = wathen_matrix(nx, ny)
    n = 3 * nx * ny + 2 * nx + 2 * ny + 1
    assert a.shape == (n, n)
    assert torch.equal(a, a.T)
    scale = a.diagonal().rsqrt()
    eigenvalues = torch.linalg.eigvalsh(scale[:, None] * a * scale)
    assert 0.25 - n * U64 * 8 <= eigenvalues[0]
    assert eigenvalues[-1] <= 4.5 + n * U64 * 8
    # A node couples with the others of its elements: 8 squared for each, less what neighbours share.
    shared = 9 * (nx * (ny - 1) + ny * (nx - 1)) - (nx - 1) * (ny - 1)
    assert (a != 0).sum() == 64 * nx * ny - shared
    assert 3 * 100 * 120 + 2 * 220 + 1 == 36441, "the order of wathen120"


@pytest.mark.parametrize("size", [1, 2, 7])
def test_torsion_matrix_has_the_eigenvalues_of_the_laplacian(size: int) -> None:
    a = torsion_matrix(size)
    one = 4 * torch.sin(torch.arange(1, size + 1).double() * math.pi / (2 * (size + 1))) ** 2
    expected = (one[:, None] + one).reshape(-1).sort().values
    assert torch.equal(a, a.T)
    assert (a.diagonal() == 4).all()
    assert (torch.linalg.eigvalsh(a) - expected).abs().max() <= 8 * size**2 * U64


@pytest.mark.parametrize("size", [1, 2, 7])
def test_journal_bearing_matrix(size: int) -> None:
    """Without eccentricity it is a Laplacian; with it, an edge has the weights of its two triangles."""
    a = journal_bearing_matrix(size)
    aspect = 20 / (2 * math.pi)
    assert torch.equal(a, a.T)
    assert torch.linalg.eigvalsh(a)[0] > 0
    plain = journal_bearing_matrix(size, eccentricity=0.0)
    assert (plain.diagonal() - 2 * (aspect + 1 / aspect)).abs().max() <= 8 * U64
    if size > 1:
        w = [(1 + 0.1 * math.cos(2 * math.pi * i / (size + 1))) ** 3 for i in range(4)]
        assert float(a[0, size]) == pytest.approx(-aspect * (w[1] + w[2]) / 2)
        assert float(a[0, 1]) == pytest.approx(-(w[0] + 4 * w[1] + w[2]) / 6 / aspect)
        assert a[0, size + 1] == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_matrices_in_other_dtypes_are_rounded_once(dtype: torch.dtype) -> None:
    for make in (lambda d: no_pivoting_matrix(20, 9.0, dtype=d), lambda d: torsion_matrix(3, dtype=d)):
        assert torch.equal(make(dtype), make(torch.float64).to(dtype))
    assert wathen_matrix(2, 2, dtype=dtype).dtype == journal_bearing_matrix(2, dtype=dtype).dtype == dtype
