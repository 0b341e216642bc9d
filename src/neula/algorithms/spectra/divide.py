"""Eigenvectors of Hermitian matrices by products: spectral divide and conquer, then corrections.

The polar factor of ``A - sigma I`` is its sign, and ``P = (sign + I) / 2`` projects onto the eigenvectors
whose eigenvalues exceed sigma (Nakatsukasa and Higham, "Stable and efficient spectral divide and conquer
algorithms for the symmetric eigenvalue decomposition and the SVD", 2013). A QR factorization of
``[P G1, (I - P) G2]`` with random G has bases of both invariant subspaces, in which A falls into two blocks.
Products need not be accurate: what they leave between the blocks is corrected afterwards.

:func:`corrected` sorts eigenvalues, diagonalizes blocks of neighbours directly, and removes all other
elements beside the diagonal to first order, which squares their size (Ogita and Aishima, "Iterative
refinement for symmetric eigenvalue decomposition", 2018).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from neula.algorithms.polar.iteration import polar_factor, taken_on
from neula.algorithms.polar.polynomials import TOUCHING_ONE, composition
from neula.certificates.polar import lanczos
from neula.engines import Engine
from neula.engines.random_vectors import gaussian
from neula.kernels.magnitudes import two_norms
from neula.kernels.polar.svd import converged_eigh
from neula.kernels.precision import exact_matmul

Map = Callable[[torch.Tensor], torch.Tensor]


def sign(a: torch.Tensor, rough: Engine, exact: Engine) -> torch.Tensor:
    """Unitary polar factors of Hermitian matrices, shape (batch, n, n), in symmetric products.

    Polynomials in half precision take singular values near 1, and one more step in the accurate arithmetic
    makes that a projector: the QR factorization that follows would amplify what is left of it up to n times.
    Eigenvalues near sigma go to +-1 last. Polynomials are applied until all are there.

    Parameters
    ----------
    a : Tensor, shape (batch, n, n)
    rough, exact : Engine
    """
    n = a.shape[1]
    steps = partial(composition, error=1e-3, margin=2.0**-9)
    sizes = two_norms(a, 1, 2)
    scales = torch.where(sizes > 0, n**0.5 / sizes, 1.0).to(a.dtype.to_real())  # Gram matrices fit, too
    x, _ = polar_factor(rough.parts(a, scales), steps(min(7e-4, 0.25 / n)), rough, hermitian=True)
    for again in range(4):
        if again:
            x = taken_on(rough.parts(0.99 * found), steps(0.02), rough, hermitian=True)
        x = taken_on(exact.parts(rough.joined(x)), [TOUCHING_ONE], exact, hermitian=True)
        found = exact.joined(x)
        missing = n - two_norms(found, 2).double().square().sum(1)
        if not bool((missing > 0.01).any()):  # NaN is not repaired
            break
    return found


def divide(a: torch.Tensor, sign: Map, orthonormal: Map, width: int, engine: Engine) -> torch.Tensor:
    """Approximate eigenvectors of Hermitian matrices.

    Parameters
    ----------
    a : Tensor, shape (batch, n, n)
        In the storage precision of the engine, with elements of at most 1.
    sign : callable
        Unitary polar factors of Hermitian matrices, shape (batch, n, n).
    orthonormal : callable
        Orthonormal bases for the columns of nonsingular matrices: Q of a QR factorization.
    width : int
        Order up to which matrices are left to the library.
    engine : Engine

    Returns
    -------
    Tensor, shape (batch, n, n)
        Orthonormal to the accuracy of the engine.
    """
    sizes = torch.full((len(a),), a.shape[1], device=a.device)
    alike = 8 * torch.finfo(a.dtype).eps * two_norms(a, 1, 2)  # rounding errors of products
    deep = 2 + max(0, (a.shape[1] - 1) // width).bit_length()
    return _Tree(sign, orthonormal, width, engine).vectors(a, sizes, alike, deep)


def product(x: torch.Tensor, y: torch.Tensor, engine: Engine) -> torch.Tensor:
    """Products of batches in the arithmetic of an engine."""
    return engine.joined(engine.product(engine.parts(x), engine.parts(y)))


@dataclass(frozen=True)
class _Tree:
    """Splits of batches of leading blocks, whose orders differ; unit vectors lie beyond these."""

    sign: Map
    orthonormal: Map
    width: int
    engine: Engine

    def vectors(self, a: torch.Tensor, sizes: torch.Tensor, alike: torch.Tensor, deep: int) -> torch.Tensor:
        """Eigenvectors.

        Parameters
        ----------
        a : Tensor, shape (batch, n, n)
        sizes : Tensor, shape (batch,)
            Orders of the blocks.
        alike : Tensor, shape (batch,)
            Eigenvalues that differ by no more are equal.
        deep : int
            Splits one after the other that may follow: a good one leaves half of the order.
        """
        count, n, _ = a.shape
        place = torch.arange(n, device=a.device)
        inside = place < sizes[:, None]
        a = torch.where(inside[:, :, None] & inside[:, None], a, 0.0)
        if n <= self.width or deep == 0:
            # Beyond all eigenvalues: they come last.
            far = torch.where(inside, 0.0, 2 * two_norms(a, 1, 2)[:, None] + 1)
            return converged_eigh(a + torch.diag_embed(far.to(a.dtype)))[1]
        mean = a.diagonal(0, 1, 2).real.sum(1) / sizes.clamp_min(1)
        same = two_norms(a - torch.diag_embed((mean[:, None] * inside).to(a.dtype)), 1, 2) <= alike
        same |= sizes <= 1
        if bool(same.all()):
            return torch.eye(n, dtype=a.dtype, device=a.device).expand_as(a)
        bases, ranks = self._split(a, inside, sizes, same)
        inner = product(bases.mH, product(a, bases, self.engine), self.engine)
        half = int(torch.maximum(ranks, sizes - ranks).max())
        # The second block of each matrix is moved to the front.
        moved = (place[:half] + ranks[:, None]).clamp(max=n - 1)
        second = inner.gather(1, moved[:, :, None].expand(-1, -1, n))
        second = second.gather(2, moved[:, None].expand(-1, half, -1))
        parts = torch.cat([inner[:, :half, :half], second])
        orders, alike = torch.cat([ranks, sizes - ranks]), torch.cat([alike, alike])
        found = self.vectors((parts + parts.mH) / 2, orders, alike, deep - 1).split(count)
        return product(bases, _joined(found[0], found[1], ranks, sizes, n), self.engine)

    def _split(
        self, a: torch.Tensor, inside: torch.Tensor, sizes: torch.Tensor, same: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Orthonormal columns, and how many span an invariant subspace; the next ones span another.

        Of a multiple of the identity any subspace is invariant, and of others without a split none is known.
        """
        n, place = a.shape[1], torch.arange(a.shape[1], device=a.device)
        eye = torch.eye(n, dtype=a.dtype, device=a.device)
        sigma = _middle(a, inside, self.engine)[:, None].to(a.dtype.to_real())
        shifted = a - torch.diag_embed((sigma * inside).to(a.dtype))
        # Rows beyond the block have the sign +1, and an eigenvalue of its size.
        size = two_norms(shifted, 1, 2) / sizes.clamp_min(1).sqrt()
        shifted += torch.diag_embed(torch.where(inside, 0.0, size[:, None]).to(a.dtype))
        first = torch.diag_embed((place < (sizes // 2)[:, None]).to(a.dtype))
        projector = (self.sign(torch.where(same[:, None, None], 2 * first - eye, shifted)) + eye) / 2
        counts = (projector.diagonal(0, 1, 2).real * inside).sum(1).round().long()
        none = (counts <= 0) | (counts >= sizes)
        ranks = torch.where(none, sizes // 2, counts)
        projector = torch.where(none[:, None, None], first, projector)
        g = torch.where(inside[:, :, None], gaussian(n, n, a.dtype, a.device, seed=n) / n**0.5, 0.0)
        image = product(projector, g, self.engine)
        columns = torch.where((place < ranks[:, None])[:, None], image, g - image)
        return self.orthonormal(torch.where(inside[:, None], columns, eye)), ranks


def _joined(
    upper: torch.Tensor, lower: torch.Tensor, ranks: torch.Tensor, sizes: torch.Tensor, n: int
) -> torch.Tensor:
    """Block diagonal matrices of order n: leading blocks of two batches, and ones beyond."""
    half = upper.shape[1]
    place = torch.arange(n, device=upper.device)
    back = (place - ranks[:, None]).clamp(0, half - 1)
    second = lower.gather(1, back[:, :, None].expand(-1, -1, half)).gather(2, back[:, None].expand(-1, n, -1))
    first = torch.nn.functional.pad(upper, (0, n - half, 0, n - half))
    in_first, inside = place < ranks[:, None], place < sizes[:, None]
    in_second = ~in_first & inside
    found = torch.where(in_first[:, :, None] & in_first[:, None], first, 0.0)
    found = torch.where(in_second[:, :, None] & in_second[:, None], second, found)
    return found + torch.diag_embed((~inside).to(found.dtype))


def _middle(a: torch.Tensor, inside: torch.Tensor, engine: Engine) -> torch.Tensor:
    """A number between two eigenvalues near the median, shape (batch,), by Gauss quadrature.

    Ritz values converge to clusters, and a mean of two lies between these (Golub and Meurant, "Matrices,
    Moments and Quadrature", 2010).
    """
    n = a.shape[1]
    start = torch.where(inside[:, :, None], gaussian(n, 1, a.dtype, a.device, seed=n + 1), 0.0)
    parts = engine.parts(a)
    found = lanczos(lambda v: engine.thin(parts, v), start, min(12, n)).numbers
    diagonal, beside = (x.double().nan_to_num(0.0) for x in found)
    lower = torch.diag_embed(beside[:, :-1], -1)
    nodes, vectors = converged_eigh(torch.diag_embed(diagonal) + lower + lower.mT)
    below, gaps = vectors[:, 0].square().cumsum(1)[:, :-1], nodes.diff(dim=1)
    # Eigenvalues that are too near for the first polynomials would take more of them.
    clear = gaps >= (0.008 * (nodes[:, -1:] - nodes[:, :1])).minimum(gaps.amax(1, keepdim=True))
    best = torch.where(clear, (below - 0.5).abs(), 1.0).argmin(1, keepdim=True)
    return ((nodes.gather(1, best) + nodes.gather(1, best + 1)) / 2)[:, 0]


def corrected(
    a: torch.Tensor, v: torch.Tensor, width: int, engine: Engine
) -> tuple[torch.Tensor, torch.Tensor]:
    """Better eigenvalues and eigenvectors from approximate ones.

    Parameters
    ----------
    a : Tensor, shape (batch, n, n)
    v : Tensor, shape (batch, n, n)
    width : int
        Of blocks of neighbours.
    engine : Engine

    Returns
    -------
    w : Tensor, shape (batch, n)
        Rayleigh quotients, ascending.
    v : Tensor, shape (batch, n, n)
    """
    eye = torch.eye(v.shape[2], dtype=v.dtype, device=v.device)
    s = product(v.mH, product(a, v, engine), engine)
    s = (s + s.mH) / 2
    order = s.diagonal(0, 1, 2).real.argsort(1)
    v = v.gather(2, order[:, None].expand_as(v))
    s = s.gather(2, order[:, None].expand_as(s)).gather(1, order[:, :, None].expand_as(s))
    for offset in (0, width // 2):
        turns = _eigenvectors_of_blocks(s, width, offset)
        v, s = _turned(v, turns, offset), _turned(_turned(s, turns, offset).mH, turns, offset)
    e = eye - product(v.mH, v, engine)
    w = s.diagonal(0, 1, 2).real / (1 - e.diagonal(0, 1, 2).real)
    beside = s - torch.diag_embed(s.diagonal(0, 1, 2))
    gaps = w[:, None, :] - w[:, :, None]
    # Changes are at most a tenth, in sum; rounding errors of products are no reason for any.
    largest = w.abs().amax(1)
    error = two_norms(beside, 1, 2) + largest * two_norms(e, 1, 2)
    off = s + e * ((w[:, None, :] + w[:, :, None]) / 2)  # of orthonormal vectors
    noise = (4 * torch.finfo(v.dtype).eps * largest)[:, None, None]
    apart = (gaps.abs() > 10 * error[:, None, None]) & (off.abs() > noise)
    x = e / 2 + torch.where(apart, off / torch.where(apart, gaps, 1.0), 0.0)
    v = v + product(v, x, engine)
    w, order = w.sort(1)
    return w, v.gather(2, order[:, None].expand_as(v))


def _eigenvectors_of_blocks(s: torch.Tensor, width: int, offset: int) -> torch.Tensor:
    """Eigenvectors of diagonal blocks, shape (batch, blocks, width, width); the first ends at the offset.

    Where a block sticks out, unit vectors come before and after those of its inner part.
    """
    n = s.shape[1]
    before = -offset % width
    after = -(before + n) % width
    far = 4 * s.abs().amax() * width + 1
    s = torch.nn.functional.pad(s, (before, after, before, after))
    s.diagonal(0, 1, 2)[:, :before] = -far
    s.diagonal(0, 1, 2)[:, before + n :] = far
    blocks = s.unfold(1, width, width).unfold(2, width, width).diagonal(0, 1, 2).movedim(-1, 1)
    return converged_eigh(blocks)[1]


def _turned(x: torch.Tensor, turns: torch.Tensor, offset: int) -> torch.Tensor:
    """``X T`` for the block diagonal T of :func:`_eigenvectors_of_blocks`."""
    count, m, n = x.shape
    blocks, width = turns.shape[1:3]
    before = -offset % width
    x = torch.nn.functional.pad(x, (before, blocks * width - before - n))
    x = x.view(count, m, blocks, width).transpose(1, 2)
    return exact_matmul(x, turns).transpose(1, 2).reshape(count, m, -1)[:, :, before : before + n]
