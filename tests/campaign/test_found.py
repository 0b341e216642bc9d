"""Examples that the campaign has found to be wrong once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import neula

from .areas.constrained import ConstrainedRecipe
from .areas.dropins import DropInRecipe
from .areas.fits import FitsRecipe
from .areas.ridge import RidgeRecipe
from .areas.spectra import SpectraRecipe
from .fuzz import run_one
from .oracle import LeastSquares
from .recipes import Member, Recipe

PLAIN: dict[str, Any] = {"library": "numpy", "engine": "cpu"}

FOUND = {
    # Backward errors of factors that grow are small by rows, and not by columns.
    "growth and columns in other units": Recipe(
        *("lu", 33, 33, 3, (Member("wilkinson", columns=12, whole=-12, rhs="nearly orthogonal"),)),
        library="torch",
        engine="emulated",
        options=(("compute", "fp64"),),
        seed=88357431,
    ),
    # Columns that weights have all but removed have no inverse in the range of double precision.
    "vanishing columns": Recipe(
        *(
            "lstsq",
            6,
            6,
            3,
            (Member("foster", columns=12, whole=-12, rhs="nearly orthogonal", binary=False),),
        ),
        damp=1.0,
        weights=100,
        rcond=0.001,
        layout="reversed",
        library="numpy",
        engine="emulated",
        options=(("certify", "forward"),),
        seed=2571089871,
    ),
    # The residual is far from orthogonal to what the computed singular vectors say is the range.
    "range of the svd": Recipe(
        "lstsq", 4, 4, 1, (Member("one_small", rhs="unit", rhs_power=-300),), damp=1e-8, seed=2757385
    ),
    # Rounded products with weights count, also where damping dominates.
    "weights and damping": Recipe(
        "lstsq", 1, 1, 3, (Member("counting"),), dtype="int64", damp=1e-8, weights=100, seed=1924634034
    ),
    # One of a batch is dominated by its damping, and others are not.
    "weights and damping, a batch": Recipe(
        *("lstsq", 4, 4, 0, (Member("hilbert", whole=30, rhs="mixed"), Member("dependent", whole=-100))),
        batched=True,
        damp=1e-8,
        weights=15,
        seed=991220614,
    ),
    # Small weights took residuals out of the range of single precision.
    "small weights": Recipe(
        *("lstsq", 1, 1, 3, (Member("wilkinson", whole=-12, rhs="nearly orthogonal"),)),
        weights=100,
        library="torch",
        engine="emulated",
        options=(("algorithm", "lsqr"),),
        seed=1769725080,
    ),
    # x underflows, and its rounding exceeded the bound that was reported, but not the one that was applied.
    "bound with damping": Recipe(
        "lstsq",
        1,
        4,
        3,
        (Member("kahan", columns=30, whole=300, rhs="integer"),),
        damp=1.0,
        seed=4125333490,
    ),
    # Rounded to half precision, x has a residual longer than b.
    "residual of rounded x": Recipe(
        *(
            "lstsq",
            10,
            7,
            2,
            (Member("dependent", columns=1, whole=400, rhs="nearly orthogonal", binary=False),),
        ),
        dtype="float16",
        damp=1e-8,
        rcond=1e-8,
        engine="emulated",
        seed=2685890487,
    ),
    # A variable at a bound, with a multiplier that is noise, moves along a flat direction.
    "bounds without force": FitsRecipe(
        *("mixture", "2-point", "curve_fit", "torch", "cauchy", 12, -4, -1, -60, 0, 0, -1, 0, -2, True),
        seed=1983851918,
    ),
    "bounds without force, three points": FitsRecipe(
        *("sum", "3-point", "curve_fit", "torch", "linear", 20, -4, 14, -60, 1, 20, -1, 0, -4, True),
        seed=2129945911,
    ),
    # In the units of A's columns a contradiction of 5e-5 is one of rounding.
    "contradiction in other units": ConstrainedRecipe(
        *("graded", "near", "contradiction", 5, 5, 6, 2, 450, 0, 450, 0, 0.0, ""), seed=864807405
    ),
    "contradiction beside a large column": ConstrainedRecipe(
        *("sparse", "combined integer", "contradiction", 4, 5, 5, 1, 900, 0, 900, 60, 1000.0, "variances"),
        seed=519186999,
    ),
    # The exponent of d was the one that stood for zero.
    "exponent of zero": ConstrainedRecipe(
        *("integer", "graded", "tiny", 6, 1, 2, 2, 1000, 1000, -1000, 0, 1e-8, ""), seed=1348936782
    ),
    # A trace that rounding errors made negative.
    "negative trace": RidgeRecipe(
        *("columns", 4, 4, "inside", "wide", 43, 0, 0, "cpu", "torch"), seed=3308219882
    ),
    # Unknowns that A knows nothing of, and C in units that differ.
    "units of C alone": ConstrainedRecipe(
        *("zero_lines", "copied integer", "random", 1, 4, 5, 1, 1000, 40, 1000, 60, 1000.0, ""),
        seed=2182567754,
    ),
    # Columns of C differ by 1e22 in size, and dominating damping makes those of A alike.
    "units of C beside damping": ConstrainedRecipe(
        *("dependent_integer", "vandermonde", "zero", 4, 6, 6, 2, -900, 0, 900, 60, 1e6, "variances"),
        seed=1153259597,
    ),
    # In the units of C, in which columns are alike, those of A overflow.
    "units of C out of range": ConstrainedRecipe(
        *("vandermonde", "one ulp", "tiny", 5, 4, 3, 1, 1000, 40, -1000, 0, 1e-8, "weights"), seed=106052464
    ),
    # Rows of C that differ by the smallest number there is, which doubled arithmetic takes for rounding.
    "one ulp of zero in C": ConstrainedRecipe(
        *("duplicates", "one ulp", "tiny", 8, 4, 3, 0, 0, 200, -200, 60, 1000.0, ""), seed=4202292426
    ),
    "one ulp of zero in C, more rows": ConstrainedRecipe(
        *("diagonal", "one ulp", "tiny", 4, 5, 4, 1, 450, 40, -40, 12, 1e-8, "weights"), seed=2290051670
    ),
    # A vector that says little of the norm of A, whose columns have norm 1.
    "norm from below": Recipe(
        *("pos", 6, 6, 0, (Member("integer_gram", columns=3, rhs="nearly orthogonal"),)),
        dtype="float32",
        library="torch",
        options=(("certify", "forward"),),
        seed=3907049709,
    ),
    # Two random vectors that the inverse does not lengthen.
    "condition from random vectors": Recipe(
        *("solve", 29, 29, 1, (Member("arrowhead", whole=-12),)),
        layout="reversed",
        options=(("accuracy", "fp16"), ("certify", "forward")),
        **PLAIN,
        seed=622732614,
    ),
    # The judge took the least of three perturbations for the smallest one, which weights that round are not.
    "backward error with rounded weights": Recipe(
        *("lstsq", 4, 4, 2, (Member("near_rank_one", rhs="nearly orthogonal", binary=False),)),
        damp=1.0,
        weights=6,
        **PLAIN,
        seed=2846307852,
    ),
    # Discs of tiny eigenvalues that overlapped made one of all eigenvalues.
    "singular values of zero and one": Recipe(
        *("polar", 33, 33, 1, (Member("one_ulp", rows=30, whole=30, rhs="unit", rhs_power=-300),)),
        library="torch",
        engine="emulated",
        seed=2333009754,
    ),
    # LAPACK divides by pivots whose reciprocals overflow.
    "tiny pivots": Recipe(
        *("lu", 5, 5, 0, (Member("arrowhead", whole=-300, rhs="integer", binary=False),)),
        layout="sliced",
        seed=1954054462,
    ),
    "rounding of a robust fit": FitsRecipe(
        *("line", "given", "least_squares", "numpy", "cauchy", 30, 0, 22, -60, 2, 0, -1, 30, 0, True),
        seed=1467204116,
    ),
    "a variable at its bound has units": FitsRecipe(
        *("saturation", "3-point", "least_squares", "torch", "cauchy", 2, 0, 0, 10, 1, -20, -1, 10, 0, True),
        seed=824042252,
    ),
    # Sums of slices lose what is small beside the largest unknown, and with it the residual of a row.
    "unknowns of all sizes": Recipe(
        *("lstsq", 5, 12, 1, (Member("arrowhead", columns=12, rhs="range", rhs_power=200),)),
        layout="F",
        options=(("accuracy", "fp16"), ("certify", "forward")),
        **PLAIN,
        seed=1995952567,
    ),
    # Errors of the row space were multiplied by the ratio of other columns to the damping of zero columns.
    "damping of zero columns": Recipe(
        *("lstsq", 4, 5, 1, (Member("zero_lines", whole=-300, rhs="orthogonal"),)),
        dtype="complex64",
        damp=1e-8,
        weights=15,
        engine="emulated",
        options=(("certify", "forward"),),
        seed=2368340290,
    ),
    # Elements of the pseudoinverse are subnormal, which a warning says.
    "pseudoinverse that underflows": Recipe(
        *("pinv", 2, 10, 1, (Member("dependent_integer", whole=300, rhs="orthogonal"),)),
        dtype="complex64",
        seed=1094236996,
    ),
    # Eigenvalues are rounded when they return to the units of A, where they may be subnormal.
    "power of subnormal numbers": SpectraRecipe(
        "power", ("integer gram", "integer gram"), 2, 2, 3746128610, whole=-400, p=-0.25
    ),
    "root of subnormal numbers": SpectraRecipe("power", ("two values",), 6, 6, 287189678, whole=-310),
    "a definite matrix of subnormal numbers": SpectraRecipe(
        "power", ("one small", "one small"), 2, 2, 623654107, whole=-400, p=-0.5
    ),
    "an interval of subnormal numbers": SpectraRecipe(
        *("eigh", ("wilkinson_plus",), 6, 6, 1083931281),
        whole=-400,
        dtype="complex64",
        part="value",
        accuracy=1e-3,
    ),
    # Either part of a complex product is two products.
    "one complex vector": SpectraRecipe(
        "eigh", ("even",), 2, 2, 2631196345, whole=-400, dtype="complex128", part="index"
    ),
    # LAPACK neglects elements of bidiagonal matrices up to 99 unit roundoffs.
    "neglected elements": SpectraRecipe("svd", ("geometric",), 5, 5, 3262097758, whole=-300, full=True),
    # Products with the inverse of a factor overflow where the eigenvalues of the pencil do not.
    "a large pencil": SpectraRecipe("pencil", ("diagonal even",), 12, 12, 2644142618, whole=300),
    # SciPy, which takes complex numbers, never ends with NaN.
    "complex nan": DropInRecipe("optimize", "lsq_linear", (5, 3), None, "nan", "complex128", 1),
}


@pytest.mark.parametrize("name", FOUND)
def test_sound(name: str) -> None:
    verdict, shown = run_one(FOUND[name], "cpu")
    assert not verdict.findings, f"{verdict}\n{shown}"


@pytest.mark.filterwarnings("ignore::neula.IllConditionedWarning")
def test_almost_nothing_of_b_lies_in_the_range_of_rank_one() -> None:
    """Coefficients by the SVD are rounding errors of b, beside which the residual does not look large."""
    small, large = 2.0**47 * 1.1, 2.0**127 * 0.91
    a = np.array([[small, 0, small], [-small, large, small], [-small, -large, small]], np.float32)
    b = np.array([[0.5], [0.0], [-1.0]], np.float32) * np.float32(2.0**126)
    weights = np.array([0.08148235249254794, 1448278652.5880702, 1.866325391248749e-15])
    result = neula.lstsq(a, b, weights=weights, engine="cpu")
    (error,) = LeastSquares(a, b, weights=weights, rcond=1e-8).errors(result.x, 1)
    assert result.rank == 1
    assert result.forward_error >= error or not result.accepted
