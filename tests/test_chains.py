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
FEW = "cholesky fp16_cor"
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


SLOW = ["cholesky fp16_cor", "rgsqrf fp16_cor", "householder fp64"]
WEIGHTS = {"weights": torch.ones(131072, dtype=torch.float64)}
DAMPED = {"damp": 0.1}
SINGLE = {"target": FP32}

LEAST_SQUARES: list[tuple[Tuning, tuple[int, ...], dict[str, Any], list[str]]] = [
    # One large problem.
    (H200, (131072, 4096), {}, [*by("cgls", "cholesky fp16", FEW, *FAST), *ANY_RANK]),
    (H200, (32768, 16384), {}, [*by("cgls", "rgsqrf fp16", *FAST), *ANY_RANK]),
    (H200, (131072, 2048), {}, [*by("seminormal", FEW), *by("cgls", FEW, *FAST), *ANY_RANK]),
    *((H200, (131072, 2048), asked, [*by("cgls", FEW, *FAST), *ANY_RANK]) for asked in (DAMPED, WEIGHTS)),
    (SLOW_FP64, (2000, 500), {}, [*by("cgls", *SLOW), *ANY_RANK]),
    (SLOW_FP64, (32768, 16384), {}, [*by("cgls", "rgsqrf fp16", *SLOW[1:]), *ANY_RANK]),
    (WITHOUT_KERNELS, (131072, 2048), {}, [*by("cgls", "rgsqrf fp16", *FAST[1:]), *ANY_RANK]),
    *(
        (EMULATED, shape, {}, [*by("cgls", "rgsqrf fp16", "rgsqrf fp32", "householder fp64"), *ANY_RANK])
        for shape in [(8192, 1024), (32768, 16384)]
    ),
    # A CPU takes the Gram matrix whatever its size, in single precision where nothing finer is asked for.
    *(
        (CPU, (m, n, count), asked, [*single, *SEMINORMAL_CPU, *ANY_RANK])
        for m, n in [(1000, 400), (2000, 500), (3000, 2000), (32768, 16384), (1 << 20, 100)]
        for count, asked, single in [(1, {}, []), (10, {}, []), (1, SINGLE, ["cholesky fp32 + seminormal"])]
    ),
    # Small problems, which a CPU refines to the last digit, and on a GPU larger ones together.
    *(
        (tuning, (*shape, count), {}, [*first, SVD])
        for tuning, first in ((H200, SEMINORMAL), (SLOW_FP64, SEMINORMAL), (CPU, SEMINORMAL_CPU))
        for shape in [(64, 32), (32, 64), (1000, 100)]
        for count in (1, 1000)
    ),
    (CPU, (64, 32), SINGLE, [*SEMINORMAL_CPU, SVD]),
    (CPU, (1000, 100), SINGLE | {"forward": True}, [*SEMINORMAL_CPU, SVD]),
    (H200, (16384, 2048), {}, [*SEMINORMAL, *ANY_RANK]),
    (H200, (500, 2000, 10), {}, [*SEMINORMAL, *ANY_RANK]),
    (SLOW_FP64, (2000, 500, 10), {}, [*SEMINORMAL, *ANY_RANK]),
    (SLOW_FP64, (20000, 500, 10), {}, [*by("cgls", *SLOW), *ANY_RANK]),
    # Wide ones, which damped problems never are: the shape of the stacked matrix counts.
    (H200, (4096, 32768), {}, [*by("craig", "cholesky fp16", FEW, *FAST), *ANY_RANK]),
    *((CPU, (500, 2000), x, [*by("craig", "householder fp64"), *ANY_RANK]) for x in ({}, SINGLE)),
    (CPU, (500, 2000), {"algorithm": "lsqr"}, ["rgsqrf fp32 + craig"]),
    (CPU, (500, 2000), DAMPED, [*SEMINORMAL_CPU, *ANY_RANK]),
    (H200, (2048, 8192), DAMPED, [*by("cgls", "rgsqrf fp16", *FAST), *ANY_RANK]),
    (CPU, (90, 220), {}, [*SEMINORMAL_CPU, SVD]),
    (CPU, (90, 220), DAMPED, [*SEMINORMAL_CPU, *ANY_RANK]),
    # Complete orthogonal factors have no digits to promise.
    *(
        (CPU, shape, asked | {"forward": True}, [*SEMINORMAL_CPU, SVD])
        for shape, asked in [
            *(((2000, 500), asked) for asked in ({}, DAMPED, {"weights": WEIGHTS["weights"][:2000]})),
            ((500, 2000), {}),
        ]
    ),
    # A named algorithm is the only one, a named format is tried first.
    *(
        (tuning, shape, named, [label.format(tuning.preconditioners[0])])
        for tuning in (CPU, H200, EMULATED)
        for shape in [(64, 32), (2000, 500)]
        for named, label in [
            ({"algorithm": "cgls"}, "rgsqrf {} + cgls"),
            ({"algorithm": "lsqr"}, "rgsqrf {} + lsqr"),
            ({"algorithm": "cgls", "compute": "fp16_cor"}, "rgsqrf fp16_cor + cgls"),
            ({"algorithm": "householder"}, "householder fp64 + cgls"),
            ({"algorithm": "svd"}, SVD),
            ({"algorithm": "direct"}, "direct fp32"),
            ({"algorithm": "normal", "compute": "fp16"}, "normal fp16"),
        ]
    ),
    (H200, (64, 32, 10), {"compute": "tf32"}, [*by("cgls", "rgsqrf tf32", "householder fp64"), SVD]),
    (H200, (2000, 500), {"compute": "tf32"}, [*by("cgls", "rgsqrf tf32", "householder fp64"), *ANY_RANK]),
]


@pytest.mark.parametrize(("tuning", "shape", "asked", "expected"), LEAST_SQUARES)
def test_least_squares(
    tuning: Tuning, shape: tuple[int, ...], asked: dict[str, Any], expected: list[str]
) -> None:
    assert tried(tuning, *shape, **asked) == expected


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
WITH_GMRES = ["rbt + lu fp64", "rbt + lu fp64 + gmres", "lu fp64 with pivoting"]
POSITIVE, COMPLEX = {"positive": True}, {"dtype": torch.complex128}
INVERTED = ["cholesky fp64, inverted", "cholesky fp64"]
HALF_DEFINITE = ["cholesky fp16", "cholesky fp16_cor", "cholesky fp64", *LIBRARY]
HALF = ["lu fp16", "lu fp16 with pivoting"]
CORE = 1 + (core() is not None)
"""The core's link has the label of LAPACK's, which follows."""
BY_CPU = [*LIBRARY[:1] * (CORE - 1), *LIBRARY]

SYSTEMS: list[tuple[Tuning, tuple[int, ...], dict[str, Any], list[str]]] = [
    # Small ones by the library.
    (H200, (200,), {}, ["cholesky of the normal equations fp64", *MIXED_FIRST]),
    (H200, (200, 3), {}, ["cholesky of the normal equations fp64", *LIBRARY[:1], *LIBRARY]),
    (H200, (200,), POSITIVE, INVERTED),
    *((tuning, (200, count), {}, LIBRARY) for tuning in (SLOW_FP64, EMULATED) for count in (1, 3)),
    *((tuning, (200,), POSITIVE, ["cholesky fp64"]) for tuning in (SLOW_FP64, EMULATED)),
    # On a CPU: in single precision where nothing finer is asked for, and calls are not what takes the time.
    *((CPU, size, {}, BY_CPU) for size in ((200,), (200, 3), (1699,), (1700,), (5999,))),
    (CPU, (100,), SINGLE, BY_CPU),
    *((CPU, (n,), SINGLE, [*["lu fp32 with pivoting"] * CORE, *BY_CPU]) for n in (1699, 1700)),
    (CPU, (6000,), {}, ["lu fp32 with pivoting", *LIBRARY]),
    *((CPU, (n,), POSITIVE, ["cholesky fp64"] * CORE) for n in (100, 200, 4499)),
    (CPU, (4500,), POSITIVE, ["cholesky fp32", "cholesky fp64", *LIBRARY]),
    # Large ones on an H200.
    *((H200, (n,), {}, MIXED_FIRST) for n in (257, 6000)),
    (H200, (4000,), COMPLEX, MIXED_FIRST),
    (H200, (6000,), COMPLEX, WITH_GMRES),
    (H200, (18000,), {}, ["lu fp16", *WITH_GMRES]),
    *((H200, (n,), {}, [*HALF, *LIBRARY]) for n in (18001, 32768)),
    (WITHOUT_KERNELS, (32768,), {}, ["lu fp16", *LIBRARY]),
    (H200, (17000,), POSITIVE, INVERTED),
    (H200, (6000,), POSITIVE | COMPLEX, INVERTED),
    (H200, (17001,), POSITIVE, HALF_DEFINITE),
    # Where fp64 is slow.
    (SLOW_FP64, (8192,), {}, [*HALF, "lu fp32", "rbt + lu fp32", "lu fp32 with pivoting", *LIBRARY]),
    (SLOW_FP64, (32768,), POSITIVE, HALF_DEFINITE),
    # Named pivots are the only ones, a named format is tried first.
    *(
        (tuning, (n,), {"pivot": pivot}, [label.format(tuning.preconditioners[0])])
        for tuning in (CPU, H200, SLOW_FP64, EMULATED)
        for n in (100, 32768)
        for pivot, label in [("none", "lu {}"), ("rbt", "rbt + lu {}"), ("partial", "lu {} with pivoting")]
    ),
    (H200, (100,), {"pivot": "rbt", "compute": FP32}, ["rbt + lu fp32"]),
    (H200, (100,), {"compute": FP16}, ["lu fp16", "rbt + lu fp16", "lu fp16 with pivoting", *LIBRARY]),
    (CPU, (100,), {"compute": FP16}, ["lu fp16 with pivoting", *LIBRARY]),
    (H200, (100,), POSITIVE | {"compute": FP64}, ["cholesky fp64", *LIBRARY]),
]


@pytest.mark.parametrize(("tuning", "shape", "asked", "expected"), SYSTEMS)
def test_systems(tuning: Tuning, shape: tuple[int, ...], asked: dict[str, Any], expected: list[str]) -> None:
    assert solved(tuning, *shape, **asked) == expected


def test_where_half_precision_begins_on_an_h200() -> None:
    assert solved(H200, 8191)[0] == "rbt + lu fp64"
    assert solved(H200, 8192)[:2] == ["lu fp16", "rbt + lu fp64"]
    assert solved(H200, 6145, **POSITIVE, **COMPLEX)[0] == "cholesky fp16"
