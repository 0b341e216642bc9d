r"""First steps
===========

Fit a curve, read the evidence in the result, and see what happens with an ill-conditioned problem.
You need to know NumPy and what least squares is, and no GPU.
"""

# %%
# Fit a daily cycle
# -----------------
#
# Something that repeats every day was read two thousand times in ten days, at random times, with noise. The model is
# a constant and the sines and cosines of one to four cycles a day: nine unknowns.

import warnings

import matplotlib.pyplot as plt
import numpy as np
import scipy.linalg

import neula

rng = np.random.default_rng(0)


def model(t):
    """A column for the constant, and two for each number of cycles."""
    phases = 2 * np.pi * t[:, None] * np.arange(1, 5)
    return np.hstack([np.ones((t.size, 1)), np.cos(phases), np.sin(phases)])


t = np.sort(rng.uniform(0, 10, 2000))
truth = np.array([12.0, 3.0, -1.0, 0.5, 0.0, 2.0, 0.0, 0.7, 0.3])
A = model(t)
b = A @ truth + rng.standard_normal(t.size)

result = neula.lstsq(A, b)

# %%
# ``result.x`` is what ``numpy.linalg.lstsq`` would return first, an array like the ones that went in:

print(result.x.round(2))

# %%
day = np.linspace(0, 1, 400)
plt.plot(
    t % 1, b, ".", color="0.55", markersize=2, label="readings", rasterized=True
)
plt.plot(day, model(day) @ result.x, linewidth=2.5, label="fit")
plt.xlabel("time of day")
plt.legend()
plt.title("Readings of a day, and the fit")
plt.show()

# %%
# The evidence
# ------------
#
# A result holds more than the solution. A notebook shows it as a table:

result

# %%
# The first line says whether the answer is accepted: neula computed the residual of this ``x``, and found that the answer is
# as accurate as double precision (fp64) allows.
#
# - **method**: the algorithm of the answer. neula tries the fastest one first, and a more accurate one if the answer is not
#   good enough.
# - **backward error**: change A and b by this much, relative to their size, and ``x`` is *exactly* right.
# - **condition number**: by how much such a change can be magnified on its way to the solution.
# - **forward error**: a bound on the error of ``x`` itself.
#
# All of these are attributes. The number of correct digits is the negative decimal logarithm of the forward error:

print(f"backward error {result.backward_error:.0e}")
print(f"condition      {result.condition:.2f}")
print(f"forward error  {result.forward_error:.0e}")
print(f"digits         {result.digits:.1f}")
assert result.converged
assert result.digits > 12

# %%
# This error is that of the arithmetic. The effect of the *noise* is separate: the first coefficient is not exactly 12. SciPy
# computes the same:

by_scipy = scipy.linalg.lstsq(A, b)[0]
for name, other in (("SciPy", by_scipy), ("the truth", truth)):
    difference = np.linalg.norm(result.x - other) / np.linalg.norm(other)
    print(f"difference to {name}: {difference:.0e}")

# %%
# An ill-conditioned problem
# --------------------------
#
# Fit a polynomial to 100 points in [-1, 1], by powers :math:`1, t, t^2, \dots` or by Chebyshev polynomials. High powers are
# nearly dependent, which the condition number shows.

u = np.linspace(-1, 1, 100)
y = np.exp(u) * np.sin(5 * u)

bases = {
    "powers": lambda degree: u[:, None] ** np.arange(degree + 1),
    "Chebyshev": lambda degree: np.polynomial.chebyshev.chebvander(u, degree),
}
degrees = range(5, 31, 5)
fits = {
    name: [neula.lstsq(basis(d), y) for d in degrees]
    for name, basis in bases.items()
}

# %%
for name in bases:
    plt.semilogy(
        degrees, [fit.condition for fit in fits[name]], "o-", label=name
    )
plt.xlabel("degree")
plt.ylabel("condition number")
plt.legend()
plt.title("Condition number against the degree")
plt.show()

# %%
# neula's coefficients have about sixteen correct digits, so they can be used to count the digits of other solutions:

print("degree   guaranteed    correct in NumPy (of the coefficients of powers)")
for degree, fit in zip(degrees, fits["powers"], strict=True):
    other = np.linalg.lstsq(bases["powers"](degree), y)[0]
    error = np.linalg.norm(other - fit.x) / np.linalg.norm(fit.x)
    print(f"{degree:6}   {fit.digits:10.1f}   {-np.log10(error):16.1f}")
    assert fit.digits > 15

# %%
# Small problems like these are always refined to the last digit, large ones with ``certify="forward"``.
#
# No guaranteed digit
# -------------------
#
# The Hilbert matrix of order 14 has a condition number near :math:`10^{18}`, too much for double precision. NumPy returns
# fourteen numbers, neula returns them with a warning.

n = 14
H = 1 / (np.arange(n)[:, None] + np.arange(n) + 1)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    hopeless = neula.solve(H, H @ np.ones(n))  # the solution is 1, 1, ..., 1
print(caught[0].message)

# %%
print("neula:", hopeless.converged, hopeless.digits)
print("NumPy:", np.linalg.solve(H, H @ np.ones(n)).round(1))
assert not hopeless.converged

# %%
# In a program you may prefer an exception: ``strict=True`` raises an ``AccuracyError`` in place of the warning.
#
# The other functions
# -------------------
#
# They all work like this. QR unpacks as in NumPy:

M = rng.standard_normal((1000, 300))
Q, R = neula.qr(M)
norm = np.linalg.norm
print(f"residual      {norm(M - Q @ R) / norm(M):.0e}")
print(f"orthogonality {norm(Q.T @ Q - np.eye(300)) / norm(Q):.0e}")

# %%
# You may ask for less accuracy, which is faster on a GPU:

# Half precision, as a tensor core would compute it.
rough = neula.qr(M, accuracy="fp16", engine="emulated")
print(rough.certificate)

# %%
# And the largest singular values of a matrix, each with a bound on its error:

rows, columns = np.linspace(0, 10, 300), np.linspace(0, 10, 200)
smooth = 1 / (1 + abs(rows[:, None] - columns))
U, s, Vh = low = neula.svd_lowrank(smooth, rank=5)
for value, error in zip(s, low.errors, strict=True):
    print(f"{value:8.4f} +- {error:.0e}")

# %%
# Next steps
# ----------
#
# :doc:`How certificates work <how_certificates_work>` explains the evidence,
# :doc:`Coming from NumPy, SciPy, PyTorch </coming-from>` shows how an existing program changes.
