r"""Principal components of a batch
===============================

A recording of eight channels holds two patterns whose strengths change. Its principal components are computed in 400 windows, by one call of
``neula.eigh``. The result says in which windows rounding errors limit the direction of the first component.
"""

import matplotlib.pyplot as plt
import numpy as np

import neula

rng = np.random.default_rng(0)
channels, windows, length = 8, 400, 250

# %%
# The recording
# -------------
#
# The first pattern fades while the second one grows. In the middle both are equally strong. White noise is added in each channel.

patterns = neula.qr(rng.standard_normal((channels, 2))).Q
time = np.linspace(0, 1, windows)
strengths = np.stack([2.5 - 1.5 * time, 1.0 + 1.5 * time], axis=1)
sources = rng.standard_normal((windows, length, 2)) * strengths[:, None, :]
data = sources @ patterns.T + 0.3 * rng.standard_normal(
    (windows, length, channels)
)

# %%
# One call for all windows
# ------------------------
#
# Principal components are the eigenvectors of the covariance matrix. Eigenvalues are ascending, so the last ones are the largest.

data = data - data.mean(axis=1, keepdims=True)
covariances = data.swapaxes(1, 2) @ data / (length - 1)
result = neula.eigh(covariances)
print(result)
assert result.converged

# %%
# Principal components from singular values of the data: squares are avoided, and small components have twice the digits.

svd = neula.svd(data, full_matrices=False)
variances = svd.s[:, ::-1] ** 2 / (length - 1)
assert np.allclose(variances, result.eigenvalues)

# %%
plt.plot(time, result.eigenvalues[:, ::-1])
plt.xlabel("time")
plt.ylabel("variance")
plt.title("Eigenvalues of 400 covariance matrices")
plt.show()

# %%
# Which pattern is the first component?
# -------------------------------------
#
# Its projection on the two patterns changes in the middle, where the largest eigenvalues are close.

first = result.eigenvectors[:, :, -1]
share = (first @ patterns) ** 2
plt.plot(time, share, label=["first pattern", "second pattern"])
plt.xlabel("time")
plt.ylabel("squared cosine")
plt.legend()
plt.title("First principal component and the two patterns")
plt.show()

# %%
# How well is the direction determined?
# -------------------------------------
#
# The bound of Davis and Kahan is the residual divided by the gap. It counts rounding errors only. In single precision, the direction
# loses digits where the gap is small. The angle between the directions in both precisions is below the bound in each window.

single = neula.eigh(covariances.astype(np.float32))
exact = neula.eigh(covariances.astype(np.float32).astype(float))
v, e = (r.eigenvectors[:, :, -1].astype(float) for r in (single, exact))
sine = np.linalg.norm(v - e * (e * v).sum(axis=1, keepdims=True), axis=1)
plt.semilogy(time, single.vector_errors[:, -1], label="bound, float32")
plt.semilogy(time, sine, label="angle to float64")
plt.semilogy(time, result.vector_errors[:, -1], label="bound, float64")
plt.xlabel("time")
plt.ylabel("sine of the angle")
plt.legend()
plt.title("Bounds on the direction of the first component")
plt.show()
assert (sine <= single.vector_errors[:, -1]).all()
