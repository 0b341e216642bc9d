"""What comes in, from where, and what is refused before any work."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import scipy.sparse
import torch

import neula
from neula.pipeline.inputs import take


class Foreign:
    """An array of another library: DLPack out, and in through its namespace."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __array_namespace__(self):
        return self

    def from_dlpack(self, x):
        return Foreign(np.from_dlpack(x))


class OneWay:
    """Exports DLPack and cannot take it back."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    __dlpack__ = Foreign.__dlpack__
    __dlpack_device__ = Foreign.__dlpack_device__


def test_dlpack_comes_back_in_its_own_library(rng):
    A, b = rng.standard_normal((30, 4)), rng.standard_normal(30)
    result = neula.lstsq(Foreign(A), Foreign(b))
    assert isinstance(result.x, Foreign)
    np.testing.assert_allclose(result.x.array, np.linalg.lstsq(A, b, rcond=None)[0], rtol=1e-10)
    assert isinstance(neula.qr(Foreign(A)).Q, Foreign)


def test_dlpack_that_cannot_come_back_is_refused(rng):
    with pytest.raises(TypeError, match=r"OneWay.*torch.from_dlpack\(A\)"):
        neula.qr(OneWay(rng.standard_normal((3, 2))))


def test_dlpack_from_a_library_without_array_namespace(rng, monkeypatch):
    """CuPy's arrays name no namespace: the package of their type takes the answer back."""
    package = types.ModuleType("foreignlib")
    package.from_dlpack = lambda x: np.from_dlpack(x).tolist()
    monkeypatch.setitem(sys.modules, "foreignlib", package)
    monkeypatch.setattr(OneWay, "__module__", "foreignlib.core")
    Q, _ = neula.qr(OneWay(rng.standard_normal((3, 2))))
    assert isinstance(Q, list)


def test_lists_are_arrays():
    result = neula.lstsq([[1, 0], [1, 1], [1, 2]], [1, 3, 5])
    assert isinstance(result.x, np.ndarray)
    np.testing.assert_allclose(result.x, [1, 2], rtol=1e-14)


@pytest.mark.parametrize(
    ("A", "error", "message"),
    [
        (np.ones((3, 2)) * 1j, TypeError, "A is complex.*not supported yet"),
        (torch.ones(3, 2, dtype=torch.complex64), TypeError, "A is complex.*not supported yet"),
        (np.ones((3, 2), dtype=np.longdouble), TypeError, "pass float16, bfloat16, float32 or float64"),
        (np.array([[None, 1]]), TypeError, r"A\[0, 0\] is None"),
        ("matrix", TypeError, "A is text, 'matrix'"),
        (scipy.sparse.eye_array(3), TypeError, r"sparse.*A.toarray\(\)"),
        (torch.eye(3).to_sparse(), TypeError, r"sparse.*A.to_dense\(\)"),
        (np.ones(3), ValueError, r"1 dimension\(s\), shape \(3,\)"),
        (np.float64(3.0), ValueError, r"0 dimension\(s\), shape \(\)"),
        (np.array([[1.0, 2.0], [3.0, np.nan]]), ValueError, r"A\[1, 1\] is nan"),
        (np.array([[1.0, -np.inf], [3.0, 4.0]]), ValueError, r"A\[0, 1\] is -inf"),
    ],
)
@pytest.mark.parametrize("function", ["qr", "orth", "svd_lowrank", "lstsq"])
def test_refused_with_a_message_that_helps(function, A, error, message):
    arguments = (A, np.ones(3)) if function == "lstsq" else (A,)
    if function == "lstsq" and getattr(A, "shape", (3,))[:1] == (2,):
        arguments = (A, np.ones(2))
    with pytest.raises(error, match=message):
        getattr(neula, function)(*arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_engine_without_a_gpu():
    with pytest.raises(ValueError, match="engine 'cuda' needs an NVIDIA GPU"):
        neula.qr(np.eye(3), engine="cuda")


def test_masked_arrays_are_refused():
    masked = np.ma.masked_array(np.ones((4, 2)), mask=np.eye(4, 2, dtype=bool))
    with pytest.raises(TypeError, match=r"A is a masked array: pass A.filled"):
        neula.qr(masked)


def test_factors_that_overflow_the_dtype_are_an_error():
    with pytest.raises(OverflowError, match="float16: pass the input in a wider dtype"):
        neula.qr(np.full((100, 2), 6e4, dtype=np.float16))


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["auto", "cuda"])
@pytest.mark.parametrize("library", ["cupy", "jax.numpy"])
def test_arrays_of_other_gpu_libraries(library, engine, rng, monkeypatch):
    """The host may fetch a problem so small, which takes less time; its answer goes back."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes most of the GPU for good
    xp = pytest.importorskip(library)
    A, b = (xp.asarray(x.astype(np.float32)) for x in (rng.standard_normal((500, 40)), np.ones(500)))
    result = neula.lstsq(A, b, engine=engine)
    assert type(result.x) is type(A)
    assert torch.from_dlpack(result.x).is_cuda
    assert result.converged
    assert engine == "auto" or "cuda" in result.engine


def test_a_view_with_a_sign_is_taken_by_its_numbers() -> None:
    """Kernels read memory: the imaginary part of a conjugate has the opposite sign there."""
    x = torch.randn(6, 2, dtype=torch.complex128, generator=torch.Generator().manual_seed(0)).conj().imag
    assert x.is_neg()
    taken = take(x, "A").tensor
    assert not taken.is_neg()
    assert taken.tolist() == x.tolist()
    q, r = neula.qr(x)
    assert torch.allclose(q @ r, x)
