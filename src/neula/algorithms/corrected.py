"""Products with error correction: single-precision accuracy from products in a low format.

Ootomo and Yokota, "TSQR on TensorCores with error correction" (2021). With ``M_hi = fp16(M)`` and the
remainder ``dM = fp16((M - M_hi) 2^11)``,

    A B  ~  A_hi B_hi + (dA B_hi + A_hi dB) / 2^11;

the product ``dA dB / 2^22`` is dropped. The paper scales the remainder by 2^10. It is at most half a unit
in the last place, so 2^11 does not overflow either, and keeps one more bit of those that come out
subnormal.

Accuracy, in units of ``u = 2^-24`` and against ``|A| |B|``: splitting errs by at most 2 u for each operand,
and the dropped product is at most 4 u; all three are far smaller on average. The remaining error is that of
the sums. A unit that truncates adds up to 2 u for every block of products, always toward zero, so that the
errors of a long sum do not cancel. Here it sums only ``run`` products, from zero, and the sums of the runs
are added in float32, rounded to nearest.

Elements that are small compared with the largest of their row of A (or column of B) lose bits when they come
close to the smallest numbers of fp16, and vanish below them: their absolute error is at most ``2^-50`` times
that largest element. That is harmless for the error relative to ``max|a_i| max|b_j|``. It is not for ``|A|
|B|``, if large elements of A meet only tiny ones of B.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from neula.algorithms.trace import TraceEvent, Tracer, traced
from neula.engines import Engine, Format
from neula.engines.formats import round_to
from neula.kernels.products.gemm import RUN
from neula.kernels.products.parts import SCHEMES, Scheme, balanced, parts_of, unbalanced


def split(x: torch.Tensor, format: Format, parts: int = 2, scale: float = 2.0**11) -> list[torch.Tensor]:
    """Numbers of ``format`` whose sum is about ``x``, in its dtype: ``parts[0] + parts[1] / scale + parts[2]
    / scale**2 + ...``

    X is float32 or float64, in the range of the format. Each remainder is multiplied by ``scale`` before it
    is rounded, so that it stays clear of subnormal numbers.

    >>> from neula.engines import FP16
    >>> high, low = split(torch.tensor([1.0 + 2.0**-15]), FP16)
    >>> float(high), float(low) / 2**11 == 2.0**-15
    (1.0, True)
    """
    return parts_of(x, partial(round_to, target=format), parts, scale)


def scaled_product(a: torch.Tensor, b: torch.Tensor, engine: Engine) -> torch.Tensor:
    """``A B``, uncorrected, in the format of an engine (any but fp64), with balanced rows and columns; in the
    dtype of A.
    """
    a_scaled, a_exponents = balanced(a)
    b_scaled, b_exponents = balanced(b.mT)
    product = engine.gemm(engine.operand(a_scaled), engine.operand(b_scaled).mT)
    return unbalanced(product.to(a.dtype), a_exponents, b_exponents)


# item: T corrected product
def corrected_product(
    a: torch.Tensor,
    b: torch.Tensor,
    engine: Engine,
    scheme: Scheme | None = None,
    *,
    run: int = RUN,
    trace: Tracer | None = None,
) -> torch.Tensor:
    """``A B`` from products in the engine's format, about as accurate as one in float32.

    Shapes: a (m, k). ``b``, shape (k, n): float32 or float64, which is rounded to float32. ``engine``: in
    format fp16, tf32 or bf16. ``scheme``: parts and scales; by default those of
    :data:`neula.kernels.products.parts.SCHEMES` for the format. ``run``: products of leading parts that the
    unit sums from zero; the sums are added in float32. ``trace``: called with the split of each operand and
    with each product. Returns shape (m, n): in the dtype of ``a``, column-major.

    >>> from neula.engines import EmulatedEngine
    >>> a = torch.tensor([[1.0, 2.0**-13], [3.0, 5.0]])
    >>> corrected_product(a, a, EmulatedEngine(format="fp16"))[0, 1] == 2.0**-13 * 6
    tensor(True)
    """
    scheme = scheme or SCHEMES[f"{engine.format.name}_cor"]
    a_scaled, a_exponents = balanced(a, scheme.top)
    b_scaled, b_exponents = balanced(b.mT, scheme.top)
    scale = 2.0**scheme.shift
    engine = _traced_splits(trace, engine, (a, b), scheme.parts, scale)
    a_parts = [engine.operand(part) for part in split(a_scaled, engine.format, scheme.parts, scale)]
    b_parts = [engine.operand(part).mT for part in split(b_scaled, engine.format, scheme.parts, scale)]
    total = engine.empty(a.shape[0], b.shape[1]).zero_()
    for x, y in zip(a_parts[0].split(run, 1), b_parts[0].split(run, 0), strict=True):
        engine.gemm(x, y, total, beta=1.0)
    small = torch.zeros_like(total)
    for i, j in scheme.corrections:
        engine.gemm(a_parts[i], b_parts[j], small, beta=1.0)
    total.add_(small, alpha=1 / scale)
    return unbalanced(total.to(a.dtype), a_exponents, b_exponents)


def corrected_bmm(
    a: torch.Tensor, b: torch.Tensor, engine: Engine, *, shift: int | None = None
) -> torch.Tensor:
    """Batch of small products of float32 matrices with error correction, in fp16 or tf32, of elements in its
    range.

    The paper's formula: remainders are scaled by ``2**shift`` (10 in the slides, by default one more), so
    that they do not come out subnormal, and all sums are the unit's.
    """
    scale = 2.0 ** (SCHEMES[f"{engine.format.name}_cor"].shift if shift is None else shift)
    engine = _traced_splits(None, engine, (a, b), 2, scale)
    (a_high, a_low), (b_high, b_low) = (split(x, engine.format, scale=scale) for x in (a, b))
    small = engine.bmm(a_low, b_high) + engine.bmm(a_high, b_low)
    return engine.bmm(a_high, b_high) + small / scale


def _traced_splits(
    trace: Tracer | None, engine: Engine, operands: Iterable[torch.Tensor], parts: int, scale: float
) -> Engine:
    """Trace the parts of the operands, if a trace is kept; the engine then traces its products."""
    engine = engine if trace is None else traced(engine, trace)
    tracer: Tracer | None = getattr(engine, "trace", None)
    if tracer is None:
        return engine
    for x in operands:
        tracer(TraceEvent("split", shape=(parts, *x.shape), format=engine.format.name, value=scale))
    return engine
