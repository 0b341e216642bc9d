r"""Unfolding an undersampled image
===============================

A magnetic resonance scanner with eight coils measures a quarter of the lines of an image. Each coil then sees four parts of the
image folded onto one another, and sees them with its own complex sensitivity. To unfold them is a small complex least-squares
problem for each pixel (SENSE: Pruessmann, Weiger, Scheidegger and Boesiger, 1999).
"""

import matplotlib.pyplot as plt
import numpy as np

import neula

rng = np.random.default_rng(0)
size, coils, fold = 128, 8, 4

# %%
# The image, and how the coils see it
# -----------------------------------
#
# The image is complex: tissues differ in size, and the phase varies slowly.

y, x = np.mgrid[-1 : 1 : size * 1j, -1 : 1 : size * 1j]


def ellipse(value, centre, axes):
    inside = ((x - centre[0]) / axes[0]) ** 2 + ((y - centre[1]) / axes[1]) ** 2
    return value * (inside < 1)


image = (
    ellipse(1.0, (0, 0), (0.7, 0.92))
    - ellipse(0.6, (0, -0.02), (0.64, 0.86))
    - ellipse(0.3, (0.24, 0), (0.12, 0.32))
    - ellipse(0.3, (-0.24, 0.05), (0.16, 0.4))
    + ellipse(0.4, (0, 0.4), (0.22, 0.25))
    + ellipse(0.5, (0.05, -0.6), (0.05, 0.05))
) * np.exp(1j * (x + 0.5 * y**2))

# %%
# Eight coils lie on a circle around it. The field of a coil falls with the distance, and its phase turns with the direction.

angles = 2 * np.pi * np.arange(coils) / coils
towards = (x + 1j * y) - 1.3 * np.exp(1j * angles)[:, None, None]
sensitivity = np.exp(-0.8 * abs(towards) ** 2) * towards / abs(towards)

# %%
# Leaving out lines of the Fourier transform folds the image of each coil. We measure every fourth line, with noise.

lines = np.fft.fft(sensitivity * image, axis=1, norm="ortho")[:, ::fold]
folded = np.fft.ifft(lines, axis=1, norm="ortho") * fold**0.5
noise = rng.standard_normal((*folded.shape, 2)) @ [1, 1j]
folded = folded + 0.004 * noise

figure, axes = plt.subplots(1, 3, figsize=(7, 2.9))
for axis, shown, title in zip(
    axes,
    (abs(image), abs(folded[0]), abs(folded[2])),
    ("the image", "coil 1, folded", "coil 3, folded"),
    strict=True,
):
    axis.imshow(shown, cmap="gray", aspect="auto")
    axis.set(title=title, xticks=[], yticks=[])
plt.show()

# %%
# Four thousand problems in one call
# ----------------------------------
#
# In a folded pixel four pixels of the image lie on one another, a quarter of its height apart. Eight coils give eight equations
# for them. All problems are one batch of complex 8 x 4 matrices.

height = size // fold
A = sensitivity.reshape(coils, fold, height, size).transpose(2, 3, 0, 1)
b = folded.transpose(1, 2, 0)[..., None]
result = neula.lstsq(A, b)
unfolded = result.x[..., 0].transpose(2, 0, 1).reshape(size, size)
print("A", A.shape, A.dtype, " x", result.x.shape)
print(f"{int(result.accepted.sum())} of {height * size} accepted")
assert result.accepted.all()

# %%
# Every pixel has been certified by itself, and the condition numbers say where noise is amplified: where the coils see the four
# pixels in nearly the same way. There the error of the unfolded image is large, too.

figure, axes = plt.subplots(1, 3, figsize=(7, 2.9))
conditions = np.tile(result.conditions.reshape(height, size), (fold, 1))
for axis, shown, title in zip(
    axes,
    (abs(unfolded), abs(unfolded - image), conditions),
    ("unfolded", "its error", "condition number"),
    strict=True,
):
    picture = axis.imshow(shown, cmap="gray", aspect="auto")
    axis.set(title=title, xticks=[], yticks=[])
    if title != "unfolded":
        figure.colorbar(picture, ax=axis, orientation="horizontal")
plt.show()

error = np.linalg.norm(unfolded - image) / np.linalg.norm(image)
print(f"relative error of the image: {error:.3f}")
assert error < 0.1

# %%
# Prior knowledge reduces the noise: ``damp=`` keeps pixels small where they are not well determined, at the price of a small
# bias.

damped = neula.lstsq(A, b, damp=0.02)
smooth = damped.x[..., 0].transpose(2, 0, 1).reshape(size, size)
print(
    f"with damping: {np.linalg.norm(smooth - image) / np.linalg.norm(image):.3f}"
)
