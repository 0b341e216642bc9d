"""The certificate of a QR factorization in Householder form: of the Q that reflectors define."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from neula.certificates.orthogonality import DIRECTIONS, PROBES, directions, gaussian_probes
from neula.certificates.qr import units
from neula.engines.formats import in_double
from neula.kernels.few_vectors.probes import norms, spectral_norms
from neula.kernels.precision import exact_matmul, exactly
from neula.kernels.triangular_inverse import triangular_inverse

CHUNK = {"cpu": 1 << 16, "cuda": 1 << 26}  # elements converted at a time: a cache, and what fills a GPU
WIDTH = 128  # reflectors that are applied together


@dataclass(frozen=True)
class Reflectors:
    """``Q = H_1 H_2 ... H_k`` of each matrix of a batch, in blocks ``I - Y T Y^H``.

    Schreiber and Van Loan, "A Storage-Efficient WY Representation for Products of Householder
    Transformations" (SIAM J. Sci. Stat. Comput. 10, 1989).
    """

    # Householder vectors of each block, shape (batch, m - first, width), 1 on the diagonal, zeros above; or
    # all of them with whatever is above, shape (batch, m, k), for LAPACK.
    y: Sequence[torch.Tensor]
    t: torch.Tensor  # Shape (batch, blocks, width, width). Upper triangular. Or tau, shape (batch, k).

    @classmethod
    def from_householder(cls, h: torch.Tensor, tau: torch.Tensor, dtype: torch.dtype) -> Reflectors:
        """Reflectors ``H_j = I - tau_j y_j y_j^H``, as ``torch.geqrf`` returns them, in another precision.
        On a CPU nothing is to be prepared: LAPACK applies reflectors as they are.
        """
        h, tau = h[..., : tau.shape[1]], tau.to(dtype)
        return cls.in_blocks(h, tau) if h.is_cuda else cls((h.to(dtype),), tau)

    @classmethod
    def in_blocks(cls, h: torch.Tensor, tau: torch.Tensor) -> Reflectors:
        """The reflectors as blocks for matrix products, the form in which a GPU applies them, by ``T^-1 =
        diag(1 / tau) + striu(Y^H Y)``, written so that ``tau_j`` may be zero.
        """
        (batch, k), width = tau.shape, min(WIDTH, tau.shape[1])
        factors = functional.pad(tau, (0, -k % width)).view(-1, width)
        gram, vectors = tau.new_zeros(batch, -(-k // width), width, width), []
        for block, start in enumerate(range(0, k, width)):
            # Below the diagonal blocks, which is half of a square matrix.
            y = h[:, start:, start : min(start + width, k)].to(tau.dtype, copy=True)
            size = y.shape[2]
            y[:, :size].tril_(-1).diagonal(dim1=1, dim2=2).fill_(1.0)
            gram[:, block, :size, :size] = exact_matmul(y.mH, y)
            vectors.append(y)
        inverse = gram.view(-1, width, width).triu_(1).mul_(factors[:, :, None])
        inverse.diagonal(dim1=1, dim2=2).fill_(1.0)
        t = triangular_inverse(inverse, upper=True) * factors[:, None, :]
        return cls(vectors, t.view(gram.shape))

    def apply(self, x: torch.Tensor, *, transposed: bool = False) -> torch.Tensor:
        """``Q X``, or ``Q^H X``, of X (batch, m, columns) in the precision of the reflectors."""
        if self.t.ndim == 2:
            return torch.ormqr(self.y[0], self.t, x, transpose=transposed)
        x = x.clone()
        count = len(self.y)
        for block in range(count) if transposed else reversed(range(count)):
            y = self.y[block]
            m, size = y.shape[1:]
            t, rest = self.t[:, block, :size, :size], x[:, x.shape[1] - m :]
            image = exact_matmul(t.mH if transposed else t, exact_matmul(y.mH, rest))
            exactly(torch.baddbmm, rest, y, image, alpha=-1.0, out=rest)
        return x


def householder_images(
    h: torch.Tensor, tau: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Products of R and Q, given as reflectors, with random vectors: ``Q R D G``, shape (batch, m, vectors),
    and the norms of ``Q^H Q H - H`` and of its largest direction, shape (batch, 2), in double precision.

    R is the upper triangle of h, shape (batch, m, n), with Householder vectors below; D are the scales of the
    columns.
    """
    found = [_images(*part) for part in _in_parts(h, tau, scales)]
    images, losses = zip(*found, strict=True)
    return torch.cat(images), torch.cat(losses)


def householder_measures(
    a: torch.Tensor, scales: torch.Tensor, images: torch.Tensor, losses: torch.Tensor
) -> torch.Tensor:
    """The measures of :func:`neula.certificates.qr.qr_measures`, from :func:`householder_images`."""
    g = gaussian_probes(a.shape[2], a.device, images.dtype)
    given = torch.cat([in_double(x) @ (d[:, :, None].double() * g) for x, d in _in_parts(a, scales)])
    found = torch.stack([norms(given - images), norms(given), *losses.unbind(1)])
    k = min(a.shape[1:])
    return found * units(k, DIRECTIONS, g.dtype, found.device)[:, None]


def _in_parts(*batch: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Some matrices at a time: the first tensor's are converted."""
    first = batch[0]
    size = max(1, CHUNK[first.device.type] // (first.shape[1] * first.shape[2]))
    return zip(*(x.split(size) for x in batch), strict=True)


def _rows(k: int) -> list[slice]:
    """Eighths of the rows of R, if it is not small: nearly half of it is not read."""
    size = max(WIDTH, -(-k // 8))
    return [slice(first, min(first + size, k)) for first in range(0, k, size)]


def _images(h: torch.Tensor, tau: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    (batch, m, n), k = h.shape, tau.shape[1]
    g, probes = gaussian_probes(n, h.device, h.dtype), directions(k, h.device, h.dtype)
    dg = scales[:, :, None].double() * g
    reflectors = Reflectors.from_householder(h, tau, g.dtype)
    start = dg.new_zeros(batch, m, PROBES + DIRECTIONS)
    for rows in _rows(k):
        # R begins at the diagonal; what is left of it are Householder vectors.
        r = in_double(h[:, rows, rows.start :]).triu()
        start[:, rows, :PROBES] = r @ dg[:, rows.start :]
    start[:, :k, PROBES:] = probes
    image, basis = reflectors.apply(start).split((PROBES, DIRECTIONS), 2)
    loss = reflectors.apply(basis, transposed=True)[:, :k] - probes
    return image, torch.stack([norms(loss), spectral_norms(loss)], 1)
