r"""Least squares of real data
==========================

Three data sets that come with neula: a calibration, an ill-conditioned polynomial, and a surveying network. The first two are
from NIST's Statistical Reference Datasets, whose coefficients were computed in arithmetic of many digits.
"""

# %%
import matplotlib.pyplot as plt
import numpy as np

import neula
from neula.io.datasets import log_relative_error, nist, nist_names, surveying

# %%
# A calibration
# -------------
#
# *Norris*: 36 readings of an instrument for ozone, against a standard. A has a column of ones and the standard.

norris = nist("norris")
line = neula.lstsq(norris.A, norris.b)
m, n = norris.A.shape
spread = line.residual_norm / np.sqrt(m - n)

# The covariance is spread^2 (A^T A)^-1, and A^T A = R^T R.
_, R = neula.qr(norris.A)
errors = spread * np.linalg.norm(np.linalg.inv(R), axis=1)
for k, name in enumerate(("offset", "slope")):
    print(f"{name:7} {line.x[k]:.12f} +- {errors[k]:.5f}")
    print(f"{'NIST':7} {norris.certified[k]:.12f}")
print(f"{'scatter':7} {spread:.10f}")
print(f"{'NIST':7} {norris.residual_std:.10f}")

# %%
# The residuals scatter around zero, without a bend that would ask for more than a line:

plt.axhline(0, color="0.5", linewidth=1)
plt.plot(norris.A[:, 1], norris.b - norris.A @ line.x, "o")
plt.xlabel("standard")
plt.ylabel("residual")
plt.title("Residuals of the calibration")
plt.show()

# %%
# Ten powers of x
# ---------------
#
# *Filip*: 82 points and a polynomial of degree ten, the powers of numbers between -9 and -3. Its eleven columns are
# nearly dependent: the condition number is about :math:`10^9` with columns of norm one, and :math:`10^{15}` without.

filip = nist("filip")
ours = neula.lstsq(filip.A, filip.b)
theirs, _, rank, _ = np.linalg.lstsq(filip.A, filip.b)
print(f"condition number {ours.condition:.1e}")
print(f"of the columns as they stand {np.linalg.cond(filip.A):.1e}")
print(f"rank: neula {ours.rank}, NumPy {rank}")
print("coefficient of x^2:")
for who, x in (("neula", ours.x), ("NumPy", theirs), ("NIST", filip.certified)):
    print(f"   {who:6} {x[2]:8.1f}")

# %%
position = filip.A[:, 1]
curve = np.linspace(position.min(), position.max(), 400)
powers = curve[:, None] ** np.arange(11)
plt.plot(position, filip.b, "o", color="0.55", markersize=4, label="data")
plt.plot(curve, powers @ ours.x, label="neula")
plt.plot(curve, powers @ theirs, "--", label="NumPy")
plt.xlabel("x")
plt.legend()
plt.title("Filip's points with two fits")
plt.show()

# %%
# NumPy does not scale the columns, and counts the smallest singular value as zero. It returns the solution of another problem,
# which only the third of four return values shows.
#
# How many digits of neula's coefficients are correct? ``digits`` says all, a comparison with NIST's values says eight:

print(f"digits guaranteed {ours.digits:.1f}")
print(f"digits of NIST's {log_relative_error(ours.x, filip.certified):.1f}")

# %%
# Both are right. NIST solved the problem of the *decimal* numbers, with exact powers. In memory each power is rounded by a part
# in :math:`10^{16}`, and the condition number makes eight digits of that. ``condition`` times the error of your data bounds the
# resulting error of x.
#
# The eleven regressions of NIST
# ------------------------------
#
# With the normal equations as a third method. NIST's coefficients have 15 digits, so no answer can show more.

ways = {
    "neula": lambda A, b: neula.lstsq(A, b).x,
    "numpy.linalg.lstsq": lambda A, b: np.linalg.lstsq(A, b)[0],
    "normal equations": lambda A, b: np.linalg.solve(A.T @ A, A.T @ b),
}
problems = [nist(name) for name in nist_names()]
digits = {
    way: [
        max(0.0, log_relative_error(solve(p.A, p.b), p.certified))
        for p in problems
    ]
    for way, solve in ways.items()
}
assert all(a > b - 1 for a, b in zip(*list(digits.values())[:2], strict=True))

# %%
places = np.arange(len(problems))
fig, axis = plt.subplots(figsize=(5.2, 4.6))
for row, (way, values) in enumerate(digits.items()):
    axis.barh(places + 0.27 * (row - 1), values, height=0.25, label=way)
axis.set_yticks(places, [p.name for p in problems])
axis.invert_yaxis()
axis.set_xlabel("digits that agree with NIST's")
fig.legend(
    *axis.get_legend_handles_labels(),
    loc="upper center",
    bbox_to_anchor=(0.55, 1.0),
    ncols=3,
)
plt.title("Correct digits of eleven regressions")
plt.show()

# %%
# A surveying network, and a blunder in it
# ----------------------------------------
#
# *Illc1033* (Paige and Saunders 1979): 1033 observations of 320 unknowns in a network of survey points, each observation
# of a few neighbours. neula makes it a dense matrix.

A, b = surveying("illc1033")
fig, axis = plt.subplots(figsize=(5.2, 2.4))
axis.plot(*np.nonzero(A), ".", markersize=1.2, rasterized=True)
axis.set_xlabel("observation")
axis.set_ylabel("unknown")
plt.title("Non-zero entries of the surveying problem")
plt.show()

# %%
network = neula.lstsq(A, b, certify="forward")
print(
    f"condition {network.condition:.1e}, {network.digits:.1f} guaranteed digits"
)

# %%
# Now three instruments are misread. Squares weigh large residuals heavily, so a few wrong observations affect all unknowns. The
# remedy is to weigh down what does not fit, and to solve again (Huber's estimate by *iteratively reweighted least squares*).
# ``weights=`` are factors of rows, so the square root of Huber's weights.

rng = np.random.default_rng(0)
scatter = network.residual_norm / np.sqrt(A.shape[0] - A.shape[1])
exact = A @ network.x
noise = rng.standard_normal(b.size)
clean = exact + scatter * noise  # observations with known truth
blunders = [100, 500, 900]
observed = clean.copy()
observed[blunders] += 40 * scatter

plain = neula.lstsq(A, observed)
x = plain.x
for _ in range(20):
    r = observed - A @ x
    # The standard deviation of a normal distribution with this median.
    typical = np.median(abs(r)) / 0.6745
    weights = np.sqrt(
        np.minimum(1.0, 1.5 * typical / np.maximum(abs(r), 1e-300))
    )
    x = neula.lstsq(A, observed, weights=weights).x

# %%
plt.plot(weights**2, ".", markersize=3)
marks = {"markersize": 9, "fillstyle": "none", "label": "misread"}
plt.plot(blunders, weights[blunders] ** 2, "o", **marks)
plt.ylim(-0.05, 1.25)
plt.xlabel("observation")
plt.ylabel("weight")
plt.legend(loc="upper right")
plt.title("Weights of all observations")
plt.show()


# %%
def misfit(x):
    """Distance from the true observations, in units of the scatter."""
    return np.linalg.norm(A @ x - exact) / (scatter * np.sqrt(b.size))


print(f"without blunders {misfit(neula.lstsq(A, clean).x):.2f}")
print(f"with blunders    {misfit(plain.x):.2f}")
print(f"reweighted       {misfit(x):.2f}")
assert misfit(x) < misfit(plain.x)

# %%
# Noise alone gives 0.56, the square root of 320/1033. With three blunders the plain solution is twice as wrong; the reweighted
# one is nearly as good as without them.
