"""Claims beside true errors for problems too large for exact arithmetic, whose solutions are known.

Matrices have few bits and solutions are small integers, so that right-hand sides are exact. Each row of a
least-squares problem is there twice, with residuals of either sign, which are orthogonal to the columns.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

import neula

from .judge import NO_DIGIT, SLACK
from .matrices import KINDS, ComplexRandom, Rng, exponent_of
from .recipes import Seeded

BITS = 28
"""Of the elements of A; those of x have 6, and sums of up to 1024 products 44."""

DIFFICULT = ("normal", "uniform", "near_rank_one", "geometric", "one_small", "kahan", "sparse")

LSTSQ: tuple[dict[str, str], ...] = (
    *({}, {"certify": "forward"}, {"algorithm": "householder"}),
    *({"algorithm": name, "compute": "fp16"} for name in ("cgls", "lsqr")),
    {"compute": "fp16"},
)

SOLVE: tuple[dict[str, str], ...] = (
    *({}, {"certify": "forward"}, {"compute": "fp16"}),
    *({"pivot": name, "compute": "fp16"} for name in ("none", "partial", "rbt")),
)


def few_bits(rng: Rng, kind: str, m: int, n: int) -> np.ndarray:
    """A matrix of a kind, rounded to multiples of ``2^-BITS`` times a power of two."""
    a = KINDS[kind](rng, m, n)
    unit = 2.0 ** (exponent_of(a) - BITS)
    return np.rint(a / unit) * unit


def system(source: Seeded, rng: Rng) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A, b and x."""
    n = source.integer(20, 180)
    a = few_bits(rng, source.choice(DIFFICULT), n, n)
    x = rng.integers(-63, 64, (n, source.integer(1, 3))) * 1.0
    return a, a @ x, x


def least_squares(source: Seeded, rng: Rng) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A, b and x."""
    n = source.integer(10, 100)
    half = few_bits(rng, source.choice(DIFFICULT), n * source.choice([1, 2, 6]), n)
    x = rng.integers(-63, 64, (n, source.integer(1, 3))) * 1.0
    unit = 2.0 ** (exponent_of(half) - BITS)
    rest = unit * rng.integers(-999, 1000, (len(half), x.shape[1])) * source.choice([0, 1, 2**10])
    return np.vstack([half, half]), np.vstack([half @ x + rest, half @ x - rest]), x


def check(number: int, engine: str, device: str, scalars: str, *, square: bool) -> None:
    """Solve one problem; what is said of x must be true, with a warning or without one."""
    source = Seeded(7, number)
    rng: Any = ComplexRandom(source.rng) if scalars == "complex" else source.rng
    a, b, x = (system if square else least_squares)(source, rng)
    options: dict[str, Any] = dict(source.choice(SOLVE if square else LSTSQ))
    if engine == "cpu":
        options.pop("compute", None)
    function = neula.solve if square else neula.lstsq
    tensors = (torch.from_numpy(y).to(device) for y in (a, b))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", neula.AccuracyWarning)
        try:
            result = function(*tensors, engine=engine, **options)
        except ArithmeticError:  # factors that were asked for break down
            assert options
            return
        except np.linalg.LinAlgError:
            assert np.linalg.matrix_rank(a / np.linalg.norm(a, axis=0)) < len(x)
            return
    if not square and result.rank < len(x):  # x is not the shortest solution
        return
    sizes = np.linalg.norm(a, axis=0)[:, None]
    norms = (np.linalg.norm(sizes * y, axis=0) for y in (result.x.cpu().numpy() - x, x))
    errors, claimed = np.divide(*norms), result.forward_errors.cpu().numpy()
    promised = (claimed < NO_DIGIT) | bool(result.converged)
    assert (errors <= claimed * SLACK)[promised].all(), (number, options, errors, claimed, result.attempts)


COUNTS = {("real", True): 60, ("real", False): 130, ("complex", True): 20, ("complex", False): 40}


@pytest.mark.parametrize("scalars", ["real", "complex"])
@pytest.mark.parametrize("square", [True, False], ids=["solve", "lstsq"])
@pytest.mark.parametrize(
    ("engine", "device"),
    [("cpu", "cpu"), ("emulated", "cpu"), pytest.param("cuda", "cuda", marks=pytest.mark.gpu)],
)
def test_claims_are_true(engine: str, device: str, square: bool, scalars: str) -> None:
    for number in range(COUNTS[scalars, square]):
        check(number, engine, device, scalars, square=square)
