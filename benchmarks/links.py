"""Times and digits of problems by their chain of links, and by the chain without the link that solved them.

A link earns its place where the chain without it takes 1.3 times as long, or finds fewer digits or none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch
from warnings import catch_warnings, simplefilter

import torch

import neula
from benchmarks.harness import Results
from neula.io.matrices import random_matrix
from neula.kernels.core import core
from neula.papers.measuring import seconds_of, timed
from neula.pipeline.chain import CORE, Row, Table
from neula.pipeline.plans import forget_all
from neula.problems.bounded import links as bounded
from neula.problems.definite import links as definite
from neula.problems.least_squares import links as least_squares
from neula.problems.low_rank import links as low_rank
from neula.problems.orthogonal import links as orthogonal
from neula.problems.orthogonal import raw
from neula.problems.polar import links as polar
from neula.problems.systems import links as systems

WORTH, TURNS, WARM = 1.3, 2, 3
"""Ratio of times that counts, turns with and without a link, and first calls in each."""

PROBLEMS: dict[str, tuple[ModuleType, Callable[..., Any], str]] = {
    "lstsq": (least_squares, neula.lstsq, "b"),
    "solve": (systems, neula.solve, "b"),
    "definite": (systems, partial(neula.solve, assume_a="pos"), "spd b"),
    "qr": (orthogonal, neula.qr, ""),
    "in-place": (orthogonal, lambda a, **asked: neula.qr(a.mT.clone().mT, overwrite_a=True, **asked), ""),
    "tsqr": (orthogonal, neula.tsqr, ""),
    "raw": (raw, partial(neula.qr, mode="raw"), ""),
    "cholesky": (definite, neula.cholesky, "spd"),
    "polar": (polar, neula.polar, ""),
    "svd": (low_rank, lambda a, **asked: neula.svd_lowrank(a, 10, accuracy=1e-3, **asked), ""),
    "nnls": (bounded, neula.nnls, "b"),
}
"""The module with the table, the function, and whether it takes a right-hand side, or a definite matrix."""

SMALL = """lstsq: 20x5, 500x40, 60x20 cond=1e10, 60x20 rank=10, 50x64x32, 8x64x32 rank=16, 300x100 cond=1e20
solve: 60x60, 60x60 cond=1e13, 300x300, 50x64x64, 200x200 kind=growing
definite: 60x60, 300x300, 50x64x64
qr: 64x32, 50x256x64, 50x64x64 dtype=float32, 8x64x64 rank=32, 128x128 kind=triangular
tsqr: 3000x50 cond=1e2, 3000x50 cond=1e9, 3000x50 cond=1e14, 3000x50 cond=1e5 dtype=float32
raw: 64x32, 300x300
cholesky: 60x60, 50x64x64, 60x60 dtype=float32
polar: 64x64, 200x200 dtype=float32, 200x200 cond=1e7 dtype=float32, 200x200 cond=1e12
svd: 60x30, 1500x600, 1500x600 cond=1e6, 6000x300
nnls: 60x20, 400x80 k=40, 400x80 cond=1e9 k=4, 60x150 k=4, 60x150 rank=30 k=4"""

LARGE = {
    "cpu": """lstsq: 1000x400, 1000x400 dtype=float32, 1000x400 cond=1e7, 1000x400 cond=1e11
lstsq: 1000x400 rank=200, 2000x600 rank=300, 400x1000, 200x2000 rank=100, 600x600
solve: 1000x1000, 1000x1000 dtype=float32, 800x800 cond=1e13, 6016x6016
definite: 1000x1000, 1000x1000 dtype=float32, 4544x4544
qr: 2000x100, 1500x400, 1500x400 dtype=float32, 1500x400 cond=1e9, 500x500, 500x500 dtype=float32
qr: 500x500 rank=250, 300x600
in-place: 1500x400 dtype=float32, 400x400 cond=1e6 dtype=float32, 400x400 cond=1e12 dtype=float32
cholesky: 1000x1000, 1000x1000 dtype=float32""",
    "cuda": """lstsq: 2000x500, 2000x500 dtype=float32, 2000x500 cond=1e7, 2000x500 cond=1e11
lstsq: 200x200x50 rank=25, 2000x1000 rank=500, 2000x8000, 131072x1024, 131072x1024 cond=1e7
lstsq: 5000x5000, 20000x6000, 20000x6000 cond=1e5, 20000x6000 cond=1e9, 20000x6000 rank=3000
solve: 1000x1000, 1000x1000 cond=1e7, 1000x1000 cond=1e13, 50x300x300 cond=1e9, 7000x7000, 20000x20000
solve: 12000x12000 kind=dominant, 20000x20000 kind=dominant, 20000x20000 cond=1e6
definite: 1000x1000, 1000x1000 cond=1e9, 8000x8000, 20000x20000
qr: 8000x64, 60000x200 dtype=float32, 60000x800 accuracy=fp16, 2000x500, 2000x500 cond=1e9, 2000x500 cond=1e14
qr: 500x500, 500x500 dtype=float32, 500x500 dtype=float32 cond=1e6, 500x500 dtype=float32 accuracy=fp16
qr: 3000x3000 dtype=float32, 3000x3000 dtype=float32 cond=1e6, 3000x3000 dtype=float32 cond=1e12
qr: 8000x8000 dtype=float32, 8000x8000 cond=1e9, 8000x8000 dtype=float32 accuracy=fp16, 20000x4000
qr: 20000x4000 dtype=float32, 20000x4000 cond=1e5 dtype=float32, 20000x4000 accuracy=fp16 dtype=float32
qr: 50x512x512 dtype=float32, 50x512x512 dtype=float32 rank=300, 50x1000x250 dtype=float32
in-place: 20000x8000 dtype=float32, 9000x9000 dtype=float32, 9000x9000 dtype=float32 cond=1e12
raw: 50x512x512 dtype=float32, 4000x4000 dtype=float32
cholesky: 4000x4000, 4000x4000 dtype=float32, 12000x12000 dtype=float32, 50x512x512 dtype=float32
polar: 2000x2000 dtype=float32, 2000x2000 cond=1e5 dtype=float32, 2000x2000 cond=1e12""",
}
"""Problems that users meet, beside the small ones, by device."""


def run(device: torch.device) -> Results:
    """One row for each problem: the link that solves it, and what the chain comes to without that link."""
    results = Results("links", device)
    for line in (SMALL + "\n" + LARGE[device.type]).splitlines():
        name, _, words = line.partition(": ")
        module, function, takes = PROBLEMS[name]
        for case in words.split(", "):
            a, b, asked = _made(case, takes, device)
            call = partial(_outcome, partial(function, a, *b, **asked))
            results.add(problem=name, case=case, **_measured(module, call))
    return results


def _made(
    words: str, takes: str, device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, str]]:
    """A matrix, its right-hand side and keywords, from words such as ``60x20 rank=10``."""
    shape, *others = words.split()
    *count, m, n = map(int, shape.split("x"))
    asked = dict(word.split("=") for word in others)
    normal = partial(torch.randn, dtype=torch.float64, device=device)
    a, kind = normal(*count, m, n), asked.pop("kind", "")
    if cond := asked.pop("cond", ""):
        a = (
            random_matrix("geometric", m, n, cond=float(cond), device=device)
            .expand(*count, m, n)
            .contiguous()
        )
    if rank := int(asked.pop("rank", 0)):
        a = normal(*count, m, rank) @ normal(*count, rank, n)
    if "spd" in takes:
        a = a @ a.mT / n + 1e-3 * torch.eye(n, device=device)
    if kind == "growing":  # elements double with each column of partial pivoting
        a = torch.eye(n).double().to(device).mul_(2) - torch.ones_like(a).tril()
        a[:, -1] = 1
    a = (
        a.triu()
        if kind == "triangular"
        else a + 2 * n * torch.eye(n, device=device)
        if kind == "dominant"
        else a
    )
    a = a.to(getattr(torch, asked.pop("dtype", "float64")))
    k = int(asked.pop("k", 1))
    b = normal(*count, m, k).to(a.dtype)
    return a, [b if k > 1 or count else b[:, 0]] if "b" in takes.split() else [], asked


def _measured(module: ModuleType, call: Callable[[], Any]) -> dict[str, Any]:
    """Which row solves a problem, with times and digits by the chain with it and without it."""
    tried: list[int] = []
    with changed(module, noting=tried):
        found = call()
    rows = list(_rows(module.TABLE))
    by_core = (i for i, row in enumerate(rows) if row.place == CORE)
    place = tried[-1] if tried else next(by_core, 0)  # plans call the core themselves
    (mine, others), other = _by_turns(module, call, place)
    digits, fewer = _digits(found), _digits(other)
    worth = "sounder" if digits >= fewer + 1 else "faster" if others >= WORTH * mine else ""
    times = {"ms": 1e3 * mine, "without_ms": 1e3 * others, "ratio": others / mine}
    return (
        {"row": place, "link": _label(rows[place])}
        | times
        | {"digits": digits, "digits_without": fewer, "worth": worth}
    )


def _outcome(call: Callable[[], Any]) -> Any:
    """A result, or None where the chain has none, or a later link needs what the missing one leaves."""
    with catch_warnings():
        simplefilter("ignore")
        try:
            return call()
        except (ArithmeticError, AssertionError, LookupError, ValueError, RuntimeError):
            return None


def _digits(result: Any) -> float:
    """Sure digits of a solution that is accepted; of factors 1 where they are certified."""
    if result is None or not result.converged:
        return 0.0
    return float(getattr(result, "digits", 1.0))


def _rows(table: Table[Any]) -> Iterator[Row[Any]]:
    for rows in table:
        yield from rows if isinstance(rows, tuple) else (rows,)


def _label(row: Row[Any]) -> str:
    """As on the page of links."""
    end = row.refiner if isinstance(row.refiner, str) else row.refiner.words
    return row.factorization.replace(" {}", "") + (f" + {end}" if end else "") + f" ({row.place})"


def _by_turns(module: ModuleType, call: Callable[[], Any], place: int) -> tuple[list[float], Any]:
    """Least seconds with and without a link, and what comes of the chain without it."""
    least, other = [math.inf, math.inf], None
    for _ in range(TURNS):
        for which, without in enumerate((None, place)):
            with changed(module, without=without):
                other, first = timed(call)
                again = [seconds_of(call) for _ in range(2 * WARM if first < 0.3 else 0)]
            least[which] = min(least[which], *(again[WARM:] or [first, math.inf]))
    return least, other


@contextmanager
def changed(
    module: ModuleType, without: int | None = None, noting: list[int] | None = None
) -> Iterator[None]:
    """A table without one row, or with notes of the rows whose links are asked for an answer.

    The compiled core, which plans call as well, is taken away by turning it off.
    """
    rows = list(_rows(module.TABLE))

    def make(place: int, row: Row[Any], case: Any, label: str, name: str) -> Any:
        link = row.make(case, label, name)

        def answer(problems: Any, before: Any) -> Any:
            if noting is not None:
                noting.append(place)
            return link.answer(problems, before)

        return replace(link, answer=answer) if noting is not None else link

    places = iter(range(len(rows)))
    table: list[Any] = []
    for each in module.TABLE:
        some = each if isinstance(each, tuple) else (each,)
        mine = [(next(places), row) for row in some]
        kept = tuple(replace(row, make=partial(make, i, row)) for i, row in mine if i != without)
        table += [kept] if isinstance(each, tuple) else kept
    off = {"NEULA_CORE": "none"} if without is not None and rows[without].place == CORE else {}
    with patch.object(module, "TABLE", tuple(table)), patch.dict("os.environ", off):
        core.cache_clear()
        forget_all()
        yield
    core.cache_clear()
    forget_all()
