r"""Spectral clustering of a graph
==============================

Points on two interleaved arcs are the vertices of a graph. The smallest eigenvalues of its Laplacian count the connected components, and the eigenvectors divide
the graph where few edges are cut.
"""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.collections import LineCollection

import neula

rng = np.random.default_rng(3)

# %%
# The graph
# ---------
#
# Each of 300 points has an edge to each of its nearest neighbours.

half = 150
angle = np.pi * rng.random(2 * half)
upper = np.arange(2 * half) < half
x = np.where(upper, np.cos(angle), 1 - np.cos(angle))
y = np.where(upper, np.sin(angle), 0.4 - np.sin(angle))
points = np.stack([x, y], axis=1) + 0.11 * rng.standard_normal((2 * half, 2))
distances = np.linalg.norm(points[:, None] - points, axis=-1)


def adjacency(neighbours):
    """Symmetric matrix of zeros and ones."""
    nearest = np.argsort(distances, axis=1)[:, 1 : neighbours + 1]
    edges = np.zeros_like(distances)
    np.put_along_axis(edges, nearest, 1.0, axis=1)
    return np.maximum(edges, edges.T)


# %%
# How many components?
# --------------------
#
# With the diagonal matrix D of degrees, the Laplacian is :math:`L = D - W`. It has the eigenvalue zero once for each connected component.
# Rounding errors make small numbers of these zeros. ``clusters`` says which eigenvalues cannot be distinguished, so no threshold has to be chosen.

W = adjacency(3)
L = np.diag(W.sum(axis=1)) - W
result = neula.eigh(L)
components = int((result.clusters == 0).sum())
print("components:", components)
print("eigenvalues:", result.eigenvalues[: components + 2])
print("errors at most:", result.errors[: components + 2])
assert result.converged

# %%
# The Fiedler vector
# ------------------
#
# With more neighbours the graph is connected. The normalized cut is small where the second eigenvector of :math:`L v = \lambda D v`, the Fiedler
# vector, changes its sign. Two eigenvalues are enough, and a third one shows the gap.

W = adjacency(12)
D = np.diag(W.sum(axis=1))
result = neula.eigh(D - W, D, subset_by_index=(0, 2))
fiedler = result.eigenvectors[:, 1]
print("eigenvalues:", result.eigenvalues.round(4))
print("gap of the Fiedler vector:", result.gaps[1].round(4))
assert result.converged
assert result.vector_errors[1] < 1e-6

fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
edges = points[np.argwhere(np.triu(W))]
left.add_collection(
    LineCollection(edges, colors="0.85", linewidths=0.6, zorder=0)
)
shown = left.scatter(*points.T, c=fiedler, cmap="coolwarm", s=14)
left.set(title="Fiedler vector", aspect="equal")
right.plot(np.sort(fiedler), ".", markersize=3)
right.axhline(0.0, color="0.6", linewidth=0.8)
right.set(title="Its elements, sorted", xlabel="vertex")
plt.show()

# %%
# The division
# ------------

side = fiedler > 0
agreement = max((side == upper).mean(), (side != upper).mean())
cut = W[side][:, ~side].sum()
print(f"{agreement:.0%} of the points are on the right side")
print(f"{cut:.0f} of {W.sum() / 2:.0f} edges are cut")
assert agreement > 0.85
