"""Batches of LU factors: one packed matrix after the other, and right-hand sides broadcast to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from neula.algorithms.elimination.lu import PackedLU
from neula.engines import Format
from neula.engines.formats import matching_dtype


@contextmanager
def naming(index: Sequence[int]) -> Iterator[None]:
    """Add the index of a matrix in its batch to errors; the empty index is a single matrix."""
    try:
        yield
    except (np.linalg.LinAlgError, ArithmeticError, ValueError) as error:
        if not index:
            raise
        raise type(error)(f"A[{', '.join(map(str, index))}] of the batch: {error}") from None


def stacked(
    factors: Sequence[PackedLU], batch: Sequence[int], n: int, storage: Format, like: torch.Tensor
) -> PackedLU:
    """Factors of the matrices of a batch in one piece of memory, each column-major as it was.

    ``batch``: leading dimensions. ``n``, ``storage`` and ``like``: order of the matrices, format of the
    factors, and a tensor where they are, also for a batch of none.
    """
    if not factors:
        none = torch.empty(*batch, n, n, dtype=matching_dtype(storage.dtype, like.dtype), device=like.device)
        return PackedLU(none, none.new_empty(*batch, n, dtype=torch.int64), storage)
    lu = torch.stack([packed.lu.T for packed in factors]).unflatten(0, tuple(batch)).mT
    permutation = torch.stack([packed.permutation for packed in factors]).unflatten(0, tuple(batch))
    return PackedLU(lu, permutation, storage)


@dataclass(frozen=True)
class RightHandSides:
    """Right-hand sides, broadcast with a batch of matrices as NumPy and SciPy do."""

    columns: torch.Tensor  # shape (count, n, k): all of them, each with its matrix
    owners: torch.Tensor  # shape (count,): which matrix of the batch that is, counted through
    shape: tuple[int, ...]  # shape of the solution

    @classmethod
    def broadcast(cls, b: torch.Tensor, batch: tuple[int, ...], n: int) -> RightHandSides:
        """One vector if b is one-dimensional, which goes with every matrix; else matrices of shape (n, k).

        Raises ValueError if b does not fit.
        """
        is_vector = b.ndim == 1
        matrices = b[:, None] if is_vector else b
        if matrices.ndim < 2 or matrices.shape[-2] != n:
            raise _does_not_fit(b, batch, n)
        k = matrices.shape[-1]
        if not batch and matrices.ndim == 2:
            return cls(matrices[None], torch.zeros(1, dtype=torch.int64, device="cpu"), tuple(b.shape))
        try:
            shape = tuple(torch.broadcast_shapes(batch, matrices.shape[:-2]))
        except RuntimeError:
            raise _does_not_fit(b, batch, n) from None
        owners = torch.arange(int(np.prod(batch)), device="cpu").reshape(batch).expand(shape).flatten()
        columns = matrices.expand(*shape, n, k).reshape(len(owners), n, k)
        return cls(columns, owners, (*shape, n) if is_vector else (*shape, n, k))

    def of_matrix(self, i: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """The right-hand sides of one matrix beside each other, shape (n, columns)."""
        if len(self.columns) == 1:
            return self.columns[0].to(device, dtype)
        mine = self.columns[(self.owners == i).to(self.columns.device)]
        return mine.to(device, dtype).transpose(0, 1).flatten(1)

    def put(self, x: torch.Tensor, i: int, solution: torch.Tensor) -> None:
        """The solutions of one matrix, shape (n, columns), to their places in x, shape (count, n, k)."""
        if len(self.columns) == 1:
            x[0] = solution
            return
        mine = (self.owners == i).to(x.device)
        x[mine] = solution.unflatten(1, (-1, x.shape[-1])).transpose(0, 1)


def _does_not_fit(b: torch.Tensor, batch: tuple[int, ...], n: int) -> ValueError:
    leading = f"{', '.join(map(str, batch))}, " if batch else "..., "
    hint = ""
    if b.ndim > 1 and tuple(b.shape) == (*batch, n):
        hint = "; only a one-dimensional b is a vector: pass b[..., None] for one vector a matrix"
    return ValueError(
        f"b has shape {tuple(b.shape)}, and A {'x'.join(map(str, (*batch, n, n)))}: pass b of shape ({n},), "
        f"({n}, k) or ({leading}{n}, k), whose leading dimensions are broadcast{hint}"
    )
