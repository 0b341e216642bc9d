"""The front end: what a call begins with, and how it ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from neula.pipeline.call import Call
from neula.pipeline.result import AccuracyError, AccuracyWarning


def begun(*shapes: tuple[int, ...], dtype: type = np.float64, **options: object) -> Call:
    operands = {name: np.ones(shape, dtype) for name, shape in zip("Ab", shapes, strict=False)}
    return Call.begin(operands, engine="cpu", **options)  # type: ignore[arg-type]


def test_operands_of_any_library_have_a_common_dtype_and_its_accuracy() -> None:
    operands = {"A": np.ones((2, 3), np.float32), "b": torch.ones(2, dtype=torch.float16)}
    call = Call.begin(operands, engine="auto", weights=np.ones(2))
    assert (call.dtype, call.target.name) == (torch.float32, "fp32")
    assert (call.engine.name, call.engine.device.type) == ("cpu", "cpu")
    assert [x.dtype for x in call.tensors] == [torch.float32, torch.float16]
    assert isinstance(call.give_back(call.tensors[1]), np.ndarray)
    assert Call.begin({"A": np.ones((2, 2), int)}, engine="emulated", accuracy="fp16").target.name == "fp16"


def test_a_single_matrix_is_a_batch_of_one() -> None:
    assert begun((4, 3)).matrices().shape == (1, 4, 3)
    assert begun((2, 5, 4, 3)).matrices().shape == (10, 4, 3)
    assert begun((2, 0, 4, 3)).matrices().shape == (0, 4, 3)


def test_who_wants_gradients() -> None:
    a, b = torch.ones(2, 2, requires_grad=True), torch.ones(2)
    assert Call.begin({"A": a, "b": b}, engine="cpu", gradients=True).differentiable
    assert not Call.begin({"A": a.detach(), "b": b}, engine="cpu", gradients=True).differentiable
    assert Call.begin({"A": b, "b": b}, engine="cpu", gradients=True, weights=a).differentiable
    with torch.no_grad():
        assert not Call.begin({"A": a}, engine="cpu", gradients=True).differentiable
    with pytest.raises(ValueError, match="b requires a gradient, and this function has none"):
        Call.begin({"A": b, "b": a}, engine="cpu")
    with pytest.raises(ValueError, match="A is no torch tensor"):
        Call.begin({"A": np.ones(2), "b": a}, engine="cpu", gradients=True)


def test_work_is_done_without_gradients() -> None:
    a = torch.ones(2, 2, requires_grad=True)
    call = Call.begin({"A": a}, engine="cpu", gradients=True)
    with call.computing():
        assert not (a @ a).requires_grad
    assert (a @ a).requires_grad


def test_a_missed_accuracy_is_a_warning_or_an_error() -> None:
    with pytest.warns(AccuracyWarning, match=r"it is not accurate for A\[1\]: too far off"):
        begun((2, 3, 3)).report_missed("it is not accurate", "too far off", None, [[1]])
    with pytest.raises(AccuracyError, match="it is not accurate: too far off") as raised:
        begun((3, 3), strict=True).report_missed("it is not accurate", "too far off", "the best", [[]])
    assert (raised.value.result, raised.value.indices) == ("the best", ((),))


def test_a_strict_call_refuses_nan_in_a_batch() -> None:
    A, b = np.ones((2, 3, 3)), np.ones((3, 1))
    b[2] = np.nan
    call = Call.begin({"A": A, "b": b}, engine="cpu", strict=True)
    with pytest.raises(ValueError, match=r"b\[2, 0\] is nan"):
        call.report_missed("it is not accurate", "too far off", None, [[0], [1]])
