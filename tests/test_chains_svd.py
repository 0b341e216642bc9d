"""Algorithms tried for low-rank approximations and polar factors on each machine, in order."""

from __future__ import annotations

from typing import Any

import pytest

from neula.engines import BF16, FP16, FP32, FP64, EmulatedEngine, Engine, Format, Tuning
from neula.engines.shipped import EMULATED, cpu_tuning, cuda_tuning
from neula.problems.low_rank import links as low_rank
from neula.problems.low_rank.problem import SVDOptions
from neula.problems.polar import links as polar
from neula.problems.polar.problem import PolarOptions

CPU = cpu_tuning(("fp32", "fp64"))
WITH_BF16 = cpu_tuning(("bf16", "fp32", "fp64"))
H200 = cuda_tuning((9, 0), replayed_bytes=290_000_000)
WITHOUT_KERNELS = cuda_tuning((9, 0), replayed_bytes=290_000_000, corrected=False, tournament_width=0)

LARGE = (50000, 4000, 20)
SMALL = (200, 20, 3)


def engine_of(tuning: Tuning) -> Engine:
    engine = EmulatedEngine("cpu")
    engine.tuning = tuning
    return engine


def tried(tuning: Tuning, m: int, n: int, rank: int | None = None, **asked: Any) -> list[str]:
    options = SVDOptions(**{"target": FP32, "part": None, "engine": engine_of(tuning), "rank": rank, **asked})
    return [link.label for link in low_rank.chain(m, n, options)]


def all_three(name: str) -> list[str]:
    return [f"subspace iteration {name}", f"gram-svd {name}", "qr-svd"]


@pytest.mark.parametrize(
    ("tuning", "shape", "asked", "expected"),
    [
        *(
            (tuning, shape, {"target": target}, all_three(name))
            for shape in [LARGE, (8000, 8000, 50), (200000, 2000, 100), (5001, 2000, 20)]
            for tuning, target, name in [
                (H200, FP32, "fp16_cor"),
                (H200, FP16, "fp16"),
                (H200, FP64, "fp64"),
                (WITHOUT_KERNELS, FP32, "fp32"),
            ]
        ),
        (CPU, (3000, 3000, 50), {}, all_three("fp32")),
        # A number decides on the arithmetic of subspaces; triplets are to be good to a part of each.
        (H200, LARGE, {"part": 1e-2}, ["subspace iteration fp16", *all_three("fp16_cor")[1:]]),
        (H200, LARGE, {"part": 1e-4}, all_three("fp16_cor")),
        (H200, LARGE, {"target": FP64, "part": 1e-9}, all_three("fp64")),
        (CPU, LARGE, {"part": 1e-2}, all_three("fp32")),
        # Launches take longer than a small Gram matrix, whose eigenvectors are cheap for a few columns.
        *(
            (H200, shape, {}, all_three("fp16_cor")[1:])
            for shape in [(2000, 500, 5), (524288, 256, 32), SMALL]
        ),
        (CPU, (20000, 100, 10), {}, all_three("fp32")[1:]),
        (CPU, SMALL, {"target": FP64}, all_three("fp64")[1:]),
        # Many singular values come from QR, and all on the emulated engine, as in the paper.
        *(
            (tuning, shape, asked, ["qr-svd"])
            for tuning in (CPU, H200)
            for shape, asked in [((3000, 1000, 251), {}), ((3000, 1000), {"tol": 1e-3}), ((3000, 1000), {})]
        ),
        (CPU, (200, 20), {}, ["qr-svd"]),
        (EMULATED, (3000, 1000, 5), {}, ["qr-svd"]),
        # A named algorithm is the only one.
        *(
            (tuning, SMALL, {"algorithm": algorithm, "target": FP64}, [label])
            for tuning in (CPU, H200, EMULATED)
            for algorithm, label in zip(("iteration", "gram-svd", "qr-svd"), all_three("fp64"), strict=True)
        ),
    ],
)
def test_low_rank(tuning: Tuning, shape: tuple[int, ...], asked: dict[str, Any], expected: list[str]) -> None:
    assert tried(tuning, *shape, **asked) == expected


@pytest.mark.parametrize(("rank", "width"), [(1, 16), (20, 32), (50, 64), (100, 128), (400, 500)])
def test_the_block_is_wider_than_the_rank(rank: int, width: int) -> None:
    assert low_rank.block_width(500, rank) == width


POLYNOMIALS = ["polynomials {}", "more polynomials {}"]


@pytest.mark.parametrize(
    ("tuning", "target", "rcond", "expected"),
    [
        (H200, BF16, None, ["polynomials fp16", "more polynomials fp16_cor", "svd fp64"]),
        *(
            (H200, target, None, [*(x.format(name) for x in POLYNOMIALS), "svd fp64"])
            for target, name in [(FP16, "fp16_cor"), (FP32, "fp16_cor"), (FP64, "fp64")]
        ),
        *((WITH_BF16, target, None, ["svd fp32", "svd fp64"]) for target in (BF16, FP32)),
        (WITH_BF16, FP64, None, ["svd fp64"]),
        # A threshold is for the SVD.
        *((tuning, FP32, 1e-3, ["svd fp64"]) for tuning in (WITH_BF16, H200, EMULATED)),
    ],
)
def test_polar(tuning: Tuning, target: Format, rcond: float | None, expected: list[str]) -> None:
    asked = {} if rcond is None else {"rcond": rcond}
    links = polar.chain(PolarOptions(target, engine_of(tuning), **asked))
    assert [link.label for link in links] == expected
