"""A program of a user: mypy and pyright must find nothing wrong with it, and the types that it asserts.

``make types`` checks it; nothing here is run.
"""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np
import torch

import neula
import neula.compat.numpy
import neula.compat.scipy
import neula.compat.torch

Array = np.ndarray[Any, Any]


def numpy_in_numpy_out(A: Array, b: Array) -> None:
    assert_type(neula.lstsq(A, b).x, Array)
    assert_type(neula.solve(A, b, assume_a="pos", accuracy="float32").x, Array)
    print(*neula.qr(A, "complete", accuracy=np.float32))
    assert_type(neula.qr(A).R, Array)
    assert_type(neula.orth(A, 1e-10, progress=True), Array)
    assert_type(neula.tsqr(A).Q, Array)
    assert_type(neula.pinv(A), Array)
    assert_type(neula.least_squares(lambda x: A @ x - b, b, bounds=(0, 1), loss="huber").x, Array)
    assert_type(neula.curve_fit(lambda x, a: a * x, A, b, full_output=True).popt, Array)
    assert_type(neula.cholesky(A, upper=True, accuracy=1e-6).U, Array)
    assert_type(neula.polar(A, side="right", completion=True).U, Array)
    assert_type(neula.svd_lowrank(A, rank=3).s, Array)
    assert_type(neula.matmul(A, b, compute="fp16_cor"), Array)
    F = neula.lu_factor(A, pivot="rbt", compute="fp16")
    assert_type(F.L, Array)
    assert_type(neula.lu_solve(F, b, refine=True), Array)


def torch_in_torch_out(A: torch.Tensor, b: torch.Tensor) -> None:
    result = neula.lstsq(A, b, accuracy=torch.float32, certify="forward", weights=b, strict=True)
    assert_type(result.x, torch.Tensor)
    assert_type(neula.solve(A, b, engine="cuda").x, torch.Tensor)
    assert_type(neula.qr(A, mode="r").R, torch.Tensor)
    assert_type(neula.orth(A), torch.Tensor)
    assert_type(neula.orth(A, method="polar"), torch.Tensor)
    assert_type(neula.polar(A).U, torch.Tensor)
    assert_type(neula.cholesky(A).L, torch.Tensor)
    assert_type(neula.lu_solve(neula.lu_factor(A), b), torch.Tensor)
    assert_type(neula.matmul(A, b), torch.Tensor)


def lists_are_taken(b: list[float]) -> None:
    x: Array = neula.lstsq([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], b).x
    print(x)


def evidence(A: Array, b: Array) -> float:
    result = neula.solve(A, b)
    if not result.converged:
        print(result, result.attempts[-1].reason)
    assert_type(result.digits, float)
    return result.backward_error


def progress(stage: str, part: float) -> None:
    print(stage, part)


def told(A: Array) -> None:
    neula.qr(A, progress=progress)


def what_checkers_find(A: Array, b: Array) -> None:
    neula.qr(A, accuracy="fp23")  # type: ignore[call-overload]
    neula.qr(A, mode="thin")  # type: ignore[call-overload]
    neula.lstsq(A, b, progres=True)  # type: ignore[call-overload]
    neula.lstq(A, b)  # type: ignore[attr-defined]


def dropped_in(A: Array, b: Array, T: torch.Tensor) -> None:
    x, residuals, rank, s = neula.compat.numpy.lstsq(A, b)
    assert_type(neula.compat.torch.solve(T, T), torch.Tensor)
    y: Array = neula.compat.scipy.solve(A, b, lower=True)
    print(x, y, residuals, rank, s, neula.compat.numpy.norm(A))
