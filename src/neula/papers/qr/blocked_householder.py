"""Blocked Householder QR on a neural engine: a comparator, LAPACK's algorithm with products in a low format.

Zhang, Baharlouei, Wu, "High Accuracy Low Precision QR Factorization and Least Square Solver on GPU with
TensorCore" (arXiv, 2019), section 3.1.1, their first attempt: panels are left to the library, updates of the
trailing matrix to the neural engine. The smallest dimension of a product is the width of a panel, and wider
panels take the time that wider products save.
"""

from __future__ import annotations

import torch

from neula.engines import Engine
from neula.papers.qr.wy import BlockReflector, HouseholderQR, householder_wy


# item: V first attempt
def blocked_householder(a: torch.Tensor, engine: Engine, *, block: int = 128) -> HouseholderQR:
    """Factorize ``A = Q R`` panel by panel, with the trailing matrix updates in the engine's low format.

    Columns should be scaled to the range of the format (:mod:`neula.algorithms.scaling`). Backward error and
    orthogonality of Q are small multiples of the format's unit roundoff, whatever the condition number.

    Parameters
    ----------
    a : Tensor, shape (m, n), m >= n
    engine : Engine
    block : int
        Columns of a panel.

    Returns
    -------
    HouseholderQR
        With one reflector for each panel. The diagonal of R can be negative.

    Raises
    ------
    ValueError
        For a block below 1, or m < n.

    Examples
    --------
    >>> import torch
    >>> from neula.engines import EmulatedEngine
    >>> engine = EmulatedEngine("cpu", "fp64")
    >>> a = torch.tensor([[3.0, 1.0], [4.0, 2.0]], dtype=torch.float64)
    >>> factors = blocked_householder(a, engine, block=1)
    >>> factors.r
    tensor([[-5.0000, -2.2000],
            [ 0.0000,  0.4000]], dtype=torch.float64)
    >>> torch.allclose(factors.q(engine) @ factors.r, a)
    True
    """
    m, n = a.shape
    if m < n:
        raise ValueError(f"blocked_householder needs at least as many rows as columns, got {m} x {n}")
    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}")
    work = engine.empty(m, n).copy_(a)
    r = engine.empty(n, n).zero_()
    reflectors = []
    for start in range(0, n, block):
        stop = min(start + block, n)
        columns = slice(start, stop)
        # The reflectors take the place of the columns that they come from.
        y, t, r[columns, columns] = householder_wy(work[start:, columns])
        reflector = BlockReflector(work[start:, columns].copy_(y), t)
        reflectors.append(reflector)
        if stop < n:
            trailing = reflector.apply_transpose(work[start:, stop:], engine)
            r[columns, stop:] = trailing[: stop - start]
    return HouseholderQR(tuple(reflectors), r)
