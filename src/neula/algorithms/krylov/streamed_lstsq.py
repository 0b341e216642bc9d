"""Least squares of a matrix that is seen in blocks of rows, each pass of which sums what it can.

The corrected seminormal equations (Björck, "Stability analysis of the method of seminormal equations for
linear least squares problems", Linear Algebra Appl. 88/89, 1987) need two things of A: some R, and the
gradient ``A^H (b - A x)`` of a solution. Both are sums over blocks of rows, so one pass gives R, and each
further one an update of x together with the evidence of what it comes to.

R is that of the Gram matrix, or, where A is too ill-conditioned for that, one that is merged with block after
block (TSQR in sequence: Demmel, Grigori, Hoemmen and Langou, "Communication-optimal parallel and sequential
QR and LU factorizations", SIAM J. Sci. Comput. 34, 2012).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch.nn import functional

from neula.algorithms.krylov.batched_lstsq import MARGINS, PROBES, ROUNDING, lengths, probes
from neula.algorithms.krylov.doubled_refinement import DoubledEvaluation, FactoredProblems, Refinement
from neula.algorithms.orthogonal.cholesky_qr import upper_cholesky
from neula.algorithms.spectra.inverse_norm import schatten_bounds
from neula.algorithms.spectra.rank_revealing import RowSpace, Spectrum
from neula.certificates.backward_error import Measures, Norms
from neula.certificates.forward_error import enlarged, least_squares_error, left_by_update
from neula.certificates.rank import rank_doubt, rounding_of
from neula.certificates.residuals import projection_noise, residual_noise
from neula.engines import FP64
from neula.kernels.doubled.doubled import two_sum
from neula.kernels.doubled.doubled_normal import doubled_normal
from neula.kernels.magnitudes import squares, two_norms
from neula.kernels.small_problems.refining import over
from neula.kernels.triangular_inverse import triangular_inverse

SYMMETRIC = 512
"""Columns of a part of a Gram matrix that is one product; what lies above such parts is not computed."""

SHORT = 16.0
"""Squared length of rows of ``R^-H A^H`` up to which R and more rows are merged by products."""


CLEAR = 8.0
"""Singular values within this factor of the threshold leave the rank in doubt: rounding errors move them."""


@dataclass(frozen=True)
class Coordinates:
    """A matrix C for which ``W = A C`` has nearly orthonormal columns.

    With full rank C is ``R^-1``, else it goes into the space of the rows that count.
    """

    inverse: torch.Tensor  # shape (n, r): C
    # Shape (n, r). A times it is an orthonormal basis orthogonal to the residual of a solution: C at full
    # rank. Otherwise C has a part in the dropped space, along which there is a residual.
    projector: torch.Tensor
    # Shape (n, r): what the coordinates of Q^H b are taken in, where that is not all of it.
    left: torch.Tensor | None
    columns: torch.Tensor  # shape (n, 1): norms of the columns of A, 1 where they are zero: the diagonal of D
    # norm, norm_bound: ||B||_2 for B = A D^-1, from below and from above.
    norm: float
    norm_bound: float
    inverse_norm: float  # ||B^+||_2 from above
    size: float  # ||B||_F ||B^+||_F, by which rounding errors of C grow
    doubt: str = ""  # why the rank is not certain
    shortest: Shortest | None = None  # of less than full rank: which of all solutions is meant

    @property
    def rank(self) -> int:
        """Columns of C."""
        return self.inverse.shape[1]

    @property
    def condition(self) -> float:
        """Condition number of B, or of what of it counts, from above."""
        return (
            self.norm_bound * self.inverse_norm if self.shortest is None else self.shortest.spectrum.condition
        )

    @classmethod
    def from_factor(cls, r: torch.Tensor) -> Coordinates:
        """Coordinates from an upper triangular R of full rank."""
        norms = two_norms(r, 0)
        columns = torch.where(norms > 0, norms, 1.0)[:, None]
        inverse = triangular_inverse(r[None], upper=True)[0]
        return cls._from_inverse(inverse, None, columns, r / columns.T)

    @classmethod
    def of_any_rank(
        cls,
        r: torch.Tensor,
        right: tuple[torch.Tensor, torch.Tensor],
        rcond: float,
        count: int,
        unit: float,
        scales: torch.Tensor | None = None,
    ) -> Coordinates:
        """Coordinates from an R of any rank; singular values of ``R D^-1`` below a part ``rcond`` are zero.

        ``right`` is the part of ``Q^H b`` that belongs to R, and what has the length of the rest. A has
        ``count`` rows, in a format of unit roundoff ``unit``. Its columns were multiplied by powers of two,
        the ``scales``, shape (n,): the minimum-norm solution is that without them.
        """
        norms = two_norms(r, 0)
        columns = torch.where(norms > 0, norms, 1.0)[:, None]
        b = r / columns.T
        u, s, vh = torch.linalg.svd(b)
        threshold = float(rcond * s[0]) if len(s) else 0.0
        rank = int((s > threshold).sum())
        if rank == r.shape[1]:
            found = cls.from_factor(r)
            near = not float(s[-1]) > CLEAR * threshold
            return found if not near else replace(found, doubt=_no_gap(s, rank))
        shortest = Shortest.from_svd(s, vh[:rank].mH, norms, count, scales)
        inverse = shortest.space.shortest(torch.diag(1 / s[:rank]).to(r.dtype)) / columns
        found = replace(
            cls._from_inverse(inverse, u[:, :rank], columns, b),
            projector=vh[:rank].mH / s[:rank] / columns,
            shortest=shortest,
        )
        gap = float(s[rank]) * CLEAR <= threshold and (rank == 0 or float(s[rank - 1]) >= CLEAR * threshold)
        if not gap or not rank:
            return found if gap else replace(found, doubt=_no_gap(s, rank))
        along, norm = u[:, rank:].mH @ right[0], torch.linalg.vector_norm
        # Rounding errors turn the left singular vectors, and so mix in what counts of b.
        mixed = shortest.spectrum.angle * norm(right[0], dim=0)
        length = norm(torch.cat([along, right[1], mixed[None]]), dim=0)
        noise = max(rounding_of(len(s), unit), Spectrum.rounding(count + len(s)) * float(s[0]))
        doubt = rank_doubt(float(s[rank - 1]), s[rank:], along, length, rank, count, noise)
        return replace(found, doubt=doubt)

    @classmethod
    def _from_inverse(
        cls, inverse: torch.Tensor, left: torch.Tensor | None, columns: torch.Tensor, b: torch.Tensor
    ) -> Coordinates:
        norm, norm_bound = schatten_bounds(b[None])
        inverse_norm = schatten_bounds((columns * inverse)[None])[1]
        sizes = torch.linalg.matrix_norm(b) * torch.linalg.matrix_norm(columns * inverse)
        found = torch.stack([norm[0, 0], norm_bound[0, 0], inverse_norm[0, 0], sizes]).tolist()
        return cls(inverse, inverse, left, columns, *found)

    def of_b(self, z: torch.Tensor) -> torch.Tensor:
        """Coordinates of the solution, shape (r, k), for ``Q^H b``."""
        return z if self.left is None else self.left.mH @ z

    def length(self, x: torch.Tensor) -> torch.Tensor:
        """``||D x||`` of each column."""
        return two_norms(self.columns * x, -2)

    def error(
        self, x: torch.Tensor, measured: torch.Tensor, backward_error: torch.Tensor, ratio: torch.Tensor
    ) -> torch.Tensor:
        """Bound on ``||D (x - x*)|| / ||D x*||`` where the error in the range of C was ``measured``, shape
        (k,); ``ratio`` is ``||r|| / (||B|| ||D x||)``.
        """
        if not self.rank:
            return torch.zeros_like(measured)
        if self.doubt:
            return torch.full_like(measured, torch.inf)
        if self.shortest is None:
            return measured
        # Below full rank that range depends on rounding errors, too.
        by_formula = least_squares_error(self.condition, backward_error, ratio)
        error = measured + self.shortest.error(self.columns * x, by_formula, ratio)
        return enlarged(error, error)


@dataclass(frozen=True)
class Shortest:
    """The minimum-norm solution, and how it depends on the row space."""

    space: RowSpace
    v: torch.Tensor  # shape (n, r): orthonormal basis of the rows of B that count
    spectrum: Spectrum

    @classmethod
    def from_svd(
        cls, s: torch.Tensor, v: torch.Tensor, norms: torch.Tensor, count: int, scales: torch.Tensor | None
    ) -> Shortest:
        """Minimum-norm map from singular values and vectors, column norms, and scales of the columns."""
        # Zero columns take no part, whatever their scales.
        units = (norms > 0).double() if scales is None else torch.where(norms > 0, 1 / scales, 0.0)
        sizes = norms * over(units, units.amax())
        return cls(
            RowSpace(v, over(sizes, sizes.amax())),
            v,
            Spectrum.from_singular_values(s, v.shape[1], count + len(v)),
        )

    def error(self, y: torch.Tensor, relative: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
        """Relative error of ``y = D x`` by those of its coefficients and of the space."""
        relative = torch.maximum(relative, self.spectrum.coefficient_error(ratio))
        return self.space.error(self.v.mH @ y, y, relative, self.spectrum.angle)


def _no_gap(s: torch.Tensor, rank: int) -> str:
    around = ", ".join(f"{float(x):.1e}" for x in s[max(0, rank - 1) : rank + 1] / s[0])
    return f"rank {rank} is ambiguous: relative singular values next to the threshold are {around}"


@dataclass
class GramSums:
    """``A^H A``, ``A^H b`` and the squares of the norms of b, block by block."""

    gram: torch.Tensor  # shape (n, n): its lower triangle
    products: torch.Tensor  # shape (n, k)
    squares: torch.Tensor  # shape (k,)

    @classmethod
    def begin(cls, n: int, k: int, device: torch.device, dtype: torch.dtype = torch.float64) -> GramSums:
        """Sums over no rows."""
        gram, products = (torch.zeros(n, columns, dtype=dtype, device=device) for columns in (n, k))
        return cls(gram, products, products.real.new_zeros(k))

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """More rows, shape (rows, n) and (rows, k)."""
        for start in range(0, a.shape[1], SYMMETRIC):  # the lower triangle
            stop = start + SYMMETRIC
            self.gram[start:, start:stop].addmm_(a[:, start:].mH, a[:, start:stop])
        self.products += (b.mH.contiguous() @ a).mH
        self.squares += squares(b).sum(0)

    def rescale(self, columns: torch.Tensor, right: torch.Tensor) -> None:
        """Multiply columns of A and b by powers of two."""
        self.gram *= columns * columns[:, None]
        self.products *= columns[:, None] * right
        self.squares *= right.square()

    def r(self) -> torch.Tensor | None:
        """R of the Gram matrix, its columns scaled to unit norm meanwhile; None where it is not definite."""
        norms = self.gram.diagonal().real.sqrt()
        if not bool((norms > 0).all()):
            return None
        scales = torch.exp2(-torch.frexp(norms)[1].double())
        r, info = upper_cholesky(self.gram * scales * scales[:, None])
        return None if bool(info > 0) else (r / scales).triu()


def merged(r: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """R of the rows that an upper triangular ``r`` stands for, and of more.

    ``R'^H R' = R^H (I + P P^H) R`` with ``P = R^-H A^H``, the reverse of removing rows (Golub and Van Loan,
    "Matrix Computations", 4th edition, section 6.5). While rows of P are short this errs as little as
    reflections, which take half as long again: elements of A^H by ``n u |R^H| |P|``, and ``I + P P^H``, whose
    eigenvalues are at least 1, by a few u.
    """
    if len(r) == r.shape[1] > 0:
        p = torch.linalg.solve_triangular(r.mH, rows.mH, upper=False)
        gram = p @ p.mH
        if float(gram.diagonal().real.amax()) <= SHORT:  # not for NaN and Inf, where R is singular
            gram.diagonal().add_(1)
            return upper_cholesky(gram)[0] @ r
    return torch.linalg.qr(torch.cat([r, rows]), mode="r")[1]


@dataclass
class HouseholderSums:
    """R of ``[A b]``, block by block, without its Gram matrix."""

    # Shape (at most n + k, n + k): upper trapezoidal: [[R, Q^H b], [0, S]], where S has the residuals' norms
    # in its columns.
    r: torch.Tensor
    n: int  # columns of A

    @classmethod
    def begin(
        cls, n: int, k: int, device: torch.device, dtype: torch.dtype = torch.float64
    ) -> HouseholderSums:
        """Sums over no rows."""
        return cls(torch.zeros(0, n + k, dtype=dtype, device=device), n)

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """More rows, shape (rows, n) and (rows, k)."""
        self.r = merged(self.r, torch.cat([a, b], 1))

    def rescale(self, columns: torch.Tensor, right: torch.Tensor) -> None:
        """Multiply columns of A and b by powers of two."""
        self.r *= torch.cat([columns, right])

    @property
    def whole(self) -> torch.Tensor:
        """R of ``[A b]``, shape (n + k, n + k), also of fewer rows."""
        size = self.r.shape[1]
        return functional.pad(self.r, (0, 0, 0, size - len(self.r)))

    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """R, shape (n, n); ``Q^H b``, shape (n, k); S, shape (k, k)."""
        n, room = self.n, self.whole
        return room[:n, :n], room[:n, n:], room[n:, n:]


@dataclass
class RefinementSums:
    """Sums of one pass that measure a solution, an unevaluated sum: its residual, the gradient, and the
    quality of C.
    """

    coordinates: Coordinates
    x: torch.Tensor
    x_low: torch.Tensor
    doubled: bool
    rounded: bool = False
    count: int = 0  # rows
    # squares, of_b, shape (k,): of the norms of residuals and right-hand sides.
    squares: torch.Tensor = field(init=False)
    of_b: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        k = self.x.shape[1]
        self.z = probes(self.coordinates.rank, self.x.device, PROBES).to(self.x.dtype)
        self.probed = self.coordinates.inverse @ self.z
        self.images = torch.zeros_like(self.probed)
        self.gradient, self.gradient_low = torch.zeros_like(self.x), torch.zeros_like(self.x)
        self.squares, self.of_b = self.x.real.new_zeros(k), self.x.real.new_zeros(k)

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """More rows, shape (rows, n) and (rows, k)."""
        self.count += len(a)
        self.of_b += squares(b).sum(0)
        if not self.doubled:
            # Vectors are rows, which takes a quarter of the time in MKL.
            products = torch.cat([self.x, self.probed], 1).T.contiguous() @ a.T
            k = b.shape[1]
            products[:k].neg_().add_(b.T)
            residual = products[:k].T
            summed = (products.conj() @ a).mH
            self.gradient += summed[:, :k]
            self.images += summed[:, k:]
        else:
            (residual, _), (more, more_low) = doubled_normal(a, self.x, self.x_low, b)
            self.gradient, error = two_sum(self.gradient, more)
            self.gradient_low += error + more_low
            self.images += a.mH @ (a @ self.probed)
        self.squares += squares(residual).sum(0)

    def summed(self) -> SummedGradient:
        """The gradient and norms, summed over all rows."""
        of = self.coordinates
        gradient = self.gradient + self.gradient_low
        projected = of.projector.mH @ gradient
        change = torch.linalg.matrix_norm(self.z - of.projector.mH @ self.images)
        rate = float(MARGINS[PROBES] * change) + ROUNDING * FP64.u * of.size
        # Each part of a complex sum has two real products a term.
        terms, n = 2 if gradient.is_complex() else 1, len(gradient)
        noise = residual_noise(terms * (self.count + n), doubled=self.doubled)
        if self.rounded:  # ||dA y|| <= u ||A||_F ||y||
            noise = max(noise, residual_noise(n, doubled=False))
        residual, b, gone = self.squares.sqrt(), self.of_b.sqrt(), lengths(projected[None])[0]
        floor = projection_noise(noise, of.norm_bound, of.condition, of.length(self.x), b, residual)
        rest = ((residual - gone) * (residual + gone)).clamp_min(0).sqrt()  # by Pythagoras
        return SummedGradient(projected, rate, rest, b, floor)


class SummedGradient(NamedTuple):
    """Sums over all rows for a solution x."""

    # Shape (r, k): P^H A^H (b - A x) with the projector P of the coordinates: the projection of the residual
    # on the range of A.
    projected: torch.Tensor
    rate: float  # ||I - W^H W||_F from above
    rest: torch.Tensor  # shape (k,): norm of the residual without that projection
    b: torch.Tensor  # shape (k,): norm of the right-hand side
    floor: torch.Tensor  # shape (k,): bound on the errors of the projection


class SummedProblem(FactoredProblems):
    """A problem that is refined by sums over its rows: a batch of one.

    Right-hand sides are given by their coordinates, ``Q^H b`` or ``R^-H A^H b``. Each step is one evaluation
    of the ``sums``, from the last one of which, ``found``, all that is known after the update follows, too.
    All right-hand sides are updated by each step. The ``rate``, shape (1,), is infinite before the first one.
    """

    def __init__(
        self, coordinates: Coordinates, sums: Callable[[torch.Tensor, torch.Tensor], SummedGradient]
    ) -> None:
        self.coordinates, self._sums = coordinates, sums
        self.rate = coordinates.columns.new_full((1,), torch.inf)
        self.found: SummedGradient

    def start(self, b: torch.Tensor) -> torch.Tensor:
        return self.coordinates.inverse @ b

    def size(self, unknowns: torch.Tensor) -> torch.Tensor:
        return self.coordinates.length(unknowns)

    def evaluate(self, b: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> DoubledEvaluation:
        """``C P^H A^H r``; in place of the residual its norm, shape (1, k)."""
        of, self.found = self.coordinates, self._sums(high[0], low[0])
        self.rate.fill_(self.found.rate)
        left = of.inverse_norm * (self._left + self.found.floor)
        return DoubledEvaluation((of.inverse @ self.found.projected)[None], left[None], self.found.rest[None])

    @property
    def _left(self) -> torch.Tensor:
        """Norm of the projected residual after the last update, without errors of the sums; shape (k,)."""
        return left_by_update(self.found.rate) * lengths(self.found.projected[None])[0]

    def updated(self, at: Refinement) -> tuple[torch.Tensor, Measures]:
        """The norm of the residual that the last update leaves, shape (1, k), and what it says."""
        of, left = self.coordinates, self._left
        residual = torch.hypot(at.residual, left)
        norms = Norms(residual, of.norm_bound * left, left, of.norm * self.size(at.high), self.found.b)
        return residual, norms.measures(of.norm)
