"""Drop-ins where there is little to compute: nothing, NaN and Inf, numbers that cannot be looked at."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import torch
from tests.peers import of_new_peers

from neula.compat import numpy as np_compat
from neula.compat import scipy as sp_compat
from neula.compat import torch as torch_compat
from neula.compat.scipy import optimize as opt_compat

Call = Callable[[ModuleType, np.ndarray, np.ndarray], Any]

TENSOR = torch.from_numpy
SHAPES = [(0, 0), (0, 3), (3, 0), (3, 3), (2, 0, 3), (2, 3, 0), (0, 3, 3), (3,)]
FUNCTIONS: dict[str, tuple[ModuleType, ModuleType, Call]] = {
    "numpy.solve": (np_compat, np.linalg, lambda la, a, b: la.solve(a, b)),
    "numpy.lstsq": (np_compat, np.linalg, lambda la, a, b: la.lstsq(a, b)),
    "numpy.qr": (np_compat, np.linalg, lambda la, a, b: tuple(map(np.abs, la.qr(a, "complete")))),
    "numpy.cholesky": (np_compat, np.linalg, lambda la, a, b: la.cholesky(a)),
    "numpy.pinv": (np_compat, np.linalg, lambda la, a, b: la.pinv(a)),
    "scipy.solve": (sp_compat, scipy.linalg, lambda la, a, b: la.solve(a, b)),
    "scipy.lstsq": (sp_compat, scipy.linalg, lambda la, a, b: la.lstsq(a, b)),
    "scipy.qr": (sp_compat, scipy.linalg, lambda la, a, b: tuple(map(np.abs, la.qr(a)))),
    "scipy.orth": (sp_compat, scipy.linalg, lambda la, a, b: la.orth(a)),
    "scipy.pinv": (sp_compat, scipy.linalg, lambda la, a, b: la.pinv(a, return_rank=True)),
    "scipy.cholesky": (sp_compat, scipy.linalg, lambda la, a, b: la.cholesky(a)),
    "scipy.lu": (sp_compat, scipy.linalg, lambda la, a, b: la.lu_solve(la.lu_factor(a), b)),
    "scipy.lu, trans": (sp_compat, scipy.linalg, lambda la, a, b: la.lu_solve(la.lu_factor(a), b, trans=1)),
    "torch.solve": (torch_compat, torch.linalg, lambda la, a, b: la.solve(TENSOR(a), TENSOR(b))),
    "torch.lstsq": (torch_compat, torch.linalg, lambda la, a, b: la.lstsq(TENSOR(a), TENSOR(b))),
    "torch.qr": (torch_compat, torch.linalg, lambda la, a, b: [x.abs() for x in la.qr(TENSOR(a))]),
    "torch.cholesky": (torch_compat, torch.linalg, lambda la, a, b: la.cholesky(TENSOR(a))),
    "torch.pinv": (torch_compat, torch.linalg, lambda la, a, b: la.pinv(TENSOR(a))),
}


def outcome(function: Callable[[], Any]) -> tuple[Any, ...]:
    """Warnings, and the type and message of an error, or kinds and numbers of what is returned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = function()
        except Exception as error:  # an error of any kind is compared
            return type(error), str(error)
    parts = map(np.asarray, found if isinstance(found, (tuple, list)) else (found,))
    return {w.category for w in caught}, *((x.dtype, x.shape, str(x.tolist())) for x in parts)


@of_new_peers
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("k", [None, 0, 2])
def test_nothing_is_answered_as_by_the_library(name: str, k: int | None) -> None:
    """Shapes of all sorts that are empty, singular matrices with and without right-hand sides."""
    compat, peer, call = FUNCTIONS[name]
    for shape in SHAPES:
        a = np.zeros(shape)
        b = np.zeros(shape[:-1] if k is None else (*shape[:-1], k))
        assert outcome(lambda a=a, b=b: call(compat, a, b)) == outcome(lambda a=a, b=b: call(peer, a, b)), (
            shape
        )


REFUSED: dict[str, tuple[type[Exception], Callable[[np.ndarray], Any]]] = {
    "numpy.pinv": (np.linalg.LinAlgError, np_compat.pinv),
    "numpy.pinv, hermitian": (np.linalg.LinAlgError, lambda a: np_compat.pinv(a, hermitian=True)),
    "numpy.lstsq": (np.linalg.LinAlgError, lambda a: np_compat.lstsq(a, np.ones(len(a)))),
    "scipy.pinv": (ValueError, sp_compat.pinv),
    "scipy.pinv, unchecked": (ValueError, lambda a: sp_compat.pinv(a, check_finite=False)),
    "scipy.lstsq": (ValueError, lambda a: sp_compat.lstsq(a, np.ones(len(a)))),
    "scipy.lstsq, unchecked": (
        np.linalg.LinAlgError,
        lambda a: sp_compat.lstsq(a, np.ones(len(a)), check_finite=False),
    ),
    "torch.pinv": (torch.linalg.LinAlgError, lambda a: torch_compat.pinv(TENSOR(a))),
    "torch.lstsq": (
        torch.linalg.LinAlgError,
        lambda a: torch_compat.lstsq(TENSOR(a), torch.ones(len(a), 1, dtype=TENSOR(a).dtype)),
    ),
    "scipy.nnls": (ValueError, lambda a: opt_compat.nnls(a.real, np.ones(len(a)))),
    "scipy.lsq_linear": (ValueError, lambda a: opt_compat.lsq_linear(a.real, np.ones(len(a)))),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (6, 4), (4, 6)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128])
def test_singular_values_of_what_is_not_finite(
    name: str, shape: tuple[int, int], bad: float, dtype: type
) -> None:
    """LAPACK's SVD may never end with them: errors are of the library's kind."""
    a = np.ones(shape, dtype)
    a[-1, 0] = bad
    kind, call = REFUSED[name]
    with pytest.raises(kind):
        call(a)


def test_nnls_of_nothing() -> None:
    """SciPy's aborts Python, or returns memory that nobody has written."""
    for b in (np.array([3.0, -4.0]), np.array([[3.0], [-4.0]])):
        x, norm = opt_compat.nnls(np.zeros((2, 0)), b)
        assert (x.shape, x.dtype, norm) == ((0,), np.float64, 5.0)
    x, norm = opt_compat.nnls(np.zeros((0, 3)), np.zeros(0))
    assert (x.tolist(), norm) == ([0.0, 0.0, 0.0], 0.0)
    with pytest.raises(ValueError, match="shape"):
        opt_compat.nnls(np.zeros((2, 0)), np.zeros(3))


@pytest.mark.parametrize("shape", [(3, 4, 4), (2, 6, 3), (2, 3, 6), (2, 0, 3), (2, 3, 0)])
@pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
def test_signs_under_vmap(shape: tuple[int, ...], mode: str) -> None:
    A = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    Q, R = torch.vmap(lambda a: torch_compat.qr(a, mode))(A)
    q, r = torch_compat.qr(A, mode)
    assert bool((R.diagonal(dim1=-2, dim2=-1) >= 0).all())
    # Condition numbers of R are below 100.
    assert torch.allclose(R, r, rtol=0, atol=1e-12)
    if mode != "r":
        k = min(shape[-2:])  # the others are any basis of the complement
        assert torch.allclose(Q[..., :k], q[..., :k], rtol=0, atol=1e-12)
        assert torch.allclose(Q @ R, A, rtol=0, atol=1e-12)
