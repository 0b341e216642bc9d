r"""Scattering from a cylinder
==========================

A plane wave meets a metal cylinder. The current on its surface solves an integral equation, which the method of moments turns
into a dense complex linear system (Harrington, *Field Computation by Moment Methods*, 1968). For a circular cylinder the current
is also a series of Hankel functions, so that we can see both errors: that of the method, and that of the solution.
"""

import matplotlib.pyplot as plt
import numpy as np
from scipy.special import hankel2, jv

import neula

# %%
# The linear system
# -----------------
#
# The electric field is parallel to the axis, in the time convention :math:`e^{+i \omega t}`. On the surface the field of the current
# J cancels the incident wave:
#
# .. math::
#
#    \frac{k}{4} \oint J(s') \, H_0^{(2)}(k \, |r(s) - r(s')|) \, ds' = e^{-i k x(s)} .
#
# With n short straight pieces of constant current, and the equation at their middles, it is a system for n numbers. The kernel
# is singular in its own piece, whose integral is known.


def surface(n, radius=1.0):
    """Middles of the pieces, and their length."""
    angle = 2 * np.pi * (np.arange(n) + 0.5) / n
    return radius * np.exp(1j * angle), 2 * radius * np.sin(np.pi / n)


def system(k, n):
    """The matrix, and the incident wave."""
    r, length = surface(n)
    distance = abs(r[:, None] - r)
    np.fill_diagonal(distance, 1.0)
    A = k * length / 4 * hankel2(0, k * distance)
    own = 1 - 2j / np.pi * (np.log(k * length / 4) + np.euler_gamma - 1)
    np.fill_diagonal(A, k * length / 4 * own)
    return A, np.exp(-1j * k * r.real)


def series(k, angle):
    """The exact current on a cylinder of radius 1."""
    m = np.arange(-int(2 * k + 30), int(2 * k + 31))
    terms = (-1j) ** m / hankel2(m, k) * np.exp(1j * np.outer(angle, m))
    return 2 / (np.pi * k) * terms.sum(1)


# %%
# The current
# -----------
#
# A cylinder of radius 1 and waves of length 0.5:

k = 4 * np.pi
A, b = system(k, 400)
result = neula.solve(A, b)
angle = np.angle(surface(400)[0])
exact = series(k, angle)
print("dtype", result.x.dtype)
print("certified", result.converged, " correct digits", int(result.digits))
assert result.converged
assert result.digits > 8

order = np.argsort(angle)
plt.plot(np.degrees(angle[order]), abs(exact[order]), label="series")
plt.plot(
    np.degrees(angle[order[::8]]),
    abs(result.x[order[::8]]),
    "o",
    label="moments",
)
plt.xlabel("angle")
plt.ylabel("size of the current")
plt.legend()
plt.title("Current on the cylinder: the wave comes from 180°")
plt.show()

# %%
# ``digits`` counts correct digits of the solution of the linear system. The current itself has fewer: the pieces are short, but
# not infinitely short. Doubling their number shows it.

for n in (100, 200, 400, 800):
    found = neula.solve(*system(k, n))
    exact = series(k, np.angle(surface(n)[0]))
    error = np.linalg.norm(found.x - exact) / np.linalg.norm(exact)
    print(
        f"n = {n:3}: {int(found.digits)} digits of x, current {error:.1e} off"
    )

# %%
# Where the equation fails
# ------------------------
#
# At some frequencies the empty cylinder is a resonator, and the integral equation has no unique solution: for a radius of 1 at
# the zeros of the Bessel functions. The result says so without knowing any physics. A whole sweep of frequencies is one batch:

frequencies = np.linspace(1.5, 6.5, 251)
batch = [system(k, 120) for k in frequencies]
A, b = (np.stack(part) for part in zip(*batch, strict=True))
sweep = neula.solve(A, b[..., None])
errors = [
    np.linalg.norm(x - series(k, np.angle(surface(120)[0]))) / np.linalg.norm(x)
    for k, x in zip(frequencies, sweep.x[..., 0], strict=True)
]

figure, (top, bottom) = plt.subplots(2, 1, figsize=(6, 4.4), sharex=True)
top.semilogy(frequencies, sweep.conditions)
top.set(ylabel="condition number")
bottom.semilogy(frequencies, errors)
bottom.set(ylabel="error of the current", xlabel="wave number times radius")
crossings = [
    frequencies[i]
    for m in range(4)
    for i in np.flatnonzero(np.diff(np.sign(jv(m, frequencies))))
]
for axis in (top, bottom):
    for zero in crossings:
        axis.axvline(zero, color="0.8", zorder=0)
top.set_title("Grey: zeros of Bessel functions")
plt.show()
