"""Whether refinement continues: by bounds on errors, for numbers, arrays and tensors.

NaN ends a refinement, since no comparison holds for it.
"""

from __future__ import annotations

from typing import Any

from neula.certificates.residuals import X

STAGNATION = 0.5
"""An update that does not at least halve the error is the last one."""

SLOW = 0.1
"""A step of classical refinement that leaves more than this part of the error is followed by GMRES."""

FLOOR = 2.0
"""Multiple of the rounding errors of the residual from which on refinement has little to gain. They are part
of the bound on the error, which is never less than once as much."""


def improves(error: X, before: X | float, stagnation: float = STAGNATION) -> Any:
    """Whether an update has left less than some part of the error."""
    return error < stagnation * before


def goes_on(
    error: X,
    before: X | float,
    tolerance: X | float,
    floor: X | float = 0.0,
    *,
    stagnation: float = STAGNATION,
) -> Any:
    """Whether another update is worth its while: the error is too large, was at least halved, and is not that
    of rounding alone (``neula.kernels.small_problems.refining.progress``).

    Examples
    --------
    >>> goes_on(1e-3, 1.0, 1e-6), goes_on(1e-9, 1.0, 1e-6), goes_on(0.7, 1.0, 1e-6)
    (True, False, False)
    """
    return (error > tolerance) & improves(error, before, stagnation) & (error > FLOOR * floor)


def settled(error: X, floor: X) -> Any:
    """Whether hardly more is left than the rounding errors of the residual, which no update makes smaller."""
    return error <= FLOOR * floor
