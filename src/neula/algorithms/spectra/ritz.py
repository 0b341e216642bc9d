"""Singular triplets of a matrix restricted to a subspace (Rayleigh-Ritz), with what they leave over."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neula.algorithms.orthogonal.cholesky_qr import cholesky_qr32, cholesky_qr32_in_place
from neula.algorithms.orthogonal.householder import householder
from neula.algorithms.orthogonal.panels import panel_named
from neula.algorithms.spectra.inverse_norm import schatten_bounds
from neula.engines import Engine
from neula.engines.formats import double_gram, in_double
from neula.kernels.cholesky.cholesky import MAX_COLUMNS
from neula.kernels.magnitudes import two_norms
from neula.kernels.polar.svd import small_svd

ROUNDING = 8
"""Units in the last place that elements of ``Q^H Q`` may be off by, for Q to count as orthonormal."""

TWICE_IS_ENOUGH = 0.1  # largest error from which a second pass makes Q orthonormal
LOST = 32  # units in the last place of ``||Q^H Q - I||_F / sqrt(l)`` beyond which a block is checked
Tensors = tuple[torch.Tensor, ...]

SURE = 1e-8
"""Part of the largest singular value of a block above which the kernel of small SVDs finds all vectors."""


@dataclass(frozen=True)
class Ritz:
    """``A V = U diag(s)`` with orthonormal U and V, and ``A^H U = V diag(s) + E``."""

    u: torch.Tensor  # shape (m, l)
    s: torch.Tensor  # shape (l,): descending, float64, on the host
    v: torch.Tensor  # shape (n, l)
    image: torch.Tensor  # shape (n, l): A^H U
    rest: torch.Tensor  # shape (l, l): E^H E, float64 or complex128, on the host
    loss: float  # ||U^H U - I||_F / sqrt(l) or the same of V, whichever is larger
    # Bound on ||V^H E||_2, which is zero up to rounding errors of products with A and of bases: by so much
    # U^H A V differs from diag(s).
    rounding: float

    @property
    def residual(self) -> float:
        """``||E||_F``."""
        return float(self.rest.trace().real.clamp_min(0).sqrt())


def orthonormal(
    x: torch.Tensor, engine: Engine, *, loss: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """QR of a block of columns whose Q is orthonormal whatever their rank.

    On a CPU by Householder's reflections. Else by a panel of the engine, which is a few products, and once
    more if that was not enough; by reflections where ``Q^H Q`` shows that columns depend on each
    other.

    ``x``, shape (m, l), m >= l: in the storage precision of the engine. ``loss``: how large elements of ``Q^H
    Q - I`` may be; rounding errors by default. Returns q, shape (m, l); r, shape (l, l): float64 or
    complex128, on the host.

    Examples
    --------
    >>> import torch
    >>> from neula.engines import CpuEngine
    >>> q, r = orthonormal(torch.ones(4, 2), CpuEngine("cpu", "fp32"))
    >>> bool((q.T @ q - torch.eye(2)).norm() < 1e-6)
    True
    """
    if loss is None:
        loss = ROUNDING * torch.finfo(x.dtype).eps
    if engine.tuning.lapack:
        q, r = householder(x, engine)
        return q, in_double(r)
    panel = panel_named(engine.tuning.recursion(x.dtype).panel)
    q, r = panel(x, engine)
    r, gram = engine.over_rows.agree(torch.stack([in_double(r), engine.gram(q)])).cpu()
    lost = float((gram - torch.eye(len(r), dtype=gram.dtype, device="cpu")).abs().amax())
    if lost <= loss:
        return q, r
    if lost <= TWICE_IS_ENOUGH:  # not for NaN
        q, again = panel(q, engine)
        return q, engine.over_rows.agree(in_double(again)).cpu() @ r
    q, r = householder(x, engine)
    return q, in_double(r.cpu())


def is_asynchronous(x: torch.Tensor, engine: Engine) -> bool:
    """Whether a block is made orthonormal without a check: where a check takes longer."""
    panel = engine.tuning.recursion(x.dtype).panel
    few = x.shape[1] <= MAX_COLUMNS and not engine.over_rows.spread
    return panel == "cholesky32" and x.dtype == torch.float32 and few


def orthonormal_asynchronously(x: torch.Tensor, engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`orthonormal` by three passes of Cholesky QR, which do up to a condition number of ``1/u``.

    Nothing waits, and R, float64, stays on the device. Both are NaN where a column vanishes.
    """
    q, r = cholesky_qr32(x, engine)
    r, step = r.double(), torch.empty_like(r)
    for _ in range(2):
        cholesky_qr32_in_place(q, step, engine)
        r = step.double() @ r
    return q, r


def ritz_triplets(a: torch.Tensor, block: torch.Tensor, engine: Engine) -> Ritz:
    """Singular triplets of A restricted to the range of a block, by two products with A.

    Where no block needs a check, the host waits once; steps between products with A are replayed
    from CUDA graphs.

    Shapes: block (n, l). ``a``, shape (m, n), m >= n: in the storage precision of the engine. ``engine``: its
    products are as accurate as the triplets. Rows of A may be spread over processes. Returns Ritz: NaN where
    there are some in A or in the block.

    Examples
    --------
    >>> import torch
    >>> from neula.engines import CpuEngine
    >>> a = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
    >>> ritz_triplets(a, torch.eye(3)[:, :2], CpuEngine("cpu", "fp32")).s
    tensor([3., 2.], dtype=torch.float64)
    """
    if is_asynchronous(block, engine):
        (v,) = engine.replay(
            lambda x: orthonormal_asynchronously(x, engine)[:1], (block,), ("basis of a block", repr(engine))
        )

        def rotated(image: torch.Tensor, v: torch.Tensor) -> Tensors:
            q, r = orthonormal_asynchronously(image, engine)
            return _rotated(v, q, small_svd(r), engine)

        triplets = engine.replay(rotated, (engine.gemm(a, v), v), ("Ritz vectors", repr(engine)))
        found = _measured(a, triplets, engine)
        if found.loss <= LOST * torch.finfo(v.dtype).eps and bool(found.s[-1] > SURE * found.s[0]):
            return found
    # The block is the same on all processes, if rows of A are spread over some.
    v = engine.over_rows.agree(orthonormal(block, engine.alone)[0])
    q, r = orthonormal(engine.gemm(a, v), engine)
    return _measured(a, _rotated(v, q, small_svd.reference(r), engine), engine)


def _rotated(v: torch.Tensor, q: torch.Tensor, of_r: Tensors, engine: Engine) -> Tensors:
    """U, s and V from ``A V = Q R`` and the singular value decomposition of R."""
    # Singular vectors are not unique: all processes take those of the first.
    w, s, x = engine.over_rows.agreed(*(part.to(v.device) for part in of_r))
    return engine.gemm(q, w.to(q)), s, engine.gemm(v, x.to(v))


def _measured(a: torch.Tensor, triplets: Tensors, engine: Engine) -> Ritz:
    """U, s and V with what they leave over; the host waits once."""
    (u, s, v), over_rows = triplets, engine.over_rows

    def measured(image: torch.Tensor, u: torch.Tensor, s: torch.Tensor, v: torch.Tensor) -> Tensors:
        losses = [_loss(over_rows.total(double_gram(u))), _loss(double_gram(v))]
        rest = image - v * s.to(v.dtype.to_real())
        rounding = schatten_bounds((in_double(v).mH @ in_double(rest))[None])[1][0, 0]
        numbers = [torch.stack(losses).amax(), rounding]
        return (torch.cat([double_gram(rest), s[None], torch.stack(numbers)[:, None].expand(2, len(s))]),)

    image = engine.inner(a, u)
    (found,) = engine.replay(measured, (image, u, s, v), ("Ritz residuals", repr(engine)))
    found = over_rows.agree(found).cpu()
    return Ritz(u, found[-3].real, v, image, found[:-3], *found[-2:, 0].real.tolist())


def _loss(gram: torch.Tensor) -> torch.Tensor:
    """``||G - I||_F / sqrt(l)``, in the memory of G."""
    gram.diagonal().sub_(1)
    return two_norms(gram) / len(gram) ** 0.5
