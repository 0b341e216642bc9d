"""Steps of Lanczos between products: orthogonalize a vector, and find extreme Ritz values."""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.launch import next_power_of_2
from neula.kernels.polar.svd import converged_eigvalsh
from neula.kernels.precision import exact_matmul
from neula.kernels.triton_source import jit, tl

MOST = 16
"""Largest number of steps of the kernels."""

NEW = 1e-3
"""Reduction of an image's length below which the remainder is rounding errors, not a new direction."""


@trial("The kernel of Lanczos steps", "library calls take its place, many times slower")
def _tried(device: torch.device) -> None:
    basis = torch.ones(1, 2, 1, dtype=torch.float32, device=device)
    advance.kernel(torch.ones(1, 1, dtype=torch.float32, device=device), basis, 0)


@kernel(
    "advance_triton",
    trial=_tried,
    when=lambda image, basis, step: basis.shape[1] <= MOST and basis.numel() > 0,
)
def advance(image: torch.Tensor, basis: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Orthogonalize the image (batch, k) of the last basis vector against all of them, and make it the next
    one.

    ``basis`` (batch, steps, k) is read up to the vector of this step, and the next one is written, where
    there is room for it: zero where an invariant subspace was found. Returns the new elements of the
    tridiagonal matrix, on the diagonal and next to it.

    Examples
    --------
    >>> basis = torch.zeros(1, 2, 3)
    >>> basis[0, 0, 0] = 1.0
    >>> advance(torch.tensor([[2.0, 3.0, 4.0]]), basis, 0)
    (tensor([2.]), tensor([5.]))
    >>> basis[0, 1]
    tensor([0.0000, 0.6000, 0.8000])
    """
    known = basis[:, : step + 1]
    size = torch.linalg.vector_norm(image, dim=1)
    diagonal = (known[:, step].conj() * image).sum(1).real
    for _ in range(2):
        image = image - exact_matmul(exact_matmul(known.conj(), image[..., None]).mT, known)[:, 0]
    length = torch.linalg.vector_norm(image, dim=1)
    off_diagonal = torch.where(length <= NEW * size, 0.0, length)
    if step + 1 < basis.shape[1]:
        basis[:, step + 1] = image * torch.where(off_diagonal == 0, 0.0, 1 / off_diagonal)[:, None]
    return diagonal, off_diagonal


def extreme_values(diagonal: torch.Tensor, off_diagonal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest eigenvalues, float64, of tridiagonal matrices; NaN where these are not finite. The
    last off-diagonal element is not read.

    Examples
    --------
    >>> extreme_values(torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
    (tensor([0.], dtype=torch.float64), tensor([2.], dtype=torch.float64))
    """
    d, b = diagonal.double(), off_diagonal[:, :-1].double()
    usable = torch.cat([d, b], 1).isfinite().all(1)[:, None]
    d, b = torch.where(usable, d, 0.0), torch.diag_embed(torch.where(usable, b, 0.0), -1)
    values = torch.where(usable, converged_eigvalsh(torch.diag_embed(d) + b + b.mT), torch.nan)
    return values[:, 0], values[:, -1]


LENGTH = 1024
"""Elements of a vector that are read at a time."""


def advance_triton(image, basis, step):
    batch, steps, k = basis.shape
    found = image.new_empty(2, batch)
    _advance[(batch,)](
        *(image, basis, found, batch, k, steps, step, NEW),
        *(MOST, min(LENGTH, next_power_of_2(k))),
        num_warps=8,
    )
    return found[0], found[1]


@jit(do_not_specialize=["batch", "k", "steps", "step"])
def _advance(
    image, basis, found, batch, k, steps, step, NEW,
    MOST: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(0)
    image += matrix.to(tl.int64) * k
    basis += matrix.to(tl.int64) * steps * k
    place, row = tl.arange(0, LENGTH), tl.arange(0, MOST)[:, None]
    wide = image.dtype.element_ty
    first = tl.zeros((MOST,), wide)
    square = tl.zeros((LENGTH,), wide)
    for start in range(0, k, LENGTH):
        i = start + place
        x = tl.load(image + i, mask=i < k, other=0.0)
        v = tl.load(basis + row * k + i[None, :], mask=(row <= step) & (i[None, :] < k), other=0.0)
        first += tl.sum(v * x[None, :], axis=1)
        square += x * x
    second = tl.zeros((MOST,), wide)
    for start in range(0, k, LENGTH):
        i = start + place
        x = tl.load(image + i, mask=i < k, other=0.0)
        v = tl.load(basis + row * k + i[None, :], mask=(row <= step) & (i[None, :] < k), other=0.0)
        x -= tl.sum(v * first[:, None], axis=0)
        second += tl.sum(v * x[None, :], axis=1)
        tl.store(image + i, x, mask=i < k)
    tl.debug_barrier()
    left = tl.zeros((LENGTH,), wide)
    for start in range(0, k, LENGTH):
        i = start + place
        x = tl.load(image + i, mask=i < k, other=0.0)
        v = tl.load(basis + row * k + i[None, :], mask=(row <= step) & (i[None, :] < k), other=0.0)
        x -= tl.sum(v * second[:, None], axis=0)
        left += x * x
        tl.store(image + i, x, mask=i < k)
    tl.debug_barrier()
    size, length = tl.sqrt(tl.sum(square, axis=0)), tl.sqrt(tl.sum(left, axis=0))
    off_diagonal = tl.where(length <= NEW * size, 0.0, length)
    inverse = tl.where(off_diagonal == 0.0, 0.0, 1.0 / off_diagonal)
    tl.store(found + matrix, tl.sum(tl.where(tl.arange(0, MOST) == step, first, 0.0), axis=0))
    tl.store(found + batch + matrix, off_diagonal)
    if step + 1 < steps:
        for start in range(0, k, LENGTH):
            i = start + place
            x = tl.load(image + i, mask=i < k, other=0.0)
            tl.store(basis + (step + 1) * k + i, x * inverse, mask=i < k)
