"""One problem in the memory of the host as NumPy and LAPACK have it, and what results say of it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from neula.certificates.forward_error import digits_of
from neula.engines import Engine, Format
from neula.pipeline.call import Call
from neula.pipeline.result.deferred import Later
from neula.pipeline.shapes import BatchedProblem

IN_NUMPY = {torch.float64: np.float64, torch.float32: np.float32, torch.float16: np.float16}
"""Dtypes that NumPy has as well."""

FEW = 16
"""Right-hand sides of one problem that are refined one by one; more of them are taken together."""


class Asked(Protocol):
    """What is asked for, as options of all problems say it."""

    @property
    def engine(self) -> Engine:
        """What multiplies."""

    @property
    def target(self) -> Format:
        """Whose accuracy the result is to have."""

    @property
    def dtype(self) -> torch.dtype:
        """Of x as it is given back."""


def arrays_of(shapes: BatchedProblem) -> tuple[np.ndarray, list[np.ndarray]]:
    """The matrix of such a problem as it was given, and its right-hand sides in double precision."""
    return array_of(shapes.a), list(np.ascontiguousarray(array_of(shapes.b).T, dtype=np.float64))


def array_of(x: torch.Tensor) -> np.ndarray:
    """A tensor in the memory of the host as an array: a view, unless NumPy does not know what is in it."""
    found: np.ndarray = (x if x.dtype in IN_NUMPY else x.double()).numpy()
    return found


def x_of_single(call: Call, shapes: BatchedProblem, options: Asked, x: np.ndarray) -> Any:
    """The solution for the user; x has shape (n, k), is float64, and rounded to the dtype of the result."""
    x = x[:, 0] if shapes.is_vector else x
    return call.first.wrap_array(x.astype(IN_NUMPY[options.dtype], copy=False))


def of_single(
    call: Call,
    shapes: BatchedProblem,
    options: Asked,
    backward_error: float,
    condition: float,
    forward_errors: list[float],
) -> dict[str, Any]:
    """What results of ``solve`` and ``lstsq`` say of one problem that is solved."""
    wrap, worst = call.first.wrap_array, max(forward_errors)

    def later(known: Any) -> Later:
        return Later(lambda: wrap(np.array(known)))

    return {
        "converged": True,
        "forward_error": worst,
        "digits": digits_of(worst, options.dtype),
        "engine": str(options.engine),
        "accuracy": options.target.name,
        "accepted": later(True),
        "backward_errors": later(backward_error),
        "conditions": later(condition),
        "forward_errors": later(worst if shapes.is_vector else forward_errors),
        "seconds": call.seconds,
    }
