"""Arrays of other libraries in and out: of the array API standard, and of CuPy and JAX on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch

import neula
from neula.pipeline.result import Attempt

RNG = np.random.default_rng(0)
TALL, SQUARE = RNG.standard_normal((12, 4)), RNG.standard_normal((4, 4))
BATCH, RIGHT = RNG.standard_normal((3, 12, 4)), RNG.standard_normal((12, 2))
DEFINITE = SQUARE @ SQUARE.T + 4 * np.eye(4)
SYMMETRIC = np.ones((4, 4)) + np.eye(4)
TIMES = np.linspace(0, 1, 12)

Made = Callable[[np.ndarray], Any]


def incremental(A: Any, b: Any) -> neula.LeastSquares:
    fit = neula.LeastSquares(4)
    fit.update(A, b)
    return fit


CALLS: dict[str, Callable[[Made], Any]] = {
    "cholesky": lambda of: neula.cholesky(of(DEFINITE)),
    "eigh": lambda of: neula.eigh(of(DEFINITE)),
    "eigh of two matrices": lambda of: neula.eigh(of(SQUARE), of(DEFINITE)),
    "eigvalsh": lambda of: neula.eigvalsh(of(DEFINITE), subset_by_index=(1, 2)),
    "fractional_matrix_power": lambda of: neula.fractional_matrix_power(of(DEFINITE), 0.3),
    "inv_sqrt": lambda of: neula.inv_sqrt(of(DEFINITE)),
    "LeastSquares": lambda of: incremental(of(TALL), of(RIGHT[:, 0])).solve(),
    "least_squares": lambda of: neula.least_squares(lambda x: x * x - 2.0, of(np.ones(3))),
    "lsq_linear": lambda of: neula.lsq_linear(of(TALL), of(RIGHT[:, 0]), (0, 1)),
    "lstsq": lambda of: neula.lstsq(of(TALL), of(RIGHT)),
    "lstsq of a batch": lambda of: neula.lstsq(of(BATCH), of(RIGHT)),
    "lstsq with weights": lambda of: neula.lstsq(of(TALL), of(RIGHT[:, 0]), weights=of(TIMES + 1)),
    "lu_factor": lambda of: neula.lu_factor(of(SQUARE)).L,
    "lu_solve": lambda of: neula.lu_solve(neula.lu_factor(of(SQUARE)), of(RIGHT[:4])),
    "matmul": lambda of: neula.matmul(of(TALL), of(SQUARE)),
    "nnls": lambda of: neula.nnls(of(TALL), of(RIGHT[:, 0])),
    "orth": lambda of: neula.orth(of(TALL)),
    "pinv": lambda of: neula.pinv(of(TALL)),
    "polar": lambda of: neula.polar(of(TALL)),
    "qr": lambda of: neula.qr(of(TALL)),
    "qr of a batch": lambda of: neula.qr(of(BATCH)),
    "qr with pivots": lambda of: neula.qr(of(TALL), pivoting=True),
    "ridge_path": lambda of: neula.ridge_path(of(TALL), of(RIGHT[:, 0]), of(np.array([0.1, 1.0]))),
    "solve": lambda of: neula.solve(of(SQUARE), of(RIGHT[:4])),
    "sqrtm": lambda of: neula.sqrtm(of(DEFINITE)),
    "svd": lambda of: neula.svd(of(TALL)),
    "svd of a batch": lambda of: neula.svd(of(BATCH), full_matrices=False),
    "svdvals": lambda of: neula.svdvals(of(TALL)),
    "svd_lowrank": lambda of: neula.svd_lowrank(of(TALL), 2),
    "svd_lowrank of a batch": lambda of: neula.svd_lowrank(of(BATCH), 2),
    "tsqr": lambda of: neula.tsqr(of(TALL)),
}


def arrays_of(result: Any) -> dict[str, Any]:
    """Arrays of a result by the names of its public fields, or the result itself."""
    if not is_dataclass(result):
        return {"": result}
    named = {x.name: getattr(result, x.name) for x in fields(result) if not x.name.startswith("_")}
    return {name: x for name, x in named.items() if hasattr(x, "shape") and not isinstance(x, Attempt)}


def test_every_public_function_is_called() -> None:
    public = {name for name in neula.__all__ if not name.endswith(("Result", "Warning", "Error"))}
    no_problems = {"Attempt", "LUFactors", "QRCertificate", "RidgePath", "finish"}
    no_problems |= {"curve_fit", "fit_formula"}  # what they are given is no tensor
    assert public - no_problems == {name.partition(" ")[0] for name in CALLS}


@pytest.mark.parametrize("name", CALLS)
def test_the_array_api_standard(name: str) -> None:
    """A library that has what the standard asks for and nothing else; the numbers are NumPy's."""
    xp = pytest.importorskip("array_api_strict")
    found, expected = arrays_of(CALLS[name](xp.asarray)), arrays_of(CALLS[name](lambda x: x))
    assert found.keys() == expected.keys()
    assert found
    for key, x in found.items():
        assert isinstance(x, type(xp.zeros(1))) or np.ndim(expected[key]) == 0, (key, type(x))
        # MINPACK minimizes for NumPy alone.
        rounding = 1e-12 if name == "least_squares" else 0.0
        np.testing.assert_allclose(np.asarray(x), expected[key], rounding, rounding, err_msg=key)


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["cupy", "jax.numpy"])
@pytest.mark.parametrize("name", CALLS)
def test_arrays_on_a_gpu(name: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In and out on the device; each answer as good as that of the CPU."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes most of the GPU for good
    xp = pytest.importorskip(library)
    given = xp.asarray(TALL)
    found = arrays_of(CALLS[name](lambda x: xp.asarray(x)))
    expected = arrays_of(CALLS[name](lambda x: x.astype(given.dtype)))
    # JAX makes float32 of NumPy's numbers.
    exact = 1e-10 if str(given.dtype) == "float64" else 1e-3
    if name == "lu_factor":  # its products are in half precision on a GPU
        exact = len(SQUARE) * 2.0**-11
    for key in {"", "x", "L", "factor", "R", "s", "Vh"} & found.keys():
        x = found[key]
        assert type(x) is type(given), key
        there = torch.from_dlpack(x)
        assert there.is_cuda
        signs = np.abs if key == "Vh" else np.asarray
        np.testing.assert_allclose(signs(there.cpu().numpy()), signs(expected[key]), atol=exact, err_msg=key)
