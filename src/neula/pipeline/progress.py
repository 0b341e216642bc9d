"""Progress of long computations, reported to a callback."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

P = ParamSpec("P")
T = TypeVar("T")

Progress = Callable[[str, float], None]
"""Called with the name of the stage and the part of it that is done, 0 to 1."""


def showing(function: Callable[P, T]) -> Callable[P, T]:
    """A function for which ``progress=True`` shows a bar."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        wanted = kwargs.get("progress")
        if wanted is None or callable(wanted):
            return function(*args, **kwargs)
        if wanted is False:
            kwargs["progress"] = None
            return function(*args, **kwargs)
        if wanted is not True:
            raise TypeError(
                f"progress is {wanted!r}: pass True for a bar, or a function that is called with the name of "
                "the stage and the part of it that is done"
            )
        with bar() as kwargs["progress"]:
            return function(*args, **kwargs)

    return call


def bar_on(console: Console) -> Bar:
    """A bar with the part that is done, on a terminal; it is gone when the work is done."""
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    stage = TextColumn("{task.description}", markup=False)
    columns = (stage, BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Bar(*columns, console=console, transient=True, disable=not console.is_interactive)


@contextmanager
def bar() -> Iterator[Progress]:
    """A bar on stderr that is gone when the work is done; nothing where stderr is no terminal."""
    from rich.console import Console

    with bar_on(Console(stderr=True)) as shown:
        task = shown.add_task("", total=None)

        def report(stage: str, fraction: float) -> None:
            # A stage that has not moved yet may never report more: its bar pulses.
            shown.update(task, description=stage, completed=fraction, total=1.0 if fraction > 0 else None)

        yield report


def stage(progress: Progress | None, name: str) -> Callable[[float], None]:
    """Begin a stage; what comes back takes the part of it that is done."""
    if progress is None:
        return lambda fraction: None
    progress(name, 0.0)
    return lambda fraction: progress(name, fraction)


def digits_done(error: float, target: float) -> float:
    """Part of the way from an error of 1 down to the target, in digits."""
    if not error > 0 or not math.isfinite(error):
        return 1.0
    return min(1.0, max(0.0, math.log(error) / math.log(target)))
