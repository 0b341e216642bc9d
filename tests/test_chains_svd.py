"""Algorithms tried for low-rank approximations on each machine, in order."""

from __future__ import annotations

from typing import Any

import pytest

from neula.engines import FP16, FP32, FP64, EmulatedEngine, Tuning
from neula.engines.shipped import EMULATED, cpu_tuning, cuda_tuning
from neula.problems.low_rank.links import block_width, chain
from neula.problems.low_rank.problem import SVDOptions

CPU = cpu_tuning(("fp32", "fp64"))
H200 = cuda_tuning((9, 0), replayed_bytes=290_000_000)
WITHOUT_KERNELS = cuda_tuning((9, 0), replayed_bytes=290_000_000, corrected=False, tournament_width=0)


def tried(tuning: Tuning, m: int, n: int, rank: int | None = None, **asked: Any) -> list[str]:
    engine = EmulatedEngine("cpu")
    engine.tuning = tuning
    options = SVDOptions(**{"target": FP32, "part": None, "engine": engine, "rank": rank, **asked})
    return [link.label for link in chain(m, n, options)]


@pytest.mark.parametrize(
    ("m", "n", "rank"), [(50000, 4000, 20), (8000, 8000, 50), (200000, 2000, 100), (5001, 2000, 20)]
)
def test_a_few_singular_values_on_an_h200(m: int, n: int, rank: int) -> None:
    assert tried(H200, m, n, rank) == ["subspace iteration fp16_cor", "gram-svd fp16_cor", "qr-svd"]
    assert tried(H200, m, n, rank, target=FP16) == ["subspace iteration fp16", "gram-svd fp16", "qr-svd"]
    assert tried(H200, m, n, rank, target=FP64) == ["subspace iteration fp64", "gram-svd fp64", "qr-svd"]
    without = tried(WITHOUT_KERNELS, m, n, rank)
    assert without == ["subspace iteration fp32", "gram-svd fp32", "qr-svd"]


def test_launches_of_iterations_take_longer_than_a_small_gram_matrix_on_an_h200() -> None:
    assert tried(H200, 2000, 500, 5) == ["gram-svd fp16_cor", "qr-svd"]


def test_a_number_decides_on_the_arithmetic_of_iterations() -> None:
    """Subspaces are found in the low format; triplets that are to be good to a part of each are not."""
    shape = (50000, 4000, 20)
    assert tried(H200, *shape, part=1e-2) == ["subspace iteration fp16", "gram-svd fp16_cor", "qr-svd"]
    assert tried(H200, *shape, part=1e-4)[0] == "subspace iteration fp16_cor"
    assert tried(H200, *shape, target=FP64, part=1e-9)[0] == "subspace iteration fp64"
    assert tried(CPU, *shape, part=1e-2)[0] == "subspace iteration fp32"


def test_where_the_gram_matrix_costs_less_it_comes_first() -> None:
    """Its eigenvectors are cheap for a few columns, beside iterations that read all rows again and again."""
    assert tried(H200, 524288, 256, 32) == ["gram-svd fp16_cor", "qr-svd"]
    assert tried(CPU, 20000, 100, 10) == ["gram-svd fp32", "qr-svd"]
    assert tried(CPU, 3000, 3000, 50) == ["subspace iteration fp32", "gram-svd fp32", "qr-svd"]


@pytest.mark.parametrize("tuning", [CPU, H200])
def test_many_singular_values_come_from_qr(tuning: Tuning) -> None:
    assert tried(tuning, 3000, 1000, 251) == ["qr-svd"]
    assert tried(tuning, 3000, 1000, tol=1e-3) == ["qr-svd"]
    assert tried(tuning, 3000, 1000) == ["qr-svd"]


def test_small_ones_are_like_others() -> None:
    assert tried(CPU, 200, 20) == ["qr-svd"]
    assert tried(CPU, 200, 20, 3, target=FP64) == ["gram-svd fp64", "qr-svd"]
    assert tried(H200, 200, 20, 3) == ["gram-svd fp16_cor", "qr-svd"]


def test_the_emulated_engine_does_as_the_paper() -> None:
    assert tried(EMULATED, 3000, 1000, 5) == ["qr-svd"]


@pytest.mark.parametrize("tuning", [CPU, H200, EMULATED], ids=["cpu", "h200", "emulated"])
def test_a_named_algorithm_is_the_only_one(tuning: Tuning) -> None:
    assert tried(tuning, 200, 20, 3, algorithm="qr-svd") == ["qr-svd"]
    assert tried(tuning, 200, 20, 3, algorithm="gram-svd", target=FP64) == ["gram-svd fp64"]
    assert tried(tuning, 200, 20, 3, algorithm="iteration", target=FP64) == ["subspace iteration fp64"]


@pytest.mark.parametrize(("rank", "width"), [(1, 16), (20, 32), (50, 64), (100, 128), (400, 500)])
def test_the_block_is_wider_than_the_rank(rank: int, width: int) -> None:
    assert block_width(500, rank) == width
