"""The house is small: files of 600 lines at most, functions of 60 lines of code and 10 parameters, few
entries on top, no cycle of imports, and a name means one thing.

Which room may know which is checked by import-linter (``make lint``; the rooms are in pyproject.toml).
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from itertools import zip_longest
from pathlib import Path

import pytest

import neula
from neula.engines import shipped

SOURCE = Path(__file__).parent.parent / "src" / "neula"

LINES_OF_A_FILE = 600
LINES_OF_A_FUNCTION = 60
PARAMETERS = 10
"""But for public functions, with those that torch traces in their place, and kernels in Triton's language."""
LONGER = {"_asked", "__init__", "lstsq_streamed", "measured_systems"}
"""Names of functions that have more, which become fewer."""
ENTRIES = 15
"""Besides ``__init__.py``, ``__main__.py`` and the compiled core."""

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


parsed = cache(ast.parse)


def lines_of_code(source: str) -> set[int]:
    """Numbers of the lines that hold code: neither blank nor a comment alone."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    spans = [(token.start[0], token.end[0]) for token in tokens if token.type not in _NO_CODE]
    return {line for first, last in spans for line in range(first, last + 1)}


def functions(source: str, more_than: int = 0) -> Iterator[tuple[str, int]]:
    """Each function of more lines in all, nested ones included, with those of code without the docstring."""
    code = cache(lines_of_code)

    def within(node: ast.AST, path: tuple[str, ...]) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            name = (*path, child.name) if isinstance(child, ast.FunctionDef | ast.ClassDef) else path
            if isinstance(child, ast.FunctionDef):
                body = child.body[1:] if ast.get_docstring(child) is not None else child.body
                first = body[0].lineno if body else child.end_lineno + 1
                lines = range(first, child.end_lineno + 1)
                if len(lines) > more_than:
                    yield ".".join(name), len(code(source).intersection(lines))
            yield from within(child, name)

    yield from within(parsed(source), ())


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
    lines = {
        (name, f): n for name, source in sources.items() for f, n in functions(source, LINES_OF_A_FUNCTION)
    }
    assert {function: n for function, n in lines.items() if n > LINES_OF_A_FUNCTION} == {}


def is_kernel(node: ast.FunctionDef) -> bool:
    """Whether a function is in Triton's language."""
    return any(ast.unparse(decorator).startswith("jit") for decorator in node.decorator_list)


def parameters(source: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef) and not is_kernel(node):
            given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            yield node.name, len([x for x in given if x.arg not in ("self", "cls")])


def test_functions_have_few_parameters(sources: dict[str, str]) -> None:
    public = {*neula.__all__, *(f"traced_{name}" for name in neula.__all__)}
    others = {
        name: source for name, source in sources.items() if not name.startswith(("cli/commands/", "compat/"))
    }
    found = {f for source in others.values() for f, n in parameters(source) if n > PARAMETERS} - public
    assert {f.removesuffix("_triton") for f in found} <= LONGER


def imported(body: list[ast.stmt]) -> Iterator[str]:
    """Names imported together with a module: not by its functions, and not for types alone."""
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
    names = {file: {*imported(parsed(source).body)} & files.keys() for file, source in files.items()}
    TopologicalSorter(names).prepare()  # raises where there is a cycle


def test_only_public_names_are_imported(sources: dict[str, str]) -> None:
    def private(source: str) -> set[str]:
        nodes = [node for node in ast.walk(parsed(source)) if isinstance(node, ast.ImportFrom)]
        names = {alias.name for node in nodes for alias in node.names if str(node.module).startswith("neula")}
        return {name for name in names if name.startswith("_")} - {"__version__"}

    assert {name: found for name, source in sources.items() if (found := private(source))} == {}


def test_a_name_has_one_meaning(sources: dict[str, str]) -> None:
    """Class names are unique, leading underscores ignored; no function is named ``of``."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, source in sources.items():
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(path)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.lstrip("_") == "of":
                places["of"] += [path, path]
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks", "examples"])
def test_no_docstring_begins_with_what(folder: str) -> None:
    """Nor does a string under a constant."""
    begins = re.compile(r'^[ \t]*r?"""\s*What ', re.MULTILINE)
    paths = (SOURCE.parent.parent / folder).rglob("*.py")
    assert [str(path) for path in paths if begins.search(path.read_text(encoding="utf-8"))] == []


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
        calls = [node for node in ast.walk(parsed(source)) if isinstance(node, ast.Call)]
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


CONSTANTS = 729
"""Numeric constants of modules, which become fewer: what a machine gives stands in engines/machines."""

MACHINES = re.compile(r"\b([ABHPV]\d00|EPYC|Xeon|RTX|Zen)\b")


def constants(source: str) -> Iterator[tuple[str, str]]:
    """Upper-case names of modules whose values are made of numbers alone, with what is said of them."""
    body, lines = parsed(source).body, source.splitlines()
    for node, after in zip_longest(body, body[1:]):
        if not isinstance(node, ast.Assign) or not _is_number(node.value):
            continue
        first = node.lineno - 1
        while first and lines[first - 1].startswith("#"):
            first -= 1
        last = after.end_lineno if isinstance(after, ast.Expr) else node.end_lineno
        names = [x.id for target in node.targets for x in ast.walk(target) if isinstance(x, ast.Name)]
        yield from ((name, "\n".join(lines[first:last])) for name in names if name.isupper())


def _is_number(value: ast.expr) -> bool:
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "tl.constexpr":
        value = value.args[0]
    nodes = list(ast.walk(value))
    numbers = [node.value for node in nodes if isinstance(node, ast.Constant)]
    arithmetic = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.expr_context)
    named = all(isinstance(node, (*arithmetic, ast.Tuple, ast.Name, ast.Attribute)) for node in nodes)
    return named and bool(numbers) and all(type(number) in (int, float, complex) for number in numbers)


def test_what_a_constant_is() -> None:
    source = """
A = 1 << 3
B, C = 2, -3.0  # of an H200
D = "x"
E = [1]
F = A
_G = tl.constexpr(1)
h = 1
"""
    assert [name for name, _ in constants(source)] == ["A", "B", "C", "_G"]
    assert [name for name, words in constants(source) if MACHINES.search(words)] == ["B", "C"]


def test_constants_become_fewer_and_name_no_machine(sources: dict[str, str]) -> None:
    """Except in kernels, whose tiles stand beside them, and experiments, which say where papers measured."""
    found = [(path, *each) for path, source in sources.items() for each in constants(source)]
    assert len(found) <= CONSTANTS
    ours = [each for each in found if not each[0].startswith(("kernels/", "papers/"))]
    assert [(path, name) for path, name, words in ours if MACHINES.search(words)] == []


def test_numbers_of_machines_belong_to_records(sources: dict[str, str]) -> None:
    """A section has the name of a record, with its numbers; a file leaves out what another one says."""
    records = {
        node.name: {field.target.id for field in node.body if isinstance(field, ast.AnnAssign)}
        for source in sources.values()
        for node in parsed(source).body
        if isinstance(node, ast.ClassDef)
    }
    shared = records["Tuning"] - {"numbers", "_records"}
    for path in sorted((SOURCE / "engines" / "machines").iterdir()):
        content = shipped.read(path.stem)
        like = content.pop("machine", {}).get("like")
        known = {} if like is None else shipped.machine(like).numbers
        sections = {key: value.keys() for key, value in content.items() if isinstance(value, dict)}
        given = {name for names in sections.values() for name in names}
        assert len(given) == sum(map(len, sections.values()))  # a name in two sections would be one number
        if like is None:
            assert sections == {name: records[name] for name in sections}
            assert shared | given == shipped.machine(path.stem).numbers.keys()
        assert all(names <= records[name] for name, names in sections.items())
        assert content.keys() - sections.keys() <= shared
        mine = shipped.machine(path.stem).numbers
        assert {name for name in given if name in known and known[name] == mine[name]} == set()
