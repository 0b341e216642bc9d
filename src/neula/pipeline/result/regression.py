"""Statistics of linear fits, computed when they are read, and regression tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from neula.errors import check_name
from neula.pipeline.result.named import Named, as_numpy


@dataclass(frozen=True, eq=False)
class Robust:
    """A covariance that does not rely on equal variances of b."""

    kind: str | None  # HC0 to HC3; None where there are groups
    groups: np.ndarray | None = None  # the number of the group of each row

    @classmethod
    def checked(cls, absolute: bool, kind: str | None, groups: Any) -> Self | None:
        """Check the options; None for the covariance that assumes equal variances.

        Raises
        ------
        ValueError
        """
        if kind is None and groups is None:
            return None
        if absolute or (kind is not None and groups is not None):
            raise ValueError("absolute=True, robust= and groups= exclude one another: pass one of them")
        if groups is None:
            check_name("robust", kind, ("HC0", "HC1", "HC2", "HC3"))
            return cls(kind)
        values = np.asarray(groups)
        try:
            missing = bool((values != values).any())
            labels, places = np.unique(values, return_inverse=True)
        except TypeError:  # None and other kinds of values have no order
            missing = True
        if missing:
            raise ValueError("groups has missing or incomparable labels: give each row one")
        if np.ndim(groups) != 1 or len(labels) < 2:
            raise ValueError(
                f"groups must be a vector with at least two different labels, got {len(labels)} in shape "
                f"{np.shape(groups)}"
            )
        return cls(None, places)


def _statistic(name: str, text: str) -> Any:
    """A number of the table of regression, or one of each right-hand side."""
    return property(lambda self: self._of_rows.numbers()[name], doc=text)


class Regression(Named):
    """Statistics of a linear fit under the names of its coefficients; a part of :class:`LstsqResult`.

    They follow from a QR of A (with weights, damping, covariance and constraints) that is certified in double
    precision, which is made when the first of them is asked for. A and b must be unchanged since; the result
    keeps them. Incremental fits have R. A source is read once more. If rows are spread over processes, all
    processes have to ask. These results, and those that were pickled, have no leverages. Every number is in
    double precision. Leading dimensions are those of the batch, k counts right-hand sides, and has no
    dimension where b is a vector.
    """

    digits: float
    condition: float
    intercept: bool = False
    """Whether the first coefficient belongs to a column of ones that ``intercept=True`` has added."""
    _design: Any = None  # from a table to A, of a formula
    _row_labels: Any = None  # the index of A, with which groups have to agree
    accepted: Any  # of each problem of a batch
    _fit: Any  # neula.problems.least_squares.regression.LinearFit, or None

    def covariance(self, *, absolute: bool = False, robust: str | None = None, groups: Any = None) -> Any:
        """Covariance matrix of the parameters, ``s^2 (A^H W A)^-1`` with ``W = diag(weights)^2`` or ``V^-1``.

        With damping that of the linear map from b to x, ``s^2 (A^H A + damp^2 I)^-1 A^H A (A^H A + damp^2
        I)^-1``: what noise does, not the bias. Of complex parameters it is ``E (x - E x) (x - E x)^H`` for
        errors of b with a mean of ``|e|^2`` of s^2.

        Parameters
        ----------
        absolute : bool, optional
            Take the covariance of b as given: s is 1, and not estimated from the residual. Weights are
            reciprocal standard deviations then.
        robust : {"HC0", "HC1", "HC2", "HC3"}, optional
            Robust to variances of b that differ from row to row (MacKinnon and White): the squared residual
            of each row estimates its variance, divided by ``1 - leverage`` with ``"HC2"``, by its square with
            ``"HC3"``; ``"HC1"`` multiplies by rows / degrees of freedom.
        groups : array_like, shape (m,), optional
            Robust to errors of b that are correlated within groups of rows (clustered), with the usual
            correction for few groups. Intervals and p values have as many degrees of freedom as there are
            groups, less one.

        Returns
        -------
        array of float64 or complex128, shape (..., n, n) or (..., k, n, n)

        Raises
        ------
        ValueError
            If A lacks full rank, or A or b have changed; with fewer than one degree of freedom; with
            ``"HC2"`` and ``"HC3"`` if the leverage of a row is 1; with ``robust`` or ``groups`` if the rows
            of A are gone.

        Examples
        --------
        >>> import numpy as np, neula
        >>> A = np.column_stack([np.ones(4), np.arange(4.0)])
        >>> result = neula.lstsq(A, np.array([0.0, 1.1, 1.9, 3.0]))
        >>> result.covariance().round(6)
        array([[ 0.0063, -0.0027],
               [-0.0027,  0.0018]])
        """
        how = self._robust(absolute, robust, groups)
        return self._fit_for(how).covariance(absolute, how)

    def standard_errors(
        self, *, absolute: bool = False, robust: str | None = None, groups: Any = None
    ) -> Any:
        """Standard errors of the parameters, roots of the diagonal of the covariance, which is not formed.

        Parameters
        ----------
        absolute, robust, groups : optional
            As for :meth:`covariance`.

        Returns
        -------
        array of float64, of the shape of x

        Raises
        ------
        ValueError
            As :meth:`covariance`.
        """
        how = self._robust(absolute, robust, groups)
        return self._fit_for(how).standard_errors(absolute, how)

    def confidence_intervals(
        self, level: float = 0.95, *, absolute: bool = False, robust: str | None = None, groups: Any = None
    ) -> Any:
        """Intervals that hold each parameter with a probability, for errors of b that are normally
        distributed.

        Parameters
        ----------
        level : float, optional
            Between 0 and 1.
        absolute, robust, groups : optional
            As for :meth:`covariance`. With ``absolute=True`` the normal distribution in place of Student's.

        Returns
        -------
        array of float64, shape (*x.shape, 2)
            Lower and upper ends.

        Raises
        ------
        ValueError
            As :meth:`covariance`.
        """
        if not 0 < level < 1:
            raise ValueError(f"level must be between 0 and 1, got {level}")
        how = self._robust(absolute, robust, groups)
        return self._fit_for(how).confidence_intervals(self.x, level, absolute, how)

    def leverage(self, *, samples: int | None = None) -> Any:
        """Diagonal of the matrix that maps b to ``A x``: the influence of each row on its own fit.

        Parameters
        ----------
        samples : int, optional
            Estimate it from so many random vectors: a relative error of about ``sqrt(2 / samples)``, in a
            fraction of the time where n is large. By default exactly, in blocks of rows.

        Returns
        -------
        array of float64, shape (..., m)

        Raises
        ------
        ValueError
            As :meth:`covariance`.
        """
        if samples is not None and samples < 1:
            raise ValueError(f"samples must be at least 1, got {samples}")
        return self._known.leverage(samples)

    @property
    def residual_variance(self) -> Any:
        """``||r||^2 / degrees_of_freedom`` of weighted or whitened residuals, shape (...) or (..., k)."""
        return self._known.residual_variance()

    @property
    def degrees_of_freedom(self) -> Any:
        """Rows less the effective degrees of freedom of the fit: m - n without damping or constraints."""
        return self._known.degrees_of_freedom()

    @property
    def effective_degrees_of_freedom(self) -> Any:
        """The sum of leverages: n, less one for each independent constraint; with damping less than n."""
        return self._known.effective_degrees_of_freedom()

    def _robust(self, absolute: bool, kind: str | None, groups: Any) -> Robust | None:
        from neula.pipeline.names import check_aligned

        check_aligned(self._row_labels, {"groups": groups})
        return Robust.checked(absolute, kind, groups)

    def _fit_for(self, how: Robust | None) -> Any:
        return self._known if how is None else self._of_rows

    @property
    def _of_rows(self) -> Any:
        """The fit with the rows of A and b, a ``RegressionFit``."""
        if not hasattr(self._known, "residuals"):
            raise ValueError(
                "residuals, the table of regression and robust covariances need the rows of A and b, which "
                "this result does not keep: solve with all rows in memory, and ask before it is pickled"
            )
        return self._known

    @property
    def _known(self) -> Any:
        if self._fit is None:
            raise ValueError(
                "statistics need R, which this result does not keep: the fit was not accepted, A lacked full "
                "rank when the result was pickled, or not all processes asked before that; solve again"
            )
        return self._fit

    def predict(self, A: Any) -> Any:
        """``A x`` for new rows.

        Parameters
        ----------
        A : array_like, shape (..., m, n), or table
            As A was given, without a column for the intercept. Of a table the columns are taken by their
            names, others are ignored; after a formula it has the variables of the formula.

        Returns
        -------
        array, shape (..., m) or (..., m, k)
            In the library of A; with a gradient if that is torch.

        Raises
        ------
        ValueError
            If a column is missing, or shapes do not fit.
        """
        from neula.pipeline.inputs import itself, take
        from neula.pipeline.names import in_order

        if self._design is not None:
            A = self._design(A)
        A = in_order(A, self.names[self.intercept :] if self.names else None, "A")
        a, given = (take(y, "A", differentiable=True, or_complex=True) for y in (A, self.x))
        x = (given.graph if a.wrap is itself else given.tensor).to(a.tensor.device)
        x = x.to(a.tensor.dtype.to_complex() if x.is_complex() else a.tensor.dtype)
        is_vector = self._axis_of_x == x.ndim - 1
        matrix = x.unsqueeze(-1) if is_vector else x
        first, matrix = matrix[..., : self.intercept, :], matrix[..., self.intercept :, :]
        if a.tensor.shape[-1] != matrix.shape[-2]:
            without = " without the intercept" if self.intercept else ""
            raise ValueError(
                f"A has {a.tensor.shape[-1]} columns, and the fit {matrix.shape[-2]}{without}: pass A with "
                "the columns that were fitted"
            )
        found = a.graph.to(x.dtype) @ matrix + first.sum(-2, keepdim=True)
        return a.wrap(found[..., 0] if is_vector else found)

    @property
    def residuals(self) -> Any:
        """``b - A x``, without weights, of the shape of b."""
        return self._of_rows.residuals(self.x)

    r_squared = _statistic(
        "r_squared",
        """Part of the variance of b that the fit explains, ``1 - ||r||^2 / ||b - mean||^2``.

        Weights and a covariance of b count. The mean is subtracted if ``A x`` may be any constant: with an
        intercept, a column of ones, or dummy variables of all categories.""",
    )
    adjusted_r_squared = _statistic(
        "adjusted_r_squared", """R squared with unbiased variances: it does not grow with every column."""
    )
    f_statistic = _statistic(
        "f_statistic", """F test that all but the constant are zero; NaN with damping or constraints."""
    )
    f_p_value = _statistic("f_p_value", """Probability of a larger F statistic if they are.""")
    model_degrees_of_freedom = _statistic(
        "model_degrees_of_freedom", """Effective degrees of freedom, without that of the constant."""
    )
    log_likelihood = _statistic(
        "log_likelihood", """Logarithm of the likelihood of normally distributed errors, at its maximum."""
    )
    aic = _statistic(
        "aic", """Akaike's criterion, ``2 p - 2 log_likelihood``, p effective degrees of freedom."""
    )
    bic = _statistic("bic", """Schwarz's criterion, ``log(m) p - 2 log_likelihood``.""")

    def t_values(self, **how: Any) -> Any:
        """Coefficients by their standard errors.

        Parameters
        ----------
        **how : optional
            ``absolute``, ``robust`` and ``groups``, as for :meth:`covariance`.
        """
        from neula.pipeline.inputs import take

        x = take(self.x, "x", differentiable=True)
        return x.wrap(x.tensor.double() / take(self.standard_errors(**how), "errors").tensor)

    def p_values(self, **how: Any) -> Any:
        """Probability of a larger ``|t|`` if the coefficient is zero, by Student's t.

        Parameters
        ----------
        **how : optional
            ``absolute``, ``robust`` and ``groups``, as for :meth:`covariance`. With ``absolute=True`` by the
            normal distribution; with groups as many degrees of freedom as there are groups, less one.
        """
        import torch
        from scipy.special import ndtr, stdtr

        from neula.pipeline.inputs import take

        t = take(self.t_values(**how), "t")
        tail = -np.abs(as_numpy(t.tensor))
        robust = self._robust(how.get("absolute", False), how.get("robust"), how.get("groups"))
        if robust is not None and robust.groups is not None:
            free = np.array(float(robust.groups.max()))
        else:
            free = np.asarray(as_numpy(self.degrees_of_freedom))
        free = free.reshape(free.shape + (1,) * (tail.ndim - free.ndim))
        found = 2 * (ndtr(tail) if how.get("absolute") else stdtr(free, tail))
        return t.wrap(torch.from_numpy(np.asarray(found)).to(t.tensor.device))

    def summary(self, level: float = 0.95, **how: Any) -> Summary:
        """The regression table as text, in the layout of statsmodels.

        Parameters
        ----------
        level : float, optional
            Of the confidence intervals.
        **how : optional
            ``absolute``, ``robust`` and ``groups``, as for :meth:`covariance`.

        Raises
        ------
        ValueError
            For batches and several right-hand sides, and as :meth:`covariance`.
        """
        if len(self.x.shape) != 1:
            raise ValueError(f"a summary is for one right-hand side, and x has shape {tuple(self.x.shape)}")
        return summarized(self, level, how)

    def to_dict(self, level: float = 0.95, **how: Any) -> dict[str, Any]:
        """Coefficients, errors and measures of the fit as numbers, lists and dictionaries of Python.

        Parameters
        ----------
        level, **how
            As for :meth:`summary`.

        Returns
        -------
        dict
            Below full rank, and without degrees of freedom, without statistics: ``no_statistics`` says why.
        """
        found = super().to_dict()
        try:
            if len(self.x.shape) == 1:
                columns = self._table(level, **how)
                found |= {name: self._by_name(columns[name]) for name in list(columns)[1:]}
                found |= {"level": level, "residual_variance": self.residual_variance}
                found |= {"degrees_of_freedom": self.degrees_of_freedom, **self._of_rows.numbers()}
        except ValueError as why:
            found["no_statistics"] = str(why)
        return found

    def _table(self, level: float = 0.95, **how: Any) -> dict[str, np.ndarray]:
        """Coefficients of one right-hand side with standard errors, t and p values, and intervals."""
        lower, upper = as_numpy(self.confidence_intervals(level, **how)).T
        values = {"standard_error": self.standard_errors, "t": self.t_values, "p": self.p_values}
        columns = {"coefficient": as_numpy(self.x)}
        columns |= {name: as_numpy(value(**how)) for name, value in values.items()}
        return {**columns, "lower": lower, "upper": upper}

    def _labels(self, count: int) -> tuple[str, ...]:
        if self.names is None and self.intercept:
            return "intercept", *super()._labels(count - 1)
        return super()._labels(count)

    def _columns(self) -> dict[str, np.ndarray]:
        if len(self.x.shape) != 1:
            return super()._columns()
        try:
            return self._table()
        except ValueError:
            return super()._columns()


class Summary(str):
    """A text that shows itself as it is printed."""

    def __repr__(self) -> str:
        return str(self)


def summarized(result: Regression, level: float, how: Mapping[str, Any]) -> Summary:
    columns = result._table(level, **how)
    names = result._labels(len(columns["coefficient"]))
    kind = "clustered" if how.get("groups") is not None else how.get("robust") or "nonrobust"
    given = {
        "Dep. Variable:": (result.responses or ("b",))[0],
        "Method:": "Least Squares",
        "No. Observations:": str(len(as_numpy(result.residuals))),
        "Df Residuals:": f"{result.degrees_of_freedom:.6g}",
        "Df Model:": f"{result.model_degrees_of_freedom:.6g}",
        "Covariance Type:": "absolute" if how.get("absolute") else kind,
        "Correct digits:": str(int(result.digits)),
    }
    right = {
        "R-squared:": f"{result.r_squared:.3f}",
        "Adj. R-squared:": f"{result.adjusted_r_squared:.3f}",
        "F-statistic:": f"{result.f_statistic:#.4g}" if kind == "nonrobust" else "-",
        "Prob (F-statistic):": f"{result.f_p_value:#.3g}" if kind == "nonrobust" else "-",
        "Log-Likelihood:": f"{result.log_likelihood:#.5g}",
        "AIC:": f"{result.aic:#.4g}",
        "BIC:": f"{result.bic:#.4g}",
    }
    tail = (1 - level) / 2
    heads = ("coef", "std err", "t", "P>|t|", f"[{tail:.3g}", f"{1 - tail:.3g}]")
    width = max(12, *map(len, names)) + 2
    total = max(78, width + 66)  # as statsmodels has
    lines = [
        "Least Squares Regression Results".center(total).rstrip(),
        "=" * total,
        *_pairs(given, right, total),
        "=" * total,
        " " * width + "".join(head.rjust(11) for head in heads),
        "-" * total,
    ]
    for i, name in enumerate(names):
        coefficient, error, t, p, *ends = (float(values[i]) for values in columns.values())
        cells = _number(coefficient, 4), _number(error), _number(t), f"{p:.3f}", *map(_number, ends)
        lines.append(f"{name:<{width}}" + "".join(cell.rjust(11) for cell in cells))
    left = as_numpy(result._of_rows.whitened_residuals())
    durbin_watson = np.sum(np.diff(left) ** 2) / max(np.sum(left**2), np.finfo(np.float64).tiny)
    below = {"Durbin-Watson:": f"{durbin_watson:.3f}"}, {"Cond. No. (scaled):": f"{result.condition:.3g}"}
    return Summary("\n".join([*lines, "=" * total, *_pairs(*below, total), "=" * total]))


def _number(x: float, digits: int = 3) -> str:
    """Format a number like statsmodels: with a fixed number of decimals, or an exponent."""
    is_far = 0 < abs(x) < 1e-4 or 1e4 <= abs(x) < math.inf
    return f"{x:.{digits - 1}e}" if is_far else f"{x:.{digits}f}"


def _pairs(left: Mapping[str, str], right: Mapping[str, str], total: int) -> list[str]:
    half = total // 2 - 1
    lines = []
    for (a, x), (b, y) in zip(left.items(), right.items(), strict=True):
        lines.append(f"{a}{x.rjust(half - len(a))}   {b}{y.rjust(total - half - 3 - len(b))}")
    return lines
