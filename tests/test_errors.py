"""Where warnings point, and what is said of keywords."""

from __future__ import annotations

import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch

import neula


@pytest.mark.parametrize("compiled", [False, True])
def test_warnings_name_the_line_of_the_caller(compiled, rng):
    a = torch.from_numpy(rng.standard_normal((60, 60)))

    def factorize(a: torch.Tensor) -> torch.Tensor:
        return neula.qr(a + 1, algorithm="rgsqrf", compute="bf16", engine="emulated").R

    function = torch.compile(factorize, backend="eager") if compiled else factorize
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(a)
    found = [w for w in caught if w.category is neula.AccuracyWarning]
    assert [w.filename for w in found] == [__file__]


NUMBERS = {
    "lstsq": ("damp", "rcond", "max_iterations"),
    "pinv": ("rcond",),
    "solve": ("max_iterations",),
    "orth": ("rcond",),
    "polar": ("rcond",),
    "svd_lowrank": ("tol",),
    "nnls": ("maxiter",),
    "lsq_linear": ("max_iter",),
    "lu_factor": ("panel", "inner_panel"),
}
NAMES = {
    "lstsq": ("algorithm", "compute", "engine", "certify"),
    "solve": ("assume_a", "pivot", "compute", "engine", "certify"),
    "qr": ("mode", "algorithm", "compute", "panel", "engine"),
    "lu_factor": ("variant", "pivot", "compute", "storage", "engine"),
    "polar": ("side",),
    "svd_lowrank": ("algorithm",),
    "eigh": ("certify", "engine"),
    "svd": ("certify", "engine"),
    "matmul": ("compute",),
}
NO_NUMBERS = ("x", b"x", [], {}, 1j, object(), math.nan, np.array([1.0, 2.0]))
NO_NAMES = ("x", 3, [], {}, object(), np.array([1.0, 2.0]))


@pytest.mark.parametrize(
    ("function", "name", "of_numbers"),
    [(f, name, of is NUMBERS) for of in (NUMBERS, NAMES) for f, names in of.items() for name in names],
)
def test_values_that_are_none(function, name, of_numbers):
    """Messages repeat the given value, whatever it is, and name its keyword."""
    a = np.array([[4.0, 1.0], [2.0, 3.0]])
    operands = (a, a) if function in ("lstsq", "solve", "matmul", "nnls", "lsq_linear") else (a,)
    message = rf"^{name} must be " if of_numbers else r"unknown .*: choose one of '"
    for given in NO_NUMBERS if of_numbers else NO_NAMES:
        with pytest.raises((TypeError, ValueError), match=message):
            getattr(neula, function)(*operands, **{name: given})


def test_numbers_of_any_library():
    """Numbers of all libraries are numbers: arrays of no dimension, but not arrays of one element."""
    a, b = np.eye(3), np.ones(3)
    for damp in (1, np.float32(1), np.array(1.0), torch.tensor(1.0), Fraction(1), True):
        np.testing.assert_allclose(neula.lstsq(a, b, damp=damp).x, 0.5)
    assert neula.nnls(a, b, maxiter=np.int64(7)).converged
    assert neula.lstsq(a, b, rcond=torch.tensor(1e-3), max_iterations=60.0).rank == 3
