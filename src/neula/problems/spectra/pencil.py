"""Generalized eigenvalue problems ``A V = B V diag(w)`` with a positive definite B, in double precision.

With ``B = L L^H`` the eigenvalues are those of ``C = L^-1 A L^-H``, and ``V = L^-H Y`` for its eigenvectors
Y. For any V, ``L^-1 (A V - B V diag(w))`` is the residual of ``L^H V`` for C, and ``V^H B V`` the Gram matrix
of ``L^H V``: these are measured, so that the bounds of :mod:`neula.certificates.spectra` hold. Rounding
errors of the residual are multiplied by ``||L^-1||``, so that an ill-conditioned B shows in them. Cholesky's
factor is that of a ``B + dB``: with ``g >= ||L^-1||^2 ||dB||`` norms ``||L^-1 x||`` may be too small by
``sqrt(1 - g)``.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from neula.algorithms.scaling import binary_exponents
from neula.certificates.spectra import SpectralBounds, SpectralMeasures, rounding_error
from neula.engines import FP64
from neula.engines.formats import in_double
from neula.kernels.cholesky.symmetric import hermitian_from_lower
from neula.kernels.magnitudes import largest_magnitude, two_norms
from neula.kernels.shift import shift
from neula.pipeline.call import Call
from neula.pipeline.inputs import flattened
from neula.problems.spectra.decompose import Decomposed, decompose
from neula.problems.spectra.problem import SpectralJudge, SpectralOptions, SpectralValues


def decompose_pencil(call: Call, options: SpectralOptions, *, upper: bool) -> Decomposed:
    """Solve generalized problems of a call with operands A and B.

    Raises numpy.linalg.LinAlgError if a B is not positive definite. Raises ValueError if the shapes do not
    fit, or one of the matrices holds NaN or Inf.
    """
    a, b = (
        in_double(_symmetric(call.here(x), name, upper=upper))
        for name, x in zip("AB", call.tensors, strict=True)
    )
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(f"A and B must have the same order, got {a.shape[-1]} and {b.shape[-1]}")
    both = torch.broadcast_shapes(a.shape, b.shape)
    if both != a.shape:
        raise ValueError(f"B of shape {tuple(b.shape)} has more matrices than A of shape {tuple(a.shape)}")
    dtype = torch.promote_types(a.dtype, b.dtype)
    a, b = (flattened(x.to(dtype).expand(both)) for x in (a, b))
    of_a, of_b = (_exponents(x) for x in (a, b))
    of_b = 2 * (of_b // 2)
    a, b = shift(a, -of_a), shift(b, -of_b)
    lower, failed = torch.linalg.cholesky_ex(b)
    if bool(failed.any()):
        place = int(failed.nonzero()[0]) if failed.numel() > 1 else 0
        where = np.unravel_index(place, both[:-2])
        which = f"B[{', '.join(map(str, where))}] of the batch" if len(both) > 2 else "B"
        raise np.linalg.LinAlgError(
            f"{which} is not positive definite: leading minor {int(failed[place])} is not positive"
        )
    solve = torch.linalg.solve_triangular
    c = solve(lower, solve(lower, a, upper=False).mH, upper=False)
    whole = SpectralOptions(FP64, options.engine, symmetric=True, progress=options.progress)
    found = decompose(call, (c + c.mH) / 2, whole)
    if not c.numel():
        return replace(found, options=replace(found.options, target=options.target))
    w = found.values  # of the scaled problem
    v = solve(lower.mH, found.v.to(dtype), upper=True)
    measures, backward, bound = _measured(a, b, lower, w, v, options)
    numbers = np.stack([backward.cpu().numpy(), measures.orthogonality.cpu().numpy()])
    judge = SpectralJudge(bound)
    run = found.run
    accepted = run.accepted & judge.accept(numbers)
    if not accepted.all():
        run.attempts[-1] = replace(run.attempts[-1], accepted=False, reason=judge.reason(numbers, accepted))
    v, metric = shift(v, -of_b // 2), shift(lower.mH, of_b // 2)
    run.values = SpectralValues(w, v, v, *measures)
    run.numbers, run.accepted = numbers, accepted
    here = replace(found.options, target=options.target)
    exponents = (of_a - of_b).flatten()
    return replace(found, run=run, judge=judge, options=here, exponents=exponents, metric=metric)


def _exponents(x: torch.Tensor) -> torch.Tensor:
    """Of the powers of two that bring the largest elements near 1, shape (batch, 1, 1)."""
    if not x.numel():
        return torch.zeros(len(x), 1, 1, dtype=torch.int32, device=x.device)
    return binary_exponents(largest_magnitude(x, (1, 2), keepdim=True))


def _symmetric(x: torch.Tensor, name: str, *, upper: bool) -> torch.Tensor:
    """The matrix of which one triangle is read.

    Raises ValueError for NaN and Inf, which no eigenvalue problem with B accepts, not in batches either.
    """
    low = (x.mH if upper else x).tril()
    if not bool(low.isfinite().all()):
        place = (~low.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"{name}[{', '.join(map(str, place))}] is not finite: {name} must be finite")
    return hermitian_from_lower(low)


def _measured(
    a: torch.Tensor,
    b: torch.Tensor,
    lower: torch.Tensor,
    w: torch.Tensor,
    v: torch.Tensor,
    options: SpectralOptions,
) -> tuple[SpectralMeasures, torch.Tensor, SpectralBounds]:
    """Measures that bound errors, relative backward errors of pencils, and the bounds of the latter."""
    n = a.shape[2]
    unit = rounding_error(n, a.dtype)
    image = b @ v
    r = a @ v - image * w[:, None, :]
    inverse = torch.linalg.solve_triangular(lower, torch.eye(n, dtype=a.dtype, device=a.device), upper=False)
    sizes = two_norms(a, 1, 2)[:, None], two_norms(b, 1, 2)[:, None]
    scale = (sizes[0] + w.abs() * sizes[1]) * two_norms(v, 1)
    magnified = two_norms(inverse, 1, 2)
    columns = two_norms(torch.linalg.solve_triangular(lower, r, upper=False), 1)
    columns = columns + magnified[:, None] * unit * scale
    wrong = unit * b.diagonal(0, 1, 2).real.sum(1) * magnified.square()
    columns = columns * torch.where(wrong < 1, (1 - wrong).rsqrt(), torch.inf)[:, None]
    gram = v.mH @ image
    lost = two_norms(gram - torch.eye(n, dtype=a.dtype, device=a.device), 1, 2)
    lost = lost + unit * (sizes[1] * two_norms(v, 1, 2)[:, None].square()).squeeze(1)
    backward = (two_norms(r, 1) / torch.where(scale > 0, scale, 1.0)).amax(1)
    total = two_norms(columns, 1)
    size = two_norms(w, 1)
    # However ill-conditioned B is, V is to be nearly orthonormal in its inner product.
    bound = replace(SpectralBounds.for_order(options.target, n, symmetric=True), orthogonality=0.1)
    return SpectralMeasures(columns, columns, total, lost, size), backward, bound
