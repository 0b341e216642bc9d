"""Drop-ins where there is little to compute: nothing, NaN and Inf, numbers that cannot be looked at."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import torch
from tests.peers import of_new_peers

import neula
from neula.compat import numpy as np_compat
from neula.compat import scipy as sp_compat
from neula.compat import torch as torch_compat
from neula.compat.scipy import optimize as opt_compat

Call = Callable[[ModuleType, np.ndarray, np.ndarray], Any]

TENSOR = torch.from_numpy
SHAPES = [(0, 0), (0, 3), (3, 0), (3, 3), (2, 0, 3), (2, 3, 0), (0, 3, 3), (3,)]
NUMPY = {
    "solve": lambda la, a, b: la.solve(a, b),
    "lstsq": lambda la, a, b: la.lstsq(a, b),
    "cholesky": lambda la, a, b: la.cholesky(a),
    "pinv": lambda la, a, b: la.pinv(a),
    "eigh": lambda la, a, b: la.eigh(a),
    "eigvalsh": lambda la, a, b: la.eigvalsh(a),
    "svd": lambda la, a, b: la.svd(a),
    "qr": lambda la, a, b: tuple(map(abs, la.qr(a))),
}
RANKS = {
    "matrix_rank": lambda la, a, b: la.matrix_rank(a),
    "cond": lambda la, a, b: la.cond(a),
    "norm": lambda la, a, b: la.norm(a, 2),
}
SVDVALS = {"svdvals": lambda la, a, b: la.svdvals(a)}
SCIPY = {
    "orth": lambda la, a, b: la.orth(a),
    "pinv": lambda la, a, b: la.pinv(a, return_rank=True),
    "lu": lambda la, a, b: la.lu_solve(la.lu_factor(a), b),
    "lu, trans": lambda la, a, b: la.lu_solve(la.lu_factor(a), b, trans=1),
    "sqrtm": lambda la, a, b: la.sqrtm(a),
    "power": lambda la, a, b: la.fractional_matrix_power(a, 0.3),
}
HERMITIAN = {"pinv, hermitian": lambda la, a, b: la.pinv(a, hermitian=True)}
NUCLEAR = {"matrix_norm": lambda la, a, b: la.matrix_norm(a, "nuc")}
FUNCTIONS: dict[str, tuple[ModuleType, ModuleType, Call]] = {
    f"{peer.__name__}.{name}": (compat, peer, call)
    for compat, peer, calls in (
        (np_compat, np.linalg, NUMPY | RANKS | HERMITIAN),
        (sp_compat, scipy.linalg, NUMPY | SCIPY | SVDVALS),
        (torch_compat, torch.linalg, NUMPY | RANKS | SVDVALS | NUCLEAR),
    )
    for name, call in calls.items()
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
    wrap = TENSOR if compat is torch_compat else np.asarray
    for shape in SHAPES:
        given = np.zeros(shape), np.zeros(shape[:-1] if k is None else (*shape[:-1], k))
        ours, theirs = (outcome(partial(call, la, *map(wrap, given))) for la in (compat, peer))
        assert ours == theirs, shape


CALLS_OF_VALUES: dict[str, Callable[[Any, Any], Any]] = {
    "svd": lambda la, a: la.svd(a),
    "svdvals": lambda la, a: la.svdvals(a),
    "matrix_rank": lambda la, a: la.matrix_rank(a),
    "cond": lambda la, a: la.cond(a),
    "norm": lambda la, a: la.norm(a, 2),
    "nuclear norm": lambda la, a: la.norm(a, "nuc"),
}
NUMPYS, TORCHS = np.linalg.LinAlgError, torch.linalg.LinAlgError
REFUSED: dict[str, tuple[type[Exception], Callable[[np.ndarray], Any]]] = {
    **{
        f"numpy.{name}": (NUMPYS, partial(call, np_compat))
        for name, call in CALLS_OF_VALUES.items()
        if name != "svdvals" or hasattr(np.linalg, name)
    },
    **{
        f"torch.{name}": (TORCHS, lambda a, call=call: call(torch_compat, TENSOR(a)))
        for name, call in CALLS_OF_VALUES.items()
    },
    **{
        f"scipy.{name}": (ValueError, lambda a, name=name: getattr(sp_compat, name)(a, check_finite=False))
        for name in ("svd", "svdvals", "pinv")
    },
    "numpy.pinv": (NUMPYS, np_compat.pinv),
    "numpy.pinv, hermitian": (NUMPYS, lambda a: np_compat.pinv(a, hermitian=True)),
    "numpy.lstsq": (NUMPYS, lambda a: np_compat.lstsq(a, np.ones(len(a)))),
    "scipy.pinv, checked": (ValueError, sp_compat.pinv),
    "scipy.lstsq": (ValueError, lambda a: sp_compat.lstsq(a, np.ones(len(a)))),
    "scipy.lstsq, unchecked": (NUMPYS, lambda a: sp_compat.lstsq(a, np.ones(len(a)), check_finite=False)),
    "torch.pinv": (TORCHS, lambda a: torch_compat.pinv(TENSOR(a))),
    "torch.lstsq": (TORCHS, lambda a: torch_compat.lstsq(*map(TENSOR, (a, np.ones((len(a), 1), a.dtype))))),
    "scipy.nnls": (ValueError, lambda a: opt_compat.nnls(a.real, np.ones(len(a)))),
    "scipy.lsq_linear": (ValueError, lambda a: opt_compat.lsq_linear(a.real, np.ones(len(a)))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_singular_values_of_what_is_not_finite(name: str) -> None:
    """LAPACK's SVD may never end with them: errors are of the library's kind."""
    kind, call = REFUSED[name]
    for shape, bad, dtype in product([(1, 1), (6, 4), (4, 6)], [np.nan, np.inf], [np.float32, np.complex128]):
        a = np.ones(shape, dtype)
        a[-1, 0] = bad
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


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("n", [3, 70])
@pytest.mark.parametrize("name", ["eigh", "eigvalsh"])
def test_eigenvalues_of_what_is_not_finite(name: str, n: int, bad: float) -> None:
    """Only the triangle that is read counts."""
    a = np.eye(n)
    a[-1, 0] = bad
    with pytest.raises(np.linalg.LinAlgError):
        getattr(np_compat, name)(a)
    with pytest.raises(torch.linalg.LinAlgError):
        getattr(torch_compat, name)(TENSOR(a))
    with pytest.raises(ValueError, match="infs or NaNs"):
        getattr(sp_compat, name)(a, check_finite=False)
    upper = getattr(np_compat, name)(a, "U"), getattr(torch_compat, name)(TENSOR(a), "U")
    upper = *upper, getattr(sp_compat, name)(a, lower=False, check_finite=False)
    for found in upper:
        assert np.array_equal(found[0] if name == "eigh" else found, np.ones(n))


def test_only_singular_values_need_finite_numbers() -> None:
    a = np.array([[np.nan, 1.0], [2.0, 3.0]])
    for compat, wrap in ((np_compat, np.asarray), (torch_compat, TENSOR)):
        assert np.isnan(np.asarray(compat.norm(wrap(a))))
        assert np.isnan(np.asarray(compat.norm(wrap(a[0]), 2)))
        assert not np.isfinite(np.asarray(compat.cond(wrap(a), 1)))
    assert np_compat.matrix_rank(a[0]) == 1


READ_ONLY = {
    **{name: case[::2] for name, case in FUNCTIONS.items() if not name.startswith("torch")},
    "numpy.det": (np_compat, lambda la, a, b: la.det(a)),
    "numpy.slogdet": (np_compat, lambda la, a, b: la.slogdet(a)),
    "numpy.inv": (np_compat, lambda la, a, b: la.inv(a)),
    "scipy.det": (sp_compat, lambda la, a, b: la.det(a)),
    "scipy.inv": (sp_compat, lambda la, a, b: la.inv(a)),
}


@pytest.mark.parametrize("name", READ_ONLY)
def test_memory_that_may_not_be_written_to(name: str) -> None:
    """Torch warns once a process where a tensor shares such memory."""
    ours, call = READ_ONLY[name]
    a, b = np.diag([4.0, 3.0, 2.0]) + 0.1, np.ones(3)
    a.flags.writeable = b.flags.writeable = False
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call(ours, a, b)
    finally:
        torch.set_warn_always(always)


@pytest.mark.parametrize("kind", [list, tuple, type("Row", (list,), {})])
def test_integers_that_are_rounded(kind) -> None:
    """NumPy rounds them without a word."""
    with pytest.warns(
        neula.AccuracyWarning, match=r"argument 1\[0, 0\] is 9007199254740993, .* rounded here"
    ):
        np_compat.det(kind([kind([2**53 + 1, 0]), kind([0, 1])]))
