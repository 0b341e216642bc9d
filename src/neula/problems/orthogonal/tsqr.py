"""QR of tall and skinny matrices: check the input, choose the arithmetic, run the tree, certify."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack, overload

import torch

from neula.algorithms.corrected import corrected_bmm
from neula.algorithms.orthogonal.tsqr import tsqr as tree
from neula.engines import FORMATS, Engine
from neula.errors import check_name
from neula.kernels.precision import exact_matmul
from neula.kernels.qr.householder import Product
from neula.kernels.qr.tall import COLUMNS
from neula.pipeline.call import Call
from neula.pipeline.distributed import OverProcesses
from neula.pipeline.inputs import check_finite, check_matrices
from neula.pipeline.operators import with_operator
from neula.pipeline.result import QRResult
from neula.problems.operators.factorizations import traced_tsqr
from neula.problems.orthogonal.factorize import factorize_together
from neula.problems.orthogonal.links import chain_tall, chain_together, go_together
from neula.problems.orthogonal.problem import QRFactors, QROptions, as_result, give_factors_back
from neula.problems.orthogonal.ways import QRLink, together
from neula.problems.signatures import ArrayLike, Kind, QRMode, TsqrKeywords

MODES = ("reduced", "r")

COMPUTE = {
    "fp16_cor": "fp32",
    "fp16_nocor": "fp16",
    "tf32_cor": "fp32",
    "tf32_nocor": "tf32",
    "fp32_notc": "fp32",
}
"""The paper's five modes, and the format whose accuracy each has."""

SLIDES = {"fp16_slides": "fp32", "tf32_slides": "fp32"}  # the corrected modes with all values of the slides
SLIDES_ROWS, SLIDES_SHIFT = 256, 10  # rows of a tile, and the exponent by which remainders are scaled


@overload
def tsqr(A: Kind, mode: QRMode = ..., **keywords: Unpack[TsqrKeywords]) -> QRResult[Kind]: ...
@overload
def tsqr(A: Any, mode: QRMode = ..., **keywords: Unpack[TsqrKeywords]) -> QRResult[Any]: ...
@OverProcesses(give_factors_back)
@with_operator(traced_tsqr)
def tsqr(
    A: ArrayLike,
    mode: str = "reduced",
    *,
    compute: str = "auto",
    engine: str | Engine = "auto",
    strict: bool = False,
) -> QRResult:
    """QR factorization of a tall matrix of at most 256 columns, certified to the accuracy of its dtype.

    By default the fastest sufficient algorithm runs. ``compute`` names the Householder tree of [1]_ in one
    arithmetic instead.

    Parameters
    ----------
    A : array_like, shape (..., m, n), n <= 256
        NumPy array, torch tensor or DLPack object, float16 to float64, complex64, complex128; integers are
        taken as float64. It is not modified. Leading dimensions are a batch; any dimension may be zero. Or a
        matrix whose rows are distributed over processes (:func:`neula.distributed.rows`).
    mode : {"reduced", "r"}
        Q of shape (m, min(m, n)), or only R.
    compute : str, optional
        Arithmetic of products of block reflectors: two numbers of fp16 or of tf32 for each element (error
        correction, ``"fp16_cor"`` and ``"tf32_cor"``), one (``"fp16_nocor"`` and ``"tf32_nocor"``), or
        float32 without matrix units (``"fp32_notc"``). A float64 matrix is rounded to float32 for them. A
        reflection in float32 errs by some 10 u, more than what one to three columns are certified to: those
        may come with a warning. ``"fp16_slides"`` and ``"tf32_slides"`` are the corrected modes exactly as in
        the slides, for at most 128 columns: tiles of 256 rows, remainders times 2^10, and reflections by
        matrix units, too. ``"auto"`` is the default.
    engine : {"auto", "cpu", "cuda", "emulated"} or Engine, optional
        The engine that multiplies matrices. ``"auto"`` chooses it by the device of A. The CPU engine has no
        fp16 and no tf32.
    strict : bool, optional
        Raise an AccuracyError instead of warning.

    Returns
    -------
    QRResult
        Unpacks into ``Q, R``; holds the certificate and the attempts. The diagonal of R is real and
        nonnegative. The accuracy that is certified is that of A's dtype, or of a named ``compute`` if that is
        coarser.

    Raises
    ------
    ValueError
        For more than 256 columns, for a matrix that has NaN or Inf, and for unknown names. Matrices of a
        batch with NaN or Inf are no error unless ``strict``: their factors are NaN, and are not accepted.
    TypeError
        For sparse or masked input.
    AccuracyError
        If the accuracy was not reached and ``strict`` is set.

    Warns
    -----
    AccuracyWarning
        If the accuracy was not reached.

    See Also
    --------
    qr : any number of columns, and batches of small matrices.

    Notes
    -----
    On a GPU the first attempt computes R from the Gram matrix of A and ``Q = A R^-1``, with two passes over
    A, in fp16 with error correction (emulated in float64). If the certificate rejects it, Q is factorized
    again, and finally the tree of Householder factorizations follows, which is orthogonal for any condition
    number, in float64 if float32 is not enough. On a CPU LAPACK is fastest.

    Columns are scaled by powers of two where fp16 would overflow. The Gram matrix squares the condition
    number: with corrected fp16 one pass is accepted up to a condition number of about 3, two passes up to
    about 1e3. Small matrices of a batch are factorized together, as in :func:`qr`.

    Q and R of torch tensors are differentiable, as in :func:`qr`.

    References
    ----------
    .. [1] H. Ootomo, R. Yokota, "TSQR on TensorCores with error correction", 2021.

    Examples
    --------
    >>> import numpy as np, neula
    >>> A = np.random.default_rng(0).uniform(-1, 1, (5000, 20)).astype(np.float32)
    >>> Q, R = neula.tsqr(A)
    >>> bool(np.linalg.norm(A - Q @ R) < 1e-6 * np.linalg.norm(A))
    True
    >>> neula.tsqr(A, compute="fp16_nocor", engine="emulated").accuracy
    'fp16'
    """
    call = Call.begin({"A": A}, engine=engine, strict=strict, gradients=True)
    a, target = call.first.tensor, call.target
    check_matrices(a, "A")
    if a.shape[-1] > COLUMNS[-1]:
        raise ValueError(
            f"A of shape {tuple(a.shape)} has {a.shape[-1]} columns, and tsqr takes at most {COLUMNS[-1]}: "
            "use neula.qr"
        )
    check_name("mode", mode, MODES)
    check_name("compute", compute, ("auto", *COMPUTE, *SLIDES))
    if compute != "auto":
        target = max(target, FORMATS[(COMPUTE | SLIDES)[compute]], key=lambda format: format.u)
    options, matrices = QROptions(target, call.engine), call.matrices()
    links = _chain(matrices, options) if compute == "auto" else [_named(compute, call.engine, a.shape[-1])]
    if a.numel() == 0:
        factors = QRFactors.of_nothing(matrices, mode, target)
    else:
        with call.computing():
            factors = factorize_together(matrices, links, options)
    if a.ndim == 2 and not factors.attempts[-1].accepted and not options.over_rows.spread:
        check_finite(a, a, "A")
    return as_result(factors, call, mode, options)


def _chain(matrices: torch.Tensor, options: QROptions) -> Sequence[QRLink]:
    tuning = options.engine.tuning
    count, m, n = matrices.shape
    # LAPACK takes a third of the time of a Gram matrix in float64.
    if tuning.lapack or go_together(count, m, n, tuning):
        return chain_together(m, n, options)
    return chain_tall(m, n, options)


def _named(compute: str, engine: Engine, columns: int) -> QRLink:
    method = partial(tree, **tree_options(compute, engine, columns))
    return together(f"tsqr {compute}", torch.float32, partial(engine.over_rows.merged, factorize=method))


def tree_options(compute: str, engine: Engine, columns: int) -> dict[str, Any]:
    """Arguments of :func:`neula.algorithms.orthogonal.tsqr.tsqr` for one of the modes."""
    if compute not in SLIDES:
        return {"product": _product(compute, engine)}
    if 2 * columns > SLIDES_ROWS:
        raise ValueError(f"compute={compute!r} takes at most {SLIDES_ROWS // 2} columns, got {columns}")
    low = _multiplying(compute.removesuffix("_slides"), engine)
    product = partial(corrected_bmm, engine=low, shift=SLIDES_SHIFT)
    return {"product": product, "tile_rows": SLIDES_ROWS, "reflections": product}


def _product(compute: str, engine: Engine) -> str | Product:
    """The product for block reflectors: the name of a kernel, or a function of the engine."""
    format, _, correction = compute.partition("_")
    if format == "fp32":
        return exact_matmul
    low = _multiplying(format, engine)
    if engine.name == "cuda" and not engine.is_complex:
        # Its kernels know them by name; an emulated unit on a GPU is not theirs.
        return format if correction == "nocor" else f"{format}_cor"
    return low.bmm if correction == "nocor" else partial(corrected_bmm, engine=low)


def _multiplying(format: str, engine: Engine) -> Engine:
    """The engine in a low format that it has."""
    if format not in engine.formats:
        raise ValueError(
            f"the {engine.name} engine does not multiply in {format!r} (it gains nothing there): "
            "pass compute='fp32_notc' or engine='emulated'"
        )
    return engine.using(format)
