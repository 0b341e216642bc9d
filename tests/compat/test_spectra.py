"""Drop-ins of eigenvalues, singular values and powers: measured, and neula's where they are not accurate."""

from __future__ import annotations

import contextlib
import importlib
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch

from neula.compat import numpy as np_compat
from neula.compat import scipy as sp_compat
from neula.compat import torch as torch_compat
from neula.compat.measured import are_eigenvectors, are_eigenvectors_of_pencil, are_singular_vectors, mirrored

DTYPES = [np.float32, np.float64, np.complex64, np.complex128]
MODULES = [(np_compat, np.asarray), (sp_compat, np.asarray), (torch_compat, torch.from_numpy)]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small matrices are measured, too."""
    for module in ("numpy", "scipy.spectra", "torch"):
        monkeypatch.setattr(f"neula.compat.{module}.is_for_lapack", lambda a: False)


def random(*shape: int, dtype: Any = np.float64, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal((*shape, 2)) @ np.array([1, 1j if np.dtype(dtype).kind == "c" else 1])
    return (numbers if np.dtype(dtype).kind == "c" else numbers.real).astype(dtype)


def hermitian(*shape: int, dtype: Any = np.float64) -> np.ndarray:
    return mirrored(random(*shape, shape[-1], dtype=dtype))


@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("shape", [(1,), (5,), (90,), (3, 30)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_eigenvectors_are_measured(shape: tuple[int, ...], dtype: type, wrap: Any) -> None:
    """Values, vectors, and angles between these that are off by a hundred bounds are not accepted."""
    a, n = hermitian(*shape, dtype=dtype), shape[-1]
    w, v = np.linalg.eigh(a)
    wrong = 1e5 * float(np.finfo(dtype).eps) * n
    assert are_eigenvectors(*map(wrap, (a, w, v)))
    moved, turned, longer = w.copy(), v.copy(), v.copy()
    moved[..., 0] += wrong * abs(w).max()
    longer[..., -1] *= 1 + wrong
    cases = [(moved, v), (w, longer), (w, 0 * v), (w, np.nan * v), (np.nan * w, v)]
    if n > 1:
        turned[..., 0] += wrong * v[..., 1]
        cases += [(w, turned), (w, np.concatenate([v[..., :1], v[..., :-1]], -1))]
    for case in cases:
        assert not are_eigenvectors(*map(wrap, (a, *case)))


@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("shape", [(5, 5), (40, 3), (3, 40), (2, 8, 5)])
def test_singular_vectors_are_measured(shape: tuple[int, ...], full: bool, wrap: Any) -> None:
    a = random(*shape)
    u, s, vh = np.linalg.svd(a, full)
    assert are_singular_vectors(*map(wrap, (a, u, s, vh)))
    moved, left, right = s.copy(), u.copy(), vh.copy()
    moved[..., -1] *= 1 + 1e-6
    left[..., :, -1] *= 1 + 1e-6
    right[..., -1, :] += 1e-6 * right[..., 0, :]
    for case in ((u, moved, vh), (left, s, vh), (u, s, right), (u, s, -vh), (np.nan * u, s, vh)):
        assert not are_singular_vectors(*map(wrap, (a, *case)))


def test_eigenvectors_of_pencils_are_measured() -> None:
    a, b = hermitian(20, dtype=np.complex128), random(20, 20, dtype=np.complex128)
    b = mirrored(b @ b.conj().T + np.eye(20))
    w, v = scipy.linalg.eigh(a, b)
    assert are_eigenvectors_of_pencil(a, b, w, v)
    assert not are_eigenvectors_of_pencil(a, b, w * (1 + 1e-6), v)
    assert not are_eigenvectors_of_pencil(a, b, w, 2 * v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, 1e-200, 1e200])
@pytest.mark.parametrize("n", [3, 70])
@pytest.mark.filterwarnings("error")
def test_answers(n: int, scale: float, dtype: type, told: list[str]) -> None:
    """Far from 1, where squares overflow or underflow, nothing can be measured but by neula."""
    single = np.dtype(dtype).type(0).real.dtype == np.float32
    if single and not 1e-31 < scale < 1e31:
        pytest.skip("beyond the range of float32")
    given, a = (
        x * np.dtype(dtype).type(scale) for x in (random(n, n, dtype=dtype), hermitian(n, dtype=dtype))
    )
    tolerance = 100 * n * float(np.finfo(dtype).eps) * scale
    exact = np.linalg.eigvalsh(a.astype(complex))
    far = not (1e-15 if single else 1e-100) < scale < (1e15 if single else 1e100)
    for compat, wrap in MODULES:
        for upper in (False, True):
            read = np.triu(a) if upper else np.tril(a)
            keywords: Any = {"lower": not upper} if compat is sp_compat else {"UPLO": "LU"[upper]}
            w, v = map(np.asarray, compat.eigh(wrap(read), **keywords))
            assert (v.dtype, w.dtype) == (dtype, np.dtype(dtype).type(0).real.dtype)
            assert abs(w - exact).max() <= tolerance
            assert abs(v * w @ v.conj().T - a).max() <= tolerance
            assert np.array_equal(np.asarray(compat.eigvalsh(wrap(read), **keywords)).shape, (n,))
        u, s, vh = map(np.asarray, compat.svd(wrap(given[:, : n - 1])))
        assert (u.shape, vh.shape, s.dtype) == ((n, n), (n - 1, n - 1), w.dtype)
        assert abs(u[:, : n - 1] * s @ vh - given[:, : n - 1]).max() <= tolerance
        assert np.allclose(np.asarray(compat.svdvals(wrap(given[:, : n - 1]))), s, atol=tolerance)
        # SciPy's driver for eigenvectors is measured whatever the order, and may lose orthogonality.
        expected = {"eigh", "svd"} if far and n == 70 else set()
        assert set(told) == expected or compat is sp_compat
        told.clear()


@pytest.mark.usefixtures("measured")
def test_named_results_and_classes() -> None:
    a = hermitian(6)
    for wrap in (np.asarray, np.asmatrix):
        found, peer = np_compat.eigh(wrap(a)), np.linalg.eigh(wrap(a))
        assert type(found) is type(peer)
        assert [type(x) for x in found] == [type(x) for x in peer]
        assert type(np_compat.svd(a)) is type(np.linalg.svd(a))
    for scale in (1.0, 1e-200):
        A = torch.from_numpy(scale * a)
        assert type(torch_compat.eigh(A)) is torch.return_types.linalg_eigh
        assert type(torch_compat.svd(A)) is torch.return_types.linalg_svd
        w, u = np_compat.eigh(scale * a).eigenvalues, np_compat.svd(scale * a, hermitian=True)
        assert np.allclose(np.sort(abs(w))[::-1], u.S, rtol=1e-12, atol=0)


def test_a_part_and_pencils_of_scipy(told: list[str]) -> None:
    a, b = hermitian(20), random(20, 20)
    b = mirrored(b @ b.T + np.eye(20))
    for options in (
        {"subset_by_index": (2, 4)},
        {"subset_by_value": (0.0, 2.0)},
        {"b": b},
        {"b": b, "subset_by_index": (18, 19)},
        {"b": b, "type": 3},
        {"driver": "ev"},
    ):
        w, v = sp_compat.eigh(a, **options)
        assert np.array_equal(w, scipy.linalg.eigh(a, **options)[0])
        assert v.shape == (20, len(w))
    assert told == []
    w, v = sp_compat.eigh(1e-200 * a, subset_by_index=(2, 4))
    assert np.allclose(1e200 * w, np.linalg.eigvalsh(a)[2:5], rtol=1e-12)
    assert told == ["eigh"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [3, 20, 140])
def test_powers(n: int, dtype: type, told: list[str]) -> None:
    a = random(n, n, dtype=dtype)
    a = mirrored(a @ a.conj().T / n + np.eye(n, dtype=dtype))
    tolerance = 1e3 * float(np.finfo(dtype).eps)
    root = sp_compat.sqrtm(a)
    assert root.dtype == dtype
    assert np.linalg.norm(root @ root - a) < tolerance * np.linalg.norm(a)
    fourth = sp_compat.fractional_matrix_power(a, 0.25)
    assert fourth.dtype == scipy.linalg.fractional_matrix_power(a, 0.25).dtype
    assert np.linalg.norm(fourth @ fourth - root) < tolerance * np.linalg.norm(root)
    assert np.array_equal(sp_compat.fractional_matrix_power(a, 3), scipy.linalg.fractional_matrix_power(a, 3))
    assert told == ["fractional_matrix_power"] * (2 if n == 140 else 1)


@pytest.mark.filterwarnings("ignore::scipy.linalg.LinAlgWarning")  # where rounding errors decide
@pytest.mark.parametrize(
    "a", [np.ones((3, 3)), -np.eye(3), np.diag([1.0, 2.0, -3.0]), np.triu(np.ones((3, 3)))]
)
def test_powers_of_others_are_scipys(a: np.ndarray) -> None:
    for name, rest in (("sqrtm", ()), ("fractional_matrix_power", (0.3,))):
        ours, theirs = (getattr(la, name)(a, *rest) for la in (sp_compat, scipy.linalg))
        assert ours.dtype == theirs.dtype
        assert np.allclose(ours, theirs, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("compat", [np_compat, torch_compat])
def test_hermitian_pseudoinverses(compat: ModuleType, told: list[str]) -> None:
    """A column in small units: the peer loses the digits of other rows. One triangle is read."""
    units = np.array([1.0, 2.0**-33, 1.0, 1.0])
    near = hermitian(4) + 9 * np.eye(4)
    for scale in (np.ones(4), units):
        a = np.tril(near * scale * scale[:, None])
        found = compat.pinv(torch.from_numpy(a) if compat is torch_compat else a, rtol=1e-30, hermitian=True)
        exact = np.linalg.inv(near) / scale / scale[:, None]
        assert np.allclose(np.asarray(found) * scale, exact * scale, rtol=1e-10, atol=0)
    assert told == ["pinv"]


NAMES = ("eigh", "eigvalsh", "svd", "svdvals", "matrix_rank", "cond", "matrix_norm", "norm", "pinv")
SAMPLES: dict[str, Any] = {}
with contextlib.suppress(ImportError):  # torch's own tests need expecttest
    definitions = importlib.import_module("torch.testing._internal.opinfo.definitions.linalg")
    for op in definitions.op_db:
        if op.name in {f"linalg.{name}" for name in NAMES} and op.variant_test_name != "singular":
            SAMPLES[f"{op.name} {op.variant_test_name}".strip()] = op


def comparable(name: str, found: Any) -> tuple[torch.Tensor, ...]:
    """Results without signs and phases of vectors."""
    parts = found if isinstance(found, tuple) else (found,)
    if name == "linalg.svd":
        u, s, vh = parts
        k = s.shape[-1]
        parts = u[..., :k].abs(), s, vh[..., :k, :].abs()
    return tuple(x.abs() if name == "linalg.eigh" and x.ndim > 1 else x for x in parts)


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
def test_samples_of_torch(name: str, dtype: torch.dtype) -> None:
    """The inputs of torch's own tests."""
    op, tolerance = SAMPLES[name], 1e-3 if dtype is torch.float32 else 1e-9
    function = getattr(torch_compat, op.name.removeprefix("linalg."))
    for sample in op.sample_inputs("cpu", dtype, requires_grad=dtype is not torch.float32):
        ours, theirs = (
            comparable(op.name, f(sample.input, *sample.args, **sample.kwargs)) for f in (function, op.op)
        )
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        if ours[0].requires_grad and sample.input.numel() > 0:
            gradients = [
                torch.autograd.grad(
                    sum(x.abs().sin().sum() for x in found), sample.input, materialize_grads=True
                )
                for found in (ours, theirs)
            ]
            torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("scale", [1.0, 1e-200])
def test_gradients(scale: float) -> None:
    """Also where neula answers."""
    a = torch.from_numpy(hermitian(70)).requires_grad_()
    for function in (
        lambda la: (scale**-1 * la.eigh(scale * a)[0]).sin().sum(),
        lambda la: la.eigh(scale * a)[1][:, :3].square().sin().sum(),
        lambda la: (scale**-1 * la.svd(scale * a[:, :50], full_matrices=False)[1]).sin().sum(),
        lambda la: la.svd(scale * a)[2][:3].square().sin().sum(),
    ):
        ours, theirs = (torch.autograd.grad(function(la), a)[0] for la in (torch_compat, torch.linalg))
        assert torch.allclose(ours, theirs, rtol=1e-8, atol=1e-10) or bool(theirs.isnan().any())
        assert bool(ours.isfinite().all())


def test_transforms_are_torchs() -> None:
    a = torch.from_numpy(hermitian(3, 4))
    assert torch.allclose(torch.vmap(torch_compat.eigh)(a)[0], torch.linalg.eigh(a)[0])
    assert torch.allclose(torch.vmap(torch_compat.svdvals)(a), torch.linalg.svdvals(a))
    assert torch.equal(
        torch.func.grad(lambda x: torch_compat.svd(x)[1].sum())(a),
        torch.linalg.svd(a)[0] @ torch.linalg.svd(a)[2],
    )
    assert torch_compat.eigh(a.to("meta")).eigenvectors.shape == a.shape
    assert torch_compat.cond(a.to("meta")).shape == (3,)
