"""One linear system by LU factors, with its evidence by the compiled core, in few passes.

How well factors solve is measured on the random vectors that the norm of the inverse is known from.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from neula.algorithms.elimination.compiled import CompiledSolutions, setting_of
from neula.algorithms.elimination.lu import cholesky_in_place, lu_in_place
from neula.algorithms.krylov.batched_lstsq import FEW, MARGINS, probes
from neula.engines.formats import matching_dtype
from neula.kernels.core import core

if TYPE_CHECKING:
    from neula._core import Core, SystemsSetting

THREADED = 1 << 16
"""Elements from which on several threads take less time than one, order 256: those of torch's pool, which
wait for work, begin within some microseconds."""


def solved_by_factors(
    a: torch.Tensor,
    b: torch.Tensor,
    dtype: torch.dtype,
    *,
    single: bool,
    definite: bool = False,
    doubled: bool = True,
) -> CompiledSolutions | None:
    """Solve by LU with partial pivoting, or by a Cholesky factor; of single precision update once.

    None without the core, where a pivot vanishes, and where A is not definite. A, of single or double
    precision, has contiguous rows, and b is real where A is. ``dtype`` is that of the result.
    Residuals are in twice the working precision if ``doubled``, and factors are in double precision.
    """
    kernels = core()
    if kernels is None:
        return None
    n, k = b.shape
    threads = torch.get_num_threads() if n * n >= THREADED else 1
    wide = torch.promote_types(a.dtype, torch.float64)
    factors = torch.empty(n, n, dtype=matching_dtype(torch.float32, wide) if single else wide, device="cpu")
    sides = torch.empty(k, n, dtype=wide, device="cpu").copy_(b.mT)
    pivots = torch.empty(n, dtype=torch.int32, device="cpu")
    found, memory = CompiledSolutions.empty(kernels, n, k, is_complex=wide.is_complex)
    system = kernels.large_system(
        a.numpy(),
        sides.numpy(),
        _setting(kernels, n),
        factors.numpy(),
        pivots.numpy(),
        *memory,
        dtype.to_real() == torch.float32,
        doubled,
        threads,
    )
    system.copy()
    if not (cholesky_in_place(factors.mT) if definite else lu_in_place(factors.mT, pivots)):
        return None
    system.solve(definite=definite)
    return found


@lru_cache(maxsize=64)
def _setting(kernels: Core, n: int) -> SystemsSetting:
    """Random vectors as rows: those that show the norm of the inverse, then one for the norm of A; limits."""
    here = torch.device("cpu")
    vectors = torch.cat([probes(n, here, count, unit=False) for count in (FEW, 1)], 1)
    return setting_of(kernels, vectors.mT.contiguous().numpy(), MARGINS[FEW], math.inf)
