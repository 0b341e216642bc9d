"""Gradients of the polar decomposition: answers are attached to the graph of A, as in
:mod:`neula.pipeline.gradients`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function


def attach_polar(
    a: torch.Tensor, u: torch.Tensor, side: str | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """U, and H of one side, of ``A = U H`` or ``A = H U`` with the gradient of A.

    Of a tall A ``dA = U Y + (I - U U^T) dU H^-1``, where Y solves ``H Y + Y H = U^T dU - dU^T U``: only sums
    of singular values are divided by [1]_. H is ``(U^T A + A^T U) / 2``, differentiated as such.

    Parameters
    ----------
    a : Tensor, shape (..., m, n)
        Of full rank.
    u : Tensor, shape (..., m, n)
    side : {"right", "left"} or None

    Returns
    -------
    u : Tensor, shape (..., m, n)
        At least float32.
    h : Tensor or None

    References
    ----------
    .. [1] C. S. Kenney, A. J. Laub, "Polar decomposition and matrix sign function condition estimates", SIAM
       J. Sci. Stat. Comput. 12, 1991.

    Examples
    --------
    >>> import torch
    >>> from neula.pipeline.polar_gradients import attach_polar
    >>> A = torch.tensor([[3.0], [4.0]], requires_grad=True)
    >>> U, H = attach_polar(A, torch.tensor([[0.6], [0.8]]), "right")
    >>> torch.autograd.grad(H.sum(), A)[0].flatten()  # H is the norm of A
    tensor([0.6000, 0.8000])
    """
    dtype = torch.promote_types(u.dtype, torch.float32)
    a = a.to(u.device, dtype)
    wide = a.shape[-2] < a.shape[-1]
    u = _Polar.apply(a.mT, u.to(dtype).mT).mT if wide else _Polar.apply(a, u.to(dtype))
    if side is None:
        return u, None
    with torch.autocast(u.device.type, enabled=False):
        h = u.mT @ a if side == "right" else a @ u.mT
    return u, (h + h.mT) / 2


class _Polar(Function):
    @staticmethod
    def forward(a: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return u.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        a, u = ctx.saved_tensors
        with torch.autocast(a.device.type, enabled=False):
            found = _gradient_of_matrix(a.double(), u.double(), gradient.double())
        return found.to(a.dtype), None


def _gradient_of_matrix(a: torch.Tensor, u: torch.Tensor, du: torch.Tensor) -> torch.Tensor:
    h = u.mT @ a
    h = (h + h.mT) / 2
    inner = u.mT @ du
    y = _Lyapunov.apply(h, inner - inner.mT)
    return u @ y + torch.linalg.solve(h, du - u @ inner, left=False)


class _Lyapunov(Function):
    """Y of ``H Y + Y H = K`` for a symmetric positive definite H: linear in K, and its own adjoint."""

    @staticmethod
    def forward(h: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        values, vectors = torch.linalg.eigh(h)
        sums = values[..., :, None] + values[..., None, :]
        return vectors @ ((vectors.mT @ k @ vectors) / sums) @ vectors.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h, y = ctx.saved_tensors
        z = _Lyapunov.apply(h, gradient)
        return -(z @ y.mT + y.mT @ z), z
