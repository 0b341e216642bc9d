"""NumPy's rules for the shapes of ``A x = b``: what leading dimensions mean, and when b is a vector."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from neula.errors import warn
from neula.pipeline.inputs import check_matrices, flattened

_NOTHING = torch.empty(0, 0, 0, dtype=torch.float32, device="cpu")


@dataclass(frozen=True, eq=False)
class BatchedProblem:
    """Problems ``A x = b`` with each matrix once, and all right-hand sides that go with it as its columns: no
    matrix is factorized twice. Views, or differentiable operations on what was given.
    """

    a: torch.Tensor  # shape (..., m, n): as given
    b: torch.Tensor  # shape (..., m, k): likewise; a vector as a column
    batch: tuple[int, ...]  # the leading dimensions of A and b, broadcast
    # Those of A, as many as in batch: where they are 1, right-hand sides are counted.
    members: tuple[int, ...]
    width: int  # columns of one right-hand side of the user's
    # Whether the right-hand sides were given as vectors: then x has no last dimension for them.
    is_vector: bool

    @cached_property
    def matrices(self) -> torch.Tensor:
        return flattened(self.a)

    @cached_property
    def columns(self) -> torch.Tensor:
        """The right-hand sides of each matrix, shape (P, m, K). They may share memory: write to a copy."""
        b = self.b if self.b.shape[:-2] == self.batch else self.b.expand(*self.batch, *self.b.shape[-2:])
        if self.all_own:
            return flattened(b)
        shape = math.prod(self.members), b.shape[-2], self.copies * self.width
        return b.permute(self._order).reshape(shape)

    def without_numbers(self) -> BatchedProblem:
        """The shapes alone, so that no matrix is kept in memory."""
        return BatchedProblem(_NOTHING, _NOTHING, self.batch, self.members, self.width, self.is_vector)

    def solutions(self, x: torch.Tensor) -> torch.Tensor:
        """Solutions, shape (P, n, K), as the user expects them, shape (*batch, n) or (*batch, n, k)."""
        return self._without_last(self._unfolded(x, self.width))

    def of_columns(self, e: torch.Tensor) -> torch.Tensor:
        """Reshape values of each right-hand side, shape (P, K), to shape (*batch,) or (*batch, k)."""
        return self._without_last(self._unfolded(e.unsqueeze(1), self.width).squeeze(-2))

    def of_members(self, e: torch.Tensor) -> torch.Tensor:
        """Reshape values of each matrix, shape (P,), to shape (*batch,): for all problems that share it."""
        e = e.reshape(self.members)
        return e if self.all_own else e.expand(self.batch)

    @property
    def finite(self) -> torch.Tensor:
        """Which of the right-hand sides that share a matrix hold neither NaN nor Inf, shape (P, copies)."""
        return self.columns.isfinite().all(1).unflatten(1, (self.copies, self.width)).all(2)

    def of_copies(self, e: torch.Tensor) -> torch.Tensor:
        """Reshape values of each problem, shape (P, copies), to the user's batch, shape (*batch,)."""
        return self._unfolded(e.unsqueeze(1), 1)[..., 0, 0]

    def for_columns(self, e: torch.Tensor) -> torch.Tensor:
        return e.repeat_interleave(self.width, 1)

    @property
    def all_own(self) -> bool:
        return self.members == self.batch

    @property
    def copies(self) -> int:
        """Right-hand sides of the user's that share a matrix."""
        return 1 if self.all_own else math.prod(self.batch[i] for i in self._counting(False))

    def _counting(self, matrices: bool) -> list[int]:
        return [i for i, size in enumerate(self.members) if (size != 1) == matrices]

    @property
    def _order(self) -> list[int]:
        """Leading dimensions that count matrices, rows, those that count right-hand sides, columns."""
        d = len(self.batch)
        return [*self._counting(True), d, *self._counting(False), d + 1]

    def _unfolded(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """Columns, shape (P, rows, copies * width), as right-hand sides, shape (*batch, rows, width)."""
        if self.all_own:
            return x.reshape(*self.batch, *x.shape[-2:])
        sizes, order = [*self.batch, x.shape[1], width], self._order
        back = sorted(range(len(order)), key=order.__getitem__)
        return x.reshape([sizes[i] for i in order]).permute(back)

    def _without_last(self, x: torch.Tensor) -> torch.Tensor:
        return x.squeeze(-1) if self.is_vector else x


def broadcast_system(a: torch.Tensor, b: torch.Tensor, *, stacks_vectors: bool = True) -> BatchedProblem:
    """Match the shapes of A and b in ``A x = b``, as NumPy 2 and SciPy 1.17 do.

    A one-dimensional b is a vector, the same for every matrix of A; any other is a matrix of right-hand
    sides in its last two dimensions, or a batch of them. Until the next release, if ``stacks_vectors``, a b
    with the shape of A without its last dimension is taken as one vector for each matrix where NumPy's rules
    do not fit, with a FutureWarning. Raises ValueError for shapes that do not fit.
    """
    check_matrices(a, "A")
    if b.ndim == 0:
        raise ValueError(
            "b must be a vector, a matrix or a batch of matrices, got 0 dimension(s), shape (): "
            "reshape one number to b.reshape(1)"
        )
    is_vector = b.ndim == 1
    if a.ndim == 2 and b.ndim <= 2 and a.shape[0] == b.shape[0]:  # one problem: microseconds count
        b = b.unsqueeze(-1) if is_vector else b
        return BatchedProblem(a, b, (), (), b.shape[1], is_vector)
    batch = _batch(a.shape, b.unsqueeze(-1).shape if is_vector else b.shape)
    if stacks_vectors and b.ndim > 1 and b.shape == a.shape[:-1]:
        warn(_two_readings(a.shape, b.shape, fits=batch is not None), FutureWarning)
        is_vector = batch is None
        batch = tuple(a.shape[:-2]) if is_vector else batch
    if batch is None:
        raise ValueError(_misfit(a.shape, b.shape))
    b = b.unsqueeze(-1) if is_vector else b
    members = (1,) * (len(batch) - a.ndim + 2) + tuple(a.shape[:-2])
    return BatchedProblem(a, b, batch, members, b.shape[-1], is_vector)


def broadcast_batch(*shapes: torch.Size) -> tuple[int, ...] | None:
    """Leading dimensions as NumPy broadcasts them; None where they do not fit."""
    if len(set(shapes)) == 1:  # NumPy takes some microseconds
        return tuple(shapes[0])
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        return None


def _batch(a: torch.Size, b: torch.Size) -> tuple[int, ...] | None:
    """Leading dimensions of the problem in NumPy's reading of two shapes; None where it does not fit them."""
    return broadcast_batch(a[:-2], b[:-2]) if a[-2] == b[-2] else None


def _two_readings(a: torch.Size, b: torch.Size, *, fits: bool) -> str:
    ours = f"one vector for each matrix of A, shape {tuple(a)}"
    numpys = f"a matrix of {b[-1]} right-hand sides"
    if not fits:
        return (
            f"b of shape {tuple(b)} is taken as {ours}, as torch does; the next release, like NumPy, takes "
            f"it as {numpys}, and refuses it: pass b[..., None] for one vector for each matrix"
        )
    return (
        f"b of shape {tuple(b)} is taken as {numpys} for every matrix of A, as NumPy does; torch "
        f"takes it as {ours}: pass b[..., None] for one vector for each matrix, "
        "or b[None] for the same without this warning"
    )


def _misfit(a: torch.Size, b: torch.Size) -> str:
    batch, m = tuple(a[:-2]), a[-2]
    rows = b[0] if len(b) == 1 else b[-2]
    if rows != m:
        why = f"A has {m} rows and b {rows}"
    else:
        why = f"leading dimensions {batch} and {tuple(b[:-2])} are not equal, and not 1 where they differ"
    fitting = f"({m},), ({m}, k) or (..., {m}, k)"
    if batch:
        whole = f"{(*batch, m, 'k')}".replace("'", "")
        leading = f"leading dimensions that broadcast with {batch} before ({m}, k)"
        fitting = f"({m},), ({m}, k) or {whole}, or {leading}"
    if b == a[:-1]:
        why += "; only a one-dimensional b is a vector: pass b[..., None] for one vector for each matrix"
    given = f"A is {tuple(a)}, b is {tuple(b)}, and {why}"
    return f"shapes of A and b do not fit: {given}; b must have shape {fitting}"
