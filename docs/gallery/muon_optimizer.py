r"""Orthogonal factors in an optimizer
==================================

Muon replaces the momentum of each weight matrix by its orthogonal polar factor. Here a small network learns a function, once with five Newton-Schulz
steps, as Muon does, and once with ``neula.polar``. ``examples/optimizers`` does this with a transformer, and :doc:`the guide </polar>` explains the
polynomials.
"""

import matplotlib.pyplot as plt
import torch

import neula

generator = torch.Generator().manual_seed(0)
inputs = torch.randn(256, 16, generator=generator)
targets = torch.sin(inputs @ torch.randn(16, 8, generator=generator))


def newton_schulz(matrices):
    found = []
    for X in (matrix / matrix.norm() for matrix in matrices):
        for _ in range(5):
            G = X.mT @ X
            X = 3.4445 * X + X @ (-4.775 * G + 2.0315 * G @ G)
        found.append(X)
    return found


def exact(matrices):
    return [result.U for result in neula.polar(matrices)]


# %%
# One training for each:


def train(orthogonalize, steps=60):
    start = torch.Generator().manual_seed(1)
    shapes = ((16, 64), (64, 8))
    weights = [
        (
            torch.randn(*shape, generator=start) / shape[0] ** 0.5
        ).requires_grad_()
        for shape in shapes
    ]
    momentum = [torch.zeros(shape) for shape in shapes]
    losses = []
    for _ in range(steps):
        loss = (
            (torch.tanh(inputs @ weights[0]) @ weights[1] - targets)
            .square()
            .mean()
        )
        gradients = torch.autograd.grad(loss, weights)
        momentum = [
            0.9 * m + g for m, g in zip(momentum, gradients, strict=True)
        ]
        with torch.no_grad():
            for weight, U in zip(weights, orthogonalize(momentum), strict=True):
                weight -= 0.05 * U
        losses.append(loss.item())
    return losses


plt.plot(train(newton_schulz), label="Newton-Schulz")
plt.plot(train(exact), label="neula.polar")
plt.xlabel("step")
plt.ylabel("loss")
plt.yscale("log")
plt.legend()
plt.title("Loss of two trainings")
plt.show()

# %%
# Singular values of the factors of one matrix: Newton-Schulz leaves them between 0.7 and 1.2, ``neula.polar`` at 1.

matrix = torch.randn(64, 64, generator=generator)
for name, factor in (("Newton-Schulz", newton_schulz), ("polar", exact)):
    plt.plot(torch.linalg.svdvals(factor([matrix])[0]), label=name)
plt.xlabel("index")
plt.legend()
plt.title("Singular values of the orthogonal factor")
plt.show()
