"""Norms of inverses from factors: how much errors of right-hand sides grow in solutions."""

from __future__ import annotations

from collections.abc import Callable, Generator

import torch

from neula.algorithms.elimination.lu_panels import blocks
from neula.algorithms.orthogonal.r_only import HALVED
from neula.engines.random_vectors import gaussian
from neula.kernels.magnitudes import two_norms
from neula.kernels.precision import adjoint_times

EXPLICIT = 64
"""Up to this order the inverse itself is formed, which takes a few calls, and its norm is bounded."""

STEPS = 2  # steps of the power method, each two solves, from a random start

NORM_STEPS = 3
"""Likewise for the factor itself: one singular value that is far from all others is found within a factor of
three with up to a million columns."""

SQUARINGS = 4  # of a Gram matrix, whose sixteenth power leaves its largest eigenvector
Solve = Callable[[torch.Tensor], torch.Tensor]


def inverse_norm(
    solve: Solve,
    solve_transposed: Solve,
    left: torch.Tensor,
    right: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``||diag(left) A^-1 diag(right)||_2``, within a factor of three, and a vector that shows it.

    The solvers find ``A^-1 x`` and ``A^-H x`` for the columns of x, shape (..., n, k); both diagonals have
    the shape (..., n, 1), the right one being an identity by default. For n up to :data:`EXPLICIT` the norm
    is from above, else by the power method from below. Of the vector, of norm 1, the product has nearly that
    norm.
    """
    n = left.shape[-2]
    if n <= EXPLICIT:
        identity = torch.eye(n, dtype=dtype, device=left.device).expand(*left.shape[:-1], n)
        inverse = left * solve(_scaled(right, identity))
        stack = inverse.reshape(-1, n, n)
        longest = two_norms(stack, 1).argmax(1)
        shown = identity.reshape(-1, n, n)[0, longest]
        return schatten_bounds(stack)[1].reshape(left.shape[:-2]), shown.reshape(left.shape)
    v = gaussian(n, 1, dtype, left.device, seed=20180417).expand(*left.shape[:-2], n, 1)
    for _ in range(STEPS):
        y = left * solve(_scaled(right, v))
        y = left * (y / two_norms(y, -2, keepdim=True))
        v = _scaled(right, solve_transposed(y))
    norm = two_norms(v, -2, keepdim=True)
    return norm[..., 0, 0], v / norm


def norm_of_triangle(r: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """``||R diag(columns)^-1||_2`` of a batch by the power method, from below, shape (batch, 1)."""
    v = gaussian(r.shape[-1], 1, r.dtype, r.device, seed=20180417).expand_as(columns)
    for _ in range(NORM_STEPS):
        v = v / two_norms(v, 1, keepdim=True)
        v = torch.bmm(r.mH, torch.bmm(r, v / columns)) / columns
    return two_norms(v, 1).sqrt()


def _scaled(diagonal: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return x if diagonal is None else diagonal * x


def symmetric_inverse_norm(
    left: torch.Tensor, right: torch.Tensor, count: int, dtype: torch.dtype = torch.float64
) -> Generator[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Estimate the inverse norm of one symmetric A, by two solves for several random vectors together.

    With ``C = B^T B`` for ``B = diag(left) A^-1 diag(right)`` and independent Gaussian g and h, the mean of
    ``(g^T C^2 h)^2`` is ``||C^2||_F^2``, the sum of the eighth powers of the singular values of B (Kong and
    Valiant, "Spectrum estimation from samples", Ann. Statist. 45, 2017). So the eighth root of what some
    pairs of vectors show is up to ``n^(1/8)`` times the norm if singular values are equal, 3.5 times at order
    24000. It is least where one of them is apart from the others: with six vectors it is then less than two
    thirds of the norm in four of a hundred cases, and less than a third in two of a hundred thousand.

    Shapes: left, right (n, 1). ``count``: vectors, some at least: what is said above is of six. ``dtype``: of
    the vectors; with complex ones estimates are more certain. Yields shape (n, count): right-hand sides, for
    A; their solutions are sent. Returns norm, shape (): at least a third of the norm, as likely as said, and
    up to some ``n^(1/8)`` times it; vector, shape (n, 1): of norm 1, the best combination of the vectors
    after a step of the power method.
    """
    g = gaussian(len(left), count, dtype, left.device, seed=20170101)
    z = left * (yield right * g)
    longest = z.abs().amax()
    y = right * (yield left * (z / longest))
    size = y.abs().amax()
    y = y / size
    gram = y.mH @ y
    # The largest eigenvector of the Gram matrix combines what the vectors have of the largest singular
    # vector of B; squares make the others vanish relative to it.
    power = gram
    for _ in range(SQUARINGS):
        power = power / power.abs().amax()
        power = power @ power
    best = power.index_select(1, power.diagonal().real.argmax()[None])
    vector = y @ best
    shown = size * two_norms(vector) / two_norms(z / longest @ best)
    pairs = torch.triu_indices(count, count, offset=1, device=gram.device)
    sampled = (longest * size).sqrt() * gram[pairs[0], pairs[1]].abs().square().mean() ** 0.125
    return torch.maximum(shown, sampled), vector / two_norms(vector)


def half_random(vector: torch.Tensor) -> torch.Tensor:
    """A vector of norm 1, half of which is the given one, of norm 1, and half random."""
    random = gaussian(len(vector), 1, vector.dtype, vector.device, seed=20260107)
    vector = vector + random / two_norms(random)
    return vector / two_norms(vector)


class SharedSolves:
    """Solves for other right-hand sides together with those that are requested: factors are read once.

    ``others``: yields right-hand sides, shape (..., n, m), and is sent their solutions.

    Examples
    --------
    >>> def others():
    ...     halves = yield torch.ones(1, 2)
    ...     print(halves)
    >>> solves = SharedSolves(lambda x: x / 2, others())
    >>> solves(torch.eye(1)), solves.finish()
    tensor([[0.5000, 0.5000]])
    (tensor([[0.5000]]), None)
    """

    def __init__(self, solve: Solve, others: Generator[torch.Tensor, torch.Tensor, None] | None) -> None:
        self._solve, self._others = solve, others
        self._waiting = None if others is None else next(others, None)

    @property
    def waits(self) -> bool:
        return self._waiting is not None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._waiting is None:
            return self._solve(x)
        count = x.shape[-1]
        found = self._solve(torch.cat([x, self._waiting], -1))
        self._go_on(found[..., count:])
        return found[..., :count]

    def finish(self) -> None:
        """Solve for the right-hand sides that no other solve has included."""
        while self._waiting is not None:
            self._go_on(self._solve(self._waiting))

    def _go_on(self, found: torch.Tensor) -> None:
        assert self._others is not None
        try:
            self._waiting = self._others.send(found)
        except StopIteration:
            self._waiting = None


def sampled_inverse_norm(z: torch.Tensor) -> torch.Tensor:
    """Estimate ``||A^-1||_2`` from ``Z = A^-1 G`` for Gaussian vectors G, without anything transposed.

    For independent Gaussian g and h, and ``B = A^-T A^-1``, the mean of ``(g^T B h)^2`` is ``||B||_F^2``
    (Kong and Valiant, "Spectrum estimation from samples", Ann. Statist. 45, 2017). The fourth root of it is
    the norm where one singular value dominates, and at most ``n^(1/4)`` times the norm where none does.

    ``z``, shape (..., n, k): two columns at least. Returns shape (...).

    Examples
    --------
    >>> g = torch.randn(50, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    >>> scales = torch.ones(50, 1, dtype=torch.float64)
    >>> scales[0] = 1e6
    >>> 1e6 / 3 < float(sampled_inverse_norm(scales * g)) < 3e6
    True
    """
    size, k = z.abs().amax((-2, -1)), z.shape[-1]
    z = z / size[..., None, None]
    gram = z.mH @ z
    pairs = torch.triu_indices(k, k, offset=1, device=z.device)
    return size * gram[..., pairs[0], pairs[1]].abs().square().mean(-1).sqrt().sqrt()


def norm_of(
    a: torch.Tensor, columns: torch.Tensor, vectors: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``||A diag(columns)^-1||_2``, estimated, shape (batch,), and ``A X`` for other vectors, if any, in
    ``vectors``.
    """
    n, x = a.shape[-1], columns[..., :0] if vectors is None else vectors
    if n <= EXPLICIT:
        return schatten_bounds(a / columns.mT)[0][:, 0], _times(a, x)
    start = gaussian(n, 1, a.dtype, a.device, seed=20180417) / columns
    images = _times(a, torch.cat([start, x], 2))
    image = images[..., :1]
    back = adjoint_times(a, image) / columns
    norm = torch.linalg.vector_norm
    return norm(back, dim=(1, 2)) / norm(image, dim=(1, 2)), images[..., 1:]


def _times(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``A X``, as a product that reads row-major matrices along their rows."""
    return (x.mT @ a.mT).mT


def schatten_bounds(a: torch.Tensor, *, upper: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """``||A||_2`` from below and from above, shape (batch, 1), by one product.

    With the Schatten 4-norm ``||A||_4`` they are ``||A||_4^2 / ||A||_F``, at least ``sqrt(2 / (1 +
    sqrt(n)))`` of it, and ``||A||_4``, at most ``n^(1/4)`` times as large. Large upper triangular matrices
    take fewer operations.
    """
    size = torch.linalg.matrix_norm(a)[:, None, None]
    scaled = a / torch.where(size > 0, size, 1.0)
    square = _gram_norm(scaled, upper=upper)[:, None]
    return size[..., 0] * square, size[..., 0] * square.sqrt()


def schatten_bounds_of_gram(gram: torch.Tensor, sizes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Schatten bounds of ``A D^-1`` from the lower triangle of the Gram matrix of A, in a few operations an
    element.

    ``sizes``, shape (batch, n, 1), are the diagonal of D.
    """
    norm = torch.linalg.vector_norm
    scaled = (gram / sizes / sizes.mT).tril_()
    diagonal = scaled.diagonal(dim1=1, dim2=2).real
    squares = 2 * norm(scaled, dim=(1, 2))[:, None].square() - norm(diagonal, dim=1, keepdim=True).square()
    square = squares.sqrt()
    return square / diagonal.sum(1, keepdim=True).sqrt(), square.sqrt()


def _gram_norm(a: torch.Tensor, *, upper: bool) -> torch.Tensor:
    """``||A^H A||_F``, shape (batch,); of a large triangle in eight blocks, a quarter of the operations."""
    n, norm = a.shape[-1], torch.linalg.matrix_norm
    if (1 + a.is_complex()) * n < HALVED or not upper:
        return norm(a.mH @ a)
    squares = torch.zeros(len(a), dtype=a.dtype.to_real(), device=a.device)
    for k in blocks(slice(0, n), -(-n // 8)):
        # A block of columns of the Gram matrix from the diagonal down, where the rest is its transpose.
        part = a[:, : k.stop, k.start :].mH @ a[:, : k.stop, k]
        squares += 2 * norm(part).square() - norm(part[:, : k.stop - k.start]).square()
    return squares.sqrt()
