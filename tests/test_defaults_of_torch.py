"""The defaults of torch that a user may set change nothing: neither the device nor the dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import neula

RNG = np.random.default_rng(0)
TALL, WIDE, B = RNG.standard_normal((30, 5)), RNG.standard_normal((4, 9)), RNG.standard_normal(30)
SQUARE = RNG.standard_normal((6, 6)) + 6 * np.eye(6)
DEFINITE = SQUARE @ SQUARE.T
DEPENDENT = np.c_[TALL, TALL[:, 0]]
TWO = np.c_[B, -B]


def decay(x: Any, a: Any, b: Any) -> Any:
    return a * x + b


def held() -> Any:
    fit = neula.LeastSquares(5)
    fit.update(TALL, TWO)
    fit.update(TALL, TWO)
    return fit.solve().x


CALLS: dict[str, Callable[[], Any]] = {
    "lstsq": lambda: neula.lstsq(TALL, B).x,
    "lstsq dependent": lambda: neula.lstsq(DEPENDENT, TWO).x,
    "lstsq wide": lambda: neula.lstsq(WIDE, B[:4]).x,
    "lstsq damped": lambda: neula.lstsq(TALL, B, damp=0.1, weights=np.abs(B) + 1).x,
    "lstsq batch": lambda: neula.lstsq(np.stack([TALL, TALL + 1]), np.stack([TWO, TWO])).x,
    "lstsq constrained": lambda: neula.lstsq(TALL, B, constraints=(TALL[:1], B[:1])).x,
    "lstsq doubtful constraints": lambda: (
        neula.lstsq(TALL, B, constraints=([[1, 1, 1, 0, 0], [3, 3, 3 + 1e-14, 0, 0]], [1, 3])).x
    ),
    "lstsq no constraints": lambda: neula.lstsq(TALL, B, constraints=(TALL[:0], B[:0])).x,
    "lstsq rgsqrf": lambda: neula.lstsq(TALL, B, algorithm="cgls").x,
    "held": held,
    "ridge": lambda: neula.ridge_path(TALL, B, [0.1, 1.0]).leave_one_out,
    "nnls": lambda: neula.nnls(TALL, TWO).x,
    "nnls batch": lambda: neula.nnls(np.stack([TALL, TALL + 1]), np.stack([TWO, TWO])).x,
    "lsq_linear": lambda: neula.lsq_linear(TALL, TWO, bounds=(-0.1, 0.1)).x,
    "solve": lambda: neula.solve(SQUARE, B[:6]).x,
    "solve many": lambda: neula.solve(np.stack([SQUARE, SQUARE.T]), B[:6]).x,
    "solve definite": lambda: neula.solve(DEFINITE, B[:6], assume_a="pos").x,
    "lu": lambda: neula.lu_solve(neula.lu_factor(SQUARE), B[:6]),
    "lu emulated": lambda: neula.lu_solve(neula.lu_factor(SQUARE, engine="emulated"), B[:6]),
    "cholesky": lambda: neula.cholesky(DEFINITE).L,
    "qr": lambda: neula.qr(TALL).R,
    "qr emulated": lambda: neula.qr(TALL, accuracy="fp32", engine="emulated").R,
    "qr pivoted": lambda: neula.qr(DEPENDENT, pivoting=True).R,
    "qr empty": lambda: neula.qr(np.zeros((3, 0)), "complete").Q,
    "orth": lambda: neula.orth(DEPENDENT, 1e-10),
    "tsqr": lambda: neula.tsqr(TALL).R,
    "pinv": lambda: neula.pinv(TALL),
    "polar": lambda: neula.polar(TALL, side="right").U,
    "svd": lambda: neula.svd_lowrank(TALL, 2)[1],
    "matmul": lambda: neula.matmul(TALL.T, TALL),
    "least_squares": lambda: neula.least_squares(lambda x: TALL @ x - B, np.zeros(5)).x,
    "least_squares of tensors": lambda: (
        neula.least_squares(
            lambda x: torch.from_numpy(TALL) @ x - torch.from_numpy(B), torch.zeros(5, device="cpu").double()
        ).x
    ),
    "curve_fit": lambda: neula.curve_fit(decay, TALL[:, 0], B).popt,
    "curve_fit from p0": lambda: neula.curve_fit(decay, TALL[:, 0], B, p0=[1, 2], loss="huber").popt,
}


@contextmanager
def default(name: str, value: Any) -> Iterator[None]:
    setting = getattr(torch, f"set_default_{name}")
    setting(value)
    try:
        yield
    finally:
        setting(None if name == "device" else torch.float32)


@pytest.mark.filterwarnings("ignore::neula.AccuracyWarning")
@pytest.mark.parametrize("name", CALLS)
def test_defaults_change_nothing(name: str) -> None:
    usual = np.asarray(CALLS[name]())
    for kind, value in (("device", "meta"), ("dtype", torch.float16), ("dtype", torch.float64)):
        with default(kind, value):
            found = np.asarray(CALLS[name]())
        assert found.dtype == usual.dtype
        np.testing.assert_allclose(found, usual, rtol=1e-11, atol=1e-11, err_msg=f"{kind} {value}")
