"""The pages of docs/: their examples run, and what is generated for them says what the data say."""

from __future__ import annotations

import doctest
import json
import re
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))
pytest.importorskip("sphinx.util")
import benchmark_tables  # noqa: E402
import generated  # noqa: E402

PAGES = sorted(path for path in DOCS.rglob("*.md") if ">>> " in path.read_text(encoding="utf-8"))
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_examples(page: Path) -> None:
    # A fence would count as output of the line above it.
    text = re.sub(r"^```.*$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    examples = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    with warnings.catch_warnings():
        # The globals are left: what torch.compile puts there it also takes out, and complains if it is gone.
        assert doctest.DocTestRunner(optionflags=FLAGS).run(examples, clear_globs=False).failed == 0


@pytest.mark.parametrize("name", ["qr", "lstsq"])
def test_a_row_for_every_measurement(name: str) -> None:
    page = benchmark_tables.benchmark(name)
    data = [json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "data").glob(f"{name}-*.json")]
    assert page.count("\n|") == sum(len(machine["rows"]) + 2 for machine in data)
    for machine in data:
        assert f"### {machine['about']['device']}" in page
        assert f"torch {machine['about']['torch']}" in page
        for row in machine["rows"]:
            assert f"| {row['speedup']:.2f} |" in page


LINKS = [
    ("docs/design.md", "../README.md#speed", "performance.md"),
    ("docs/design.md", "../benchmarks/data", "performance.md"),
    ("docs/experiments/qr-paper/index.md", "../../../README.md", "../../index.md"),
    ("docs/api/data.md", "../engines.md#x", "../engines.md#x"),
    ("CONTRIBUTING.md", "docs/design.md#rank", "design.md#rank"),
    ("CONTRIBUTING.md", "CHANGELOG.md", "changelog.md"),
    ("docs/design.md", "../src/neula/qr.py", "../src/neula/qr.py"),
    ("docs/design.md", "https://example.org/a.md", "https://example.org/a.md"),
    ("docs/design.md", "#rank", "#rank"),
]
FORMULAS = [
    (r"for \(\|x\| > 0\)", r"for {math}`\Vert x\Vert  > 0`"),
    ("\\[\nx = y\n\\]", "```{math}\nx = y\n```"),
    (r"`\(code\)`", r"`\(code\)`"),
]
SIGNS = [
    ("  **gaps, clusters** : array, shape (*batch, k)", r"  **gaps, clusters** : array, shape (\*batch, k)"),
    ("Calls fun(x, *args, **kwargs).", r"Calls fun(x, \*args, \*\*kwargs)."),
    ("``fun(*args)`` and coef_, with *emphasis*", r"``fun(*args)`` and coef\_, with *emphasis*"),
]


def escaped(line: str) -> str:
    lines = [line]
    generated.escape_signs(None, "", "", None, None, lines)
    return lines[0]


def test_what_is_changed_in_texts() -> None:
    """Links out of docs, formulas, and signs that are no markup."""
    for source, link, expected in LINKS:
        assert generated.site_links(f"see [there]({link}).", source) == f"see [there]({expected})."
    for text, expected in FORMULAS:
        assert generated.formulas(text) == expected
    for line, expected in SIGNS:
        assert escaped(line) == expected


def test_a_name_is_found_wherever_it_is_imported_from() -> None:
    where = "neula.problems.least_squares.lstsq"
    assert generated.resolve("neula.lstsq") is generated.resolve(f"{where}.lstsq")
    assert generated.resolve("LstsqResult", where) is generated.resolve("neula.LstsqResult")
    assert generated.resolve("neula.lstsqq") is None
