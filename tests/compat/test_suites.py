"""The peers' own tests of their functions, with those of :mod:`neula.compat` in their place.

In a process of their own: the suites bring markers and configuration that are not ours.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.peers import of_new_peers

ROOT = Path(__file__).parents[2]

SUITES = {
    "numpy.linalg.tests": {
        "test_linalg": "TestSolve TestLstsq TestQR TestCholesky TestPinv TestPinvHermitian TestEigh "
        "TestEighCases TestEigvalsh TestEigvalshCases TestSVD TestSVDHermitian TestMatrixRank TestCond "
        "TestNormDouble TestNormSingle TestNormInt64 test_reduced_rank test_empty_matrix_rank "
        "test_byteorder_check test_unsupported_commontype",
    },
    "scipy.linalg.tests": {
        "test_basic": "TestSolve TestLstsq TestPinv TestDTypes",
        "test_decomp": "TestQR test_orth TestEigh TestSVD_GESDD TestSVDVals test_gesdd_nan_error_message",
        "test_matfuncs": "TestSqrtM TestFractionalMatrixPower",
        "test_decomp_lu": "TestLUFactor TestLUSolve",
        "test_decomp_cholesky": "TestCholesky TestChoFactor",
    },
    "scipy.optimize.tests": {
        "test_least_squares": "TestTRF TestLM test_basic test_callback test_small_tolerances_for_lm "
        "test_fp32_gh12991 test_gh_19103",
        "test_minpack": "TestCurveFit",
        "test_lsq_linear": "TestTRF TestBVLS TestErrorChecking",
        "test_nnls": "TestNNLS",
    },
}

ELSEWHERE = {
    # The peer answers: LAPACK's drivers, other functions.
    "gels": "drivers",
    "test_inv": "another function",
    "test_det": "another function",
    # Documented differences.
    "test_overwrite_args": "asks that memory is overwritten, where it is only permitted",
    "test_overwrite_cleaning": "the same",
    "test_ill_condition_warning": "asks for a warning where the matrix is diagonal, and x exact",
    "left": "asks for the signs of R in qr_multiply, which is LAPACK's",
    "right": "the same",
    "pivoting": "the same, of a pivoted QR",
    "test_lwork": "the same, of workspace sizes",
    "test_numerical_jac": "asks for as many calls with as without derivatives",
    "test_workers": "compares a fit of neula with one of SciPy, digit for digit",
    "test_options": "asks for zero within 1e-15, at a minimum that is flat: x may be 1e-8",
    "test_bounds_shape": "asks for zero, exactly; there it is 1e-63",
    "test_x_scale_options": "the same, where it is 1e-16",
    "test_full_result": "asks for few calls, where x is refined to the last digit",
    "test_2D_singleton": "asks for zero, exactly; there it is 1e-16",
    "test_broadcast_y": "compares covariances of two of SciPy's methods, which agree to seven digits",
    "test_gh4555b": "the same with a covariance that differences made, right to five digits",
    # Time.
    "test_generalized": "5,000 combinations of strides; see test_strides_of_stacks",
    "test_robustness": "a thousand fits",
    "test_crash_2609": "singular values of 1500 x 2800",
    "test_sparse_bounds": "hundreds of steps with sparse matrices, which the peer solves",
    "xslow": "gigabytes",
}
"""Tests that are left out, and why."""


@of_new_peers
def test_suites_of_the_peers() -> None:
    found = [suite for suite in SUITES if find_spec(suite) is not None]
    if not found:
        pytest.skip("the peers are installed without their tests")
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-c",
                os.devnull,
                "-p",
                "no:cacheprovider",
                "-p",
                "no:logging",
            ),
            *("-p", "tests.compat.taking_the_place", "-W", "ignore::neula.AccuracyWarning"),
            *("-k", " and ".join(f"not {name}" for name in ELSEWHERE)),
            "--pyargs",
            *(
                f"{suite}.{file}::{name}"
                for suite in found
                for file, names in SUITES[suite].items()
                for name in names.split()
            ),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
