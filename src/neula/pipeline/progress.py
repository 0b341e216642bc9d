"""Progress of what takes long, told to a function of the caller."""

from __future__ import annotations

import math
from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Called with the name of the stage and the part of it that is done, 0 to 1."""


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
