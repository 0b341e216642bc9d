"""Q and R in working precision: one matrix, or a batch of them together or one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from neula.algorithms.scaling import binary_exponents
from neula.certificates.qr import QRCertificate
from neula.engines import FP64, Format
from neula.kernels.precision import plain_arithmetic
from neula.kernels.shift import shift
from neula.pipeline.chain import Link, Run, run_chain
from neula.pipeline.inputs import check_finite, finite_members
from neula.pipeline.over_processes import in_step
from neula.problems.orthogonal import chain
from neula.problems.orthogonal.chain import Layout, QRJudge
from neula.problems.orthogonal.factors import Factors
from neula.problems.orthogonal.links import QRLink, without_factors
from neula.problems.orthogonal.problem import Matrices, Options, QRValues


def factorize(matrices: torch.Tensor, mode: str, options: Options) -> Factors:
    """Q and R of one matrix or a batch, by what suits it, on the engine's device.

    Parameters
    ----------
    matrices : Tensor, shape (batch, m, n)
    mode : {"reduced", "r", "complete"}
        Whether Q is to be square.
    options : Options
    """
    engine, target = options.engine, options.target
    count, m, n = matrices.shape
    with plain_arithmetic(engine.device):
        if matrices.numel() == 0:
            return Factors.of_nothing(matrices, mode, target)
        if not options.named and chain.go_together(count, m, n, engine.tuning):
            matrices, exponents = _in_range(matrices, target)
            links = chain.chain_together(m, n, target, engine.tuning)
            factors = factorize_together(matrices, links, options)
            if exponents is not None:
                factors = replace(factors, r=shift(factors.r.double(), exponents))
        else:
            factors = _one_after_the_other(matrices, options)
        return factors.completed() if mode == "complete" else factors


def factorize_together(matrices: torch.Tensor, links: Sequence[QRLink], options: Options) -> Factors:
    """Run a chain: each link for those matrices that were not accepted before."""
    over_rows = options.over_rows
    if over_rows.spread:  # NaN on one process is an error on all of them
        check_finite(matrices[0], options.engine.column_max(matrices[0]), "A", over_rows)
    judge = QRJudge(options.shape_of(matrices.shape), options.target, None if over_rows.spread else matrices)
    return Factors.of(*_run(links, Matrices(matrices, options), judge))


def _one_after_the_other(matrices: torch.Tensor, options: Options) -> Factors:
    """Each by a chain of its own; the attempts are those of the first that is not accepted."""
    judge = QRJudge(options.shape_of(matrices.shape), options.target, in_place=options.in_place)
    usable = finite_members(matrices).tolist() if len(matrices) > 1 else [True]
    runs: list[Run[QRValues]] = []
    certificates: list[QRCertificate] = []
    for place, finite in enumerate(usable):
        a = matrices[place : place + 1]
        links = [Link("none", without_factors)]
        if finite:
            links = chain.chain_alone(Layout.of(a[0]), options)
        run, found = _run(links, Matrices(a, options), judge)
        runs.append(run)
        certificates += found
    worst = next((run for run in runs if not run.accepted[0]), runs[-1])
    values = QRValues.joined([run.found for run in runs])
    return Factors(values.q, values.r, tuple(certificates), tuple(worst.attempts))


def _run(
    links: Sequence[QRLink], matrices: Matrices, judge: QRJudge
) -> tuple[Run[QRValues], Sequence[QRCertificate]]:
    run = run_chain(in_step(links) if matrices.options.over_rows.spread else links, matrices, judge)
    return run, judge.certificates(run)


def _in_range(matrices: torch.Tensor, target: Format) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Matrices that are factorized in a narrower range than theirs, divided by powers of two.

    Returns
    -------
    matrices : Tensor, shape (batch, m, n)
    exponents : Tensor of int, shape (batch, 1, 1), or None
    """
    if matrices.dtype != torch.float64 or target is FP64:
        return matrices, None
    exponents = binary_exponents(torch.linalg.vector_norm(matrices, torch.inf, dim=(1, 2), keepdim=True))
    return shift(matrices, -exponents), exponents
