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
        # The globals are left: what torch.compile puts there it also takes out, and complains if it is gone.
        assert doctest.DocTestRunner(optionflags=FLAGS).run(examples, clear_globs=False).failed == 0


def _module(name: str) -> ModuleType:
    """One of the scripts that make the site."""
    spec = importlib.util.spec_from_file_location(f"neula_docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    return _module("hooks")


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


# --- notebooks, which are run when the site is built -------------------------------------------------------


@pytest.mark.parametrize("path", sorted((DOCS / "notebooks").glob("*.py")), ids=lambda path: path.stem)
def test_notebooks_are_on_the_site_and_say_what_they_draw(path: Path) -> None:
    jupytext = pytest.importorskip("jupytext")
    notebook = jupytext.read(path)
    assert notebook.cells[0].source.startswith("# ")
    assert f"notebooks/{_module('notebook_pages').page_name(path)}.md" in (ROOT / "mkdocs.yml").read_text()
    for cell in notebook.cells:
        assert ("plt.show()" in cell.source) == ("alt" in cell.metadata), cell.source


def test_outputs_become_a_page() -> None:
    v4 = pytest.importorskip("nbformat.v4")
    drawn = '<?xml version="1.0"?><svg><metadata>x</metadata><path style="fill: #7c8088"/></svg>'
    outputs = [
        v4.new_output("stream", name="stdout", text="printed\n"),
        v4.new_output("display_data", {"image/svg+xml": drawn, "text/plain": "<Figure>"}),
        v4.new_output("execute_result", {"text/html": "<table>\n\n</table>", "text/plain": "a table"}),
    ]
    cell = v4.new_code_cell("draw()", metadata={"alt": "a line"}, outputs=outputs)
    notebook = v4.new_notebook(cells=[v4.new_markdown_cell("# Title\n\nText"), cell])
    pages = _module("notebook_pages")
    page = pages.markdown(notebook, "first")
    assert page.startswith("# Title\n\n*A notebook")
    assert "```python\ndraw()\n```" in page
    assert "printed" in page
    assert "<table>\n</table>" in page
    html = pages.on_page_content("<p>picture:first:0</p>", None)
    assert html == (
        '<div class="picture" role="img" aria-label="a line">'
        '<svg><path style="fill: currentColor"/></svg></div>'
    )
    del cell.metadata["alt"]
    with pytest.raises(RuntimeError, match="what is on the picture"):
        pages.markdown(notebook, "first")


def test_a_cell_that_fails_or_warns_unannounced_fails_the_build() -> None:
    pytest.importorskip("nbclient")
    run = _module("notebook_pages").run
    warns = "import warnings\nwarnings.warn('careful')"
    with pytest.raises(RuntimeError, match="careful"):
        run(f"# %%\n{warns}", "warns.py")
    notebook = run(f'# %% tags=["stderr"]\n{warns}', "announced.py")
    assert notebook.cells[0].outputs[0].text == "UserWarning: careful"


# --- what is checked on the built site --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (
            '<p>text <code>\\(</code> <span class="arithmatex">\\(x\\)</span></p><svg><text>$$</text></svg>',
            None,
        ),
        ('<img src="there.png" alt="a picture"><a href="page/">page</a> <a href="#here">here</a>', None),
        ("<p>so \\(x\\) is raw</p>", "not drawn"),
        ('<img src="there.png">', "without a description"),
        ('<img src="gone.png" alt="a picture">', "leads nowhere: gone.png"),
        ('<a href="gone/">page</a>', "leads nowhere: gone/"),
        ('<script src="https://example.org/x.js"></script>', "from the network"),
        ('<link rel="stylesheet" href="https://example.org/x.css">', "from the network"),
    ],
)
def test_what_is_wrong_with_a_page(tmp_path: Path, body: str, complaint: str | None) -> None:
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "index.html").write_text("<p>a page</p>")
    (tmp_path / "there.png").write_bytes(b"")
    (tmp_path / "index.html").write_text(f"<html><body>{body}</body></html>")
    found = list(_module("check_site").check_html(tmp_path))
    assert [complaint in each for each in found] == ([True] if complaint else [])
