"""Planes of complex matrices: the definition, and the kernels against it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.devices import DEVICE, KERNEL

from neula.kernels.products.planes import interleave, planes, planes_of_product

SHAPES = [(1, 1, 1), (1, 8, 256), (2, 9, 300)]
"""One element, full tiles, a ragged row and column."""
BOTH = pytest.mark.parametrize("which", ["reference", KERNEL])


def found(function: Callable, which: str) -> Callable:
    if which != "reference":
        pytest.importorskip("triton")
    return function.reference if which == "reference" else function.kernel


def normal(*shape: int, dtype: torch.dtype, by_columns: bool) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype).to(DEVICE)
    return x.mT.contiguous().mT if by_columns else x


@BOTH
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize(
    ("dtype", "to"),
    [
        (torch.complex64, torch.float32),
        (torch.complex64, torch.float16),
        (torch.complex128, torch.float64),
    ],
)
def test_planes(which, shape, by_columns, dtype, to):
    x = normal(*shape, dtype=dtype, by_columns=by_columns)
    for conjugated in (False, True):
        y = x.conj().resolve_conj() if conjugated else x
        first, second, both = found(planes, which)(torch.view_as_real(x), to, conjugated=conjugated)
        assert torch.equal(first, y.real.to(to))
        assert torch.equal(second, y.imag.to(to))
        assert torch.equal(both, (y.real + y.imag).to(to))
        if min(shape[1:]) > 1:
            assert (first.stride(1) == 1) == by_columns


@BOTH
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize(
    ("dtype", "alpha", "beta"), [(torch.complex64, 1.0, 0.0), (torch.complex128, 0.3, -2.0)]
)
def test_interleave(which, shape, by_columns, dtype, alpha, beta):
    p, q, s = (
        normal(*shape, dtype=dtype, by_columns=by_columns).real * factor for factor in (1.0, 0.5, -2.0)
    )
    c = normal(*shape, dtype=dtype, by_columns=by_columns)
    expected = alpha * torch.complex(p - q, s - p - q) + (beta * c if beta else 0)
    target = c.clone() if beta else torch.full_like(c, torch.nan)
    found(interleave, which)(torch.stack([p, q, s]), torch.view_as_real(target), alpha, beta)
    torch.testing.assert_close(target, expected)


@BOTH
def test_part_of_a_larger_matrix(which):
    """Rows that do not follow one another without gaps."""
    whole = normal(1, 40, 70, dtype=torch.complex64, by_columns=False)
    x = whole[:, 3:20, 10:43]
    first, *_ = found(planes, which)(torch.view_as_real(x), torch.float32)
    assert torch.equal(first, x.real)
    before, room = whole.clone(), whole.clone()
    found(interleave, which)(
        torch.stack([x.real, x.real * 0, x.real]), torch.view_as_real(room[:, 3:20, 10:43]), 1.0, 0.0
    )
    before[:, 3:20, 10:43] = x.real + 0j
    assert torch.equal(room, before)


@BOTH
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 9, 300), (3, 20, 20), (1, 16, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scaled", [False, True])
def test_planes_of_a_product(which, shape, dtype, scaled):
    p, q, s = (normal(*shape, dtype=dtype, by_columns=False) * factor for factor in (1.0, 0.5, -2.0))
    scales = torch.arange(1.0, 1 + shape[0], dtype=dtype, device=DEVICE) if scaled else None
    expected = 0.7 * torch.complex(p - q, s - p - q) - 3.0 * torch.eye(*shape[1:], dtype=dtype, device=DEVICE)
    expected = expected if scales is None else expected * scales[:, None, None]
    products = torch.stack([p, q, s, p], -1).movedim(-1, 0)[:3]
    products = torch.nn.functional.pad(products, (0, 3))[..., : shape[2]]
    made = found(planes_of_product, which)(products, 0.7, -3.0, scales)
    assert made.data_ptr() == products.data_ptr()
    room = 1e-6 if dtype == torch.float32 else 1e-14
    for plane, part in zip(made, (expected.real, expected.imag, expected.real + expected.imag), strict=True):
        torch.testing.assert_close(plane, part, rtol=room, atol=50 * room)
