"""Random examples for as long as you like, and what to type to see a failure again.

::

    python -m tests.campaign.fuzz --minutes 10
    python -m tests.campaign.fuzz --examples 100000 --workers 2 --engine auto --device cuda
    python -m tests.campaign.fuzz --seed 123 --example 456
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import itertools
import math
import multiprocessing
import secrets
import shlex
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from . import recipes
from .areas import AREAS
from .calls import call
from .judge import judge, truths
from .oracle import System, UndecidedError
from .recipes import OFTEN, PROBLEMS, SOLVERS, Example, Scope, Seeded, Source, build, keywords
from .verdict import Verdict, as_python

Recipe = Any
"""``recipes.Recipe``, or that of an area."""

ALL = (*PROBLEMS, *AREAS)

SHARE = 50
"""Examples that a process judges at a time."""

STUCK = 60.0
"""Seconds after which it is printed where an example hangs; a share that takes five times as long does."""

SHOWN = 3
"""Failures of a kind that are printed in full."""

FALSE_ALARMS = 0.01
"""Part of the examples that may be false alarms."""

LITERAL = 400
"""Elements of arrays that are printed as numbers."""


@dataclass
class Tally:
    """Counts and reports of the findings of a run."""

    examples: int = 0
    slowest: tuple[float, int] = (0.0, 0)
    found: Counter = field(default_factory=Counter)
    problems: Counter = field(default_factory=Counter)
    kinds: Counter = field(default_factory=Counter)
    reports: dict[tuple[str, str, str], list[str]] = field(default_factory=dict)

    def add(self, recipe: Recipe, verdict: Verdict, report: str) -> None:
        """Count one example, and keep its report if it is among the first of its kind."""
        self.examples += 1
        self.found.update({f.kind for f in verdict.findings})
        problem = name_of(recipe)
        self.problems[problem] += 1
        for key in sorted({(f.kind, f.reason, problem) for f in verdict.findings}):
            self.kinds[key] += 1
            if self.kinds[key] <= SHOWN:
                self.reports.setdefault(key, []).append(report)

    def merge(self, other: Tally) -> None:
        self.slowest = max(self.slowest, other.slowest)
        self.examples += other.examples
        self.found += other.found
        self.problems += other.problems
        self.kinds += other.kinds
        for key, reports in other.reports.items():
            kept = self.reports.setdefault(key, [])
            kept += reports[: SHOWN - len(kept)]

    @property
    def passed(self) -> bool:
        few = self.found["false alarm"] <= FALSE_ALARMS * self.examples
        return self.found["unsound"] == self.found["violation"] == 0 and few

    def __str__(self) -> str:
        lines = [
            f"{self.examples} examples: " + ", ".join(f"{n} {p}" for p, n in self.problems.most_common())
        ]
        lines += [
            f"  {number:6d}  {kind} ({reason}) of {problem}"
            for (kind, reason, problem), number in sorted(self.kinds.items())
        ]
        lines.append("the slowest example took {:.1f} s: number {}".format(*self.slowest))
        alarms = self.found["false alarm"]
        share = f"{alarms / max(1, self.examples):.2%}"
        lines.append(
            f"examples with a wrong answer and no warning: {self.found['unsound']}, "
            f"with a false alarm: {alarms} ({share}), with a broken promise: {self.found['violation']}"
        )
        return "\n".join(lines)


def name_of(recipe: Recipe) -> str:
    """The problem, and whether numbers are complex."""
    return "complex " * recipes.is_complex(recipe) + recipe.problem


def draw(source: Source, scope: Scope) -> Recipe:
    """A recipe of one of the problems, those of ``OFTEN`` eight times as often as another."""
    problem = source.choice([p for p in scope.problems for _ in range(8 if p in OFTEN else 1)])
    return AREAS[problem].draw(source, scope) if problem in AREAS else recipes.draw(source, problem, scope)


def run_one(recipe: Recipe, device: str) -> tuple[Verdict, str]:
    """Build, call, judge: the verdict, and the same call in Python if something is wrong."""
    try:
        if recipe.problem in AREAS:
            return AREAS[recipe.problem].judge(recipe, device)
        example = build(recipe)
        verdict = judge(example, call(example, device))
        return verdict, snippet(example) if verdict.findings else ""
    except UndecidedError:  # nobody knows what is right
        return Verdict(), ""
    except Exception:  # a judge that fails has not judged
        verdict = Verdict()
        verdict.add("violation", "judge failed", traceback.format_exc())
        return verdict, ""


def report(recipe: Recipe, verdict: Verdict, shown: str, command: str) -> str:
    """All that is needed to see a failure again."""
    text = repr(recipe).replace("'", '"')
    return "\n".join([str(verdict), f"again: {command} --recipe {shlex.quote(text)}", shown])


def snippet(example: Example) -> str:
    """The same call in Python, with the numbers that were given (floats are printed exactly)."""
    recipe = example.recipe
    if example.a.size + example.b.size > LITERAL:
        return ""
    a, b = (x if recipe.batched else x[0] for x in (example.a, example.b))
    b = b[..., 0] if recipe.k == 0 and not recipe.batched else b
    options = "".join(f", {key}={value!r}" for key, value in keywords(recipe).items())
    options += f", engine={recipe.engine!r}"
    if recipe.problem == "lstsq":
        options += f", damp={example.damp!r}, rcond={recipe.rcond!r}"
        if example.weights is not None:
            options += f", weights=np.array({example.weights.tolist()!r})"
    if recipe.problem == "pos":
        options += ", assume_a='pos'"
    function = {"pos": "solve"}.get(recipe.problem, recipe.problem)
    lines = [f"neula.{function}(A, b{options})"] if recipe.problem in OFTEN else []
    if recipe.problem in SOLVERS:
        lines += [f"# {line}" for text in _exact(example) for line in text.splitlines()]
    return as_python("\n".join(lines), A=a, b=b)


def _exact(example: Example) -> Iterator[str]:
    for truth in truths(example):
        values = np.array2string(truth.singular_values, precision=3)
        yield f"singular values of A with columns of norm 1: {values}; right: rank {truth.ranks}"
        if not (isinstance(truth, System) and truth.singular):
            yield f"x = {truth.rounded_solution(truth.ranks[0]).tolist()}"


def explore(seed: int, numbers: range, scope: Scope, where: Where) -> Tally:
    """Judge some of the examples of a run."""
    torch.set_num_threads(1)
    tally = Tally()
    for number in numbers:
        recipe = draw(Seeded(seed, number), scope)
        start = time.monotonic()
        faulthandler.dump_traceback_later(STUCK, file=sys.__stderr__)
        verdict, shown = run_one(recipe, where.device)
        faulthandler.cancel_dump_traceback_later()
        tally.slowest = max(tally.slowest, (time.monotonic() - start, number))
        text = report(recipe, verdict, shown, where.command) if verdict.findings else ""
        tally.add(recipe, verdict, f"--seed {seed} --example {number}\n{text}")
    return tally


def explored(workers: int, share: Callable[[range], Tally], count: int, end: float) -> Iterator[Tally]:
    """The tallies of shares of the examples, as they come; what hangs when time is up is a broken promise."""
    shares = itertools.takewhile(len, (range(k, min(k + SHARE, count)) for k in itertools.count(0, SHARE)))
    if workers == 1:
        for numbers in shares:
            yield share(numbers)
            if time.monotonic() > end:
                return
        return
    # CUDA does not survive a fork.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    pending = {pool.submit(share, numbers): numbers for numbers in itertools.islice(shares, 2 * workers)}
    begun: dict[Future[Tally], float] = {}
    while pending and time.monotonic() < end:
        done, _ = wait(pending, timeout=1, return_when=FIRST_COMPLETED)
        for each in done:
            del pending[each]
            yield each.result()
        begun |= {each: time.monotonic() for each in pending if each.running() and each not in begun}
        pending |= {pool.submit(share, numbers): numbers for numbers in itertools.islice(shares, len(done))}
    pool.shutdown(wait=False, cancel_futures=True)
    for process in multiprocessing.active_children():
        process.kill()
    for each in begun.keys() & pending.keys():
        if time.monotonic() - begun[each] > 5 * STUCK:
            tally, key = Tally(), ("violation", "no end", "an example")
            tally.found["violation"] = tally.kinds[key] = 1
            tally.reports[key] = [f"one of the examples {pending[each]}"]
            yield tally


@dataclass(frozen=True)
class Where:
    """The device, and how the command begins that repeats an example there."""

    device: str
    command: str


def main(arguments: list[str] | None = None) -> int:
    """Run, print what was found, and return 1 if that is too much."""
    given = _parser().parse_args(arguments)
    scope = Scope(
        problems=tuple(given.problem or ALL),
        engines=tuple(given.engine or ("cpu", "emulated")),
        libraries=tuple(given.library or ("numpy", "torch")),
        certify=(None,) if given.no_certify else (None, "forward"),
        scalars=tuple(given.scalars or Scope.scalars),
    )
    where = Where(given.device, f"python -m tests.campaign.fuzz --device {given.device}")
    if given.recipe is not None:
        return _show(recipe_of(given.recipe), where)
    seed = secrets.randbelow(2**32) if given.seed is None else given.seed
    if given.example is not None:
        return _show(draw(Seeded(seed, given.example), scope), where)
    print(f"seed {seed}", flush=True)
    count = sys.maxsize if given.examples is None else given.examples
    end = time.monotonic() + (60 * given.minutes if given.examples is None else math.inf)
    total = Tally()
    share = functools.partial(explore, seed, scope=scope, where=where)
    for tally in explored(given.workers, share, count, end):
        total.merge(tally)
    for (kind, reason, problem), reports in sorted(total.reports.items()):
        for text in reports:
            print(f"\n=== {kind} ({reason}) of {problem} ===\n{text}")
    print(f"\n{total}\nseed {seed}")
    return int(not total.passed)


def recipe_of(text: str) -> Recipe:
    """A recipe as it was printed."""
    names = {name: value for module in (recipes, *AREAS.values()) for name, value in vars(module).items()}
    return eval(text, names)


def _show(recipe: Recipe, where: Where) -> int:
    verdict, shown = run_one(recipe, where.device)
    print(report(recipe, verdict, shown, where.command))
    return int(bool(verdict.findings))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: 10)")
    parser.add_argument("--examples", type=int, help="how many, instead of how long")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, help="of the run; a new one by default")
    parser.add_argument("--example", type=int, help="only this one of the run with --seed")
    parser.add_argument("--recipe", help="only this one, as a failure has printed it")
    parser.add_argument("--problem", action="append", choices=ALL, help="may be repeated")
    parser.add_argument("--engine", action="append", help="may be repeated (default: cpu and emulated)")
    parser.add_argument("--library", action="append", choices=("numpy", "torch"), help="may be repeated")
    parser.add_argument("--scalars", action="append", choices=("real", "complex"), help="may be repeated")
    parser.add_argument("--device", default="cpu", help="of torch tensors, e.g. cuda")
    parser.add_argument("--no-certify", action="store_true", help="leave certify= out")
    return parser


if __name__ == "__main__":
    sys.exit(main())
