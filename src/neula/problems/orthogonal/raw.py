"""QR in Householder form: by reflecting, or from an explicit Q."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from neula.algorithms.orthogonal.reconstruction import householder_form
from neula.certificates.householder import householder_measures
from neula.certificates.qr_evidence import QRCertificate, QRCertificates
from neula.engines import FP32, FP64, Format
from neula.engines.formats import matching_dtype
from neula.engines.reduction import HERE, Reduction
from neula.kernels.magnitudes import largest_magnitude
from neula.kernels.precision import plain_arithmetic
from neula.kernels.qr.householder import factor_tiles
from neula.kernels.qr.reflectors import Reflectors
from neula.pipeline.chain import Answer, Link, answered, run_chain
from neula.pipeline.inputs import check_finite, surely_finite
from neula.pipeline.table import Chain, Row, Rule, Table
from neula.problems.orthogonal.factorize import factorize
from neula.problems.orthogonal.factors import QRFactors
from neula.problems.orthogonal.judge import QRJudge
from neula.problems.orthogonal.problem import QRMatrices, QROptions, QRTuning, QRValues, raw_dtype

RECONSTRUCTED = "reconstruction"
"""Label of the link that goes through an explicit Q."""

TILES = "fp16_cor"
"""Product of the kernel of reflectors."""


@dataclass(frozen=True)
class HouseholderForm(QRValues):
    """H, with R above its Householder vectors, and tau in the places of Q and R, and what was measured of the
    factors that they define.
    """

    def norms(
        self, which: np.ndarray, found: QRCertificate | QRCertificates, over_rows: Reduction = HERE
    ) -> np.ndarray:
        """The first estimates: without an explicit Q nothing is measured again."""
        return np.array(self.measures[:, 3].tolist())[which]


Solution = Answer[HouseholderForm]
RawLink = Link[QRMatrices, HouseholderForm]

Form = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""From matrices, the scales of their columns, and what else is given to H and tau."""


def factorize_raw(matrices: torch.Tensor, options: QROptions) -> QRFactors:
    """H and tau of one matrix or a batch, in the places of Q and R, on the engine's device.

    Shapes: matrices (batch, m, n).
    """
    count, m, n = matrices.shape
    if matrices.numel() == 0:
        nothing = QRFactors.of_nothing(matrices, "reduced", options.target)
        h, tau = matrices.new_empty(count, m, n), matrices.new_empty(count, min(m, n))
        return QRFactors(h, tau, nothing.certificates, nothing.attempts)
    judge = QRJudge((m, n), options.target, matrices if count > 1 else None)
    with plain_arithmetic(options.engine.device):
        run = run_chain(chain_raw(m, options), QRMatrices(matrices, options), judge)
        return QRFactors.from_run(run, judge.certificates(run))


def chain_raw(m: int, options: QROptions) -> Sequence[RawLink]:
    """Links for matrices of m rows."""
    return Chain(TABLE, (m, options))


def _by_library(storage: Format) -> RawLink:
    """LAPACK's or cuSOLVER's reflections; of a single matrix after a look at its numbers."""
    label = f"householder {storage.name}"

    def reflected(batch: QRMatrices, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = matching_dtype(storage.dtype, batch.a.dtype)
        if torch.promote_types(batch.a.dtype, kept) == kept:  # norms in LAPACK do not overflow
            return torch.geqrf(batch.a.to(kept))
        h, tau = torch.geqrf((batch.a * scales[:, None]).to(kept))
        return _unscaled(h, scales, batch), tau

    def answer(matrices: QRMatrices, before: Solution | None) -> Solution:
        a = matrices.a
        if len(a) == 1 and not surely_finite(a):
            check_finite(a[0], largest_magnitude(a[0], 0), "A")
        return _answer(matrices, label, *_measured(matrices, reflected))

    return Link(label, answer)


def _by_tiles(matrices: QRMatrices, before: Solution | None) -> Solution:
    """The kernel that reflects matrices of a few hundred rows, each by one thread block."""
    return _replayed(matrices, f"householder {TILES}", _reflected)


def _reflected(batch: QRMatrices, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    height = batch.a.shape[1]
    tiles, r = factor_tiles(batch.scaled(scales, torch.float32), height, TILES)
    diagonal = tiles.v.diagonal(dim1=1, dim2=2)  # at least 1, or zero where a column is
    y = tiles.v / torch.where(diagonal == 0, 1.0, diagonal)[:, None]  # zeros above the diagonal
    norms = torch.linalg.vector_norm(y, dim=1, dtype=torch.float64)
    tau = torch.where(diagonal == 0, 0.0, 2 / norms.square()).float()
    k, dtype = batch.k, raw_dtype(batch.a.dtype)
    inverse = scales.to(dtype).reciprocal()[:, None]  # of powers of two
    h = y.to(dtype)
    if batch.a.shape[2] > k:
        rest = (batch.a[..., k:] * scales[:, None, k:]).double()
        rest = Reflectors.from_householder(y, tau, torch.float64).apply(rest, transposed=True)
        h = torch.cat([h, rest.to(dtype) * inverse[..., k:]], 2)
    below = torch.ones(k, k, dtype=torch.bool, device=y.device).tril(-1)
    h[:, :k, :k] = torch.where(below, h[:, :k, :k], r * inverse[..., :k])
    return h, tau


def _reconstructed(matrices: QRMatrices, before: Solution | None) -> Solution:
    """Reflectors of the Q of the chain for Q and R."""
    factors = factorize(matrices.a, "reduced", matrices.options)
    label = [attempt.method for attempt in factors.attempts if attempt.method != "none"][-1]
    return _replayed(matrices, f"{label} + {RECONSTRUCTED}", _of_factors, factors.q, factors.r)


def _of_factors(
    batch: QRMatrices, scales: torch.Tensor, q: torch.Tensor, r: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return householder_form(q.to(raw_dtype(batch.a.dtype)), r)


def _replayed(matrices: QRMatrices, label: str, form: Form, *given: torch.Tensor) -> Solution:
    """H and tau by launches that do not depend on the numbers."""
    options = matrices.options

    def made(a: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _measured(QRMatrices(a, options), form, *given)

    key = (form.__name__, options.target.name)
    return _answer(matrices, label, *options.engine.replay(made, (matrices.a, *given), key))


def _measured(batch: QRMatrices, form: Form, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """H and tau as they are returned, and measures of what they define."""
    dtype, scales = raw_dtype(batch.a.dtype), batch.scales()
    h, tau = (x.to(dtype) for x in form(batch, scales, *given))
    return h, tau, householder_measures(batch.a, h, tau, scales)


def _unscaled(h: torch.Tensor, scales: torch.Tensor, batch: QRMatrices) -> torch.Tensor:
    """H with R in the units of the matrices that were given."""
    h = h.to(raw_dtype(batch.a.dtype))
    return h.tril(-1) + (h / scales[:, None].to(h.dtype)).triu()


def _answer(
    matrices: QRMatrices, label: str, h: torch.Tensor, tau: torch.Tensor, measures: torch.Tensor
) -> Solution:
    return answered(HouseholderForm(h, tau, measures.T), label, matrices.options.progress)


Case = tuple[int, QROptions]
"""Rows, and what is requested."""

_when = Rule[Case, bool]

_lapack = _when(
    "on a CPU, or of complex numbers, accuracies below fp64",
    lambda case: (
        (case[1].engine.tuning.lapack or case[1].engine.is_complex)
        and case[1].target is not FP64
        and not case[1].named
    ),
)

_few_rows = _when(
    "on a GPU, up to 512 rows of real numbers, accuracies below fp64",
    lambda case: (
        0 < case[0] <= case[1].engine.tuning[QRTuning].reflected_rows
        and case[1].target is not FP64
        and not (case[1].named or case[1].engine.tuning.lapack or case[1].engine.is_complex)
    ),
)

_explicit = _when(
    "on a GPU, and algorithms that make Q",
    lambda case: case[1].algorithm != "householder" if case[1].named else not case[1].engine.tuning.lapack,
)

_last = _when(
    "by default, and ``algorithm='householder'``",
    lambda case: not case[1].named or case[1].algorithm == "householder",
)

TABLE: Table[Case] = (
    Row("householder {}", lambda case, label, _: _by_library(FP32), (_lapack,), "", ("fp32",)),
    Row("householder {}", lambda case, label, _: Link(label, _by_tiles), (_few_rows,), "", (TILES,)),
    Row(RECONSTRUCTED, lambda case, label, _: Link(label, _reconstructed), (_explicit,)),
    Row("householder {}", lambda case, label, _: _by_library(FP64), (_last,)),
)
"""Cheapest first. LAPACK reflects nearly as fast as it multiplies. On a GPU a thread block reflects a small
matrix by itself, whatever its condition; others go through an explicit Q, which is made of products."""
