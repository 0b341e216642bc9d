"""Formulas: what they mean, and that nothing else gets in."""

import math

import numpy as np
import pytest
import torch

from neula.io.expressions import FUNCTIONS, LONGEST, Formula

X = np.array([0.25, 0.5, 0.75])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a*exp(-b*x) + c", 2 * np.exp(-3 * X) + 5),
        ("a**2**b", 256 + 0 * X),
        ("-x**2", -(X**2)),
        ("(a + +b) / -c", -1 + 0 * X),
        ("1e-3*x + 2.", 1e-3 * X + 2),
        ("cos(2*pi*x)", np.cos(2 * math.pi * X)),
        ("  sqrt(abs(-x))\n", np.sqrt(X)),
        ("7", 7 + 0 * X),
        ("exp(1) * x", math.e * X),
        ("min(x, a, 0.5)", np.minimum(X, 0.5)),
        ("max(0.3, x) * a", 2 * np.maximum(X, 0.3)),
        ("max(a, b)", 3 + 0 * X),
        ("where(x < 0.5, a, x)", np.where(X < 0.5, 2.0, X)),
        ("where(a != 2, x, 1) + x", 1 + X),
        ("gamma(a + b)", 24 + 0 * X),
    ],
)
def test_values(text, value):
    formula = Formula.parse(text)
    values = {"a": 2.0, "b": 3.0, "c": 5.0, "x": X}
    np.testing.assert_allclose(formula(values) + 0 * X, value, rtol=1e-14, atol=1e-14)
    tensors = {"a": torch.tensor(2.0).double(), "b": 3.0, "c": 5.0, "x": torch.from_numpy(X)}
    np.testing.assert_allclose(formula(tensors) + 0 * tensors["x"], value, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_functions_of_both_libraries(name):
    formula = Formula.parse(f"{name}(x)")
    np.testing.assert_allclose(formula({"x": torch.from_numpy(X)}), formula({"x": X}), rtol=1e-13)


def test_gamma_and_names():
    x = np.array([-0.5, -1.5, -2.5, 0.5, 4.0, 20.0])
    formula = Formula.parse("gamma(x)")
    np.testing.assert_allclose(formula({"x": torch.from_numpy(x)}), formula({"x": x}), rtol=1e-13)
    formula = Formula.parse("gamma * gamma(x)")
    assert formula.names == ("gamma", "x")
    np.testing.assert_allclose(formula({"gamma": 2.0, "x": 5.0}), 48.0)
    assert Formula.parse("c*x + a*exp(b*x) + pi").names == ("c", "x", "a", "b")


FORBIDDEN = (
    *("__import__('os').system('x')", "a.__class__", "a[0]", "(lambda: a)()", "[a for a in b]"),
    *("a if b else c", "a and b", "a < b", "a // b", "a @ b", "~a", "'text'", "1j*a", "True*a", "..."),
    *("exp(a, b)", "exp(x=a)", "exp(*a)", "where(a, b, c)", "where(a < b < c, a, b)", "where(a in b, a, b)"),
    "max(*a, b)",
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "allowed are") for text in FORBIDDEN),
        *((text, "unknown function") for text in ("__import__('os')", "eval(a)", "min(a)")),
        *((text, "not understood") for text in ("a b", "a = b", "a; b", "", "a\0")),
        ("exp + a", "write exp"),
        ("a^2", r"\*\*"),
        ("(" * 500 + "a" + ")" * 500, "not understood|nested"),
        ("-" * 9000 + "a", "nested"),
        ("a" * (LONGEST + 1), "too long"),
    ],
)
def test_what_is_not_allowed(text, message):
    with pytest.raises(ValueError, match=message) as error:
        Formula.parse(text)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("a*(-8)**(1/3)", ValueError, "not a real number"),
        ("(-1)**0.5 + a", ValueError, "not a real number"),
        ("9**9**9**9*a", OverflowError, ""),  # powers do not grow without end
        ("a + b", ValueError, "'b' in the formula"),
    ],
)
def test_what_has_no_value(text, error, message):
    with pytest.raises(error, match=message):
        Formula.parse(text)({"a": 1.0})
