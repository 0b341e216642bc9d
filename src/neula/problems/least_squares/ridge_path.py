"""Ridge regression with many dampings from one factorization."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Unpack, overload

import torch

from neula.algorithms.scaling import binary_exponents
from neula.certificates.bounds import Accuracy, lstsq_bound
from neula.certificates.kkt import KKTNorms
from neula.engines import Engine
from neula.kernels.refining import over
from neula.kernels.shift import shift
from neula.kernels.svd import svd
from neula.pipeline.call import Call
from neula.pipeline.compilation import eager
from neula.pipeline.inputs import check_finite, take
from neula.pipeline.progress import Progress, stage
from neula.pipeline.result import RidgePath
from neula.pipeline.shapes import broadcast_system
from neula.problems.orthogonal.certified import certified_qr
from neula.problems.signatures import Kind, RidgeKeywords


@overload
def ridge_path(A: Kind, b: Any, damps: Any, **keywords: Unpack[RidgeKeywords]) -> RidgePath[Kind]: ...
@overload
def ridge_path(A: Any, b: Any, damps: Any, **keywords: Unpack[RidgeKeywords]) -> RidgePath[Any]: ...
@eager
def ridge_path(
    A: Any,
    b: Any,
    damps: Any,
    *,
    leverage: Any = 0.0,
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    strict: bool = False,
    progress: Progress | None = None,
) -> RidgePath:
    """Solve ``min ||A x - b||^2 + damp^2 ||x||^2`` for hundreds of dampings, and cross-validate them.

    A is factorized once, and R once more by the SVD; each damping is a few products with vectors after that.

    Parameters
    ----------
    A : array_like, shape (m, n)
        NumPy array, torch tensor or DLPack object, float16 to float64; integers are taken as float64. Not
        modified. m < n is no error.
    b : array_like, shape (m,) or (m, k)
    damps : array_like, shape (p,)
        Not negative, in any order; 0 is plain least squares of minimum norm. scikit-learn's ``alpha`` is
        ``damp**2``.
    leverage : float or array_like, shape (m,), optional
        Leverages of what A and b were made orthogonal to before, which count in cross-validation: ``1 / m``
        where means were subtracted.
    accuracy : {"fp16", "bf16", "tf32", "fp32", "fp64"}, dtype or float, optional
        Accuracy that solutions are held against; by default that of the dtype. Everything is computed in
        double precision.
    engine : {"auto", "cpu", "cuda", "emulated"} or Engine, optional
        What multiplies. ``"auto"`` goes by the device of A.
    strict : bool, optional
        Raise an :class:`~neula.pipeline.result.AccuracyError` where there would be a warning.
    progress : callable or bool, optional
        Called with the name of the stage and the part of it that is done; True shows a bar.

    Returns
    -------
    RidgePath
        ``x`` for each damping, with ``effective_degrees_of_freedom``, ``gcv`` (generalized cross-validation),
        ``leave_one_out``, ``residual_norms`` and ``solution_norms``; ``best()`` says which damping predicts
        best.

    Raises
    ------
    ValueError
        For shapes that do not fit, batches, negative dampings, NaN or Inf, and input that requires a
        gradient.
    TypeError
        For complex or sparse input.
    AccuracyError
        If the accuracy was not reached and ``strict`` is set.

    Warns
    -----
    AccuracyWarning
        If the accuracy was not reached for one of the dampings.

    See Also
    --------
    lstsq : for one damping, with its statistics.

    Notes
    -----
    With ``A = Q R`` and ``R = U S V^T`` the solution is ``V (S^2 + damp^2)^-1 S U^T Q^T b``. A row that is
    left out changes its own residual from r to ``r / (1 - h)``, h being its leverage [1]_, so nothing is
    fitted again.

    References
    ----------
    .. [1] G. H. Golub, M. Heath, G. Wahba, "Generalized cross-validation as a method for choosing a good
    ridge
       parameter", Technometrics 21, 1979.

    Examples
    --------
    >>> import numpy as np, neula
    >>> t = np.linspace(0, 1, 40)
    >>> A = np.vander(t, 12)
    >>> path = neula.ridge_path(A, np.sin(6 * t) + 0.1 * np.cos(99 * t), np.logspace(-6, 1, 50))
    >>> path.x.shape, path.converged, bool(1e-6 < path.damps[path.best()] < 10)
    ((50, 12), True, True)
    """
    call = Call.begin(
        {"A": A, "b": b},
        engine=engine,
        accuracy=accuracy,
        bound=lambda target, shape: lstsq_bound(target, min((1, *shape)[-2:]) or 1),
        strict=strict,
    )
    shapes = broadcast_system(*call.tensors)
    if shapes.batch:
        raise ValueError(
            f"A of shape {tuple(call.tensors[0].shape)} and b of shape {tuple(call.tensors[1].shape)} are a "
            "batch, and a path is that of one matrix: call ridge_path for each"
        )
    given = _checked(call.here(take(damps, "damps").tensor).double())
    a, b = call.here(shapes.matrices)[0].double(), call.here(shapes.columns)[0].double()
    before = _checked_leverage(call.here(take(leverage, "leverage").tensor).double(), len(a))
    for name, x in (("A", a), ("b", b.squeeze(-1) if shapes.is_vector else b)):
        check_finite(x, x, name)
    report = stage(progress, "factorizing")
    with call.computing():
        scaled = Scaled.of(a, b, given)
        qr = certified_qr(scaled.a[None], call.engine)
        path = Path.of(qr.q[0], qr.r[0], scaled.b, scaled.damps, before)
        report(1.0)
        solutions = path.solutions()
        x = scaled.in_units(solutions).to(call.dtype).double()
        errors = _backward_errors(scaled, path, solutions) + _rounding(scaled, solutions, x)
        residuals, left_out = (shift(y, scaled.of_b) for y in (path.residual_norms(), path.left_out()))
    bound, squared = lstsq_bound(call.target, max(1, min(a.shape))), left_out.square()

    def of_columns(y: torch.Tensor) -> Any:
        """Of each damping and right-hand side, shape (p, k)."""
        return call.give_back((y[:, 0] if shapes.is_vector else y).contiguous(), torch.float64)

    free = len(a) - path.effective - before.sum()
    result = RidgePath(
        damps=call.give_back(given, torch.float64),
        x=call.give_back((x[..., 0] if shapes.is_vector else x).contiguous()),
        residual_norms=of_columns(residuals),
        solution_norms=of_columns(
            shift(torch.linalg.vector_norm(solutions, dim=1), scaled.of_b - scaled.of_a)
        ),
        effective_degrees_of_freedom=call.give_back(path.effective, torch.float64),
        gcv=of_columns(len(a) * residuals.square() / free[:, None].square()),
        leave_one_out=of_columns(squared.mean(1)),
        squared_errors=call.give_back(squared[..., 0] if shapes.is_vector else squared, torch.float64),
        backward_errors=of_columns(errors),
        tolerance=bound,
        converged=bool((errors <= bound).all()),
        attempts=qr.attempts,
        engine=str(call.engine),
        accuracy=call.target.name,
        seconds=call.seconds,
    )
    if not result.converged:
        why = f"backward error {float(errors.max()):.1e}, asked for {bound:.1e}"
        call.report_missed(f"a ridge path is not certified to {result.accuracy} accuracy", why, result, [()])
    return result


def _checked(damps: torch.Tensor) -> torch.Tensor:
    if damps.ndim != 1:
        raise ValueError(
            f"damps must be a vector, got shape {tuple(damps.shape)}: pass [damp] for a single one"
        )
    check_finite(damps, damps, "damps")
    if bool((damps < 0).any()):
        raise ValueError(f"damps must not be negative, got {float(damps.min())}")
    return damps


def _checked_leverage(leverage: torch.Tensor, m: int) -> torch.Tensor:
    """Leverages of the rows, shape (m, 1), given as an array or as one number."""
    if leverage.shape not in ((), (m,)):
        raise ValueError(f"leverage must be a number or have shape ({m},), got {tuple(leverage.shape)}")
    if not bool(((leverage >= 0) & (leverage <= 1)).all()):
        raise ValueError("leverage must be between 0 and 1")
    return leverage.expand(m)[:, None]


@dataclass(frozen=True)
class Scaled:
    """A, b and dampings in numbers near 1, so that no square is lost.

    Attributes
    ----------
    a : Tensor, shape (m, n)
    b : Tensor, shape (m, k)
    damps : Tensor, shape (p,)
    of_a : Tensor
        Binary exponent that was taken out of A and of the dampings.
    of_b : Tensor, shape (k,)
        Of the right-hand sides.
    """

    a: torch.Tensor
    b: torch.Tensor
    damps: torch.Tensor
    of_a: torch.Tensor
    of_b: torch.Tensor

    @classmethod
    def of(cls, a: torch.Tensor, b: torch.Tensor, damps: torch.Tensor) -> Scaled:
        of_a = binary_exponents(torch.cat([damps.new_zeros(1), damps, a.abs().flatten()]).amax())
        of_b = binary_exponents(torch.cat([b.new_zeros(1, b.shape[1]), b.abs()]).amax(0))
        return cls(shift(a, -of_a), shift(b, -of_b), shift(damps, -of_a), of_a, of_b)

    def in_units(self, x: torch.Tensor) -> torch.Tensor:
        """Solutions in the units that were given."""
        return shift(x, self.of_b - self.of_a)

    def near_one(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`in_units`."""
        return shift(x, self.of_a - self.of_b)

    @cached_property
    def columns(self) -> torch.Tensor:
        """Norms of the columns of A with each damping below, shape (p, n, 1); 1 for zero."""
        columns = torch.hypot(torch.linalg.vector_norm(self.a, dim=0), self.damps[:, None])[..., None]
        return torch.where(columns > 0, columns, 1.0)


@dataclass(frozen=True)
class Path:
    """Solutions for many dampings, in terms of singular vectors.

    Attributes
    ----------
    u : Tensor, shape (m, r)
        Left singular vectors of A.
    v : Tensor, shape (n, r)
    s : Tensor, shape (r,)
    c : Tensor, shape (r, k)
        ``U^T b``.
    b : Tensor, shape (m, k)
    damps : Tensor, shape (p,)
    before : Tensor, shape (m, 1)
        Leverages of what A and b are orthogonal to.
    """

    u: torch.Tensor
    v: torch.Tensor
    s: torch.Tensor
    c: torch.Tensor
    b: torch.Tensor
    damps: torch.Tensor
    before: torch.Tensor

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        r: torch.Tensor,
        b: torch.Tensor,
        damps: torch.Tensor,
        before: torch.Tensor,
    ) -> Path:
        """The path of ``A = Q R``, by the SVD of R."""
        left, s, vt = svd(r)
        u = q @ left
        return cls(u, vt.mT, s, u.mT @ b, b, damps, before)

    @cached_property
    def filters(self) -> torch.Tensor:
        """``s^2 / (s^2 + damp^2)``, shape (p, r); without damping 0 where s is rounding errors."""
        size = max(len(self.u), len(self.v))
        s = torch.where(self.s > size * 2.0**-52 * self.s.max(), self.s, 0.0) if len(self.s) else self.s
        squares = torch.where(self.damps[:, None] > 0, self.s, s).square()
        total = squares + self.damps.square()[:, None]
        return torch.where(total > 0, squares / total, 0.0)

    @property
    def effective(self) -> torch.Tensor:
        """Effective degrees of freedom, shape (p,)."""
        return self.filters.sum(1)

    def solutions(self) -> torch.Tensor:
        """Solutions for all dampings, shape (p, n, k)."""
        s = torch.where(self.s > 0, self.s, 1.0)
        return self.v @ ((self.filters / s)[:, :, None] * self.c)

    @cached_property
    def outside(self) -> torch.Tensor:
        """What no x takes away of b, shape (m, k)."""
        return self.b - self.u @ self.c

    def residual_norms(self) -> torch.Tensor:
        """``||b - A x||`` for all dampings, shape (p, k)."""
        outside = torch.linalg.vector_norm(self.outside, dim=0)
        inside = torch.linalg.vector_norm((1 - self.filters)[:, :, None] * self.c, dim=1)
        return torch.hypot(outside.expand_as(inside), inside)

    def left_out(self) -> torch.Tensor:
        """Errors with which rows are predicted by fits without them, shape (p, m, k)."""
        inside = (1 - self.filters).mT[:, :, None] * self.c[:, None]
        found = _times(self.u, inside).add_(self.outside[:, None])
        found /= (1 - self.before - self.u.square() @ self.filters.mT)[..., None]
        return found.movedim(1, 0)


def _times(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A product with vectors for all dampings and right-hand sides at once, shape (n, p, k) to (m, p, k)."""
    return (a @ x.flatten(1)).unflatten(1, x.shape[1:])


def _rounding(scaled: Scaled, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """What is lost of x as it is returned, relative to it, shape (p, k)."""
    lost, norm = x - scaled.near_one(given), torch.linalg.vector_norm
    return over(norm(scaled.columns * lost, dim=1), norm(scaled.columns * x, dim=1))


def _backward_errors(scaled: Scaled, path: Path, x: torch.Tensor) -> torch.Tensor:
    """Of each solution, of the problem with the rows of damping below, shape (p, k)."""
    norm, a, damps, x = torch.linalg.vector_norm, scaled.a, scaled.damps[:, None], x.movedim(0, 1)
    residual = scaled.b[:, None] - _times(a, x)
    gradient = _times(a.mT, residual).sub_(damps.square() * x)
    weight = torch.hypot(path.s[:, None], damps.mT)
    if len(path.s):
        weight = torch.where(weight > path.s.max() * 1e-15, weight, torch.inf)
    columns = scaled.columns.movedim(0, 1)
    projected = norm(_times(path.v.mT, gradient) / weight[..., None], dim=0)
    return KKTNorms(
        residual=torch.hypot(norm(residual, dim=0), damps * norm(x, dim=0)),
        wrong=norm(gradient / columns, dim=0),
        projected=projected,
        rest=torch.zeros_like(projected),
        image=norm(columns * x, dim=0),
        b=norm(scaled.b, dim=0),
    ).backward_error
