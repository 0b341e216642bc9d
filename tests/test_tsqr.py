"""neula.tsqr: any tall matrix in every mode, what its certificate promises, and what it says to bad input."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import neula
from neula.engines import EmulatedEngine
from neula.io.matrices import random_matrix
from neula.kernels.qr.householder import MAX_HEIGHT, WIDTH
from neula.problems.orthogonal.tsqr import COMPUTE, SLIDES, tree_options

U = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
U16, U32 = 2.0**-11, 2.0**-24

SHAPES = [(1, 1), (5, 1), (3, 7), (31, 40), (257, 32), (700, 33), (300, 130)]
CORRECTED, UNCORRECTED = ("fp16_cor", "tf32_cor"), ("fp16_nocor", "tf32_nocor")
CHAIN = ["cholesky-qr fp64", "cholesky-qr fp64, twice", "tsqr fp32", "tsqr fp64"]
EACH_MODE = pytest.mark.parametrize("compute", ["auto", *COMPUTE])
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def uniform(m: int, n: int, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    return random_matrix("uniform", m, n, dtype=torch.float32, device=device, seed=seed)


def how(compute: str, device: str = "cpu", unit: str | None = None) -> dict[str, Any]:
    """The modes run on the unit of a GPU, and are emulated without one."""
    if device == "cuda":
        return {"compute": compute, "engine": "cuda"}
    return {"compute": compute, "engine": "emulated" if unit is None else EmulatedEngine(unit=unit)}


def errors(A, Q, R) -> tuple[float, float]:
    """Residual in the column scaling of the certificate, and ``||I - Q^T Q||_F / sqrt(n)``, in float64."""
    a, q, r = (torch.as_tensor(x).double() for x in (A, Q, R))
    norms = a.abs().amax(0)
    norms = norms * torch.linalg.vector_norm(a / torch.where(norms == 0, 1.0, norms), dim=0)
    norms[norms == 0] = 1
    residual = torch.linalg.matrix_norm((a - q @ r) / norms)
    size = torch.linalg.matrix_norm(a / norms)
    k = q.shape[1]
    loss = torch.linalg.matrix_norm(q.T @ q - torch.eye(k, dtype=q.dtype, device=q.device))
    return float(residual / (size if size > 0 else 1.0)), float(loss) / math.sqrt(k)


def certified_bound(u: float, m: int, n: int) -> float:
    """The documented bound of a residual; twice that for orthogonality, which counts an error of Q twice.
    The returned factors are rounded to their dtype, float64 adds an error of this check, and the kernel that
    measures on a GPU errs by up to 4 u.
    """
    return 3 * u * (2 + math.log2(n)) + (2 + 4 * torch.cuda.is_available()) * u + math.sqrt(m) * 2.0**-53


def mode_bound(compute: str, m: int, n: int) -> float:
    """Theoretical error bound of a mode, for any size.

    On each of ``1 + log2(m / n)`` levels, at most: ``4 (n + sqrt(m) + 4) u`` column by column, and for each
    block of 16 columns its reflector there and back, three products with ``|V|^2 = 2``. A product errs by 2
    u16 for its rounded operands; with correction by 8 u, 2 for each operand and 4 for what is dropped, and by
    what a unit cuts off. What is beyond the square of a wide matrix is projected
    with Q and back, and a residual is relative to columns that are scaled alike: another 2.
    """
    k, tile = min(m, n), min(m, max(MAX_HEIGHT, 2 * n))
    unit = EmulatedEngine("cpu", compute[:4] if compute in CORRECTED else "fp16")
    cut = unit.unit.sum_error(tile, unit.block)
    product = 2 * U16 if compute.endswith("nocor") else 8 * U32 + cut
    level = 4 * (k + math.sqrt(tile) + 4) * U32 + math.ceil(k / WIDTH) * 12 * product
    return 2 * (1 + math.log2(m / k)) * level


def check(A, factors, compute: str) -> None:
    m, n = A.shape
    Q, R = factors
    assert (tuple(Q.shape), tuple(R.shape)) == ((m, min(m, n)), (min(m, n), n))
    assert Q.dtype == R.dtype == A.dtype
    R = torch.as_tensor(R)
    assert torch.equal(R, R.triu()), "exact zeros below the diagonal"
    assert (R.diagonal() >= 0).all()
    assert not R[:, (A == 0).all(0)].any()
    limit = certified_bound(U[str(A.dtype).removeprefix("torch.")], m, n)
    if compute != "auto":
        limit = max(limit, mode_bound(compute, m, n))
    residual, orthogonality = errors(A, Q, R)
    assert residual <= limit
    assert orthogonality <= 2 * limit


def check_verdict(A, result, compute: str) -> None:
    """Accepted; a corrected mode, whose sums a unit truncates, where its errors are those of float32.

    The certificate estimates them from four random vectors: within a factor of 3.
    """
    if compute not in CORRECTED or A.dtype.itemsize == 2:  # any mode has the accuracy of half precision
        assert result.converged
        return
    bound = certified_bound(U32, *A.shape)
    worst = max(x / y for x, y in zip(errors(A, *result), (bound, 2 * bound), strict=True))
    assert result.converged if worst <= 1 / 3 else worst <= 3 or not result.converged


# ---------------------------------------------------------------- accuracy


def dependent() -> torch.Tensor:
    A = uniform(600, 20)
    A[:, [0, 7, 19]] = 0
    A[:, 9] = A[:, 3]
    return A


CASES: dict[str, Callable[[], torch.Tensor]] = {
    **{f"{m} x {n}": partial(uniform, m, n) for m, n in SHAPES},
    "well-conditioned": lambda: random_matrix("geometric", 700, 33, cond=1e1).float(),
    "ill-conditioned": lambda: random_matrix("geometric", 700, 33, cond=1e7).float(),
    "dependent and zero columns": dependent,
    "zero": lambda: torch.zeros(600, 20),
    # Squares of 1e30 overflow, and those of 1e-30 vanish: columns are scaled where that matters.
    **{f"1e{x} in size": lambda x=x: uniform(600, 20) * 10.0 ** torch.linspace(-x, x, 20) for x in (8, 30)},
    # Rounded to float32 for the named modes, and factors to the dtype of A.
    **{dtype: lambda dtype=dtype: uniform(300, 20).to(getattr(torch, dtype)) for dtype in U},
}


@DEVICES
@EACH_MODE
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::neula.AccuracyWarning")  # of a single number, whose bound is 6 u
def test_every_matrix_in_every_mode(case: str, compute: str, device: str) -> None:
    A = CASES[case]().to(device)
    before = A.clone()
    result = neula.tsqr(A, **how(compute, device))
    check(A, result, compute)
    assert torch.equal(A, before)
    if min(A.shape) > 1:
        check_verdict(A, result, compute)
    assert result.certificate.accepted == result.converged
    if compute != "auto":
        assert [a.method for a in result.attempts] == [f"tsqr {compute}"]
        assert A.dtype.itemsize == 2 or result.accuracy == COMPUTE[compute]
    if case.endswith("conditioned"):
        # Estimates from 4 random vectors are within 3; the kernel that measures on a GPU errs by up to 4 u.
        noise = 4 * U32 if device == "cuda" else 0.0
        certified = result.certificate.residual, result.certificate.orthogonality
        for error, estimate in zip(errors(A, *result), certified, strict=True):
            assert error / 3 - noise <= estimate <= 3 * error + noise


@DEVICES
@pytest.mark.parametrize(("m", "n"), [(257, 32), (700, 33), (2000, 17), (1500, 130)])
def test_correction_is_what_makes_the_modes_as_good_as_fp32(m: int, n: int, device: str) -> None:
    """The paper's claim: at most 3 times the errors of fp32, on the same matrix; without, 100 at least.

    Of a unit that rounds to nearest: the slides' pseudo_TC. One that truncates loses more.
    """
    A = uniform(m, n, device)
    reference = errors(A, *neula.tsqr(A, **how("fp32_notc", device)))
    for compute in CORRECTED + UNCORRECTED:
        found = errors(A, *neula.tsqr(A, **how(compute, device, "ideal")))
        for error, fp32 in zip(found, reference, strict=True):
            assert error <= 3 * fp32 if compute in CORRECTED else error > 100 * 3 * fp32


@DEVICES
@pytest.mark.parametrize("compute", list(SLIDES))
def test_as_in_the_slides(compute: str, device: str) -> None:
    """Tiles of 256 rows, 2^10, reflections on the unit: on one that rounds to nearest errors are fp32's."""
    A = uniform(1000, 128, device)
    engine = EmulatedEngine(device, unit="ideal")
    result = neula.tsqr(A, compute=compute, engine=engine)
    usual = errors(A, *neula.tsqr(A, compute="fp32_notc", engine=engine))
    for error, fp32 in zip(errors(A, *result), usual, strict=True):
        assert error <= 3 * fp32
    with pytest.raises(ValueError, match="at most 128 columns, got 129"):
        neula.tsqr(uniform(300, 129, device), compute=compute, engine=engine)


def test_the_chain_falls_through_and_says_so() -> None:
    """Gram matrices in float64 square a condition of 1e7; of singular matrices they are indefinite."""
    for cond, links in ((1e1, 1), (1e7, 2)):
        A = random_matrix("geometric", 500, 30, cond=cond).float()
        result = neula.tsqr(A, engine="emulated")
        assert [a.method for a in result.attempts] == CHAIN[:links]
        assert [a.accepted for a in result.attempts] == [False] * (links - 1) + [True]
    A[:, 4] = 0
    result = neula.tsqr(A, engine="emulated")
    assert [a.method for a in result.attempts] == CHAIN[:3]
    assert result.attempts[0].reason.startswith("residual")


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_few_columns_are_certified_too(n: int) -> None:
    """Their bounds are tight: the tree in float32 misses one in some hundred, and then float64 does it."""
    for seed in range(40):
        A = uniform(n + seed % 3, n, seed=seed)
        A[:, seed % n] = 0
        result = neula.tsqr(A, engine="emulated")
        assert result.converged
        assert result.attempts[-1].method in CHAIN[2:]
        check(A, result, "auto")


@pytest.mark.parametrize("compute", CORRECTED)
def test_truncation_is_what_limits_the_corrected_modes(compute: str) -> None:
    """The slides' second message: on the unit of an A100 the errors are several times those of fp32, which on
    one that rounds to nearest they are not.
    """
    A = uniform(1024, 128)
    fp32 = errors(A, *neula.tsqr(A, compute="fp32_notc", engine="emulated"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", neula.AccuracyWarning)
        found = {unit: errors(A, *neula.tsqr(A, **how(compute, unit=unit))) for unit in ("a100", "ideal")}
    for truncated, nearest, single in zip(found["a100"], found["ideal"], fp32, strict=True):
        assert 1.5 * single < truncated  # twice, or nearly: sums of the library differ between processors
        assert nearest < 2 * single


def test_an_emulated_unit_on_a_gpu_is_not_that_of_the_gpu() -> None:
    """The kernels' products have names; an emulated engine multiplies by itself, wherever the matrix is."""
    for compute in CORRECTED:
        assert callable(tree_options(compute, EmulatedEngine("cuda"), 20)["product"])


@pytest.mark.gpu
@pytest.mark.parametrize("compute", CORRECTED)
def test_truncation_of_an_emulated_unit_on_a_gpu(compute: str) -> None:
    a = uniform(1024, 128, "cuda")
    engines = {unit: EmulatedEngine("cuda", unit=unit) for unit in ("a100", "ideal")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", neula.AccuracyWarning)
        found = {unit: neula.tsqr(a, compute=compute, engine=engine) for unit, engine in engines.items()}
    truncated, nearest = (float((a - Q @ R).norm()) for Q, R in (found["a100"], found["ideal"]))
    assert truncated > 2 * nearest


# ---------------------------------------------------------------- modes and batches


@DEVICES
@EACH_MODE
@pytest.mark.parametrize("shape", [(2, 3, 300, 20), (2, 2, 5, 9)])
def test_batches(shape: tuple[int, ...], compute: str, device: str) -> None:
    m, n = shape[-2:]
    A = torch.stack([uniform(m, n, device, seed=i) for i in range(math.prod(shape[:-2]))]).reshape(shape)
    result = neula.tsqr(A, **how(compute, device))
    assert (result.Q.shape, result.R.shape) == ((*shape[:-1], min(m, n)), (*shape[:-2], min(m, n), n))
    assert len(result.certificate) == math.prod(shape[:-2])
    assert result.converged or m < n  # reflectors in float32 may miss the tight bound of a few columns
    for i in np.ndindex(*shape[:-2]):
        check(A[i], (result.Q[i], result.R[i]), compute)
    only_r = neula.tsqr(A, "r", **how(compute, device))
    assert only_r.Q is None
    assert torch.equal(only_r.R, result.R)


def test_each_matrix_of_a_batch_gets_what_it_needs() -> None:
    A = torch.stack([uniform(400, 15, seed=i) for i in range(5)])
    A[1] = random_matrix("geometric", 400, 15, cond=1e7).float()
    A[2, :, 4] = 0
    A[3] *= 10.0 ** torch.linspace(-30, 30, 15)
    clean = neula.tsqr(A[[0, 4]], engine="emulated")
    result = neula.tsqr(A, engine="emulated")
    assert result.converged
    for a, q, r in zip(A, *result, strict=True):
        residual, orthogonality = errors(a, q, r)
        assert residual <= certified_bound(U32, 400, 15)
        assert orthogonality <= 2 * certified_bound(U32, 400, 15)
    for i, j in ((0, 0), (4, 1)):
        assert torch.equal(result.Q[i], clean.Q[j])
        assert torch.equal(result.R[i], clean.R[j])
    assert [a.reason.partition(" ")[0] for a in result.attempts] == ["3", "1", "residual"]


def test_on_a_cpu() -> None:
    """One matrix of any size, and small ones of a batch, with the factors of qr."""
    result = neula.tsqr(uniform(3000, 40))
    check(uniform(3000, 40), result, "auto")
    A = torch.stack([uniform(60, 9, seed=i) for i in range(4)])
    found, expected = neula.tsqr(A), neula.qr(A)
    assert found.converged
    for one, other in ((found.Q, expected.Q), (found.R, expected.R)):  # by LAPACK or by the core
        torch.testing.assert_close(one, other, rtol=0, atol=60 * 2.0**-23)


# ---------------------------------------------------------------- NaN and Inf, strict, messages


def test_what_misses_warns_and_raises_if_strict() -> None:
    """A unit that sums in fp16 loses what correction gains: a mode of float32 that is not."""
    A = uniform(600, 40)
    options = {"compute": "fp16_cor", "engine": EmulatedEngine(accumulate="fp16")}
    with pytest.warns(neula.AccuracyWarning, match=r"QR is not certified to fp32 accuracy: .*residual"):
        result = neula.tsqr(A, **options)
    assert not result.converged
    assert not result.certificate.accepted
    with pytest.raises(neula.AccuracyError, match="not certified to fp32") as caught:
        neula.tsqr(A, **options, strict=True)
    assert torch.equal(caught.value.result.Q, result.Q)
    assert neula.tsqr(A, strict=True).converged


@pytest.mark.parametrize(
    ("A", "options", "message"),
    [
        (np.ones((300, 257)), {}, r"A of shape \(300, 257\) has 257 columns.*at most 256: use neula.qr"),
        (np.ones((2, 300, 300)), {}, r"A of shape \(2, 300, 300\) has 300 columns.*use neula.qr"),
        (np.ones((9, 2)), {"mode": "complete"}, r"unknown mode 'complete': choose one of 'reduced', 'r'"),
        (np.ones((9, 2)), {"compute": "fp8"}, r"unknown compute 'fp8'.*'auto', 'fp16_cor', .*'fp32_notc'"),
        (np.ones((9, 2)), {"engine": "gpu"}, r"unknown engine 'gpu'"),
        (np.ones((9, 2)), {"compute": "fp16_cor"}, r"cpu engine does not multiply in 'fp16'.*'fp32_notc'"),
        (np.ones((9, 2)), {"compute": "tf32_nocor"}, r"'tf32'.*compute='fp32_notc' or engine='emulated'"),
        (np.ones((0, 9, 2)), {"compute": "fp16_cor"}, r"cpu engine does not multiply in 'fp16'"),
        (np.ones(9), {}, r"must be a matrix.*got 1 dimension"),
    ],
)
def test_messages(A: np.ndarray, options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        neula.tsqr(A, **{"engine": "cpu", **options})


# ---------------------------------------------------------------- gradients


def test_the_gradient_of_a_named_mode() -> None:
    """Factors are known to their errors times the condition, and ``R^-T`` brings that in once more."""
    a = uniform(100, 6).requires_grad_()
    weight = uniform(100, 6, seed=1)
    exact = a.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad((neula.tsqr(exact).Q * weight).sum(), exact)
    cond = float(torch.linalg.cond(exact.detach()))
    for compute in ("fp16_cor", "fp16_nocor"):
        (found,) = torch.autograd.grad((neula.tsqr(a, **how(compute)).Q * weight).sum(), a)
        gap = (found - expected).norm() / expected.norm()
        assert 0 < gap <= 2 * mode_bound(compute, 100, 6) * cond**2


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@EACH_MODE
@pytest.mark.parametrize(
    ("m", "n"), [(10**6, 128), (300_001, 100), (100_003, 130), (65_537, 256), (10**6, 5)]
)
def test_large_on_a_gpu(m: int, n: int, compute: str) -> None:
    A = uniform(m, n, "cuda")
    result = neula.tsqr(A, compute=compute)
    assert result.converged
    check(A, result, compute)


@pytest.mark.gpu
def test_the_chain_on_a_gpu() -> None:
    """One pass up to a condition of about 3, two up to 1e3, and the tree for all."""
    for cond, links in ((1.5, 1), (1e2, 2), (1e6, 3)):
        A = random_matrix("geometric", 20_000, 100, cond=cond, device="cuda").float()
        result = neula.tsqr(A)
        assert len(result.attempts) == links
        check(A, result, "auto")


@pytest.mark.gpu
@EACH_MODE
def test_repeated_runs_are_identical(compute: str) -> None:
    """A race or a read of what was not written would show: memory comes back filled with NaN."""
    A = uniform(50_001, 100, "cuda")
    expected = neula.tsqr(A, compute=compute)
    for _ in range(20):
        # Freed memory is what comes next, in pieces of any size.
        poison = [torch.full((2**size,), math.nan, device="cuda") for size in range(8, 26)]
        del poison
        result = neula.tsqr(A, compute=compute)
        for x, y in zip(result, expected, strict=True):
            assert torch.equal(x, y)
        result.Q.fill_(math.nan)
        result.R.fill_(math.nan)
        del result, x, y


@pytest.mark.gpu
def test_the_current_stream() -> None:
    """The matrix arrives late on a stream of its own: whoever works on another one factorizes zeros."""
    source = uniform(20_000, 64, "cuda")
    for compute in ("auto", "fp16_cor", "tf32_cor"):
        expected = neula.tsqr(source, compute=compute)  # compiled before the clock runs
        A = torch.zeros_like(source)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # about 0.1 s
            A.copy_(source)
            result = neula.tsqr(A, compute=compute)
        stream.synchronize()
        assert torch.equal(result.R, expected.R)
