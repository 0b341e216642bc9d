"""Log-likelihood of a Gaussian process and its gradient, beside GPyTorch, scikit-learn and plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import torch

import neula
from benchmarks.harness import Results
from neula.papers.measuring import interleaved_seconds

SIZES = {"cpu": (300, 1000, 3000), "cuda": (1000, 3000, 10000)}
FEATURES = 4
VARIANCE, LENGTH, NOISE = 1.5, 0.8, 0.01
"""Hyperparameters where the likelihood is computed; their logarithms are differentiated by."""

Answer = tuple[float, list[float]]
"""Log-likelihood, and derivatives by the logarithms of variance, length and noise."""


def run(device: torch.device, sizes: tuple[int, ...] | None = None) -> Results:
    """Time one evaluation of likelihood and gradient in float64, in turns with each peer there is."""
    results = Results("gaussian_process", device)
    for n in sizes or SIZES[device.type]:
        generator = torch.Generator("cpu").manual_seed(n)
        x = torch.rand(n, FEATURES, generator=generator, dtype=torch.float64, device="cpu")
        y = torch.sin(4 * x).sum(1) + NOISE**0.5 * torch.randn(n, generator=generator, dtype=torch.float64)
        x, y = x.to(device), y.to(device)
        factors = neula.cholesky(_kernel(x, *_parameters(device)))
        quadratic, logdet = factors.inv_quad(y), factors.logdet()
        bound = float(quadratic.error + logdet.error) / 2
        for name, peer in _peers(x, y):
            ours = lambda x=x, y=y: _by_neula(x, y)  # noqa: E731
            (value, gradient), (theirs, their_gradient) = ours(), peer()
            seconds, peer_seconds = interleaved_seconds([ours, peer], 1.0)
            scale = max(map(abs, their_gradient))
            results.add(
                peer=name,
                n=n,
                ms=1e3 * seconds,
                peer_ms=1e3 * peer_seconds,
                speedup=peer_seconds / seconds,
                likelihood=value,
                difference=abs(value - theirs),
                bound=bound,
                gradient_difference=max(map(_gap, gradient, their_gradient)) / scale,
                certified=factors.converged,
            )
        del factors
    return results


def _gap(x: float, y: float) -> float:
    return abs(x - y)


def _parameters(device: torch.device) -> list[torch.Tensor]:
    logs = (math.log(v) for v in (VARIANCE, LENGTH, NOISE))
    return [torch.tensor(v, dtype=torch.float64, device=device, requires_grad=True) for v in logs]


def _kernel(
    x: torch.Tensor, variance: torch.Tensor, length: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    squares = (x * x).sum(1)
    distances = (squares[:, None] + squares - 2 * (x @ x.T)).clamp_min(0)
    k = variance.exp() * torch.exp(distances * (-0.5 * torch.exp(-2 * length)))
    return k + torch.diag(noise.exp().expand(len(x)))


def _answer(likelihood: torch.Tensor, parameters: list[torch.Tensor]) -> Answer:
    gradient = torch.autograd.grad(likelihood, parameters)
    return float(likelihood.detach()), [float(g) for g in gradient]


def _by_neula(x: torch.Tensor, y: torch.Tensor) -> Answer:
    parameters = _parameters(x.device)
    factors = neula.cholesky(_kernel(x, *parameters))
    terms = factors.inv_quad(y).value + factors.logdet().value
    return _answer(-0.5 * (terms + len(y) * math.log(2 * math.pi)), parameters)


def _by_torch(x: torch.Tensor, y: torch.Tensor) -> Answer:
    parameters = _parameters(x.device)
    lower = torch.linalg.cholesky(_kernel(x, *parameters))
    z = torch.linalg.solve_triangular(lower, y[:, None], upper=False)
    terms = z.square().sum() + 2 * lower.diagonal().log().sum()
    return _answer(-0.5 * (terms + len(y) * math.log(2 * math.pi)), parameters)


def _peers(x: torch.Tensor, y: torch.Tensor) -> Iterator[tuple[str, Callable[[], Answer]]]:
    """Peers that are installed, and made for the device."""
    yield "torch", lambda: _by_torch(x, y)
    with suppress(ImportError):
        yield "gpytorch", _gpytorch(x, y)
    if x.device.type == "cpu":
        yield "scikit-learn", _sklearn(x.numpy(), y.numpy())


def _gpytorch(x: torch.Tensor, y: torch.Tensor) -> Callable[[], Answer]:
    """Its way by a Cholesky factor, not by conjugate gradients."""
    import gpytorch  # type: ignore[import-not-found]

    class Model(gpytorch.models.ExactGP):
        def __init__(self, likelihood: object) -> None:
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ZeroMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, points: torch.Tensor) -> object:
            mean, covariance = self.mean_module(points), self.covar_module(points)
            return gpytorch.distributions.MultivariateNormal(mean, covariance)

    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.Positive())
    model = Model(likelihood).to(x).train()
    likelihood.to(x).train()
    likelihood.noise, model.covar_module.outputscale = NOISE, VARIANCE
    model.covar_module.base_kernel.lengthscale = LENGTH
    marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    raw = [
        (model.covar_module, "raw_outputscale", VARIANCE),
        (model.covar_module.base_kernel, "raw_lengthscale", LENGTH),
        (likelihood.noise_covar, "raw_noise", NOISE),
    ]

    def call() -> Answer:
        exactly = gpytorch.settings.fast_computations(False, False, False)
        with exactly, gpytorch.settings.max_cholesky_size(len(y) + 1):
            value = marginal(model(x), y) * len(y)
            parameters = [getattr(module, name) for module, name, _ in raw]
            gradient = torch.autograd.grad(value, parameters)
        # Parameters are softplus functions of the raw ones: s(r) = log(1 + exp(r)), s' = 1 - exp(-s).
        chained = [
            float(g.sum()) * v / (1 - math.exp(-v)) for g, (_, _, v) in zip(gradient, raw, strict=True)
        ]
        return float(value.detach()), chained

    return call


def _sklearn(x: np.ndarray, y: np.ndarray) -> Callable[[], Answer]:
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    kernel = ConstantKernel(VARIANCE) * RBF(LENGTH) + WhiteKernel(NOISE)
    model = GaussianProcessRegressor(kernel, alpha=0.0, optimizer=None).fit(x, y)

    def call() -> Answer:
        value, gradient = model.log_marginal_likelihood(model.kernel_.theta, eval_gradient=True)
        return float(value), [float(g) for g in gradient]

    return call
