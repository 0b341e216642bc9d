"""Which rows, as they are stored, are linear combinations of others: exactly, modulo a prime.

No threshold decides: a row that differs from a combination by 1e-300 is none.
"""

from __future__ import annotations

import numpy as np
import torch

PRIME = (1 << 31) - 19
"""Products of two residues fit 64 bits; powers of two have many residues."""


def beyond_combinations(rows: torch.Tensor, others: torch.Tensor) -> list[int]:
    """Indices of the other rows that are no combinations of some rows: float64, finite, linearly independent.

    Numbers of the host are integers times powers of two, and have residues. Of a rank that is lower modulo
    the prime than it is, the probability is about 1e-9.

    >>> rows = torch.tensor([[3.0, 1.0, 0.0], [0.0, 1.0, 7.0]], dtype=torch.float64)
    >>> others = torch.tensor([[3.0, 2.0, 7.0], [0.75, 0.25, 0.0], [3.0, 1.0, 1e-300]], dtype=torch.float64)
    >>> beyond_combinations(rows, others)
    [2]
    """
    count, left = len(rows), _residues(torch.cat([rows, others]))
    for i in range(count):
        if not left[i].any():
            continue
        column = int(np.flatnonzero(left[i])[0])
        pivot_row = left[i] * pow(int(left[i, column]), -1, PRIME) % PRIME
        left[i + 1 :] = (left[i + 1 :] - left[i + 1 :, column, None] * pivot_row) % PRIME
    return np.flatnonzero(left[count:].any(1)).tolist()


def _residues(x: torch.Tensor) -> np.ndarray:
    significands, exponents = np.frexp(x.detach().cpu().numpy())
    powers, places = np.unique(exponents, return_inverse=True)
    of_powers = np.array([pow(2, int(e) - 53, PRIME) for e in powers], np.int64)
    integers = np.ldexp(significands, 53).astype(np.int64)
    return integers % PRIME * of_powers[places].reshape(x.shape) % PRIME
