"""The tables of links: few, and each with words. Tests of chains assert which is tried when."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from neula.pipeline.chain import Row, Rule

sys.path.insert(0, str(Path(__file__).parent.parent / "docs"))

from link_tables import EXAMPLES, TABLES, rows_of, table_of

MOST = {"least-squares": 18, "systems": 9, "qr": 10}


def link_of(row: Row) -> tuple[str, str]:  # type: ignore[type-arg]
    """Factorization and refiner, whatever the arithmetic, and however often they are repeated."""
    refiner = row.refiner.words if isinstance(row.refiner, Rule) else row.refiner
    refiner = refiner.removeprefix("2 ").removeprefix("one ")
    return row.factorization.replace("{}", "").split(",")[0].strip(), refiner


@pytest.mark.parametrize("problem", TABLES)
def test_few_links(problem: str) -> None:
    links = {link_of(row) for row in rows_of(TABLES[problem])}
    assert len(links) <= MOST.get(problem, 6), sorted(links)


@pytest.mark.parametrize("problem", TABLES)
def test_each_row_says_when(problem: str) -> None:
    for row in rows_of(TABLES[problem]):
        rules = [*row.when, *(x for x in (row.refiner, row.arithmetics) if isinstance(x, Rule))]
        assert all(rule.words for rule in rules)
    table = table_of(problem)
    assert table.count("\n|") >= len(list(rows_of(TABLES[problem])))
    assert all(words in table for words, _ in [*EXAMPLES.get(problem, ({}, None))[0].items()])


def test_names_of_algorithms_alone_are_outside_default_chains() -> None:
    """Links that only ``algorithm=`` reaches say so, and no example without a name has them."""
    named = [
        row for row in rows_of(TABLES["least-squares"]) if any("only" in rule.words for rule in row.when)
    ]
    assert {row.factorization for row in named} == {"direct {}", "normal {}"}
    assert not any(f"`{word} fp" in table_of("least-squares") for word in ("direct", "normal"))
