r"""Mixed precision by hand
=======================

Tensor cores multiply numbers of three digits, and neula's answers have sixteen. This example shows how, on the *emulated
engine*, which computes on any computer what a tensor core would.

Numbers of three digits
-----------------------

Half precision (fp16) has 11 bits for the significand and 5 for the exponent: numbers are rounded by up to one part in 2048,
and nothing is above 65504.
"""

# %%
import matplotlib.pyplot as plt
import torch

import neula
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.algorithms.scaling import power_of_two_scales
from neula.engines import EmulatedEngine
from neula.io.matrices import random_matrix

half = EmulatedEngine(format="fp16")
print("unit roundoff", half.format.u)
print(half.operand(torch.tensor([[1 / 3, 1000.6, 70000.0, 1e-8]])))

# %%
# The last two are out of range: one became infinite, the other zero. So neula first multiplies columns by powers of two, which
# rounds nothing.

columns = torch.tensor([[1e6, 1e-9], [7e5, 3e-9]])
scales = power_of_two_scales(columns.abs().amax(0))
print(half.operand(columns * scales) / scales)

# %%
# Rounding in long sums
# ---------------------
#
# A tensor core multiplies halves exactly and adds some products at a time in single precision. Three ways to add:
#
# - to nearest: an ideal unit;
# - truncated: eight products at a time, as the Ampere generation does;
# - rounded to half precision after every eight.

ways = {
    "to nearest": EmulatedEngine(format="fp16", unit="ideal"),
    "truncated": EmulatedEngine(format="fp16", unit="a100"),
    "in half precision": EmulatedEngine(format="fp16", accumulate="fp16"),
}
lengths = [2**power for power in range(5, 14)]
errors = {name: [] for name in ways}
generator = torch.Generator().manual_seed(0)
for length in lengths:
    a = half.operand(torch.rand(16, length, generator=generator))
    b = half.operand(torch.rand(length, 16, generator=generator))
    exact = a.double() @ b.double()
    for name, engine in ways.items():
        error = (engine.gemm(a, b).double() - exact).abs() / exact
        errors[name].append(float(error.mean()))

# %%
for name, values in errors.items():
    plt.loglog(lengths, values, "o-", base=2, label=name)
plt.yscale("log", base=10)
plt.axhline(half.format.u, color="0.5", linestyle=":", label="u of fp16")
plt.xlabel("length of the sum")
plt.ylabel("mean relative error")
plt.legend()
plt.title("Errors of dot products")
plt.show()

# %%
# Truncation errors all have the same sign and add up, but stay below those of rounding the operands to half precision.
#
# A factorization of three digits
# -------------------------------
#
# Recursive Gram-Schmidt factorizes the left half of the columns, projects it out of the right half, and factorizes what is
# left. The projections are large products. A QR with a condition number of 100:

m, n = 1500, 200
A = random_matrix("geometric", m, n, cond=100)
b = A @ torch.ones(n, dtype=torch.float64) + 0.01 * torch.randn(
    m, generator=generator, dtype=torch.float64
)

Q, R = (factor.double() for factor in rgsqrf(A.float(), half, cutoff=32))
norm = torch.linalg.norm
print(f"residual      {norm(A - Q @ R) / norm(A):.1e}")
print(f"orthogonality {norm(Q.T @ Q - torch.eye(n)) / n**0.5:.1e}")

# %%
# The product :math:`Q R` is right to fp16, the columns of Q are orthogonal to two digits only. A solution from these factors
# alone has few digits:

exact = torch.linalg.lstsq(A, b).solution
direct = torch.linalg.solve_triangular(R, (Q.T @ b)[:, None], upper=True)[:, 0]
print(f"error of R^-1 Q^T b: {norm(direct - exact) / norm(exact):.1e}")

# %%
# R as a preconditioner
# ---------------------
#
# R is wrong in the fourth digit, but the columns of :math:`A R^{-1}` are nearly orthonormal. With :math:`y = R\,x`, solve
#
# .. math::
#
#    \min_y \| A R^{-1} y - b \| .
#
# With an exact R all singular values of :math:`A R^{-1}` would be 1. With this R they nearly are.

W = torch.linalg.solve_triangular(R, A, upper=True, left=False)
for name, matrix in (("$A$", A), ("$A R^{-1}$", W)):
    values = torch.linalg.svdvals(matrix)
    plt.semilogy(
        values, ".", label=f"{name}, condition {values[0] / values[-1]:.3g}"
    )
plt.xlabel("index")
plt.ylabel("singular value")
plt.legend()
plt.title("Singular values with and without $R$")
plt.show()

# %%
# Conjugate gradients then converge in a few steps. This is CGLS in double precision, preconditioned by R:


def cgls(A, b, R, steps):
    """Iterates of CGLS for min ||A x - b||, preconditioned by R."""

    def solve(T, v):
        upper = T is R
        return torch.linalg.solve_triangular(T, v[:, None], upper=upper)[:, 0]

    x, r = torch.zeros_like(b[: A.shape[1]]), b.clone()
    s = p = solve(R.T, A.T @ r)
    gamma = s @ s
    for _ in range(steps):
        t = solve(R, p)
        q = A @ t
        alpha = gamma / (q @ q)
        x, r = x + alpha * t, r - alpha * q
        s = solve(R.T, A.T @ r)
        gamma, before = s @ s, gamma
        p = s + gamma / before * p
        yield x


def error(x):
    return float(norm(A @ (x - exact)) / norm(A @ exact))


# %%
# With an R in several formats, and with none. bf16 has three bits less than fp16, so its R is eight times as coarse:

for name in ("fp32", "fp16", "bf16"):
    _, low = rgsqrf(A.float(), EmulatedEngine(format=name), cutoff=32)
    history = [error(x) for x in cgls(A, b, low.double(), 25)]
    plt.semilogy(
        range(1, 26), history, "o-", markersize=4, label=f"R in {name}"
    )
    assert min(history) < 1e-11
plain = [error(x) for x in cgls(A, b, torch.eye(n, dtype=torch.float64), 25)]
plt.semilogy(range(1, 26), plain, "--", label="without R")
plt.xlabel("iterations")
plt.ylabel("error of $A x$")
plt.legend()
plt.title("Error of each iteration")
plt.show()

# %%
# **The format decides how long it takes, not how accurate the answer is.** The iterations run in double precision, with A
# itself, and cost a few operations for each element of A. The factorization costs n of them, and is where tensor cores are
# ten times as fast.
#
# The curve of fp32 rises again at the end: CGLS updates its residual and never computes it anew, so rounding errors accumulate.
#
# The calculation in neula
# ------------------------
#
# neula restarts with a true residual before CGLS drifts off, measures when to stop, and computes a better R if this one is too
# inaccurate.

result = neula.lstsq(A, b, engine="emulated")
print(result)
assert result.converged
assert error(result.x) < 1e-12

# %%
# More: :doc:`Refinement </refinement>`, :doc:`Engines </engines>`, :doc:`Building blocks </api/algorithms>`.
