"""Singular triplets of a matrix restricted to a subspace (Rayleigh-Ritz), with what they leave over."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neula.algorithms.orthogonal.householder import householder
from neula.algorithms.orthogonal.panels import panel_named
from neula.engines import Engine

ROUNDING = 8
"""Units in the last place that elements of ``Q^T Q`` may be off by, for Q to count as orthonormal."""

TWICE_IS_ENOUGH = 0.1
"""What they may be off by for a second pass to make Q orthonormal."""


@dataclass(frozen=True)
class Ritz:
    """``A V = U diag(s)`` with orthonormal U and V, and ``A^T U = V diag(s) + E``.

    Attributes
    ----------
    u : Tensor, shape (m, l)
    s : Tensor, shape (l,)
        Descending, float64, on the host.
    v : Tensor, shape (n, l)
    image : Tensor, shape (n, l)
        ``A^T U``.
    rest : Tensor, shape (l, l)
        ``E^T E``, float64, on the host.
    loss : float
        ``||U^T U - I||_F / sqrt(l)`` or the same of V, whichever is larger.
    """

    u: torch.Tensor
    s: torch.Tensor
    v: torch.Tensor
    image: torch.Tensor
    rest: torch.Tensor
    loss: float


def orthonormal(
    x: torch.Tensor, engine: Engine, *, loss: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """QR of a block of columns whose Q is orthonormal whatever their rank.

    By LAPACK where nothing is faster. Else by a panel of the engine, which is a few products, and once more
    if that was not enough; by Householder's reflections where a look at ``Q^T Q`` says that columns depend on
    each other.

    Parameters
    ----------
    x : Tensor, shape (m, l), m >= l
        In the storage precision of the engine.
    engine : Engine
    loss : float, optional
        How large elements of ``Q^T Q - I`` may be; rounding errors by default.

    Returns
    -------
    q : Tensor, shape (m, l)
    r : Tensor, shape (l, l)
        float64, on the host.

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
        return q, r.cpu().double()
    panel = panel_named(engine.tuning.recursion(x.dtype).panel)
    q, r = panel(x, engine)
    r, gram = engine.over_rows.agree(torch.stack([r.double(), engine.gram(q)])).cpu()
    lost = float((gram - torch.eye(len(r), dtype=gram.dtype, device="cpu")).abs().amax())
    if lost <= loss:
        return q, r
    if lost <= TWICE_IS_ENOUGH:  # not for NaN
        q, again = panel(q, engine)
        return q, engine.over_rows.agree(again.double()).cpu() @ r
    q, r = householder(x, engine)
    return q, r.cpu().double()


def ritz_triplets(a: torch.Tensor, v: torch.Tensor, engine: Engine) -> Ritz:
    """Singular triplets of ``A V V^T`` by two products with A.

    Parameters
    ----------
    a : Tensor, shape (m, n), m >= n
        In the storage precision of the engine.
    v : Tensor, shape (n, l)
        Orthonormal columns.
    engine : Engine
        Its products are as accurate as the triplets. Rows of A may be spread over processes.

    Returns
    -------
    Ritz
        NaN where there are some in A or V.

    Examples
    --------
    >>> import torch
    >>> from neula.engines import CpuEngine
    >>> a = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
    >>> ritz_triplets(a, torch.eye(3)[:, :2], CpuEngine("cpu", "fp32")).s
    tensor([3., 2.], dtype=torch.float64)
    """
    q, r = orthonormal(engine.gemm(a, v), engine)
    if not bool(r.isfinite().all()):
        nan = torch.full_like(r, torch.nan)
        return Ritz(q, nan[0], v, v, nan, torch.nan)
    over_rows = engine.over_rows
    w, s, x = torch.linalg.svd(r)
    w, x = (rotation.to(v) for rotation in (w, x.T))
    if over_rows.spread:  # singular vectors are not unique: all processes take those of the first
        w, s, x = over_rows.agreed(w, s.to(v.device), x)
        s = s.cpu()
    u, v = engine.gemm(q, w), engine.gemm(v, x)
    image = engine.inner(a, u)
    rest = image - v * s.to(v)
    grams = (over_rows.total(_gram64(u)), _gram64(v))
    losses = [torch.linalg.matrix_norm(gram - torch.eye(len(s), device=gram.device)) for gram in grams]
    measured = torch.cat([_gram64(rest), torch.stack(losses).max().expand(1, len(s))])
    measured = over_rows.agree(measured).cpu()
    return Ritz(u, s, v, image, measured[:-1], float(measured[-1, 0]) / len(s) ** 0.5)


def _gram64(b: torch.Tensor) -> torch.Tensor:
    wide = b.double()
    return wide.T @ wide
