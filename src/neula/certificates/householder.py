"""The certificate of a QR factorization in Householder form: of the Q that reflectors define."""

from __future__ import annotations

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


def householder_measures(
    a: torch.Tensor, h: torch.Tensor, tau: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Measure R and Q, given as reflectors, as :func:`neula.certificates.qr.qr_measures` does, in double
    precision. R is the upper triangle of h, shape (batch, m, n), with Householder vectors below; ``scales``
    are those of the columns.
    """
    size = max(1, CHUNK[h.device.type] // (h.shape[1] * h.shape[2]))
    parts = zip(*(x.split(size) for x in (a, h, tau, scales)), strict=True)
    return torch.cat([_measured(*part) for part in parts], 1)


def _measured(a: torch.Tensor, h: torch.Tensor, tau: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    (batch, m, n), k = h.shape, tau.shape[1]
    g, probes = gaussian_probes(n, h.device, h.dtype), directions(k, h.device, h.dtype)
    dg = scales[:, :, None].double() * g
    reflectors = Reflectors.from_householder(h, tau, g.dtype)
    start = dg.new_zeros(batch, m, PROBES + DIRECTIONS)
    start[:, :k] = torch.cat([in_double(h[:, :k].triu()) @ dg, probes.expand(batch, -1, -1)], 2)
    image, basis = reflectors.apply(start).split((PROBES, DIRECTIONS), 2)
    given = in_double(a) @ dg
    loss = reflectors.apply(basis, transposed=True)[:, :k] - probes
    found = torch.stack([norms(given - image), norms(given), norms(loss), spectral_norms(loss)])
    return found * units(k, DIRECTIONS, g.dtype, found.device)[:, None]
