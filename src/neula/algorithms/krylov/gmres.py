"""GMRES for several right-hand sides at once, in one space that all of them, and later ones, share.

Saad and Schultz, "GMRES: A Generalized Minimal Residual Algorithm for Solving Nonsymmetric Linear Systems",
SIAM J. Sci. Stat. Comput. 7, 1986; with blocks: Simoncini and Gallopoulos, "Convergence properties of block
GMRES and matrix polynomials", Linear Algebra Appl. 247, 1996. Each residual is minimized over what the Krylov
spaces of all right-hand sides span: what slows GMRES down, a few directions in which a preconditioner is
poor, has to be found only once. That serves residuals that are computed anew as well, so a restart costs
nothing (de Sturler, "Nested Krylov methods based on GCR", J. Comput. Appl. Math. 67, 1996).

The preconditioned basis is kept (Saad, "A flexible inner-outer preconditioned GMRES algorithm", SIAM J. Sci.
Comput. 14, 1993): then solutions are combinations of vectors whose images are known, and its rounding errors
do not come in again. Gram-Schmidt is classical and done twice, which is as orthogonal as Householder
reflections and consists of products (Giraud, Langou, Rozloznik, van den Eshof, "Rounding error analysis of
the classical Gram-Schmidt orthogonalization process", Numer. Math. 101, 2005).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from neula.kernels.cholesky.few_vectors import orthonormalizing
from neula.kernels.magnitudes import two_norms
from neula.kernels.small_problems.refining import over

Operator = Callable[[torch.Tensor], torch.Tensor]
"""Linear, of the columns of a matrix of shape (n, k)."""

HOPELESS_AFTER = 30
"""Iterations after which the rate of convergence can be trusted enough to give up. Where few singular values
of the preconditioned matrix are far from one, residuals are hardly smaller until those are done with."""

DEPENDENT = 1e-8
"""Part of a vector that others leave below which it depends on them: what is left would be rounding errors of
half of the digits."""

UNSEEN = 4
"""Iterations that may go by before residuals are read, for which the host waits."""

ROUNDS = 3
"""Of Cholesky QR: a vector of which others leave little is normalized in the second one, and all are
orthogonal to rounding errors after another."""

LARGEST = 512
"""Vectors of a space beyond which the next right-hand sides begin a new one."""


Array = NDArray[np.floating[Any]]


def ratio(a: Array, b: Array) -> Array:
    """``a / b``, 0 where both vanish."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((a == 0) & (b == 0), 0.0, a / b)


class ProjectedLeastSquares:
    """The least-squares problems ``min ||C - H Y||`` of GMRES, by reflections, on the host.

    C has the coefficients of right-hand sides in the basis of ``rows`` vectors, H those of images of its
    vectors; ``next`` are those that have no image yet. Vectors of the basis that are zero have none. All of
    it are arrays of a few hundred rows: NumPy works on them at once, where torch would wait for its threads.
    """

    def __init__(self) -> None:
        self.rows, self.next = 0, list[int]()
        self._zeros, self._used, self._images = set[int](), list[int](), 0
        # The product of all reflections so far, and the triangle that they have made of H, by columns.
        self._q: NDArray[Any] = np.zeros((0, 0))
        self._r: list[Array] = []

    def begin(self, coefficients: Array) -> Array:
        """Right-hand sides, and the vectors that they add to the basis; returns the relative residuals."""
        self._start = np.linalg.norm(coefficients, axis=0)
        self.next = self.next + self._grow(coefficients)
        self._rhs = self._q @ coefficients
        return self._residuals()

    def append(self, blocks: list[tuple[list[int], Array]]) -> Array:
        """Images of some vectors of the basis, and the vectors that they add to it, some blocks of them."""
        for columns, h in blocks:
            self._append(columns, h)
        return self._residuals()

    def _grow(self, h: Array) -> list[int]:
        """New vectors, whose coefficients are the last rows; returns those that are not zero."""
        k, first = h.shape[1], self.rows
        self.rows += k
        self._zeros |= {first + j for j in range(k) if h[first + j, j] == 0}
        q = np.eye(self.rows, dtype=h.dtype)
        q[:first, :first] = self._q
        self._q = q
        return [j for j in range(first, self.rows) if j not in self._zeros]

    def _append(self, columns: list[int], h: Array) -> None:
        self.next = self._grow(h)
        self._rhs = np.concatenate([self._rhs, np.zeros((len(columns), self._rhs.shape[1]), self._rhs.dtype)])
        places, size = [i for i, j in enumerate(columns) if j not in self._zeros], len(self._r)
        image = self._q @ h[:, places]
        rotation, triangle = np.linalg.qr(image[size:], mode="complete")
        self._q[size:] = rotation.conj().T @ self._q[size:]
        self._rhs[size:] = rotation.conj().T @ self._rhs[size:]
        image[size:] = triangle
        self._r += list(image.T)
        self._used += [self._images + i for i in places]
        self._images += len(columns)

    def _residuals(self) -> Array:
        sizes = np.linalg.norm(self._rhs[len(self._r) :], axis=0)
        return ratio(sizes, self._start)

    @np.errstate(over="ignore", invalid="ignore")  # not accepted unless finite
    def solve(self) -> Array:
        """Coefficients Y of all vectors that have images, shape (images, k)."""
        size = len(self._r)
        found, y = self._rhs[:size].copy(), np.zeros((self._images, self._rhs.shape[1]), self._rhs.dtype)
        for j in reversed(range(size)):  # LAPACK's has threads, which take longer to begin
            column = self._r[j]
            # Nothing is known in a direction that A maps to zero: any pivot will do.
            found[j] /= column[j] if column[j] != 0 else 1.0
            found[:j] -= column[:j, None] * found[j]
        y[self._used] = found
        return y


def gmres(
    operator: Operator, b: torch.Tensor, *, tolerance: float | torch.Tensor, max_iterations: int
) -> tuple[torch.Tensor, int]:
    """Minimize ``||b - A x||``, shape (n, k), over a space that grows until every column is small enough.

    The ``tolerance``, shape (k,), is relative to norms of b. It ends earlier as soon as the rate of
    convergence says that ``max_iterations`` will not be enough. Returns x, and how often the operator was
    applied.

    >>> a = torch.diag(torch.arange(1.0, 4.0, dtype=torch.float64))
    >>> x, iterations = gmres(lambda z: a @ z, torch.ones_like(a[:, :1]), tolerance=1e-12, max_iterations=9)
    >>> x[:, 0], iterations
    (tensor([1.0000, 0.5000, 0.3333], dtype=torch.float64), 3)
    """
    return Space(operator).solve(b, tolerance, max_iterations)


class Space:
    """Vectors, and their images in an orthonormal basis, over which residuals are minimized.

    ``multiply`` applies A, and ``precondition`` some ``A^-1``, not always quite the same.
    """

    def __init__(self, multiply: Operator, precondition: Operator = lambda v: v) -> None:
        self._multiply, self._precondition = multiply, precondition
        self._problem = ProjectedLeastSquares()

    def solve(
        self, b: torch.Tensor, tolerance: float | torch.Tensor, max_iterations: int
    ) -> tuple[torch.Tensor, int]:
        """As :func:`gmres`."""
        if self._problem.rows == 0 or self._problem.rows > min(LARGEST, len(b) // 2):
            self._problem = ProjectedLeastSquares()
            self._basis, self._vectors = _Columns(b), _Columns(b)
        v, coefficients = _orthonormalized(b, self._basis.all)
        residual = self._problem.begin(coefficients.cpu().numpy())
        self._basis.append(v)
        aim = torch.as_tensor(tolerance, dtype=b.dtype.to_real(), device="cpu").expand(b.shape[1]).numpy()
        iterations = self._extend(residual, aim, min(len(b), max_iterations))
        y = torch.from_numpy(self._problem.solve()).to(b)
        return self._vectors.all @ y, iterations

    def _extend(self, residual: Array, aim: Array, steps: int) -> int:
        """Let the space grow until residuals are small enough; returns the iterations that it took."""
        iterations, unread, rates = 0, 1, np.ones_like(residual)
        while iterations < steps and self._problem.next and goes_on(residual, aim, iterations, steps, rates):
            limit = HOPELESS_AFTER if iterations < HOPELESS_AFTER else steps
            unread = min(unread, min(limit, steps) - iterations)
            columns, blocks = self._problem.next, []
            for _ in range(unread):
                blocks.append((columns, self._step(columns)))
                columns = list(range(self._basis.count - len(columns), self._basis.count))
            before, residual = residual, self._problem.append(_on_host(blocks))
            rates = ratio(residual, before) ** (1 / unread)
            iterations, unread = iterations + unread, _unseen(residual, aim, rates)
        return iterations

    def _step(self, columns: list[int]) -> torch.Tensor:
        """Multiply some vectors of the basis, and let it grow; returns the coefficients of the images."""
        basis = self._basis.all
        # Mostly one after the other, and then not copied.
        whole = columns[-1] - columns[0] < len(columns)
        z = self._precondition(basis[:, columns[0] : columns[-1] + 1] if whole else basis[:, columns])
        v, h = _orthonormalized(self._multiply(z), basis)
        self._vectors.append(z)
        self._basis.append(v)
        return h


class _Columns:
    """A matrix that columns are appended to."""

    def __init__(self, like: torch.Tensor) -> None:
        self._storage, self.count = like.new_empty(0, len(like)), 0

    @property
    def all(self) -> torch.Tensor:
        """Matrix of all columns, column-major."""
        return self._storage[: self.count].T

    def append(self, x: torch.Tensor) -> None:
        """Columns of a matrix."""
        end = self.count + x.shape[1]
        if end > len(self._storage):
            storage = self._storage.new_empty(2 * end, self._storage.shape[1])
            storage[: self.count] = self._storage[: self.count]
            self._storage = storage
        self._storage[self.count : end] = x.T
        self.count = end


def _on_host(blocks: list[tuple[list[int], torch.Tensor]]) -> list[tuple[list[int], Array]]:
    """Copy all blocks to the host in one transfer."""
    flat = torch.cat([h.flatten() for _, h in blocks]).cpu().numpy()
    parts = np.split(flat, np.cumsum([h.numel() for _, h in blocks])[:-1])
    return [(columns, part.reshape(h.shape)) for (columns, h), part in zip(blocks, parts, strict=True)]


def goes_on(residual: Array, aim: Array, iterations: int, steps: int, rates: Array) -> bool:
    """Whether some columns are not done, and none is NaN, or too slow at the mean rate so far and the latest
    one, with which residuals fall once the few singular values that are far from one are done with.
    """
    columns = zip(residual.tolist(), aim.tolist(), rates.tolist(), strict=True)
    left = [(r, t, rate) for r, t, rate in columns if not r <= t]
    if not left or any(math.isnan(r) for r, *_ in left):
        return False
    rest = steps - iterations
    return iterations < HOPELESS_AFTER or not any(
        r * min(rate, r ** (1 / iterations)) ** rest > t for r, t, rate in left
    )


def _unseen(residual: Array, aim: Array, rates: Array) -> int:
    """Iterations until the next read: half of those that are missing at the latest rate."""
    wanted = np.log(ratio(aim, residual).clip(1e-300, 1.0))
    missing = float(np.nan_to_num(wanted / np.log(rates.clip(1e-300, math.exp(-1e-3)))).max())
    return max(1, min(UNSEEN, int(missing) // 2))


def _orthonormalized(w: torch.Tensor, basis: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Orthonormalize w, shape (n, k), against an orthonormal basis, shape (n, m), by Gram-Schmidt done twice.

    Returns an orthonormal v, zero where a column depends on the basis and the columns before, and h, shape (m
    + k, k), with ``w = [basis, v] h``, the last rows of which are upper triangular.
    """
    least = DEPENDENT * two_norms(w, 0)
    h = basis.mH @ w
    v = torch.addmm(w, basis, h, alpha=-1.0)
    again = basis.mH @ v
    v = torch.addmm(v, basis, again, alpha=-1.0)
    r = torch.eye(w.shape[1], dtype=w.dtype, device=w.device)
    for _ in range(ROUNDS):
        inverse, r, fails = orthonormalizing(v.mH @ v, r, least)
        v = v @ inverse
    r.diagonal().masked_fill_(fails.bool(), 0.0)
    return v.masked_fill(fails.bool(), 0.0), torch.cat([h + again, r])


Late = Callable[[], tuple[torch.Tensor, float] | None]
"""Right-hand sides that join now, shape (n, m), and their tolerance: m = 0 as long as they are not known.
None says that there will be none any more."""

Error = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From x and the residual, shape (n, k), how far each column is from being done, shape (k,)."""


def cg(
    operator: Operator,
    preconditioner: Operator,
    b: torch.Tensor,
    *,
    tolerance: float | torch.Tensor,
    max_iterations: int,
    late: Late | None = None,
    error: Error | None = None,
) -> tuple[torch.Tensor, int]:
    """Solve ``A x = b``, shape (n, k), until every column of the residual of the recurrence is small enough.

    A is Hermitian positive definite, and so is the ``preconditioner``, close to ``A^-1``. The ``tolerance``,
    shape (k,), is that of norms of residuals relative to b, or of what ``error`` makes of the columns of b.
    It ends earlier as soon as the rate of convergence says that ``max_iterations`` will not be enough.
    ``late`` is asked after each iteration for other right-hand sides, and iterations continue until all have
    joined: without them they might end before anything is seen of the smallest eigenvalues. Returns x, with
    more columns at the end where others have joined, and how often the operator was applied.

    >>> a = torch.diag(torch.arange(1.0, 4.0, dtype=torch.float64))
    >>> b = torch.ones_like(a[:, :1])
    >>> x, iterations = cg(lambda p: a @ p, lambda r: r, b, tolerance=1e-12, max_iterations=9)
    >>> x[:, 0], iterations
    (tensor([1.0000, 0.5000, 0.3333], dtype=torch.float64), 3)
    """
    aim = torch.as_tensor(tolerance, dtype=b.dtype.to_real(), device="cpu").expand(b.shape[1]).numpy()
    x, residual = torch.zeros_like(b), b
    start, k = two_norms(b, 0), b.shape[1]
    solved = preconditioner(residual)
    direction, product = solved, inner(residual, solved)
    iterations = 0
    while iterations < max_iterations:
        image = operator(direction)
        iterations += 1
        # A column that is done has no direction left: zero over zero is zero.
        step = over(product, inner(direction, image))
        x = x + step * direction
        residual = residual - step * image  # not in place: a preconditioner may return its argument
        left = over(two_norms(residual, 0), start)
        if error is not None:
            left[:k] = error(x[:, :k], residual[:, :k])
        joining = None if late is None else late()
        # NaN ends it too: the caller measures what came of it. Residuals go up and down, so that the latest
        # rate says nothing.
        if joining is None and not goes_on(
            left.cpu().numpy(), aim, iterations, max_iterations, np.ones_like(aim)
        ):
            break
        if joining is not None and joining[0].shape[1]:
            others, theirs = joining
            count = others.shape[1]
            # A direction of zeros before, so that their first one is what the preconditioner makes of them.
            x, direction = (pad(y, (0, count)) for y in (x, direction))
            product = pad(product, (0, count), value=1.0)
            residual, aim = torch.cat([residual, others], 1), np.append(aim, np.full(count, theirs))
            start = torch.cat([start, two_norms(others, 0)])
        solved = preconditioner(residual)
        before, product = product, inner(residual, solved)
        direction = solved + over(product, before) * direction
    return x, iterations


def inner(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Real parts of the inner products ``x^H y`` of columns: all of them where y is a Hermitian A times x."""
    return (x.conj() * y).sum(0).real
