r"""How certificates work
=====================

neula accepts an answer only after measuring that answer. This notebook computes the measurements for a problem with a known
solution, and shows why one number is not enough. :doc:`Accuracy and certificates </accuracy-and-certificates>` has the definitions.

A problem with a known solution
-------------------------------

To see the error of a solution one has to know the exact one. So take a matrix of integers, below :math:`2^{40}`, and a
solution of small integers: then :math:`b = A x` is an integer below :math:`2^{53}`, computed and stored without any rounding.
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
# The computed ``x`` is not the solution of :math:`A x = b`. But it is the solution of another problem,
# :math:`(A + E)\,x = b + f`, and there is a formula for the smallest E and f that make it so (Rigal and Gaches 1967). With
# :math:`r = b - A x` the relative size of the smallest change is
#
# .. math::
#
#    \eta = \frac{\|r\|}{\|A\| \, \|x\| + \|b\|} .

r = b - A @ x
size = np.linalg.norm(A, 2) * np.linalg.norm(x) + np.linalg.norm(b)
eta = np.linalg.norm(r) / size
print(f"backward error {eta:.1e}")

# %%
# These changes can be written down, so the formula can be checked. E has rank one:

E = np.outer(r, x) / np.linalg.norm(x) * np.linalg.norm(A, 2) / size
f = -r * np.linalg.norm(b) / size
norm = np.linalg.norm
print(f"size of E, relative to A: {norm(E, 2) / norm(A, 2):.1e}")
print(f"size of f, relative to b: {norm(f) / norm(b):.1e}")
print(f"what is left of r: {norm(r - E @ x + f) / norm(r):.1e}")

# %%
# The changes are of the size of rounding errors. Had A come from measurements with six digits, they
# would be far beyond what is known of A. This is the sense in which LU with pivoting is *backward stable*, and it is what
# neula means by accuracy: **the answer is exact for data that differ from yours by rounding errors of the format asked
# for.** A few roundoffs are allowed, in another norm, the one of the largest row sum:

result = neula.solve(A, b)
r = b - A @ result.x
by_hand = abs(r).max() / (
    abs(A).sum(1).max() * abs(result.x).max() + abs(b).max()
)
print(f"backward error of neula's x, by hand {by_hand:.1e}")
print(f"accepted is anything up to {result.tolerance:.1e}")
assert result.converged
assert by_hand < result.tolerance

# %%
# An error that the residual does not see
# ---------------------------------------
#
# Now perturb the exact solution, by one part in a hundred million, in two directions. One is random. The other is the singular
# vector of the smallest singular value, the direction along which A hardly changes anything.

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
# Both are wrong by the same amount. The second has a backward error as small as that of a good algorithm, so the
# residual does not show the error. The condition number does. An error in x may be larger than the backward error by
#
# .. math::
#
#    \kappa = \frac{\sigma_{\max}}{\sigma_{\min}} ,
#
# of A with its columns brought to length 1, so that units do not matter.

columns = np.linalg.norm(A, axis=0)
print(f"condition number {np.linalg.cond(A / columns):.1e}")
print(f"neula's estimate {result.condition:.1e}")

# %%
# Forward error: a bound, from both
# ---------------------------------
#
# Backward error and condition number together bound the error of x. That is the *formula*, and
# it is pessimistic: it must hold for the worst right-hand side. The other way is to *measure*: compute the residual in
# twice the working precision, solve for an update, and take the last update, which is not worth applying, for the error.
# neula does the second for very small problems, and for others if you say ``certify="forward"``.
#
# Here are both compared with the true error, for least-squares problems of growing condition. A bound must never be below the
# truth:

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
# In the upper picture refinement stopped when the backward error was small, and the bound is by formula. In the lower one it
# went on until the digits of x were right. These integers fit into double precision, so they come out without any error;
# what is below :math:`10^{-18}` is drawn there. Everywhere the bound is above the truth, as the last line of the loop asserts.
#
# The chain
# ---------
#
# How does a factorization in half precision end in an answer like these? By trying, measuring, and going on. The emulated
# engine has the units of a GPU on any computer, so one can watch what happens as problems become harder:

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
# For :math:`A = Q R` the measure is :math:`\|A - Q R\| / \|A\|`. Computing it takes as long as a factorization. So
# it is *estimated*: four random vectors, the columns of G, are multiplied by A and by :math:`Q R`, and the difference is
# compared. How far can that be off? Take an error matrix and try it five thousand times. The worst case is an error in one
# single direction, the best case one that is distributed over all of them.

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
# So it is an estimate and not a bound: off by more than a factor of three in two cases of a hundred at
# the worst, and usually within some percent. The estimate for a real factorization, compared with the truth:

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
