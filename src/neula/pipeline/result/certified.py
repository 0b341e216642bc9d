"""Fields that results with a certificate have in common."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from neula.pipeline.result import shown
from neula.pipeline.result.deferred import Deferrable


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class CertifiedResult(shown.Shown):
    """A result with its measured errors, by which it was accepted or rejected.

    Attributes
    ----------
    attempts : tuple of Attempt
        Attempts of the chain, in order; the last one is accepted if any is.
    engine : str
        The engine that multiplied.
    accuracy : str
        The requested accuracy.
    seconds : float
        Time of the call.
    """

    attempts: Any = Deferrable(())  # noqa: RUF009
    engine: str = ""
    accuracy: str = ""
    seconds: float = math.nan

    def _headline(self) -> str:
        """First line of the printed result."""
        return shown.verdict(self.accuracy, converged=self.converged)  # type: ignore[attr-defined]

    def _one_of(self, place: int, arrays: Sequence[str], **scalars: str) -> Self:
        """The result of one matrix of a batch: its part of each array, from which scalars follow."""
        known = {name: getattr(self, name) for name in arrays}
        of_one: dict[str, Any] = {name: None if x is None else x[place] for name, x in known.items()}
        numbers = {name: type(getattr(self, name))(of_one[array]) for name, array in scalars.items()}
        return replace(self, **of_one, **numbers)


class Unpacked:
    """A result that is taken apart as a tuple."""

    @abstractmethod
    def _parts(self) -> tuple[Any, ...]:
        """The elements of the tuple."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self._parts())

    def __getitem__(self, index: int) -> Any:
        return self._parts()[index]

    def __len__(self) -> int:
        return len(self._parts())
