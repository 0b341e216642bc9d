"""The peers' own tests of their functions, with those of :mod:`neula.compat` in their place.

In processes of their own: the suites bring markers and configuration that are not ours.
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
        "test_linalg": "TestSolve TestLstsq TestQR TestCholesky TestPinv "
        "test_byteorder_check test_unsupported_commontype",
    },
    "scipy.linalg.tests": {
        "test_basic": "TestSolve TestLstsq TestPinv TestDTypes",
        "test_decomp": "TestQR test_orth",
        "test_decomp_lu": "TestLUFactor TestLUSolve",
        "test_decomp_cholesky": "TestCholesky TestChoFactor",
    },
}

ELSEWHERE = {
    # The peer answers: complex numbers, LAPACK's drivers, other functions.
    "complex": "complex numbers",
    "clongdouble": "complex numbers",
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
    # Time.
    "test_generalized": "5,000 combinations of strides; see test_strides_of_stacks",
    "xslow": "gigabytes",
}
"""Tests that are left out, and why."""


@of_new_peers
@pytest.mark.parametrize("suite", SUITES)
def test_suite_of_the_peer(suite: str) -> None:
    if find_spec(suite) is None:
        pytest.skip("the peer is installed without its tests")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider"),
            *("-p", "tests.compat.taking_the_place", "-W", "ignore::neula.AccuracyWarning"),
            *("-k", " and ".join(f"not {name}" for name in ELSEWHERE)),
            "--pyargs",
            *(f"{suite}.{file}::{name}" for file, names in SUITES[suite].items() for name in names.split()),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
