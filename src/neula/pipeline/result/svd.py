"""The result of a truncated singular value decomposition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Generic

from neula.pipeline.result import shown
from neula.pipeline.result.certified import CertifiedResult, Unpacked
from neula.pipeline.result.deferred import Deferrable
from neula.pipeline.result.qr import QRResult
from neula.pipeline.result.shown import ArrayT


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SVDResult(CertifiedResult, Unpacked, Generic[ArrayT]):
    """Singular values and vectors, all or leading ones, a :class:`CertifiedResult`: ``U, s, Vh = result``.

    Attributes
    ----------
    U : array, shape (..., m, k)
    s : array, shape (..., k)
        Singular values, descending.
    Vh : array, shape (..., k, n)
    relative_error : float
        ``||A - U diag(s) Vh||_F / ||A||_F``, estimated from a few random vectors, or by Pythagoras from the
        norms of A and s, which is exact; of :func:`neula.svd` ``||A V - U diag(s)||_F / ||A||_F``, of wide
        matrices that of their adjoints, rounding errors of the measurement included, before U and V are
        rounded to the dtype of A. Of a batch the largest.
    errors : array, shape (..., k)
        Bounds on the errors of the singular values: ``s[i]`` is not farther from the i-th largest singular
        value of A. Infinite where the triplets were not good enough to say so.
    certificate : SVDCertificate or sequence of SVDCertificate
        The measured errors and their bounds, one for each matrix of a batch.
    converged : bool
        Whether all certificates are accepted.
    gaps, clusters, vector_errors : array, shape (..., k), or None
        Of :func:`neula.svd` alone: singular values with the same number in ``clusters`` are too close for
        vectors of their own, ``gaps`` is the distance of a cluster to all other singular values (and to zero
        if A is not square), and ``vector_errors`` a bound on the sine of the largest angle between its
        computed and its exact singular subspaces.
    accepted : array of bool, shape (*batch,), or None
        Of :func:`neula.svd`: which matrices are certified.
    passes : int
        How often A was read, if it was read in blocks; 0 if it was in memory.
    evidence : {"measured", "a priori"}
        What ``errors`` follow from: without vectors, from the backward stability of the algorithm.
    """

    _arrays: ClassVar[str] = ".U, .s and .Vh"

    U: ArrayT
    s: ArrayT
    Vh: ArrayT
    relative_error: float
    errors: Any = Deferrable(None)  # noqa: RUF009
    certificate: Any = Deferrable(None)  # noqa: RUF009
    converged: bool = False
    gaps: Any = Deferrable(None)  # noqa: RUF009
    clusters: Any = Deferrable(None)  # noqa: RUF009
    vector_errors: Any = Deferrable(None)  # noqa: RUF009
    accepted: Any = Deferrable(None)  # noqa: RUF009
    passes: int = 0
    evidence: str = "measured"

    @property
    def qr(self) -> QRResult[Any]:
        """The orthogonality and attempts of this factorization as a :class:`QRResult` without Q and R."""
        known = {"attempts": self.attempts, "engine": self.engine, "accuracy": self.accuracy}
        return QRResult(None, None, self.certificate, **known)

    def _parts(self) -> tuple[Any, ...]:
        return self.U, self.s, self.Vh

    def _headline(self) -> str:
        s: Any = self.s
        # The rank of the approximation; the rank of A is not decided.
        count = f"rank {s.shape[-1]}" if self.accepted is None else f"{s.shape[-1]} singular values"
        return f"{count}, {super()._headline()}{shown.members(self.accepted)}"

    def _worst(self) -> str:
        """The certificate; of a batch that of the matrix that exceeds its bounds most."""
        found = self.certificate
        if isinstance(found, list):
            found = max(found, key=lambda x: max(x.excess), default="")
        return str(found)

    def _rows(self) -> shown.Rows:
        return {
            "U": shown.array(self.U),
            "s": shown.array(self.s),
            "Vh": shown.array(self.Vh),
            f"errors ({self.evidence})": shown.array(self.errors),
            "relative error": f"{self.relative_error:.1e}",
            "method": shown.attempted(self.attempts),
            "certificate": self._worst(),
            "time": f"{shown.duration(self.seconds)}, engine {self.engine}",
        }.items()
