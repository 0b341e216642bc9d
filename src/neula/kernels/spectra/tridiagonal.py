"""Reduction of batches of Hermitian matrices to real tridiagonal ones, and eigenvectors of these."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from neula.kernels.cuda_source import compiled
from neula.kernels.dispatch import kernel, trial
from neula.kernels.launch import ceil_div, multiprocessors
from neula.kernels.precision import exactly

PANEL = 16
"""Columns whose reflectors are applied to the trailing matrix together; 32 take 5 % less time, and orders
up to 3500, not 4300, fit into the shared memory of an H200."""

BLOCKS = (1, 2, 4, 8)
"""Thread blocks that may share a matrix; a cluster of 8 is what every GPU with clusters allows."""

CLUSTERS = (9, 0)
"""Compute capability from which on thread blocks form clusters."""

THREADS, MOST_THREADS = 256, 512
"""Threads of a block, where all multiprocessors have one and where some have none."""

ROWS = 64
"""Rows of a matrix for each of its thread blocks, at least."""

NEGLIGIBLE = 2.0**-100
"""Sum of squares up to which elements to be eliminated are taken as zero, where the largest of a matrix are
near 1. Squares below ``2^-126`` have fewer digits, which would make reflectors that are not orthogonal."""

WORKSPACE = 1 << 26
"""Elements of the workspaces for eigenvectors, each in double precision."""


class Tridiagonal(NamedTuple):
    """``A = Q T Q^H`` of Hermitian matrices of shape (batch, n, n), with a real tridiagonal T."""

    # Shape (batch, n, n): row j, zero up to the diagonal, is the vector of a reflector I - factor v v^H. The
    # product of all is Q. A vector is zero where its factor is.
    vectors: torch.Tensor
    factors: torch.Tensor  # shape (batch, n)
    diagonal: torch.Tensor  # shape (batch, n), real
    off_diagonal: torch.Tensor  # likewise; the last element is 0


@trial("The kernel that reduces matrices to tridiagonal form", "another method decomposes them")
def _tried(device: torch.device, variant: int) -> None:
    parts, place = divmod(variant, len(BLOCKS))
    a = torch.eye(3, dtype=(torch.float32, torch.complex64)[parts], device=device)[None]
    _reduced(a, BLOCKS[place])


@trial("The kernels for eigenvectors of tridiagonal matrices", "cuSOLVER decomposes them")
def _tried_vectors(device: torch.device) -> None:
    one = torch.ones(1, 2, dtype=torch.float64, device=device)
    tridiagonal_eigenvectors.kernel(one / 4, one / 4)


def _takes(a: torch.Tensor) -> bool:
    return a.numel() > 0 and a.dtype in (torch.float32, torch.complex64) and blocks_for(a) > 0


def blocks_for(a: torch.Tensor) -> int:
    """Thread blocks for each matrix of a batch on a GPU; 0 where their shared memory is too small."""
    return _blocks_for_shape(len(a), a.shape[1], a.dtype, a.device)


@lru_cache(maxsize=256)  # asked three times a call
def _blocks_for_shape(count: int, n: int, dtype: torch.dtype, device: torch.device) -> int:
    """Thread blocks for each of ``count`` matrices of order n.

    The fewest with which half of the multiprocessors have a block and each has shared memory for two: one
    computes while the other waits. Without such a number, the most that are possible.
    """
    most = shared_memory(device)
    allowed = BLOCKS if torch.cuda.get_device_capability(device) >= CLUSTERS else BLOCKS[:1]
    possible = [x for x in allowed if shared_bytes(n, dtype, x) <= most and (x == 1 or x * ROWS <= n)]
    good = (
        x
        for x in possible
        if 2 * count * x >= multiprocessors(device) and 2 * shared_bytes(n, dtype, x) <= most
    )
    return next(good, max(possible, default=0))


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Shared memory that a thread block may have."""
    properties: Any = torch.cuda.get_device_properties(device)
    found: int = properties.shared_memory_per_block_optin
    return found


def shared_bytes(active: int, dtype: torch.dtype, blocks: int, threads: int = MOST_THREADS) -> int:
    """Dynamic shared memory of a thread block for a trailing matrix of this order."""
    size, warps = dtype.itemsize, threads // 32
    chunk = 512 // size
    chunks, own = ceil_div(active, chunk), ceil_div(active, blocks)
    most = chunks // blocks + 1
    of_product = (chunks + 1) * chunk + active + most * active + warps * most * chunk
    return size * (of_product + 2 * PANEL * own + 4 * PANEL + 3 + warps)


@kernel(
    "tridiagonal_cuda",
    trial=_tried,
    when=_takes,
    variant=lambda a: a.is_complex() * len(BLOCKS) + BLOCKS.index(blocks_for(a)),
    or_complex=True,
)
def tridiagonal(a: torch.Tensor) -> Tridiagonal:
    """Reduce Hermitian matrices (batch, n, n) to tridiagonal form by Householder reflectors.

    Golub and Van Loan, "Matrix Computations", 2013, algorithm 8.3.1. The largest elements of each matrix are
    near 1, or all are zero. The kernel reads both triangles.
    """
    n, rest = a.shape[1], a.clone()
    vectors, factors = torch.zeros_like(a), a.new_zeros(a.shape[:2])
    off_diagonal = a.real.new_zeros(a.shape[:2])
    for j in range(n - 1):
        x = rest[:, j + 1 :, j].clone()
        length = torch.linalg.vector_norm(x, dim=1)
        alpha = x[:, 0].clone()
        squares = x[:, 1:].abs().square().sum(1)
        if a.is_complex():
            squares += alpha.imag.square()
        needed = squares > NEGLIGIBLE
        beta = torch.where(needed, torch.where(alpha.real > 0, -length, length), alpha.real)
        x[:, 0] -= beta
        v = torch.where(needed[:, None], x / torch.where(needed, x[:, 0], 1.0)[:, None], 0.0)
        factor = torch.where(needed, (beta - alpha) / torch.where(needed, beta, 1.0), 0.0)[:, None]
        w = factor * (rest[:, j + 1 :, j + 1 :] @ v[:, :, None])[:, :, 0]
        w = w - factor * (w.conj() * v).sum(1, keepdim=True) * v / 2
        outer = v[:, :, None] * w[:, None].conj()
        rest[:, j + 1 :, j + 1 :] -= outer + outer.mH
        vectors[:, j, j + 1 :], factors[:, j], off_diagonal[:, j] = v, factor[:, 0], beta
    return Tridiagonal(vectors, factors, rest.diagonal(0, 1, 2).real.clone(), off_diagonal)


def tridiagonal_cuda(a):
    return _reduced(a.resolve_conj(), blocks_for(a))


def _reduced(a: torch.Tensor, blocks: int) -> Tridiagonal:
    count, n, _ = a.shape
    wide = 16 // a.element_size()
    rest = a.new_zeros(count, n, ceil_div(n, wide) * wide)
    rest[..., :n] = a
    vectors, factors, panel = a.new_zeros(a.shape), a.new_empty(count, n), a.new_empty(count, 3 * PANEL, n)
    diagonal, off_diagonal = (a.real.new_empty(count, n) for _ in range(2))
    exchanged = a.new_empty(count, n + blocks * (2 * PANEL + 2 + n))
    macros = {"PARTS": 1 + a.is_complex(), "BLOCKS": blocks, "PANEL": PANEL, "MOST_THREADS": MOST_THREADS}
    source = "".join(f"#define {name} {number}\n" for name, number in macros.items())
    # One limit for all orders: a lower one would hold for them, too.
    most = shared_memory(a.device)
    launch = compiled("tridiagonal", "tridiagonal_panel", a.device, source, shared_bytes=most)
    threads = THREADS if count * blocks > multiprocessors(a.device) else MOST_THREADS
    given = (rest, vectors, panel, factors, diagonal, off_diagonal, exchanged, n, rest.shape[2])
    for begin in range(0, n, PANEL):
        nbytes = shared_bytes(n - begin // wide * wide, a.dtype, blocks, threads)
        launch((count * blocks, 1, 1), (threads, 1, 1), [*given, begin], nbytes)
        if (end := begin + PANEL) < n:
            v_w, w_v, trailing = panel[:, : 2 * PANEL, end:], panel[:, PANEL:, end:], rest[:, end:, end:n]
            exactly(torch.baddbmm, trailing, v_w.mT, w_v.conj(), alpha=-1.0, out=trailing)
    return Tridiagonal(vectors, factors, diagonal, off_diagonal)


@kernel("tridiagonal_eigenvectors_cuda", trial=_tried_vectors)
def tridiagonal_eigenvectors(
    diagonal: torch.Tensor, off_diagonal: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ascending eigenvalues and eigenvectors of real symmetric tridiagonal matrices T.

    Shapes: diagonal, off_diagonal (batch, n), double precision, of which the last off-diagonal element has no
    meaning; the others are no smaller than ``2^-60``. Norms are at most 1, and eigenvalues are distinct:
    vectors of the kernel are orthogonal up to ``u / gap``. Returns w (batch, n), in double precision, and V
    (batch, n, n), in single precision.
    """
    below = torch.diag_embed(off_diagonal[:, :-1], -1)
    w, v = torch.linalg.eigh(torch.diag_embed(diagonal) + below + below.mT)
    return w, v.float()


def tridiagonal_eigenvectors_cuda(diagonal, off_diagonal, threads=128):
    count, n = diagonal.shape
    values, vectors = torch.empty_like(diagonal), diagonal.new_empty(count, n, n, dtype=torch.float32)
    blocks, source = ceil_div(n, 2 * threads), f"#define THREADS {threads}\n"
    launch, launch_vectors = (
        compiled("tridiagonal_eigen", f"tridiagonal_{name}", diagonal.device, source)
        for name in ("values", "vectors")
    )
    launch((count * blocks, 1, 1), (threads, 1, 1), [diagonal, off_diagonal.square(), values, n, blocks])
    blocks = ceil_div(n, threads)
    together = min(count, max(1, WORKSPACE // n**2))
    down, up = (diagonal.new_empty(together, n, n) for _ in range(2))
    parts = (x.split(together) for x in (diagonal, off_diagonal, values, vectors))
    for d, e, w, v in zip(*parts, strict=True):
        launch_vectors((len(d) * blocks, 1, 1), (threads, 1, 1), [d, e, w, down, up, v, n, blocks])
    return values, vectors
