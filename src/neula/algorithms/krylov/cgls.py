"""CGLS with R as right preconditioner.

Zhang, Baharlouei, Wu (HPDC 2020), Algorithm 3, with what it leaves out: a stopping test, several right-hand
sides at once, and x in the variables of the problem (the paper's x is ``R x``).

The gradient ``A^H r`` is updated by ``A^H A d``, which comes from the same pass over A as ``A d``. It then
keeps an error of ``u ||A|| ||b||``, however small r becomes, which R^-H and R^-1 amplify by ``cond(A)^2``:
restarts on the true residual make that good up to a condition number of some 1e10. An R in double precision
is there for larger ones, and has its gradients computed from an updated residual.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from neula.algorithms.spectra.condition import solve_r, solve_rt
from neula.algorithms.trace import TraceEvent, Tracer
from neula.algorithms.triangular.triangular import BlockTriangular, UpperTriangular, triangular
from neula.engines.formats import double_of
from neula.engines.graphs import Replay, Tensors, called
from neula.engines.reduction import HERE, Reduction
from neula.kernels.few_vectors.normal_product import normal_product, product, transposed_product
from neula.kernels.magnitudes import squares, two_norms
from neula.kernels.polar.svd import converged_eigvalsh

HOPELESS_AFTER = 8
"""Iterations after which a rate of convergence can be trusted enough to give up on it."""

PATIENCE = 3
"""Iterations without a new smallest ``||R^-H A^H r||`` after which only rounding errors are left; and half as
many more as it took to get there, since slow convergence is not monotone."""

BLIND = 4
"""At most so many iterations go by before the host reads how far they got, which synchronizes."""


@dataclass(frozen=True)
class LeastSquaresOperator:
    """The tall matrix A of a problem, as products with it see it."""

    a: torch.Tensor  # shape (m, n): in the precision of the vectors, or in a narrower one
    over_rows: Reduction = HERE  # where other rows of A are, if they are not all here
    replay: Replay = called  # runs the vector operations between two products, possibly from a graph

    @property
    def shape(self) -> tuple[int, int]:
        """Shape with all rows."""
        return self.over_rows.count(self.a.shape[0]), self.a.shape[1]

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """Apply it to the columns of x, shape (n, k)."""
        return product(self.a, x)

    def rmatmul(self, y: torch.Tensor) -> torch.Tensor:
        """Apply its conjugate transpose to the columns of y, shape (m, k)."""
        return self.over_rows.total(transposed_product(self.a, y))

    def normal(self, x: torch.Tensor, b: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """``Y = A X``, or ``B - A X`` where B is given, and ``A^H Y``, by a kernel in one pass over A."""
        y, image = normal_product(self.a, x, b)
        return y, self.over_rows.total(image)

    def normal_and_squares(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``A^H A X`` and the squared norms of the columns of ``A X``, in one message."""
        y, image = normal_product(self.a, x)
        image, of_y = self.over_rows.totals(image, squares(y).sum(0))
        return image, of_y


@dataclass(frozen=True)
class Stop:
    """When a column is done: as soon as one of its two norms is small enough."""

    preconditioned: torch.Tensor  # shape (k,): for ||R^-H A^H r||, which is what CGLS reduces
    # Shape (k,): for ||D A^H r||, whose rounding errors R^-H does not amplify.
    gradient: torch.Tensor | float = 0.0
    scales: torch.Tensor | float = 1.0  # shape (n,): the diagonal of D
    reduction: float = 0.0  # the part of its first value to which ||R^-H A^H r|| may be reduced instead

    def after(self, s: torch.Tensor) -> Stop:
        """The stopping rule as tensors, for an iteration that begins with ``s = R^-H A^H r``."""
        preconditioned = torch.maximum(self.preconditioned, self.reduction * _norms(s))
        gradient, scales = (
            x if isinstance(x, torch.Tensor) else preconditioned.new_full((1,), x)
            for x in (self.gradient, self.scales)
        )
        return Stop(preconditioned, gradient, scales)

    def done(self, gamma: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Which columns are done, given their ``||R^-H A^H r||^2`` and ``A^H r``."""
        scaled = (gradient.T * self.scales).T
        return (gamma <= self.preconditioned.square()) | (_norms(scaled) <= self.gradient)


@dataclass(frozen=True)
class InnerSolution:
    """The solution of one call, often an update of another one, and what it cost."""

    x: torch.Tensor  # shape (n, k)
    iterations: int
    # Step length and direction coefficient of each iteration of CGLS, one a column.
    coefficients: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()

    @property
    def smallest(self) -> float:
        """Estimate from above of the smallest singular value of ``A R^-1``, from the coefficients of CGLS for
        the first column until it was done; NaN without them.

        The tridiagonal matrix behind CGLS has eigenvalues that approximate those of ``(A R^-1)^H (A R^-1)``,
        the extreme ones first (Golub and Van Loan, section 11.3).
        """
        if not self.coefficients:
            return math.nan
        columns = [torch.stack(column)[:, 0] for column in zip(*self.coefficients, strict=True)]
        alpha, beta = torch.stack(columns).cpu()
        steps = int((alpha > 0).cumprod(0).sum())
        if steps == 0:
            return math.nan
        alpha, beta = alpha[:steps], beta[:steps]
        diagonal = 1 / alpha
        diagonal[1:] += beta[:-1] / alpha[:-1]
        off = beta[:-1].sqrt() / alpha[:-1]
        tridiagonal = torch.diag(diagonal) + torch.diag(off, 1) + torch.diag(off, -1)
        return math.sqrt(max(0.0, float(converged_eigvalsh(tridiagonal)[0])))


# item: Q Algorithm 3; V Algorithm 5
def cgls(
    operator: LeastSquaresOperator,
    r: UpperTriangular,
    b: torch.Tensor,
    *,
    stop: Stop,
    max_iterations: int,
    gradient: torch.Tensor | None = None,
    by_gradient: bool = False,
    trace: Tracer | None = None,
) -> InnerSolution:
    """Minimize ``||A x - b||`` from x = 0 for all columns of b, shape (m, k), together.

    ``A R^-1`` is well conditioned. It ends earlier as soon as the rate of convergence says that
    ``max_iterations`` will not be enough. ``gradient`` is ``A^H b`` where it is known; ``by_gradient`` says
    that it is more accurate than b, so that it is to be updated also with an R in double precision. ``trace``
    is called after each iteration with the largest ``||R^-H A^H r||`` of a column.
    """
    gradient = operator.rmatmul(b) if gradient is None else gradient
    residual, precise = b, r.dtype == double_of(r.dtype) and not by_gradient
    s = solve_rt(r, gradient)
    stop = stop.after(s)
    gamma = squares(s).sum(0)
    state = _CGLSState(torch.zeros_like(s), gradient, s, solve_r(r, s), gamma, gamma == 0)
    wanted = ratio(stop.preconditioned.square(), gamma).min()
    progress = _Progress(gamma, wanted, max_iterations, operator.over_rows)
    coefficients = []
    for _ in range(max_iterations):
        if precise:
            image = operator.matmul(state.direction)
            alpha = state.step_length(operator.over_rows.total(squares(image).sum(0)))
            residual = torch.addcmul(residual, alpha, image, value=-1)
            state, beta = state.moved(r, stop, alpha, operator.rmatmul(residual))
        else:
            found = operator.normal_and_squares(state.direction)
            state, alpha, beta = _advanced(r, stop, state, *found, replay=operator.replay)
        coefficients.append((alpha, beta))
        if trace is not None:
            trace(TraceEvent("iteration", value=float(state.gamma.max().sqrt())))
        if progress.ends(state.gamma, state.done):
            break
    return InnerSolution(state.x, progress.iterations, coefficients)


class _CGLSState(NamedTuple):
    """State of the iteration between two products with A."""

    # x, gradient, shape (n, k): the solution, and A^H r.
    x: torch.Tensor
    gradient: torch.Tensor
    # p, direction, shape (n, k): along which the next step goes, in the variables R x, and in those of x.
    p: torch.Tensor
    direction: torch.Tensor
    gamma: torch.Tensor  # shape (k,): ||R^-H A^H r||^2
    # bool, shape (k,): columns that stay as they are: further steps would only add rounding errors.
    done: torch.Tensor

    def step_length(self, squares: torch.Tensor) -> torch.Tensor:
        """Step lengths, given ``||A d||^2``."""
        return ratio(self.gamma, squares).masked_fill(self.done, 0.0)

    def moved(
        self, r: UpperTriangular, stop: Stop, alpha: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[_CGLSState, torch.Tensor]:
        """The state after a step, with its gradient, and what of the direction is kept."""
        s = solve_rt(r, gradient)
        gamma = squares(s).sum(0)
        beta = ratio(gamma, self.gamma)
        p = torch.addcmul(s, beta, self.p)
        x = torch.addcmul(self.x, alpha, self.direction)
        done = self.done | stop.done(gamma, gradient)
        return _CGLSState(x, gradient, p, solve_r(r, p), gamma, done), beta


def _advanced(
    r: UpperTriangular,
    stop: Stop,
    state: _CGLSState,
    image: torch.Tensor,
    squares: torch.Tensor,
    *,
    replay: Replay,
) -> tuple[_CGLSState, torch.Tensor, torch.Tensor]:
    """A step with the gradient updated by ``A^H A d``, and its two coefficients: the part that a CUDA graph
    may hold.
    """

    def advanced(image: torch.Tensor, squares: torch.Tensor, *given: torch.Tensor) -> Tensors:
        now, test, of_r = _CGLSState(*given[:6]), Stop(given[6], given[7], given[8]), given[9:]
        alpha = now.step_length(squares)
        gradient = torch.addcmul(now.gradient, alpha, image, value=-1)
        moved, beta = now.moved(BlockTriangular(*of_r), test, alpha, gradient)
        return *moved, alpha, beta

    test: Any = (stop.preconditioned, stop.gradient, stop.scales)  # tensors after the first step
    inputs = (image, squares, *state, *test, *triangular(r).tensors)
    *moved, alpha, beta = replay(advanced, inputs, "cgls")
    return _CGLSState(*moved), alpha, beta


class _Progress:
    """Remaining error of the slowest column after each iteration, which the host reads only now and then.

    A GPU with which the host synchronizes in every iteration idles in every iteration. The rate so far says
    how many more it will take; half of them go by before the next reading, since CGLS tends to become faster.
    Columns that are done do not change in iterations that have not been read yet.
    """

    def __init__(
        self, start: torch.Tensor, wanted: torch.Tensor, max_iterations: int, over_rows: Reduction = HERE
    ) -> None:
        self._start = start
        self._left = [1.0]
        self._unseen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._wanted = wanted
        self._max_iterations = max_iterations
        self._blind = 1
        self._over_rows = over_rows

    def ends(self, gamma: torch.Tensor, done: torch.Tensor) -> bool:
        """Whether to end, given ``||R^-H A^H r||^2`` of each column, and which are done."""
        self._unseen.append((gamma, done))
        iteration = len(self._left) - 1 + len(self._unseen)
        if len(self._unseen) < self._blind and iteration < self._max_iterations:
            return False
        gammas, finished = (torch.stack(values) for values in zip(*self._unseen, strict=True))
        left = ratio(gammas, self._start).masked_fill(finished, 0.0).amax(1)
        wanted, *values = self._over_rows.agree(torch.cat([self._wanted[None], left])).tolist()
        for value in values:
            self._left.append(value)
            if value == 0.0 or _hopeless(self._left, wanted, self._max_iterations):
                return True
        self._unseen.clear()
        self._blind = max(1, math.ceil(min(BLIND, _iterations_left(self._left, wanted) / 2)))
        return False

    @property
    def iterations(self) -> int:
        """Iterations up to the last that mattered."""
        return len(self._left) - 1


def _hopeless(progress: list[float], wanted: float, max_iterations: int) -> bool:
    """Whether the slowest column stagnates, or at its mean rate needs more iterations than are allowed.

    ``progress`` holds ``||R^-H A^H r||^2`` after each iteration, as a part of the first.
    """
    iteration, latest = len(progress) - 1, progress[-1]
    best = progress.index(min(progress))
    if not math.isfinite(latest) or iteration - best >= PATIENCE + best // 2:
        return True
    if iteration < HOPELESS_AFTER or wanted <= 0:
        return False
    return iteration + _iterations_left(progress, wanted) > max_iterations


def _iterations_left(progress: list[float], wanted: float) -> float:
    """Iterations that are still needed if they continue at the mean rate so far."""
    latest = progress[-1]
    if not 0.0 < latest < 1.0 or wanted <= 0:
        return math.inf if latest >= 1.0 else 0.0
    return max(0.0, math.log(wanted) / math.log(latest) - 1) * (len(progress) - 1)


def _norms(x: torch.Tensor) -> torch.Tensor:
    return two_norms(x, 0)


def ratio(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a / b`` where b is positive: a column that is done stays where it is."""
    return (a / b).masked_fill(~(b > 0), 0.0)


# item: Q LSQR
def lsqr(
    operator: LeastSquaresOperator,
    r: UpperTriangular,
    b: torch.Tensor,
    *,
    stop: Stop,
    max_iterations: int,
    gradient: torch.Tensor | None = None,
    trace: Tracer | None = None,
) -> InnerSolution:
    """Minimize ``||A x - b||`` from x = 0; parameters and result as those of :func:`cgls`.

    The bidiagonalization yields ``||R^-T A^T r||`` but not ``A^T r``, so the first bound of ``stop`` counts.
    """
    over_rows = operator.over_rows
    beta, u = _normalize(b, over_rows)
    gradient = operator.rmatmul(b) if gradient is None else gradient
    alpha, v = _normalize(solve_rt(r, ratio(gradient, beta)))
    w, y = v, torch.zeros_like(v)
    phi, rho_bar = beta, alpha
    for iteration in range(1, max_iterations + 1):
        beta, u = _normalize(operator.matmul(solve_r(r, v)) - alpha * u, over_rows)
        alpha, v = _normalize(solve_rt(r, operator.rmatmul(u)) - beta * v)
        rho = torch.hypot(rho_bar, beta)
        cosine, sine = ratio(rho_bar, rho), ratio(beta, rho)
        theta, rho_bar = sine * alpha, -cosine * alpha
        y = y + ratio(cosine * phi, rho) * w
        phi = sine * phi
        w = v - ratio(theta, rho) * w
        reduced = phi * alpha * cosine.abs()
        if trace is not None:
            trace(TraceEvent("iteration", value=float(reduced.max())))
        if bool(over_rows.agree((reduced <= stop.preconditioned).all())):
            return InnerSolution(solve_r(r, y), iteration)
    return InnerSolution(solve_r(r, y), max_iterations)


def _normalize(x: torch.Tensor, over_rows: Reduction = HERE) -> tuple[torch.Tensor, torch.Tensor]:
    (norm,) = over_rows.norms(x)
    return norm, ratio(x, norm)
