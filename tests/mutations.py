"""Mutations by meaning: small changes of the sources that make answers wrong, and the tests that notice them.

``python -m tests.mutations`` applies each to a copy of ``src``, runs its tests there, and lists which were
caught. A mutation that is missed is a missing test.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SECONDS = 1800
"""Limit for the tests of one mutation; a loop without an end counts as caught."""


class Mutation(NamedTuple):
    """A change of one file of ``src/neula``, in which ``old`` occurs once."""

    name: str
    path: str
    old: str
    new: str
    why: str
    tests: str
    """Paths below ``tests``, separated by blanks."""


_CERTIFICATES = [
    Mutation(
        "residual bound doubled", "certificates/bounds.py",
        "return 3 * target.u * (2 + math.log2(n))", "return 6 * target.u * (2 + math.log2(n))",
        "accuracy is promised by this bound", "certificates/test_bounds.py",
    ),
    Mutation(
        "orthogonality bound doubled", "certificates/bounds.py",
        "return 2 * residual_bound(target, n)", "return 4 * residual_bound(target, n)",
        "accuracy is promised by this bound", "certificates/test_bounds.py",
    ),
    Mutation(
        "bound of systems doubled", "certificates/bounds.py",
        "return 4 * target.u + math.sqrt(n) * FP64.u", "return 8 * target.u + 2 * math.sqrt(n) * FP64.u",
        "accuracy is promised by this bound", "certificates/test_bounds.py",
    ),
    Mutation(
        "bound of least squares doubled", "certificates/bounds.py",
        "return 8 * target.u + 8 * math.sqrt(n) * FP64.u", "return 16 * target.u + 8 * math.sqrt(n) * FP64.u",
        "accuracy is promised by this bound", "certificates/test_bounds.py",
    ),
    Mutation(
        "accuracy as a number taken twice as coarse", "certificates/bounds.py",
        "bound(target) <= error:", "bound(target) <= 2 * error:",
        "the bound must not exceed the number asked for", "test_accuracy.py",
    ),
    Mutation(
        "condition limit doubled", "certificates/verdict.py",
        "1 / (NEARLY * (rcond", "2 / (NEARLY * (rcond",
        "beyond it, the rank with rcond is not proven", "certificates/test_bounds.py",
    ),
    Mutation(
        "doubt ignored by the verdict", "certificates/verdict.py",
        "(evidence.doubtful, 0.0),", "(evidence.doubtful, 1.0),",
        "an answer in doubt is not accepted", "certificates/test_verdict.py",
    ),
    Mutation(
        "forward error ignored by the verdict", "certificates/verdict.py",
        "(evidence.forward_error, self.forward_error),", "(0 * evidence.forward_error, self.forward_error),",
        "no digit may be right", "certificates/test_verdict.py",
    ),
    Mutation(
        "condition number forgotten in Wedin's factor", "certificates/forward_error.py",
        "where(ratio != 0, (condition + 1) * ratio, 0.0)", "where(ratio != 0, ratio, 0.0)",
        "with large residuals the square of the condition number counts",
        "certificates/test_evidence_functions.py",
    ),
    Mutation(
        "error left by the last update is its rate", "certificates/forward_error.py",
        "left = enlarged(rate, rate)", "left = rate",
        "the geometric series counts", "certificates/test_evidence_functions.py",
    ),
    Mutation(
        "slow convergence trusted", "certificates/forward_error.py",
        "return where(rate <= MAX_RATE, error, math.inf)", "return where(rate <= 1.0, error, math.inf)",
        "updates that shrink slowly do not show errors", "certificates/test_evidence_functions.py",
    ),
    Mutation(
        "rounding of x forgotten", "certificates/forward_error.py",
        "return error * (1 + rounding) + rounding", "return error",
        "x in a narrow dtype has its rounding error", "certificates/test_evidence_functions.py",
    ),
    Mutation(
        "estimate of the 2-norm without its margin", "certificates/orthogonality.py",
        "else part * QUANTILES[vectors] ** -0.5", "else 1.0",
        "random vectors underestimate the norm", "certificates/test_orthogonality.py",
    ),
    Mutation(
        "too few power iterations", "certificates/orthogonality.py",
        "return float(t**-0.5)", "return 1.0",
        "a power method that ends early shows less than the norm", "certificates/test_orthogonality.py",
    ),
    Mutation(
        "scale of the columns not undone", "certificates/backward_error.py",
        "norm(x / scale.columns[:, None], dim=0)", "norm(x * scale.columns[:, None], dim=0)",
        "||A D|| ||D^-1 x|| is a norm of the problem that is solved", "algorithms/test_refinement.py",
    ),
    Mutation(
        "smallest of the backward errors over scalings", "certificates/backward_error.py",
        "return errors.amax(0).nan_to_num", "return errors.amin(0).nan_to_num",
        "the error in the worst scaling counts", "algorithms/test_iterative_refinement.py systems",
    ),
    Mutation(
        "backward error 0 of a solution that is not finite", "certificates/backward_error.py",
        "errors.amax(0).nan_to_num(math.inf, math.inf)", "errors.amax(0).nan_to_num(0.0, math.inf)",
        "NaN must never be accepted", "algorithms/test_iterative_refinement.py systems",
    ),
    Mutation(
        "gap between singular values ignored", "certificates/rank.py",
        "if kept < GAP * float(dropped[0]):", "if kept < float(dropped[0]):",
        "a small change of A changes the rank", "least_squares/test_rank.py test_lstsq.py",
    ),
    Mutation(
        "degrees of freedom of the F test", "certificates/rank.py",
        "freedom = parts * (rows - rank) - count", "freedom = parts * rows",
        "few rows are explained by chance", "least_squares/test_rank.py test_lstsq.py",
    ),
    Mutation(
        "best right-hand side of the componentwise error", "certificates/lu.py",
        "torch.where(residual == 0, 0.0, residual / size).max())",
        "torch.where(residual == 0, 0.0, residual / size).min())",
        "the worst component counts", "src/neula/certificates/lu.py algorithms/test_lu_variants.py",
    ),
    Mutation(
        "errors of a sum without growth", "certificates/lu.py",
        "return count * u / (1 - count * u) if", "return count * u if",
        "gamma_k = k u / (1 - k u)", "certificates/test_bounds.py",
    ),
    Mutation(
        "sign of a singular vector pair", "certificates/polar.py",
        "lowest >= -SLIGHTLY * highest", "lowest >= -2 * highest",
        "U with a wrong sign has a symmetric H that is not positive",
        "algorithms/test_polar_iteration.py test_polar.py",
    ),
    Mutation(
        "singular values of U below 1", "certificates/polar.py",
        "below = 1 - (1 - largest).clamp_min(0.0).sqrt()", "below = 0 * largest",
        "U lacks a direction", "algorithms/test_polar_iteration.py test_polar.py",
    ),
    Mutation(
        "missed singular values accepted", "certificates/low_rank.py",
        "(self.residual, self.bound), (self.missed, self.bound)",
        "(self.residual, self.bound), (0.0, self.bound)",
        "triplets of others than the largest singular values", "test_low_rank_certificate.py test_svd.py",
    ),
    Mutation(
        "random vectors see too much", "certificates/low_rank.py",
        "math.sqrt(2 * (missed * math.factorial(half)) ** (1 / half))", "math.sqrt(vectors)",
        "the bound is to fail once in a million", "test_low_rank_certificate.py test_svd.py",
    ),
    Mutation(
        "loss of orthogonality halved", "certificates/qr.py",
        "lost = h - qqh\n", "lost = (h - qqh) / 2\n",
        "the certificate measures I - Q^T Q",
        "test_accuracy.py test_certified_qr.py",
    ),
    Mutation(
        "2-norm ignored in certificates of QR", "certificates/qr_evidence.py",
        "return self._in_usual_norms & (self.orthogonality_2norm <= self.orthogonality_2norm_bound)",
        "return self._in_usual_norms",
        "one bad direction of Q among thousands",
        "certificates/test_orthogonality.py test_certified_qr.py test_qr.py",
    ),
    Mutation(
        "backward error with bounds halved", "certificates/kkt.py",
        "size, longer = self.image + self.b,", "size, longer = 2 * (self.image + self.b),",
        "errors are relative to B and b", "src/neula/certificates/kkt.py bounded/test_forward_errors.py",
    ),
]  # fmt: skip

_ALGORITHMS = [
    Mutation(
        "off-diagonal of the Lanczos matrix", "algorithms/krylov/cgls.py",
        "off = beta[:-1].sqrt() / alpha[:-1]", "off = beta[:-1] / alpha[:-1]",
        "the smallest singular value comes from it", "algorithms/test_refinement.py",
    ),
    Mutation(
        "CGLS stops on the square root", "algorithms/krylov/cgls.py",
        "(gamma <= self.preconditioned.square())", "(gamma <= self.preconditioned)",
        "gamma is the square of a norm", "algorithms/test_refinement.py",
    ),
    Mutation(
        "sign of the residual in CGLS", "algorithms/krylov/cgls.py",
        "torch.addcmul(residual, alpha, image, value=-1)", "torch.addcmul(residual, alpha, image)",
        "r - alpha A p", "algorithms/test_refinement.py",
    ),
    Mutation(
        "row error of minimum-norm solutions halved", "algorithms/krylov/refinement.py",
        "over(of_residual, rows.norm * norm(x) + of_rhs)",
        "over(of_residual, 2 * (rows.norm * norm(x) + of_rhs))",
        "rows in small units count as much", "algorithms/test_refinement.py",
    ),
    Mutation(
        "refinement stops at once", "algorithms/krylov/driver.py",
        "columns = columns[goes_on(errors, before)]",
        "columns = columns[goes_on(errors, before) & (before > 1e300)]",
        "it goes on while errors shrink", "algorithms/test_driver.py algorithms/test_iterative_refinement.py",
    ),
    Mutation(
        "worse updates kept", "algorithms/krylov/driver.py",
        "better = (now < then) | ((now == then) & better)",
        "better = (now > then) | ((now == then) & better)",
        "the best solution is kept", "algorithms/test_driver.py algorithms/test_iterative_refinement.py",
    ),
    Mutation(
        "projection in coordinates taken for a norm", "algorithms/krylov/refinement.py",
        "columns.mT)[0]\n        projected = solve_rt(r, gradient) / scale.smallest",
        "columns.mT)[0]\n        projected = solve_rt(r, gradient)",
        "||R^-T A^T r|| may be smaller than ||P r||", "algorithms/test_refine_forward.py",
    ),
    Mutation(
        "scale of right-hand sides not undone", "algorithms/elimination/equilibrate.py",
        "self.factors.solve(scaled * size) * self.scales.columns[:, None] / size",
        "self.factors.solve(scaled * size) * self.scales.columns[:, None]",
        "b is scaled before it is rounded", "algorithms/test_equilibrate.py",
    ),
    Mutation(
        "transposed solve with the scales of the columns", "algorithms/elimination/equilibrate.py",
        "* self.scales.rows[:, None] / size", "* self.scales.columns[:, None] / size",
        "the scales change places", "algorithms/test_equilibrate.py",
    ),
    Mutation(
        "third pass of re-orthogonalization left out", "algorithms/orthogonal/reorthogonalize.py",
        "FULL_RANK = 0.5", "FULL_RANK = 0.0",
        "Q that was dependent needs a third pass", "algorithms/test_reorthogonalize.py test_qr.py",
    ),
    Mutation(
        "correction of a Q that is far from orthonormal", "algorithms/orthogonal/reorthogonalize.py",
        "small = torch.linalg.matrix_norm(u_t) < largest",
        "small = torch.linalg.matrix_norm(u_t) < 100 * largest",
        "its series does not converge there", "algorithms/test_reorthogonalize.py",
    ),
    Mutation(
        "variables that meet their bound stay free", "algorithms/bounded/active_set.py",
        "meets = part <= length", "meets = part < length",
        "the first that meets its bound is held there", "bounded",
    ),
    Mutation(
        "wrong sign of a gradient at the upper bound", "algorithms/bounded/free_sets.py",
        "torch.where(x >= self.high, gradient.clamp(max=0.0), gradient)",
        "torch.where(x >= self.high, gradient.clamp(min=0.0), gradient)",
        "a gradient that pushes against the bound is right", "bounded",
    ),
    Mutation(
        "steps that raise the cost taken", "algorithms/nonlinear/levenberg_marquardt.py",
        "better = (ratio > WORTH).nonzero()[:, 0]", "better = (ratio > -1.0).nonzero()[:, 0]",
        "the cost never grows", "nonlinear",
    ),
    Mutation(
        "fits stop early", "algorithms/nonlinear/levenberg_marquardt.py",
        "small = (promised <= tolerances.ftol * cost)", "small = (promised <= 1e6 * tolerances.ftol * cost)",
        "the cost would still shrink", "nonlinear/test_steps.py",
    ),
    Mutation(
        "scale of a loss", "algorithms/nonlinear/losses.py",
        "0.5 * (self.scale**2 * self.rho", "0.5 * (self.scale * self.rho",
        "rho is applied to squares in units of f_scale", "nonlinear",
    ),
    Mutation(
        "second triangle of a Cholesky solve not transposed", "algorithms/elimination/cholesky_factor.py",
        "in_double(self.solver.mH.solve(x))", "in_double(self.solver.solve(x))",
        "L L^H x = b", "algorithms/test_cholesky.py systems/test_definite.py",
    ),
    Mutation(
        "padding of a butterfly without a diagonal", "algorithms/elimination/butterfly.py",
        "a.diagonal()[self.n :] = size", "a.diagonal()[self.n :] = 0",
        "the padded matrix must be regular", "algorithms/test_butterfly.py",
    ),
    Mutation(
        "smallest singular value overestimated", "algorithms/spectra/condition.py",
        "torch.where(regular, growth.rsqrt(), 0.0)", "torch.where(regular, 8 * growth.rsqrt(), 0.0)",
        "condition numbers would be eight times too small", "algorithms/test_condition.py",
    ),
    Mutation(
        "rank off by one", "algorithms/spectra/numerical_rank.py",
        "error[doubtful])[:, None]).sum(1)", "error[doubtful])[:, None]).sum(1) + 1",
        "the number of singular values above the threshold", "algorithms/test_numerical_rank.py test_orth.py",
    ),
    Mutation(
        "threshold of ranks forgets the error of R", "algorithms/spectra/numerical_rank.py",
        "(s > torch.maximum(rcond * s[:, 0], error[doubtful])[:, None])", "(s > (rcond * s[:, 0])[:, None])",
        "singular values below the residual are noise", "algorithms/test_numerical_rank.py test_orth.py",
    ),
    Mutation(
        "product not split exactly", "algorithms/scaling.py",
        "large = x * (2.0**27 + 1)", "large = x * (2.0**30 + 1)",
        "Dekker's halves have 26 bits", "algorithms/test_scaling.py least_squares/test_scaled.py",
    ),
]  # fmt: skip

_PROBLEMS = [
    Mutation(
        "weights squared", "pipeline/gradients.py",
        "a, b = factors * a, factors * b", "a, b = factors**2 * a, factors**2 * b",
        "rows are multiplied by their weights", "test_lstsq.py",
    ),
    Mutation(
        "doubt of systems ignored", "problems/systems/system.py",
        "accepted = self.limits.accept(evidence) & (not answer.doubt)",
        "accepted = self.limits.accept(evidence)",
        "a link that doubts its answer is not accepted", "systems/test_direct.py",
    ),
    Mutation(
        "units of the unknowns not undone", "problems/systems/system.py",
        "self._given.backward_error(shift(y, -self._relative.mT)",
        "self._given.backward_error(shift(y, self._relative.mT)",
        "backward errors count in the given scaling, too", "systems/test_direct.py",
    ),
    Mutation(
        "inverse underestimated", "problems/systems/evidence.py",
        "\nUNCERTAIN = 3.0", "\nUNCERTAIN = 0.003",
        "digits would be claimed that are not there", "systems campaign",
    ),
    Mutation(
        "rounding of the residual forgotten", "problems/systems/evidence.py",
        "+ torch.where(size > 0, rounding, 0.0)", "+ torch.where(size > 0, 0 * rounding, 0.0)",
        "a residual in working precision may vanish", "systems/test_evidence.py",
    ),
    Mutation(
        "solutions of zero settled at once", "problems/least_squares/problem.py",
        "evidence.forward_error <= self.enough and zero == 0)", "evidence.forward_error <= self.enough)",
        "the gradient may have underflowed", "least_squares/test_many.py",
    ),
    Mutation(
        "variance by the number of rows", "problems/least_squares/regression.py",
        "free = data - effective if", "free = data - 0 * effective if",
        "m - n degrees of freedom are left", "least_squares/test_statistics.py",
    ),
    Mutation(
        "quantile of one side", "problems/least_squares/regression.py",
        "free = 0.5 + level / 2, self", "free = level, self",
        "intervals have two sides", "least_squares/test_statistics.py",
    ),
    Mutation(
        "changed arrays not noticed by statistics", "problems/least_squares/regression.py",
        "UNCHANGED = 1e-10", "UNCHANGED = 1e10",
        "A was overwritten after the solution", "least_squares/test_statistics.py",
    ),
    Mutation(
        "constraints beyond rounding taken for dependent", "problems/least_squares/constrained.py",
        "torch.frexp(smaller)[1] - 54", "torch.frexp(smaller)[1] - 34",
        "rows that differ by more than half a unit in the last place", "least_squares/test_constrained.py",
    ),
    Mutation(
        "side of the lower bound", "problems/bounded/links.py",
        "torch.where(found.x <= low, -1, 0)", "torch.where(found.x <= low, 1, 0)",
        "the sign of active_mask, and of the gradient there", "bounded",
    ),
    Mutation(
        "known errors of solutions by factors", "problems/systems/lu_solve.py",
        "float(not solution.known))", "0.0)",
        "a condition number that is only bounded from below", "test_lu_solve.py systems",
    ),
    Mutation(
        "generalized cross validation with a sign", "problems/least_squares/ridge_path.py",
        "relative = relative if power == 1 else relative * (2 + relative)", "relative = relative",
        "the error of a square is twice that of the root", "least_squares/test_ridge_path.py",
    ),
    Mutation(
        "NaN outside of the triangle", "problems/definite/cholesky.py",
        "read = given.triu() if upper else given.tril()", "read = given",
        "only one triangle is read", "test_cholesky_function.py",
    ),
    Mutation(
        "columns without full rank not reported", "problems/orthogonal/orth.py",
        "deficient = (accepted & (ranks < min(m, n))).cpu()", "deficient = (accepted & (ranks < 0)).cpu()",
        "orth spans more than the range", "test_orth.py",
    ),
]  # fmt: skip

_PIPELINE = [
    Mutation(
        "levels of a penalty in the wrong order", "pipeline/chain.py",
        "for mine, other in zip(new[::-1], old[::-1], strict=True):",
        "for mine, other in zip(new, old, strict=True):",
        "whether it was accepted counts first", "pipeline/test_chain.py",
    ),
    Mutation(
        "rejected answers marked accepted", "pipeline/chain.py",
        "self.accepted[places] = verdict.accepted[better]", "self.accepted[places] = True",
        "a better answer may still be wrong", "pipeline/test_chain.py",
    ),
    Mutation(
        "sign in the gradient of QR", "pipeline/derivatives.py",
        "m = exact_matmul(r, dr.mH) - exact_matmul(dq.mH, q)",
        "m = exact_matmul(r, dr.mH) + exact_matmul(dq.mH, q)",
        "M = R dR^H - dQ^H Q", "test_gradients.py",
    ),
    Mutation(
        "gradient of a system without its transpose", "pipeline/derivatives.py",
        "y = solve(in_double(a).mH, in_double(dx))", "y = solve(in_double(a), in_double(dx))",
        "A^H y = dx", "test_gradients.py",
    ),
    Mutation(
        "gradient of Cholesky factors doubled", "pipeline/derivatives.py",
        "return 0.5 * solve(lower,", "return 1.0 * solve(lower,",
        "both triangles of A are changed", "test_gradients.py test_cholesky_function.py",
    ),
    Mutation(
        "axes of a broadcast batch not put back", "pipeline/shapes.py",
        "permute(back)", "permute(order)",
        "solutions of a batch change places", "test_shapes.py",
    ),
    Mutation(
        "warning not given", "pipeline/call.py",
        "report_missed(what, why, result, indices, strict=self.strict, no_digits=no_digits)",
        "del result, no_digits",
        "an answer that misses its accuracy says so", "test_accuracy.py test_errors.py",
    ),
    Mutation(
        "changed rows not noticed", "pipeline/streaming.py",
        "if found != known:", "if False:",
        "passes over rows must see the same rows", "streaming",
    ),
    Mutation(
        "row of NaN counted within its block", "pipeline/streaming.py",
        "[where[0] + first, *where[1:]]", "[where[0], *where[1:]]",
        "the message names the row of the whole matrix", "streaming",
    ),
]  # fmt: skip

_AROUND = [
    Mutation(
        "Matrix Market by rows", "io/market.py",
        "np.ascontiguousarray(matrix.T)", "np.ascontiguousarray(matrix)",
        "the format is column-major", "test_files.py",
    ),
    Mutation(
        "NaN in a file let through", "io/text.py",
        'missing != "nan" and np.isnan(values).any()', "False",
        "missing values are refused unless asked for", "test_files.py test_tables.py",
    ),
    Mutation(
        "column off by one in a message", "io/text.py",
        "line {number}, column {i + 1}\", whole)", "line {number}, column {i}\", whole)",
        "columns are counted from 1", "test_files.py test_tables.py test_hostile_files.py",
    ),
    Mutation(
        "minus ignored in formulas", "io/expressions.py",
        "ast.USub: operator.neg", "ast.USub: operator.pos",
        "-x is not x", "test_expressions.py test_fit_command.py",
    ),
    Mutation(
        "largest exact integer doubled", "io/integers.py",
        "WHOLE = 2**53", "WHOLE = 2**54",
        "2**53 + 1 has no float64", "test_files.py test_inputs.py test_datasets.py",
    ),
    Mutation(
        "condition number of test matrices", "io/matrices.py",
        "return 1 - position * (1 - 1 / cond)", "return 1 - position * (1 - 2 / cond)",
        "the smallest singular value is 1 / cond", "test_matrices.py",
    ),
    Mutation(
        "inaccurate answers handed on", "compat/numpy.py",
        "or is_accurate_solution(", "or not is_accurate_solution(",
        "of an ill-conditioned A, LAPACK's x would be returned", "compat",
    ),
    Mutation(
        "upper triangle ignored", "compat/numpy.py",
        "upper=upper).factor", "upper=False).factor",
        "np.linalg.cholesky(a, upper=True)", "compat",
    ),
    Mutation(
        "systems from the right not transposed", "compat/torch.py",
        "neula.solve(A.mT, B.mT)", "neula.solve(A, B.mT)",
        "X A = B", "compat",
    ),
    Mutation(
        "errors of a peer swallowed", "compat/drop_in.py",
        "                raise refused\n", "                return None\n",
        "what NumPy refuses is refused", "compat",
    ),
    Mutation(
        "fit that missed its accuracy without a warning", "compat/scipy/optimize.py",
        "    if missed:\n        warn(missed, neula.AccuracyWarning)\n    return result",
        "    return result",
        "the caller of SciPy's signature is warned", "compat",
    ),
    Mutation(
        "penalty of ridge regression squared", "compat/sklearn/ridge.py",
        "damp=alpha**0.5, weights", "damp=alpha, weights",
        "alpha is the square of damp", "compat/test_sklearn.py",
    ),
    Mutation(
        "errors of the first target alone", "compat/sklearn/ridge.py",
        "errors.mean(1), errors", "errors[:, 0], errors",
        "one alpha for all targets", "compat/test_sklearn.py",
    ),
]  # fmt: skip

_COMPLEX = [
    Mutation(
        "conjugate forgotten in the loss of orthogonality", "certificates/orthogonality.py",
        "some.mH, some, alpha=-1.0", "some.mT, some, alpha=-1.0",
        "I - Q^H Q", "certificates/test_orthogonality.py",
    ),
    Mutation(
        "conjugate forgotten in Gram matrices", "engines/formats.py",
        "return wide.mH @ wide", "return wide.mT @ wide",
        "A^H A is Hermitian, A^T A is not", "complex/test_qr.py complex/test_lstsq.py",
    ),
    Mutation(
        "conjugate forgotten in seminormal equations", "algorithms/krylov/batched_lstsq.py",
        "is None else self._inverse.mH @ g", "is None else self._inverse.mT @ g",
        "R^H R dx = A^H r", "complex/test_lstsq.py",
    ),
    Mutation(
        "conjugate forgotten in conjugate gradients", "algorithms/krylov/gmres.py",
        "(x.conj() * y).sum(0).real", "(x * y).sum(0).real",
        "x^H y is the inner product", "complex/test_systems.py",
    ),
    Mutation(
        "conjugate forgotten in doubled products", "kernels/doubled/doubled.py",
        "x, low = (y.conj() if conjugated else y for y in (x, low))", "x, low = (y for y in (x, low))",
        "A^H x = conj(A^T conj(x))", "complex/test_doubled.py",
    ),
    Mutation(
        "changes of a factorized batch unnoticed", "algorithms/krylov/kept_batch.py",
        "if not torch.equal(image, self.image):", "if torch.equal(image, self.image):",
        "factors of another matrix refine nothing", "test_lu_batch.py",
    ),
    Mutation(
        "conjugate forgotten in the transposed system", "problems/systems/lu_solve.py",
        "x = x.conj().resolve_conj() if trans == 1 else x", "x = x.resolve_conj()",
        "A^T x = b by A^H conj(x) = conj(b)", "complex/test_lu.py",
    ),
    Mutation(
        "conjugate forgotten in Householder's T", "kernels/qr/householder.py",
        "row[:, None, :k].conj()).sum(2)", "row[:, None, :k]).sum(2)",
        "products with complex reflectors", "complex/test_qr.py campaign/test_ratios.py",
    ),
    Mutation(
        "parts of complex noise counted once", "certificates/rank.py",
        "parts = dropped > rounding, 1 + along.is_complex()", "parts = dropped > rounding, 1",
        "complex residuals have twice the degrees of freedom", "complex/test_lstsq.py",
    ),
    Mutation(
        "conjugate forgotten in the gradient of QR", "pipeline/derivatives.py",
        "m = exact_matmul(r, dr.mH) - exact_matmul(dq.mH, q)",
        "m = exact_matmul(r, dr.mT) - exact_matmul(dq.mH, q)",
        "M = R dR^H - dQ^H Q", "test_gradients.py",
    ),
    Mutation(
        "conjugate forgotten in the gradient of a product", "pipeline/derivatives.py",
        "db = for_operand(multiply(a.mH, dc), b)", "db = for_operand(multiply(a.mT, dc), b)",
        "dB = A^H dC", "test_gradients.py",
    ),
    Mutation(
        "conjugate forgotten in polar factors", "pipeline/gradients.py",
        'h = exact_matmul(u.mH, a) if side == "right"', 'h = exact_matmul(u.mT, a) if side == "right"',
        "H = U^H A", "complex/test_polar_factors.py test_gradients.py",
    ),
    Mutation(
        "H by a triangle of U^H A", "problems/polar/polar.py",
        "h = (h + h.mH) / 2\n    return shift", "h = h.tril() + h.tril(-1).mH\n    return shift",
        "(U^H A + A^H U) / 2", "test_polar.py",
    ),
    Mutation(
        "conjugate forgotten below full rank", "algorithms/spectra/rank_revealing.py",
        "left = over_rows.total(u.mH @ (b", "left = over_rows.total(u.mT @ (b",
        "components along left singular vectors", "complex/test_lstsq.py",
    ),
    Mutation(
        "sum of three products without the third", "kernels/products/planes.py",
        "    s.sub_(p).sub_(q)\n    for", "    s.sub_(p)\n    for",
        "Im A B = S - P - Q", "complex/test_engine.py",
    ),
    Mutation(
        "conjugation pending in planes ignored", "kernels/products/planes.py",
        "        out[1].neg_()", "        pass",
        "the imaginary part of conj(A) is -Im A", "complex/test_engine.py complex/test_products.py",
    ),
]  # fmt: skip

_SPECTRA = [
    Mutation(
        "reflectors of a reduction not conjugated", "algorithms/spectra/reduction.py",
        "exact_matmul(rows.conj(), below)", "exact_matmul(rows, below)",
        "Q^H of a complex matrix is not applied", "algorithms/test_reduction.py",
    ),
    Mutation(
        "eigenvalues of T not separated", "algorithms/spectra/reduction.py",
        "SPREAD * (place * ((5**0.5 - 1) / 2)).frac()", "0 * place",
        "equal eigenvalues have the same vector", "kernels/spectra/test_tridiagonal.py",
    ),
    Mutation(
        "half of a rank-two update", "kernels/spectra/tridiagonal.py",
        "* v / 2", "* v",
        "the reduced matrix is another one", "kernels/spectra/test_tridiagonal.py",
    ),
    Mutation(
        "backward error of eigenvalues halved", "certificates/spectra.py",
        "return total / (1 - lost) ** 0.5 +", "return total / 2 / (1 - lost) ** 0.5 +",
        "errors of clusters are as large as it", "certificates/test_spectral_bounds.py",
    ),
    Mutation(
        "gap to the farther neighbour", "certificates/spectra.py",
        "gaps = torch.minimum(torch.cat([outer[0]", "gaps = torch.maximum(torch.cat([outer[0]",
        "a subspace turns towards the nearer one", "certificates/test_spectral_bounds.py",
    ),
    Mutation(
        "sign of residuals of eigenvectors", "certificates/spectra.py",
        "value=-1.0)", "value=1.0)",
        "the residual is A V - V diag(w)", "certificates/test_spectral_bounds.py",
    ),
    Mutation(
        "quotient forgotten beside its square", "certificates/spectra.py",
        "temple = found.quotients + columns.square()", "temple = columns.square()",
        "the theorem of Kato and Temple is about Rayleigh quotients", "certificates/test_spectral_bounds.py",
    ),
    Mutation(
        "a part of the spectrum rests on nothing", "certificates/spectra.py",
        "backward.expand_as(s) if a_priori is None else", "backward.expand_as(s) if True else",
        "where it lies in the spectrum is not measured", "certificates/test_spectral_bounds.py",
    ),
    Mutation(
        "bound of eigenvectors doubled", "certificates/spectra.py",
        "residual = (CONSTANT * max", "residual = 2 * (CONSTANT * max",
        "accuracy is promised by this bound", "certificates/test_spectral_bounds.py",
    ),
    Mutation(
        "rounding to the dtype of A forgotten", "problems/spectra/decompose.py",
        "self._bound_in_units(errors.errors + self._rounding(dtype.to_real()))",
        "self._bound_in_units(errors.errors)",
        "errors are those of the numbers that are returned", "spectra/test_spectra_functions.py",
    ),
    Mutation(
        "conjugation of eigenvectors dropped in powers", "problems/spectra/powers.py",
        "exact_matmul(v * powers[:, None, :], v.mH)", "exact_matmul(v * powers[:, None, :], v.mT)",
        "V^-1 is V^H", "spectra/test_spectra_gradients.py",
    ),
    Mutation(
        "ties of eigenvalues ignored by gradients", "pipeline/spectral_derivatives.py",
        "apart = _apart(w, errors / SURE)", "apart = _apart(w, 0 * errors)",
        "quotients of rounding errors are no derivatives", "spectra/test_spectra_gradients.py",
    ),
    Mutation(
        "members with NaN accepted", "problems/spectra/decompose.py",
        "run.accepted &= known", "run.accepted |= known",
        "their results are NaN", "spectra/test_spectra_functions.py",
    ),
]  # fmt: skip

MUTATIONS = [*_CERTIFICATES, *_ALGORITHMS, *_PROBLEMS, *_PIPELINE, *_AROUND, *_COMPLEX, *_SPECTRA]


class Outcome(NamedTuple):
    caught: bool
    seconds: float
    said: str


def applied(mutation: Mutation, folder: Path) -> None:
    """Change the copy of ``src`` in a folder."""
    path = folder / "src" / "neula" / mutation.path
    path.write_text(path.read_text(encoding="utf-8").replace(mutation.old, mutation.new), encoding="utf-8")


def paths_of(mutation: Mutation) -> list[str]:
    """Doctests of a source, or files and folders of tests."""
    return [x if x.startswith("src/") else f"tests/{x}" for x in mutation.tests.split()]


def outcome(mutation: Mutation) -> Outcome:
    """Run the tests of a mutation in a copy; they catch it where one fails."""
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="neula-mutation-") as name:
        folder = Path(name)
        for part in ("src", "tests"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        for entry in ROOT.iterdir():
            if entry.name not in ("src", "tests", ".git") and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)
        applied(mutation, folder)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *paths_of(mutation)]
        environment = {"PYTHONPATH": f"{folder / 'src'}:{folder}", "OMP_NUM_THREADS": "1"}
        place = {"cwd": folder, "env": os.environ | environment}
        try:
            run = subprocess.run(command, **place, timeout=SECONDS, capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            return Outcome(True, SECONDS, "no end")
    if run.returncode not in (0, 1, 2):  # 2 where a module of tests cannot be imported
        raise RuntimeError(f"{mutation.name}: pytest did not run\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    said = failed[0].partition(" - ")[0] if failed else ""
    return Outcome(run.returncode > 0, time.perf_counter() - begun, said)


def main() -> int:
    """Report what was caught; the exit code is 1 where a mutation was missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--only", metavar="NAME", help="only mutations whose name or file contains this")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="mutations at the same time")
    given = parser.parse_args()
    chosen = [x for x in MUTATIONS if given.only is None or given.only in x.name or given.only in x.path]
    missed = []
    with ThreadPoolExecutor(given.workers) as pool:
        for mutation, found in zip(chosen, pool.map(outcome, chosen), strict=True):
            word = "caught" if found.caught else "MISSED"
            what = f"{mutation.path}: {mutation.name}  {found.said}"
            print(f"{word} {found.seconds:6.1f} s  {what}", flush=True)
            missed += [mutation.name] * (not found.caught)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} caught")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
