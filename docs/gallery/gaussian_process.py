r"""Gaussian process regression
===========================

Fifty noisy values, a smooth kernel, and a prediction with its uncertainty. :doc:`The guide </gaussian-processes>` has the formulas.
"""

import matplotlib.pyplot as plt
import numpy as np

import neula

rng = np.random.default_rng(0)
x = np.sort(rng.uniform(0, 10, 50))
y = np.sin(x) + 0.2 * rng.standard_normal(50)


def kernel(p, q):
    return np.exp(-0.5 * (p[:, None] - q) ** 2)


K = kernel(x, x) + 0.2**2 * np.eye(50)

# %%
# One solve for the data and all test points:

new = np.linspace(-1, 11, 200)
cross = kernel(new, x)
result = neula.solve(K, np.column_stack([y, cross.T]), assume_a="pos")
print(f"{result.digits:.1f} digits, condition number {result.condition:.0f}")
mean = cross @ result.x[:, 0]
deviation = np.sqrt(1 - (cross * result.x[:, 1:].T).sum(1))

# %%
plt.fill_between(new, mean - 2 * deviation, mean + 2 * deviation, alpha=0.25)
plt.plot(new, mean, label="prediction")
plt.plot(x, y, ".", color="0.5", label="data")
plt.xlabel("x")
plt.legend()
plt.title("Prediction, and two standard deviations")
plt.show()

# %%
# The log-likelihood needs the log-determinant, from the Cholesky factor:

L = neula.cholesky(K).L
logdet = 2 * np.log(np.diagonal(L)).sum()
print(
    f"log-likelihood {-0.5 * (y @ result.x[:, 0] + logdet + 50 * np.log(2 * np.pi)):.2f}"
)

# %%
# How much jitter does a kernel matrix without noise need? Each factor of ten in the condition number costs a digit.

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
