"""A Sphinx extension: fills in what is generated, and finds names that docstrings refer to.

- ``<!-- file: CONTRIBUTING.md -->`` becomes that file of the repository.
- ``<!-- benchmark: NAME -->`` becomes the tables of ``benchmarks/data/NAME-*.json``, which can be downloaded.
- ``<!-- commands -->`` becomes the help texts of the command line.
- ``<!-- links: PROBLEM -->`` becomes the table of its links, ``<!-- paper items -->`` that of the papers.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_origin

import benchmark_tables
import link_tables
import paper_items
from sphinx.util.nodes import make_refnode

ROOT = Path(__file__).resolve().parent.parent
FILES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Files outside ``docs/`` that are pages."""
SHOWN_AT = {
    "README.md": "index.md",
    "README.md#speed": "performance.md",
    "benchmarks/data": "performance.md",
}
"""Pages that show what other links out of ``docs/`` lead to."""

_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s]+)(?=\))")
_CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.M | re.S)
_FORMULA = re.compile(r"\\\((.+?)\\\)", re.S)
_SIGNS = re.compile(r"(?:(?<=\()|(?<=\S ))\*{1,2}(?=[a-z][\w.]*[,)])|(?<=[a-z])_(?=[\s*,.:;)]|$)")
_DISPLAYED = re.compile(r"^( *)\\\[\n(.+?)^ *\\\]$", re.M | re.S)


def fill_in(app: Any, docname: str, source: list[str]) -> None:
    """Fill in what is generated, and turn links and formulas into those of Sphinx."""
    if Path(app.env.doc2path(docname)).suffix != ".md":
        return
    text = site_links(source[0], f"docs/{docname}.md")
    for marker, fill in (
        (r"^<!-- file: (\w+\.md) -->$", lambda match: site_links((ROOT / match[1]).read_text(), match[1])),
        (r"^<!-- benchmark: (\w+) -->$", lambda match: benchmark_tables.benchmark(match[1])),
        (r"^<!-- commands -->$", lambda _: commands()),
        (r"^<!-- links: ([\w-]+) -->$", lambda match: link_tables.table_of(match[1])),
        (r"^<!-- paper items -->$", lambda _: paper_items.table()),
    ):
        text = re.sub(marker, fill, text, flags=re.M)
    source[0] = formulas(text)


def formulas(text: str) -> str:
    """Roles and directives of MyST in place of LaTeX's brackets."""
    parts = _CODE.split(_DISPLAYED.sub(r"\1```{math}\n\2\1```", text))
    parts[::2] = (_FORMULA.sub(_formula, part) for part in parts[::2])
    return "".join(parts)


def _formula(match: re.Match[str]) -> str:
    r"""A role of MyST. In a table of Markdown ``\|`` is a single bar."""
    return "{math}`" + match[1].replace(r"\|", r"\Vert ").replace("|", r"\vert ") + "`"


def site_links(markdown: str, source: str) -> str:
    """Links of ``source``, a path in the repository, as links between pages of the site."""
    folder = posixpath.dirname(source)
    page_folder = posixpath.dirname(_page(source)) or "."

    def turn(match: re.Match[str]) -> str:
        path, hash_sign, anchor = match[1].partition("#")
        target = posixpath.normpath(posixpath.join(folder, path))
        page = _page(target)
        shown = page + hash_sign + anchor if page else SHOWN_AT.get(target + hash_sign + anchor)
        return posixpath.relpath(shown, page_folder) if shown else match[1]

    return _LINK.sub(turn, markdown)


def _page(path: str) -> str:
    """The page made from a file of the repository; empty if there is none."""
    return path.removeprefix("docs/") if path.startswith("docs/") else FILES.get(path, "")


# --- command line -----------------------------------------------------------------------------------------


def commands() -> str:
    """Help texts of all commands, as the program prints them."""
    import typer

    from neula.cli.app import app

    names = _names(typer.main.get_command(app))
    return "\n\n".join(f"### {' '.join(words)}\n\n{_help(words)}" for words in names)


def _names(command: Any, *before: str) -> list[tuple[str, ...]]:
    """Names of a command and of those below it."""
    words = (*before, command.name)
    below = getattr(command, "commands", {})
    return [words, *(name for child in below.values() for name in _names(child, *words))]


def _help(words: Sequence[str]) -> str:
    from typer.testing import CliRunner

    from neula.cli.app import app

    runner = CliRunner(env={"COLUMNS": "80", "TERMINAL_WIDTH": "80", "NO_COLOR": "1"})
    text = runner.invoke(app, [*words[1:], "--help"], prog_name=words[0]).output
    lines = [line.rstrip() for line in text.strip("\n").splitlines()]
    return "\n".join(("```text", *lines, "```"))


# --- names ------------------------------------------------------------------------------------------------


def find_name(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """A link to the page of a name, wherever it is imported from; code for one without a page.

    ``neula.lstsq`` and ``neula.problems.least_squares.lstsq.lstsq`` are one function, and have one page. A
    name that does not exist is left to Sphinx, which warns.
    """
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    last = target.rpartition(".")[2]
    pages = {
        name: entry for name, entry in env.get_domain("py").objects.items() if name.rpartition(".")[2] == last
    }
    docstring = re.search(r"docstring of ([\w.]+)", str(node.source))
    found = resolve(target, *_parents(docstring[1] if docstring else ""), node.get("py:module"))
    same = [name for name in pages if resolve(name) is found] if found is not None else []
    similar = [] if "neula." in target else [name for name in pages if name.endswith(f".{target}")]
    for name in (*same, *sorted(similar, key=len)[: found is None]):
        where = pages[name]
        return make_refnode(app.builder, node["refdoc"], where.docname, where.node_id, contnode, name)
    return None if found is None else contnode


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def resolve(name: str, *places: str | None) -> Any:
    """The object of a dotted name, looked for in modules and classes too."""
    for place in ("", *filter(None, places)):
        parts = [*filter(None, place.split(".")), *name.split(".")]
        for length in range(len(parts), 0, -1):
            try:
                found = import_module(".".join(parts[:length]))
                for part in parts[length:]:
                    found = getattr(found, part)
            except (ImportError, AttributeError):
                continue
            return found
    return None


def skip(_app: Any, _what: str, name: str, obj: Any, *_: Any) -> bool | None:
    """Leave out types that numpydoc takes for classes, and methods that scikit-learn generates."""
    is_type = isinstance(obj, TypeVar | ParamSpec) or get_origin(obj)
    return True if is_type or re.fullmatch(r"set_\w+_request", name) else None


INTRODUCTIONS = (
    "first_steps",
    "least_squares_of_real_data",
    "how_certificates_work",
    "batches_and_gradients",
)
PAPERS = ("mixed_precision_by_hand", "the_algorithms_step_by_step")


class ExampleOrder:
    """Introductions first, then applications by name, and the algorithms of the papers last."""

    def __init__(self, _folder: str) -> None:
        pass

    def __call__(self, path: str) -> tuple[int, str]:
        """Key of an example for sorting."""
        name = Path(path).stem
        if name in INTRODUCTIONS:
            return INTRODUCTIONS.index(name), ""
        return len(INTRODUCTIONS) + (1 + PAPERS.index(name) if name in PAPERS else 0), name


def _escaped(found: re.Match[str]) -> str:
    return re.sub(r"[*_]", r"\\\g<0>", found[0])


def escape_signs(_app: Any, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """Escape what is no markup in ``shape (*batch,)``, ``fun(x, *args)`` and ``coef_``, after numpydoc."""
    for number, line in enumerate(lines):
        parts = line.split("``")
        parts[::2] = (_SIGNS.sub(_escaped, part) for part in parts[::2])
        lines[number] = "``".join(parts)


def setup(app: Any) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("source-read", fill_in)
    app.connect("missing-reference", find_name)
    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-docstring", escape_signs, priority=900)
    return {"parallel_read_safe": True}
