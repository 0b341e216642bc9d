"""Incremental least squares: rows are added and removed, and only small matrices are kept."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from neula.algorithms.krylov.held_sums import Gathered, HeldSums, scaled_rows
from neula.algorithms.scaling import binary_exponents, power_of_two_scales
from neula.certificates.bounds import Accuracy, lstsq_bound, target_format
from neula.certificates.orthogonality import gaussian_probes
from neula.engines import FP64, Engine, select_engine
from neula.engines.complex import over
from neula.engines.formats import in_double
from neula.errors import number, part_of_one, whole_number
from neula.io.files import write_files
from neula.io.sources import Source, is_source
from neula.kernels.magnitudes import SQUARABLE
from neula.kernels.precision import plain_arithmetic
from neula.pipeline.call import Call, restored
from neula.pipeline.chain import Link, run_chain
from neula.pipeline.inputs import Taken, take
from neula.pipeline.names import check_aligned, column_names, in_order, row_labels
from neula.pipeline.result import LstsqResult
from neula.pipeline.shapes import broadcast_system
from neula.pipeline.solutions import Report
from neula.pipeline.streaming import Block, Reader, StreamTuning, check_rows, source_of, torch_dtype
from neula.problems.least_squares.held_evidence import Held
from neula.problems.least_squares.lstsq import check_damp
from neula.problems.least_squares.problem import LeastSquaresJudge, LeastSquaresOptions
from neula.problems.least_squares.regression import fit_held
from neula.problems.least_squares.run import LeastSquaresOutcome, collect
from neula.problems.signatures import ArrayLike


class LeastSquares:
    """Incremental least squares: ``min ||A x - b||`` for rows that arrive one block after another.

    Rows can be added, weighted down and removed. They may be complex, and so is the solution then. The memory
    is that of ``(n + k)^2`` numbers, whatever the number of rows. Short blocks of rows are gathered: the
    triangular factor is updated with 1024 or ``4 n`` rows at once, or when a solution is requested. The
    solution has standard errors.

    Parameters
    ----------
    n : int
        Columns of A.
    scales : array_like, shape (n,), optional
        Sizes of the columns, to within a few powers of ten; 1 by default. Only the evidence depends on them:
        columns of very different sizes are not certified without scales.
    engine : {"auto", "cpu", "cuda"} or Engine, optional
        Where the fit is kept and computed; ``"auto"`` is the CPU.

    Attributes
    ----------
    n : int
    rows : int
        Number of rows added, minus those removed.
    names : tuple of str or None
        Column names of the first table. Columns of later tables are taken by these names, in any order, and
        results have them.

    Raises
    ------
    ValueError
        For n below 1, or scales that are not positive.

    Notes
    -----
    R, ``Q^H b`` and the norms of the residuals are kept, and merged with each block of rows by Householder
    reflections (sequential TSQR) or, where rows resemble those before, by
    ``R'^H R' = R^H (I + P P^H) R`` with ``P = R^-H A^H``; rows are removed by
    ``R'^H R' = R^H (I - P P^H) R`` ([1]_, section 6.5). As evidence without A, ``A^H (A G)`` is accumulated
    in twice the working precision for four random vectors G and compared with ``R^H (R G)``. The bound on the
    error of x is that of the normal equations: it grows with the square of the condition number, and above
    about 1e6 no digit is guaranteed. :func:`neula.lstsq` has a better bound for a source that can be read
    again.

    References
    ----------
    .. [1] G. H. Golub, C. F. Van Loan, "Matrix Computations", 4th edition, 2013.

    Examples
    --------
    >>> import numpy as np, neula
    >>> fit = neula.LeastSquares(2)
    >>> for day in range(10):
    ...     t = day + np.linspace(0.0, 1.0, 50)
    ...     fit.update(np.stack([np.ones(50), t], 1), 3.0 - 2.0 * t)
    >>> result = fit.solve()
    >>> result.x.round(12), result.converged, fit.rows
    (array([ 3., -2.]), True, 500)
    """

    def __init__(self, n: int, *, scales: ArrayLike | None = None, engine: str | Engine = "auto") -> None:
        self.n = whole_number("n", n, wanted="a number of columns, at least 1")
        self._engine = select_engine(engine, torch.device("cpu")).using(FP64)
        given = take(np.ones(self.n) if scales is None else scales, "scales").tensor.double()
        if given.shape != (self.n,) or not bool(((given > 0) & given.isfinite()).all()):
            raise ValueError(f"scales must be {self.n} positive numbers, got {scales!r}")
        self._scales = power_of_two_scales(given).to(self._engine.device)
        self._merged: HeldSums | None = None  # of all rows but those that are gathered
        self._gathered = Gathered()
        # Makes an array like b of a tensor on a device.
        self._like: tuple[Any, torch.device] = torch.Tensor.numpy, torch.device("cpu")
        self._is_vector = True
        self.names: tuple[str, ...] | None = None

    @property
    def rows(self) -> int:
        """Number of rows added, minus those removed."""
        return 0 if self._merged is None else self._merged.rows + self._gathered.rows

    def __repr__(self) -> str:
        return f"LeastSquares({self.n}): {self.rows} rows, engine {self._engine}"

    @property
    def _sums(self) -> HeldSums | None:
        """Sums over all rows."""
        if self._gathered.rows and self._merged is not None:
            with plain_arithmetic(self._engine.device):
                merged = self._merged.plus_gathered(self._gathered, self._vectors, self._exponents)
            self._merged, self._gathered = merged, Gathered()
        return self._merged

    @restored
    def update(self, A: ArrayLike, b: ArrayLike, *, weights: ArrayLike | None = None) -> None:
        """Add rows.

        Parameters
        ----------
        A : array_like, shape (m, n)
            Any number of rows, or a source of row blocks (:func:`neula.io.sources.row_blocks`).
        b : array_like, shape (m,) or (m, k)
            Or a source. The first one says how many right-hand sides there are.
        weights : array_like, shape (m,), optional
            Factors of the rows.

        Raises
        ------
        ValueError
            For shapes that do not fit, NaN and Inf; the fit is then what it was before.
        """
        sources, like = self._sources(A, b, weights)
        with plain_arithmetic(self._engine.device):
            sums = self._merged or HeldSums.begin(self.n, self._width(sources), self._engine.device)
            sums, gathered = sums.in_dtype(self._dtype(sources)), self._gathered
            for rows, right, weighted in self._blocks(sources, whole=not is_source(A)):
                if len(rows) >= Gathered.enough:
                    sums = sums.plus_rows(*self._scaled(rows, right, weighted))
                    continue
                gathered = gathered.plus(rows, right, weighted)
                if gathered.is_full:
                    sums = sums.plus_gathered(gathered, self._vectors, self._exponents)
                    gathered = Gathered()
        if self._merged is None:
            self._is_vector, self._like = len(sources["b"].shape) == 1, like
        self._merged, self._gathered = sums, gathered
        self.names = self.names or column_names(A)

    @restored
    def forget(self, factor: float) -> None:
        """Multiply the weight of all earlier rows by a factor.

        Parameters
        ----------
        factor : float
            Above 0, at most 1: the squares of all past residuals are multiplied by it. Called before each
            update it is the forgetting factor of recursive least squares.

        Raises
        ------
        ValueError
            For other factors.
        """
        factor = number("factor", factor, "above 0 and at most 1", lambda x: 0 < x <= 1)
        if (sums := self._sums) is not None:
            self._merged = sums.times(math.sqrt(factor))

    @restored
    def downdate(self, A: ArrayLike, b: ArrayLike, *, weights: ArrayLike | None = None) -> None:
        """Remove rows that were added before.

        Parameters
        ----------
        A, b, weights : array_like
            As they were given to :meth:`update`.

        Raises
        ------
        ValueError
            If too little would be left along some direction for rounding errors not to matter, if columns are
            dependent, or if more was to be removed than is there; the fit is then what it was before.
        """
        sources, _ = self._sources(A, b, weights)
        m = sources["A"].shape[0]
        sums = self._sums
        if sums is None or self.rows < m:
            raise ValueError(f"{m} rows cannot be removed from a fit of {self.rows}")
        with plain_arithmetic(self._engine.device):
            sums = sums.in_dtype(self._dtype(sources))
            for block in self._blocks(sources, whole=True):
                sums = sums.minus_rows(*self._scaled(*block))
        self._merged = sums

    @restored
    def merge(self, other: LeastSquares) -> None:
        """Add the rows of another fit, which does not change.

        Parameters
        ----------
        other : LeastSquares
            Of as many columns and right-hand sides, with the same scales.

        Raises
        ------
        ValueError
            If these differ.
        """
        if self.n != other.n or not torch.equal(self._scales.cpu(), other._scales.cpu()):
            raise ValueError(f"{other} has other columns or scales than {self}")
        if self.names and other.names and self.names != other.names:
            raise ValueError(f"columns are {', '.join(other.names)}, and {', '.join(self.names)} here")
        sums, added = self._sums, other._sums
        if added is None:
            return
        self.names = self.names or other.names
        theirs = added.each(lambda x: x.to(self._engine.device))
        if sums is None:
            self._merged, self._is_vector, self._like = theirs, other._is_vector, other._like
            return
        self._check_width(theirs.products.shape[1], other._is_vector)
        with plain_arithmetic(self._engine.device):
            self._merged = sums.in_dtype(theirs.r.dtype).plus(theirs.in_dtype(sums.r.dtype))

    @restored
    def solve(
        self,
        *,
        damp: float = 0.0,
        rcond: float | None = None,
        accuracy: Accuracy | None = None,
        strict: bool = False,
    ) -> LstsqResult:
        """The solution for all rows so far.

        Parameters
        ----------
        damp, rcond, accuracy, strict : optional
            As for :func:`neula.lstsq` in float64 or complex128, whatever the dtypes of the rows were.

        Returns
        -------
        LstsqResult
            Of which ``backward_error`` is that of the Gram matrix of [A b], and ``passes`` is 1.

        Raises
        ------
        ValueError
            Without rows, or with fewer than columns and no damping.
        AccuracyError
            If the accuracy was not reached and ``strict`` is set.

        Warns
        -----
        AccuracyWarning
            If the accuracy was not reached.
        """
        damp, rcond = check_damp(damp), part_of_one("rcond", rcond)
        sums = self._sums
        if sums is None or (self.rows < self.n and not damp):
            raise ValueError(
                f"{self.rows} rows do not determine {self.n} columns: update with more rows, or pass damp="
            )
        call = self._call(accuracy, strict)
        a, right = (x.tensor for x in call.operands.values())
        rcond = max(a.shape) * 2.0**-52 if rcond is None else rcond
        options = LeastSquaresOptions(
            engine=call.engine, target=call.target, dtype=call.dtype, damp=damp, rcond=rcond, max_iterations=1
        )
        with call.computing():
            held = Held(sums, self._exponents, options)
            judge = LeastSquaresJudge.for_shape(max(self.rows, self.n), self.n, options, together=False)
            judge = replace(judge, limits=replace(judge.limits, backward_error=held.bound))
            run = run_chain([Link("householder fp64, incremental", held.solved)], held, judge)
        shapes, values = broadcast_system(a, right), run.found
        report, fit = Report(call, shapes, options, run), None
        if bool(run.accepted.all()):
            fit = fit_held(call, shapes, held, values.x, values.residual_norm)
        result = replace(collect(report, passes=1, fit=fit), tolerance=held.bound)
        vars(result)["names"] = self.names
        return LeastSquaresOutcome.from_report(result, report).reported(call)

    def _call(self, accuracy: Accuracy | None, strict: bool) -> Call:
        """Begin a call with operands that have shapes, and no elements."""
        assert self._sums is not None
        m, (_, k), dtype = max(self.rows, 1), self._sums.products.shape, self._sums.r.dtype
        shapes = {"A": (m, self.n), "b": (m,) if self._is_vector else (m, k)}
        operands = {name: Taken.without_numbers(x, dtype, *self._like) for name, x in shapes.items()}
        target = target_format(accuracy, torch.float64, lambda target: lstsq_bound(target, self.n))
        return Call(operands, over(self._engine, dtype), dtype, target, strict)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fit to an ``.npz`` file, completely or not at all.

        Raises
        ------
        FileError
            If the file cannot be written, as on a full disk; one that was there is then still there.
        """
        # Sizes of which the scales are made: powers of two.
        arrays = {"n": np.array(self.n), "scales": (0.5 / self._scales).cpu().numpy()}
        if self.names:
            arrays["names"] = np.array(self.names)
        if (sums := self._sums) is not None:
            counts = {"is_vector": self._is_vector, "rows": self.rows}
            counts |= {name: getattr(sums, name) for name in ("updates", "roundings", "of_a")}
            arrays |= {name: np.array(count) for name, count in counts.items()}
            arrays |= {name: x.cpu().numpy() for name, x in sums.tensors.items()}
        write_files({Path(path): arrays})

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, engine: str | Engine = "auto") -> Self:
        """Read what :meth:`save` has written.

        Raises
        ------
        ValueError
            For another file.
        """
        with np.load(path, allow_pickle=False) as file:
            found = dict(file)
        names = found.pop("names", None)
        kept = {"n", "scales", "is_vector", *HeldSums.__dataclass_fields__}
        if set(found) not in (kept, {"n", "scales"}):
            raise ValueError(f"{path} holds no LeastSquares, but {', '.join(sorted(found)) or 'nothing'}")
        fit = cls(int(found.pop("n")), scales=found.pop("scales"), engine=engine)
        fit.names = None if names is None else tuple(map(str, names))
        if found:
            fit._is_vector = bool(found.pop("is_vector"))
            counts: dict[str, Any] = {
                name: int(found.pop(name)) for name in ("rows", "updates", "roundings", "of_a")
            }
            tensors: dict[str, Any] = {
                k: torch.from_numpy(x).to(fit._engine.device) for k, x in found.items()
            }
            fit._merged = HeldSums(**counts, **tensors)
        return fit

    @property
    def _vectors(self) -> torch.Tensor:
        """Random vectors that are multiplied by ``A^T A``."""
        return gaussian_probes(self.n, self._engine.device)

    @property
    def _exponents(self) -> torch.Tensor:
        """Exponents of the given column sizes, by which columns are divided, shape (n,)."""
        return -binary_exponents(self._scales).long() + 1

    def _sources(self, A: Any, b: Any, weights: Any) -> tuple[dict[str, Source], tuple[Any, torch.device]]:
        """Row blocks of A, b and weights, and how to make an array like b."""
        sources, like = {}, self._like
        check_aligned(row_labels(A), {"b": b, "weights": weights})
        A = in_order(A, self.names, "A")
        given = {"A": A, "b": b} | ({} if weights is None else {"weights": weights})
        for name, x in given.items():
            sources[name], taken = source_of(x, name)
            like = (taken.wrap, taken.tensor.device) if name == "b" and taken is not None else like
        shapes = {name: source.shape for name, source in sources.items()}
        m = shapes["A"][0] if shapes["A"] else 0
        if shapes["A"] != (m, self.n):
            raise ValueError(f"A must have shape (m, {self.n}), got {shapes['A']}")
        if len(shapes["b"]) not in (1, 2) or shapes["b"][0] != m:
            raise ValueError(f"A has {m} rows, and b has shape {shapes['b']}")
        if shapes.get("weights", (m,)) != (m,):
            raise ValueError(f"weights must have shape ({m},), one for each row, got {shapes['weights']}")
        self._check_width(self._width(sources), len(shapes["b"]) == 1)
        return sources, like

    def _blocks(
        self, sources: dict[str, Source], *, whole: bool
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]]:
        """Rows of A and b, checked, and a list of their weights, if there are any."""
        # All of them, or some at a time, read ahead in a thread.
        m, k, device = sources["A"].shape[0], self._width(sources), self._engine.device
        dtype = self._dtype(sources)
        size = max(self._engine.tuning[StreamTuning].streamed_bytes // (8 * self.n), self.n)
        blocks: Any = Reader(sources, device, size).read("update")
        if whole:
            rows = [in_double(_joined(*source, m).to(device)) for source in sources.items()] if m else []
            blocks = [Block(0, tuple(rows))] if m else []
        for block in blocks:
            for name, x in zip(sources, block.rows, strict=True):
                check_rows(x, name, block.first, SQUARABLE)
            a, b, *weights = block.rows
            yield a.to(dtype), b.reshape(len(b), k).to(dtype), weights

    def _scaled(
        self, a: torch.Tensor, b: torch.Tensor, weights: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, HeldSums]:
        """Rows as sums take them: weighted, and scaled by powers of two."""
        a, b, units = scaled_rows(a, b, weights, self._exponents)
        return a, b, self._vectors, units

    def _dtype(self, sources: dict[str, Source]) -> torch.dtype:
        """Dtype of the sums with the new rows: float64, or complex128 if any operand is complex."""
        given = (torch_dtype(sources[name].dtype, name, or_complex=True) for name in ("A", "b"))
        held = self._merged is not None and self._merged.r.is_complex()
        return torch.complex128 if held or any(dtype.is_complex for dtype in given) else torch.float64

    def _width(self, sources: dict[str, Source]) -> int:
        """Right-hand sides."""
        return math.prod(sources["b"].shape[1:])

    def _check_width(self, k: int, is_vector: bool) -> None:
        held = self._merged
        if held is not None and (k, is_vector) != (held.products.shape[1], self._is_vector):
            known = "a vector" if self._is_vector else f"{held.products.shape[1]} right-hand sides"
            now = "a vector" if is_vector else f"{k} right-hand sides"
            raise ValueError(f"b was {known} before, and is {now} now")


def _joined(name: str, source: Source, m: int) -> torch.Tensor:
    parts = [take(block, name, or_complex=True).tensor for block in source.blocks(m)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
