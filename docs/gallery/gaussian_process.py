r"""Gaussian process regression
===========================

Fifty noisy values, a smooth kernel whose parameters are fitted by gradients, and a prediction with its uncertainty.
:doc:`The guide </gaussian-processes>` has the formulas.
"""

import math

import matplotlib.pyplot as plt
import numpy as np
import torch

import neula

rng = np.random.default_rng(0)
x = np.sort(rng.uniform(0, 10, 50))
y = np.sin(x) + 0.2 * rng.standard_normal(50)


def kernel(p, q, length=1.0, variance=1.0):
    return variance * np.exp(-0.5 * ((p[:, None] - q) / length) ** 2)


# %%
# The log-likelihood needs :math:`y^T K^{-1} y` and the log-determinant, both from one factorization. Each comes with a
# bound on its error.

factors = neula.cholesky(kernel(x, x) + 0.2**2 * np.eye(50))
quadratic, logdet = factors.inv_quad(y), factors.logdet()
likelihood = -0.5 * (
    quadratic.value + logdet.value + 50 * math.log(2 * math.pi)
)
print(
    f"log-likelihood {likelihood:.6f}, "
    f"error below {0.5 * (quadratic.error + logdet.error):.0e}"
)

# %%
# Which length, variance and noise make the data likely? With torch tensors all values have gradients, for which nothing
# is factorized again. L-BFGS maximizes the likelihood over logarithms of the parameters, from a start that is far off.

points, values = torch.from_numpy(x), torch.from_numpy(y)
theta = (
    torch.tensor([3.0, 3.0, 1.0], dtype=torch.float64).log().requires_grad_()
)


def unlikelihood():
    length, variance, noise = theta.exp()
    distances = (points[:, None] - points) / length
    K = variance * torch.exp(-0.5 * distances**2) + noise * torch.eye(50)
    factors = neula.cholesky(K)
    return 0.5 * (factors.inv_quad(values).value + factors.logdet().value)


optimizer = torch.optim.LBFGS(
    [theta], max_iter=60, line_search_fn="strong_wolfe"
)


def closure():
    optimizer.zero_grad()
    loss = unlikelihood()
    loss.backward()
    return loss


optimizer.step(closure)
length, variance, noise = theta.detach().exp().tolist()
print(
    f"length {length:.2f}, variance {variance:.2f}, "
    f"standard deviation of the noise {noise**0.5:.2f}"
)

# %%
# One solve for the data and all test points:

new = np.linspace(-1, 11, 200)
cross = kernel(new, x, length, variance)
factors = neula.cholesky(kernel(x, x, length, variance) + noise * np.eye(50))
result = factors.solve(np.column_stack([y, cross.T]))
print(f"{result.digits:.1f} digits, condition number {result.condition:.0f}")
mean = cross @ result.x[:, 0]
deviation = np.sqrt(variance - (cross * result.x[:, 1:].T).sum(1))

# %%
plt.fill_between(new, mean - 2 * deviation, mean + 2 * deviation, alpha=0.25)
plt.plot(new, mean, label="prediction")
plt.plot(x, y, ".", color="0.5", label="data")
plt.xlabel("x")
plt.legend()
plt.title("Prediction, and two standard deviations")
plt.show()

# %%
# A kernel matrix without noise is not positive definite in floating-point arithmetic. How much jitter does it need, and how
# much is better? Each factor of ten in the condition number costs a digit.

print(f"jitter {neula.cholesky(kernel(x, x), jitter='auto').jitter:.0e}")
jitters = 10.0 ** np.arange(-10, 0)
conditions = [
    neula.solve(kernel(x, x) + jitter * np.eye(50), y, assume_a="pos").condition
    for jitter in jitters
]
plt.loglog(jitters, conditions, "o-")
plt.xlabel("jitter")
plt.ylabel("condition number")
plt.title("Condition number against jitter")
plt.show()
