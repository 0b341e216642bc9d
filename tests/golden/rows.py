"""Rows of the record: a recipe run one way."""

from __future__ import annotations

import gzip
import json
import math
import multiprocessing
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.campaign.fuzz import ALL, Recipe, draw, run_one
from tests.campaign.recipes import COMPLEX, Scope, Seeded
from tests.campaign.verdict import Verdict

from .ways import Way, environment

FOLDER = Path(__file__).parent / "data"

SEED = 40
"""Of all recipes; a recipe is its number."""

SCOPE = Scope(
    problems=tuple(p for p in ALL if p not in ("oracle", "spectra")), engines=("cpu",), scalars=("real",)
)

FIRST_COMPLEX = 100_000
"""Recipes from this number on have complex numbers."""

COMPLEX_SCOPE = replace(SCOPE, problems=COMPLEX, scalars=("complex",))

SHARE = 25
"""Recipes that a process runs at a time."""


@dataclass(frozen=True)
class Row:
    """Outcome of the recipe with a number. The checksum is that of the recipe as text: the same number is
    another recipe if the campaign draws differently. ``findings`` are unsound answers and broken promises,
    ``raised`` is the class of an error, ``ambiguous`` says that a warning doubts the rank. ``members`` has
    for each problem of a batch whether it was accepted, whether there was a warning, its rank, its largest
    forward error and its largest true error (None where they are not known).
    """

    number: int
    checksum: int
    problem: str
    findings: list[str]
    raised: str
    ambiguous: bool
    members: list[list[Any]]
    seconds: float

    @property
    def accepted(self) -> bool:
        """Whether there is an answer, and nothing says that it is inaccurate."""
        return not self.raised and all(accepted and not warned for accepted, warned, *_ in self.members)

    @property
    def nearly_missed(self) -> bool:
        """Whether a true error exceeds a tenth of its bound."""
        known = [(bound, error) for *_, bound, error in self.members if None not in (bound, error)]
        return any(not error <= 0.1 * bound for bound, error in known)


def recipe_of(number: int, way: Way) -> Recipe:
    """The recipe of a number, for the engine of a way."""
    recipe = draw(Seeded(SEED, number), SCOPE if number < FIRST_COMPLEX else COMPLEX_SCOPE)
    return replace(recipe, engine=way.engine) if hasattr(recipe, "engine") else recipe


def run(way: Way, numbers: Iterable[int]) -> list[Row]:
    """Run recipes in this process, whose environment is that of the way."""
    torch.set_num_threads(1)
    rows = []
    with way.forced():
        for number in numbers:
            recipe = recipe_of(number, way)
            if recipe.problem not in way.skipped:
                rows.append(_row(number, recipe, run_one(recipe, way.device)[0]))
    return rows


def run_in_processes(way: Way, numbers: Sequence[int], workers: int) -> Iterator[Row]:
    """Run recipes in processes that begin with the environment of the way."""
    shares = [numbers[k : k + SHARE] for k in range(0, len(numbers), SHARE)]
    # CUDA does not survive a fork, and a fork would keep what its parent has read of the environment.
    context = multiprocessing.get_context("spawn")
    with environment(way.environment), ProcessPoolExecutor(workers, context) as pool:
        for rows in pool.map(partial(run, way), shares):
            yield from rows


def _row(number: int, recipe: Recipe, verdict: Verdict) -> Row:
    bad = [f"{f.kind}: {f.reason}" for f in verdict.findings if f.kind != "false alarm"]
    members = [
        [
            bool(each.get("accepted", True)),
            bool(each.get("warned", False)),
            each.get("rank"),
            _largest(each.get("forward_errors")),
            _largest(each.get("errors")),
        ]
        for each in verdict.numbers
    ]
    text = repr(replace(recipe, engine="") if hasattr(recipe, "engine") else recipe)
    checksum = zlib.crc32(text.replace(", scalars='real'", "").encode())
    seconds = float(f"{verdict.seconds:.2e}")
    return Row(
        number, checksum, recipe.problem, bad, verdict.raised, verdict.rank_ambiguous, members, seconds
    )


def _largest(values: Sequence[float] | None) -> float | None:
    """To three digits; None if nothing is known."""
    found = max(values, default=None) if values is not None else None
    return None if found is None or math.isnan(found) else float(f"{found:.3g}")


def file_of(name: str) -> Path:
    """Where the rows of a way are, as :func:`ways.ways_here` names it."""
    return FOLDER / (name.replace(", ", "-").replace(" ", "_") + ".jsonl.gz")


def write(path: Path, rows: Iterable[Row]) -> None:
    """One row a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(list(asdict(row).values()), separators=(",", ":")) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def read(path: Path) -> dict[int, Row]:
    """The rows of a file, by number."""
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    return {row.number: row for row in (Row(*json.loads(line)) for line in lines)}
