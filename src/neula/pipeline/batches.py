"""Batches of problems, and what is known of each: tensors whose first dimension counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Protocol, Self

import numpy as np
import torch

from neula.engines.graphs import Inputs, Written


class ProblemBatch(Protocol):
    @property
    def device(self) -> torch.device:
        """Device of the tensors."""

    def __len__(self) -> int: ...

    def at(self, places: torch.Tensor) -> Self:
        """Some of them."""


class SingularMember(np.linalg.LinAlgError):
    """The matrix at some place of a batch has no factors."""

    def __init__(self, place: int, why: str) -> None:
        super().__init__(why)
        self.place, self.why = place, why


class SingleProblem:
    """One problem, for a chain that is made for batches."""

    def __len__(self) -> int:
        return 1

    def at(self, places: torch.Tensor) -> Self:
        return self


@dataclass(frozen=True)
class Batch:
    """Tensors whose first dimension counts problems, at least one, before what belongs to all of them."""

    @property
    def _first(self) -> torch.Tensor:
        return getattr(self, self._names()[0])

    @classmethod
    @cache
    def _names(cls) -> tuple[str, ...]:
        """Names of the fields; to ask for them at each call takes ten times as long."""
        return tuple(f.name for f in fields(cls))

    @property
    def by_name(self) -> dict[str, torch.Tensor]:
        known = {name: getattr(self, name) for name in self._names()}
        return {name: x for name, x in known.items() if isinstance(x, torch.Tensor)}

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.by_name.values())

    @property
    def device(self) -> torch.device:
        return self._first.device

    def __len__(self) -> int:
        return self._first.shape[0]  # a tenth of the time that len() of a tensor takes

    def at(self, places: torch.Tensor) -> Self:
        return replace(self, **{name: x[places] for name, x in self.by_name.items()})

    def to(self, device: torch.device) -> Self:
        return replace(self, **{name: x.to(device) for name, x in self.by_name.items()})


@dataclass(frozen=True)
class Values(Batch):
    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        if len(parts) == 1:
            return parts[0]
        return cls(*map(torch.cat, zip(*(part.tensors for part in parts), strict=True)))

    def measured(self) -> torch.Tensor:
        """Numbers for a judge, shape (numbers, batch), without synchronizing: the ``measures`` of links."""
        return self.by_name["measures"].T

    def copied(self) -> Self:
        return type(self)(*(x.clone() for x in self.tensors))

    def put(self, places: torch.Tensor, others: Self) -> Self:
        """These with ``others`` at some places: in place, unless the others have a wider dtype."""
        pairs = list(zip(self.tensors, others.tensors, strict=True))
        dtypes = [torch.promote_types(x.dtype, y.dtype) for x, y in pairs]
        fits = all(x.dtype == dtype for (x, _), dtype in zip(pairs, dtypes, strict=True))
        known = self if fits else type(self)(*(x.to(d) for (x, _), d in zip(pairs, dtypes, strict=True)))
        for x, y in zip(known.tensors, others.tensors, strict=True):
            x[places] = y.to(x.dtype)
        return known


LEAST_ROWS, LEAST_COLUMNS = 32, 8  # sizes are multiples of these, and of a quarter of the power of two below


@dataclass(frozen=True)
class Border:
    # rows, columns: how many are added.
    rows: int = 0
    columns: int = 0

    @classmethod
    def around(cls, m: int, n: int) -> Border:
        """Rows and columns that pad a tall or square matrix to the next shape of a grid."""
        columns = _on_the_grid(n, LEAST_COLUMNS) - n
        rows = columns if m == n else _on_the_grid(m + columns, LEAST_ROWS) - m
        return cls(rows, columns)

    def put(self, a: torch.Tensor, b: torch.Tensor) -> Inputs:
        """The problem in its border, which is written where it is wanted."""
        if not self.rows:
            return a, b
        (count, m, n), k = a.shape, b.shape[2]
        shapes = torch.Size((count, m + self.rows, n + self.columns)), torch.Size((count, m + self.rows, k))
        return Written(shapes, (a, b), lambda room: write_bordered(a, b, *room))

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Solutions without what the border adds to them."""
        return x[:, : x.shape[1] - self.columns]


def _on_the_grid(size: int, least: int) -> int:
    """The smallest size of the grid that is not smaller."""
    step = max(least, 1 << max(0, size.bit_length() - 3))
    return -(-size // step) * step


def write_bordered(a: torch.Tensor, b: torch.Tensor, to_a: torch.Tensor, to_b: torch.Tensor) -> None:
    """Write ``[A 0; 0 s I; 0 0]`` and ``[b; 0]``, s being the largest magnitude in the first column of A."""
    _, m, n = a.shape
    to_a.zero_()[:, :m, :n] = a
    to_b.zero_()[:, :m] = b
    largest = torch.linalg.vector_norm(a[:, :, 0], torch.inf, dim=1)
    to_a[:, m:, n:].diagonal(dim1=1, dim2=2).copy_(largest[:, None])
