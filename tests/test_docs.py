"""The pages of docs/: their examples run, and what is generated for them says what the data say."""

from __future__ import annotations

import doctest
import importlib.util
import json
import re
import warnings
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if ">>> " in path.read_text(encoding="utf-8"))
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_examples(page: Path) -> None:
    # A fence would count as output of the line above it.
    text = re.sub(r"^```.*$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    examples = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    with warnings.catch_warnings():
        assert doctest.DocTestRunner(optionflags=FLAGS).run(examples).failed == 0


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("neula_docs_hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["qr", "lstsq"])
def test_a_row_for_every_measurement(hooks: ModuleType, name: str) -> None:
    page = hooks.benchmark(name)
    data = [json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "data").glob(f"{name}-*.json")]
    assert page.count("\n|") == sum(len(machine["rows"]) + 2 for machine in data)
    for machine in data:
        assert f"### {machine['about']['device']}" in page
        assert f"torch {machine['about']['torch']}" in page
        for row in machine["rows"]:
            assert f"| {row['speedup']:.2f} |" in page


@pytest.mark.parametrize(
    ("source", "link", "expected"),
    [
        ("docs/design.md", "../README.md#measured", "performance.md"),
        ("docs/design.md", "../benchmarks/data", "performance.md"),
        ("docs/experiments/qr-paper/index.md", "../../../README.md", "../../index.md"),
        ("docs/api/data.md", "../engines.md#x", "../engines.md#x"),
        ("CONTRIBUTING.md", "docs/design.md#rank", "design.md#rank"),
        ("CONTRIBUTING.md", "CHANGELOG.md", "changelog.md"),
        ("docs/design.md", "../src/neula/qr.py", "../src/neula/qr.py"),
        ("docs/design.md", "https://example.org/a.md", "https://example.org/a.md"),
        ("docs/design.md", "#rank", "#rank"),
    ],
)
def test_links(hooks: ModuleType, source: str, link: str, expected: str) -> None:
    assert hooks.site_links(f"see [there]({link}).", source) == f"see [there]({expected})."
