"""Errors along random vectors: the reference by definition, and the kernel against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from tests.devices import DEVICE, KERNEL, variants

from neula.kernels.few_vectors import probes
from neula.kernels.few_vectors.probes import probe_errors

kernel = variants(probe_errors, KERNEL)


def problem(batch: int, m: int, n: int, *dtypes: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(m + n)
    k = min(m, n)
    shapes = [(batch, m, n), (batch, m, k), (batch, k, n), (batch, n), (n, 4), (k, 4)]
    kinds = [*dtypes, torch.float32, torch.float64, torch.float64]
    return tuple(
        torch.randn(s, generator=generator, dtype=torch.float64).to(DEVICE, t)
        for s, t in zip(shapes, kinds, strict=True)
    )


def test_the_definition() -> None:
    a, q, r, scales, g, h = problem(2, 9, 5, *[torch.float64] * 3)
    norm = torch.linalg.matrix_norm
    for i, (residual, size, loss, spectral) in enumerate(
        zip(*probe_errors.reference(a, q, r, scales, g, h), strict=True)
    ):
        scaled = scales[i].double().diag() @ g
        assert math.isclose(residual, norm((a[i] - q[i] @ r[i]) @ scaled), rel_tol=1e-13)
        assert math.isclose(size, norm(a[i] @ scaled), rel_tol=1e-13)
        lost = (q[i].T @ q[i] - torch.eye(5, device=DEVICE)) @ h
        assert math.isclose(loss, norm(lost), rel_tol=1e-13)
        assert norm(lost, 2) * (1 - 1e-13) <= spectral <= norm(lost, 2) * 4**0.25 * (1 + 1e-13)


@pytest.mark.parametrize(
    ("m", "n", "tall"),
    [(1, 1, None), (64, 32, None), (70, 40, None), (20, 50, None), (33, 32, 1), (20, 52, 1), (130, 100, 1)],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_kernel_agrees_with_the_reference(  # type: ignore[no-untyped-def]
    kernel, m: int, n: int, tall: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing cancels in these sums of n or m products: ``sqrt(m n) u`` is what they may err by.

    Matrices of many rows are read in blocks.
    """
    if tall is not None:
        monkeypatch.setattr(probes, "TALL", tall)
    narrow = torch.float32 if dtype == torch.float16 else dtype
    arguments = problem(3, m, n, dtype, narrow, narrow)
    u = torch.finfo(narrow).eps / 2
    for found, expected in zip(kernel(*arguments), probe_errors.reference(*arguments), strict=True):
        assert found.dtype == narrow
        assert ((found - expected).abs() <= 4 * math.sqrt(m * n) * u * expected).all()


def test_views(kernel) -> None:
    a, q, r, scales, g, h = problem(4, 40, 36, *[torch.float32] * 3)
    views = (
        *(x.mT.contiguous().mT[::2] for x in (a, q, r)),
        scales[::2],
        g.T.contiguous().T,
        h.T.contiguous().T,
    )
    expected = probe_errors.reference(*views)
    for found, value in zip(kernel(*views), expected, strict=True):
        assert ((found - value).abs() <= 4 * 40 * 2.0**-24 * value).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, in the interpreter
def test_bad_numbers_stay_in_their_matrix(kernel) -> None:
    arguments = problem(3, 40, 8, *[torch.float32] * 3)
    clean = kernel(*arguments)
    arguments[0][1, 7, 3] = math.inf
    for found, before in zip(kernel(*arguments), clean, strict=True):
        assert torch.equal(found[[0, 2]], before[[0, 2]])
    assert not kernel(*arguments)[0][1].isfinite()


@pytest.mark.gpu
def test_gpu_tensors_go_to_the_kernel(kernel) -> None:
    arguments = problem(5, 256, 32, *[torch.float32] * 3)
    assert probe_errors.runs(DEVICE)
    for found, expected in zip(probe_errors(*arguments), kernel(*arguments), strict=True):
        assert torch.equal(found, expected)
