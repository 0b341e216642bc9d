r"""Batches and gradients in PyTorch
================================

Answers to torch tensors are torch tensors, on the same device; a leading dimension is a batch; and answers can be
differentiated.
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
# More: :doc:`Gradients </autograd>`, :doc:`Shapes </shapes>`, :doc:`a Gaussian process <gaussian_process>`.
