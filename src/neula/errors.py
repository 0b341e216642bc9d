"""Messages for input that cannot be used: they repeat what was given and say what to change."""

from __future__ import annotations

from collections.abc import Iterable


def unknown_name(what: str, given: object, known: Iterable[str]) -> ValueError:
    """Error for a name that is not in a table."""
    return ValueError(f"unknown {what} {given!r}: choose one of {', '.join(map(repr, known))}")
