"""The row space of a matrix in units of its largest columns, where enough of these are independent."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from neula.engines import FP64
from neula.kernels import scipy_linalg

FIRST_ORDER = 0.1
"""Relative change of a basis up to which its square does not matter."""

ALIKE = 16.0
"""If column norms differ by less, Cholesky QR loses at most this factor of accuracy."""


@dataclass(frozen=True)
class LeadingRowSpace:
    """The row space by its largest columns, where as many as there are dimensions are independent.

    ``V^H D x = c`` is ``D1 x1 + F D2 x2 = V1^-H c`` with ``F = V1^-H V2^H``. Where no column of D2 is much
    larger than one of D1, ``G = D1^-1 F D2`` is small, the minimum-norm x is ``[I G]^+ D1^-1 V1^-H c``, and
    its errors do not depend on the units of the columns.
    """

    order: torch.Tensor  # int, shape (n,): the columns of D1, then the others
    first: torch.Tensor  # shape (rank, rank): V1^-H
    rest: torch.Tensor  # shape (rank, n - rank): F
    sizes: torch.Tensor  # shape (n, 1): the diagonal of D, in order

    @classmethod
    def from_basis(cls, v: torch.Tensor, sizes: torch.Tensor) -> LeadingRowSpace | None:
        """None where the largest columns are dependent."""
        rank = v.shape[1]
        if rank in (0, len(v)):
            return None
        order = pivoted_qr((v * sizes[:, None]).mH)[2]
        inverse, info = torch.linalg.inv_ex(v[order[:rank]].mH)
        if bool(info) or not bool(inverse.isfinite().all()):
            return None
        if not float(sizes[order[rank:]].amax()) <= ALIKE * float(sizes[order[:rank]].amin()):
            return None
        return cls(order, inverse, inverse @ v[order[rank:]].mH, sizes[order, None])

    def shortest(self, coefficients: torch.Tensor) -> torch.Tensor:
        """``D x``."""
        rank, along = len(self.first), self.first @ coefficients
        first, rest = self.sizes[:rank], self.sizes[rank:]
        one = torch.eye(rank, dtype=along.dtype, device=along.device)
        q, r = torch.linalg.qr(torch.cat([one, (self.rest / first * rest.T).mH]))
        x = q[rank:] @ torch.linalg.solve_triangular(r.mH, along / first, upper=False)
        y = torch.empty(len(self.order), along.shape[1], dtype=along.dtype, device=along.device)
        y[self.order] = torch.cat([along - self.rest @ (rest * x), rest * x])
        return y

    def error(self, relative: torch.Tensor, angle: float) -> torch.Tensor:
        """Relative error of ``D x`` by those of c and of V, to first order.

        ``D1 dx1 = V1^-H (dc - dV^H D x) - F D2 dx2`` and
        ``dx2 = (I + G^H G)^-1 (dG^H x1 + G^H (dh - dG x2))`` for ``h = D1^-1 V1^-H c``, with
        ``dG = D1^-1 V1^-H dV^H [-F I]^H D2`` and ``dh = D1^-1 V1^-H (dc - dV1^H D1 h)``, x not being longer
        than h.
        """
        norm, rank = torch.linalg.matrix_norm, len(self.first)
        first, rest = self.sizes[:rank], self.sizes[rank:]
        angle, relative, along = angle + 4 * FP64.u, relative + 4 * FP64.u, float(norm(self.first, 2))
        grows = float(norm(self.first / first) * torch.hypot(norm(self.rest * rest.T), norm(rest)))
        of_rest = grows * (1.12 * angle * grows + (relative + angle * along) / 2)
        change = along * (relative + angle) + of_rest
        return change if angle * max(along, grows) <= FIRST_ORDER else torch.full_like(change, math.inf)


def pivoted_qr(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``A[:, pivots] = Q R`` by LAPACK: torch has none."""
    q, r, pivots = scipy_linalg.qr(a.resolve_conj().cpu().numpy(), mode="economic", pivoting=True)
    return tuple(torch.from_numpy(x).to(a.device) for x in (q, r, pivots.astype(np.int64)))  # type: ignore[return-value]
