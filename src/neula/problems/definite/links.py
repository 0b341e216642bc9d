"""What can be tried for Cholesky factors, in which arithmetic, and how they are measured."""

from __future__ import annotations

from functools import partial

import torch

from neula.algorithms.elimination.cholesky import Cholesky, cholesky, library_cholesky
from neula.algorithms.scaling import binary_exponents
from neula.certificates.cholesky import cholesky_measures, image_of
from neula.engines import FP64, Arithmetic, Engine
from neula.kernels.symmetric import symmetric_copy
from neula.pipeline.chain import Answer
from neula.pipeline.progress import stage
from neula.problems.definite.problem import CholeskyValues, NotDefiniteMember, Symmetric

Solution = Answer[CholeskyValues]


def recursive(matrices: Symmetric, before: Solution | None, arithmetic: Arithmetic) -> Solution:
    """The recursion in products of an arithmetic, all of it queued at once."""
    options = matrices.options
    engine, label = options.engine.using(arithmetic), f"cholesky {arithmetic.name}"
    report = stage(options.progress, f"factorizing in {arithmetic.name}")
    found = engine.replay(partial(_factorized, engine=engine, by_library=False), (matrices.a,), label)
    report(1.0)
    return Answer(CholeskyValues(*found), label)


def by_library(matrices: Symmetric, before: Solution | None, arithmetic: Arithmetic) -> Solution:
    """LAPACK or cuSOLVER.

    Raises
    ------
    NotDefiniteMember
        If there is no factor in double precision.
    """
    options = matrices.options
    engine, label = options.engine.using(arithmetic), f"cholesky {arithmetic.name}"
    report = stage(options.progress, f"factorizing in {arithmetic.name}")
    values = CholeskyValues(*_factorized(matrices.a, engine=engine, by_library=True))
    if engine.format is FP64:
        orders = values.order.tolist()
        if any(orders):
            first = next(i for i, order in enumerate(orders) if order)
            raise NotDefiniteMember(int(matrices.place[first]), orders[first])
    report(1.0)
    return Answer(values, label)


def _factorized(
    a: torch.Tensor, *, engine: Engine, by_library: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """L in the dtype of A, the order of a minor that is not positive, and measures; without synchronizing.

    Of A scaled by powers of two to a diagonal near one, which rounds nothing: then errors of each element
    count beside what its row and column allow, and no format is too narrow.
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    scales = _scales(a).to(wide)
    work = symmetric_copy(a, scales, rows=engine.rows(a.shape[-1]))
    image = image_of(work)
    work = work if wide == engine.storage else _in(work, engine.storage)
    found = library_cholesky(work) if by_library else cholesky(work, engine)
    lower = _unscaled(found, scales, a.dtype)
    back = lower if lower.dtype == torch.float64 else lower.to(wide)
    measures = cholesky_measures(image, back * scales[:, :, None])
    return lower, found.order, measures.T


def _scales(a: torch.Tensor) -> torch.Tensor:
    """Powers of two that bring the diagonal into [1/2, 2), float64; 1 for what is not positive."""
    diagonal = a.diagonal(dim1=1, dim2=2).double()
    half = binary_exponents(diagonal).div(2, rounding_mode="floor")
    return torch.where(diagonal > 0, torch.ldexp(torch.ones_like(diagonal), -half), 1.0)


def _in(work: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A column-major copy in another precision."""
    return torch.empty_strided(work.shape, work.stride(), dtype=dtype, device=work.device).copy_(work)


def _unscaled(found: Cholesky, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """L of the matrix that was given, in its dtype, zero above the diagonal."""
    lower = found.lower.tril_().to(scales.dtype)
    return (lower / scales[:, :, None]).to(dtype)
