"""Gradients of solutions within bounds: those of least squares on the unknowns between their bounds.

Near a solution whose other unknowns are pushed against their bounds the same unknowns stay free, and x is a
smooth function of A and b: ``x = x0 + G^-1 A^T (b - A x0)``, with the rows and columns of free unknowns of
``G = A^T A``, is that function exactly, wherever x0 is.
"""

from __future__ import annotations

import torch

from neula.algorithms.scaling import power_of_two_scales


def attach_bounded(free: torch.Tensor, a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Solutions attached to the graphs of A and b, with derivatives of any order.

    Parameters
    ----------
    free : Tensor of bool, shape (..., n, k)
        Which unknowns are between their bounds.
    a : Tensor, shape (..., m, n)
    b : Tensor, shape (..., m, k)
    x : Tensor, shape (..., n, k)

    Returns
    -------
    Tensor, shape (..., n, k)
        The same numbers.

    Raises
    ------
    ValueError
        If columns of free unknowns are dependent, so that x has no derivatives.

    Examples
    --------
    >>> a = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    >>> b, x = torch.tensor([[2.0], [1.0], [-1.0]]), torch.tensor([[1.5], [0.0]])
    >>> torch.autograd.grad(attach_bounded(x > 0, a, b, x).sum(), a)[0][:, 0]
    tensor([-0.5000, -1.0000, -0.5000])
    """
    if not x.numel() or not a.numel():  # it does not depend on the numbers
        return x + 0 * a.sum() + 0 * b.sum()
    wide, x0 = a.double(), x.detach().double()
    scales = power_of_two_scales(wide.detach().abs().nan_to_num().amax(-2))[..., None, :]
    wide = wide * scales
    left = b.double() - wide @ (x0 / scales.mT)
    # A matrix for each right-hand side: one where an unknown is not free.
    mask = free.mT.double()
    gram = mask[..., None] * (wide.mT @ wide)[..., None, :, :] * mask[..., None, :] + torch.diag_embed(
        1 - mask
    )
    lower, info = torch.linalg.cholesky_ex(gram)
    if bool(((info > 0) & x0.isfinite().all(-2)).any()):
        raise ValueError(
            "columns of unknowns between their bounds are dependent, and solutions have no gradient there: "
            "leave columns out, or solve under torch.no_grad()"
        )
    gradient = (mask * (wide.mT @ left).mT)[..., None]
    step = scales.mT * torch.cholesky_solve(gradient, lower)[..., 0].mT
    return x + (step - step.detach()).to(x.dtype)
