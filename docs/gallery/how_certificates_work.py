r"""How certificates work
=====================

neula accepts an answer only after measuring it. This example computes the measurements for a problem with a known
solution, and shows why one number is not enough. :doc:`Accuracy and certificates </accuracy-and-certificates>` has the definitions.

A problem with a known solution
-------------------------------

Take a matrix of integers below :math:`2^{40}` and a solution of small integers: then :math:`b = A x` is an integer below
:math:`2^{53}`, stored without any rounding.
"""

# %%
import matplotlib.pyplot as plt
import numpy as np

import neula
from neula.io.matrices import random_matrix


def integer_problem(m, n, condition):
    """A and b of integers, with a solution of integers."""
    A = random_matrix("geometric", m, n, cond=condition).numpy()
    A = np.round(A * 2.0**40)
    x = np.random.default_rng(0).integers(1, 10, n).astype(float)
    return A, A @ x, x


A, b, exact = integer_problem(100, 100, 1e8)
x = np.linalg.solve(A, b)

# %%
# Backward error: for which problem is this right?
# ------------------------------------------------
#
# The computed ``x`` is the exact solution of another problem, :math:`(A + E)\,x = b + f`. The relative size of the smallest
# E and f is, with :math:`r = b - A x` (Rigal and Gaches 1967),
#
# .. math::
#
#    \eta = \frac{\|r\|}{\|A\| \, \|x\| + \|b\|} .

norm = np.linalg.norm
r = b - A @ x
size = norm(A, 2) * norm(x) + norm(b)
eta = norm(r) / size
print(f"backward error {eta:.1e}")

# %%
# The change is of the size of rounding errors. This is the sense in which LU with pivoting is *backward stable*, and what
# neula means by accuracy: **the answer is exact for data that differ from yours by rounding errors of the requested
# format.** neula measures it in the norm of the largest row sum:

result = neula.solve(A, b)
r = b - A @ result.x
by_hand = abs(r).max() / (
    abs(A).sum(1).max() * abs(result.x).max() + abs(b).max()
)
print(f"backward error of neula's x, by hand {by_hand:.1e}")
print(f"accepted up to {result.tolerance:.1e}")
assert result.converged
assert by_hand < result.tolerance

# %%
# An error that the residual does not see
# ---------------------------------------
#
# Now perturb the exact solution by one part in a hundred million, in two directions: a random one, and the singular vector
# of the smallest singular value, along which A hardly changes anything.

U, s, Vt = np.linalg.svd(A)
directions = {
    "random": np.random.default_rng(1).standard_normal(100),
    "smallest": Vt[-1],
}
for name, direction in directions.items():
    perturbed = exact + 1e-8 * np.linalg.norm(
        exact
    ) * direction / np.linalg.norm(direction)
    r = b - A @ perturbed
    print(f"{name:8}: error 1.0e-08, backward error {norm(r) / size:.1e}")

# %%
# Both errors are equal, but the second has a backward error as small as that of a good algorithm: the residual does not show
# it. The error of x may be larger than the backward error by the condition number
#
# .. math::
#
#    \kappa = \frac{\sigma_{\max}}{\sigma_{\min}} ,
#
# of A with columns of norm 1, so that units do not matter.

columns = np.linalg.norm(A, axis=0)
print(f"condition number {np.linalg.cond(A / columns):.1e}")
print(f"neula's estimate {result.condition:.1e}")

# %%
# Forward error: a bound on the error
# -----------------------------------
#
# Backward error and condition number together bound the error of x. This *formula* holds for the worst right-hand side and is
# pessimistic. The error can also be *measured*: compute the residual in twice the working precision and solve for one more
# update; its size is the error. neula measures small problems, and others with ``certify="forward"``. Both bounds, compared
# with the true error of least-squares problems:

conditions = 10.0 ** np.arange(1, 11)
measured = {"backward": [], "forward": []}
for condition in conditions:
    A, b, exact = integer_problem(400, 60, condition)
    D = np.linalg.norm(A, axis=0)
    for certify, pairs in measured.items():
        result = neula.lstsq(A, b, certify=certify)
        error = np.linalg.norm(D * (result.x - exact)) / np.linalg.norm(
            D * exact
        )
        pairs.append((error, result.forward_error))
        assert error <= result.forward_error

# %%
fig, axes = plt.subplots(2, 1, figsize=(5.2, 6.4), sharey=True)
for axis, (certify, pairs) in zip(axes, measured.items(), strict=True):
    errors, bounds = np.maximum(pairs, 1e-18).T
    axis.loglog(conditions, bounds, "s-", label="bound on the error")
    axis.loglog(conditions, errors, "o-", label="true error")
    axis.set_title(f'certify="{certify}"')
    axis.set_xlabel("condition number")
axes[1].legend(loc="upper left")
plt.show()

# %%
# Above, refinement stopped when the backward error was small, and the bound is by formula. Below, it continued until the
# digits of x were right: these integers fit into double precision, so their error is zero. Errors below
# :math:`10^{-18}` are drawn there.
#
# The chain
# ---------
#
# How does a factorization in half precision lead to an answer like these? neula tries, measures, and continues with more
# precision. The *emulated engine* computes as a GPU does, on any computer:

for condition in (1e2, 1e4, 1e6):
    A = random_matrix("geometric", 1500, 150, cond=condition)
    result = neula.lstsq(A, A.sum(1), engine="emulated")
    print(f"condition {condition:.0e}")
    for attempt in result.attempts:
        verdict = "accepted" if attempt.accepted else "rejected"
        print(f"   {attempt.method:24} {verdict}: {attempt.reason}")
    assert result.converged

# %%
# Half precision is enough for the first problem and too inaccurate for the last; the measurements decide.
#
# The certificate of a QR: four random vectors
# --------------------------------------------
#
# For :math:`A = Q R` the measure is :math:`\|A - Q R\| / \|A\|`, which would take as long as the factorization. So it is
# *estimated* with four random vectors, the columns of G, multiplied by A and by :math:`Q R`. How far can that be off? The
# worst case is an error in a single direction, the best case one that is distributed over all of them.

rng = np.random.default_rng(2)
ratios = {
    "one direction": np.sqrt(
        (rng.standard_normal((5000, 4, 1)) ** 2).sum((1, 2)) / 4
    ),
    "100 directions": np.sqrt(
        (rng.standard_normal((5000, 4, 100)) ** 2).sum((1, 2)) / 400
    ),
}
below = (ratios["one direction"] < 1 / 3).mean()
print(f"one direction: below a third of the truth in {below:.1%} of all cases")
assert 0.01 < below < 0.04

# %%
for name, values in ratios.items():
    plt.hist(
        values,
        bins=np.linspace(0, 2.2, 60),
        alpha=0.7,
        label=f"error in {name}",
    )
plt.axvline(1 / 3, linestyle="--", color="0.5")
plt.xlabel("estimate / truth")
plt.yticks([])
plt.legend()
plt.title("Estimate divided by truth")
plt.show()

# %%
# It is off by more than a factor of three in two cases of a hundred at the worst. For a real factorization:

A = random_matrix("geometric", 1000, 200, cond=100)
factors = neula.qr(A, accuracy="fp16", engine="emulated")
truth = np.linalg.norm(A - factors.Q @ factors.R) / np.linalg.norm(A)
certificate = factors.certificate
print(f"estimated {certificate.residual:.2e}")
print(f"true      {truth:.2e}")
print(f"accepted up to {certificate.residual_bound:.2e}")
assert 1 / 3 < certificate.residual / truth < 3

# %%
# :doc:`Mixed precision by hand <mixed_precision_by_hand>` goes on from here: how half precision can be enough.
