"""Mutations still fit the sources: each changes one place, and its tests are there."""

from __future__ import annotations

from tests.mutations import MUTATIONS, ROOT, paths_of


def test_each_changes_one_place() -> None:
    sources = {x.path: (ROOT / "src" / "neula" / x.path).read_text(encoding="utf-8") for x in MUTATIONS}
    assert {x.name: n for x in MUTATIONS if (n := sources[x.path].count(x.old)) != 1 or x.old == x.new} == {}
    assert len({x.name for x in MUTATIONS}) == len(MUTATIONS)


def test_their_tests_are_there() -> None:
    assert [path for x in MUTATIONS for path in paths_of(x) if not (ROOT / path).exists()] == []
