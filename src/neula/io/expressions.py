"""Formulas in text: parsed against a list of what is allowed, and computed without Python's evaluation.

A formula is arithmetic with numbers, names and a few functions, nothing else. A name that Python would not
take is quoted: `1st floor`, or Q("1st floor"). There is no way in a formula to reach an attribute, an element
or a function that is not in the list.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.special
import torch

from neula.errors import unknown_name

LONGEST = 10_000
"""Characters of a formula."""

SHOWN = 200
"""Characters of it in a message."""


def _power(x: Any, y: Any) -> Any:
    """Powers of numbers that are real."""
    found = operator.pow(x, y)
    if isinstance(found, complex):
        raise ValueError(f"({x:g})**({y:g}) in a formula is not a real number")
    return found


OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: _power,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}

CONSTANTS = {"pi": math.pi}

_NAMES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan"}
_EXPONENTIAL = ("exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "sqrt", "abs")
_CIRCULAR = ("sin", "cos", "tan", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh")

FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    **{name: (getattr(np, name), getattr(torch, name)) for name in _EXPONENTIAL + _CIRCULAR},
    **{name: (getattr(np, long), getattr(torch, long)) for name, long in _NAMES.items()},
    "erf": (scipy.special.erf, torch.special.erf),
    "erfc": (scipy.special.erfc, torch.special.erfc),
    "gamma": (scipy.special.gamma, lambda x: _gamma(x)),
}
"""By name, of arrays of NumPy and of tensors."""

OF_SEVERAL = {"min": (np.minimum, torch.minimum), "max": (np.maximum, torch.maximum)}
"""Functions of two or more arguments, applied one after the other."""

COMPARISONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
"""Functions that may be the first argument of ``where``."""

NAMES_TOO = ("gamma",)
"""Functions that are names as well where nothing is in parentheses behind them: parameters of many models."""


def _gamma(x: torch.Tensor) -> torch.Tensor:
    """The gamma function, which torch has as a logarithm of its absolute value."""
    negative = (x < 0) & (torch.remainder(torch.floor(x), 2) != 0)
    return torch.where(negative, -1.0, 1.0).to(x) * torch.lgamma(x).exp()


@dataclass(frozen=True)
class Formula:
    """A formula and the names in it.

    >>> formula = Formula.parse("a*exp(-b*x) + c")
    >>> formula.names
    ('a', 'b', 'x', 'c')
    >>> float(formula({"a": 2.0, "b": 0.0, "c": 1.0, "x": np.array(5.0)}))
    3.0
    """

    text: str
    names: tuple[str, ...]  # variables, in the order in which they appear first
    tree: ast.expr

    @classmethod
    def parse(cls, text: str) -> Formula:
        """Read a formula; a ValueError says what in it is not understood, or not allowed."""
        if len(text) > LONGEST:
            raise ValueError(f"a formula of {len(text)} characters is too long: {LONGEST} are allowed")
        if "\0" in text:
            raise ValueError("the formula is not understood: it holds a null character")
        try:
            plain = re.sub(r"`([^`]*)`", lambda name: f"Q({name[1]!r})", text.strip())
            tree = ast.parse(plain, mode="eval").body
            found = list(dict.fromkeys(_variables(tree, text)))
        except SyntaxError as error:
            where = f", at character {error.offset}" if error.offset else ""
            raise ValueError(f"the formula {_short(text)} is not understood: {error.msg}{where}") from None
        except (RecursionError, MemoryError):
            raise ValueError("the formula is nested too deeply") from None
        return cls(text, tuple(found), tree)

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """The value for numbers or arrays, of one library, by name.

        Where arrays overflow, or a function is not defined, it is Inf or NaN, without a warning. A ValueError
        says if a name has no value.
        """
        missing = [name for name in self.names if name not in values]
        if missing:
            raise ValueError(f"{missing[0]!r} in the formula {self.text!r} has no value")
        with np.errstate(all="ignore"):
            return _value(self.tree, values)


def _short(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[: SHOWN - 3] + "...")


def _variables(node: ast.AST, text: str) -> Iterator[str]:
    """Names in a formula, each node of which is checked."""
    parts: list[ast.expr] = []
    match node:
        case ast.Constant(value=value) if type(value) in (int, float):
            return
        case ast.Name(id=name):
            if name in FUNCTIONS and name not in NAMES_TOO:
                raise ValueError(f"{name} in the formula {text!r} is a function: write {name}(...)")
            if name not in CONSTANTS:
                yield name
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            parts = [left, right]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            parts = [operand]
        case ast.Call(func=ast.Name(id="Q"), args=[ast.Constant(value=str(name))], keywords=[]):
            yield name
        case ast.Call(func=ast.Name(id=name), args=[_, _, *_] as several, keywords=[]) if name in OF_SEVERAL:
            parts = several
        case ast.Call(
            func=ast.Name(id="where"),
            args=[ast.Compare(left=left, ops=[op], comparators=[right]), first, second],
            keywords=[],
        ) if type(op) in COMPARISONS:
            parts = [left, right, first, second]
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]):
            if name not in FUNCTIONS:
                known = sorted([*FUNCTIONS, *OF_SEVERAL, "where"])
                raise unknown_name(f"function in the formula {text!r}:", name, known)
            parts = [argument]
        case ast.BinOp(op=ast.BitXor()):
            raise ValueError(f"^ in the formula {text!r}: powers are written with **")
        case _:
            given = ast.get_source_segment(text.strip(), node) if isinstance(node, ast.expr) else None
            raise ValueError(
                f"{_short(given or text)} in a formula: allowed are numbers, names (any in backticks), "
                f"+ - * / **, parentheses, functions of one argument ({', '.join(FUNCTIONS)}), min(x, y), "
                "max(x, y) and where(x < y, a, b)"
            )
    for part in parts:
        yield from _variables(part, text)


def _alike(given: list[Any]) -> list[Any]:
    """Numbers and tensors as tensors, where there is one."""
    like = next((x for x in given if isinstance(x, torch.Tensor)), None)
    return [x if like is None or isinstance(x, torch.Tensor) else like.new_tensor(x) for x in given]


def _value(node: ast.AST, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)  # powers of integers may grow without end
        case ast.Name(id=name):
            return values[name] if name in values else CONSTANTS[name]
        case ast.BinOp(left=left, op=op, right=right):
            return OPERATORS[type(op)](_value(left, values), _value(right, values))
        case ast.UnaryOp(op=op, operand=operand):
            return OPERATORS[type(op)](_value(operand, values))
        case ast.Call(func=ast.Name(id="Q"), args=[ast.Constant(value=str(name))]):
            return values[name]
        case ast.Call(func=ast.Name(id=name), args=[_, _, *_] as several) if name in OF_SEVERAL:
            found, *others = _alike([_value(argument, values) for argument in several])
            for other in others:
                found = OF_SEVERAL[name][isinstance(found, torch.Tensor)](found, other)
            return found
        case ast.Call(args=[ast.Compare(left=left, ops=[op], comparators=[right]), first, second]):
            x, y, *choices = _alike([_value(part, values) for part in (left, right, first, second)])
            where = torch.where if isinstance(x, torch.Tensor) else np.where
            return where(COMPARISONS[type(op)](x, y), *choices)
        case ast.Call(func=ast.Name(id=name), args=[argument]):
            given = _value(argument, values)
            return FUNCTIONS[name][isinstance(given, torch.Tensor)](given)
    raise AssertionError(f"{node} was let through")
