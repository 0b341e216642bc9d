"""Engines whose tall matrices are distributed over processes by rows, with torch.distributed between them.

Each process multiplies its own rows by the engine of its device; a product that contracts over rows is
followed by an all-reduce. So algorithms, refinement, certificates and chains run as they are:

- *Sums* over rows (Gram matrices, ``Q^T A``, ``A^T r``, squares of norms) are all-reduced, several small ones
  packed into one message; an iteration of CGLS has one.
- *Factorizations* that need whole columns (Householder, the tiles of CAQR, TSQR) are done by each process for
  its rows; the R factors are merged in pairs up a binary tree, and the orthogonal factors multiplied back
  down, as in TSQR.
- *Small matrices* (R, x) are replicated: each process computes them from the same totals.
- *Decisions* are taken on replicated numbers as the first process has them (:meth:`Reduction.agreed`), and
  results are broadcast from it. All-reduced sums are equal everywhere with Gloo and NCCL, but neither
  promises it, and factorizations of equal matrices need not be equal on unequal machines. A small broadcast
  makes both certain: no process takes another branch, where it would wait for ever. An R is agreed upon
  before it is measured, so that the certificate sees what unequal machines do to ``A = Q R``.
- *CUDA graphs* hold no messages: whole links are not replayed, but what is done with small matrices and
  vectors between two messages. All problems are solved one by one.

A process without rows works on one zero row, which no sum sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, reduce
from typing import Any, Self

import torch
from torch import Tensor, distributed

from neula.engines.engine import Engine, Named
from neula.engines.reduction import Factorize, Reduction
from neula.engines.tuning import Tuning
from neula.kernels.doubled.doubled import two_sum
from neula.kernels.precision import exact_matmul

TRIANGLE_BLOCKS, NARROWEST = 8, 1024  # messages of a triangular matrix, and columns of the smallest


class RowsOfGroup(Reduction):
    """Rows that are distributed over the processes of a group, in the order of their ranks.

    All methods are to be called by all processes of the group, with tensors of the same shapes except for
    rows. ``counts``: rows of each process. ``group``: None for all processes.
    """

    spread = True

    def __init__(self, counts: Sequence[int], group: Any = None) -> None:
        self.counts = tuple(counts)
        self.group = group
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        self.begins = self.rank == 0
        self.first = sum(self.counts[: self.rank])

    def count(self, m: int) -> int:
        return sum(self.counts)

    def own(self, m: int) -> int:
        return self.counts[self.rank] if m == max(1, self.counts[self.rank]) else m

    def totals(self, *parts: Tensor) -> tuple[Tensor, ...]:
        return self._packed(parts, lambda message: self.all_reduce(message, distributed.ReduceOp.SUM))

    def largest(self, x: Tensor) -> Tensor:
        """NaN comes out as Inf: what a maximum with NaN is differs between backends."""
        sent = torch.where(x.isnan(), torch.inf, x) if x.is_floating_point() else x
        message = (sent.to(torch.uint8) if x.dtype == torch.bool else sent).contiguous().clone()
        self.all_reduce(message, distributed.ReduceOp.MAX)
        return message.to(x.dtype)

    def norms(self, *matrices: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        return tuple(x.sqrt() for x in self.totals(*_squares(matrices, dim)))

    def total_and_norms(self, x: Tensor, *matrices: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        total, *squares = self.totals(x, *_squares(matrices, dim))
        return total, *(x.sqrt() for x in squares)

    def agreed(self, *replicated: Tensor) -> tuple[Tensor, ...]:
        return self._packed(replicated, self.broadcast)

    def agree_triangle(self, r: Tensor) -> Tensor:
        """Blocks of columns down to the diagonal: of what is below it, all zeros, little is sent."""
        width = max(NARROWEST, -(-r.shape[1] // TRIANGLE_BLOCKS))
        for start in range(0, r.shape[1], width):
            block = r[: start + width, start : start + width]
            message = block.mT.contiguous().resolve_conj()
            self.broadcast(message)
            if not self.begins:
                block.copy_(message.mT)
        return r

    def _packed(self, parts: Sequence[Tensor], send: Callable[[Tensor], None]) -> tuple[Tensor, ...]:
        """Several tensors in one message, in a dtype that holds all; integers and booleans as float64.
        Elements are sent row by row, whatever their order in memory. A single tensor that lies so is sent
        from where it is, and overwritten.
        """
        parts = [x.resolve_conj() for x in parts]
        if len(parts) == 1 and parts[0].is_contiguous() and parts[0].dtype == _sent_as(parts[0].dtype):
            send(parts[0])
            return tuple(parts)
        dtype = reduce(torch.promote_types, [_sent_as(x.dtype) for x in parts])
        message = torch.cat([x.reshape(-1).to(dtype) for x in parts]).contiguous()
        send(message)
        pieces = message.split([x.numel() for x in parts])
        return tuple(_like(piece, x) for piece, x in zip(pieces, parts, strict=True))

    def total_of_pairs(self, high: Tensor, low: Tensor) -> Tensor:
        """Gather all pairs, and add them in the order of the processes, keeping rounding errors."""
        mine = torch.stack([high, low]).contiguous().resolve_conj()
        pairs = self.all_gather(mine)
        total = rest = torch.zeros_like(high)
        for part, part_low in pairs:
            total, error = two_sum(total, part)
            rest = rest + (error + part_low)
        return total + rest

    def all_reduce(self, message: Tensor, operation: Any) -> None:
        distributed.all_reduce(message, operation, group=self.group)

    def broadcast(self, message: Tensor) -> None:
        """Take that of the first process, in place."""
        distributed.broadcast(message, group=self.group, group_src=0)

    def all_gather(self, message: Tensor) -> list[Tensor]:
        """Gather the messages of all processes, which have one shape."""
        found = [torch.empty_like(message) for _ in self.counts]
        distributed.all_gather(found, message, group=self.group)
        return found

    def send(self, message: Tensor, to: int) -> None:
        distributed.send(message.resolve_conj().contiguous(), group=self.group, group_dst=to)

    def receive(self, message: Tensor, of: int) -> Tensor:
        distributed.recv(message, group=self.group, group_src=of)
        return message

    def gathered(self, a: Tensor) -> Tensor:
        """Rows of all processes, one block after the other."""
        tallest = max(self.counts)
        room = a.new_zeros(tallest, *a.shape[1:])
        room[: self.counts[self.rank]] = a[: self.counts[self.rank]]
        blocks = zip(self.all_gather(room), self.counts, strict=True)
        return torch.cat([block[:count] for block, count in blocks])

    def first_of(self, bad: Tensor, a: Tensor) -> tuple[tuple[int, ...], complex, str] | None:
        everywhere: list[Any] = [None] * self.size
        distributed.all_gather_object(everywhere, super().first_of(bad, a), group=self.group)
        for rank, found in enumerate(everywhere):
            if found is not None:
                (row, *column), value, _ = found
                return (row + sum(self.counts[:rank]), *column), value, f" (row {row} of process {rank})"
        return None

    def merged(self, a: Tensor, factorize: Factorize) -> tuple[Tensor, Tensor]:
        """R factors in pairs up a tree, and the orthogonal factors back down."""
        m, n = a.shape[-2:]
        rows = a[..., : self.own(m), :]
        q, r, pairs = self._up(rows, factorize)
        share = self._down(r.shape[-2], pairs, a)
        r = self.agree(r if self.begins else a.new_empty(*a.shape[:-2], n, n))
        q = share if q is None else exact_matmul(q, share)
        return torch.cat([q, q.new_zeros(*q.shape[:-2], m - q.shape[-2], n)], -2), r

    def merged_r(self, a: Tensor, factorize: Callable[[Tensor], Tensor]) -> Tensor:
        m, n = a.shape[-2:]
        r = self._up(a[..., : self.own(m), :], lambda x: (x[..., :0], factorize(x)))[1]
        return self.agree(r if self.begins else a.new_empty(*a.shape[:-2], n, n))

    def _up(self, a: Tensor, factorize: Factorize) -> tuple[Tensor | None, Tensor, list[_Pair]]:
        """Q and R of the rows here, and the pairs that are merged here; R is the last one. A message has
        space for an R, and before it a row that says how many rows it has.
        """
        n, step, pairs = a.shape[-1], 1, []
        q, r = _factors(a, factorize)
        while step < self.size and self.rank % (2 * step) == 0:
            other = self.rank + step
            if other < self.size:
                message = self.receive(r.new_empty(*r.shape[:-2], n + 1, n), other)
                below = message[..., 1 : 1 + int(message.flatten()[0].real), :]
                pair, merged = _factors(torch.cat([r, below], -2), factorize)
                pairs.append((pair, r.shape[-2], other))
                r = merged
            step *= 2
        if not self.begins:
            message = r.new_zeros(*r.shape[:-2], n + 1, n)
            message[..., 0, :] = r.shape[-2]
            message[..., 1 : 1 + r.shape[-2], :] = r
            self.send(message, self.rank - step)
        return q, r, pairs

    def _down(self, height: int, pairs: list[_Pair], like: Tensor) -> Tensor:
        """Pass the factor of Q down the tree; returns the matrix that the rows here are multiplied by."""
        n = like.shape[-1]
        if self.begins:
            share = torch.eye(n, dtype=like.dtype, device=like.device).expand(*like.shape[:-2], n, n)
        else:
            step = self.rank & -self.rank
            share = self.receive(like.new_empty(*like.shape[:-2], height, n), self.rank - step)
        for q, above, other in reversed(pairs):
            share = share if q is None else exact_matmul(q, share)
            self.send(share[..., above:, :], other)
            share = share[..., :above, :]
        return share


_Pair = tuple[Tensor | None, int, int]
"""Of two R factors, one above the other, that were merged: the orthogonal factor, None where they have fewer
rows than columns and stay what they are; the rows of the first; and whose the second is."""


def _factors(a: Tensor, factorize: Factorize) -> tuple[Tensor | None, Tensor]:
    """Fewer rows than columns are no R yet."""
    return (None, a) if a.shape[-2] < a.shape[-1] else factorize(a)


def _squares(matrices: Sequence[Tensor], dim: int) -> Iterator[Tensor]:
    return (torch.linalg.vector_norm(x, dim=dim).square() for x in matrices)


def _sent_as(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_complex or dtype in (torch.float32, torch.float64) else torch.float64


def _like(piece: Tensor, x: Tensor) -> Tensor:
    piece = piece if x.is_complex() or not piece.is_complex() else piece.real
    return piece.reshape(x.shape).to(x.dtype)


class _Sharded(Engine):
    """An engine for matrices whose rows are distributed over processes."""

    over_rows: Reduction

    def __init__(self, local: Engine, over_rows: Reduction) -> None:
        self._local, self.over_rows = local, over_rows

    def __getattr__(self, name: str) -> Any:
        """Delegate to the engine of this process: its device, arithmetic and settings."""
        if name == "_local":  # of a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self._local, name)

    def using(self, arithmetic: Named) -> Self:
        return type(self)(self._local.using(arithmetic), self.over_rows)

    @property
    def alone(self) -> Engine:
        return self._local

    @property
    def unblocked(self) -> Self:
        return type(self)(self._local.unblocked, self.over_rows)

    @property
    def tuning(self) -> Tuning:
        """The tuning of one process, without batches and graphs."""
        return _alone(self._local.tuning)

    def inner(self, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
        """The transpose is what lies row by row in memory."""
        total = self.over_rows.total(super().inner(a, b).T).T
        return total if c is None else c.copy_(total)

    def across(self, x: Tensor, y: Tensor, *, factor: float = 1.0, shift: float = 0.0) -> Tensor:
        """Sums of the processes are rounded once more."""
        total = self.over_rows.total(self.joined(super().across(x, y))).mul_(factor)
        total.diagonal(dim1=1, dim2=2).add_(shift)
        return self.parts(total)

    def column_max(self, a: Tensor) -> Tensor:
        return self.over_rows.largest(super().column_max(a))

    def gram(self, a: Tensor) -> Tensor:
        return self.over_rows.total(super().gram(a))

    def lower_gram(self, a: Tensor, blocks: Sequence[slice], scales: Tensor | None = None) -> Tensor:
        return self.over_rows.total(super().lower_gram(a, blocks, scales).T).T

    @property
    def replayed_bytes(self) -> int:
        return 0


@lru_cache(maxsize=16)
def _sharded_class(kind: type[Engine]) -> type[_Sharded]:
    return type(f"Sharded{kind.__name__}", (_Sharded, kind), {})


def sharded(engine: Engine, over_rows: Reduction) -> Engine:
    """The engine for tall matrices of which this process holds some rows, those of another engine."""
    return _sharded_class(type(engine))(engine, over_rows)


@lru_cache(maxsize=16)
def _alone(tuning: Tuning) -> Tuning:
    single = tuning.spread or tuning.single
    return tuning.having(
        batched_elements=0, bordered=0, replayed_bytes=0, lapack=False, single=single, half=None
    )
