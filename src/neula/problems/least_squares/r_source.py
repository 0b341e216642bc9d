"""Sources of R for least-squares problems, and the effect of its errors on refinement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from neula.algorithms.orthogonal.r_only import (
    cholesky32_r,
    cholesky_r,
    gram_schmidt_r,
    householder_r,
    shifted_cholesky3_r,
)

Factor = Callable[..., torch.Tensor]
"""R of a batch of tall matrices, ``factor(a, over_rows=...)``."""


@dataclass(frozen=True)
class RSource:
    """A way to compute R."""

    factor: Factor
    # Whether it also takes the Gram matrix of a single A, which is computed once for all such sources.
    from_gram: bool = False
    backward_stable: bool = False  # whether no other source has a better R
    # Whether R comes from products of half-precision operands: the first steps then need no residuals in
    # twice the working precision, and few random vectors measure the rate of convergence.
    half_precision: bool = False
    narrow: bool = False  # whether A may have any dtype
    # Whether no step takes residuals in twice the working precision unless digits are requested.
    plain_residuals: bool = False

    @property
    def checked_first(self) -> bool:
        """Whether the host checks R before any step, and then launches two steps before it reads again.

        Problems that come to a backward stable R, the last one, often lack full rank, and then all steps are
        in vain; so are plain ones with an R that converges slowly.
        """
        return self.backward_stable or self.plain_residuals


SOURCES = {
    "cholesky fp32": RSource(cholesky32_r, narrow=True),
    "cholesky fp64": RSource(cholesky_r, from_gram=True),
    "shifted cholesky fp64": RSource(shifted_cholesky3_r, from_gram=True, backward_stable=True),
    "householder fp64": RSource(householder_r, backward_stable=True),
    "gram-schmidt fp32": RSource(partial(gram_schmidt_r, dtype=torch.float32)),
    "gram-schmidt fp64": RSource(partial(gram_schmidt_r, dtype=torch.float64)),
}
