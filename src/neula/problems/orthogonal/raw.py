"""QR in Householder form: by reflecting, or from an explicit Q."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from neula.algorithms.orthogonal.reconstruction import householder_form
from neula.certificates.householder import householder_images, householder_measures
from neula.certificates.qr_evidence import QRCertificate, QRCertificates
from neula.engines import FP32, FP64, Format
from neula.engines.formats import matching_dtype
from neula.engines.reduction import HERE, Reduction
from neula.kernels.magnitudes import largest_magnitude
from neula.kernels.precision import plain_arithmetic
from neula.pipeline.chain import Answer, Chain, Link, Row, Rule, Table, answered, run_chain
from neula.pipeline.inputs import check_finite, surely_finite
from neula.problems.orthogonal.factorize import factorize
from neula.problems.orthogonal.problem import (
    QRFactors,
    QRJudge,
    QRMatrices,
    QROptions,
    QRTuning,
    QRValues,
    raw_dtype,
)

RECONSTRUCTED = "reconstruction"  # label of the link that goes through an explicit Q


@dataclass(frozen=True)
class HouseholderForm(QRValues):
    """H, with R above its Householder vectors, and tau in the places of Q and R, and their measures."""

    def norms(
        self, which: np.ndarray, found: QRCertificate | QRCertificates, over_rows: Reduction = HERE
    ) -> np.ndarray:
        """The first estimates: without an explicit Q nothing is measured again."""
        return np.array(self.measures[:, 3].tolist())[which]


Solution = Answer[HouseholderForm]
RawLink = Link[QRMatrices, HouseholderForm]


def factorize_raw(matrices: torch.Tensor, options: QROptions) -> QRFactors:
    """H and tau of one matrix or a batch, in the places of Q and R, on the engine's device."""
    # Shapes: matrices (batch, m, n).
    count, m, n = matrices.shape
    if matrices.numel() == 0:
        nothing = QRFactors.of_nothing(matrices, "reduced", options.target)
        h, tau = matrices.new_empty(count, m, n), matrices.new_empty(count, min(m, n))
        return QRFactors(h, tau, nothing.certificates, nothing.attempts)
    judge = QRJudge((m, n), options.target, matrices if count > 1 else None)
    with plain_arithmetic(options.engine.device):
        run = run_chain(Chain(TABLE, (tuple(matrices.shape), options)), QRMatrices(matrices, options), judge)
        return QRFactors.from_run(run, judge.certificates(run))


def _by_library(storage: Format) -> RawLink:
    """LAPACK's or cuSOLVER's reflections; of a single matrix after a check of its numbers."""
    label = f"householder {storage.name}"

    def answer(matrices: QRMatrices, before: Solution | None) -> Solution:
        a, scales, kept = matrices.a, matrices.scales(), matching_dtype(storage.dtype, matrices.a.dtype)
        if len(a) == 1 and not surely_finite(a):
            check_finite(a[0], largest_magnitude(a[0], 0), "A")
        if torch.promote_types(a.dtype, kept) == kept:  # norms in LAPACK do not overflow
            h, tau = torch.geqrf(a.to(kept))
        else:
            h, tau = torch.geqrf((a * scales[:, None]).to(kept))
            h = h.to(raw_dtype(a.dtype))
            h = h.tril(-1) + (h / scales[:, None].to(h.dtype)).triu()  # R in the units of A
        h, tau = (x.to(raw_dtype(a.dtype)) for x in (h, tau))
        (measures,) = matrices.options.engine.replay(_measured, (a, h, tau, scales), (label,))
        return _answer(matrices, label, h, tau, measures)

    return Link(label, answer)


def _reconstructed(matrices: QRMatrices, before: Solution | None) -> Solution:
    """Reflectors of the Q of the chain for Q and R, by launches that do not depend on the numbers."""
    a, options, dtype = matrices.a, matrices.options, raw_dtype(matrices.a.dtype)
    factors = factorize(a, "reduced", options)
    label = [attempt.method for attempt in factors.attempts if attempt.method != "none"][-1]

    def made(q: torch.Tensor, r: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h, tau = householder_form(q.to(dtype), r)
        return h, tau, *householder_images(h, tau, scales)

    inputs, key = (factors.q, factors.r, matrices.scales()), (RECONSTRUCTED, options.target.name)
    parts = zip(*(x.chunk(_parts(inputs, options.engine.replayed_bytes)) for x in inputs), strict=True)
    found = [options.engine.replay(made, part, key) for part in parts]
    h, tau, *rest = map(torch.cat, zip(*found, strict=True)) if len(found) > 1 else found[0]
    measures = householder_measures(a, inputs[2], *rest)
    return _answer(matrices, f"{label} + {RECONSTRUCTED}", h, tau, measures)


def _parts(inputs: Sequence[torch.Tensor], largest: int) -> int:
    """Equal parts of a batch that a CUDA graph may each have, one after the other; 1 where there are none:
    hundreds of launches a call take longer than the reflectors of dozens of matrices, but not of hundreds.
    """
    (count, _, n), nbytes = inputs[0].shape, sum(x.nbytes for x in inputs)
    if count > n:
        return 1
    fitting = (k for k in range(1, count + 1) if count % k == 0 and nbytes <= k * largest)
    return next(fitting, 1)


def _measured(
    a: torch.Tensor, h: torch.Tensor, tau: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor]:
    return (householder_measures(a, scales, *householder_images(h, tau, scales)),)


def _answer(
    matrices: QRMatrices, label: str, h: torch.Tensor, tau: torch.Tensor, measures: torch.Tensor
) -> Solution:
    return answered(HouseholderForm(h, tau, measures.T), label, matrices.options.progress)


Case = tuple[tuple[int, ...], QROptions]  # shape of the batch, and what is requested
_when = Rule[Case, bool]


def _few(case: Case) -> bool:
    (count, _, n), options = case
    tuning = options.engine.tuning[QRTuning]
    return n <= (tuning.reflected if count == 1 else tuning.reflected_of_batch)


_lapack = _when(
    "on a CPU, or of complex numbers or few columns, accuracies below fp64",
    lambda case: (
        (case[1].engine.tuning.lapack or case[1].engine.is_complex or _few(case))
        and case[1].target is not FP64
        and not case[1].named
    ),
)

_explicit = _when(
    "on a GPU, if there are more columns, and algorithms that make Q",
    lambda case: (
        case[1].algorithm != "householder"
        if case[1].named
        else not (case[1].engine.tuning.lapack or _few(case))
    ),
)

_last = _when(
    "by default, and ``algorithm='householder'``",
    lambda case: not case[1].named or case[1].algorithm == "householder",
)

TABLE: Table[Case] = (
    Row("householder {}", lambda case, label, _: _by_library(FP32), (_lapack,), "", ("fp32",)),
    Row(RECONSTRUCTED, lambda case, label, _: Link(label, _reconstructed), (_explicit,)),
    Row("householder {}", lambda case, label, _: _by_library(FP64), (_last,)),
)
"""Cheapest first. LAPACK reflects nearly as fast as it multiplies; a GPU goes through an explicit Q, which is
made of products."""
