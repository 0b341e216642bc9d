"""Evidence of large definite systems, gathered while conjugate gradients solve them.

Their preconditioner solves for eight vectors in the time of one, and A is multiplied by two in that of one:
what shows the norms of A and of its inverse comes along, and takes no time of its own.
"""

from __future__ import annotations

import torch

from neula.algorithms.krylov.iterative_refinement import Companions, OnTheWay
from neula.algorithms.spectra.inverse_norm import half_random, symmetric_inverse_norm
from neula.problems.systems.evidence import SEEN, InverseProbe, direction

VECTORS = 6
"""Random vectors that show what the factors say of the norm of the inverse: with as many as two right-hand
sides beside them the factors are read once."""


def probe_on_the_way(
    rows: torch.Tensor, sizes: torch.Tensor, dtype: torch.dtype
) -> tuple[InverseProbe, OnTheWay]:
    """A probe that conjugate gradients find in their first two iterations, and solve for in the others.

    Parameters
    ----------
    rows, sizes : Tensor, shape (n, 1)
        Scales of the rows of A, and norms of its columns.
    dtype : torch.dtype
        Of A.

    Returns
    -------
    probe : InverseProbe
    solved : OnTheWay
        For :func:`~neula.algorithms.krylov.iterative_refinement.cg_refinement`, which fills the probe.
    """
    right = 1 / rows
    nothing = right[:, :0].to(dtype)

    def products() -> Companions:
        image = yield direction(sizes, dtype)
        solved.along_image = image
        image = rows * image
        back = (yield rows * image) / sizes
        probe.of_a = torch.linalg.vector_norm(back) / torch.linalg.vector_norm(image)

    def solves() -> Companions:
        probe.norm, vector = yield from symmetric_inverse_norm(sizes, right, VECTORS, dtype)
        probe.vector = half_random(vector)
        if bool(probe.vector.isfinite().all()):  # or it would end the iterations of all
            solved.b = right * probe.vector

    solved = OnTheWay(nothing, SEEN / len(sizes) ** 0.5, nothing, products=products(), solves=solves())
    probe = InverseProbe(right, sizes, nothing, right.new_tensor(torch.inf), solved)
    return probe, solved
