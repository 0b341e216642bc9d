"""QR with column pivoting: an order of columns, the QR of the columns in this order, and what its R shows.

The factors come from LAPACK or the chains of :mod:`neula.problems.orthogonal.links`, and are certified as
without pivoting. If R shows pivots that are too short, or hides a small singular value, columns change places
and are factorized once more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from neula.algorithms.orthogonal.pivots import (
    PivotTuning,
    eliminated_order,
    greedy_orders,
    lapack_factors,
    sketched_pivots,
)
from neula.algorithms.orthogonal.strong_rrqr import first_weak, strong_order
from neula.algorithms.scaling import binary_exponents, power_of_two_scales
from neula.algorithms.spectra.numerical_rank import (
    is_invertible,
    largest_singular_values,
    numerical_ranks,
    rank_tolerance,
    smallest_singular_values,
)
from neula.algorithms.triangular.inverted import InvertedTuning
from neula.certificates.bounds import residual_bound
from neula.engines import FP16, FP32, FP64, Engine
from neula.engines.formats import double_of, in_double
from neula.kernels.magnitudes import largest_magnitude, two_norms
from neula.kernels.precision import plain_arithmetic
from neula.kernels.shift import shift
from neula.pipeline.call import Call
from neula.pipeline.chain import run_chain
from neula.pipeline.inputs import check_finite, finite_members, surely_finite
from neula.pipeline.result import Attempt
from neula.pipeline.result.shown import Later
from neula.problems.orthogonal.factorize import factorize
from neula.problems.orthogonal.links import go_together
from neula.problems.orthogonal.problem import (
    QRFactors,
    QRJudge,
    QRMatrices,
    QROptions,
    QRValues,
    measured_on_host,
)
from neula.problems.orthogonal.ways import together

LABEL = "householder with pivoting"
ROUNDS = 4  # eliminations in half precision, each of which reaches some three digits further down

SHOWN = 2.0
"""Times ``sqrt(n)`` times a singular value that R may show: not ten, since estimates are too large."""


def factorize_pivoted(
    matrices: torch.Tensor,
    mode: str,
    options: QROptions,
    *,
    is_batch: bool,
    begun: tuple[QRFactors, torch.Tensor] | None = None,
) -> tuple[QRFactors, torch.Tensor]:
    """Factors of ``A[:, P]``, and P.

    ``matrices``, shape (batch, m, n): on the engine's device. ``is_batch``: whether NaN and Inf are no error.
    ``begun``: from :func:`pivoted_on_host`. Returns ``order``, shape (batch, n): P of each matrix, int64.
    Columns of a matrix with NaN or Inf stay where they are. Raises ValueError if a single matrix holds NaN or
    Inf.
    """
    engine, some = options.engine, matrices.numel() > 0
    if some and not is_batch:
        check_finite(matrices[0], engine.column_max(matrices[0]), "A")
    with plain_arithmetic(engine.device):
        factors, order = _pivoted(matrices, mode, options) if begun is None else begun
    factors = factors or factorize(in_order(matrices, order), mode, options)
    if some and _eliminates(engine) and not _few_columns(matrices.shape, options):
        order, factors = _with_longer_pivots(order, factors, matrices, mode, options)
    with plain_arithmetic(engine.device):
        better = _strong_orders(factors, matrices, options) if some else None
    if better is None:
        return factors, order
    order = order.gather(1, better)
    return factorize(in_order(matrices, order), mode, options), order


def pivoted_on_host(call: Call, mode: str, options: QROptions) -> tuple[QRFactors, torch.Tensor] | None:
    """Factors of one matrix on a CPU as LAPACK finds them, and the order of its columns, shape (1, n), if
    they are accepted.
    """
    a, target = call.first.tensor, options.target
    asked = options.named or options.progress is not None or call.differentiable or call.first.places
    here = a.ndim == 2 and a.is_cpu and options.engine.device.type == "cpu" and options.engine.tuning.lapack
    usual = here and a.dtype.to_real() == target.dtype and target in (FP32, FP64) and mode in ("reduced", "r")
    if asked or not usual or a.numel() == 0 or not _few_columns((1, *a.shape), options):
        return None
    with call.computing():
        if not surely_finite(a):
            return None
        q, r, order = lapack_factors(a[None])
        measures = measured_on_host(a.index_select(1, order[0]), q[0], r[0], target)
        found = QRJudge(a.shape, target).certificate(QRValues(q, r, torch.from_numpy(measures).T))
    attempt = Attempt(LABEL, True, Later(lambda: found.in_words))
    return (QRFactors(q, r, (found,), (attempt,)), order) if found.accepted else None


def shows_all(found: QRFactors) -> bool:
    """Whether all singular values count, of columns of norm 1: then R has none to hide."""
    (r,), (m, n) = found.r, (found.q.shape[1], found.r.shape[2])
    leading = in_double(r[:, : len(r)]).resolve_conj().numpy()
    return is_invertible(leading, rank_tolerance(r.dtype, m, n), unit=True)


def in_order(a: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """``A[:, P]`` of each matrix, shape (..., m, n), differentiable, for P of shape (batch, n)."""
    places = order.to(a.device).reshape(*a.shape[:-2], 1, a.shape[-1])
    return a.take_along_dim(places, -1)


def _pivoted(matrices: torch.Tensor, mode: str, options: QROptions) -> tuple[QRFactors | None, torch.Tensor]:
    """An order of the columns of each matrix, shape (batch, m, n), by their norms: what suits their shape.

    LAPACK finds factors on the way, which are returned if they are all accepted.
    """
    _, m, n = matrices.shape
    if matrices.numel() == 0:
        return None, torch.arange(n, device=matrices.device).expand(len(matrices), n)
    engine, tuning = options.low_engine, options.engine.tuning
    if not _few_columns(matrices.shape, options):
        return None, _orders_of_large(matrices, options)
    exponents = binary_exponents(largest_magnitude(matrices, (1, 2), keepdim=True))
    scaled = shift(in_double(matrices), -exponents).to(engine.storage)
    scaled.masked_fill_(~finite_members(matrices)[:, None, None], 0.0)
    if not tuning.lapack:
        return None, greedy_orders(scaled)
    q, r, order = lapack_factors(scaled)
    if options.named or (matrices.dtype == double_of(matrices.dtype) and options.target is not FP64):
        return None, order
    r = shift(in_double(r), exponents)[..., : min(m, n)]
    return _accepted(in_order(matrices, order), q, r, mode, options), order


def _few_columns(shape: tuple[int, ...], options: QROptions) -> bool:
    (count, m, n), tuning = shape, options.engine.tuning
    few = min(m, n) <= tuning[PivotTuning].sketched_pivots
    return few and (tuning.lapack or count == 1 or go_together(count, m, n, tuning))


def _accepted(
    matrices: torch.Tensor, q: torch.Tensor, r: torch.Tensor, mode: str, options: QROptions
) -> QRFactors | None:
    """Factors of matrices in their new order, if all are as good as they must be."""
    judge = QRJudge(matrices.shape[1:], options.target, matrices)
    link = together(LABEL, q.dtype, lambda _: (q, r), scaled=False, waits=True)
    run = run_chain([link], QRMatrices(matrices, options), judge)
    if not run.accepted.all():
        return None
    factors = QRFactors.from_run(run, judge.certificates(run))
    return factors.completed() if mode == "complete" else factors


def _orders_of_large(matrices: torch.Tensor, options: QROptions) -> torch.Tensor:
    """Column orders of large matrices, one by one; unchanged for matrices with NaN or Inf."""
    unmoved = torch.arange(matrices.shape[2], device=matrices.device)
    usable = finite_members(matrices).tolist()
    return torch.stack(
        [_order_of(a, options) if finite else unmoved for a, finite in zip(matrices, usable, strict=True)]
    )


def _order_of(a: torch.Tensor, options: QROptions) -> torch.Tensor:
    at_once = _eliminates(options.engine)
    engine = options.engine.using(FP16) if at_once else options.low_engine
    largest = engine.column_max(a).to(torch.promote_types(a.dtype.to_real(), torch.float32)).amax()
    work = engine.empty(*a.shape, dtype=engine.operand_dtype if at_once else None)
    engine.fill(work, a, power_of_two_scales(largest).repeat(a.shape[1]))
    if at_once:
        return eliminated_order(work, engine)
    return sketched_pivots(work, engine, engine.tuning[PivotTuning].pivot_block)[0]


def _eliminates(engine: Engine) -> bool:
    """Whether elimination in half precision finds all pivots at once: of real matrices."""
    return engine.tuning.tournaments and not engine.is_complex


def _with_longer_pivots(
    order: torch.Tensor, factors: QRFactors, matrices: torch.Tensor, mode: str, options: QROptions
) -> tuple[torch.Tensor, QRFactors]:
    """Orders and factors when pivots that R shows to be too short have been replaced.

    The remainder of the columns is a part of R without rounding errors of half precision, and is eliminated
    in its own scale.
    """
    k = min(matrices.shape[1:])
    tolerance = _tolerance(matrices, options)
    before: dict[int, int] = {}
    for _ in range(ROUNDS):
        with plain_arithmetic(options.engine.device):
            starts = {i: first_weak(r[:k], tolerance) for i, r in enumerate(factors.r)}
            weak = {i: j for i, j in starts.items() if j is not None and j > before.get(i, -1)}
            if not weak:
                break
            before |= weak
            for i, start in weak.items():
                order[i, start:] = order[i, start:][_order_of(factors.r[i, start:k, start:], options)]
        factors = factorize(in_order(matrices, order), mode, options)
    return order, factors


def _tolerance(matrices: torch.Tensor, options: QROptions) -> float:
    """Singular values relative to the largest one up to which the precision of the factors tells nothing."""
    _, m, n = matrices.shape
    return max(rank_tolerance(matrices.dtype, m, n), residual_bound(options.target, n))


def _strong_orders(factors: QRFactors, matrices: torch.Tensor, options: QROptions) -> torch.Tensor | None:
    """Better orders of the columns of some R, shape (batch, n); None where all are good."""
    _, m, n = matrices.shape
    k = min(m, n)
    # In the precision of the factors: what it cannot tell from zero the tolerance does not, either.
    r = factors.r[:, :k]
    r = r.to(torch.promote_types(r.dtype, torch.float32))
    sizes = largest_magnitude(r, (1, 2))
    r = r * power_of_two_scales(sizes)[:, None, None].to(r.dtype)
    usable = sizes.isfinite()
    if not usable.all():
        r = torch.where(usable[:, None, None], r, 0.0)
    tolerance = _tolerance(matrices, options)
    smallest = partial(_smallest, options=options)
    doubtful = usable & (numerical_ranks(r, tolerance, exact=False, smallest=smallest(r[:, :, :k])) < k)
    places = doubtful.nonzero()[:, 0]
    if not len(places):
        return None
    order = torch.arange(n, device=r.device).repeat(len(r), 1)
    changed, some = False, r[places]
    sizes = tolerance * largest_singular_values(some)
    hidden = ~_show_the_last(some, sizes, smallest)
    for place, size in zip(places[hidden].tolist(), sizes[hidden].tolist(), strict=True):
        found = strong_order(in_double(r[place]), size)
        if found is not None:
            order[place], changed = found, True
    return order if changed else None


def _smallest(r: torch.Tensor, options: QROptions) -> torch.Tensor:
    """Smallest singular values of triangles, shape (batch, k, k): dozens of products with vectors."""
    width = options.engine.tuning[InvertedTuning].width(r.shape[2])
    estimate = partial(smallest_singular_values, width=width)
    return options.engine.replay(lambda x: (estimate(x),), (r,), ("smallest singular values", width))[0]


def _show_the_last(
    r: torch.Tensor, sizes: torch.Tensor, smallest: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Of which R, shape (batch, k, n), only the last singular value is at most of some size, and R shows it.

    A random square matrix is hardly ever further from full rank. No singular value of a leading block exceeds
    that of R with the same number, and that with number ``k + 1`` does not exceed the norm of what is left
    after k pivots.
    """
    k = r.shape[1] - 1
    if k == 0:
        return torch.zeros_like(sizes, dtype=torch.bool)
    least = torch.stack([smallest(r[:, :j, :j]) for j in (k, k + 1)])
    left = torch.stack([two_norms(r[:, j:, j:].triu(), 1, 2) for j in (k - 1, k)])
    return (left <= SHOWN * r.shape[2] ** 0.5 * least).all(0) & (least[0] > sizes)
