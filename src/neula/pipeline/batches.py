"""Batches of problems, and what is known of each: tensors whose first dimension counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Protocol, Self

import numpy as np
import torch


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
