"""Fields of results that are computed when they are first read: most callers read x and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Later:
    """A function that computes a deferred field when it is first read.

    Attributes
    ----------
    make : callable
        Makes the value, once at most.
    """

    make: Callable[[], Any]


class Deferring:
    """A dataclass with such fields."""

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have all values, including those not read before."""
        return {name: getattr(self, name) for name in vars(self)}


class Deferrable:
    """A field of a dataclass whose value may be a :class:`Later`, which is never visible.

    Parameters
    ----------
    default : object
        None, or what else a field has that is not given; without, the field has no default.
    """

    def __init__(self, *default: Any) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:  # the dataclass looks for a default
            if not self._default:
                raise AttributeError(self._name)
            return self._default[0]
        fields = vars(instance)
        if self._name not in fields:
            raise AttributeError(self._name)
        value = fields[self._name]
        if isinstance(value, Later):
            value = fields[self._name] = value.make()
        return value

    def __set__(self, instance: object, value: Any) -> None:
        vars(instance)[self._name] = value
