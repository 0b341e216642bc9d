"""Drop-in functions: neula answers what it can, and the peer the rest, with the peer's own signature."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import pickle
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

import neula
import neula.compat
from neula.compat import numpy as np_compat
from neula.compat import scipy as sp_compat
from neula.compat import torch as torch_compat
from neula.compat.measured import (
    is_accurate_inverse,
    is_accurate_minimum,
    is_accurate_solution,
    is_pseudoinverse,
)

PEERS: dict[ModuleType, ModuleType] = {
    np_compat: np.linalg,
    sp_compat: scipy.linalg,
    torch_compat: torch.linalg,
}
OWN = [
    (compat, name)
    for compat in PEERS
    for name, value in vars(compat).items()
    if hasattr(value, "__wrapped__") and value.__module__.startswith(compat.__name__)
]
DTYPES = [np.float32, np.float64, np.complex64, np.complex128]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is handed on to a peer: exceptions come through."""
    monkeypatch.setattr("neula.compat.drop_in.REFUSALS", ())


def close(x: Any, y: Any, a: np.ndarray, factor: float = 100.0) -> bool:
    """Whether solutions agree to what the precision and the condition number of A allow."""
    u = float(np.finfo(a.dtype).eps) / 2
    x, y = np.asarray(x, np.complex128), np.asarray(y, np.complex128)
    return float(np.linalg.norm(x - y)) <= factor * u * np.linalg.cond(a).max() * np.linalg.norm(y)


@of_new_peers
@pytest.mark.parametrize(("compat", "name"), OWN, ids=lambda value: getattr(value, "__name__", value))
def test_signatures(compat: ModuleType, name: str) -> None:
    try:
        peer = inspect.signature(getattr(PEERS[compat], name)).parameters
    except ValueError:
        pytest.skip("torch's functions tell no signature")
    ours = inspect.signature(getattr(compat, name)).parameters
    assert list(ours)[: len(peer)] == list(peer)
    assert {p.kind for p in ours.values()} == {p.kind for p in peer.values()}
    for parameter in peer:
        # "gen" before SciPy 1.15 looked for structure; a bare object says that nothing is to be given.
        if parameter != "assume_a" and type(peer[parameter].default) is not object:
            assert ours[parameter].default == peer[parameter].default


@pytest.mark.parametrize(("compat", "name"), OWN, ids=lambda value: getattr(value, "__name__", value))
def test_what_they_wrap_is_python(compat: ModuleType, name: str) -> None:
    """Doctest and inspect follow ``__wrapped__`` to the source, which a builtin does not have."""
    assert inspect.isfunction(inspect.unwrap(getattr(compat, name)))


@pytest.mark.parametrize("compat", PEERS, ids=lambda compat: compat.__name__)
def test_the_rest_is_the_peers(compat: ModuleType) -> None:
    peer = PEERS[compat]
    assert compat.eig is peer.eig
    assert set(getattr(peer, "__all__", ())) <= set(dir(compat))
    with pytest.raises(AttributeError, match="no_such_function"):
        _ = compat.no_such_function


def test_modules_are_found_without_an_import() -> None:
    assert neula.compat.scipy is sp_compat
    with pytest.raises(AttributeError, match="numpy, patched, scipy, torch"):
        _ = neula.compat.cupy


def numbers(*shape: int, dtype: Any, seed: int = 3) -> np.ndarray:
    real, imaginary = np.random.default_rng(seed).standard_normal((2, *shape))
    return (real + 1j * imaginary if np.dtype(dtype).kind == "c" else real).astype(dtype)


def parts_of(found: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in (found if isinstance(found, tuple) else (found,))]


SOLVED: list[tuple[ModuleType, tuple[int, ...], tuple[int, ...]]] = [
    *itertools.product([np_compat, sp_compat], [(9, 9)], [(9,), (9, 2)]),
    *((torch_compat, (*batch, 9, 9), (*batch, 9, 2)) for batch in ((), (3,), (2, 3))),
    *((torch_compat, (9, 9), (9,)), (torch_compat, (2, 3, 9, 9), (2, 3, 9))),
]
FITTED: list[tuple[ModuleType, tuple[int, ...], tuple[int, ...]]] = [
    *(
        (compat, (m, n), (m, *k))
        for compat in (np_compat, sp_compat)
        for m, n in ((40, 5), (5, 5), (5, 12))
        for k in ((), (3,))
    ),
    *((torch_compat, shape, (*shape[:-1], 2)) for shape in ((9, 4), (4, 4), (4, 9), (2, 9, 4), (1100, 4))),
]


def operands(compat: ModuleType, a_shape: Any, b_shape: Any, dtype: type) -> tuple[Any, Any, Any]:
    """How a library takes arrays of NumPy, and random ones."""
    wrap = torch.from_numpy if compat is torch_compat else np.asarray
    return wrap, numbers(*a_shape, dtype=dtype), numbers(*b_shape, dtype=dtype, seed=4)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dtype", DTYPES)
class TestNeulaAnswers:
    """No dtype of LAPACK is handed on, and results have the types, shapes and numbers of the peer's."""

    @pytest.mark.parametrize(("compat", "a_shape", "b_shape"), SOLVED)
    def test_solve(
        self, compat: ModuleType, a_shape: Any, b_shape: Any, dtype: type, told: list[str]
    ) -> None:
        wrap, a, b = operands(compat, a_shape, b_shape, dtype)
        found, theirs = (la.solve(wrap(a), wrap(b)) for la in (compat, PEERS[compat]))
        assert (type(found), found.dtype, found.shape) == (type(theirs), theirs.dtype, theirs.shape)
        assert close(found, theirs, a)
        if compat is torch_compat and b.ndim == a.ndim:
            x = compat.solve(wrap(a), wrap(b).mT, left=False)
            assert close(x.mT, PEERS[compat].solve(wrap(a).mT, wrap(b)), a)
        assert set(told) == {"solve"}

    @pytest.mark.parametrize("lower", [False, True])
    @pytest.mark.parametrize("transposed", [False, True])
    @pytest.mark.parametrize("structure", ["sym", "pos"])
    def test_one_triangle(self, structure: str, transposed: bool, lower: bool, dtype: type) -> None:
        """The other one is not read. SciPy has the transposed complex ones."""
        transposed &= np.dtype(dtype).kind == "f"
        a = numbers(7, 7, dtype=dtype).real
        a = (a @ a.T + np.eye(7) if structure == "pos" else a + a.T).astype(dtype)
        given = np.where(np.tri(7) if lower else np.tri(7).T, a, np.nan).astype(dtype)
        found = sp_compat.solve(given, a.sum(1), lower=lower, assume_a=structure, transposed=transposed)
        assert close(found, np.ones(7), a)

    @pytest.mark.parametrize(("compat", "a_shape", "b_shape"), FITTED)
    def test_lstsq(
        self, compat: ModuleType, a_shape: Any, b_shape: Any, dtype: type, told: list[str]
    ) -> None:
        wrap, a, b = operands(compat, a_shape, b_shape, dtype)
        ours, theirs = (la.lstsq(wrap(a), wrap(b)) for la in (compat, PEERS[compat]))
        assert close(ours[0], np.linalg.pinv(a) @ b, a, 1e3)
        eps = float(np.finfo(dtype).eps)
        for one, other in zip(ours[1:], theirs[1:], strict=True):
            assert getattr(one, "dtype", None) == getattr(other, "dtype", None)
            if compat is not torch_compat:
                assert np.shape(one) == np.shape(other)
                assert np.allclose(one, other, rtol=1e3 * eps, atol=1e3 * eps)
        if compat is torch_compat:
            assert ours.rank.tolist() == np.full(a_shape[:-2], min(a_shape[-2:])).tolist()
            assert (ours.residuals.shape, ours.singular_values.shape) == ((0,), (0,))
        elif dtype in (np.float64, np.complex128):  # others have half of their digits up to conditions of 100
            assert told == ["lstsq"] * (a_shape[0] < a_shape[1])

    @pytest.mark.parametrize("shape", [(8, 3), (3, 3), (3, 8), (2, 8, 3), (1100, 4)])
    def test_qr(self, shape: tuple[int, ...], dtype: type, told: list[str]) -> None:
        a = numbers(*shape, dtype=dtype)
        m, n, u = *shape[-2:], float(np.finfo(dtype).eps)
        found = {
            "reduced": np_compat.qr(a),
            "economic": sp_compat.qr(a, mode="economic"),
            "torch": torch_compat.qr(torch.from_numpy(a)),
            **({"complete": np_compat.qr(a, "complete"), "full": sp_compat.qr(a)} if m < 1000 else {}),
        }
        for mode, factors in found.items():
            Q, R = map(np.asarray, factors)
            k = m if mode in ("complete", "full") else min(m, n)
            assert (Q.shape[-2:], R.shape[-2:]) == ((m, k), (k, n))
            assert (Q.dtype, R.dtype) == (dtype, dtype)
            assert np.abs(Q @ R - a).max() < 50 * u
            assert np.abs(Q.swapaxes(-1, -2).conj() @ Q - np.eye(k)).max() < 50 * u
            diagonal = np.diagonal(R, axis1=-2, axis2=-1)
            assert (diagonal == abs(diagonal)).all()
        assert found["reduced"].R is found["reduced"][1]
        assert np_compat.qr(a, "r").shape[-2:] == (min(m, n), n)
        assert torch_compat.qr(torch.from_numpy(a), "r").Q.numel() == 0
        R = sp_compat.qr(a, mode="r")
        assert (R[0] if len(shape) == 2 else R).shape[-2:] == (m, n)
        assert set(told) == {"qr"}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_badly_scaled_matrices_have_accurate_cholesky_factors(dtype: type, told: list[str]) -> None:
    """Elements that are subnormal, of which LAPACK's factor has a few digits."""
    units = 2.0 ** (np.array([-74, 0, 3]) if dtype == np.float32 else np.array([-537, 0, 3]))
    near = np.array([[4.0, 1.0, 1.0], [1.0, 5.0, 2.0], [1.0, 2.0, 3.0]])
    a = (near * units * units[:, None]).astype(dtype)
    exact = np.linalg.cholesky(near) * units[:, None]
    with np.errstate(all="ignore"):
        found = [sp_compat.cholesky(a, lower=True), sp_compat.cholesky(a).T]
        for compat, given in ((torch_compat, torch.from_numpy(a)), (np_compat, a)):
            found += [np.asarray(compat.cholesky(given)), np.asarray(compat.cholesky(given, upper=True)).T]
    for L in found:
        assert np.abs(L / units[:, None] - exact / units[:, None]).max() < 1e-6
    assert told == ["cholesky"] * (4 if dtype == np.float32 else 6)


@pytest.mark.parametrize("k", [(), (2,)])
def test_solutions_are_measured(k: tuple[int, ...]) -> None:
    """An x that is wrong by a millionth, and any x of an ill-conditioned A, are not accepted."""
    rng = np.random.default_rng(18)
    a, b = rng.standard_normal((30, 4)), rng.standard_normal((30, *k))
    x, _, _, s = np.linalg.lstsq(a, b, rcond=None)
    assert is_accurate_solution(a, b, x, s)
    wrong = x.copy()
    wrong[..., -1] *= 1 + 1e-6
    assert not is_accurate_solution(a, b, wrong, s)
    assert not is_accurate_solution(a, b, np.nan * x, s)
    a[:, 3] = a[:, 2] + 1e-6 * a[:, 3]
    x, _, _, s = np.linalg.lstsq(a, b, rcond=None)
    assert not is_accurate_solution(a, b, x, s)


def test_an_inaccurate_solution_is_refined(told: list[str]) -> None:
    """A column in small units: peers lose the digits of the other unknowns."""
    a, units = (
        np.random.default_rng(19).integers(-9, 10, (20, 3)).astype(float),
        np.array([1.0, 2.0**-33, 1.0]),
    )
    x = np.array([1.0, 2.0**35, 3.0])
    b = a * units @ x
    found = [compat.lstsq(a * units, b) for compat in (np_compat, sp_compat)]
    for solution, squares, rank, _ in found:
        assert np.allclose(solution, x, rtol=1e-13, atol=0)
        assert np.size(squares) == 1
        assert rank == 3
    assert told == ["lstsq"] * 2


def test_solutions_that_are_not_negative_are_measured() -> None:
    """An x that is wrong by a millionth, of other variables, or of dependent columns, is not accepted."""
    rng = np.random.default_rng(20)
    a, b = rng.standard_normal((30, 6)), rng.standard_normal(30)
    x, _ = scipy.optimize.nnls(a, b)
    assert 0 < (x > 0).sum() < 6
    assert is_accurate_minimum(a, b, x)
    largest = np.eye(6)[x.argmax()]
    for wrong in (x + 1e-6 * largest * x, x * (1 - largest), np.nan * x):
        assert not is_accurate_minimum(a, b, wrong)
    a[:, 1] = a[:, 0] + 1e-6 * a[:, 1]
    assert not is_accurate_minimum(a, b, scipy.optimize.nnls(a, b)[0])


@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (9, 4), (4, 4), (4, 9), (2, 9, 4), (300, 40)])
def test_pseudoinverses_are_measured(shape: tuple[int, ...], wrap: Any) -> None:
    """Of an X that is wrong in a row, or has a component outside of the range, a hundredth is too much."""
    rng = np.random.default_rng(16)
    a = rng.standard_normal(shape)
    u, s, vt = np.linalg.svd(a)
    k = min(shape[-2:])
    x = (u[..., :k] / s[..., None, :] @ vt[..., :k, :]).swapaxes(-1, -2)
    assert is_pseudoinverse(wrap(a), wrap(x))
    assert is_accurate_inverse(wrap(a), wrap(x))
    one_row, rounded = x.copy(), x * (1 + 1e-6 * rng.standard_normal(x.shape))
    one_row[..., :1, :1] += 0.01 * np.linalg.norm(x[..., :1, :], axis=-1, keepdims=True)
    wrong = [one_row, rounded, 0 * x, np.nan * x]
    if shape[-2] != shape[-1]:
        beyond = u[..., -1][..., None, :] if shape[-2] > shape[-1] else vt[..., -1, :][..., None]
        wrong.append(x + 0.01 * np.abs(x).max() * beyond)
    for other in wrong:
        assert not is_pseudoinverse(wrap(a), wrap(other))


def test_an_inaccurate_pseudoinverse_is_refined(told: list[str]) -> None:
    """A column in small units: peers lose the digits of the other rows."""
    a, units = np.random.default_rng(17).standard_normal((20, 3)), np.array([1.0, 1e-10, 1.0])
    exact = np.linalg.pinv(a) / units[:, None]
    found = [compat.pinv(a * units) for compat in (np_compat, sp_compat)]
    found += [torch_compat.pinv(torch.from_numpy(a * units)).numpy()]
    assert np.allclose(found, exact, rtol=1e-11, atol=0)
    assert told == ["pinv"] * 3


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("compat", [np_compat, sp_compat], ids=lambda compat: compat.__name__)
def test_strides_of_stacks(compat: ModuleType) -> None:
    rng = np.random.default_rng(9)
    big, right = rng.standard_normal((4, 6, 10, 10)), rng.standard_normal((4, 6, 10, 2))
    for steps in itertools.product((1, -1, 2), repeat=2):
        part = (slice(None, None, steps[0]), slice(None, None, steps[1]))
        a, b = big[(*part, slice(5), slice(None, None, 2))], right[(*part, slice(5))]
        x = compat.solve(a, b)
        assert x.shape == b.shape
        assert np.abs(a @ x - b).max() < 1e-11
        assert np.abs(a @ compat.solve(a, b[0, 0]) - b[0, 0]).max() < 1e-11


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("compat", [np_compat, sp_compat], ids=lambda compat: compat.__name__)
def test_a_matrix_of_right_hand_sides_is_not_a_stack_of_vectors(compat: ModuleType) -> None:
    a, (b, *_) = np.random.default_rng(12).standard_normal((2, 4, 4, 4))
    assert np.abs(a @ compat.solve(a, b) - b).max() < 1e-10


def test_matrices_stay_matrices() -> None:
    a = np.asmatrix([[2.0, 1.0], [1.0, 3.0]])
    assert type(np_compat.solve(a, a)) is np.matrix
    assert type(np_compat.solve(a, np.ones(2))) is np.ndarray
    assert [type(x) for x in np_compat.qr(a)] == [np.matrix, np.matrix]
    assert [type(x) for x in np_compat.qr(a, "raw")] == [np.matrix, np.ndarray]
    assert [type(x) for x in np_compat.lstsq(a, a)[:2]] == [np.matrix, np.matrix]


SINGULAR = np.ones((3, 3))


REFUSED: dict[ModuleType, list[Callable[[ModuleType], Any]]] = {
    np_compat: [
        lambda la: la.solve(SINGULAR, np.ones(3)),
        lambda la: la.solve(np.eye(3), np.ones(4)),
        lambda la: la.solve(np.eye(3)[:2], np.ones(2)),
        lambda la: la.solve(np.eye(3, dtype=np.float16), np.ones(3)),
        lambda la: la.solve(np.eye(3), np.array(["a", "b", "c"])),
        lambda la: la.solve(np.ones((2, 3, 3)), np.ones((2, 3))),
        lambda la: la.lstsq(np.eye(3), np.ones(4)),
        lambda la: la.lstsq(np.ones((2, 3, 3)), np.ones(3)),
        lambda la: la.qr(np.ones(3)),
        lambda la: la.qr(np.eye(3), mode="thin"),
        lambda la: la.qr(np.eye(3), no_such_argument=1),
        lambda la: la.cholesky(-np.eye(3)),
        lambda la: la.cholesky(np.ones((2, 3))),
        lambda la: la.pinv(np.ones(3)),
        lambda la: la.pinv(np.eye(3), rcond=1e-3, rtol=1e-3),
        lambda la: la.pinv(np.ones((2, 3)), hermitian=True),
        lambda la: la.eigh(np.ones((2, 3))),
        lambda la: la.eigh(np.eye(3), UPLO="X"),
        lambda la: la.eigvalsh(np.full((3, 3), np.nan)),
        lambda la: la.svd(np.ones(3)),
        lambda la: la.svd(np.ones((70, 71)), hermitian=True),
        lambda la: la.cond(np.ones((0, 3))),
        lambda la: la.norm(np.ones((2, 3, 4)), 2),
        lambda la: la.norm(np.eye(2), 7),
        lambda la: la.matrix_rank(np.eye(2), tol=1.0, rtol=1.0),
    ],
    sp_compat: [
        lambda la: la.solve(SINGULAR, np.ones(3), assume_a="gen"),
        lambda la: la.solve(-np.eye(3) - 1, np.ones(3), assume_a="pos"),
        lambda la: la.solve(np.full((3, 3), np.nan), np.ones(3)),
        lambda la: la.solve(np.eye(3), np.ones(3), assume_a="sparse"),
        lambda la: la.solve(np.ma.masked_equal(np.eye(3) + 1, 2), np.ones(3)),
        lambda la: la.lstsq(np.eye(3), np.full(3, np.inf)),
        lambda la: la.lstsq(np.eye(3), np.ones(3), lapack_driver="gels"),
        lambda la: la.qr(np.eye(3), mode="thin"),
        lambda la: la.orth(np.full((3, 3), np.nan)),
        lambda la: la.lu_factor(np.full((3, 3), np.nan)),
        lambda la: la.lu_solve(la.lu_factor(np.eye(3)), np.ones(4)),
        lambda la: la.cholesky(-np.eye(3)),
        lambda la: la.cholesky(np.array([[1.0, np.nan], [0.0, 1.0]]), lower=True),
        lambda la: la.cho_factor(np.ones((2, 3))),
        lambda la: la.pinv(np.eye(3), rtol=-1.0),
        lambda la: la.pinv(np.full((3, 3), np.inf)),
        lambda la: la.eigh(np.ones((2, 3))),
        lambda la: la.eigh(np.eye(3), -np.eye(3)),
        lambda la: la.eigh(np.eye(3), subset_by_index=(2, 4)),
        lambda la: la.eigh(np.eye(3), driver="qr"),
        lambda la: la.svd(np.full((3, 3), np.inf)),
        lambda la: la.svd(np.eye(3), lapack_driver="gesvx"),
        lambda la: la.sqrtm(np.ones((2, 3))),
        lambda la: la.fractional_matrix_power(np.ones((2, 3)), 0.5),
    ],
    torch_compat: [
        lambda la: la.solve(torch.from_numpy(SINGULAR), torch.ones(3, dtype=torch.float64)),
        lambda la: la.solve(torch.eye(3), torch.ones(3, dtype=torch.float64)),
        lambda la: la.solve(torch.eye(3).half(), torch.ones(3).half()),
        lambda la: la.solve(torch.eye(3), torch.ones(4)),
        lambda la: la.solve(torch.eye(3), torch.ones(3), left=False),
        lambda la: la.lstsq(torch.ones(2, 3, 3), torch.ones(3)),
        lambda la: la.lstsq(torch.eye(3), torch.ones(3, 1), driver="gelsz"),
        lambda la: la.qr(torch.eye(3), mode="thin"),
        lambda la: la.qr(np.eye(3)),
        lambda la: la.cholesky(-torch.eye(3)),
        lambda la: la.pinv(torch.ones(3)),
        lambda la: la.pinv(torch.ones(2, 3), hermitian=True),
        lambda la: la.eigh(torch.ones(2, 3)),
        lambda la: la.eigh(torch.eye(3), "X"),
        lambda la: la.svd(torch.eye(3).half()),
        lambda la: la.svdvals(torch.full((3, 3), torch.nan)),
        lambda la: la.cond(torch.ones(2, 3), 1),
        lambda la: la.matrix_rank(torch.ones(3)),
        lambda la: la.norm(3),
        lambda la: la.matrix_norm(torch.eye(3), 7),
    ],
}


@pytest.mark.parametrize(("compat", "call"), [(la, call) for la, calls in REFUSED.items() for call in calls])
def test_exceptions_are_the_peers(compat: ModuleType, call: Callable[[ModuleType], Any]) -> None:
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        call(PEERS[compat])
    with pytest.raises(theirs.type) as ours:
        call(compat)
    assert str(ours.value) == str(theirs.value)
    assert type(ours.value) is theirs.type
    assert ours.value.__context__ is None or compat is torch_compat


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_functions(dtype: type) -> None:
    """As the peers have them, to rounding errors."""
    square, right = numbers(3, 3, dtype=dtype), numbers(3, dtype=dtype)
    gram = square @ square.conj().T + np.eye(3, dtype=dtype)
    close = dict.fromkeys(("rtol", "atol"), 1000 * float(np.finfo(dtype).eps))
    for compat, peer in PEERS.items():
        wrap = torch.from_numpy if compat is torch_compat else np.asarray
        for name in ("cholesky", "det", "inv", "pinv", *(["slogdet"] * (compat is not sp_compat))):
            for ours, theirs in zip(
                *(parts_of(getattr(la, name)(wrap(gram))) for la in (compat, peer)), strict=True
            ):
                assert np.allclose(ours, theirs, **close)
    with warnings.catch_warnings(action="error"):
        for trans, given in enumerate((square, square.T, square.conj().T)):
            x = sp_compat.lu_solve(sp_compat.lu_factor(square), right, trans=trans)
            assert np.allclose(given @ x, right, **close)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ranks_are_those_of_the_peer(dtype: type) -> None:
    """A column in small units counts for neula, and does not for its peers."""
    a = np.random.default_rng(10).standard_normal((20, 3)).astype(dtype)
    a[:, 2] *= np.finfo(dtype).eps / 100
    b = np.ones(20, dtype)
    for compat in (np_compat, sp_compat):
        cut = {"rcond": np.finfo(dtype).eps} if compat is np_compat else {}
        for ours, theirs in zip(compat.lstsq(a, b, **cut), PEERS[compat].lstsq(a, b, **cut), strict=True):
            assert np.array_equal(ours, theirs, equal_nan=True)
    A, B = torch.from_numpy(a), torch.from_numpy(b)[:, None]
    ours, theirs = torch_compat.lstsq(A, B), torch.linalg.lstsq(A, B, driver="gelsd")
    assert ours.rank == theirs.rank == 2
    assert torch.equal(ours.solution, theirs.solution)
    assert neula.lstsq(a, b).rank == 3
    assert np.array_equal(np_compat.pinv(a, 1e-6), np.linalg.pinv(a, 1e-6))
    assert np.array_equal(sp_compat.pinv(a, rtol=1e-6), scipy.linalg.pinv(a, rtol=1e-6))
    assert torch.equal(torch_compat.pinv(A, atol=1e-6), torch.linalg.pinv(A, atol=1e-6))


def test_the_rank_of_torch_where_the_condition_does_not_tell() -> None:
    """A column is much shorter than the others: singular values have to show that the rank is full."""
    A = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    A[:, 2] *= 1e-14
    B = torch.ones(20, 1, dtype=torch.float64)
    assert torch_compat.lstsq(A, B, 1e-15).rank == 3
    assert torch_compat.lstsq(A, B, 1e-13).rank == 2


def test_ill_conditioned() -> None:
    a = scipy.linalg.hilbert(15)
    with pytest.warns(neula.IllConditionedWarning):
        np_compat.solve(a, np.ones(15))
    with pytest.warns(scipy.linalg.LinAlgWarning, match="no digit of x is guaranteed") as caught:
        sp_compat.solve(a, np.ones(15))
    assert issubclass(caught[0].category, neula.AccuracyWarning)
    assert caught[0].filename == __file__


def test_what_is_badly_scaled_is_not_ill_conditioned() -> None:
    a = np.diag(np.logspace(0, 50, 10))
    assert np.allclose(sp_compat.solve(a, np.ones(10), assume_a="gen"), np.logspace(0, -50, 10), rtol=1e-14)


def test_pairs_of_lu_factors(told: list[str]) -> None:
    """They are plain arrays, and remember their matrix, also where it is no more, except in copies."""
    a, b = numbers(12, 12, dtype=float), np.ones(12)
    gone = a.copy()
    pair, of_gone = sp_compat.lu_factor(a), sp_compat.lu_factor(gone)
    gone[:] = 0.0
    assert np.allclose(a @ sp_compat.lu_solve(tuple(pair), b), b, atol=1e-12)
    assert told == []
    copies = [copy.copy(pair), copy.deepcopy(pair), pickle.loads(pickle.dumps(pair)), pair, of_gone]
    for each in copies:
        assert np.allclose(a @ sp_compat.lu_solve(each, b), b, atol=1e-12)
    assert np.allclose(a @ scipy.linalg.lu_solve(pair, b), b, atol=1e-12)
    assert np.allclose(a.T @ sp_compat.lu_solve(pair, b, trans=1), b, atol=1e-12)
    assert type(sp_compat.lu_factor(a, overwrite_a=True)) is tuple
    with pytest.warns(scipy.linalg.LinAlgWarning, match="exactly zero"):
        lu, _ = sp_compat.lu_factor(SINGULAR)
    assert lu[2, 2] == 0.0


def test_gradients() -> None:
    generator = torch.Generator().manual_seed(1)
    A = torch.randn(5, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    b = torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True)
    tall = torch.randn(9, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    B = torch.randn(9, 2, generator=generator, dtype=torch.float64)
    for function, inputs in (
        (lambda la, A, b: la.solve(A, b), (A, b)),
        (lambda la, A: la.solve(A, B[:5].mT, left=False), (A,)),
        (lambda la, A: la.lstsq(A, B).solution, (tall,)),
        (lambda la, A: la.qr(A).R.square(), (tall,)),
        (lambda la, A: la.cholesky(A.mT @ A), (tall,)),
        (lambda la, A: la.pinv(A), (tall,)),
    ):
        ours, theirs = (
            torch.autograd.grad(function(la, *inputs).sum(), inputs) for la in (torch_compat, torch.linalg)
        )
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.allclose(mine, other, rtol=1e-8, atol=1e-10)


def test_forward_mode_is_torchs() -> None:
    A = torch.eye(3, dtype=torch.float64) * 2
    tangent = torch.func.jvp(lambda b: torch_compat.solve(A, b), (torch.ones(3).double(),) * 1, (A[0],))[1]
    assert torch.allclose(tangent, A[0] / 2)


def test_tensors_whose_numbers_cannot_be_looked_at_are_torchs() -> None:
    A = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(2)) + 4 * torch.eye(4)
    assert torch.allclose(torch.vmap(torch_compat.solve)(A, A[:, 0]), torch.linalg.solve(A, A[:, 0]))
    assert torch.allclose(torch.vmap(torch_compat.pinv)(A), torch.linalg.pinv(A), atol=1e-5)
    assert torch_compat.qr(A.to("meta")).R.shape == (3, 4, 4)
    assert torch_compat.solve(A.to("meta"), A.to("meta")).shape == (3, 4, 4)


def test_nan_is_handed_on_where_the_peer_takes_it() -> None:
    b = [math.nan, 1.0]
    assert np.array_equal(np_compat.solve(np.eye(2), b), np.linalg.solve(np.eye(2), b), equal_nan=True)
    assert torch_compat.solve(torch.eye(2), torch.tensor(b)).isnan().any()
    assert np.isnan(np_compat.qr(np.full((3, 2), math.nan)).R).any()
