"""QR factorization: check the input, run the chain, return."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack, overload

import numpy as np
import torch

from neula.algorithms.orthogonal.panels import panel_named
from neula.certificates.bounds import Accuracy
from neula.engines import Arithmetic, Engine
from neula.errors import check_name
from neula.pipeline.call import Call, HostTuning
from neula.pipeline.distributed import OverProcesses
from neula.pipeline.inputs import check_matrices, over_lists
from neula.pipeline.operators import with_operator
from neula.pipeline.plans import Given, Plans
from neula.pipeline.progress import Progress
from neula.pipeline.result import QRResult
from neula.problems.operators.factorizations import traced_qr
from neula.problems.orthogonal.factorize import begin, factorize, plan_of, solved_by_plan
from neula.problems.orthogonal.pivoted import LABEL as PIVOTED
from neula.problems.orthogonal.pivoted import factorize_pivoted, in_order, pivoted_on_host, shows_all
from neula.problems.orthogonal.problem import QROptions, as_accepted, as_pending, as_result, give_factors_back
from neula.problems.orthogonal.raw import factorize_raw
from neula.problems.orthogonal.ways import is_for_core
from neula.problems.signatures import ArrayLike, Kind, QRKeywords, QRMode

MODES = ("reduced", "r", "complete", "raw")
ALGORITHMS = ("rgsqrf", "rgsqrf-twice", "rgsqrf-reortho", "cholesky-qr", "householder")


@overload
def qr(A: Kind, mode: QRMode = ..., **keywords: Unpack[QRKeywords]) -> QRResult[Kind]: ...
@overload
def qr(A: Any, mode: QRMode = ..., **keywords: Unpack[QRKeywords]) -> QRResult[Any]: ...
@with_operator(traced_qr, Plans(plan_of, operands=1, fetches=False, then=("mode",)))
@OverProcesses(
    give_factors_back,
    refused={"mode": ("complete", "raw"), "pivoting": (True,), "wait": (False,)},
    ignored={"overwrite_a": False},
)
@over_lists(QRResult._member)
def qr(
    A: ArrayLike,
    mode: str = "reduced",
    *,
    pivoting: bool = False,
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    algorithm: str | None = None,
    compute: str | None = None,
    panel: str | None = None,
    cutoff: int | None = None,
    overwrite_a: bool = False,
    strict: bool = False,
    progress: Progress | None = None,
    wait: bool = True,
) -> QRResult:
    """QR factorization ``A = Q R``, certified to the requested accuracy.

    Returns factors whose residual and orthogonality were measured. Column pivoting, a complete Q and the
    Householder form are options; a batch is factorized together.

    Parameters
    ----------
    A : array_like, shape (..., m, n)
        NumPy array, torch tensor or DLPack object, float16 to float64, complex64, complex128; integers are
        taken as float64. Not modified, except with ``overwrite_a``. Leading dimensions are a batch; any
        dimension may be zero. Or a matrix whose rows are distributed over processes
        (:func:`neula.distributed.rows`). In a list of torch matrices, those of one shape are factorized
        together, and a list of results is returned.
    mode : {"reduced", "r", "complete", "raw"}
        Q of shape (m, min(m, n)); only R; Q of shape (m, m) and R of shape (m, n); or the Householder form
        of :func:`torch.geqrf`, at least in float32.
    pivoting : bool, optional
        Order the columns so that R reveals the rank: ``A[:, P] = Q R``, as in :func:`scipy.linalg.qr`.
    accuracy : {"fp16", "bf16", "tf32", "fp32", "fp64"}, dtype or float, optional
        Accuracy of the result; by default that of A's dtype. A number is the largest acceptable residual
        relative to A; the cheapest sufficient format is used.
    engine : {"auto", "cpu", "cuda", "emulated"} or Engine, optional
        The engine that multiplies matrices. ``"auto"`` chooses it by the device of A.
    algorithm : {"rgsqrf", "rgsqrf-twice", "rgsqrf-reortho", "cholesky-qr", "householder"}, optional
        Force this algorithm, without a fallback; by default the chain in the Notes. ``"rgsqrf-twice"``
        re-orthogonalizes once, as the paper does; ``"rgsqrf-reortho"`` repeats that until Q is orthogonal.
    compute : str, optional
        Format of the products; by default the cheapest one that may reach the accuracy.
    panel : {"caqr", "cholesky", "cholesky2", "cholesky32", "householder"}, optional
        Panel of the recursion; by default the fastest one of the engine.
    cutoff : int, optional
        Width of the panels.
    overwrite_a : bool, optional
        Permission to overwrite A with Q, as in SciPy. It takes effect for a single NumPy array or tensor on
        the engine's device, without a gradient, that is not wide, is stored by columns (Fortran order) and
        has the dtype in which Q is computed (float64 for accuracy fp64, else float32); on a GPU also with a
        multiple of 8 rows and more than 290 MB (or 1/256 of its memory). A is lost in any case. Each link of
        the chain then factorizes the result of the previous one, which repairs the orthogonality of Q but not
        the residual: on a GPU, rank-deficient matrices may end without an accepted factorization.
    strict : bool, optional
        Raise an :class:`~neula.pipeline.result.AccuracyError` instead of a warning, and reject NaN and Inf in
        batches.
    progress : callable or bool, optional
        Called with the name of the stage and the completed fraction; True shows a progress bar.
    wait : bool, optional
        False returns once the first link of the chain is launched, without waiting for the device.
        ``accepted`` is then an array on the device, and :func:`neula.finish` runs the rest of the chain. If
        the first link waits for the device (a single matrix on a CPU), the answer is complete.

    Returns
    -------
    QRResult
        Unpacks into ``Q, R``, with ``pivoting`` into ``Q, R, P``, with ``mode="raw"`` into ``H, tau``; has
        the certificate and the attempts. The diagonal of R is real, and nonnegative except in Householder
        form.

    Raises
    ------
    ValueError
        For a matrix that has NaN or Inf, or fewer than two dimensions, and for unknown names; if the complete
        Q of a tall matrix, or the Householder form, is to have a gradient, or the latter pivots. Matrices of
        a batch with NaN or Inf are no error unless ``strict``: their factors are NaN, and are not accepted.
    TypeError
        For sparse or masked input.
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
    By default a chain of algorithms runs, cheapest first: one pass of recursive Gram-Schmidt in the lowest
    sufficient format, then re-orthogonalization (for fp64, Cholesky QR of ``A R^-1`` in double precision),
    then Householder reflections in double precision. An attempt is accepted if its residual and
    orthogonality, in the Frobenius norm and in the 2-norm, are small enough.

    Q and R of a torch tensor are differentiable, to any order, if A has full rank, or its leading square
    block if A is wide (:class:`neula.pipeline.derivatives.QRFunction`).

    Recursive Gram-Schmidt is Algorithm 1 of [1]_, re-orthogonalization its section 3.3, column scaling its
    section 3.5. A wide matrix is factorized by its leading square block, as in LAPACK.

    With ``pivoting`` the order of the columns is chosen first, in large matrices in blocks from random
    sketches [2]_, on a GPU all at once; then ``A[:, P]`` is factorized. If R hides a small singular value, as
    for Kahan's matrix pivoted by norms, columns are interchanged [3]_ and A is factorized again. At the
    numerical rank k, the norm of ``R[k:, k:]`` is then close to the next singular value, and the smallest
    singular value of ``R[:k, :k]`` close to the last one kept. The diagonal of R decreases, though not
    strictly. ``overwrite_a`` has no effect.

    With ``mode="raw"`` the strict lower triangle of H holds Householder vectors for :func:`torch.ormqr` and
    :func:`torch.linalg.householder_product`, and its upper triangle R, as in LAPACK; NumPy has the transpose
    (``neula.compat.numpy``). LAPACK computes them on a CPU; on a GPU they are reconstructed from an explicit
    Q [4]_. The certificate is that of the Q they define. If columns are dependent, the columns of Q beyond
    the rank are orthonormal to the others.

    Which algorithm comes first depends on shape, accuracy and machine: the page *Links* of the documentation
    has the table. Small matrices of a batch are factorized together. Each matrix has a certificate, and the
    attempts are those of the batch, with the worst certificate.

    Complex matrices take the same algorithms, and routines of the library in place of kernels for small ones.
    Their Gram matrices are in double precision, and products in a low format are three real ones. R has a
    real diagonal.

    References
    ----------
    .. [1] S. Zhang, E. Baharlouei, P. Wu, "High Accuracy Matrix Computations on Neural Engines: A Study of QR
       Factorization and its Applications", HPDC 2020.
    .. [2] P.-G. Martinsson, G. Quintana-Ortí, N. Heavner, R. van de Geijn, "Householder QR factorization with
       randomization for column pivoting (HQRRP)", SIAM J. Sci. Comput. 39, 2017.
    .. [3] M. Gu, S. C. Eisenstat, "Efficient algorithms for computing a strong rank-revealing QR
       factorization", SIAM J. Sci. Comput. 17, 1996.
    .. [4] G. Ballard, J. Demmel, L. Grigori, M. Jacquelin, N. Knight, H. D. Nguyen, "Reconstructing
       Householder vectors from tall-skinny QR", J. Parallel Distrib. Comput. 85, 2015.

    Examples
    --------
    >>> import numpy as np, neula
    >>> A = np.random.default_rng(0).standard_normal((300, 40))
    >>> Q, R = neula.qr(A)
    >>> bool(np.linalg.norm(A - Q @ R) < 1e-14 * np.linalg.norm(A))
    True
    >>> bool(np.linalg.norm(Q.T @ Q - np.eye(40)) < 1e-13)
    True
    >>> A[:, 5] = A[:, 7] - A[:, 9]
    >>> Q, R, P = neula.qr(A, pivoting=True)
    >>> bool(np.linalg.norm(A[:, P] - Q @ R) < 1e-14 * np.linalg.norm(A)), int((R.diagonal() > 1e-12).sum())
    (True, 39)
    """
    call = Call.begin({"A": A}, engine=engine, accuracy=accuracy, strict=strict, gradients=True)
    a = call.first.tensor
    check_matrices(a, "A")
    _check_names(mode, algorithm, compute, panel)
    _check_mode(mode, call, pivoting=pivoting, wait=wait)
    plain = mode in ("reduced", "r") and not (pivoting or overwrite_a) and progress is None
    default = wait and plain and (algorithm, compute, panel, cutoff) == (None,) * 4
    if default:
        target, most, is_complex = call.target, call.engine.tuning[HostTuning].by_host, call.dtype.is_complex
        call = call.by_host(
            engine,
            has_kernel=lambda m, n: not is_complex and is_for_core(m, n, target, is_complex=False),
            most=most,
        )
    options = QROptions(call.target, call.engine, algorithm, compute, panel, cutoff, progress=progress)
    begun = solved_by_plan(call, options, mode) if default else None
    if isinstance(begun, QRResult):
        return begun
    if pivoting:
        alone = pivoted_on_host(call, mode, options)
        if alone is not None and shows_all(alone[0]):
            found, (order,) = alone
            single = found.q[0], found.r[0]
            return as_accepted(
                Given.of_call(call), options, mode, single, found.certificates[0], PIVOTED, order
            )
        factors, order = factorize_pivoted(call.matrices(), mode, options, is_batch=a.ndim > 2, begun=alone)
        permuted = replace(call.first, graph=in_order(call.first.graph, order))
        return as_result(factors, replace(call, operands={"A": permuted}), mode, options, order)
    if mode == "raw":
        return as_result(factorize_raw(call.matrices(), options), call, mode, options)
    if not wait and (pending := _begun(call, mode, options)) is not None:
        return pending
    if overwrite_a and isinstance(A, (np.ndarray, torch.Tensor)) and not call.first.is_variable:
        options = replace(options, in_place=_fits_in_place(a, options))
    first = None if begun is None else [begun]
    return as_result(factorize(call.matrices(), mode, options, first), call, mode, options)


def _begun(call: Call, mode: str, options: QROptions) -> QRResult | None:
    """The result of the first link, before anything is read; None if that link synchronizes."""
    found = begin(call.matrices(), options)
    if found is None:
        return None
    values, accepted, begun = found

    def finish() -> QRResult:
        return as_result(factorize(call.matrices(), mode, options, begun), call, mode, options)

    return as_pending(values, accepted, call, mode, finish)


def _check_mode(mode: str, call: Call, *, pivoting: bool, wait: bool) -> None:
    if not wait and (pivoting or mode not in ("reduced", "r")):
        raise ValueError(f"wait=False is for the modes 'reduced' and 'r' without pivoting, got {mode!r}")
    shape = call.first.tensor.shape
    if call.differentiable and mode == "complete" and shape[-2] > shape[-1]:
        raise ValueError(
            f"A of shape {tuple(shape)} requires a gradient, and the columns that mode='complete' adds "
            "to Q are not unique and have none: pass mode='reduced' or A.detach()"
        )
    if call.differentiable and mode == "raw":
        raise ValueError("A requires a gradient, and mode='raw' has none: pass mode='reduced', or A.detach()")
    if mode == "raw" and pivoting:
        raise ValueError(
            "pivoting=True has no Householder form: pass mode='reduced', or A[..., P] with the P of that"
        )


def _check_names(mode: str, algorithm: str | None, compute: str | None, panel: str | None) -> None:
    check_name("mode", mode, MODES)
    check_name("algorithm", algorithm, ALGORITHMS, optional=True)
    if compute is not None:
        Arithmetic.named(compute)
    if panel is not None:
        panel_named(panel)


def _fits_in_place(a: torch.Tensor, options: QROptions) -> bool:
    """Whether a matrix can become its Q without a copy that is in another order, precision or alignment."""
    if a.ndim != 2 or options.algorithm not in (None, "rgsqrf", "rgsqrf-reortho"):
        return False
    engine = options.low_engine
    m, n = a.shape
    by_columns = a.stride(0) == 1 and a.stride(1) >= m >= n and engine.rows(m) == m
    here = a.device.type == engine.device.type and a.dtype == engine.storage
    frozen = a.is_inference() and not torch.is_inference_mode_enabled()
    # Replayed results are copied anyway.
    return by_columns and here and not frozen and a.nbytes > engine.replayed_bytes
