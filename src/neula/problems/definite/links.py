"""The table of links for Cholesky factors.

The recursion, or tiles, where that takes less time than what the library does, else the library; the last
link is the library in double precision, which alone says that a matrix is not positive definite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from neula.algorithms.elimination.cholesky import CholeskyOrders, cholesky, library_cholesky
from neula.certificates.cholesky import residuals_of_triangles
from neula.engines import FORMATS, FP64, Arithmetic, Engine, Format
from neula.engines.formats import in_double as wider
from neula.engines.formats import matching_dtype
from neula.kernels.cholesky.cholesky_tiles import factor_batch, lower_factor
from neula.kernels.cholesky.symmetric import symmetric_copy, unscaled_triangle
from neula.kernels.few_vectors.triangle import diagonal_scales
from neula.pipeline.batches import SingularMember
from neula.pipeline.chain import LAUNCHED, Answer, Case, Chain, Link, Row, Rule, Table, way
from neula.pipeline.progress import stage
from neula.problems.definite.problem import CholeskyOptions, CholeskyValues, Symmetric

Solution = Answer[CholeskyValues]
Found = tuple[torch.Tensor, torch.Tensor]  # L, and what is measured of it


SAFE_EXPONENT = 450
"""Diagonal elements between ``2^-e`` and ``2^e`` have factors in double precision whose products neither
overflow nor lose digits."""

REPLAYED = 20 << 20
"""Bytes of matrices up to which launches are replayed: copies of larger ones take a GPU longer than launches
take the host."""


def recursive(matrices: Symmetric, before: Solution | None, arithmetic: Arithmetic) -> Solution:
    engine = matrices.options.engine.using(arithmetic)
    return _queued(matrices, arithmetic.name, partial(_by_recursion, engine=engine))


def in_double(matrices: Symmetric, before: Solution | None) -> Solution:
    """Factorize in double precision, by tiles or by the library, without reading the elements."""
    # Where these are near the ends of the range, or A is not definite, the residual shows it.
    return _queued(matrices, FP64.name, _by_tiles)


def by_library(
    matrices: Symmetric, before: Solution | None, format: Format, *, may_wait: bool = True
) -> Solution:
    """LAPACK or cuSOLVER, in float32 or float64."""
    # ``may_wait``: whether the host may wait to see if scales matter, and if there is a factor. Raises
    # SingularMember if there is no factor in double precision.
    a, label = matrices.a, f"cholesky {format.name}"
    dtype = matching_dtype(format.dtype, a.dtype)
    report = stage(matrices.options.progress, f"factorizing in {format.name}")
    scales = diagonal_scales(a) if format is FP64 else None
    # In single precision nothing waits for the answer: where scales matter, the residual shows it.
    if scales is None or (may_wait and _is_safe(scales)):
        found = library_cholesky(a.to(dtype))
        lower = found.lower.to(a.dtype)
    else:
        wide = scales.to(torch.promote_types(a.dtype, torch.float32).to_real())
        found = library_cholesky(symmetric_copy(a, wide).to(dtype))
        lower = unscaled_triangle(found.lower, wide, a.dtype)
    if format is FP64 and may_wait:
        orders = found.order.tolist()
        if any(orders):
            first = next(i for i, order in enumerate(orders) if order)
            place = first if matrices.place is None else int(matrices.place[first])
            raise SingularMember(place, f"the leading minor of order {orders[first]} is not positive")
    report(1.0)
    measured = residuals_of_triangles(a, lower, found.order)
    return Answer(CholeskyValues(lower, measured[0]), label, measured=measured)


def _queued(matrices: Symmetric, name: str, function: Callable[[torch.Tensor], Found]) -> Solution:
    """L in an arithmetic, and its measures, replayed from a graph if that is faster."""
    engine, label = matrices.options.engine, f"cholesky {name}"
    report = stage(matrices.options.progress, f"factorizing in {name}")
    # The library may wait for the host where it factorizes batches of complex matrices.
    replays = matrices.a.nbytes <= REPLAYED and (len(matrices.a) == 1 or not matrices.a.is_complex())
    lower, measured = engine.replay(function, (matrices.a,), label) if replays else function(matrices.a)
    report(1.0)
    return Answer(CholeskyValues(lower, measured[0]), label, measured=measured)


def _by_tiles(a: torch.Tensor) -> Found:
    lower, order = lower_factor(wider(a))
    lower = lower.to(a.dtype)
    return lower, residuals_of_triangles(a, lower, order)


def _by_recursion(a: torch.Tensor, *, engine: Engine) -> Found:
    """L in the dtype of A, and what is measured; without synchronizing."""
    # Of A scaled by powers of two to a diagonal near one, which rounds nothing: then no format is too narrow.
    # Single precision, by tiles or by the library, takes A unscaled: if scales matter, the residual shows it.
    n, tuning = a.shape[-1], engine.tuning
    if (len(a) > 1 or n <= tuning[CholeskyOrders].tiled_cholesky) and factor_batch.takes(a):
        together = factor_batch(a)
        lower, order = together.lower.to(a.dtype), together.order
    elif (len(a) == 1 or a.is_complex()) and n < tuning[CholeskyOrders].cholesky:
        lower, order, _ = library_cholesky(a.to(engine.storage))
        lower = lower.to(a.dtype)
    else:
        wide = torch.promote_types(a.dtype, torch.float32)
        scales = diagonal_scales(a).to(wide.to_real())
        work = symmetric_copy(a, scales, rows=engine.rows(n), whole=False)
        found = cholesky(work if wide == engine.storage else _in(work, engine.storage), engine)
        lower, order = unscaled_triangle(found.lower, scales, a.dtype), found.order
    return lower, residuals_of_triangles(a, lower, order)


def _is_safe(scales: torch.Tensor) -> bool:
    """Whether A can be factorized in double precision as it is."""
    most = 2.0 ** (SAFE_EXPONENT // 2)
    return bool(((scales <= most) & (scales >= 1 / most)).all())


def _in(work: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(work.shape, work.stride(), dtype=dtype, device=work.device).copy_(work)


CholeskyLink = Link[Symmetric, CholeskyValues]


@dataclass(frozen=True)
class CholeskyCase(Case):
    count: int
    n: int
    options: CholeskyOptions
    wait: bool = True  # whether the first link may wait for the host

    @property
    def launches(self) -> bool:
        """Whether links before the last one only launch."""
        return not self.tuning.lapack

    @property
    def double(self) -> bool:
        return self.options.low.format is FP64

    @property
    def tiled(self) -> bool:
        """Whether tiles in double precision come first."""
        most = self.tuning[CholeskyOrders].tiled_cholesky
        return self.double and self.launches and self.n <= most

    @property
    def pays(self) -> bool:
        """Whether anything beats the library in single precision."""
        n, orders = self.n, self.tuning[CholeskyOrders]
        large = self.count > 1 or n <= orders.tiled_cholesky or n >= orders.cholesky
        return n >= orders.batched_cholesky and large


def chain(count: int, n: int, options: CholeskyOptions, *, wait: bool = True) -> Sequence[CholeskyLink]:
    return Chain(TABLE, CholeskyCase(count, n, options, wait))


def _recursive(case: CholeskyCase, label: str, name: str) -> CholeskyLink:
    return Link(label, partial(recursive, arithmetic=case.options.low), launches_only=case.launches)


def _library(case: CholeskyCase, label: str, name: str) -> CholeskyLink:
    launches = name == "fp32" and case.launches
    return Link(label, partial(by_library, format=FORMATS[name]), launches_only=launches)


_when = Rule[CholeskyCase, bool]

_not_waiting = _when(
    "``wait=False`` on a GPU, if the next links would wait",
    lambda case: not case.wait and case.launches and case.double and not case.tiled,
)

_tiles = _when("on a GPU, up to order 8192", lambda case: case.tiled)

_pays = _when(
    "accuracies below fp64, batches on a GPU, one up to order 8192 or where products are fast",
    lambda case: not case.double and case.pays,
)

_low = _when("accuracies below fp64 elsewhere", lambda case: not (case.double or case.pays))

_products = Rule[CholeskyCase, Sequence[str]](
    "the cheapest that reaches the accuracy", lambda case: [case.options.low.name]
)

_unread = way(partial(by_library, format=FP64, may_wait=False), launches_only=True)
CHOLESKY = "cholesky {}"

TABLE: Table[CholeskyCase] = (
    Row(CHOLESKY, _unread, (_not_waiting,), place=LAUNCHED),
    Row(CHOLESKY, way(in_double, launches_only=True), (_tiles,), place=LAUNCHED),
    Row(CHOLESKY, _recursive, (_pays,), arithmetics=_products),
    Row(CHOLESKY, _library, (_low,), arithmetics=("fp32",)),
    Row(CHOLESKY, _library, ()),
)
"""Cheapest first."""
