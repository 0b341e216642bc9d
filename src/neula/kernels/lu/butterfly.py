"""Recursive butterflies: rows that are mixed in fours, each four by a matrix of its own, in one launch."""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial

WAYS = 4
"""Rows that are mixed with each other: those at one place in each quarter."""

_BLOCK = 1 << 24
"""Elements that the reference mixes at a time: temporaries are small compared with the matrix."""


@trial("The kernel of butterflies", "the library's operations take several times as long")
def _tried(device: torch.device, itemsize: int) -> None:
    x = torch.ones(WAYS, 1, dtype=torch.float64 if itemsize == 8 else torch.float32, device=device)
    mixed.kernel(x, x, torch.ones(WAYS, WAYS, 1, dtype=torch.float64, device=device))


def _exact(out: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> bool:
    return x.dtype == out.dtype and x.dtype in (torch.float32, torch.float64) and x.numel() > 0


@kernel(
    "neula.kernels.lu.butterfly_triton:mixed_triton",
    trial=_tried,
    when=_exact,
    variant=lambda out, x, weights: x.dtype.itemsize,
)
def mixed(out: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``out[q h + i] = sum_p weights[q, p, i] x[p h + i]`` for rows of x, of which there are up to ``4 h``.

    Parameters
    ----------
    out : Tensor, shape (l, k), l <= 4 h
        The first rows of the result; overwritten. It may be x.
    x : Tensor, shape (m, k), m <= 4 h
        Of any strides; rows that are lacking are zero.
    weights : Tensor, shape (4, 4, h)

    Returns
    -------
    Tensor, shape (l, k)
        ``out``.

    Examples
    --------
    >>> x = torch.tensor([[1.0], [2.0], [3.0]])
    >>> mixed(torch.empty(4, 1), x, torch.ones(4, 4, 1)).T
    tensor([[6., 6., 6., 6.]])
    """
    if x.is_complex():
        for part, target in ((x.real, out.real), (x.imag, out.imag)):
            mixed(target, part, weights)
        return out
    order = WAYS * weights.shape[-1]
    weights = weights.to(x.dtype)[..., None]
    width = max(1, _BLOCK // max(1, order))
    for target, block in zip(out.split(width, 1), x.split(width, 1), strict=True):
        rows = torch.nn.functional.pad(block, (0, 0, 0, order - len(x))).unflatten(0, (WAYS, -1))
        found = torch.stack([(weight * rows).sum(0) for weight in weights])
        target.copy_(found.flatten(0, 1)[: len(out)])
    return out
