"""A model and its data as residuals: what ``curve_fit`` makes of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from neula.algorithms.nonlinear.differentiate import Differences
from neula.algorithms.nonlinear.feasible import Bounds
from neula.algorithms.nonlinear.one_function import COMPLEX, DOUBLE, Unusual, Vectors
from neula.engines.formats import in_double
from neula.io.integers import in_float64
from neula.kernels import scipy_linalg
from neula.pipeline.inputs import take
from neula.problems.nonlinear.functions import SCHEMES, Jacobian, complex_rows, mode_of, real_rows, tensor_of


@dataclass(frozen=True)
class Model:
    """``f(xdata, *params)``, called with the parameters of one problem, or of several."""

    f: Callable[..., Any]
    wrap: Callable[[torch.Tensor], Any]  # makes an array of the caller's library
    batch: tuple[int, ...]  # leading dimensions of the data
    is_tensor: bool  # whether f is a function of torch

    def values(self, function: Callable[..., Any], xdata: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        """Values of the model, or of a function with its arguments, at parameters x, shape (P, n).

        Of a batch each parameter has shape (P, 1), else none.
        """
        rows = x[:, :, None].unbind(1) if self.batch else x[0].unbind()
        given = [self.wrap(value) for value in rows]
        if not self.batch and not self.is_tensor:
            given = [value[()] for value in given]
        out = tensor_of(function(xdata, *given), name, or_complex=True).to(x.device)
        return out if self.batch else out[None]

    def select(self, xdata: Any, which: torch.Tensor, shape: tuple[int, ...]) -> Any:
        """The rows of ``xdata`` for problems ``which``, if it has the shape of the data."""
        if not self.batch or tuple(getattr(xdata, "shape", ())) != shape:
            return xdata
        rows = xdata.reshape(-1, shape[-1])
        return rows[which.to(rows.device) if isinstance(rows, torch.Tensor) else which.cpu().numpy()]


@dataclass(frozen=True)
class Observations:
    """Residuals of a model, in units of their standard deviations."""

    model: Model
    xdata: Any
    y: torch.Tensor  # shape (P, m)
    shape: tuple[int, ...]  # of the data as they came
    deviations: torch.Tensor | None  # shape (P, m), real
    factor: torch.Tensor | None  # shape (P, m, m): lower Cholesky factors of their covariance matrices

    def residuals(self, x: torch.Tensor, which: torch.Tensor, _: Any) -> torch.Tensor:
        xdata, y = self.model.select(self.xdata, which, self.shape), self.y[which]
        found = self.model.values(self.model.f, xdata, x, "f(xdata, ...)")
        try:
            left = found - y
        except RuntimeError:
            left = found
        if left.shape != y.shape:
            raise ValueError(
                "f must return one value for each observation, shape "
                f"{tuple(y.shape[not self.model.batch :])}, got {tuple(found.shape[not self.model.batch :])}"
            )
        return self.whitened(left[..., None], which)[..., 0]

    def derivatives(self, jac: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        def call(x: torch.Tensor, which: torch.Tensor, _: Any) -> torch.Tensor:
            xdata = self.model.select(self.xdata, which, self.shape)
            return self.whitened(self.model.values(jac, xdata, x, "jac(xdata, ...)"), which)

        return call

    def in_arrays(self) -> Vectors:
        """Residuals of one problem of NumPy, from x, shape (n,), to shape (m,)."""
        return self._whitened_rows(self.model.f, self.y[0].numpy(), 1)

    def slopes_in_arrays(self, jac: Callable[..., Any]) -> Vectors:
        """The user's derivatives of the model, whitened, shape (m, n)."""
        return self._whitened_rows(jac, 0.0, 2)

    def _whitened_rows(self, function: Callable[..., Any], y: np.ndarray | float, ndim: int) -> Vectors:
        """A function of xdata and parameters, minus y, with one whitened float64 row an observation."""
        xdata, m = self.xdata, self.y.shape[1]
        deviations = None if self.deviations is None else self.deviations[0].numpy()
        factor = None if self.factor is None else self.factor[0].numpy()

        def call(x: np.ndarray) -> np.ndarray:
            found = function(xdata, *x)
            usual = type(found) is np.ndarray and found.ndim == ndim and found.dtype in (DOUBLE, COMPLEX)
            if not usual or len(found) != m:
                raise Unusual
            rows: np.ndarray = found - y
            if deviations is not None:
                rows = (rows.T / deviations).T
            if factor is None:
                return rows
            if rows.dtype == COMPLEX:
                raise Unusual
            return scipy_linalg.lapack.dtrtrs(factor, rows, lower=1)[0]

        return call

    def whitened(self, columns: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        """Columns, shape (P, m, k), in units of the standard deviations of observations."""
        if self.y.is_complex():
            columns = columns.to(columns.dtype.to_complex())
        if self.deviations is not None:
            return columns / self.deviations[which][..., None]
        if self.factor is not None:
            factor = self.factor[which].to(columns.dtype)
            return torch.linalg.solve_triangular(factor, columns, upper=False)
        return columns


@dataclass(frozen=True)
class Prediction:
    """The model and its derivatives anywhere, at the parameters that were found."""

    model: Model
    jac: Any  # as for neula.curve_fit
    x: torch.Tensor  # shape (P, n)
    shape: tuple[int, ...]  # of the data

    def __call__(self, xdata: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Values, shape (*batch, k), and derivatives, shape (*batch, k, n)."""
        x, everyone = self.x, torch.arange(len(self.x), device=self.x.device)
        if isinstance(xdata, (list, tuple)):
            xdata = floats(xdata, "xdata")

        def call(x: torch.Tensor, which: torch.Tensor, _: Any) -> torch.Tensor:
            found = self.model.values(
                self.model.f, self.model.select(xdata, which, self.shape), x, "f(xdata, ...)"
            )
            return found if found.ndim > 1 else found[:, None]

        with torch.no_grad():
            y = call(x, everyone, None)
            given = None
            if callable(self.jac):
                given = self.model.values(self.jac, self.model.select(xdata, everyone, self.shape), x, "jac")
            mode = mode_of(self.jac, is_tensor=self.model.is_tensor)
            endless = torch.full_like(x, torch.inf, dtype=torch.float64)
            found = Jacobian(
                call,
                None,
                "5-point" if mode in SCHEMES and mode != "cs" else mode,
                Differences("5-point", Bounds.from_arrays(-endless, endless)),
                self.jac is None,
                x.abs(),
            )
            if y.is_complex():
                found.values = y.dtype
            if given is None:
                f = real_rows(y)
                slopes = f.new_empty(*f.shape, x.shape[1])
                found.write(x, everyone, None, f, slopes)
                slopes = complex_rows(slopes) if y.is_complex() else slopes
            else:
                slopes = y.new_empty(*y.shape, x.shape[1]).copy_(given)
        return y.reshape(*self.model.batch, -1), slopes.reshape(*self.model.batch, *slopes.shape[1:])


def floats(x: Any, name: str, *, or_complex: bool = False) -> Any:
    """A tensor as it is, all else as SciPy takes it: as an array in float64, or complex128."""
    if isinstance(x, torch.Tensor):
        if not x.is_floating_point():
            take(x, name, or_complex=or_complex)
        return x
    if x is None or isinstance(x, np.ma.MaskedArray) or np.asarray(x).dtype.kind not in "biufO":
        take(x, name, or_complex=or_complex)
        if np.iscomplexobj(x):
            return np.asarray(x, dtype=np.complex128)
    return in_float64(x, name)


def parameters_of(f: Callable[..., Any]) -> int:
    """How many parameters a model has, by its signature. Raises ValueError if that does not say."""
    if (names := names_of_parameters(f)) is None:
        raise ValueError(f"the number of parameters cannot be told from f{inspect.signature(f)}: pass p0")
    return len(names)


def names_of_parameters(f: Callable[..., Any]) -> tuple[str, ...] | None:
    """Names of a model's parameters; None if its signature does not have them."""
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):  # of some functions of C
        return None
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(named) < 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return tuple(named[1:])


def spread_of(
    sigma: Any, y: torch.Tensor, shape: tuple[int, ...]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Standard deviations of observations, or Cholesky factors of their covariance matrices."""
    if sigma is None:
        return None, None
    or_complex = y.is_complex()
    tensor = take(floats(sigma, "sigma", or_complex=or_complex), "sigma", or_complex=or_complex).tensor
    tensor, m = tensor.to(y if tensor.is_complex() else y.real), shape[-1]
    if tensor.ndim == len(shape) + 1 or (tensor.shape == (m, m) and tensor.shape != shape):
        wide = in_double(tensor).expand(*shape, m) if tensor.shape[-2:] == (m, m) else None
        if wide is not None:
            factor, info = torch.linalg.cholesky_ex(wide)
            if bool((info > 0).any()):
                raise ValueError("sigma must be positive definite")
            return None, factor.reshape(-1, m, m)
    if tensor.is_complex():
        raise TypeError("sigma is complex: standard deviations are real, and only covariances may be complex")
    try:
        deviations = tensor.expand(shape).reshape(y.shape)
    except RuntimeError:
        raise ValueError(
            f"sigma has incorrect shape {tuple(tensor.shape)}: expected {shape}, or {(*shape, m)} for "
            "covariances"
        ) from None
    if not bool((deviations > 0).all()):
        raise ValueError("sigma must be positive: it holds standard deviations of the observations")
    return deviations, None
