"""Small linear systems by the compiled core, which solves and measures them in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from neula.algorithms.krylov.batched_lstsq import PROBES, ROUNDING, SHARED, probes
from neula.certificates.forward_error import COMPUTED, ESTIMATED, MAX_RATE, inverse_margin
from neula.certificates.verdict import Evidence
from neula.kernels.core import core
from neula.kernels.magnitudes import MODERATE

if TYPE_CHECKING:
    from neula._core import Core, SystemsSetting

THREADED = 1e5
"""From how many systems times the cube of their order on a second thread is worth the 30 us of its start."""

EQUILIBRATED = 16.0
"""Rows, and columns, whose lengths differ by less are not scaled."""


DTYPES = (np.dtype(np.float64), np.dtype(np.complex128))
"""Of real and complex solutions."""


class CompiledSolutions(NamedTuple):
    """Solutions with their evidence."""

    x: torch.Tensor  # shape (..., n, k): float64 or complex128, rounded to the dtype of the result
    # Shape (..., k): bounds on ||D (x - x*)|| / ||D x*||, D being the norms of the columns of A.
    forward_errors: np.ndarray
    # Shape (count, ...): evidence, of several right-hand sides the worst: SystemEvidence of cpp/kernels.hpp
    # says what each number is.
    numbers: np.ndarray
    places: dict[str, int | slice]  # where the numbers are, by their names

    @classmethod
    def empty(
        cls, kernels: Core, n: int, k: int, *batch: int, is_complex: bool = False
    ) -> tuple[CompiledSolutions, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Solutions to be written by a kernel, and their memory as it takes it."""
        count, places = batch[0] if batch else 1, places_of(kernels)
        x, forward_errors = np.empty((count * n, k), DTYPES[is_complex]), np.empty((count, k))
        numbers = np.empty((count_of(kernels), count))
        memory = x, forward_errors, numbers
        if batch:
            return cls(torch.from_numpy(x.reshape(*batch, n, k)), forward_errors, numbers, places), memory
        return cls(torch.from_numpy(x), forward_errors[0], numbers[:, 0], places), memory

    @classmethod
    def joined(cls, parts: Sequence[CompiledSolutions]) -> CompiledSolutions:
        """Join the solutions of the members of a batch."""
        x, forward_errors, numbers, places = zip(*parts, strict=True)
        return cls(torch.stack(x), np.stack(forward_errors), np.stack(numbers, 1), places[0])

    def named(self) -> dict[str, Any]:
        """The numbers by name: floats for one system, arrays for a batch, ``history`` several of them."""
        numbers = self.numbers.tolist() if self.numbers.ndim == 1 else self.numbers
        return {name: numbers[place] for name, place in self.places.items()}

    @property
    def evidence(self) -> Evidence[Any]:
        """Evidence of each system: floats for one system, arrays for a batch."""
        return Evidence.from_numbers(self.numbers.tolist() if self.numbers.ndim == 1 else self.numbers)


def available() -> bool:
    """Whether the compiled core is there."""
    return core() is not None


def solved(
    a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, digits: float, *, definite: bool = False
) -> CompiledSolutions | None:
    """Solve by LU, update, and measure; None without the core, or where memory does not suffice.

    A, of shape (n, n) or (batch, n, n), and b are real or complex numbers of single or double precision, of
    any strides; b is real where A is. The result has the dtype ``dtype``. Solutions are refined to the
    forward error ``digits``; others are doubtful unless another update gains nothing. Definite matrices are
    eliminated without pivoting, as Cholesky's factors are made: those that are not Hermitian and positive
    definite are doubtful.
    """
    kernels = core()
    if kernels is None:
        return None
    *batch, n, k = b.shape
    count = batch[0] if batch else 1
    threads = torch.get_num_threads() if count > 1 and count * n**3 >= THREADED else 1
    found, memory = CompiledSolutions.empty(kernels, n, k, *batch, is_complex=a.is_complex())
    single = dtype.to_real() == torch.float32
    done = kernels.solve_systems(
        a.numpy(), b.numpy(), setting_for(kernels, n, digits), *memory, definite, single, threads
    )
    return found if done else None


def count_of(kernels: Core) -> int:
    """How many numbers kernels write for each system."""
    return places_of(kernels)["history"].stop


@lru_cache(maxsize=1)
def places_of(kernels: Core) -> dict[str, Any]:
    """Indices at which kernels write the numbers of their evidence, and the slice of the history."""
    return {
        name: first if count == 1 else slice(first, first + count)
        for name, (first, count) in kernels.system_evidence.items()
    }


@lru_cache(maxsize=SHARED)
def setting_for(kernels: Core, n: int, digits: float) -> SystemsSetting:
    """Random vectors that show the norm of the inverse, then one for the norm of A; and limits."""
    vectors, exact = _vectors(max(SHARED, n))[:, :n], n <= PROBES
    rows = np.vstack([np.eye(n), vectors[-1:]]) if exact else np.ascontiguousarray(vectors)
    return setting_of(kernels, rows, 1.0 if exact else inverse_margin(PROBES), digits)


@lru_cache(maxsize=2)
def _vectors(n: int) -> np.ndarray:
    return torch.cat(
        [probes(n, torch.device("cpu"), count, unit=False) for count in (PROBES, 1)], 1
    ).mT.numpy()


def setting_of(kernels: Core, vectors: np.ndarray, margin: float, digits: float) -> SystemsSetting:
    """Random vectors and limits as kernels take them.

    The rows of ``vectors``, shape (count + 1, n), without gaps, show the norm of the inverse, which exceeds
    its estimate by a ``margin`` at most, and the last one that of A. Solutions are refined to the forward
    error ``digits``.
    """
    limits = (MODERATE, EQUILIBRATED, MAX_RATE, ROUNDING, margin, COMPUTED, ESTIMATED, digits)
    return kernels.systems_setting(vectors, limits)
