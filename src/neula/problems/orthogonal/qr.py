"""QR factorization: check the input, choose, run, certify."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from neula.algorithms.orthogonal.batched_qr import (
    TILE_COLUMNS,
    batched_qr,
    batched_reorthogonalize,
)
from neula.algorithms.orthogonal.cholesky_qr import cholesky_qr_low
from neula.algorithms.orthogonal.householder import householder
from neula.algorithms.orthogonal.panels import panel_named
from neula.algorithms.orthogonal.reorthogonalize import correct, refine_qr, reorthogonalize, second_passes
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.algorithms.orthogonal.tsqr import cholesky_tsqr32
from neula.algorithms.scaling import binary_exponents, power_of_two_scales, shift
from neula.certificates.bounds import target_format
from neula.certificates.qr import (
    QRCertificate,
    certificate_of,
    certifying_dtype,
    image_measures,
    image_of,
    qr_certificate,
    single_qr_measures,
)
from neula.engines import (
    BF16,
    FP16,
    FP32,
    FP64,
    Arithmetic,
    Engine,
    Format,
    select_engine,
)
from neula.errors import unknown_name
from neula.kernels.precision import plain_arithmetic
from neula.kernels.tall import PANEL_COLUMNS
from neula.pipeline.compilation import eager
from neula.pipeline.inputs import check_finite, check_matrices, finite_members, flattened, take
from neula.pipeline.progress import Progress
from neula.pipeline.result import Attempt, QRResult
from neula.problems.orthogonal.batch import (
    Batch,
    Factors,
    Link,
    as_result,
    complete,
    empty_factors,
    factorize_together,
    nothing,
    one_by_one,
    run_link,
    unusable,
)

MODES = ("reduced", "r", "complete")
ALGORITHMS = ("rgsqrf", "rgsqrf-reortho", "cholesky-qr", "householder")

SURELY_CORRECTED = 0.03
"""How far from orthonormal Q may be for a correction that must not leave a residual: in place."""

MAX_PASSES = 3
"""Gram-Schmidt passes: twice is enough at full rank, the third is for matrices without."""


@eager
def qr(
    A: Any,
    mode: str = "reduced",
    *,
    accuracy: str | None = None,
    engine: str | Engine = "auto",
    algorithm: str | None = None,
    compute: str | None = None,
    panel: str | None = None,
    cutoff: int | None = None,
    overwrite_a: bool = False,
    strict: bool = False,
    progress: Progress | None = None,
) -> QRResult:
    """QR factorization ``A = Q R`` on matrix units, certified to the accuracy asked for.

    The cheapest arithmetic is tried first: one pass of recursive Gram-Schmidt in the lowest format that can
    do, then re-orthogonalization (for fp64, Cholesky QR of ``A R^-1`` in double precision), then Householder
    reflections in double precision. An attempt is accepted when its measured residual and orthogonality are
    small enough.

    Parameters
    ----------
    A : array_like, shape (..., m, n)
        NumPy array, torch tensor or DLPack object, float16 to float64; integers are taken as float64. It is
        not modified, except with ``overwrite_a``. Leading dimensions are a batch; any dimension may be zero.
    mode : {"reduced", "r", "complete"}
        Q of shape (m, min(m, n)); only R; or Q of shape (m, m) and R of shape (m, n).
    accuracy : {"fp16", "bf16", "tf32", "fp32", "fp64"}, optional
        Accuracy of the result; by default that of A's dtype.
    engine : {"auto", "cpu", "cuda", "emulated"} or Engine, optional
        What multiplies. ``"auto"`` goes by the device of A.
    algorithm : {"rgsqrf", "rgsqrf-reortho", "cholesky-qr", "householder"}, optional
        Exactly this one, accepted or not; by default the chain above.
    compute : str, optional
        Format of the products: the cheapest that can give the accuracy by default.
    panel : {"caqr", "cholesky", "cholesky2", "cholesky32", "householder"}, optional
        Panel of the recursion; what measures best on the engine by default.
    cutoff : int, optional
        Width of the panels.
    overwrite_a : bool, optional
        Let Q take the memory of A, where that can be: for a single NumPy array or tensor on the engine's
        device, without a gradient, that is not wide, lies in memory column by column (Fortran order), and has
        the dtype that Q is computed in (float64 for accuracy fp64, float32 for others); on a GPU with a
        multiple of 8 rows, and more than 1/512 of its memory. It is a permission, as in SciPy: A is lost,
        also where Q could not stay in its place. Links of the chain then factorize what the one before has
        made of A. They repair the orthogonality of Q, not the residual: on a GPU, rank-deficient matrices
        may end without an accepted factorization.
    strict : bool, optional
        Raise an :class:`~neula.pipeline.result.AccuracyError` where there would be a warning, and refuse NaN
        and Inf in batches, too.
    progress : callable, optional
        Called with the name of the stage and the part of it that is done.

    Returns
    -------
    QRResult
        Unpacks into ``Q, R``; holds the certificate and the attempts. The diagonal of R is nonnegative.

    Raises
    ------
    ValueError
        For a matrix that has NaN or Inf, or fewer than two dimensions, and for unknown names; if the complete
        Q of a tall matrix is to have a gradient. Matrices of a batch with NaN or Inf are no error unless
        ``strict``: their factors are NaN, and are not accepted.
    TypeError
        For complex, sparse or masked input.
    OverflowError
        If R overflows the dtype of A.
    AccuracyError
        If the accuracy was not reached and ``strict`` is set.

    Warns
    -----
    AccuracyWarning
        If no attempt met the accuracy (of a named algorithm: if that one did not).

    See Also
    --------
    orth : only the orthonormal basis.
    tsqr : the fastest for tall matrices of up to 256 columns on a GPU.
    lstsq : least squares, which needs no orthonormal Q.

    Notes
    -----
    Q and R of a torch tensor that requires a gradient have one, of the first and of higher orders; A has to
    be of full rank, or its leading square block if it is wide
    (:func:`neula.pipeline.gradients.attach_factors`).

    Recursive Gram-Schmidt is Algorithm 1 of [1]_, re-orthogonalization its section 3.3, column scaling its
    section 3.5. A wide matrix is factorized by its leading square block, as in LAPACK.

    On a GPU tall matrices are tried first by Cholesky QR of the whole matrix: of up to 256 columns with
    corrected products, as by :func:`tsqr`, and of up to 1024 in half precision where the accuracy allows it.
    Of square matrices in float32 Q is made orthonormal by a correction before it is measured.

    Small matrices of a batch are factorized together, each step one launch for all of them
    (:mod:`neula.algorithms.orthogonal.batched_qr`), unless an algorithm or one of its parameters is named.
    Each has a certificate of its own; those that miss their accuracy go on to a second pass, a third, and
    Householder reflections in double precision. The attempts are those of the batch, with the worst
    certificate.

    References
    ----------
    .. [1] S. Zhang, E. Baharlouei, P. Wu, "High Accuracy Matrix Computations on Neural Engines: A Study of QR
       Factorization and its Applications", HPDC 2020.

    Examples
    --------
    >>> import numpy as np, neula
    >>> A = np.random.default_rng(0).standard_normal((300, 40))
    >>> Q, R = neula.qr(A)
    >>> bool(np.linalg.norm(A - Q @ R) < 1e-14 * np.linalg.norm(A))
    True
    >>> bool(np.linalg.norm(Q.T @ Q - np.eye(40)) < 1e-13)
    True
    """
    taken = take(A, "A", differentiable=True)
    a = taken.tensor
    check_matrices(a, "A")
    if mode not in MODES:
        raise unknown_name("mode", mode, MODES)
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise unknown_name("algorithm", algorithm, ALGORITHMS)
    if compute is not None:
        Arithmetic.named(compute)
    if panel is not None:
        panel_named(panel)
    if taken.needs_gradient and mode == "complete" and a.shape[-2] > a.shape[-1]:
        raise ValueError(
            f"A of shape {tuple(a.shape)} requires a gradient, and the columns that mode='complete' adds "
            "to Q are not unique and have none: pass mode='reduced' or A.detach()"
        )
    target = target_format(accuracy, a.dtype)
    chosen = select_engine(engine, a.device)
    options = _Options(target, chosen, algorithm, compute, panel, cutoff, progress)
    if overwrite_a and isinstance(A, (np.ndarray, torch.Tensor)) and not taken.graph.requires_grad:
        options = replace(options, in_place=_fits_in_place(a, options))

    factors = _factors(a, mode, options)
    return as_result(factors, taken, mode, chosen, target, strict)


def reduced_factors(
    a: torch.Tensor, target: Format, engine: Engine, progress: Progress | None = None
) -> Factors:
    """Q and R in working precision, on the engine's device: what :func:`qr` computes by default.

    Parameters
    ----------
    a : Tensor, shape (..., m, n)
    target : Format
    engine : Engine
    progress : callable, optional

    Returns
    -------
    Factors
        Of shapes (m, k) and (k, n), with ``k = min(m, n)``; of a batch, all in one dimension.
    """
    return _factors(a, "reduced", _Options(target, engine, None, None, None, None, progress))


def _factors(a: torch.Tensor, mode: str, options: _Options) -> Factors:
    """One matrix or a batch, by what suits it."""
    engine, target = options.engine, options.target
    matrices = flattened(a).to(engine.device)
    with plain_arithmetic(engine.device):
        if 0 in a.shape:
            return factors_of_nothing(matrices, mode, target, single=a.ndim == 2)
        if _go_together(matrices, options):
            matrices, exponents = _in_range(matrices, target)
            chain = batch_chain(Batch(matrices, target), engine)
            found = factorize_together(matrices, mode, target, chain, engine, options.progress)
            return found if exponents is None else replace(found, r=shift(found.r.double(), exponents))
        if a.ndim > 2:
            return _factorize_each(matrices, mode, options)
        return _factorize(matrices[0], mode, options)


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


@dataclass(frozen=True)
class _Options:
    target: Format
    engine: Engine
    algorithm: str | None
    compute: str | None
    panel: str | None
    cutoff: int | None
    progress: Progress | None
    in_place: bool = False

    def low(self) -> Arithmetic:
        """Arithmetic of the products: the one that was named, or the cheapest that reaches the target."""
        name = self.engine.tuning.cheapest(self.target) if self.compute is None else self.compute
        return Arithmetic.named(name)

    def report(self, stage: str, n: int) -> Callable[[int], None] | None:
        if self.progress is None:
            return None
        progress = self.progress
        return lambda columns: progress(stage, (columns / n) ** 2)


@dataclass(frozen=True)
class _Problem:
    """A tall matrix with its column scales.

    A zero column is replaced by a random one for the factorization, and its column of R by zeros: Q stays
    orthonormal, as Householder reflections would have it.
    """

    a: torch.Tensor
    scales: torch.Tensor
    zero: torch.Tensor | None
    options: _Options

    def work(self, engine: Engine) -> torch.Tensor:
        """Scaled copy in working storage."""
        return self.filled(engine.empty(*self.a.shape), engine)

    def filled(self, out: torch.Tensor, engine: Engine) -> torch.Tensor:
        """The same in ``out``, which may be A."""
        engine.fill(out, self.a, self.scales)
        if self.zero is not None:
            generator = torch.Generator("cpu").manual_seed(0)
            shape = (out.shape[0], int(self.zero.sum()))
            out[:, self.zero] = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(
                out
            )
        return out

    def wide_work(self) -> torch.Tensor:
        """Scaled copy in float64."""
        return self.work(self.options.engine.using(FP64))

    def rgsqrf(self, panel: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass in the low format."""
        engine = self.options.engine.using(self.options.low())
        m, n = self.a.shape
        work = engine.padded(m, n)
        self.filled(work[:m], engine)
        q, r = rgsqrf(
            work,
            engine,
            cutoff=self.options.cutoff,
            panel=panel or self.options.panel,
            overwrite_a=True,
            on_columns=self.options.report(f"rgsqrf {engine.format.name}", n),
        )
        return q[:m], r

    def rgsqrf_twice(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Two passes in the low format."""
        options = self.options
        engine = options.engine.using(options.low())
        return next(second_passes(*self.rgsqrf(), engine, panel=options.panel, cutoff=options.cutoff))

    def rgsqrf_corrected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass in the low format, and what makes Q orthonormal if it nearly is."""
        return correct(*self.rgsqrf(), self.options.engine.using(self.options.low()))

    def cholesky_qr(self) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass of Cholesky QR in the low format."""
        engine = self.options.engine.using(self.options.low())
        m, n = self.a.shape
        # Columns are filled up like rows: they are those of the Gram matrix.
        room = engine.padded(m, engine.rows(n), dtype=engine.operand_dtype)
        room[:, n:].zero_()
        engine.fill(room[:m, :n], self.a, self.scales)
        q, r = cholesky_qr_low(room, engine, n)
        return q[:m], r


def _factorize(a: torch.Tensor, mode: str, options: _Options) -> Factors:
    """One matrix through the chain."""
    attempts: list[Attempt] = []
    best: tuple[float, torch.Tensor, torch.Tensor, QRCertificate] | None = None
    for label, q, r, certificate in _certified(a, options):
        attempts.append(Attempt(label, certificate.accepted, str(certificate)))
        error = max(certificate.residual, certificate.orthogonality)
        error = error if math.isfinite(error) else math.inf
        if certificate.accepted or best is None or error < best[0] or options.in_place:
            best = (error, q, r, certificate)
        if certificate.accepted:
            break
    assert best is not None
    _, q, r, certificate = best
    if mode == "complete":
        q, r = complete(q, r)
    return Factors(q, r, certificate, tuple(attempts))


_Certified = tuple[str, torch.Tensor, torch.Tensor, QRCertificate]


def _certified(a: torch.Tensor, options: _Options) -> Iterator[_Certified]:
    """Attempts, cheapest first, each computed and certified when it is asked for."""
    if options.in_place:
        yield from _in_place(a, options)
        return
    first = None
    if _goes_unseen(a, options):
        for first in _unseen(a, options):
            yield first
    problem = _prepare(a, options)
    leading = problem if a.shape[0] >= a.shape[1] else _leading_block(problem)
    done = None
    if first is not None and problem.zero is None:  # else zero columns are replaced before the first pass
        if options.algorithm == "rgsqrf":
            return
        spoiled = _is_corrected(a, options) and first[3].residual > first[3].residual_bound
        if not spoiled:  # no pass over Q repairs a residual
            done = first[1], (first[2] * problem.scales).to(first[1].dtype)
    del first
    for label, q, r_scaled in _chain(leading, done):
        r = _unscaled(problem, leading, q, r_scaled)
        yield label, q, r, qr_certificate(a, q, r, problem.scales, options.target)


def _fits_in_place(a: torch.Tensor, options: _Options) -> bool:
    """Whether a matrix can become its Q without a copy that is in another order, precision or alignment."""
    engine = options.engine.using(options.low())
    if a.ndim != 2 or options.algorithm not in (None, "rgsqrf", "rgsqrf-reortho"):
        return False
    m, n = a.shape
    by_columns = a.stride(0) == 1 and a.stride(1) >= m >= n and engine.rows(m) == m
    here = a.device.type == engine.device.type and a.dtype == engine.storage
    frozen = a.is_inference() and not torch.is_inference_mode_enabled()
    # What is played back is copied anyhow.
    return by_columns and here and not frozen and a.nbytes > engine.replayed_bytes


def _in_place(a: torch.Tensor, options: _Options) -> Iterator[_Certified]:
    """Attempts in the memory of A, whose products with random vectors are kept to certify them.

    Once ``A = Q R``, whatever orthogonalizes Q factorizes A. Nothing can be done again from A, so panels are
    those of Householder, whose residual is small whatever the rank, but for the first pass on a GPU.
    """
    problem = _prepare(a, options)
    engine, scales, named = options.engine.using(options.low()), problem.scales, options.algorithm
    image = image_of(a, scales, certifying_dtype(a.dtype, options.target))
    first = None if engine.tuning.recursion(engine.storage).panel == "cholesky32" else "householder"

    def certified(label: str, q: torch.Tensor, r: torch.Tensor) -> _Certified:
        engine.fill(r, r, scales.reciprocal())
        if problem.zero is not None:
            r[:, problem.zero] = 0
        measures = image_measures(image, q, r, scales)
        return label, q, r, certificate_of(measures, a.shape, options.target)

    label = f"rgsqrf {engine.format.name}"
    q, r = rgsqrf(
        problem.filled(a, engine),
        engine,
        cutoff=options.cutoff,
        panel=options.panel or first,
        overwrite_a=True,
        on_columns=options.report(label, a.shape[1]),
    )
    if named != "rgsqrf-reortho":
        yield certified(label, q, r)
        if named == "rgsqrf" or not bool(torch.isfinite(r).all()):
            return
        engine.fill(r, r, scales)
    if named is None and options.target is FP32:
        q, r = correct(q, r, engine, largest=SURELY_CORRECTED)
        yield certified(f"{label} + correction", q, r)
        engine.fill(r, r, scales)
    panel = options.panel or "householder"
    q, r = reorthogonalize(q, r, engine, panel=panel, cutoff=options.cutoff, overwrite_q=True)
    yield certified(f"{label} + reortho", q, r)
    if named is None:
        engine.fill(r, r, scales)
        q, step = householder(q.double())
        yield certified("householder fp64", q, (step @ r.double()).to(r.dtype))


def _goes_unseen(a: torch.Tensor, options: _Options) -> bool:
    """Whether the first pass may be queued as a whole, before anything is known about the numbers.

    NaN, Inf and zero columns then show in the certificate.
    """
    named = options.algorithm not in (None, "rgsqrf") or options.progress is not None
    panel = options.panel or options.engine.tuning.recursion(options.low().format.storage).panel
    waits = panel not in ("cholesky", "cholesky32")
    return options.engine.replayed_bytes > 0 and a.shape[0] >= a.shape[1] and not named and not waits


def _unseen(a: torch.Tensor, options: _Options) -> Iterator[_Certified]:
    """Links that are queued as a whole; the host waits for their certificates. The last has the recursion."""
    m, n = a.shape
    low, tuning = options.low(), options.engine.tuning
    if _is_tall(a, options):
        # The kernels of tall matrices read rows, or as many columns as a panel has.
        if n <= tuning.tall_columns and (a.stride(1) == 1 or (n <= PANEL_COLUMNS and a.stride(0) == 1)):
            yield _tall(a, options)
        elif n <= tuning.low_columns and options.target in (FP16, BF16):
            yield _queued(a, options, f"cholesky-qr {low.format.name}", _Problem.cholesky_qr)
    # Square matrices are too ill-conditioned for one pass in float32 more often than not.
    if _is_corrected(a, options):
        yield _queued(a, options, f"rgsqrf {low.format.name} + correction", _Problem.rgsqrf_corrected)
    else:
        yield _queued(a, options, f"rgsqrf {low.format.name}", _Problem.rgsqrf)
        # Where launches decide, both passes played back take less time than a second one that is not.
        played_back = a.nbytes <= options.engine.replayed_bytes
        if options.algorithm is None and options.target is not FP64 and m < 2 * n and played_back:
            yield _queued(a, options, f"rgsqrf {low.format.name} + reortho", _Problem.rgsqrf_twice)


def _is_corrected(a: torch.Tensor, options: _Options) -> bool:
    """Whether a correction follows the first pass before anything is measured."""
    return options.algorithm is None and options.target is FP32 and a.shape[0] < 2 * a.shape[1]


def _queued(
    a: torch.Tensor,
    options: _Options,
    label: str,
    method: Callable[[_Problem], tuple[torch.Tensor, torch.Tensor]],
) -> _Certified:
    """A link with its scales and its certificate, in one launch where a graph has it."""

    def factorized(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scales = power_of_two_scales(_column_max(a, options))
        problem = _Problem(a, scales, None, options)
        q, r = method(problem)
        if r.dtype == scales.dtype:  # in place, since it may be as large as A
            options.engine.fill(r, r, scales.reciprocal())
        else:
            r = _unscaled(problem, problem, q, r)
        return q, r, single_qr_measures(a, q, r, scales, options.target)

    key = (label, options.target.name, options.panel, options.cutoff)
    q, r, measures = options.engine.replay(factorized, (a,), key)
    return label, q, r, certificate_of(measures, a.shape, options.target)


def _is_tall(a: torch.Tensor, options: _Options) -> bool:
    """Whether to try Cholesky QR of the whole matrix first."""
    m, n = a.shape
    named = (options.algorithm, options.compute, options.panel, options.cutoff) != (None,) * 4
    return m >= options.engine.tuning.tall_ratio * n and not named and options.target is not FP64


def _tall(a: torch.Tensor, options: _Options) -> _Certified:
    """One pass with corrected products, as in :func:`neula.tsqr`."""
    method = partial(one_by_one, method=cholesky_tsqr32)
    link = Link("cholesky-qr fp16_cor", torch.float32, method, scaled=False)
    q, r, certificates = run_link(link, a[None], options.target, options.engine)
    return link.label, q[0], r[0], certificates[0]


def _prepare(a: torch.Tensor, options: _Options) -> _Problem:
    """Check the numbers and choose the scales: one pass over the matrix."""
    column_max = _column_max(a, options)
    check_finite(a, column_max, "A")
    zero = column_max == 0
    return _Problem(a, power_of_two_scales(column_max), zero if bool(zero.any()) else None, options)


def _column_max(a: torch.Tensor, options: _Options) -> torch.Tensor:
    """Largest element of each column, at least in float32."""
    return options.engine.column_max(a).to(torch.promote_types(a.dtype, torch.float32))


def _leading_block(problem: _Problem) -> _Problem:
    """The leading square block of a wide matrix."""
    m = problem.a.shape[0]
    zero = None if problem.zero is None else problem.zero[:m]
    return _Problem(problem.a[:, :m], problem.scales[:m], zero, problem.options)


def _chain(
    problem: _Problem, done: tuple[torch.Tensor, torch.Tensor] | None = None
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Attempts, cheapest first, each computed when it is asked for: label, Q, and R of the scaled matrix.

    ``done`` are Q and R of the first pass, where it has been certified already.
    """
    options = problem.options
    algorithm, low = options.algorithm, options.low().format.name
    if algorithm == "householder":
        yield _householder(problem)
        return
    q, r = problem.rgsqrf() if done is None else done
    if algorithm in (None, "rgsqrf") and done is None:
        yield f"rgsqrf {low}", q, r
    if algorithm == "rgsqrf":
        return
    if options.panel is None and not bool(torch.isfinite(r).all()):
        q, r = problem.rgsqrf("cholesky2")
    second = algorithm or ("cholesky-qr" if options.target is FP64 else "rgsqrf-reortho")
    if second == "rgsqrf-reortho":
        engine = options.engine.using(low)
        yield (
            f"rgsqrf {low} + reortho",
            *reorthogonalize(q, r, engine, panel=options.panel, cutoff=options.cutoff),
        )
    if second == "cholesky-qr":
        del q
        yield f"rgsqrf {low} + cholesky-qr fp64", *refine_qr(problem.wide_work(), r)
    if algorithm is None:
        yield _householder(problem)


def _householder(problem: _Problem) -> tuple[str, torch.Tensor, torch.Tensor]:
    return "householder fp64", *householder(problem.wide_work())


def _unscaled(problem: _Problem, leading: _Problem, q: torch.Tensor, r_scaled: torch.Tensor) -> torch.Tensor:
    """R of the matrix as it was given: scales undone, zero columns zero, columns beyond the square added."""
    r = r_scaled.to(problem.scales.dtype) / leading.scales
    if leading.zero is not None:
        r[:, leading.zero] = 0
    m, n = problem.a.shape
    if m >= n:
        return r
    options = problem.options
    engine = options.engine.using(options.low() if options.target in (FP16, BF16) else FP64)
    scales = problem.scales[m:]
    rest = engine.fill(engine.empty(m, n - m), problem.a[:, m:], scales)
    product = engine.gemm(engine.operand(q.to(engine.storage)).T, engine.operand(rest))
    return torch.cat([r, product.to(r.dtype) / scales], 1)


def factors_of_nothing(matrices: torch.Tensor, mode: str, target: Format, *, single: bool) -> Factors:
    """The factors of no matrices, or of matrices without elements: nothing in them can be wrong.

    Without columns the complete Q is the identity, as in NumPy and torch.
    """
    count, m, n = matrices.shape
    factors = nothing(matrices, mode)
    if factors.q.numel() > 0:
        factors.q.copy_(torch.eye(m, dtype=factors.q.dtype))
    perfect = certificate_of(torch.zeros(3, dtype=torch.float64), (m, max(n, 1)), target)
    done = (Attempt("nothing to do", True, "no elements"),)
    return replace(factors, certificate=perfect if single else (perfect,) * count, attempts=done)


def _factorize_each(matrices: torch.Tensor, mode: str, options: _Options) -> Factors:
    """One matrix after the other; the attempts are those of the first that is not accepted."""
    results = [
        _factorize(a, mode, options) if finite else _not_a_number(a, mode, options)
        for a, finite in zip(matrices, finite_members(matrices).tolist(), strict=True)
    ]
    worst = next((f for f in results if not f.attempts[-1].accepted), results[-1])
    q, r = torch.stack([f.q for f in results]), torch.stack([f.r for f in results])
    return Factors(q, r, tuple(f.certificate for f in results), worst.attempts)  # type: ignore[misc]


def _not_a_number(a: torch.Tensor, mode: str, options: _Options) -> Factors:
    """What becomes of a matrix of a batch that holds NaN or Inf: its certificate is measured, and NaN."""
    q, r = (x.fill_(math.nan) for x in empty_factors(a, mode))
    certificate = qr_certificate(a, q, r, a.new_ones(a.shape[1]), options.target)
    return Factors(q, r, certificate, (unusable(1, 1),))


# --- a batch, all matrices together ---


def _go_together(matrices: torch.Tensor, options: _Options) -> bool:
    """Whether each step is to be one launch for the whole batch: many small matrices, nothing named."""
    count, m, n = matrices.shape
    chosen = (options.algorithm, options.compute, options.panel, options.cutoff)
    return count > 1 and chosen == (None,) * 4 and m * n <= options.engine.tuning.batched_elements


def batch_chain(batch: Batch, engine: Engine) -> list[Link]:
    """What is tried, cheapest first.

    Square matrices are often too ill-conditioned for one pass in float32 (the condition number of a random
    one is about n, that of one with twice as many rows as columns less than 6). One in float64 costs less
    than two where its products are as fast (64 of 1024 x 1024 on an H200: 7.4 ms and 11.4); elsewhere, and
    for a single tile, which two passes do not leave, both are done before measuring.
    """
    name, dtype = batch.storage.name, batch.storage.dtype
    last = Link("householder fp64", torch.float64, householder, waits=True)
    if engine.tuning.lapack:  # nothing beats LAPACK on small matrices
        return [Link(f"householder {name}", dtype, householder, scaled=False), last]
    square = batch.a.shape[1] < 2 * batch.k
    doubled = square and dtype == torch.float32 and batch.k > TILE_COLUMNS
    doubled = doubled and "fp64" in engine.tuning.preconditioners
    passes = 2 if square and not doubled else 1
    labels = {
        n: f"gram-schmidt {name}{label}" for n, label in ((1, ""), (2, " + reortho"), (3, " + 2 reortho"))
    }
    more = [
        Link(labels[n], dtype, partial(_orthogonal_at_any_rank, passes=n), waits=True)
        for n in range(passes + 1, MAX_PASSES + 1)
    ]
    if doubled:
        first = Link("gram-schmidt fp64", torch.float64, batched_qr, scaled=False)
    else:
        first = Link(labels[passes], dtype, partial(batched_qr, passes=passes), scaled=False)
    return [first, *more, last]


def _orthogonal_at_any_rank(a: torch.Tensor, passes: int) -> tuple[torch.Tensor, torch.Tensor]:
    q, r = batched_qr(a, overwrite_a=True)
    for _ in range(passes - 1):
        q, r = batched_reorthogonalize(q, r)
    return q, r
