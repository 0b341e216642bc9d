"""QR factorization and orthonormal bases: check the input, choose, run, certify."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from neula.accuracy import qr_certificate, target_format
from neula.algorithms.householder import householder
from neula.algorithms.panels import panel_named
from neula.algorithms.reorthogonalize import refine_qr, reorthogonalize
from neula.algorithms.rgsqrf import rgsqrf
from neula.algorithms.scaling import power_of_two_scales
from neula.engines import BF16, FORMATS, FP16, FP64, Engine, Format, format_named, select_engine
from neula.engines.precision import plain_arithmetic
from neula.errors import unknown_name
from neula.inputs import check_finite, check_matrix, take
from neula.result import AccuracyWarning, Attempt, QRCertificate, QRResult

MODES = ("reduced", "r", "complete")
ALGORITHMS = ("rgsqrf", "rgsqrf-reortho", "cholesky-qr", "householder")

Progress = Callable[[str, float], None]
"""Called with the name of the stage and the part of it that is done, 0 to 1."""


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
        not modified. Leading dimensions are a batch.
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
    panel : {"caqr", "cholesky", "cholesky2", "householder"}, optional
        Panel of the recursion; what measures best on the engine by default.
    cutoff : int, optional
        Width of the panels.
    progress : callable, optional
        Called with the name of the stage and the part of it that is done.

    Returns
    -------
    QRResult
        Unpacks into ``Q, R``; holds the certificate and the attempts. The diagonal of R is nonnegative.

    Raises
    ------
    ValueError
        For a matrix that is empty, has NaN or Inf, or fewer than two dimensions, and for unknown names.
    TypeError
        For complex, sparse or masked input.
    OverflowError
        If R overflows the dtype of A.

    Warns
    -----
    AccuracyWarning
        If no attempt met the accuracy (of a named algorithm: if that one did not).

    See Also
    --------
    orth : only the orthonormal basis.
    lstsq : least squares, which needs no orthonormal Q.

    Notes
    -----
    Recursive Gram-Schmidt is Algorithm 1 of [1]_, re-orthogonalization its section 3.3, column scaling its
    section 3.5. A wide matrix is factorized by its leading square block, as in LAPACK.

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
    taken = take(A, "A")
    check_matrix(taken.tensor, "A")
    if mode not in MODES:
        raise unknown_name("mode", mode, MODES)
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise unknown_name("algorithm", algorithm, ALGORITHMS)
    if compute is not None:
        format_named(compute)
    if panel is not None:
        panel_named(panel)
    target = target_format(accuracy, taken.tensor.dtype)
    chosen = select_engine(engine, taken.tensor.device)
    options = _Options(target, chosen, algorithm, compute, panel, cutoff, progress)

    batch = taken.tensor.shape[:-2]
    matrices = taken.tensor.reshape(-1, *taken.tensor.shape[-2:]).to(chosen.device)
    if batch:
        check_finite(taken.tensor, chosen.column_max(matrices.reshape(-1, matrices.shape[-1])), "A")
    with plain_arithmetic(chosen.device):
        results = [_factorize(a, mode, options) for a in matrices]
    q = _assemble([f.q for f in results], batch)
    r = _assemble([f.r for f in results], batch)
    certificates = tuple(f.certificate for f in results)
    worst = next((f for f in results if not f.certificate.accepted), results[-1])
    _warn_unless_accepted(worst.certificate, target)
    return QRResult(
        Q=None if mode == "r" else taken.give_back(q),
        R=taken.give_back(r),
        certificate=certificates if batch else certificates[0],
        attempts=worst.attempts,
        engine=str(chosen),
        accuracy=target.name,
    )


def orth(
    A: Any,
    *,
    accuracy: str | None = None,
    engine: str | Engine = "auto",
    progress: Progress | None = None,
) -> Any:
    """Orthonormal basis of the columns of A: the Q of :func:`qr`, which see for the parameters.

    Parameters
    ----------
    A : array_like, shape (..., m, n)
    accuracy, engine, progress : optional
        As for :func:`qr`.

    Returns
    -------
    array, shape (..., m, min(m, n))
        Orthonormal columns even where those of A are linearly dependent; then they span more than A does.

    Examples
    --------
    >>> import torch, neula
    >>> Q = neula.orth(torch.tensor([[1.0, 1.0], [1.0, 1.0001], [1.0, 1.0]]))
    >>> bool((Q.T @ Q - torch.eye(2)).norm() < 1e-6)
    True
    """
    return qr(A, accuracy=accuracy, engine=engine, progress=progress).Q


@dataclass(frozen=True)
class _Options:
    target: Format
    engine: Engine
    algorithm: str | None
    compute: str | None
    panel: str | None
    cutoff: int | None
    progress: Progress | None

    def low(self) -> Format:
        """Format of the products: the one that was named, or the cheapest that reaches the target."""
        if self.compute is not None:
            return FORMATS[self.compute]
        return next(FORMATS[f] for f in self.engine.formats if FORMATS[f].u <= self.target.u)

    def report(self, stage: str, n: int) -> Callable[[int], None] | None:
        if self.progress is None:
            return None
        progress = self.progress
        return lambda columns: progress(stage, (columns / n) ** 2)


@dataclass(frozen=True)
class _Factors:
    q: torch.Tensor
    r: torch.Tensor
    certificate: QRCertificate
    attempts: tuple[Attempt, ...]


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
        out = engine.fill(engine.empty(*self.a.shape), self.a, self.scales)
        if self.zero is not None:
            generator = torch.Generator("cpu").manual_seed(0)
            shape = (out.shape[0], int(self.zero.sum()))
            out[:, self.zero] = torch.randn(shape, generator=generator, device="cpu").to(out)
        return out

    def wide_work(self) -> torch.Tensor:
        """Scaled copy in float64."""
        return self.work(self.options.engine.using(FP64))

    def rgsqrf(self, panel: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass in the low format."""
        engine = self.options.engine.using(self.options.low())
        return rgsqrf(
            self.work(engine),
            engine,
            cutoff=self.options.cutoff,
            panel=panel or self.options.panel,
            overwrite_a=True,
            on_columns=self.options.report(f"rgsqrf {engine.format.name}", self.a.shape[1]),
        )


def _factorize(a: torch.Tensor, mode: str, options: _Options) -> _Factors:
    """One matrix through the chain."""
    m, n = a.shape
    problem = _prepare(a, options)
    leading = problem if m >= n else _leading_block(problem)
    attempts: list[Attempt] = []
    best: tuple[float, torch.Tensor, torch.Tensor, QRCertificate] | None = None
    for label, q, r_scaled in _chain(leading):
        r = _unscaled(problem, leading, q, r_scaled)
        certificate = qr_certificate(a, q, r, problem.scales, options.target)
        attempts.append(Attempt(label, certificate.accepted, str(certificate)))
        error = max(certificate.residual, certificate.orthogonality)
        error = error if math.isfinite(error) else math.inf
        if certificate.accepted or best is None or error < best[0]:
            best = (error, q, r, certificate)
        if certificate.accepted:
            break
    assert best is not None
    _, q, r, certificate = best
    if mode == "complete":
        q, r = _complete(q, r)
    return _Factors(q, r, certificate, tuple(attempts))


def _prepare(a: torch.Tensor, options: _Options) -> _Problem:
    """Check the numbers and choose the scales: one pass over the matrix."""
    wide_enough = a.dtype if a.dtype == torch.float64 else torch.float32
    column_max = options.engine.column_max(a).to(wide_enough)
    check_finite(a, column_max, "A")
    zero = column_max == 0
    return _Problem(a, power_of_two_scales(column_max), zero if bool(zero.any()) else None, options)


def _leading_block(problem: _Problem) -> _Problem:
    """The leading square block of a wide matrix."""
    m = problem.a.shape[0]
    zero = None if problem.zero is None else problem.zero[:m]
    return _Problem(problem.a[:, :m], problem.scales[:m], zero, problem.options)


def _chain(problem: _Problem) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Attempts, cheapest first, each computed when it is asked for: label, Q, and R of the scaled matrix."""
    options = problem.options
    algorithm, low = options.algorithm, options.low().name
    if algorithm == "householder":
        yield _householder(problem)
        return
    q, r = problem.rgsqrf()
    if algorithm in (None, "rgsqrf"):
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


def _complete(q: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Add an orthonormal basis of the complement to Q, and zeros to R."""
    m, k = q.shape
    complement = torch.linalg.qr(q, mode="complete")[0][:, k:]
    return torch.cat([q, complement], 1), torch.cat([r, r.new_zeros(m - k, r.shape[1])])


def _assemble(matrices: list[torch.Tensor], batch: torch.Size) -> torch.Tensor:
    """The batch; a single matrix stays where it is."""
    return torch.stack(matrices).reshape(*batch, *matrices[0].shape) if batch else matrices[0]


def _warn_unless_accepted(certificate: QRCertificate, target: Format) -> None:
    if not certificate.accepted:
        warnings.warn(
            f"QR is not certified to {target.name} accuracy: {certificate}", AccuracyWarning, stacklevel=3
        )
