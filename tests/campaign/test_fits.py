"""Forward errors and ranks of fits count the errors of differences and of residuals."""

from __future__ import annotations

import pytest

from .areas.fits import Fit, FitsRecipe, judge

PLAIN = FitsRecipe(
    "gauss", None, "least_squares", "numpy", "linear", 20, -1, -1, 0, 0, 0, -1, 10, 0, False, 1
)


def recipe(**changes: object) -> FitsRecipe:
    return FitsRecipe(**({name: getattr(PLAIN, name) for name in PLAIN.__dataclass_fields__} | changes))


NARROW = [
    recipe(far=far, jac=jac, library=library)
    for far, jac, library in [
        (10, None, "numpy"),
        (14, None, "numpy"),
        (18, None, "numpy"),
        (10, "3-point", "numpy"),
        (10, "3-point", "torch"),
        (14, "2-point", "torch"),
        (18, "cs", "numpy"),
        (18, "given", "numpy"),
    ]
]

OFFSETS = [
    recipe(model="line", offset=9, noise=-99, library="numpy"),
    recipe(model="line", offset=9, jac="given", library="torch", loss="soft_l1", noise=-8),
    recipe(model="saturation", offset=9, jac=None, library="torch", noise=-99, near=0),
    recipe(
        model="saturation", offset=5, jac="2-point", library="torch", function="curve_fit", m=2, noise=-12
    ),
    recipe(model="decay", offset=9, m=3, noise=-12, near=30, unit=-60),
    recipe(model="gauss", offset=9, m=5, noise=-99, jac="3-point", loss="cauchy", size=-20, near=30),
]

FLAT = [
    recipe(model=model, jac=jac, library=library, function=function, noise=noise)
    for model, jac, library, function, noise in [
        ("product", None, "numpy", "least_squares", -2),
        ("product", "2-point", "numpy", "curve_fit", -99),
        ("sum", "3-point", "torch", "least_squares", -1),
        ("sum", "forward", "torch", "curve_fit", -8),
        ("factors", "cs", "numpy", "least_squares", -4),
        ("delayed", None, "numpy", "curve_fit", -2),
        ("delayed", "given", "numpy", "least_squares", -99),
        ("mixture", "3-point", "numpy", "least_squares", -99),
    ]
]


@pytest.mark.parametrize("case", NARROW + OFFSETS + FLAT, ids=lambda case: f"{case.model}-{case.jac}")
def test_what_is_claimed_is_true(case):
    """Against Newton's method in exact arithmetic: narrow peaks, large constants, dependent parameters."""
    verdict, shown = judge(case, "cpu")
    assert not verdict.findings, f"{verdict}\n{shown}"


def test_a_narrow_peak_keeps_its_digits():
    """Usual steps of fourth-order differences are sixteen widths long."""
    result = Fit.of(recipe(far=18)).run("cpu")
    assert result.converged
    assert result.forward_error < 1e-8
