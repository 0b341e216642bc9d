"""Before and after a factorization of a symmetric matrix: a scaled copy of the one triangle that is given, as
a whole, to overwrite; and the triangle that comes of it in the units that were given.
"""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.launch import ceil_div
from neula.kernels.triton_source import jit, tl


def hermitian_from_lower(a: torch.Tensor) -> torch.Tensor:
    """The Hermitian matrix with the lower triangle of A, and the real part of its diagonal; differentiable.

    An imaginary part of the diagonal is not read, even if it is NaN.
    """
    strict = a.tril(-1)
    if not a.is_complex():
        return a.tril() + strict.mH
    return strict + strict.mH + torch.diag_embed(a.diagonal(0, -2, -1).real)


@trial("The kernels that copy symmetric matrices", "several passes of the library's take their place")
def _tried(device: torch.device) -> None:
    a, scales = (
        torch.ones(1, 2, 2, dtype=torch.float32, device=device),
        torch.ones(1, 2, dtype=torch.float32, device=device),
    )
    unscaled_triangle.kernel(symmetric_copy.kernel(a, scales), scales, a.dtype)


@kernel("symmetric_copy_triton", trial=_tried, when=lambda a, *_, **__: 0 not in a.shape)
def symmetric_copy(
    a: torch.Tensor, scales: torch.Tensor, *, rows: int = 0, whole: bool = True
) -> torch.Tensor:
    """``D A D`` of a batch of symmetric matrices, column-major and at least float32; what is above their
    lower triangles is not read.

    D has powers of two, ``scales`` (batch, n), in the dtype of the result or of its parts. Columns of the
    result are ``rows`` apart, or n; what is above its diagonal is written only if ``whole``.
    """
    out = empty_rows(a, rows)
    # A row times its scale stays in the range: of a definite matrix it is at most the root of a diagonal
    # element.
    lower = a.tril().to(out.dtype) * scales[:, :, None] * scales[:, None]
    return torch.add(lower, lower.tril(-1).mH, out=out)


@kernel("unscaled_triangle_triton", trial=_tried, when=lambda t, *_: 0 not in t.shape)
def unscaled_triangle(t: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``D^-1 L`` for the lower triangles of some matrices, zero above the diagonal, in another dtype or in
    their place.

    D has powers of two, ``scales`` (batch, n), in a dtype whose range holds the result.
    """
    return triangle_room(t, dtype).copy_(
        t.tril().to(torch.promote_types(t.dtype, scales.dtype)) / scales[:, :, None]
    )


def triangle_room(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """For the result: t itself, if it has the dtype."""
    if t.dtype == dtype:
        return t
    return torch.empty_strided(t.shape, t.stride(), dtype=dtype, device=t.device)


def empty_rows(a: torch.Tensor, rows: int) -> torch.Tensor:
    """Uninitialized, for the result."""
    count, n, _ = a.shape
    dtype = torch.promote_types(a.dtype, torch.float32)
    return torch.empty(count, n, max(n, rows), dtype=dtype, device=a.device).mT[:, :n]


TILE = 32


def symmetric_copy_triton(a, scales, *, rows=0, whole=True):
    out, scales = empty_rows(a, rows), scales.contiguous()
    count, n, _ = a.shape
    across = ceil_div(n, TILE)
    # The second and third index of a grid end at 65535.
    _symmetric_kernel[(count * across * across,)](
        a, scales, out, n, across, *a.stride(), out.stride(0), out.stride(2), TILE, whole
    )
    return out


def unscaled_triangle_triton(t, scales, dtype):
    out, scales = triangle_room(t, dtype), scales.contiguous()
    count, n, _ = t.shape
    across = ceil_div(n, TILE)
    _triangle_kernel[(count * across * across,)](t, scales, out, n, across, *t.stride(), *out.stride(), TILE)
    return out


@jit(do_not_specialize=["n", "across", "a_0", "a_1", "a_2", "out_0", "out_2"])
def _symmetric_kernel(
    a, scales, out, n, across, a_0, a_1, a_2, out_0, out_2, TILE: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0)
    tile = place % (across * across)
    if not WHOLE:  # noqa: SIM102  (known when it is compiled, unlike the next)
        if tile % across < tile // across:
            return
    batch = (place // (across * across)).to(tl.int64)
    i = (tile % across) * TILE + tl.arange(0, TILE)[:, None]
    j = (tile // across) * TILE + tl.arange(0, TILE)[None, :]
    inside = (i < n) & (j < n)
    row, column = tl.maximum(i, j).to(tl.int64), tl.minimum(i, j).to(tl.int64)
    x = tl.load(a + batch * a_0 + row * a_1 + column * a_2, mask=inside, other=0.0)
    x = x.to(out.dtype.element_ty)
    x = x * tl.load(scales + batch * n + i, mask=i < n, other=0.0)
    x = x * tl.load(scales + batch * n + j, mask=j < n, other=0.0)
    tl.store(out + batch * out_0 + i + j.to(tl.int64) * out_2, x, mask=inside)


@jit(do_not_specialize=["n", "across", "t_0", "out_0"])
def _triangle_kernel(
    t, scales, out, n, across, t_0, t_1, t_2, out_0, out_1, out_2, TILE: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0)
    tile = place % (across * across)
    batch = (place // (across * across)).to(tl.int64)
    i = (tile % across) * TILE + tl.arange(0, TILE)[:, None]
    j = (tile // across) * TILE + tl.arange(0, TILE)[None, :]
    inside = (i < n) & (j < n)
    i_wide, j_wide = i.to(tl.int64), j.to(tl.int64)
    x = tl.load(t + batch * t_0 + i_wide * t_1 + j_wide * t_2, mask=inside & (j <= i), other=0.0)
    scale = tl.load(scales + batch * n + i, mask=i < n, other=1.0)
    x = (x.to(scales.dtype.element_ty) / scale).to(out.dtype.element_ty)
    tl.store(out + batch * out_0 + i_wide * out_1 + j_wide * out_2, x, mask=inside)
