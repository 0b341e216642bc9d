"""Type checkers are told what the functions take."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any, Literal, get_overloads

import pytest

import neula
from neula.algorithms.orthogonal.panels import PANELS
from neula.engines import ENGINES, FORMATS
from neula.problems import signatures
from neula.problems.least_squares import lstsq
from neula.problems.orthogonal import qr
from neula.problems.systems import lu, solve

FUNCTIONS = [
    getattr(neula, name)
    for name in neula.__all__
    if inspect.isfunction(getattr(neula, name))
    and name not in ("finish", "fit_formula")  # whose arguments are no arrays
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_overloads_have_the_keywords_of_the_function(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    keywords = [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    overloads = get_overloads(inspect.unwrap(function))
    assert len(overloads) == 2
    for overload in overloads:
        *positional, rest = inspect.signature(overload).parameters.values()
        assert [p.name for p in positional] == [name for name in parameters if name not in keywords]
        name = str(rest.annotation).removeprefix("Unpack[").removesuffix("]")
        assert sorted(typing.get_type_hints(getattr(signatures, name))) == sorted(keywords)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_arrays_are_called_array_like(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    arrays = {"A", "B", "b", "damps", "leverage", "x0", "ydata"} & {*parameters}
    assert arrays
    assert {parameters[name].annotation for name in arrays} <= {"ArrayLike", "ArrayLike | None"}


def test_only_public_names_are_listed() -> None:
    """Rooms are there when they are asked for, and no part of the interface."""
    names = {name for name in dir(neula) if not name.startswith("__")}
    modules = {"algorithms", "compat", "distributed", "engines", "io", "jax", "ops", "sklearn"}
    assert names == {*neula.__all__, *modules}
    assert neula.problems.signatures is signatures


def named(annotation: Any) -> set[str]:
    """The names in the literals of a type."""
    if typing.get_origin(annotation) is Literal:
        return set(typing.get_args(annotation))
    return {name for part in typing.get_args(annotation) for name in named(part)}


DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


def test_names_that_are_told() -> None:
    """Literals name what the functions know, no more and no less."""

    def of(keywords: type, name: str) -> set[str]:
        return named(typing.get_type_hints(keywords)[name])

    assert of(signatures.Common, "accuracy") == {*FORMATS, *DTYPES}
    assert of(signatures.Common, "engine") == {"auto", *ENGINES}
    assert of(signatures.LstsqKeywords, "algorithm") == set(lstsq.ALGORITHMS)
    assert of(signatures.QRKeywords, "algorithm") == set(qr.ALGORITHMS)
    assert of(signatures.QRKeywords, "panel") == set(PANELS)
    assert of(signatures.SolveKeywords, "assume_a") == set(solve.STRUCTURES)
    assert of(signatures.SolveKeywords, "certify") == set(solve.CERTIFIED)
    assert of(signatures.SolveKeywords, "pivot") == set(solve.PIVOTING)
    assert of(signatures.LUKeywords, "pivot") == set(lu.PIVOTING)
    assert named(signatures.QRMode) == set(qr.MODES)
