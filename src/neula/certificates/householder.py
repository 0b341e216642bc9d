"""The certificate of a QR factorization in Householder form: of the Q that reflectors define."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from neula.certificates.orthogonality import DIRECTIONS, PROBES, directions, gaussian_probes
from neula.certificates.qr import units
from neula.engines.formats import in_double
from neula.kernels.few_vectors.probes import norms, spectral_norms
from neula.kernels.precision import exact_matmul
from neula.kernels.triangular_inverse import triangular_inverse

CHUNK = {"cpu": 1 << 16, "cuda": 1 << 25}  # elements converted at a time: a cache, and what fills a GPU
WIDTH = 64  # reflectors that are applied together


@dataclass(frozen=True)
class Reflectors:
    """``Q = H_1 H_2 ... H_k`` of each matrix of a batch, in blocks ``I - Y T Y^H``.

    Schreiber and Van Loan, "A Storage-Efficient WY Representation for Products of Householder
    Transformations" (SIAM J. Sci. Stat. Comput. 10, 1989).
    """

    # Shape (batch, m, blocks * 64). Householder vectors, 1 on the diagonal and zeros above; zero columns fill
    # up the last block. Or whatever is above, shape (batch, m, k), for LAPACK.
    y: torch.Tensor
    t: torch.Tensor  # Shape (batch, blocks, 64, 64). Upper triangular. Or tau, shape (batch, k), for LAPACK.

    @classmethod
    def from_householder(cls, h: torch.Tensor, tau: torch.Tensor, dtype: torch.dtype) -> Reflectors:
        """Reflectors ``H_j = I - tau_j y_j y_j^H``, as ``torch.geqrf`` returns them, in another precision.
        On a CPU nothing is to be prepared: LAPACK applies reflectors as they are.
        """
        h, tau = h[..., : tau.shape[1]].to(dtype), tau.to(dtype)
        return cls.in_blocks(h, tau) if h.is_cuda else cls(h, tau)

    @classmethod
    def in_blocks(cls, h: torch.Tensor, tau: torch.Tensor) -> Reflectors:
        """The reflectors as blocks for matrix products, the form in which a GPU applies them, by ``T^-1 =
        diag(1 / tau) + striu(Y^H Y)``, written so that ``tau_j`` may be zero.
        """
        batch, k = tau.shape
        y = h.tril(-1)
        y.diagonal(dim1=1, dim2=2).fill_(1.0)
        more = -k % WIDTH
        y, factors = functional.pad(y, (0, more)), functional.pad(tau, (0, more))
        blocks = y.unflatten(2, (-1, WIDTH)).movedim(2, 1).flatten(0, 1)
        factors = factors.view(-1, WIDTH)
        gram = exact_matmul(blocks.mH, blocks).triu(1).mul_(factors[:, :, None])
        gram.diagonal(dim1=1, dim2=2).fill_(1.0)
        t = triangular_inverse(gram, upper=True) * factors[:, None, :]
        return cls(y, t.view(batch, -1, WIDTH, WIDTH))

    def apply(self, x: torch.Tensor, *, transposed: bool = False) -> torch.Tensor:
        """``Q X``, or ``Q^H X``, of X (batch, m, columns) in the precision of the reflectors."""
        if self.t.ndim == 2:
            return torch.ormqr(self.y, self.t, x, transpose=transposed)
        x = x.clone()
        count = self.t.shape[1]
        for block in range(count) if transposed else reversed(range(count)):
            start = block * WIDTH
            y, t, rest = self.y[:, start:, start : start + WIDTH], self.t[:, block], x[:, start:]
            rest -= exact_matmul(y, exact_matmul(t.mH if transposed else t, exact_matmul(y.mH, rest)))
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


def _images(h: torch.Tensor, tau: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    (batch, m, n), k = h.shape, tau.shape[1]
    g, probes = gaussian_probes(n, h.device, h.dtype), directions(k, h.device, h.dtype)
    dg = scales[:, :, None].double() * g
    reflectors = Reflectors.from_householder(h, tau, g.dtype)
    start = dg.new_zeros(batch, m, PROBES + DIRECTIONS)
    start[:, :k] = torch.cat([in_double(h[:, :k].triu()) @ dg, probes.expand(batch, -1, -1)], 2)
    image, basis = reflectors.apply(start).split((PROBES, DIRECTIONS), 2)
    loss = reflectors.apply(basis, transposed=True)[:, :k] - probes
    return image, torch.stack([norms(loss), spectral_norms(loss)], 1)
