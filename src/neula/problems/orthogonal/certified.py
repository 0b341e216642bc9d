"""An R that is certified in double precision, for whatever continues with it in place of A.

Bounds, constraints, statistics and steps of non-linear fits are small problems on R once A is factorized. The
R of a preconditioner will not do for them: it errs by its unit roundoff times the condition number. Cholesky
QR of ``A R^-1`` in double precision makes a good one of it.
"""

from __future__ import annotations

import torch

from neula.algorithms.spectra.gram import GramTuning
from neula.engines import FP16_COR, FP64, Engine, Tuning
from neula.engines.complex import over
from neula.engines.formats import in_double
from neula.kernels.precision import plain_arithmetic
from neula.pipeline.chain import run_chain
from neula.pipeline.inputs import finite_members
from neula.problems.orthogonal.factorize import factorize
from neula.problems.orthogonal.factors import QRFactors
from neula.problems.orthogonal.judge import QRJudge
from neula.problems.orthogonal.links import MatrixLayout, chain_alone
from neula.problems.orthogonal.problem import QRMatrices, QROptions
from neula.problems.orthogonal.ways import refined_from_gram


def certified_qr(a: torch.Tensor, engine: Engine) -> QRFactors:
    """QR in double precision of each matrix of a batch, certified as that of :func:`neula.qr` is.

    ``a``, shape (batch, m, n): on the engine's device, of any real or complex dtype. Not modified. Any
    dimension may be zero. For matrices that are not accepted it
    returns the best that was found; the caller has to say so.

    Examples
    --------
    >>> import torch
    >>> from neula.engines import select_engine
    >>> a = torch.tensor([[[3.0, 1.0], [4.0, 2.0], [0.0, 2.0]]])
    >>> found = certified_qr(a, select_engine("cpu", a.device))
    >>> found.r.abs().round(decimals=12), bool(found.accepted.all())
    (tensor([[[5.0000, 2.2000],
             [0.0000, 2.0396]]], dtype=torch.float64), True)
    """
    a = in_double(a)
    count, m, n = a.shape
    engine = over(engine, a.dtype)
    options = QROptions(FP64, engine)
    compute = coarse_arithmetic(m, n, engine.tuning)
    if compute is None or count > 1 or not bool(finite_members(a).all()):
        return factorize(a, "reduced", options)
    links = [refined_from_gram(compute), *chain_alone(MatrixLayout.from_matrix(a[0]), options)]
    judge = QRJudge((m, n), FP64)
    with plain_arithmetic(engine.device):
        run = run_chain(links, QRMatrices(a, options), judge)
    return QRFactors.from_run(run, judge.certificates(run))


def coarse_arithmetic(m: int, n: int, tuning: Tuning) -> str | None:
    """In what the Gram matrix is computed whose R Cholesky QR of ``A R^-1`` starts from; None: there is none.

    Worth it where an error-corrected product takes a part of the time of one in double precision. Elsewhere
    Gram-Schmidt in double precision, which may do at once, takes less (8000 x 500 on a CPU: half). Nearly
    square matrices are too ill-conditioned for a Gram matrix more often than not.
    """
    tall = m >= 2 * n > 0 and n <= tuning[GramTuning].gram_columns and not tuning.lapack_first(m, n)
    return FP16_COR if tall and tuning.corrected else None
