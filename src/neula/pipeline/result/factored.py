"""Methods and results that factorizations share: solutions, determinants and quadratic forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Generic

from neula.pipeline.result import shown
from neula.pipeline.result.certified import Unpacked
from neula.pipeline.result.shown import ArrayT
from neula.pipeline.result.solution import SolutionResult


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class FactorValue(shown.Shown, Generic[ArrayT]):
    """Numbers that follow from a factorization, with a bound on their errors.

    Attributes
    ----------
    value : array
        In the library and on the device of the factors, in the wider of their dtype and that of b, at least
        float32; a torch tensor can be differentiated.
    error : array of float64
        Bound on the difference from the exact value for A as it is stored.
    """

    _arrays: ClassVar[str] = ".value"

    value: ArrayT
    error: Any

    def _headline(self) -> str:
        return "value with a bound on its error"

    def _rows(self) -> shown.Rows:
        return {"value": in_words(self.value), "error": in_words(self.error)}.items()


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SlogdetResult(shown.Shown, Unpacked, Generic[ArrayT]):
    """``sign, logabsdet = result``, as with ``numpy.linalg.slogdet``, and a bound on the error.

    Attributes
    ----------
    sign : array
        1 or -1; of complex matrices a number of magnitude 1.
    logabsdet : array
        Logarithm of the magnitude of the determinant; a torch tensor can be differentiated.
    error : array of float64
        Bound on the error of the logarithm, and of a complex sign in radians; a real sign is certain where it
        is finite.
    """

    _arrays: ClassVar[str] = ".sign and .logabsdet"

    sign: ArrayT
    logabsdet: ArrayT
    error: Any

    def _parts(self) -> tuple[Any, ...]:
        return self.sign, self.logabsdet

    def _headline(self) -> str:
        return "sign and logarithm of a determinant"

    def _rows(self) -> shown.Rows:
        names = ("sign", "logabsdet", "error")
        return {name: in_words(getattr(self, name)) for name in names}.items()


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class FactorSolution(SolutionResult[ArrayT], Generic[ArrayT]):
    """Solution of a linear system by factors of its matrix: a :class:`SolutionResult`.

    The backward error is ``||b - A x|| / (||A||_F ||x|| + ||b||)`` in the 2-norm, with scaled columns of A.

    Attributes
    ----------
    method : str
        How it was found.
    """

    method: str = ""

    def _rows(self) -> shown.Rows:
        return self._rows_with(self.method, {})


class Factored(Generic[ArrayT]):
    """Methods of a factorization: of :class:`CholeskyResult`, :class:`LUFactors` and, for square matrices and
    without pivoting, :class:`QRResult`.

    The methods compute with the existing factors, in double precision, and keep A by reference: they refine
    solutions with A, and measure the error of the factors. Do not change A. Values and solutions of torch
    tensors are differentiable by A and b, to any order, without another factorization. Right-hand sides have
    the shape (n,) or (..., n, k), as for :func:`neula.solve`.

    All methods raise a ValueError if A was changed or is not kept (after pickling, with ``keep_a=False`` or
    ``overwrite_a=True``, in graphs of ``torch.compile`` and transforms of ``torch.func``), and for a b that
    does not fit or has NaN or Inf. If no digit of a number is guaranteed, they warn with an
    :class:`~neula.IllConditionedWarning`.

    Notes
    -----
    With factors ``A = M1 M2`` (``L L^H``, ``P^T L U``, ``Q R``) and ``E = M1^-1 A M2^-1 - I``, ``log |det
    A|`` is ``log |det M1 M2| + log |det (I + E)|``. Products with eight Gaussian vectors bound the second
    term, with a probability of failure below 1e-6. The error is this bound and the rounding errors of the sum
    (N. J. Higham, "Accuracy and Stability of Numerical Algorithms", 2002, section 4.2); see
    :mod:`neula.certificates.factored`.
    """

    _factors: Any

    @property
    def _known(self) -> Any:
        if self._factors is None:
            raise ValueError(
                "this result does not keep A, which its methods need to certify an answer: results that were "
                "pickled or computed over processes, with keep_a=False, overwrite_a=True, torch.compile or "
                "torch.func do not; call the method before that, or factorize A again"
            )
        return self._factors

    def solve(self, b: Any) -> FactorSolution[ArrayT]:
        """Solution ``x`` of ``A x = b``, refined with A to the accuracy of its dtype, and its evidence."""
        return self._known.solve(b)

    def solve_triangular(self, b: Any, *, transposed: bool = False) -> FactorSolution[ArrayT]:
        """Solution ``x`` of a system with L of ``L L^H``, U of ``L U`` or R of ``Q R``, or with its conjugate
        transpose.

        The evidence is that for the factor as it is stored: substitution is backward stable (Higham 2002,
        theorem 8.5), and the condition number bounds the forward error.
        """
        return self._known.solve_triangular(b, transposed)

    def logdet(self) -> FactorValue[ArrayT]:
        """``log |det A|`` of each matrix, shape (...)."""
        return self._known.logdet()

    def slogdet(self) -> SlogdetResult[ArrayT]:
        """Sign of the determinant and :meth:`logdet`: unpacks into ``sign, logabsdet``, shape (...)."""
        return self._known.slogdet()

    def inv_quad(self, b: Any) -> FactorValue[ArrayT]:
        """``b^H A^-1 b`` of each right-hand side, shape (...) for a vector, else (..., k)."""
        return self._known.inv_quad(b)

    def diag_inverse(self) -> FactorValue[ArrayT]:
        """Diagonal of ``A^-1``, shape (..., n), in the time of n right-hand sides."""
        return self._known.diag_inverse()


def in_words(x: Any) -> str:
    """Text of a number, or of an array of numbers."""
    if getattr(x, "shape", ()):
        return shown.array(x)
    number = complex(x)
    return f"{number:.6g}" if number.imag else f"{number.real:.6g}"
