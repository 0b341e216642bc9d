"""neula.qr(overwrite_a=True): Q in the memory of A, and A left alone where that cannot be."""

from __future__ import annotations

import math
import warnings
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
import torch
from tests.matrices import normal

import neula
from memory_of_gpu import peak_beside
from neula.engines import graphs
from neula.engines.shipped import machine
from neula.io.matrices import random_matrix
from neula.pipeline.result import AccuracyError, AccuracyWarning


def by_columns(a: torch.Tensor) -> torch.Tensor:
    return a.T.contiguous().T


def test_the_certificate_is_that_of_the_matrix_that_was() -> None:
    a = normal(240, 160, dtype=torch.float32)
    usual = neula.qr(a, accuracy="fp16", engine="emulated", panel="cholesky2")
    in_place = neula.qr(
        by_columns(a), accuracy="fp16", engine="emulated", panel="cholesky2", overwrite_a=True
    )
    # But for the order of sums, which may depend on how A lies in memory.
    for found, expected in zip(astuple(in_place.certificate), astuple(usual.certificate), strict=True):
        assert found == pytest.approx(expected, rel=1e-2)
    assert torch.equal(in_place.Q, usual.Q)
    assert torch.equal(in_place.R, usual.R)


@pytest.mark.parametrize("algorithm", ["rgsqrf", "rgsqrf-reortho"])
def test_a_rejected_answer_is_what_its_certificate_says(algorithm: str, rng: np.random.Generator) -> None:
    a = random_matrix("geometric", 400, 100, cond=1e6).float() * 2.0 ** torch.arange(-50, 50)
    work, same = by_columns(a), by_columns(torch.ones(300, 150))
    with warnings.catch_warnings(record=True):
        in_place = neula.qr(work, algorithm=algorithm, engine="cpu", overwrite_a=True)
        ones = neula.qr(same, algorithm=algorithm, panel="cholesky", engine="cpu", overwrite_a=True)
    scaled = a.double() / a.double().norm(dim=0)
    residual = (scaled - in_place.Q.double() @ (in_place.R.double() / a.double().norm(dim=0))).norm()
    # Four random vectors estimate the norm within a factor of three.
    assert residual / scaled.norm() <= 3 * in_place.certificate.residual
    assert not ones.converged
    assert math.isnan(ones.certificate.residual)


def test_strict_does_not_blame_the_input_for_what_became_of_it() -> None:
    with pytest.raises(AccuracyError, match="QR is not certified"):
        neula.qr(
            by_columns(torch.ones(40, 20)), panel="cholesky", engine="cpu", overwrite_a=True, strict=True
        )


def test_inference_tensors_are_left_alone() -> None:
    with torch.inference_mode():
        a = by_columns(torch.randn(50, 20, dtype=torch.float64))
    before = a.clone()
    assert neula.qr(a, engine="cpu", overwrite_a=True).converged
    assert torch.equal(a, before)


def test_householder_has_the_last_word(rng: np.random.Generator) -> None:
    """A matrix for which two passes in half precision are not enough: the third link goes on from Q."""
    a = random_matrix("cluster_large", 300, 150, dtype=torch.float32)
    with pytest.warns(AccuracyWarning, match="residual"):
        result = neula.qr(by_columns(a), accuracy="fp32", engine="emulated", compute="fp16", overwrite_a=True)
    assert [attempt.method for attempt in result.attempts][-1] == "householder fp64"
    # What is left of Q has the residual of half precision, which nothing can make good.
    assert result.certificate.orthogonality <= result.certificate.orthogonality_bound


def overwritable(rng: np.random.Generator) -> np.ndarray[Any, Any]:
    return np.asfortranarray(rng.standard_normal((50, 20)))


@pytest.mark.parametrize(
    "change",
    [
        np.ascontiguousarray,
        lambda A: np.asfortranarray(A.T),
        lambda A: np.asfortranarray(A.astype(np.float16)),
        lambda A: A[::2],
        lambda A: A[:, ::-1],
        lambda A: np.stack([A, A]),
        lambda A: torch.from_numpy(A).requires_grad_(),
    ],
    ids=["rows", "wide", "half", "gaps", "reversed", "batch", "gradient"],
)
def test_what_cannot_be_overwritten_is_left_alone(change: Any, rng: np.random.Generator) -> None:
    A = change(overwritable(rng))
    before = A.detach().clone() if isinstance(A, torch.Tensor) else A.copy()
    result = neula.qr(A, engine="cpu", overwrite_a=True)
    assert result.converged
    assert bool((before == A).all())


@pytest.mark.parametrize("options", [{"algorithm": "householder"}, {"accuracy": "fp32"}])
def test_what_needs_a_copy_anyhow_leaves_a_alone(options: dict[str, str], rng: np.random.Generator) -> None:
    A = overwritable(rng)
    before = A.copy()
    assert neula.qr(A, engine="cpu", overwrite_a=True, **options).converged
    assert np.array_equal(A, before)


def test_a_named_algorithm_in_place(rng: np.random.Generator) -> None:
    A = overwritable(rng)
    result = neula.qr(A, algorithm="rgsqrf-reortho", engine="cpu", overwrite_a=True)
    assert np.shares_memory(result.Q, A)


@pytest.mark.gpu
def test_memory_on_a_gpu() -> None:
    """Beside A only R, half of the columns and some as operands, and what is played back."""
    m, n = 20480, 12288
    a = torch.randn(n, m, device="cuda").T
    neula.qr(a[:, :2048], accuracy="fp16")  # what is made once
    norm = float(torch.linalg.matrix_norm(a))
    probe = torch.randn(n, 4, device="cuda", dtype=torch.float64)
    image = a.double() @ probe
    torch.cuda.empty_cache()
    result, peak = peak_beside(lambda: neula.qr(a, accuracy="fp16", overwrite_a=True))
    assert result.converged
    assert result.Q.data_ptr() == a.data_ptr()
    # A block, its Q, its operands and its copy when it is recorded.
    replayed = 4 * graphs.largest_input(a.device)
    wide = machine("h200").numbers["operand_columns"]
    operands = 2 * (m * (n // 2 + wide) + wide * n // 2)
    assert peak <= 4 * n * n + operands + replayed
    left = (image - result.Q.double() @ (result.R.double() @ probe)).norm() / 2
    assert left <= 3 * 2.0**-11 * (2 + np.log2(n)) * norm
