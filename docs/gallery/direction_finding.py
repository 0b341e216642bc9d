r"""Direction finding with an array of antennas
===========================================

Twelve antennas receive three transmitters at once, two of them only five degrees apart. Where are they, and what do they send?
The answers need a Hermitian linear system, a complex SVD of low rank, and complex least squares.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

import neula
from neula.io.matrices import fourier_matrix

rng = np.random.default_rng(0)
antennas, snapshots = 12, 400

# %%
# Simulated signals
# -----------------
#
# The antennas stand in a line, half a wavelength apart. A wave from the angle :math:`\theta` arrives at the next antenna with a phase
# of :math:`\pi \sin\theta` more, so the responses to a direction are powers of one complex number.


def steering(degrees):
    """A column for each direction."""
    phases = np.pi * np.sin(np.radians(np.atleast_1d(degrees)))
    return fourier_matrix(torch.from_numpy(phases), antennas).numpy().T


def complex_noise(*shape):
    return rng.standard_normal((*shape, 2)) @ [1, 1j] / 2**0.5


directions = np.array([-20.0, 10.0, 15.0])
strengths = np.array([1.0, 0.7, 1.0])
sent = strengths[:, None] * np.exp(2j * np.pi * rng.random((3, snapshots)))
received = steering(directions) @ sent + 0.3 * complex_noise(
    antennas, snapshots
)

# %%
# Beamforming
# -----------
#
# The covariance R of the antennas is Hermitian and positive definite. A beamformer of Capon's kind passes one direction and
# suppresses all others: with the response a, its power is :math:`1 / (a^H R^{-1} a)`. That is one system with a right-hand side for
# every direction.

R = received @ received.conj().T / snapshots
grid = np.linspace(-60, 60, 1201)
a = steering(grid)
solved = neula.solve(R, a, assume_a="pos")
capon = 1 / np.einsum("ij,ij->j", a.conj(), solved.x).real
print("certified", solved.converged, " correct digits", int(solved.digits))
assert solved.converged

# %%
# MUSIC
# -----
#
# Three transmitters span a space of three dimensions. The leading left singular vectors of the received signals are a basis of
# it, and the response to the direction of a transmitter lies in it.

U, s, Vh = neula.svd_lowrank(received, rank=3)
outside = a - U @ (U.conj().T @ a)
music = 1 / np.linalg.norm(outside, axis=0) ** 2

plain = np.einsum("ij,ij->j", a.conj(), R @ a).real
for power, name in ((plain, "plain sum"), (capon, "Capon"), (music, "MUSIC")):
    plt.plot(grid, 10 * np.log10(power / power.max()), label=name)
for direction in directions:
    plt.axvline(direction, color="0.8", zorder=0)
plt.xlabel("direction in degrees")
plt.ylabel("power in dB")
plt.legend()
plt.title("The plain sum sees two transmitters, MUSIC three")
plt.show()

# %%
peaks = (
    np.flatnonzero((music[1:-1] > music[:-2]) & (music[1:-1] > music[2:])) + 1
)
found = np.sort(grid[peaks[np.argsort(music[peaks])[-3:]]])
print("directions", found.round(1))
assert abs(found - directions).max() < 0.5

# %%
# Signals of the transmitters
# ---------------------------
#
# With known directions, the signals are a least-squares problem with 400 right-hand sides.

signals = neula.lstsq(steering(found), received)
strength = (abs(signals.x) ** 2).mean(1) ** 0.5
print("certified", signals.converged)
print("strengths", strength.round(2))
assert abs(strength - strengths).max() < 0.1

# %%
plt.figure(figsize=(4.6, 4.2))
for signal, direction in zip(signals.x, found, strict=True):
    plt.plot(
        signal.real, signal.imag, ".", markersize=3, label=f"{direction:.1f}°"
    )
plt.gca().set(aspect="equal", xlabel="real part", ylabel="imaginary part")
plt.legend(loc="upper right")
plt.title("Signals of constant size, separated")
plt.show()
