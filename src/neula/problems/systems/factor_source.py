"""Sources of factors for linear systems that are solved together, and the effect of their errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from neula.algorithms.elimination.butterflied_lu import ButterfliedInverses
from neula.algorithms.elimination.cholesky import blocks_pay, double_cholesky, inverted_cholesky
from neula.algorithms.elimination.factorization import inverted_lu
from neula.algorithms.krylov.batched_lstsq import PROBES
from neula.algorithms.krylov.factored_systems import Factors
from neula.algorithms.orthogonal.r_only import lower_gram
from neula.algorithms.scaling import binary_exponents
from neula.algorithms.triangular.inverted import InvertedBlocks, InvertedTuning
from neula.engines import FP32, FP64, Engine, Format
from neula.engines.formats import in_double, matching_dtype
from neula.kernels.magnitudes import largest_magnitude
from neula.kernels.shift import shift
from neula.kernels.small_problems.refining import over
from neula.pipeline.batches import SingularMember
from neula.problems.systems.system import ScaledSystems
from neula.problems.systems.ways import MIXED

NORMAL_EQUATIONS = "cholesky of the normal equations fp64"
DEFINITE = "cholesky fp64, inverted"
VECTORS = 3  # random vectors that show how well factors solve; with LAPACK's that is more than is needed

Factorize = Callable[[ScaledSystems, Engine], tuple[Factors, torch.Tensor | None]]
"""Factors of scaled matrices, and how much elements have grown, shape (batch,); None where they do not."""


@dataclass(frozen=True)
class FactorSource:
    """A way to factorize the matrices of a batch."""

    label: str
    factorize: Factorize
    format: Format = FP64  # of the factors
    # Whether the host reads whether there are factors: it may raise SingularMember. Factors of other sources
    # are NaN then, and a CUDA graph can replay them.
    synchronizes: bool = False
    power: int = 1  # of the condition number, by which a solve magnifies rounding errors
    vectors: int = PROBES  # random vectors that show how well factors solve
    unit: bool = False  # whether these may be unit vectors


@dataclass(frozen=True)
class _LU:
    """LU factors in single or double precision, of systems in double."""

    lu: torch.Tensor
    pivots: torch.Tensor

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        if self.lu.dtype == b.dtype:
            return torch.linalg.lu_solve(self.lu, self.pivots, b)
        # Updates in single precision would underflow, and seem to be exact.
        exponents = binary_exponents(largest_magnitude(b, 1, keepdim=True))
        found = torch.linalg.lu_solve(self.lu, self.pivots, shift(b, -exponents).to(self.lu.dtype))
        return shift(in_double(found), exponents)

    def solve_transposed(self, b: torch.Tensor) -> torch.Tensor:
        return in_double(torch.linalg.lu_solve(self.lu, self.pivots, b.to(self.lu.dtype), adjoint=True))


def _lu(scaled: ScaledSystems, engine: Engine, *, format: Format) -> tuple[Factors, torch.Tensor]:
    """The library's, with partial pivoting."""
    lu, pivots, info = torch.linalg.lu_factor_ex(scaled.a.to(matching_dtype(format.storage, scaled.a.dtype)))
    if bool((info > 0).any()):
        place = int((info > 0).nonzero()[0, 0])
        raise SingularMember(
            place,
            f"A is singular: pivot {int(info[place]) - 1} is exactly zero (counted from 0); use "
            "neula.lstsq for the minimum-norm solution",
        )
    inverted = inverted_lu(lu, pivots, engine.tuning) if format is FP64 else None
    growth = over(_largest_of_u(lu).double(), largest_magnitude(scaled.a, (1, 2)))
    return inverted or _LU(lu, pivots), growth


def _largest_of_u(lu: torch.Tensor) -> torch.Tensor:
    """Largest elements of U, shape (batch,); those of L are at most 1."""
    largest = largest_magnitude(lu, (1, 2))
    return largest if bool((largest > 1).all()) else largest_magnitude(lu.triu(), (1, 2))


Solve = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _SymmetricallyScaled:
    """Cholesky factors of ``diag(2^-e) A diag(2^-e)`` as factors of A."""

    solve_scaled: Solve
    # Shape (batch, n, 1) each: between the rows of the two, and between the columns; None where they are the
    # same matrix.
    exponents: tuple[torch.Tensor, torch.Tensor] | None

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        return self._solve(b, 1)

    def solve_transposed(self, b: torch.Tensor) -> torch.Tensor:
        return self._solve(b, -1)

    def _solve(self, b: torch.Tensor, order: int) -> torch.Tensor:
        if self.exponents is None:
            return self.solve_scaled(b)
        before, after = self.exponents[::order]
        return shift(self.solve_scaled(shift(b, before)), after)


def _definite(
    scaled: ScaledSystems, engine: Engine, *, factorize: Callable[[torch.Tensor, Engine], Solve]
) -> tuple[Factors, None]:
    """Cholesky factors of Hermitian matrices with rows and columns scaled symmetrically."""
    a, exponents = scaled.a, None
    if not scaled.given:  # or the diagonal is near 1: no element of a row is larger than its root
        both = scaled.symmetric()
        exponents = scaled.rows - both, scaled.columns.mT - both
        a = shift(a, exponents[0] + exponents[1].mT)
    # A GPU's library has them by columns, and copies them faster as they lie (order 12000: 19.0 ms, not 19.9)
    a = a.mH.resolve_conj() if a.is_cuda and a.stride(-1) == 1 else a
    return _SymmetricallyScaled(factorize(a.clone() if blocks_pay(a, engine) else a, engine), exponents), None


def _cholesky(a: torch.Tensor, engine: Engine) -> Solve:
    lower, info, _ = double_cholesky(a, engine)
    singular = (info > 0).nonzero()[:, 0].tolist()
    if singular:
        place = singular[0]
        raise SingularMember(
            place,
            f"A is not positive definite: the leading minor of order {int(info[place])} is not positive; "
            "solve it with assume_a='gen'",
        )
    width = engine.tuning[InvertedTuning].width(lower.shape[-1])
    if not width:
        return partial(_by_substitution, lower)
    inverted = InvertedBlocks.from_factor(lower, lower.dtype, upper=False, width=width)
    return lambda b: inverted.mH.solve(inverted.solve(b.clone()))


def _by_substitution(lower: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``(L L^H)^-1 b``; the library's solver for both copies L each time."""
    half = torch.linalg.solve_triangular(lower, b, upper=False)
    return torch.linalg.solve_triangular(lower.mH, half, upper=True)


def check_diagonal(a: torch.Tensor) -> None:
    """Refuse matrices as given that are not positive definite at first sight."""
    diagonal = a.diagonal(dim1=1, dim2=2).real
    bad = (diagonal <= 0).nonzero()
    if len(bad):
        place, i = bad[0].tolist()
        raise SingularMember(
            place,
            f"A is not positive definite: A[{i}, {i}] is {float(diagonal[place, i])}; "
            "solve it with assume_a='gen'",
        )


def _inverted(a: torch.Tensor, engine: Engine) -> Solve:
    lower = inverted_cholesky(a, engine)
    return lambda b: lower.mH.solve(lower.solved(b))


@dataclass(frozen=True)
class _NormalEquations:
    """``L L^H = A^H A``, to solve systems with A."""

    a: torch.Tensor  # shape (batch, n, n)
    lower: InvertedBlocks

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        return self.lower.mH.solve(self.lower.solve(self.a.mH @ b))

    def solve_transposed(self, b: torch.Tensor) -> torch.Tensor:
        return self.a @ self.lower.mH.solve(self.lower.solved(b))


def _normal_equations(scaled: ScaledSystems, engine: Engine) -> tuple[Factors, None]:
    return _NormalEquations(scaled.a, inverted_cholesky(lower_gram(scaled.a), engine)), None


@dataclass(frozen=True)
class OfOne:
    """Factors of a matrix as those of a batch of one."""

    factors: ButterfliedInverses

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        return self.factors.solve(b[0])[None]

    def solve_transposed(self, b: torch.Tensor) -> torch.Tensor:
        return self.factors.solve_transposed(b[0])[None]


def _mixed(scaled: ScaledSystems, engine: Engine) -> tuple[Factors, torch.Tensor]:
    """LU without interchanges of one matrix mixed by butterflies."""
    found = ButterfliedInverses.factorize(scaled.a[0], scaled.norms[0, 0, 0], engine.tuning)
    return OfOne(found), found.magnified[None]


_library = partial(FactorSource, synchronizes=True, vectors=VECTORS, unit=True)

SOURCES = {
    source.label: source
    for source in (
        _library("lu fp64 with pivoting", partial(_lu, format=FP64)),
        _library("lu fp32 with pivoting", partial(_lu, format=FP32), FP32),
        _library("cholesky fp64", partial(_definite, factorize=_cholesky)),
        FactorSource(DEFINITE, partial(_definite, factorize=_inverted), unit=True),
        FactorSource(MIXED, _mixed),
        FactorSource(NORMAL_EQUATIONS, _normal_equations, power=2),
    )
}
