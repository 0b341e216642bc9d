r"""Batches and gradients in PyTorch
================================

Answers to torch tensors are torch tensors, on the same device; a leading dimension is a batch; and answers can be
differentiated. Three examples use this.
"""

# %%
import matplotlib.pyplot as plt
import torch

import neula

torch.set_default_dtype(torch.float64)
generator = torch.Generator().manual_seed(0)

# %%
# Four hundred fits in one call
# -----------------------------
#
# To smooth a noisy signal *and* to differentiate it, fit a parabola around every point, with weights that fall with the
# distance. Each point has its own matrix of 41 x 3, and all of them are one tensor:

t = torch.linspace(0, 10, 440)
signal = torch.sin(t**1.6 / 3)
noisy = signal + 0.2 * torch.randn(t.shape, generator=generator)

windows = t.unfold(0, 41, 1)  # (400, 41): the times of each window
centres = windows[:, 20:21]
A = torch.stack(
    [torch.ones_like(windows), windows - centres, (windows - centres) ** 2],
    dim=-1,
)
b = noisy.unfold(0, 41, 1)[..., None]  # one column for each window
weights = torch.exp(-((windows[0] - centres[0]) ** 2) / 0.1)

fits = neula.lstsq(A, b, weights=weights)
print("A", tuple(A.shape), " b", tuple(b.shape), " x", tuple(fits.x.shape))

# %%
# A vector for each matrix is a matrix with one column, as in NumPy: hence ``[..., None]`` in the last line of ``b``. Every fit
# has been certified by itself:

print(f"{int(fits.accepted.sum())} of {len(A)} accepted")
print(f"largest condition number {fits.conditions.max():.1f}")
assert fits.accepted.all()

# %%
value, slope = fits.x[:, 0, 0], fits.x[:, 1, 0]
inner = t[20:-20]
plt.plot(t, noisy, ".", color="0.55", markersize=3, label="noisy")
plt.plot(inner, value, linewidth=2, label="smoothed")
plt.xlabel("t")
plt.legend(loc="lower left")
plt.title("A noisy signal, and the smooth curve through it")
plt.show()

# %%
derivative = torch.cos(t**1.6 / 3) * 1.6 / 3 * t**0.6
plt.plot(inner, slope, label="slope of the fits")
plt.plot(t, derivative, "--", color="0.5", label="true derivative")
plt.xlabel("t")
plt.legend(loc="lower left")
plt.title("Slopes from the fits, and the true derivative")
plt.show()

# %%
# A gradient through a solver: learning a Gaussian process
# --------------------------------------------------------
#
# A Gaussian process predicts from data and a *kernel*, the covariance of the values at two places. Its three
# parameters (length, variance and noise) maximize the likelihood of the data:
#
# .. math::
#
#    -\log p = \tfrac12 b^T K^{-1} b + \tfrac12 \log\det K + \text{const}, \qquad \log\det K = 2 \sum_i \log L_{ii} .
#
# Both terms come from neula, a solution and a Cholesky factor, and torch differentiates through them.

places = torch.rand(60, generator=generator) * 10
values = (
    torch.sin(places)
    + 0.3 * places
    + 0.15 * torch.randn(60, generator=generator)
)
values = values - values.mean()


def kernel(p, q, log_length, log_size):
    return (2 * log_size).exp() * torch.exp(
        -((p[:, None] - q) ** 2) / (2 * (2 * log_length).exp())
    )


def covariance(parameters):
    noise = (2 * parameters[2]).exp()
    return kernel(places, places, *parameters[:2]) + noise * torch.eye(
        len(places)
    )


def unlikelihood(parameters):
    K = covariance(parameters)
    alpha = neula.solve(K, values, assume_a="pos").x
    L = neula.cholesky(K).L
    return 0.5 * values @ alpha + L.diagonal().log().sum()


# %%
# Compare the gradient with a difference quotient:

start = torch.tensor([-1.0, 0.0, -0.5], requires_grad=True)
(gradient,) = torch.autograd.grad(unlikelihood(start), start)
step = 1e-5 * torch.eye(3)
with torch.no_grad():
    quotient = torch.stack(
        [
            (unlikelihood(start + d) - unlikelihood(start - d)) / 2e-5
            for d in step
        ]
    )
print("gradient  ", gradient.numpy().round(5))
print("difference", quotient.numpy().round(5))
assert torch.allclose(gradient, quotient, rtol=1e-5)

# %%
parameters = start.detach().clone().requires_grad_()
optimizer = torch.optim.LBFGS(
    [parameters], max_iter=50, line_search_fn="strong_wolfe"
)


def closure():
    optimizer.zero_grad()
    loss = unlikelihood(parameters)
    loss.backward()
    return loss


before = closure().item()
optimizer.step(closure)
length, size, noise = parameters.detach().exp().tolist()
print(f"-log p from {before:.1f} to {unlikelihood(parameters).item():.1f}")
print(
    f"length {length:.2f}, size {size:.2f}, noise {noise:.2f} (0.15 was put in)"
)
assert 0.1 < noise < 0.2

# %%
# With these parameters the prediction between the points, and its standard deviation:

with torch.no_grad():
    grid = torch.linspace(-0.5, 10.5, 200)
    cross = kernel(grid, places, *parameters[:2])
    solved = neula.solve(
        covariance(parameters),
        torch.column_stack([values, cross.T]),
        assume_a="pos",
    ).x
    mean = cross @ solved[:, 0]
    deviation = (size**2 - (cross * solved[:, 1:].T).sum(1)).clamp_min(0).sqrt()
plt.fill_between(
    grid,
    mean - 2 * deviation,
    mean + 2 * deviation,
    alpha=0.25,
    label="two standard deviations",
)
plt.plot(grid, mean, label="prediction")
plt.plot(places, values, ".", color="0.5", label="data")
plt.xlabel("place")
plt.legend()
plt.title("Prediction, and two standard deviations")
plt.show()

# %%
# A gradient through a batch: a hundred decays
# --------------------------------------------
#
# A hundred samples glow after a flash, each with a lifetime of its own, on a background. The brightness is linear in two of
# the unknowns, amplitude and background, and nonlinear in the lifetime. So let least squares find the linear ones for any
# lifetime, and let an optimizer search for the lifetime alone, by the gradient of the residual *through that solution*
# (*variable projection*, Golub and Pereyra 1973).

when = torch.linspace(0, 5, 80)
lifetimes = 0.3 + 1.7 * torch.rand(100, generator=generator)
brightness = 2 + torch.rand(100, 1, generator=generator)
glow = brightness * torch.exp(-when / lifetimes[:, None]) + 0.5
glow = glow + 0.02 * torch.randn(glow.shape, generator=generator)


def residuals(log_lifetimes):
    decays = torch.exp(-when / log_lifetimes.exp()[:, None])
    A = torch.stack([decays, torch.ones_like(decays)], dim=-1)  # (100, 80, 2)
    x = neula.lstsq(A, glow[..., None]).x
    return (A @ x)[..., 0] - glow


guess = torch.zeros(100, requires_grad=True)  # all lifetimes are 1
optimizer = torch.optim.LBFGS(
    [guess], max_iter=40, line_search_fn="strong_wolfe"
)


def closure():
    optimizer.zero_grad()
    loss = (residuals(guess) ** 2).sum()
    loss.backward()
    return loss


optimizer.step(closure)
found = guess.detach().exp()
scatter = residuals(guess.detach()).std()
print(f"scatter of the residuals {scatter:.4f} (0.02 was put in)")
print(f"largest error of a lifetime {(found - lifetimes).abs().max():.3f}")
assert 0.018 < scatter < 0.021

# %%
plt.plot([0.3, 2], [0.3, 2], color="0.5", linewidth=1)
plt.plot(lifetimes, found, ".")
plt.xlabel("true lifetime")
plt.ylabel("found")
plt.title("Lifetimes found against true lifetimes")
plt.show()

# %%
# :doc:`Gradients </autograd>` has the formulas and says where there is no gradient, :doc:`Shapes </shapes>` how leading
# dimensions are read.
