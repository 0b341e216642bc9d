"""neula.qr and neula.orth: what a user of NumPy or torch relies on, and what the certificate promises."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import neula
from half_engine import HalfEngine
from neula.algorithms.orthogonal.reorthogonalize import correct_last, reorthogonalize
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.algorithms.scaling import power_of_two_scales
from neula.engines import CpuEngine, EmulatedEngine
from neula.engines.shipped import EMULATED, cuda_tuning
from neula.engines.tuning import Recursion
from neula.io.matrices import random_matrix
from neula.pipeline.result import AccuracyError
from neula.problems.orthogonal import ways
from neula.problems.orthogonal.ways import WHOLE

U = {"float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}


def bound(u: float, m: int, n: int) -> float:
    """The documented bound, plus the rounding of the returned factors to their dtype, plus what float64
    adds to this check itself.
    """
    return 3 * u * (2 + math.log2(max(n, 1))) + 2 * u + math.sqrt(m) * 2.0**-53


def errors(A: np.ndarray, Q: np.ndarray, R: np.ndarray) -> tuple[float, float]:
    """Residual in the column scaling of the certificate, and half of ``||I - Q^T Q||`` (which counts an error
    of Q twice), both in float64.
    """
    A, Q, R = (np.asarray(x, dtype=np.float64) for x in (A, Q, R))
    norms = np.linalg.norm(A, axis=0)
    norms[norms == 0] = 1
    residual = np.linalg.norm((A - Q @ R) / norms) / max(np.linalg.norm(A / norms), 1e-300)
    k = Q.shape[1]
    return residual, np.linalg.norm(Q.T @ Q - np.eye(k)) / math.sqrt(k) / 2


def test_chain_falls_through_and_says_so():
    A = random_matrix("geometric", 400, 100, cond=1e4, dtype=torch.float32)
    result = neula.qr(A, engine="emulated")
    assert [a.accepted for a in result.attempts] == [False, True]
    assert result.attempts[0].method == "rgsqrf fp32"
    assert result.attempts[1].method == "rgsqrf fp32 + reortho"
    assert "orthogonality" in result.attempts[0].reason


@pytest.mark.parametrize("shape", [(60, 60), (90, 60), (60, 90), (1, 1)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_triangle_is_its_own_r(shape, dtype, rng):
    """Exactly, however ill-conditioned; one element below the diagonal, and it is none."""
    A = np.triu(rng.standard_normal(shape)).astype(dtype)
    A[:, 0] *= 1e-30
    result = Q, R = neula.qr(A, engine="emulated")
    assert (result.attempts[-1].method, result.converged) == ("triangular", True)
    assert (Q @ R == A).all()
    assert np.array_equal(Q.T @ Q, np.eye(min(shape)))
    assert (R.diagonal() >= 0).all()
    if shape != (1, 1):
        A[-1, 0] = 1e-30
        result = Q, R = neula.qr(A, engine="emulated")
        assert result.attempts[-1].method != "triangular"
        assert max(errors(A, Q, R)) <= bound(U[dtype], *shape)


def test_scaling_by_powers_of_two_changes_nothing_but_r(rng):
    A = rng.standard_normal((300, 50)).astype(np.float32)
    powers = 2.0 ** rng.integers(-60, 60, 50)
    Q, R = neula.qr(A, accuracy="fp16", engine="emulated")
    Q_scaled, R_scaled = neula.qr((A * powers).astype(np.float32), accuracy="fp16", engine="emulated")
    np.testing.assert_array_equal(Q, Q_scaled)
    np.testing.assert_array_equal((R * powers).astype(np.float32), R_scaled)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("how", [{}, {"mode": "r"}, {"mode": "complete"}, {"pivoting": True}])
def test_an_r_that_does_not_fit_is_an_error(how, dtype):
    """Its first element is the norm of a column, ``sqrt(8)`` times an element."""
    a = torch.full((8, 2), torch.finfo(dtype).max / 2, dtype=dtype)
    a[1, 1] = 0
    with pytest.raises(OverflowError, match="does not fit"):
        neula.qr(a, **how)
    if dtype == torch.float32 and not how:
        for function in (neula.tsqr, neula.orth, lambda a: neula.qr(a, "raw")):
            with pytest.raises(OverflowError, match=r"R does not fit torch\.float32"):
                function(a)
    with pytest.raises(OverflowError, match="the pseudoinverse does not fit"):
        neula.pinv(torch.eye(2, dtype=dtype) * torch.finfo(dtype).smallest_normal / 16)


def test_twice_is_exactly_two_passes():
    """Also where the second one says that it takes a third."""
    A, engine = (
        random_matrix("geometric", 300, 250, cond=1e9, dtype=torch.float32),
        EmulatedEngine("cpu", "fp16"),
    )
    scales = power_of_two_scales(engine.column_max(A))
    q, r = rgsqrf(A * scales, engine)
    second, step = rgsqrf(q, engine)
    with pytest.warns(neula.AccuracyWarning, match="orthogonality"):
        result = neula.qr(A, accuracy="fp16", algorithm="rgsqrf-twice", engine="emulated")
    assert torch.equal(result.Q, second)
    assert torch.allclose(result.R, step @ r / scales, atol=1e-3)
    assert neula.qr(A, accuracy="fp16", algorithm="rgsqrf-reortho", engine="emulated").converged


def test_strict_names_the_matrices_of_a_batch():
    good, bad = (random_matrix("geometric", 300, 80, cond=c) for c in (2, 1e6))
    A = torch.stack([good, bad, good, bad]).reshape(2, 2, 300, 80)
    options = {"accuracy": "fp16", "algorithm": "rgsqrf", "engine": "emulated"}
    with pytest.warns(neula.AccuracyWarning, match=r"for A\[0, 1\], A\[1, 1\]: residual"):
        result = neula.qr(A, **options)
    with pytest.raises(AccuracyError, match=r"for A\[0, 1\], A\[1, 1\]: residual") as caught:
        neula.qr(A, **options, strict=True)
    assert caught.value.indices == ((0, 1), (1, 1))
    with pytest.raises(AccuracyError, match=r"not certified to fp16 accuracy: residual") as alone:
        neula.qr(bad, **options, strict=True)
    assert alone.value.indices == ((),)
    assert not alone.value.result.converged
    assert neula.qr(bad, accuracy="fp16", engine="emulated", strict=True).converged
    assert torch.equal(caught.value.result.Q, result.Q)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.indices) == (str(caught.value), caught.value.indices)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"accuracy": "fp8"}, "unknown accuracy 'fp8'.*'fp16', 'bf16', 'tf32', 'fp32', 'fp64'"),
        ({"engine": "gpu"}, "unknown engine 'gpu'.*'auto', 'cuda', 'cpu', 'emulated'"),
        ({"mode": "full"}, "unknown mode 'full'.*'reduced', 'r', 'complete'"),
        ({"algorithm": "givens"}, "unknown algorithm 'givens'.*'rgsqrf'"),
        ({"panel": "mgs"}, "unknown panel 'mgs'.*'caqr'"),
        ({"compute": "fp8"}, "unknown format 'fp8'"),
        ({"compute": "fp16"}, "cpu engine 'fp16'"),
        ({"cutoff": 0}, "cutoff must be a whole number, at least 1, got 0"),
    ],
)
def test_unknown_names_list_the_known_ones(kwargs, message, rng):
    with pytest.raises(ValueError, match=message):
        neula.qr(rng.standard_normal((10, 3)), **kwargs)


# ---------------------------------------------------------------- batches


def worst_errors(A: np.ndarray, Q: np.ndarray, R: np.ndarray) -> float:
    return max(max(errors(a, q, r)) for a, q, r in zip(A, Q, R, strict=True))


@pytest.fixture(params=["lapack", "gram-schmidt", "gram-schmidt with fast fp64"])
def chain(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The chain for batches of a CPU, and that of a GPU in plain torch: it goes by the name of the engine."""
    if request.param == "lapack":
        return {"engine": "cpu"}

    class Tuned(CpuEngine):
        tuning = cuda_tuning((9, 0))

        @property
        def preconditioners(self) -> tuple[str, ...]:
            return ("fp64",) if "fp64" in request.param else ("fp32",)

    return {"engine": Tuned("cpu")}


@pytest.mark.parametrize("shape", [(10, 4), (4, 10), (2, 3, 10, 4), (2, 3, 4, 10), (1, 2, 6, 6)])
def test_modes_of_matrices_and_batches(shape, chain, rng):
    *batch, m, n = shape
    A = rng.standard_normal(shape)
    r_only = neula.qr(A, "r", **chain)
    assert r_only.Q is None
    np.testing.assert_allclose(r_only.R, neula.qr(A, **chain).R, atol=1e-13)
    Q, R = neula.qr(A, "complete", **chain)
    assert Q.shape == (*batch, m, m)
    assert R.shape == (*batch, m, n)
    np.testing.assert_allclose(Q @ R, A, atol=1e-13)
    np.testing.assert_allclose(Q.swapaxes(-1, -2) @ Q, np.broadcast_to(np.eye(m), Q.shape), atol=1e-13)


def test_many_bad_matrices_are_counted(rng):
    A = np.full((9, 5, 2), np.nan)
    with pytest.warns(neula.AccuracyWarning, match=r"A\[3\], A\[4\], 4 more: 9 of 9 matrices"):
        neula.qr(A)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "shape", [(50, 32, 32), (20, 256, 32), (20, 256, 128), (3, 4096, 128), (2, 512, 512), (9, 7, 30)]
)
def test_a_batch_on_a_gpu(shape, dtype):
    A = torch.stack([random_matrix("normal", *shape[1:], seed=i) for i in range(shape[0])]).to("cuda", dtype)
    A[0, :, -1] = A[0, :, 0]
    A[1, :, 0] = 0
    result = neula.qr(A)
    assert result.converged
    limit = bound(torch.finfo(dtype).eps / 2, *shape[1:])
    assert worst_errors(A.cpu().numpy(), result.Q.cpu().numpy(), result.R.cpu().numpy()) <= limit
    assert not result.R[1, :, 0].any()


@pytest.mark.gpu
def test_a_batch_on_a_gpu_is_float32_whatever_the_switch():
    switch = torch.backends.cuda.matmul
    before, switch.fp32_precision = switch.fp32_precision, "tf32"
    try:
        A = torch.stack([random_matrix("normal", 300, 100, seed=i) for i in range(5)]).to(
            "cuda", torch.float32
        )
        result = neula.qr(A)
        assert result.converged
        assert switch.fp32_precision == "tf32"
    finally:
        switch.fp32_precision = before


# ---------------------------------------------------------------- first links that are queued unseen


class Queueing(EmulatedEngine):
    """Plays nothing back, but says so: the chain of a GPU on a CPU."""

    replayed_bytes = 1 << 20
    tuning = replace(EMULATED, single=Recursion("cholesky32", 128), replayed_bytes=1 << 20)


@pytest.mark.parametrize(
    ("m", "n", "accuracy", "cond", "methods"),
    [
        (600, 60, "fp16", 10.0, ["rgsqrf fp16"]),
        (100, 60, None, 10.0, ["rgsqrf fp32 + correction"]),
        (400, 300, None, 1e7, ["rgsqrf fp32 + correction", "rgsqrf fp32 + reortho"]),
        (600, 60, None, 1e6, ["rgsqrf fp32", "rgsqrf fp32 + reortho"]),
        (300, 200, "fp16", 1e4, ["rgsqrf fp16", "rgsqrf fp16 + reortho"]),
        (8400, 260, "fp16", 2.0, ["cholesky-qr fp16"]),
        (8400, 260, "fp16", 1e5, ["cholesky-qr fp16", "rgsqrf fp16"]),
    ],
)
def test_the_chain_where_nothing_is_looked_at_first(m, n, accuracy, cond, methods):
    a = random_matrix("geometric", m, n, cond=cond, seed=3, dtype=torch.float32)
    result = neula.qr(a.mT.contiguous().mT, accuracy=accuracy, engine=Queueing("cpu"))
    assert result.converged
    assert [attempt.method for attempt in result.attempts][: len(methods)] == methods


def test_more_than_half_precision_where_more_is_named():
    a = random_matrix("normal", 300, 200, seed=3, dtype=torch.float32)
    for options in ({"cutoff": 64}, {"panel": "cholesky32"}, {"compute": "bf16"}):
        q = neula.qr(a, accuracy="bf16", engine=HalfEngine("cpu"), **options).Q
        assert not torch.equal(q, q.half().float())


class Looking(Queueing):
    """Square matrices of any size are looked at before they are corrected."""

    tuning = replace(Queueing.tuning, partly_corrected=1)


@pytest.mark.parametrize(("kind", "cond", "columns"), [("normal", 1.0, []), ("geometric", 1e4, [250])])
def test_only_columns_that_lost_orthogonality_are_corrected(monkeypatch, kind, cond, columns):
    corrected = []

    def last(q, r, engine, columns, **options):
        corrected.append(columns)
        return correct_last(q, r, engine, columns, **options)

    monkeypatch.setattr(ways, "correct_last", last)
    a = random_matrix(kind, 301, 250, cond=cond, seed=1, dtype=torch.float32)
    result = neula.qr(a, engine=Looking("cpu"))
    assert corrected == [WHOLE, *columns]
    assert result.converged


@pytest.mark.parametrize("accuracy", ["fp16", "fp32"])
@pytest.mark.parametrize(("dependent", "fewer"), [(-1, True), (1, False)])
def test_only_columns_that_lost_orthogonality_have_a_second_pass(monkeypatch, accuracy, dependent, fewer):
    """One is nearly in the span of others, at the end or at the beginning of the matrix."""
    again = []

    def second(*factors, columns, **options):
        again.append(columns)
        return reorthogonalize(*factors, columns=columns, **options)

    monkeypatch.setattr(ways, "reorthogonalize", second)
    a = random_matrix("normal", 301, 300, seed=1, dtype=torch.float32)
    a[:, dependent] = a[:, 0] + 1e-6 * a[:, dependent]
    result = neula.qr(a, accuracy=accuracy, engine=Looking("cpu"), progress=lambda *_: None)
    (columns,) = again
    assert (columns < 300) == fewer
    assert result.converged
    q, r = result.Q.double(), result.R.double()
    bound = {"fp16": 0.1, "fp32": 30 * 300 * 2.0**-24}[accuracy]
    assert torch.linalg.matrix_norm(q.T @ q - torch.eye(300), 2) <= bound
    assert torch.linalg.matrix_norm(q @ r - a) <= bound * torch.linalg.matrix_norm(a)


def test_a_wider_matrix_in_the_accuracy_of_float32():
    a = random_matrix("normal", 130, 101, seed=4, dtype=torch.float64) * 1e200
    result = neula.qr(a, accuracy="fp32", engine=Looking("cpu"))
    assert result.R.dtype == torch.float64
    assert torch.linalg.matrix_norm(result.Q @ result.R / 1e200 - a / 1e200) <= 1e-5 * 130


def test_nothing_is_looked_at_unless_the_host_may_wait():
    a = random_matrix("normal", 120, 100, seed=3, dtype=torch.float32)
    result = neula.qr(a, engine=Looking("cpu"), wait=False)
    assert result._pending is not None
    assert neula.finish(result).converged


def test_a_correction_that_leaves_a_residual_is_forgotten(monkeypatch):
    """Then the next link starts from A again."""
    monkeypatch.setattr(ways, "correct", lambda q, r, engine: (q, 1.001 * r))
    a = random_matrix("normal", 100, 60, dtype=torch.float32)
    result = neula.qr(a, engine=Queueing("cpu"))
    methods = [attempt.method for attempt in result.attempts]
    assert methods[:2] == ["rgsqrf fp32 + correction", "rgsqrf fp32"]
    assert result.converged


# ---------------------------------------------------------------- first links on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "n", "dtype", "accuracy", "method"),
    [
        (20000, 100, torch.float32, None, "cholesky-qr fp16_cor"),
        (20000, 300, torch.float32, "fp16", "cholesky-qr fp16"),
        (20000, 300, torch.float32, None, "cholesky-qr fp64, twice"),
        (40000, 3000, torch.float32, None, "rgsqrf fp32"),
        (3001, 1000, torch.float32, "fp16", "rgsqrf fp16"),
        (1000, 1000, torch.float32, None, "cholesky-qr fp64, twice"),
        (1000, 1000, torch.float32, "fp16", "cholesky-qr fp64"),
        (6001, 6000, torch.float32, None, "rgsqrf fp32 + correction"),
        (3001, 1000, torch.float64, None, "cholesky-qr fp64, twice"),
        (8000, 7000, torch.float64, None, "rgsqrf fp64"),
    ],
)
def test_first_links_on_a_gpu(m, n, dtype, accuracy, method):
    """The same from a graph, which the third call plays back, in both orders of memory."""
    for seed in range(4):
        generator = torch.Generator("cuda").manual_seed(seed)
        a = torch.randn(m, n, device="cuda", dtype=dtype, generator=generator)
        result = neula.qr(a, accuracy=accuracy)
        assert [attempt.method for attempt in result.attempts] == [method]
        assert result.converged
        other = neula.qr(a.mT.contiguous().mT, accuracy=accuracy)
        assert other.converged
        size = torch.linalg.matrix_norm(a.double())
        assert torch.linalg.matrix_norm(a.double() - other.Q.double() @ other.R.double()) <= 0.01 * size


@pytest.mark.gpu
@pytest.mark.parametrize("accuracy", ["fp16", None])
def test_hard_matrices_on_a_gpu(accuracy):
    """Zero, repeated and ill-conditioned columns go on to later links; NaN is refused with its place."""
    a = torch.randn(5000, 200, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    zero, repeated, graded = (
        a.clone(),
        a.clone(),
        a @ torch.diag(10.0 ** -torch.arange(200.0, device="cuda") / 30),
    )
    zero[:, 7] = 0
    repeated[:, 150] = repeated[:, 3]
    for matrix in (zero, repeated, graded @ torch.randn(200, 200, device="cuda")):
        assert neula.qr(matrix, accuracy=accuracy).converged
    a[17, 5] = torch.nan
    with pytest.raises(ValueError, match="17"):
        neula.qr(a, accuracy=accuracy)
    with pytest.raises(ValueError, match="17"):
        neula.qr(a, accuracy=accuracy, algorithm="rgsqrf")


@pytest.mark.gpu
def test_blocks_that_are_played_back_on_a_gpu():
    """The recursion in blocks gives what it gives as a whole."""
    from neula.engines import CudaEngine

    engine = CudaEngine("cuda", "fp16")
    a = torch.randn(40000, 2500, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    q, r = rgsqrf(a, engine)
    whole, s = rgsqrf(a, engine, on_columns=lambda columns: None)
    assert torch.allclose(r, s, rtol=0, atol=1e-3 * float(s.max()))
    assert torch.allclose(q, whole, rtol=0, atol=1e-3)


@pytest.mark.gpu
def test_a_triangle_on_a_gpu():
    generator = torch.Generator("cuda").manual_seed(0)
    A = torch.randn(2048, 2048, generator=generator, device="cuda").triu()
    result = neula.qr(A)
    assert result.converged
    assert result.attempts[-1].method == "triangular"
    assert torch.equal(result.Q @ result.R, A)
