"""Options of least squares that tests ask for, below the public function."""

from __future__ import annotations

from typing import Any

import torch

from neula.engines import FP64, Engine
from neula.problems.least_squares.problem import LeastSquaresOptions


def options_of(engine: Engine, **asked: Any) -> LeastSquaresOptions:
    """Everything in double precision, as the public function chooses it unless asked for something else."""
    given: dict[str, Any] = {
        "target": FP64,
        "dtype": torch.float64,
        "max_iterations": 60,
        "forward": False,
        "progress": None,
        "algorithm": None,
        "compute": None,
        "damp": 0.0,
        "weights": None,
    }
    return LeastSquaresOptions(engine=engine, **{**given, **asked})
