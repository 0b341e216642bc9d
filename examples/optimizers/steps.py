"""Muon, SOAP and Shampoo, each with the factorization that it is given.

Sources: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); N. Vyas et al.,
"SOAP: Improving and Stabilizing Shampoo using Adam" (2024), Algorithm 3; D. Morwani et al., "A New
Perspective on Shampoo's Preconditioner" (2024).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch

Factorize = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""From matrices to factors, or to inverse square roots: all of a step at once."""


@dataclass
class Clock:
    """Seconds that factorizations have taken."""

    seconds: float = 0.0

    def timed(self, factorize: Factorize, matrices: list[torch.Tensor]) -> list[torch.Tensor]:
        """Call ``factorize`` and add its time, including that of the GPU."""
        _wait(matrices)
        begun = perf_counter()
        found = factorize(matrices)
        _wait(found)
        self.seconds += perf_counter() - begun
        return found


def _wait(matrices: Sequence[torch.Tensor]) -> None:
    if matrices and matrices[0].is_cuda:
        torch.cuda.synchronize()


@dataclass
class Muon:
    """Momentum, replaced by its orthogonal polar factor.

    Attributes
    ----------
    parameters : list of Parameter
        Matrices.
    factorize : callable
        Polar factors.
    rate, momentum : float
    """

    parameters: list[torch.nn.Parameter]
    factorize: Factorize
    rate: float = 0.02
    momentum: float = 0.95
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.averages = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        """One update of all parameters from their gradients."""
        directions = []
        for p, average in zip(self.parameters, self.averages, strict=True):
            assert p.grad is not None
            average.lerp_(p.grad, 1 - self.momentum)
            directions.append(p.grad.lerp(average, self.momentum))
        factors = self.clock.timed(self.factorize, directions)
        for p, u in zip(self.parameters, factors, strict=True):
            p.add_(u.to(p.dtype), alpha=-self.rate * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


@dataclass
class Soap:
    """Adam in the eigenbases of Shampoo's preconditioners.

    A step of orthogonal iteration updates the bases, or they are computed anew.

    Attributes
    ----------
    parameters : list of Parameter
        Matrices.
    factorize : callable
        Q of QR factorizations, or eigenvectors.
    anew : bool
        Whether ``factorize`` returns eigenvectors of preconditioners, not Q of one step of orthogonal
        iteration.
    rate : float
    betas : (float, float)
    every : int
        Steps between two updates of the bases.
    largest : int
        Order of the largest preconditioner; longer sides go without.
    """

    parameters: list[torch.nn.Parameter]
    factorize: Factorize
    anew: bool = False
    rate: float = 3e-3
    betas: tuple[float, float] = (0.95, 0.95)
    every: int = 5
    largest: int = 512
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.time = 0
        self.first = [torch.zeros_like(p) for p in self.parameters]
        self.second = [torch.zeros_like(p) for p in self.parameters]
        self.statistics = [[_zeros(p, n, self.largest) for n in p.shape] for p in self.parameters]
        self.bases: list[list[torch.Tensor | None]] = [[None, None] for _ in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        """One update of all parameters from their gradients; the first one only begins the statistics."""
        self.time += 1
        slow = self.betas[1]
        for p, (left, right) in zip(self.parameters, self.statistics, strict=True):
            assert p.grad is not None
            for statistic, product in ((left, p.grad @ p.grad.T), (right, p.grad.T @ p.grad)):
                if statistic is not None:
                    statistic.lerp_(product, 1 - slow)
        if self.time == 1:
            self.bases = [
                [None if s is None else torch.linalg.eigh(s)[1] for s in pair] for pair in self.statistics
            ]
            return
        for i, p in enumerate(self.parameters):
            self._update(i, p)
        if self.time % self.every == 0:
            self._turn()

    def _update(self, i: int, p: torch.nn.Parameter) -> None:
        assert p.grad is not None
        fast, slow = self.betas
        self.first[i].lerp_(p.grad, 1 - fast)
        inside, average = (_rotated(x, *self.bases[i]) for x in (p.grad, self.first[i]))
        self.second[i].lerp_(inside.square(), 1 - slow)
        steps = self.time - 1
        scaled = (average / (1 - fast**steps)) / ((self.second[i] / (1 - slow**steps)).sqrt() + 1e-8)
        left, right = (None if q is None else q.T for q in self.bases[i])
        p.add_(_rotated(scaled, left, right), alpha=-self.rate)

    def _turn(self) -> None:
        """All bases together; of orthogonal iteration by ``Q = qr(S Q)``."""
        places = [(i, j) for i, pair in enumerate(self.bases) for j, q in enumerate(pair) if q is not None]
        images = [
            self.statistics[i][j] if self.anew else self.statistics[i][j] @ self.bases[i][j]  # type: ignore
            for i, j in places
        ]
        for (i, j), q in zip(places, self.clock.timed(self.factorize, images), strict=True):
            self.bases[i][j] = q


@dataclass
class Shampoo:
    """Gradients between inverse square roots of preconditioners: ``sqrt(tr L) L^(-1/2) G R^(-1/2)``.

    L and R are averages of ``G G^T`` and ``G^T G``. Their Kronecker product, divided by the trace,
    approximates the covariance of gradients (Morwani et al.).

    Attributes
    ----------
    parameters : list of Parameter
        Matrices.
    factorize : callable
        Inverse square roots.
    rate : float
    betas : (float, float)
    damping : float
        Part of the mean eigenvalue that is added to the diagonal of preconditioners.
    every : int
        Steps between two updates of the inverse square roots.
    largest : int
        Order of the largest preconditioner; longer sides go without.
    """

    parameters: list[torch.nn.Parameter]
    factorize: Factorize
    rate: float = 3e-3
    betas: tuple[float, float] = (0.95, 0.95)
    damping: float = 1e-3
    every: int = 5
    largest: int = 512
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.time = 0
        self.first = [torch.zeros_like(p) for p in self.parameters]
        self.statistics = [[_zeros(p, n, self.largest) for n in p.shape] for p in self.parameters]
        self.roots: list[list[torch.Tensor | None]] = [[None, None] for _ in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        """One update of all parameters from their gradients."""
        fast, slow = self.betas
        self.time += 1
        for p, average, (left, right) in zip(self.parameters, self.first, self.statistics, strict=True):
            assert p.grad is not None
            average.lerp_(p.grad, 1 - fast)
            for statistic, product in ((left, p.grad @ p.grad.T), (right, p.grad.T @ p.grad)):
                if statistic is not None:
                    statistic.lerp_(product, 1 - slow)
        if self.time % self.every == 1:
            self._invert(1 - slow**self.time)
        for p, average, (left, right) in zip(self.parameters, self.first, self.roots, strict=True):
            p.add_(_rotated(average / (1 - fast**self.time), left, right), alpha=-self.rate)

    def _invert(self, weight: float) -> None:
        """Inverse square roots of all preconditioners, whose averages are divided by the sum of weights.

        The first of two is that of ``L / tr L``; one alone is divided by the length of the other side.
        """
        places = [
            (i, j) for i, pair in enumerate(self.statistics) for j, s in enumerate(pair) if s is not None
        ]
        matrices = []
        for i, j in places:
            s = self.statistics[i][j] / weight  # type: ignore[operator]
            mean = s.trace() / len(s)
            s.diagonal().add_(self.damping * mean + 1e-30)
            both = None not in self.statistics[i]
            scale = (s.trace() if j == 0 else 1.0) if both else self.parameters[i].shape[1 - j]
            matrices.append(s / scale)
        for (i, j), root in zip(places, self.clock.timed(self.factorize, matrices), strict=True):
            self.roots[i][j] = root


def _zeros(p: torch.Tensor, n: int, largest: int) -> torch.Tensor | None:
    return p.new_zeros(n, n) if n <= largest else None


def _rotated(x: torch.Tensor, left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor:
    """``Q_L^T X Q_R``."""
    x = x if left is None else left.T @ x
    return x if right is None else x @ right
