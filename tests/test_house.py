"""The house is small: files of 600 lines at most, functions of 60 lines of code and 10 parameters, few
entries on top, no cycle of imports, and a name means one thing.

Which room may know which is checked by import-linter (``make lint``; the rooms are in pyproject.toml).
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import neula

SOURCE = Path(__file__).parent.parent / "src" / "neula"

LINES_OF_A_FILE = 600
LINES_OF_A_FUNCTION = 60
PARAMETERS = 10
"""But for public functions, with those that torch traces in their place, and launches of kernels."""
LONGER = {"_asked", "__init__", "lstsq_streamed", "measured_systems"}
"""Names of functions that have more, which become fewer."""
ENTRIES = 14
"""Besides ``__init__.py``, ``__main__.py`` and the compiled core."""

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def lines_of_code(source: str) -> set[int]:
    """Numbers of the lines that hold code: neither blank nor a comment alone."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    spans = [(token.start[0], token.end[0]) for token in tokens if token.type not in _NO_CODE]
    return {line for first, last in spans for line in range(first, last + 1)}


def functions(source: str) -> Iterator[tuple[str, int]]:
    """Each function, nested ones included, with the lines of code of its body without the docstring."""
    code = lines_of_code(source)

    def within(node: ast.AST, path: tuple[str, ...]) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            name = (*path, child.name) if isinstance(child, ast.FunctionDef | ast.ClassDef) else path
            if isinstance(child, ast.FunctionDef):
                body = child.body[1:] if ast.get_docstring(child) is not None else child.body
                first = body[0].lineno if body else child.end_lineno + 1
                yield ".".join(name), len(code & set(range(first, child.end_lineno + 1)))
            yield from within(child, name)

    yield from within(ast.parse(source), ())


def test_what_counts() -> None:
    source = '''
class A:
    def f(self):
        """Two
        lines."""

        # A comment.
        def g():
            return 1

        return """a
        b""" + str(g())
'''
    assert dict(functions(source)) == {"A.f": 4, "A.f.g": 1}


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    paths = sorted(SOURCE.rglob("*.py"))
    return {path.relative_to(SOURCE).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def test_files_are_short(sources: dict[str, str]) -> None:
    lines = {name: len(source.splitlines()) for name, source in sources.items()}
    assert {name: n for name, n in lines.items() if n > LINES_OF_A_FILE} == {}


def test_functions_are_short(sources: dict[str, str]) -> None:
    lines = {(name, f): n for name, source in sources.items() for f, n in functions(source)}
    assert {function: n for function, n in lines.items() if n > LINES_OF_A_FUNCTION} == {}


def parameters(source: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            yield node.name, len([x for x in given if x.arg not in ("self", "cls")])


def test_functions_have_few_parameters(sources: dict[str, str]) -> None:
    public = {*neula.__all__, *(f"traced_{name}" for name in neula.__all__)}
    others = {
        name: source
        for name, source in sources.items()
        if not name.startswith(("cli/commands/", "compat/")) and not name.endswith("_triton.py")
    }
    found = {f for source in others.values() for f, n in parameters(source) if n > PARAMETERS} - public
    assert found <= LONGER


def imported(body: list[ast.stmt]) -> Iterator[str]:
    """What is imported together with a module: not by its functions, and not for types alone."""
    for node in body:
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield str(node.module)
        elif isinstance(node, ast.Try | ast.With | ast.ClassDef):
            yield from imported(node.body)


def test_files_do_not_import_one_another(sources: dict[str, str]) -> None:
    files = {
        "neula." + name.removesuffix(".py").replace("/", "."): source for name, source in sources.items()
    }
    names = {file: {*imported(ast.parse(source).body)} & files.keys() for file, source in files.items()}
    TopologicalSorter(names).prepare()  # raises where there is a cycle


def test_only_public_names_are_imported(sources: dict[str, str]) -> None:
    def private(source: str) -> set[str]:
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
        names = {alias.name for node in nodes for alias in node.names if str(node.module).startswith("neula")}
        return {name for name in names if name.startswith("_")} - {"__version__"}

    assert {name: found for name, source in sources.items() if (found := private(source))} == {}


def test_a_name_has_one_meaning(sources: dict[str, str]) -> None:
    """Class names are unique, leading underscores ignored; no function is named ``of``."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(path)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.lstrip("_") == "of":
                places["of"] += [path, path]
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_few_entries() -> None:
    entries = {path.name for path in SOURCE.iterdir() if not path.name.startswith(("__", "_core."))}
    assert len(entries) <= ENTRIES, sorted(entries)


OF_NUMBERS = {"zeros", "ones", "empty", "eye", "linspace", "logspace", "rand", "randn"}
FACTORIES = OF_NUMBERS | {
    *("full", "arange", "tensor", "as_tensor", "scalar_tensor", "randint", "randperm"),
    *("empty_strided", "tril_indices", "triu_indices", "asarray"),
}


def test_tensors_are_made_on_a_named_device_in_a_named_dtype(sources: dict[str, str]) -> None:
    """The user may have set another default device, or dtype."""

    def unnamed(source: str) -> list[str]:
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
        return [
            ast.unparse(call)
            for call in calls
            if isinstance(call.func, ast.Attribute)
            and call.func.attr in FACTORIES
            and ast.unparse(call.func.value) == "torch"
            and not {keyword.arg for keyword in call.keywords} & {"out", None}
            and not {keyword.arg for keyword in call.keywords}
            >= {"device", *(["dtype"] if call.func.attr in OF_NUMBERS else [])}
        ]

    assert {name: found for name, source in sources.items() if (found := unnamed(source))} == {}
