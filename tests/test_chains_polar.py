"""Algorithms tried for polar factors on each machine, in order."""

from __future__ import annotations

from typing import Any

import pytest

from neula.engines import BF16, FP16, FP32, FP64, EmulatedEngine, Format, Tuning
from neula.engines.shipped import EMULATED, cpu_tuning, cuda_tuning
from neula.problems.polar.links import chain
from neula.problems.polar.problem import PolarOptions

CPU = cpu_tuning(("bf16", "fp32", "fp64"))
H200 = cuda_tuning((9, 0), replayed_bytes=290_000_000)


def tried(tuning: Tuning, target: Format, **asked: Any) -> list[str]:
    engine = EmulatedEngine("cpu")
    engine.tuning = tuning
    return [link.label for link in chain(PolarOptions(target, engine, **asked))]


def test_on_an_h200() -> None:
    last = "svd fp64"
    assert tried(H200, BF16) == ["polynomials fp16", "more polynomials fp16_cor", last]
    for target in (FP16, FP32, FP64):
        name = "fp64" if target is FP64 else "fp16_cor"
        more = [f"{more}polynomials {name}" for more in ("", "more ")]
        assert tried(H200, target) == [*more, last]


def test_on_a_cpu() -> None:
    assert tried(CPU, BF16) == tried(CPU, FP32) == ["svd fp32", "svd fp64"]
    assert tried(CPU, FP64) == ["svd fp64"]


@pytest.mark.parametrize("tuning", [CPU, H200, EMULATED])
def test_a_threshold_is_for_the_svd(tuning: Tuning) -> None:
    assert tried(tuning, FP32, rcond=1e-3) == ["svd fp64"]
