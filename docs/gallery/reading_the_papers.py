r"""Reading the papers with neula
=============================

neula is based on three papers. Some of their claims can be tried in a minute, on the *emulated engine*,
which rounds and sums as tensor cores do. This notebook tries one or two of each; all figures of the papers have been
:doc:`measured again </experiments/index>` on a GPU.

QR on neural engines
--------------------

S. Zhang, E. Baharlouei, P. Wu, "High Accuracy Matrix Computations on Neural Engines",
`HPDC 2020 <https://doi.org/10.1145/3369583.3392685>`__. They factorize by recursive Gram-Schmidt (RGSQRF), with products in half
precision, and say of the result (their Figures 3 and 4):

1. the backward error is that of half precision, *whatever the condition number*;
2. orthogonality is lost as the condition number grows;
3. a second pass over Q brings it back.
"""

# %%
import matplotlib.pyplot as plt
import torch

import neula
from neula.algorithms.corrected import corrected_product
from neula.algorithms.orthogonal.reorthogonalize import reorthogonalize
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.engines import EmulatedEngine
from neula.io.matrices import random_matrix

half = EmulatedEngine(format="fp16")
u = half.format.u


def errors(A, Q, R):
    """Backward error and loss of orthogonality, in double precision."""
    A, Q, R = A.double(), Q.double(), R.double()
    norm = torch.linalg.matrix_norm
    lost = Q.T @ Q - torch.eye(Q.shape[1], dtype=torch.float64)
    return float(norm(A - Q @ R) / norm(A)), float(norm(lost, 2))


def matrix(kind, condition):
    return random_matrix(kind, 1024, 256, cond=condition, dtype=torch.float32)


conditions = [10.0**k for k in (0.5, 1, 1.5, 2, 2.5, 3)]
once, twice = [], []
for condition in conditions:
    A = matrix("arithmetic", condition)
    Q, R = rgsqrf(A, half, cutoff=64)
    once.append(errors(A, Q, R))
    twice.append(errors(A, *reorthogonalize(Q, R, half, cutoff=64)))

# %%
fig, axes = plt.subplots(2, 1, figsize=(5.2, 6.4))
for k, title in enumerate(("backward error", "loss of orthogonality")):
    one, two = ([row[k] for row in rows] for rows in (once, twice))
    axes[k].loglog(conditions, one, "o-", markersize=9, label="one pass")
    axes[k].loglog(conditions, two, "s-", markersize=4, label="two passes")
    axes[k].axhline(u, color="0.5", linestyle=":", label="u of fp16")
    axes[k].set_ylim(5e-5, 0.2)
    axes[k].set_title(title)
    axes[k].set_xlabel("condition number")
axes[0].legend()
plt.show()

# %%
# All three hold:

assert max(backward for backward, _ in once) < u
assert once[-1][1] > 10 * once[0][1]
assert max(lost for _, lost in twice) < 4 * u

# %%
# Claims about *speed* cannot be tried here, because an emulation has none. And a claim is about certain matrices:
# the paper takes singular values that are spread evenly. With one large singular value and all others small,
# orthogonality is gone much sooner.

for condition in (1e2, 1e3, 1e4):
    A = matrix("cluster_large", condition)
    Q, R = rgsqrf(A, half, cutoff=64)
    _, lost = errors(A, Q, R)
    print(f"condition {condition:.0e}: orthogonality lost to {lost:.2f}")

# %%
# That is why ``neula.qr`` does not decide by a condition number when a second pass is needed. It measures the Q that it has:

result = neula.qr(A, accuracy="fp16", engine="emulated")
for attempt in result.attempts:
    verdict = "accepted" if attempt.accepted else "rejected"
    print(f"{attempt.method}: {verdict}, {attempt.reason}")
assert result.converged
assert errors(A, result.Q, result.R)[1] < 4 * u

# %%
# Single precision from halves
# ----------------------------
#
# H. Ootomo, R. Yokota, "TSQR on TensorCores with error correction", 2021 (`their code <https://github.com/enp1s0/tsqr-tc>`__). They write each operand as a sum of two halves, :math:`A = A_1 + 2^{-11} A_2`. Then
#
# .. math::
#
#    A B \approx A_1 B_1 + 2^{-11} (A_2 B_1 + A_1 B_2) ,
#
# three products of halves for one of single precision. There is a catch. Tensor cores *truncate* when they add, always
# toward zero, which in a long sum cancels the gain. So neula has the unit add sixteen products at a time, and adds
# these sums in single precision.

core = EmulatedEngine(format="fp16", unit="h100")
ways = {
    "plain fp16": lambda a, b: core.gemm(core.operand(a), core.operand(b)),
    "corrected, summed in the unit": lambda a, b: corrected_product(
        a, b, core, run=len(b)
    ),
    "corrected, summed outside": lambda a, b: corrected_product(
        a, b, core, run=16
    ),
    "float32": torch.matmul,
}
sums = {name: [] for name in ways}
inner = [2**k for k in range(5, 13)]
for k in inner:
    a = random_matrix("uniform", 24, k, dtype=torch.float32, seed=1)
    b = random_matrix("uniform", k, 24, dtype=torch.float32, seed=2)
    exact = a.double() @ b.double()
    for name, multiply in ways.items():
        difference = multiply(a, b).double() - exact
        sums[name].append(float(difference.norm() / exact.norm()))

# %%
for name, values in sums.items():
    plt.loglog(inner, values, "o-", base=2, markersize=4, label=name)
plt.yscale("log", base=10)
plt.xlabel("length of the sums")
plt.ylabel("relative error")
plt.legend(loc="upper left", bbox_to_anchor=(0.0, 0.85))
plt.title("Errors of four products")
plt.show()

# %%
_, inside, outside, single = (values[-1] for values in sums.values())
print(f"summed in the unit: {inside / single:.0f} times the error of float32")
print(f"summed outside: {outside / single:.1f} times")
assert outside < inside / 3

# %%
# In neula this arithmetic is called ``fp16_cor``, and is what a GPU takes for ``accuracy="fp32"``.
#
# LU in half precision
# --------------------
#
# F. Lopez, T. Mary, "Mixed Precision LU Factorization on GPU Tensor Cores: Reducing Data Movement and Memory Footprint", 2022
# (`HAL <https://hal.science/hal-02937325>`__). They keep the *matrix* in half precision, so that less has to be moved, and
# ask how to round as seldom as possible. Their Algorithm 3.1 rounds a block at every update. Algorithm 5.2 sums all
# updates of a block in single precision and rounds once. ``neula.lu_factor`` knows them by number:

volta = EmulatedEngine(format="fp16", unit="v100")
orders = (48, 96, 192, 288)
variants = {"3.1": [], "5.2/5.1": []}
for n in orders:
    A = random_matrix("normal", n, n)
    for variant, values in variants.items():
        F = neula.lu_factor(A, variant, storage="fp16", engine=volta)
        residual = A[F.permutation] - F.L @ F.U
        values.append(float(residual.norm() / A.norm()))

# %%
for variant, values in variants.items():
    plt.plot(orders, values, "o-", label=f"Algorithm {variant}")
plt.ylim(bottom=0)
plt.xlabel("order")
plt.ylabel("residual")
plt.legend()
plt.title("Residuals of LU against the order")
plt.show()

# %%
assert variants["5.2/5.1"][-1] < variants["3.1"][-1] / 2

# %%
# Factors of three digits are enough where they are only the start of a refinement:

x = neula.lu_solve(F, A.sum(1))
print(f"factors in {F.storage}, error of x {float((x - 1).abs().max()):.0e}")
assert (x - 1).abs().max() < 1e-9

# %%
# The figures themselves
# ----------------------
#
# Every figure of these papers is a command, which measures on your machine, draws, and says for each claim whether it
# holds::
#
#     neula experiment qr-paper figure4
#
# :doc:`Experiments </experiments/index>` says what became of the claims on a GPU three generations later.
