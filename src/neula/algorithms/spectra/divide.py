"""Eigenvectors of Hermitian matrices by products: spectral divide and conquer, then corrections.

The polar factor of ``A - sigma I`` is its sign, and ``P = (I - sign) / 2`` projects onto the eigenvectors
whose eigenvalues are below sigma (Nakatsukasa and Higham, "Stable and efficient spectral divide and conquer
algorithms for the symmetric eigenvalue decomposition and the SVD", 2013). A QR factorization of
``[P G1, (I - P) G2]`` with random G has bases of both invariant subspaces, in which A falls into two blocks.
Products need not be accurate: what they leave between the blocks is corrected afterwards.

:func:`corrected` diagonalizes blocks of neighbours directly, and removes all other elements off the
diagonal to first order, which squares their size (Ogita and Aishima, "Iterative refinement for symmetric
eigenvalue decomposition", 2018).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from neula.algorithms.polar.iteration import norm_bound, polar_factor, taken_on
from neula.algorithms.polar.polynomials import TOUCHING_ONE, OddPolynomial, composition
from neula.certificates.polar import lanczos
from neula.engines import Engine
from neula.engines.random_vectors import gaussian
from neula.kernels.magnitudes import two_norms
from neula.kernels.polar.svd import converged_eigh
from neula.kernels.spectra.correction import correction, turned

Map = Callable[[torch.Tensor], torch.Tensor]


def first_signs(
    a: torch.Tensor, size: torch.Tensor, low_engine: Engine, exact: Engine
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unitary polar factors of Hermitian matrices in symmetric products, and whether eigenvalues are left
    that :func:`all_signs` takes to +-1; without synchronizing.

    Polynomials in half precision take singular values near 1, and one more step in the accurate arithmetic
    makes that a projector: the QR factorization that follows would amplify what is left of it up to n times.
    Eigenvalues near sigma go to +-1 last.

    Parameters
    ----------
    a : Tensor, shape (batch, n, n)
    size : Tensor, shape (batch,)
        Bounds on the 2-norms, above zero.
    low_engine, exact : Engine
    """
    nearest = 2.0 ** -max(10, (4 * a.shape[1]).bit_length())
    # With norms of about 16 elements are not too small for half precision, nor those of squares too large.
    x = low_engine.parts(a, 16 / size)
    x, _ = polar_factor(x, _steps(nearest), low_engine, size=torch.full_like(size, 16.0), hermitian=True)
    return _projecting(x, low_engine, exact)


def all_signs(found: torch.Tensor, low_engine: Engine, exact: Engine) -> torch.Tensor:
    """Signs from the first ones: polynomials are applied until no eigenvalue is left."""
    for _ in range(3):
        x = taken_on(low_engine.parts(0.99 * found), _steps(0.02), low_engine, hermitian=True)
        found, missing = _projecting(x, low_engine, exact)
        if not bool(missing):
            break
    return found


def _steps(nearest: float) -> tuple[OddPolynomial, ...]:
    return composition(nearest, error=1e-3, margin=2.0**-9)


def _projecting(x: torch.Tensor, low_engine: Engine, exact: Engine) -> tuple[torch.Tensor, torch.Tensor]:
    """The last, accurate step, and whether eigenvalues are left that it did not take to +-1."""
    x = taken_on(exact.parts(low_engine.joined(x)), [TOUCHING_ONE], exact, hermitian=True)
    found = exact.joined(x)
    missing = found.shape[1] - two_norms(found, 2).double().square().sum(1)
    return found, (missing > 0.01).any()  # NaN is not repaired


def divide(a: torch.Tensor, orthonormal: Map, width: int, exact: Engine, low_engine: Engine) -> torch.Tensor:
    """Approximate eigenvectors of Hermitian matrices, about in the order of ascending eigenvalues.

    ``a``, shape (batch, n, n): in the storage precision of the engines, with elements of at most 1.
    ``orthonormal``: roughly orthonormal bases for the columns of nonsingular matrices: Q of a QR
    factorization. ``width``: order up to which matrices are decomposed directly. ``low_engine``: multiplies
    where errors are corrected in the end, ``exact`` elsewhere. Returns shape (batch, n, n): orthonormal up to
    errors of about 0.001.
    """
    sizes = torch.full((len(a),), a.shape[1], device=a.device)
    tolerance = 8 * torch.finfo(a.dtype).eps * two_norms(a, 1, 2)  # rounding errors of products
    depth = 2 + ((a.shape[1] - 1) // width).bit_length()
    return _Tree(orthonormal, width, exact, low_engine).vectors(a, sizes, tolerance, depth)


def product(x: torch.Tensor, y: torch.Tensor, engine: Engine) -> torch.Tensor:
    return engine.wide(engine.parts(x), engine.parts(y))


def _congruent(v: torch.Tensor, a: torch.Tensor, engine: Engine) -> torch.Tensor:
    """``V^H A V`` of Hermitian matrices A in parts."""
    rows = engine.parts(v.mH)
    found = engine.joined(engine.across(engine.product(rows, a), rows))
    return (found + found.mH) / 2 if engine.is_complex else found


def orthonormalized(v: torch.Tensor, exact: Engine, low_engine: Engine) -> torch.Tensor:
    """Nearly orthonormal columns after one step of Newton and Schulz, which squares what they lack; the
    change is small, and need not be accurate.
    """
    n, rows = v.shape[2], exact.parts(v.mH)
    lost = exact.joined(exact.across(rows, rows, factor=-0.5, shift=0.5))
    size = two_norms(lost, 1, 2).clamp_min(1e-30)
    change = low_engine.wide(low_engine.parts(v), low_engine.parts(lost, n**0.5 / size))
    return v.addcmul(change, (size / n**0.5)[:, None, None])


@dataclass(frozen=True)
class _Tree:
    """Splits of batches of leading blocks, whose orders differ; matrices are zero beyond them."""

    orthonormal: Map
    width: int
    exact: Engine
    low_engine: Engine

    def vectors(
        self, a: torch.Tensor, sizes: torch.Tensor, tolerance: torch.Tensor, depth: int
    ) -> torch.Tensor:
        """Eigenvectors of the blocks; columns beyond their orders have no meaning.

        Shapes: a (batch, n, n). ``sizes``, shape (batch,): orders of the blocks. ``tolerance``, shape
        (batch,): eigenvalues that differ by no more are equal. ``depth``: splits one after the other that may
        follow: a good one leaves half of the order.
        """
        n = a.shape[1]
        inside = torch.arange(n, device=a.device) < sizes[:, None]
        if n <= self.width or depth == 0:
            # Beyond all eigenvalues: they come last.
            far = torch.where(inside, a.diagonal(0, 1, 2).real, 2 * two_norms(a, 1, 2)[:, None] + 1)
            return _eigenvectors(_with_diagonal(a, far))
        key = "signs", self.low_engine.arithmetic.name, self.exact.arithmetic.name
        diagonal, signs, state = self.exact.replay(self._signs, (a, sizes, tolerance), key)
        missing, scalar = state.tolist()
        if scalar:
            return torch.eye(n, dtype=a.dtype, device=a.device).expand_as(a)
        if missing:
            signs = all_signs(signs, self.low_engine, self.exact)
        bases, ranks = self._split(signs, inside, sizes)
        inner = _congruent(bases, self.exact.parts(_with_diagonal(a, diagonal)), self.exact)
        return self._conquered(inner, bases, ranks, sizes, tolerance, depth)

    def _signs(
        self, a: torch.Tensor, sizes: torch.Tensor, tolerance: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Diagonals about zero; signs of the matrices with these, less sigma; whether eigenvalues are left,
        and whether all matrices are multiples of the identity. Without synchronizing.
        """
        place = torch.arange(a.shape[1], device=a.device)
        inside = place < sizes[:, None]
        diagonal = a.diagonal(0, 1, 2).real
        # About zero: of a cluster elsewhere products would have more rounding errors, and Lanczos no digits.
        diagonal = torch.where(inside, diagonal - (diagonal.sum(1) / sizes.clamp_min(1))[:, None], 0.0)
        a = _with_diagonal(a, diagonal)
        scalar = ((two_norms(a, 1, 2) <= tolerance) | (sizes <= 1))[:, None]
        parts = self.exact.parts(a)
        sigma, size = (x[:, None].to(diagonal.dtype) for x in _middle(parts, inside, self.exact))
        # Rows beyond the block have the sign +1. Of a multiple of the identity any subspace is invariant.
        shifted = torch.where(inside, diagonal - sigma, size)
        size = torch.where(scalar, tolerance[:, None] / torch.finfo(a.dtype).eps + 1e-30, size)
        halves = torch.where(place < (sizes // 2)[:, None], -size, size)
        shifted = torch.where(scalar, halves, shifted)
        signs, missing = first_signs(_with_diagonal(a, shifted), size[:, 0], self.low_engine, self.exact)
        return diagonal, signs, torch.stack([missing, scalar.all()])

    def _conquered(
        self,
        inner: torch.Tensor,
        bases: torch.Tensor,
        ranks: torch.Tensor,
        sizes: torch.Tensor,
        tolerance: torch.Tensor,
        depth: int,
    ) -> torch.Tensor:
        """Eigenvectors from bases in which matrices fall into two blocks, the first ones of these orders."""
        count, n, _ = inner.shape
        place, orders = torch.arange(n, device=inner.device), torch.stack([ranks, sizes - ranks])
        # Few different orders: those that come again are replayed.
        most, step = orders.amax(1).tolist(), max(1, self.width // 4)
        most = [min(n, -(-x // step) * step) if x > self.width else x for x in most]
        if min(most) > self.width:  # both are split together; else the lesser ones need not be as large
            most = [max(most)] * 2
        # The second block of each matrix, and its columns, are moved to the front.
        moved = (place[: most[1]] + ranks[:, None]).clamp(max=n - 1)
        second = inner.gather(1, moved[:, :, None].expand(-1, -1, n))
        second = second.gather(2, moved[:, None].expand(-1, most[1], -1))
        blocks = []
        for block, order in zip((inner[:, : most[0], : most[0]], second), orders, strict=True):
            within = place[: block.shape[1]] < order[:, None]
            blocks.append(torch.where(within[:, :, None] & within[:, None], block, 0.0))
        if most[0] == most[1]:
            both = torch.cat(blocks), orders.flatten(), torch.cat([tolerance, tolerance])
            below, above = self.vectors(*both, depth - 1).split(count)
        else:
            each = zip(blocks, orders, strict=True)
            below, above = (self.vectors(*block, tolerance, depth - 1) for block in each)
        below = product(bases[:, :, : most[0]], below, self.exact)
        above = product(bases.gather(2, moved[:, None].expand(-1, n, -1)), above, self.exact)
        back = (place - ranks[:, None]).clamp(0, most[1] - 1)
        above = above.gather(2, back[:, None].expand(-1, n, -1))
        below = torch.nn.functional.pad(below, (0, n - most[0]))
        return torch.where((place < ranks[:, None])[:, None], below, above)

    def _split(
        self, signs: torch.Tensor, inside: torch.Tensor, sizes: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Orthonormal columns, and how many span an invariant subspace; the next ones span another.

        Without a split they are unit vectors.
        """
        count, n, _ = signs.shape
        dtype, device = signs.dtype, signs.device
        place = torch.arange(n, device=device)
        projector = signs.mul_(-0.5)
        projector.diagonal(0, 1, 2).add_(0.5)
        ranks = (projector.diagonal(0, 1, 2).real * inside).sum(1).round().long()
        unsplit = (ranks <= 0) | (ranks >= sizes)
        ranks = torch.where(unsplit, sizes // 2, ranks)
        generator = torch.Generator(device).manual_seed(n)
        g = torch.randn(n, n, dtype=dtype, device=device, generator=generator) / n**0.5
        found, first = inside & ~unsplit[:, None], (place < ranks[:, None])[:, None]
        found = found[:, :, None] & found[:, None]
        image = product(projector.reshape(1, -1, n), g[None], self.exact).view(count, n, n)
        eye = torch.eye(n, dtype=dtype, device=device)
        bases = self.orthonormal(torch.where(found, torch.where(first, image, g - image), eye))
        # Errors of the projector times the condition number of a part of G are in them: once more, without G.
        image = product(projector, bases, self.low_engine)
        bases = torch.where(found, torch.where(first, image, bases - image), eye)
        return orthonormalized(bases, self.exact, self.low_engine), ranks


def _with_diagonal(a: torch.Tensor, diagonal: torch.Tensor) -> torch.Tensor:
    a = a.clone()
    a.diagonal(0, 1, 2).copy_(diagonal)
    return a


def _middle(parts: torch.Tensor, inside: torch.Tensor, engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
    """A number between two eigenvalues near the median, and a bound on the distance of all others, shape
    (batch,), by Gauss quadrature.

    Ritz values converge to clusters, and a mean of two lies between these (Golub and Meurant, "Matrices,
    Moments and Quadrature", 2010). No eigenvalue is farther out than the last Ritz value by more than the
    last residual, in practice (Zhou and Li, "Bounding the spectrum of large Hermitian matrices", Linear
    Algebra Appl. 435, 2011).
    """
    n, dtype = inside.shape[1], engine.storage
    start = torch.where(inside[:, :, None], gaussian(n, 1, dtype, inside.device, seed=n + 1), 0.0)
    found = lanczos(lambda v: engine.thin(parts, v), start, min(12, n)).numbers
    diagonal, off_diagonal = (x.double().nan_to_num(0.0) for x in found)
    lower = torch.diag_embed(off_diagonal[:, :-1], -1)
    nodes, vectors = converged_eigh(torch.diag_embed(diagonal) + lower + lower.mT)
    weights = vectors[:, 0].square()
    # Those without weight are none: the Lanczos vectors had ended.
    nodes = torch.where(weights > 0, nodes, nodes.gather(1, weights.argmax(1, keepdim=True)))
    nodes, order = nodes.sort(1)
    below, gaps = weights.gather(1, order).cumsum(1)[:, :-1], nodes.diff(dim=1)
    # Eigenvalues that are too near for the first polynomials would take more of them.
    clear = gaps >= (0.008 * (nodes[:, -1:] - nodes[:, :1])).minimum(gaps.amax(1, keepdim=True))
    best = torch.where(clear, (below - 0.5).abs(), 1.0).argmin(1, keepdim=True)
    sigma = (nodes.gather(1, best) + nodes.gather(1, best + 1)) / 2
    size = 1.01 * ((nodes - sigma).abs().amax(1) + off_diagonal[:, -1].abs())
    return sigma[:, 0], size.clamp_min(1e-30)


def corrected(
    a: torch.Tensor, v: torch.Tensor, width: int, engine: Engine
) -> tuple[torch.Tensor, torch.Tensor]:
    """Better eigenvalues and eigenvectors from approximate ones.

    Shapes: a (batch, n, n). ``v``, shape (batch, n, n): about orthonormal, and in the order of ascending
    eigenvalues. ``width``: of blocks of neighbours. Returns w, shape (batch, n): ascending; v, shape (batch,
    n, n).
    """
    s = _congruent(v, engine.parts(a), engine)
    for offset in (0, width // 2):
        turns = _eigenvectors_of_blocks(s, width, offset)
        v, s = turned(v, turns, offset), turned(turned(s, turns, offset).mH, turns, offset)
    w = s.diagonal(0, 1, 2).real.clone()
    s.diagonal(0, 1, 2).zero_()
    # Where eigenvalues differ by five times the norm of the off-diagonal elements: then that of the change is
    # at most pi/10 (Bhatia, "Matrix Analysis", 1997, theorem VII.2.3). Rounding errors are no reason for any.
    noise = 4 * torch.finfo(s.dtype).eps * w.abs().amax(1)
    v = v + product(v, correction(s, w, 5 * _norms(s, engine), noise), engine)
    v = orthonormalized(v, engine, engine)
    w, order = w.sort(1)
    return w, v.gather(2, order[:, None].expand_as(v))


def _norms(x: torch.Tensor, engine: Engine) -> torch.Tensor:
    """Bounds on the 2-norms of Hermitian matrices, of any size."""
    sizes = two_norms(x, 1, 2)
    scales = torch.where(sizes > 0, x.shape[1] ** 0.5 / sizes, 1.0)
    return torch.minimum(norm_bound(engine.parts(x, scales), engine) / scales, sizes)


def _eigenvectors_of_blocks(s: torch.Tensor, width: int, offset: int) -> torch.Tensor:
    """Eigenvectors of diagonal blocks, shape (batch, blocks, width, width); the first ends at the offset.

    Where a block sticks out, unit vectors come before and after those of its inner part.
    """
    n = s.shape[1]
    before = -offset % width
    after = -(before + n) % width
    place = torch.arange(-before, n + after, device=s.device).view(-1, width)
    inside = (place >= 0) & (place < n)
    index = place.clamp(0, n - 1)
    blocks = s[:, index[:, :, None], index[:, None]]
    blocks = torch.where(inside[:, :, None] & inside[:, None], blocks, 0.0)
    far, diagonal = (2 * two_norms(blocks, 2, 3) + 1e-30)[:, :, None], blocks.diagonal(0, 2, 3)
    diagonal.copy_(torch.where(inside, diagonal, torch.where(place < 0, -far, far).to(s.dtype)))
    return _eigenvectors(blocks)


def _eigenvectors(a: torch.Tensor) -> torch.Tensor:
    """Direct ones; any where a step before has failed, which is found out at the end."""
    return converged_eigh(torch.where(a.isfinite(), a, 0.0))[1]
