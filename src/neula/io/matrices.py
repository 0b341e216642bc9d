"""Test matrices of the papers: for QR (HPDC 2020, section 4.2) and for LU (Lopez and Mary 2022, section 6).

Random matrices with chosen singular values are products ``U diag(s) V^H`` of random (Haar-distributed)
orthogonal or, in a complex dtype, unitary U and V, so their condition number is exact to rounding. Those for
LU need no pivoting.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from neula.errors import unknown_name
from neula.kernels.precision import exact_matmul

SPECTRA = ("geometric", "arithmetic", "cluster_small", "cluster_large")
ENTRIES = ("uniform01", "uniform", "normal")
KINDS = (*ENTRIES, *SPECTRA)


def singular_values(kind: str, n: int, cond: float) -> torch.Tensor:
    """Singular values from 1 down to ``1/cond``.

    Parameters
    ----------
    kind : {"geometric", "arithmetic", "cluster_small", "cluster_large"}
        Evenly spaced logarithms; evenly spaced values; all 1 but the smallest; all ``1/cond`` but the
        largest.
    n : int
        How many; a single one is 1.
    cond : float
        Condition number, at least 1.

    Returns
    -------
    Tensor, shape (n,)
        float64, descending.

    Raises
    ------
    ValueError
        For an unknown kind or a condition number below 1.

    Examples
    --------
    >>> singular_values("arithmetic", 3, 4.0)
    tensor([1.0000, 0.6250, 0.2500], dtype=torch.float64)
    """
    if kind not in SPECTRA:
        raise unknown_name("spectrum", kind, SPECTRA)
    if not cond >= 1:
        raise ValueError(f"a condition number is at least 1, got {cond}")
    position = torch.linspace(0, 1, n, dtype=torch.float64, device="cpu")
    if kind == "geometric":
        return cond**-position
    if kind == "arithmetic":
        return 1 - position * (1 - 1 / cond)
    s = torch.full((n,), 1.0 if kind == "cluster_small" else 1 / cond, dtype=torch.float64, device="cpu")
    s[0] = 1.0
    if n > 1:
        s[-1] = 1 / cond
    return s


# item: Q matrices
def random_matrix(
    kind: str,
    m: int,
    n: int,
    *,
    cond: float = 1e3,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> torch.Tensor:
    """A random m x n matrix of one of the papers' kinds.

    Parameters
    ----------
    kind : str
        ``"uniform01"`` (0, 1), ``"uniform"`` (-1, 1), ``"normal"``, or a spectrum: see
        :func:`singular_values`. The intervals are those of real and imaginary parts in a complex dtype, where
        normal numbers have a mean square of 1.
    m, n : int
    cond : float
        Condition number, for the kinds with a spectrum.
    dtype : torch.dtype
        The matrix is made in it: with float32 the condition number is exact up to about 1e6.
    device : torch.device or str
    seed : int

    Returns
    -------
    Tensor, shape (m, n)

    Raises
    ------
    ValueError
        For an unknown kind, or sizes below 1.
    """
    if kind not in KINDS:
        raise unknown_name("kind of matrix", kind, KINDS)
    if m < 1 or n < 1:
        raise ValueError(f"a matrix has at least one row and one column, got {m} x {n}")
    generator = torch.Generator(device).manual_seed(seed)
    if kind in ENTRIES:
        draw: Callable[..., torch.Tensor] = torch.randn if kind == "normal" else torch.rand
        a = draw(m, n, dtype=dtype, device=generator.device, generator=generator)
        return a.mul_(2).sub_(1 + 1j if dtype.is_complex else 1) if kind == "uniform" else a
    return with_spectrum(kind, cond, *singular_vectors(m, n, generator, dtype))


def singular_vectors(
    m: int, n: int, generator: torch.Generator, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random U and V of m x n matrices, on the generator's device."""
    k = min(m, n)
    return random_orthonormal(m, k, generator, dtype), random_orthonormal(n, k, generator, dtype)


def with_spectrum(kind: str, cond: float, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """``U diag(s) V^H`` with the singular values of :func:`singular_values`."""
    return exact_matmul(u * singular_values(kind, u.shape[1], cond).to(u), v.mH)


def random_orthonormal(m: int, n: int, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Random m x n matrix with orthonormal columns, m >= n, on the generator's device."""
    gaussian = torch.randn(m, n, dtype=dtype, device=generator.device, generator=generator)
    return torch.linalg.qr(gaussian)[0]


def definite_matrix(
    kind: str,
    n: int,
    *,
    cond: float = 1e3,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> torch.Tensor:
    """A random positive definite matrix, Hermitian in a complex dtype, with chosen eigenvalues.

    Parameters
    ----------
    kind : {"geometric", "arithmetic", "cluster_small", "cluster_large"}
        The eigenvalues: see :func:`singular_values`.
    n : int
    cond, dtype, device, seed
        As for :func:`random_matrix`.

    Returns
    -------
    Tensor, shape (n, n)
        ``U diag(s) U^H``, exactly Hermitian.
    """
    u = random_orthonormal(n, n, torch.Generator(device).manual_seed(seed), dtype)
    a = with_spectrum(kind, cond, u, u)
    return (a + a.mH) / 2


def fourier_matrix(angles: torch.Tensor, n: int) -> torch.Tensor:
    """Powers ``exp(i k angle)`` for k from 0 to n - 1: a Vandermonde matrix of points on the unit circle.

    Its columns are those of the discrete Fourier transform for ``angles = 2 pi j / n``; a row is the response
    of a uniform array of n antennas to a plane wave.

    Parameters
    ----------
    angles : Tensor, shape (m,)
        In radians; float32 or float64.
    n : int

    Returns
    -------
    Tensor, shape (m, n)
        complex64 or complex128.

    Examples
    --------
    >>> fourier_matrix(torch.tensor([0.0, torch.pi / 2]), 3).numpy().round(3) + 0.0
    array([[ 1.+0.j,  1.+0.j,  1.+0.j],
           [ 1.+0.j,  0.+1.j, -1.+0.j]], dtype=complex64)
    """
    k = torch.arange(n, dtype=angles.dtype, device=angles.device)
    return torch.polar(torch.ones_like(angles)[:, None].expand(-1, n), angles[:, None] * k)


# item: L HPL-AI
def hpl_ai_matrix(
    n: int, *, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu", seed: int = 0
) -> torch.Tensor:
    """The matrix of the HPL-AI benchmark: uniform on [0, 1), with n on the diagonal.

    Parameters
    ----------
    n : int
    dtype, device, seed
        As for :func:`random_matrix`.

    Returns
    -------
    Tensor, shape (n, n)
        Diagonally dominant.

    Raises
    ------
    ValueError
        For n below 1.
    """
    return random_matrix("uniform01", n, n, dtype=dtype, device=device, seed=seed).fill_diagonal_(n)


def no_pivoting_matrix(
    n: int,
    cond: float,
    *,
    ratio: float = 0.5,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """A dense matrix with chosen infinity-norm condition number and no need for pivoting.

    ``A = L U`` with ``-alpha`` everywhere below the unit diagonal of L, and ``-beta`` above that of U:
    partial pivoting interchanges no rows, and the elements do not grow. From M. Fasi and N. J. Higham,
    "Matrices with tunable infinity-norm condition number and no need for pivoting in LU factorization" (SIAM
    J. Matrix Anal. Appl. 42, 2021).

    Parameters
    ----------
    n : int
    cond : float
        ``||A|| ||A^-1||`` in the infinity norm.
    ratio : float
        ``alpha / beta``, above 0 and at most 1.
    dtype, device
        The matrix is made in float64 and rounded.

    Returns
    -------
    Tensor, shape (n, n)

    Raises
    ------
    ValueError
        For sizes below 1, a ratio out of range, or a condition number that no such matrix has: below 1 or,
        where elements of L would exceed 1, too large for n.

    Examples
    --------
    >>> a = no_pivoting_matrix(100, 1e3)
    >>> round(float(torch.linalg.cond(a, float("inf"))), 6)
    1000.0
    """
    if n < 1:
        raise ValueError(f"a matrix has at least one row and one column, got n={n}")
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio is above 0 and at most 1, got {ratio}")
    if not cond >= 1:
        raise ValueError(f"a condition number is at least 1, got {cond}")
    beta = _beta_of_condition(n, cond, ratio)
    alpha = ratio * beta
    index = torch.arange(n, dtype=torch.float64, device=device)
    smaller = torch.minimum(index[:, None], index)
    a = alpha * beta * smaller - beta
    a += (beta - alpha) * (index[:, None] > index).double()
    a.diagonal().copy_(1 + alpha * beta * index)
    return a.to(dtype)


def _beta_of_condition(n: int, cond: float, ratio: float) -> float:
    """Bisection: the condition number grows with beta from 1 at 0."""
    largest = _condition(n, 1.0, ratio)
    if not cond <= largest:
        raise ValueError(
            f"a {n} x {n} matrix without pivoting has a condition number of at most {largest:.3g}, "
            f"got {cond:.3g}: pass a larger n"
        )
    low, high = 0.0, 1.0
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if _condition(n, middle, ratio) < cond else (low, middle)
    return middle


def _condition(n: int, beta: float, ratio: float) -> float:
    """``||A|| ||A^-1||`` in the infinity norm, from O(n) row sums."""
    alpha = ratio * beta
    index = torch.arange(n, dtype=torch.float64, device="cpu")
    below = (alpha - alpha * beta * index).abs()
    row_sums = below.cumsum(0) - below + 1 + alpha * beta * index
    row_sums += (n - 1 - index) * (beta - alpha * beta * index).abs()
    # All elements of L^-1 and U^-1 are nonnegative, and the first row of A^-1 has the largest sum:
    # 1 + beta (1 + alpha) (q^(n-1) - 1) / (q - 1) with q = (1 + alpha) (1 + beta).
    growth = alpha + beta + alpha * beta
    exponent = (n - 1) * math.log1p(growth)
    if exponent > 700:
        return math.inf
    inverse = 1 + (beta * (1 + alpha) * math.expm1(exponent) / growth if growth else 0.0)
    return float(row_sums.max()) * inverse


def wathen_matrix(
    nx: int, ny: int, *, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu", seed: int = 0
) -> torch.Tensor:
    """Wathen's finite-element mass matrix with random densities, as a dense matrix.

    Eight-node serendipity elements on an nx x ny grid (A. J. Wathen, "Realistic eigenvalue bounds for the
    Galerkin mass matrix", IMA J. Numer. Anal. 7, 1987). ``wathen120`` of the SuiteSparse collection is 100 x
    120, with other random numbers.

    Parameters
    ----------
    nx, ny : int
        Elements in each direction: ``n = 3 nx ny + 2 nx + 2 ny + 1``.
    dtype, device, seed
        The matrix is made in float64 and rounded.

    Returns
    -------
    Tensor, shape (n, n)
        Symmetric positive definite.

    Raises
    ------
    ValueError
        For sizes below 1.
    """
    if nx < 1 or ny < 1:
        raise ValueError(f"a grid has at least one element in each direction, got {nx} x {ny}")
    generator = torch.Generator(device).manual_seed(seed)
    density = 100 * torch.rand(nx * ny, dtype=torch.float64, device=device, generator=generator)
    element = _wathen_element().to(device)
    nodes = _serendipity_nodes(nx, ny).to(device)
    n = 3 * nx * ny + 2 * nx + 2 * ny + 1
    a = torch.zeros(n, n, dtype=torch.float64, device=device)
    rows, columns = nodes[:, :, None].expand(-1, 8, 8), nodes[:, None, :].expand(-1, 8, 8)
    a.index_put_((rows, columns), density[:, None, None] * element, accumulate=True)
    return a.to(dtype)


def _wathen_element() -> torch.Tensor:
    """Mass matrix of one element, corners and midsides in turn around it, shape (8, 8)."""
    near = [[6, -6, 2, -8], [-6, 32, -6, 20], [2, -6, 6, -6], [-8, 20, -6, 32]]
    far = [[3, -8, 2, -6], [-8, 16, -8, 20], [2, -8, 3, -8], [-6, 20, -8, 16]]
    e1, e2 = (torch.tensor(block, dtype=torch.float64, device="cpu") for block in (near, far))
    return torch.cat([torch.cat([e1, e2], 1), torch.cat([e2.T, e1], 1)]) / 45


def _serendipity_nodes(nx: int, ny: int) -> torch.Tensor:
    """Numbers of the nodes of each element, counterclockwise from the upper right, shape (nx ny, 8).

    Nodes are numbered in rows: ``2 nx + 1`` on a line of the grid, then ``nx + 1`` between it and the next.
    """
    lines, columns = torch.arange(ny, device="cpu"), torch.arange(nx, device="cpu")
    j, i = (x.reshape(-1) for x in torch.meshgrid(lines, columns, indexing="ij"))
    bottom = j * (3 * nx + 2) + 2 * i
    middle = j * (3 * nx + 2) + 2 * nx + 1 + i
    top = bottom + 3 * nx + 2
    return torch.stack([top + 2, top + 1, top, middle, bottom, bottom + 1, bottom + 2, middle + 1], dim=1)


def torsion_matrix(
    size: int, *, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Elastic-plastic torsion of a square bar: the five-point Laplacian, as a dense matrix.

    The Hessian of problem TORSION1 (J. J. Moré and G. Toraldo, "On the solution of large quadratic
    programming problems with bound constraints", SIAM J. Optim. 1, 1991) in its free variables, of which
    ``torsion1`` of the SuiteSparse collection is the one on a 200 x 200 grid; that matrix keeps the fixed
    variables on the boundary.

    Parameters
    ----------
    size : int
        Interior points in each direction: ``n = size**2``.
    dtype, device
        The matrix is made in float64 and rounded.

    Returns
    -------
    Tensor, shape (n, n)
        Symmetric positive definite, with 4 on the diagonal.

    Raises
    ------
    ValueError
        For a size below 1.
    """
    _check_grid(size)
    ones = torch.ones(size + 1, dtype=torch.float64, device=device)
    return _five_point(ones, ones[1:]).to(dtype)


def journal_bearing_matrix(
    size: int,
    *,
    eccentricity: float = 0.1,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Pressure in a journal bearing: linear finite elements on triangles, as a dense matrix.

    The Hessian of problem JNLBRNG1 (J. J. Moré and G. Toraldo, 1991, as in MINPACK-2) in its free variables:
    ``-div(w grad p)`` with ``w = (1 + eccentricity cos t)^3`` on (0, 2 pi) x (0, 20). ``jnlbrng1`` of the
    SuiteSparse collection is the one on a 200 x 200 grid; that matrix keeps the fixed variables on the
    boundary.

    Parameters
    ----------
    size : int
        Interior points in each direction: ``n = size**2``.
    eccentricity : float
        Of the journal, from 0 to below 1.
    dtype, device
        The matrix is made in float64 and rounded.

    Returns
    -------
    Tensor, shape (n, n)
        Symmetric positive definite.

    Raises
    ------
    ValueError
        For a size below 1, or an eccentricity out of range.
    """
    _check_grid(size)
    if not 0 <= eccentricity < 1:
        raise ValueError(f"eccentricity is at least 0 and below 1, got {eccentricity}")
    angle = torch.linspace(0, 2 * math.pi, size + 2, dtype=torch.float64, device=device)
    weight = (1 + eccentricity * torch.cos(angle)) ** 3
    aspect = 20 / (2 * math.pi)
    # Each edge has a triangle on either side, with the mean weight of its three corners.
    across = aspect * (weight[:-1] + weight[1:]) / 2
    along = (weight[:-2] + 4 * weight[1:-1] + weight[2:]) / 6 / aspect
    return _five_point(across, along).to(dtype)


def _check_grid(size: int) -> None:
    if size < 1:
        raise ValueError(f"a grid has at least one interior point in each direction, got size={size}")


def _five_point(across: torch.Tensor, along: torch.Tensor) -> torch.Tensor:
    """Stiffness matrix of a square grid: ``across[i]`` couples lines i - 1 and i, ``along[i]`` those on i."""
    size = along.shape[0]
    identity = torch.eye(size, dtype=along.dtype, device=along.device)
    second_difference = 2 * identity - _neighbours(torch.ones_like(along[1:]))
    lines = torch.diag(across[:-1] + across[1:]) - _neighbours(across[1:-1])
    return torch.kron(lines, identity) + torch.kron(torch.diag(along), second_difference)


def _neighbours(weights: torch.Tensor) -> torch.Tensor:
    return torch.diag(weights, 1) + torch.diag(weights, -1)
