"""Every public function: neither settings of the user nor the layout of arrays change an answer, and no call
changes settings or arrays.
"""

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
LARGE = RNG.standard_normal((300, 150))
"""Beyond small problems: low precision comes first."""
ENDS = RNG.standard_normal(300)
LARGER = LARGE[:150] + 150 * np.eye(150)
ZEROS = np.where(np.arange(150) % 50 == 3, 0.0, LARGE).astype(np.float32)

Given = Callable[[np.ndarray], Any]
"""Hands an array over, perhaps in another layout."""


def line(x: Any, a: Any, b: Any) -> Any:
    return a * x + b


def held(v: Given) -> Any:
    fit = neula.LeastSquares(5)
    fit.update(v(TALL), v(TWO))
    fit.update(v(TALL), v(TWO))
    return fit.solve().x


CALLS: dict[str, Callable[[Given], Any]] = {
    "lstsq": lambda v: neula.lstsq(v(TALL), v(B)).x,
    "lstsq dependent": lambda v: neula.lstsq(v(DEPENDENT), v(TWO)).x,
    "lstsq wide": lambda v: neula.lstsq(v(WIDE), v(B[:4])).x,
    "lstsq damped": lambda v: neula.lstsq(v(TALL), v(B), damp=0.1, weights=v(np.abs(B) + 1)).x,
    "lstsq batch": lambda v: neula.lstsq(v(np.stack([TALL, TALL + 1])), v(np.stack([TWO, TWO]))).x,
    "lstsq constrained": lambda v: neula.lstsq(v(TALL), v(B), constraints=(v(TALL[:1]), v(B[:1]))).x,
    "lstsq doubtful constraints": lambda v: (
        neula.lstsq(v(TALL), v(B), constraints=([[1, 1, 1, 0, 0], [3, 3, 3 + 1e-14, 0, 0]], [1, 3])).x
    ),
    "lstsq no constraints": lambda v: neula.lstsq(v(TALL), v(B), constraints=(v(TALL[:0]), v(B[:0]))).x,
    "lstsq rgsqrf": lambda v: neula.lstsq(v(TALL), v(B), algorithm="cgls").x,
    "lstsq emulated": lambda v: neula.lstsq(v(LARGE), v(ENDS), engine="emulated").x,
    "lstsq large": lambda v: neula.lstsq(v(LARGE), v(ENDS)).x,
    "solve large": lambda v: neula.solve(v(LARGER), v(ENDS[:150])).x,
    "solve large definite": lambda v: neula.solve(v(LARGER @ LARGER.T), v(ENDS[:150]), assume_a="pos").x,
    "qr large of the CPU": lambda v: neula.qr(v(LARGE)).R,
    "cholesky large": lambda v: neula.cholesky(v(LARGER @ LARGER.T)).L,
    "polar large": lambda v: neula.polar(v(LARGER)).U,
    "pinv large": lambda v: neula.pinv(v(LARGE)),
    "held": held,
    "ridge": lambda v: neula.ridge_path(v(TALL), v(B), [0.1, 1.0]).leave_one_out,
    "nnls": lambda v: neula.nnls(v(TALL), v(TWO)).x,
    "nnls batch": lambda v: neula.nnls(v(np.stack([TALL, TALL + 1])), v(np.stack([TWO, TWO]))).x,
    "lsq_linear": lambda v: neula.lsq_linear(v(TALL), v(TWO), bounds=(-0.1, 0.1)).x,
    "solve": lambda v: neula.solve(v(SQUARE), v(B[:6])).x,
    "solve many": lambda v: neula.solve(v(np.stack([SQUARE, SQUARE.T])), v(B[:6])).x,
    "solve definite": lambda v: neula.solve(v(DEFINITE), v(B[:6]), assume_a="pos").x,
    "solve emulated": lambda v: neula.solve(v(LARGER), v(ENDS[:150]), engine="emulated").x,
    "solve butterflies": lambda v: (
        neula.solve(v(LARGER), v(ENDS[:150]), engine="emulated", pivot="rbt", compute="fp32").x
    ),
    "lu": lambda v: neula.lu_solve(neula.lu_factor(v(SQUARE)), v(B[:6])),
    "lu emulated": lambda v: neula.lu_solve(neula.lu_factor(v(SQUARE), engine="emulated"), v(B[:6])),
    "cholesky": lambda v: neula.cholesky(v(DEFINITE)).L,
    "qr": lambda v: neula.qr(v(TALL)).R,
    "qr emulated": lambda v: neula.qr(v(TALL), accuracy="fp32", engine="emulated").R,
    "qr large": lambda v: neula.qr(v(LARGE), accuracy="fp16", engine="emulated").Q,
    "qr zero columns": lambda v: neula.qr(v(ZEROS)).Q,
    "qr pivoted": lambda v: neula.qr(v(DEPENDENT), pivoting=True).R,
    "qr empty": lambda v: neula.qr(v(np.zeros((3, 0))), "complete").Q,
    "orth": lambda v: neula.orth(v(DEPENDENT), 1e-10),
    "tsqr": lambda v: neula.tsqr(v(TALL)).R,
    "tsqr of a named mode": lambda v: neula.tsqr(v(ZEROS), compute="fp16_cor", engine="emulated").Q,
    "pinv": lambda v: neula.pinv(v(TALL)),
    "polar": lambda v: neula.polar(v(TALL), side="right").U,
    "svd": lambda v: neula.svd_lowrank(v(TALL), 2)[1],
    "svd of all values": lambda v: neula.svd(v(TALL)).U,
    "svdvals": lambda v: neula.svdvals(v(TALL)),
    "eigh": lambda v: neula.eigh(v(DEFINITE)).eigenvectors,
    "eigh of two matrices": lambda v: neula.eigh(v(SQUARE), v(DEFINITE)).eigenvalues,
    "eigvalsh": lambda v: neula.eigvalsh(v(DEFINITE), subset_by_index=(0, 1)),
    "powers": lambda v: neula.fractional_matrix_power(v(DEFINITE), -0.25).X,
    "matmul": lambda v: neula.matmul(v(TALL.T), v(TALL)),
    "least_squares": lambda v: neula.least_squares(lambda x: TALL @ x - B, np.zeros(5)).x,
    "least_squares of tensors": lambda v: (
        neula.least_squares(
            lambda x: torch.from_numpy(TALL) @ x - torch.from_numpy(B), torch.zeros(5, device="cpu").double()
        ).x
    ),
    "curve_fit": lambda v: neula.curve_fit(line, v(TALL[:, 0].copy()), v(B)).popt,
    "curve_fit from p0": lambda v: (
        neula.curve_fit(line, v(TALL[:, 0].copy()), v(B), p0=[1, 2], loss="huber").popt
    ),
}
each = pytest.mark.parametrize("name", CALLS)
pytestmark = pytest.mark.filterwarnings("ignore::neula.AccuracyWarning")


def plain(x: np.ndarray) -> np.ndarray:
    return x


@contextmanager
def default(name: str, value: Any) -> Iterator[None]:
    setting = getattr(torch, f"set_default_{name}")
    setting(value)
    try:
        yield
    finally:
        setting(None if name == "device" else torch.float32)


SETTINGS = {
    "device": lambda: default("device", "meta"),
    "float16": lambda: default("dtype", torch.float16),
    "float64": lambda: default("dtype", torch.float64),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@each
def test_settings_change_nothing(name: str) -> None:
    usual = np.asarray(CALLS[name](plain))
    for setting, entered in SETTINGS.items():
        with entered():
            found = np.asarray(CALLS[name](plain))
        assert found.dtype == usual.dtype
        np.testing.assert_allclose(found, usual, rtol=1e-11, atol=1e-11, err_msg=setting)


@each
def test_global_state_is_left_alone(name: str, global_state: Callable[[], list[object]]) -> None:
    before = global_state()
    CALLS[name](plain)
    assert global_state() == before


def embedded(x: np.ndarray) -> np.ndarray:
    """Every other element of an array of NaN."""
    wide = np.full([2 * size + 1 for size in x.shape], np.nan, x.dtype)
    view = wide[tuple(slice(1, 2 * size, 2) for size in x.shape)]
    view[...] = x
    return view


def read_only(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


LAYOUTS = {
    "column-major": np.asfortranarray,
    "reversed": lambda x: x[..., ::-1].copy()[..., ::-1],
    "embedded": embedded,
    "big-endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "read-only": read_only,
    "tensor": lambda x: torch.from_numpy(embedded(x)),
}


@each
def test_any_layout(name: str) -> None:
    """Arrays are read through their strides, and left as they were; tensors come back as tensors."""
    usual = np.asarray(CALLS[name](plain))
    for layout, arranged in LAYOUTS.items():
        given: list[tuple[Any, np.ndarray]] = []

        def handed(x: np.ndarray) -> Any:
            given.append((arranged(x), x.copy()))  # noqa: B023
            return given[-1][0]  # noqa: B023

        found = CALLS[name](handed)
        tensors = "tensors" in name or any(isinstance(x, torch.Tensor) for x, _ in given)
        assert isinstance(found, torch.Tensor) == tensors
        np.testing.assert_allclose(np.asarray(found), usual, rtol=1e-9, atol=1e-9, err_msg=layout)
        assert all(np.array_equal(x, before) for x, before in given)
