"""Members of a batch that hold NaN or Inf: they are named, their answers are NaN, and no other changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.matrices import normal

import neula
from neula.engines import CpuEngine
from neula.engines.shipped import cuda_tuning
from neula.problems.orthogonal.tsqr import COMPUTE


def together(preconditioner: str) -> CpuEngine:
    """A CPU that takes the steps of a GPU for batches."""
    members = {"tuning": cuda_tuning((9, 0)), "preconditioners": (preconditioner,)}
    return type("Tuned", (CpuEngine,), members)("cpu")


def least_squares(a: torch.Tensor, **options: Any) -> Any:
    return neula.lstsq(a, torch.ones(*a.shape[:-1], 2, dtype=a.dtype, device=a.device), **options)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "qr": neula.qr,
    "qr, one by one": partial(neula.qr, engine="emulated"),
    "qr, fp32": partial(neula.qr, engine=together("fp32")),
    "qr, fp64": partial(neula.qr, engine=together("fp64")),
    "complete factors": partial(neula.qr, mode="complete"),
    "complete factors, fp64": partial(neula.qr, mode="complete", engine=together("fp64")),
    "raw": partial(neula.qr, mode="raw"),
    "raw, from Q": partial(neula.qr, mode="raw", engine=together("fp32")),
    "orth": neula.orth,
    "tsqr": neula.tsqr,
    **{f"tsqr {mode}": partial(neula.tsqr, compute=mode, engine="emulated") for mode in COMPUTE},
    "lstsq": least_squares,
    "lstsq, one by one": partial(least_squares, engine="emulated"),
    "lstsq, fp64": partial(least_squares, engine=together("fp64")),
    "polar": partial(neula.polar, side="right"),
    "polar for optimizers": partial(neula.polar, accuracy="bf16", engine="emulated"),
    "pinv": neula.pinv,
}
ON_A_GPU = [name for name in FUNCTIONS if "," not in name and name != "raw"]


def answers(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    names = ("Q", "R", "H", "tau", "U", "x")
    found = [getattr(result, name, None) for name in names]
    return [x for x in found if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("shape", [(2, 3, 30, 4), (2, 3, 4, 30)], ids=["tall", "wide"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    ("name", "device"),
    [
        *((name, "cpu") for name in FUNCTIONS),
        *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in ON_A_GPU),
    ],
)
def test_what_is_not_finite_stays_in_its_member(
    name: str, device: str, bad: float, shape: tuple[int, ...]
) -> None:
    function, a = FUNCTIONS[name], normal(*shape, dtype=torch.float32).to(device)
    clean = answers(function(a))
    good = torch.ones(2, 3, dtype=torch.bool, device=device)
    good[1, 0] = False
    if name.startswith(("qr", "complete", "raw", "lstsq")):
        good[0, 1] = False
        a[0, 1, :, 2] = a[0, 1, :, 3]
    a[1, 0, -1, -1] = bad
    with pytest.warns(neula.AccuracyWarning, match=r"for A\[1, 0\]: |for A\[0\]: 1 of 1 .* NaN or Inf"):
        result = function(a)
    for x, y in zip(answers(result), clean, strict=True):
        assert x[1, 0].isnan().all()
        assert torch.equal(x[good], y[good])
    if hasattr(result, "converged"):
        assert not result.converged
        assert result.accepted.tolist() == [[True] * 3, [False, True, True]]
    place = rf"A\[1, 0, {shape[2] - 1}, {shape[3] - 1}\] is {bad}"
    with pytest.raises(ValueError, match=place):
        function(a, strict=True)
    with pytest.raises(ValueError, match=place.replace("1, 0, ", "", 1)):
        function(a[1, 0])
