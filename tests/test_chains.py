"""Algorithms tried on each machine, in order: chains are data, and need neither a matrix nor a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch

from least_squares_options import options_of
from neula.algorithms.krylov.doubled_refinement import SYNCHRONOUS, Pace
from neula.engines import FP16, FP32, FP64, EmulatedEngine, Engine, Tuning
from neula.engines.reduction import Reduction
from neula.engines.sharded import sharded
from neula.engines.shipped import EMULATED, cpu_tuning, cuda_tuning
from neula.kernels.core import core
from neula.kernels.small_problems import seminormal_host
from neula.pipeline.chain import Link
from neula.problems.least_squares import by_core
from neula.problems.least_squares import links as lstsq_chain
from neula.problems.least_squares.problem import LeastSquaresOptions
from neula.problems.least_squares.refined import LIMITS
from neula.problems.systems import links as solve_chain
from neula.problems.systems.problem import SystemsOptions

CPU = cpu_tuning(("fp32", "fp64"))
H200 = cuda_tuning((9, 0), replayed_bytes=290_000_000)
SLOW_FP64 = cuda_tuning((8, 9), replayed_bytes=48_000_000)
WITHOUT_KERNELS = cuda_tuning((9, 0), replayed_bytes=290_000_000, corrected=False, tournament_width=0)

SVD = "svd fp64"
ANY_RANK = ["complete orthogonal fp64", SVD]
FAST = ["rgsqrf fp16_cor", "rgsqrf fp64", "householder fp64"]
SEMINORMAL = ["cholesky fp64 + seminormal", "shifted cholesky fp64 + seminormal"]
SEMINORMAL_CPU = ["cholesky fp64 + seminormal", "householder fp64 + seminormal"]

P = TypeVar("P", bound=Any)


def labels(links: Sequence[Link[P, Any]]) -> list[str]:
    return [link.label for link in links]


def engine_of(tuning: Tuning) -> Engine:
    engine = EmulatedEngine("cpu")
    engine.tuning = tuning
    return engine


COMMON: dict[str, Any] = {
    "target": FP64,
    "dtype": torch.float64,
    "compute": None,
    "max_iterations": 60,
    "forward": False,
    "progress": None,
}


# ---------------------------------------------------------------- least squares


@pytest.fixture(autouse=True)
def _without_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains are those without the compiled core, where nothing else is said."""
    monkeypatch.setattr(seminormal_host, "core", lambda: None)


def least_squares_of(tuning: Tuning, **asked: Any) -> LeastSquaresOptions:
    return options_of(engine_of(tuning), **{"rcond": 1e-13, **asked})


def tried(tuning: Tuning, m: int, n: int, count: int = 1, **asked: Any) -> list[str]:
    """Everything that may be tried for some problems: together, and of one that is left alone."""
    options = least_squares_of(tuning, **asked)
    together = lstsq_chain.chain_together(count, m, n, options)
    return labels([*together, *lstsq_chain.chain_alone(m, n, options, count)])


def by(inner: str, *ways: str) -> list[str]:
    return [f"{way} + {inner}" for way in ways]


@pytest.mark.parametrize(
    ("m", "n", "first"),
    [(131072, 4096, ["cholesky fp16", "cholesky fp16_cor"]), (32768, 16384, ["rgsqrf fp16"])],
)
def test_one_large_least_squares_problem_on_an_h200(m: int, n: int, first: list[str]) -> None:
    assert tried(H200, m, n) == [*by("cgls", *first, *FAST), *ANY_RANK]


def test_a_tall_large_least_squares_problem_on_an_h200() -> None:
    iterations = [*by("cgls", "cholesky fp16_cor", *FAST), *ANY_RANK]
    assert tried(H200, 131072, 2048) == ["cholesky fp16_cor + seminormal", *iterations]
    weights = torch.ones(131072, dtype=torch.float64)
    for asked in ({"damp": 0.1}, {"weights": weights}):
        assert tried(H200, 131072, 2048, **asked) == iterations


class Elsewhere(Reduction):
    """Rows, some of which other processes have."""

    spread = True


@pytest.mark.parametrize(
    ("n", "first"),
    [
        (2048, ["cholesky fp16_cor + seminormal", "cholesky fp16_cor + cgls"]),
        (4096, ["cholesky fp16 + seminormal", "cholesky fp16 + cgls", "cholesky fp16_cor + cgls"]),
        (8192, ["rgsqrf fp16 + cgls"]),
    ],
)
def test_rows_over_several_gpus(n: int, first: list[str]) -> None:
    """Algorithms with few synchronizations come first; pivots are not looked for."""
    engine = sharded(engine_of(H200), Elsewhere())
    options = replace(least_squares_of(H200), engine=engine)
    together = lstsq_chain.chain_together(1, 100 * n, n, options)
    alone = lstsq_chain.chain_alone(100 * n, n, options)
    assert labels([*together, *alone]) == [*first, *by("cgls", *FAST), SVD]
    single = replace(options, dtype=torch.float32)  # which would be copied
    assert not lstsq_chain.chain_together(1, 100 * n, n, single)


PRELAUNCHED = [Pace.prelaunched(3), Pace.prelaunched(12)]
ASYNCHRONOUS = [Pace.asynchronous(1), Pace.asynchronous(2)]


@pytest.mark.parametrize(
    ("tuning", "shape", "asked", "paces"),
    [
        (H200, (1, 4000, 1500), {}, PRELAUNCHED),
        (H200, (1, 20000, 1000), {}, PRELAUNCHED),
        (H200, (1, 16384, 2000), {}, [PRELAUNCHED[0], ASYNCHRONOUS[1]]),
        (H200, (1, 30000, 1500), {}, ASYNCHRONOUS),
        (H200, (1, 30000, 1500), {"may_wait": False}, PRELAUNCHED),
        (H200, (1000, 64, 32), {}, PRELAUNCHED),
        (H200, (2, 30000, 1500), {}, PRELAUNCHED),
        (SLOW_FP64, (10, 2000, 500), {}, PRELAUNCHED),
        (CPU, (1, 1 << 20, 100), {}, [SYNCHRONOUS, SYNCHRONOUS]),
        (CPU, (1, 1 << 20, 100), {"may_wait": False}, [SYNCHRONOUS, SYNCHRONOUS]),
    ],
)
def test_when_the_host_reads_of_least_squares(
    tuning: Tuning, shape: tuple[int, int, int], asked: dict[str, Any], paces: list[Pace]
) -> None:
    """A replayed graph is not interrupted; of one large problem the host launches some steps before."""
    links = lstsq_chain.chain_together(*shape, least_squares_of(tuning, **asked))
    given = [link.answer.keywords for link in links]  # type: ignore[attr-defined]
    assert [keywords["pace"] for keywords in given] == paces
    # Only a link that synchronizes nowhere begins where nobody may wait.
    waits = asked.get("may_wait", True)
    assert [link.launches_only for link in links] == [pace.is_prelaunched and not waits for pace in paces]
    # R of the first links may be poor; of the last one it is the best there is.
    assert [keywords["source"].checked_first for keywords in given] == [False, True]


def test_least_squares_where_fp64_is_slow() -> None:
    expected = by("cgls", "cholesky fp16_cor", "rgsqrf fp16_cor", "householder fp64")
    assert tried(SLOW_FP64, 2000, 500) == [*expected, *ANY_RANK]
    expected = by("cgls", "rgsqrf fp16", "rgsqrf fp16_cor", "householder fp64")
    assert tried(SLOW_FP64, 32768, 16384) == [*expected, *ANY_RANK]


def test_least_squares_on_a_gpu_without_corrected_products() -> None:
    expected = by("cgls", "rgsqrf fp16", "rgsqrf fp64", "householder fp64")
    assert tried(WITHOUT_KERNELS, 131072, 2048) == [*expected, *ANY_RANK]


@pytest.mark.parametrize(("m", "n"), [(1000, 400), (2000, 500), (3000, 2000), (32768, 16384), (1 << 20, 100)])
def test_a_cpu_takes_the_gram_matrix_whatever_its_size(m: int, n: int) -> None:
    """In single precision where nothing finer is asked for."""
    assert tried(CPU, m, n) == tried(CPU, m, n, 10) == [*SEMINORMAL_CPU, *ANY_RANK]
    assert tried(CPU, m, n, target=FP32) == ["cholesky fp32 + seminormal", *SEMINORMAL_CPU, *ANY_RANK]


@pytest.mark.parametrize("count", [1, 10])
@pytest.mark.parametrize(
    ("m", "n", "first", "dependent"),
    [(1000, 400, 0, 1), (8192, 512, 0, 1), (8192, 513, 0, 0), (8200, 512, 0, 0), (1000, 100, 1, 0)],
)
def test_the_core_takes_small_problems_and_dependent_columns(
    m: int, n: int, first: int, dependent: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seminormal_host, "available", lambda: True)
    found = tried(CPU, m, n, count)
    assert found.count("pivoted cholesky fp64 + seminormal") == dependent
    assert found[:2] == SEMINORMAL_CPU
    options = least_squares_of(CPU)
    link = lstsq_chain.chain_together(count, m, n, options)[0]
    assert (link.answer.func is by_core.by_core) == bool(first)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("m", "n"), [(8192, 1024), (32768, 16384)])
def test_one_large_least_squares_problem_elsewhere(m: int, n: int) -> None:
    assert tried(EMULATED, m, n) == [*by("cgls", "rgsqrf fp16", "rgsqrf fp32", "householder fp64"), *ANY_RANK]


@pytest.mark.parametrize("count", [1, 1000])
@pytest.mark.parametrize("shape", [(64, 32), (32, 64), (1000, 100)])
def test_small_least_squares_problems(shape: tuple[int, int], count: int) -> None:
    assert tried(H200, *shape, count) == [*SEMINORMAL, SVD]
    assert tried(SLOW_FP64, *shape, count) == [*SEMINORMAL, SVD]
    assert tried(CPU, *shape, count) == [*SEMINORMAL_CPU, SVD]


def test_small_problems_on_a_cpu_are_refined_to_the_last_digit() -> None:
    assert tried(CPU, 64, 32, target=FP32) == [*SEMINORMAL_CPU, SVD]
    assert tried(CPU, 1000, 100, target=FP32, forward=True) == [*SEMINORMAL_CPU, SVD]


def test_a_gpu_solves_larger_least_squares_problems_together() -> None:
    assert tried(H200, 16384, 2048) == [*SEMINORMAL, ANY_RANK[0], SVD]
    assert tried(H200, 500, 2000, 10) == [*SEMINORMAL, ANY_RANK[0], SVD]
    assert tried(SLOW_FP64, 2000, 500, 10) == [*SEMINORMAL, *ANY_RANK]
    alone = by("cgls", "cholesky fp16_cor", "rgsqrf fp16_cor", "householder fp64")
    assert tried(SLOW_FP64, 20000, 500, 10) == [*alone, *ANY_RANK]


def test_wide_least_squares_problems() -> None:
    assert tried(H200, 4096, 32768) == [*by("craig", "cholesky fp16", "cholesky fp16_cor", *FAST), *ANY_RANK]
    for target in (FP64, FP32):
        assert tried(CPU, 500, 2000, target=target) == [*by("craig", "householder fp64"), *ANY_RANK]
    assert tried(CPU, 500, 2000, algorithm="lsqr") == ["rgsqrf fp32 + craig"]


def test_damped_least_squares_problems_are_never_wide() -> None:
    assert tried(CPU, 500, 2000, damp=0.1) == [*SEMINORMAL_CPU, *ANY_RANK]
    assert tried(H200, 2048, 8192, damp=0.1) == [*by("cgls", "rgsqrf fp16", *FAST), *ANY_RANK]
    # Those of the stacked matrix count.
    assert tried(CPU, 90, 220) == [*SEMINORMAL_CPU, SVD]
    assert tried(CPU, 90, 220, damp=0.1) == [*SEMINORMAL_CPU, *ANY_RANK]


@pytest.mark.parametrize(
    "asked", [{"damp": 0.1}, {"weights": torch.ones(2000, dtype=torch.float64)}, {"wide": True}]
)
def test_forward_errors_of_other_least_squares_problems_are_refined_together(asked: dict[str, Any]) -> None:
    asked = dict(asked)
    shape = (500, 2000) if asked.pop("wide", False) else (2000, 500)
    assert tried(CPU, *shape, **asked)[-1] == SVD
    assert tried(CPU, *shape, forward=True, **asked) == [*SEMINORMAL_CPU, SVD]
    without = [link for link in tried(CPU, 2000, 500) if link != ANY_RANK[0]]
    assert tried(CPU, 2000, 500, forward=True) == without  # it has no digits to promise


@pytest.mark.parametrize("shape", [(64, 32), (2000, 500)])
@pytest.mark.parametrize("tuning", [CPU, H200, EMULATED], ids=["cpu", "h200", "emulated"])
def test_a_named_algorithm_is_the_only_one(tuning: Tuning, shape: tuple[int, int]) -> None:
    first = tuning.preconditioners[0]
    assert tried(tuning, *shape, algorithm="cgls") == [f"rgsqrf {first} + cgls"]
    assert tried(tuning, *shape, algorithm="lsqr") == [f"rgsqrf {first} + lsqr"]
    assert tried(tuning, *shape, algorithm="cgls", compute="fp16_cor") == ["rgsqrf fp16_cor + cgls"]
    assert tried(tuning, *shape, algorithm="householder") == ["householder fp64 + cgls"]
    assert tried(tuning, *shape, algorithm="svd") == [SVD]
    assert tried(tuning, *shape, algorithm="direct") == ["direct fp32"]
    assert tried(tuning, *shape, algorithm="normal", compute="fp16") == ["normal fp16"]


def test_a_named_format_is_tried_first() -> None:
    expected = by("cgls", "rgsqrf tf32", "householder fp64")
    assert tried(H200, 64, 32, 10, compute="tf32") == [*expected, SVD]
    assert tried(H200, 2000, 500, compute="tf32") == [*expected, *ANY_RANK]


def test_only_an_r_that_is_followed_by_a_better_fast_one_is_given_up_early() -> None:
    def limits(n: int, **asked: Any) -> list[Any]:
        chain = lstsq_chain.chain_alone(2 * n, n, least_squares_of(H200, **asked))
        return [link.answer.keywords.get("limit") for link in chain]  # type: ignore[attr-defined]

    assert limits(16384)[:2] == [LIMITS["rgsqrf", "fp16"], None]
    assert limits(16384, algorithm="cgls") == [None]
    assert limits(16384, compute="fp16") == [None] * 4


def test_the_svd_improves_the_best_that_was_found() -> None:
    chain = lstsq_chain.chain_alone(2000, 500, least_squares_of(H200))
    assert [link.improves for link in chain] == [False] * (len(chain) - 2) + [True, True]


# ---------------------------------------------------------------- linear systems


def systems_of(tuning: Tuning, **asked: Any) -> SystemsOptions:
    return SystemsOptions(engine=engine_of(tuning), **{**COMMON, "positive": False, "pivot": None, **asked})


def solved(tuning: Tuning, n: int, count: int = 1, **asked: Any) -> list[str]:
    """Everything that may be tried for systems: together, and of one that is left alone."""
    options = systems_of(tuning, **asked)
    together = solve_chain.chain_together(count, n, options)
    return labels([*together, *solve_chain.chain_alone(n, options, count)])


LIBRARY = ["lu fp64 with pivoting", "rbt + lu fp64"]
MIXED_FIRST = ["rbt + lu fp64", "lu fp64 with pivoting"]


@pytest.mark.parametrize("tuning", [CPU, H200, SLOW_FP64, EMULATED], ids=["cpu", "h200", "8.9", "emulated"])
def test_small_systems_by_the_library(tuning: Tuning) -> None:
    by_core = tuning is CPU and core() is not None  # whose link has the label of LAPACK's, which follows
    first = LIBRARY[:1] * by_core
    if tuning is H200:
        first = ["cholesky of the normal equations fp64"]
    assert solved(tuning, 200) == [*first, *(MIXED_FIRST if tuning is H200 else LIBRARY)]
    by_host = LIBRARY[:1] if tuning is H200 else []  # or what there is before the library
    assert solved(tuning, 200, count=3) == [*first, *by_host, *LIBRARY]
    first = ["cholesky fp64, inverted"] if tuning is H200 else ["cholesky fp64"] * by_core
    assert solved(tuning, 200, positive=True) == [*first, "cholesky fp64"]


def test_large_systems_on_a_cpu() -> None:
    """Where labels follow themselves, the core comes before."""
    twice = [*LIBRARY[:1], *LIBRARY] if core() is not None else LIBRARY
    single = ["lu fp32 with pivoting"] * (1 + (core() is not None))
    definite = ["cholesky fp64"] * (1 + (core() is not None))
    assert solved(CPU, 1699) == twice
    # In single precision where nothing finer is asked for, and calls are not what takes the time.
    assert solved(CPU, 1699, target=FP32) == [*single, *twice]
    assert solved(CPU, 100, target=FP32) == twice
    assert solved(CPU, 1700) == solved(CPU, 5999) == twice
    assert solved(CPU, 1700, target=FP32) == [*single, *twice]
    assert solved(CPU, 6000) == ["lu fp32 with pivoting", *LIBRARY]
    assert solved(CPU, 4499, positive=True) == solved(CPU, 100, positive=True) == definite
    assert solved(CPU, 4500, positive=True) == ["cholesky fp32", "cholesky fp64", *LIBRARY]


def test_large_systems_on_an_h200() -> None:
    assert solved(H200, 257) == MIXED_FIRST
    assert solved(H200, 6000) == MIXED_FIRST == solved(H200, 4000, dtype=torch.complex128)
    with_gmres = ["rbt + lu fp64", "rbt + lu fp64 + gmres", "lu fp64 with pivoting"]
    assert solved(H200, 6000, dtype=torch.complex128) == with_gmres
    assert solved(H200, 8191)[0] == "rbt + lu fp64"
    assert solved(H200, 8192)[:2] == ["lu fp16", "rbt + lu fp64"]
    last = ["rbt + lu fp64", "rbt + lu fp64 + gmres", "lu fp64 with pivoting"]
    assert solved(H200, 18000) == ["lu fp16", *last]
    assert solved(H200, 18001) == ["lu fp16", "lu fp16 with pivoting", *LIBRARY]
    assert solved(H200, 32768) == ["lu fp16", "lu fp16 with pivoting", *LIBRARY]
    assert solved(WITHOUT_KERNELS, 32768) == ["lu fp16", *LIBRARY]
    assert solved(H200, 17000, positive=True) == ["cholesky fp64, inverted", "cholesky fp64"]
    whole = ["cholesky fp64, inverted", "cholesky fp64"]
    assert solved(H200, 6000, positive=True, dtype=torch.complex128) == whole
    assert solved(H200, 6145, positive=True, dtype=torch.complex128)[0] == "cholesky fp16"
    definite = ["cholesky fp16", "cholesky fp16_cor", "cholesky fp64", *LIBRARY]
    assert solved(H200, 17001, positive=True) == definite


def test_large_systems_where_fp64_is_slow() -> None:
    single = ["lu fp32", "rbt + lu fp32", "lu fp32 with pivoting"]
    assert solved(SLOW_FP64, 8192) == ["lu fp16", "lu fp16 with pivoting", *single, *LIBRARY]
    positive = ["cholesky fp16", "cholesky fp16_cor", "cholesky fp64", *LIBRARY]
    assert solved(SLOW_FP64, 32768, positive=True) == positive


@pytest.mark.parametrize("n", [100, 32768])
@pytest.mark.parametrize("tuning", [CPU, H200, SLOW_FP64, EMULATED], ids=["cpu", "h200", "8.9", "emulated"])
def test_named_pivots_are_the_only_ones(tuning: Tuning, n: int) -> None:
    first = tuning.preconditioners[0]
    assert solved(tuning, n, pivot="none") == [f"lu {first}"]
    assert solved(tuning, n, pivot="rbt") == [f"rbt + lu {first}"]
    assert solved(tuning, n, pivot="partial") == [f"lu {first} with pivoting"]
    assert solved(tuning, n, pivot="rbt", compute=FP32) == ["rbt + lu fp32"]


def test_a_named_format_of_systems_is_tried_first() -> None:
    assert solved(H200, 100, compute=FP16) == ["lu fp16", "rbt + lu fp16", "lu fp16 with pivoting", *LIBRARY]
    assert solved(CPU, 100, compute=FP16) == ["lu fp16 with pivoting", *LIBRARY]
    assert solved(H200, 100, compute=FP64, positive=True) == ["cholesky fp64", *LIBRARY]
