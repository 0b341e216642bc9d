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
from neula.kernels.small_problems.embedding import embedded, of_stacked_parts, stacked_parts

if TYPE_CHECKING:
    from neula._core import Core, SystemsSetting

THREADED = 1e5
"""From how many systems times the cube of their order on a second thread is worth the 30 us of its start."""

EQUILIBRATED = 16.0
"""Rows, and columns, whose lengths differ by less are not scaled."""


class CompiledSolutions(NamedTuple):
    """Solutions with their evidence."""

    x: torch.Tensor  # shape (..., n, k): float64, rounded to the dtype of the result
    # Shape (..., k): bounds on ||D (x - x*)|| / ||D x*||, D being the norms of the columns of A.
    forward_errors: np.ndarray
    # Shape (count, ...): evidence, of several right-hand sides the worst: SystemEvidence of cpp/kernels.hpp
    # says what each number is.
    numbers: np.ndarray
    places: dict[str, int | slice]  # where the numbers are, by their names

    @classmethod
    def empty(
        cls, kernels: Core, n: int, k: int, *batch: int
    ) -> tuple[CompiledSolutions, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Solutions to be written by a kernel, and their memory as it takes it."""
        count, places = batch[0] if batch else 1, places_of(kernels)
        x, forward_errors = np.empty((count * n, k)), np.empty((count, k))
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
    """Solve by LU, update once, and measure; None without the core, or where memory does not suffice.

    A, of shape (n, n) or (batch, n, n), and b are float64 or float32, of any strides; the result has the
    dtype ``dtype``. Solutions are refined to the forward error ``digits``; others are doubtful unless another
    update gains nothing. Definite matrices are eliminated without pivoting, as Cholesky's factors are made:
    those that are not symmetric and positive definite are doubtful.
    """
    kernels = core()
    if kernels is None:
        return None
    if a.is_complex():  # as real systems of twice the order
        of_a, of_b = (torch.from_numpy(x) for x in (embedded(a.numpy()), stacked_parts(b.numpy())))
        found = solved(of_a, of_b, dtype.to_real(), digits, definite=definite)
        if found is None:
            return None
        double_errors_of_parts(found.numbers, found.places)
        return found._replace(x=torch.from_numpy(of_stacked_parts(found.x.numpy())))
    *batch, n, k = b.shape
    count = batch[0] if batch else 1
    threads = torch.get_num_threads() if count > 1 and count * n**3 >= THREADED else 1
    found, memory = CompiledSolutions.empty(kernels, n, k, *batch)
    single = dtype == torch.float32
    done = kernels.solve_systems(
        a.numpy(), b.numpy(), setting_for(kernels, n, digits), *memory, definite, single, threads
    )
    return found if done else None


def double_errors_of_parts(numbers: np.ndarray, places: dict[str, int | slice]) -> None:
    """Turn backward errors of real systems into those of the complex ones that they stand for, in place.

    They are in the infinity norm. The magnitude of a complex number is between the sum of those of its parts
    divided by the square root of 2 and that sum, the largest of a vector likewise, and an error has two. All
    else is in the 2-norm, which is the same.
    """
    for name in ("refined_error", "backward_error", "history"):
        numbers[places[name]] *= 2


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
