"""CGLS, LSQR, Craig's method and the refinement around them: convergence, stopping, honest measures."""

import math
from functools import lru_cache

import numpy as np
import pytest
import torch

from neula.algorithms.krylov.cgls import LeastSquaresOperator, Stop, cgls, lsqr
from neula.algorithms.krylov.refinement import InnerSolver, refine, refine_minimum_norm
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.algorithms.scaling import power_of_two_scales
from neula.algorithms.spectra.condition import solve_rt
from neula.certificates.backward_error import Scale, norms_of
from neula.certificates.residuals import STAGNATION
from neula.engines import ENGINES, EmulatedEngine
from neula.io.matrices import ENTRIES, SPECTRA, random_matrix

U64 = 2.0**-53
INNER = pytest.mark.parametrize("inner", [cgls, lsqr], ids=lambda f: f.__name__)


def norm(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x, dim=0)


class Problem:
    """A least-squares problem, an R of it in low precision, and LAPACK's solution."""

    def __init__(self, a: torch.Tensor, format: str = "fp16", k: int = 1, engine: str = "emulated") -> None:
        self.a = a
        m, n = a.shape
        self.b = random_matrix("normal", m, k, seed=77)
        chosen = ENGINES[engine]("cpu", format)
        self.scales = power_of_two_scales(a.abs().max(0).values)
        _, low = rgsqrf(chosen.fill(chosen.empty(m, n), a, self.scales), chosen)
        self.r = low.double() / self.scales
        self.operator = LeastSquaresOperator(a)
        self.s = torch.linalg.svdvals(a * self.scales)
        self.scale = Scale(self.scales, float(self.s[0]))

    def solution(self, b: torch.Tensor | None = None) -> torch.Tensor:
        """By Householder QR in double precision, the columns scaled."""
        q, r = torch.linalg.qr(self.a * self.scales)
        b = self.b if b is None else b
        x = torch.linalg.solve_triangular(r, q.T @ b, upper=True)
        residual = b - (self.a * self.scales) @ x
        return self.scales[:, None] * (x + torch.linalg.solve_triangular(r, q.T @ residual, upper=True))

    def optimality(self, x: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        """``||D A^T r|| / (||A D|| ||r||)``, computed anew."""
        residual = (self.b if b is None else b) - self.a @ x
        return norm((self.a * self.scales).T @ residual) / (self.scale.norm * norm(residual))

    def preconditioned_condition(self) -> float:
        w = torch.linalg.solve_triangular(self.r, self.a, upper=True, left=False)
        return float(torch.linalg.cond(w))

    def refine(self, b: torch.Tensor | None = None, **options: object):
        parameters: dict[str, object] = {"tolerance": 1e-14, "max_iterations": 100, **options}
        b = self.b if b is None else b
        return refine(self.operator, self.r, b, scale=self.scale, **parameters)  # type: ignore[arg-type]


@lru_cache(maxsize=32)
def spectrum(kind: str, cond: float, m: int = 600, n: int = 256, format: str = "fp16") -> Problem:
    return Problem(random_matrix(kind, m, n, cond=cond, seed=1), format)


def attainable(problem: Problem) -> float:
    """Optimality that double precision allows: the gradient sums m products of size ``||A|| ||r||``, and the
    residual errs by ``n u ||A|| ||x||``; both with the usual square roots and a factor of 4.
    """
    m, n = problem.a.shape
    x = problem.solution()
    residual = norm(problem.b - problem.a @ x)
    image = problem.scale.norm * norm(x / problem.scales[:, None])
    return 4 * U64 * (math.sqrt(m) * math.sqrt(n) + n * float((image / residual).max()))


# ---------------------------------------------------------------- inner solvers


def full_stop(k: int, reduction: float, start: torch.Tensor) -> Stop:
    return Stop(reduction * norm(start))


@INNER
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 3), (300, 1, 1), (33, 33, 3), (257, 33, 3)])
def test_the_solution_is_that_of_lapack(inner: InnerSolver, m: int, n: int, k: int) -> None:
    problem = Problem(random_matrix("arithmetic", m, n, cond=100.0, seed=2), k=k)
    start = solve_rt(problem.r, problem.a.T @ problem.b)
    found = inner(problem.operator, problem.r, problem.b, stop=full_stop(k, 1e-12, start), max_iterations=60)
    expected = problem.solution()
    # ||R (x - x*)|| is at most cond(A R^-1) times what is left of R^-T A^T r, 1e-12 of the start, which is
    # about ||b||; R^-1 adds a factor of at most 1 / s_min; then rounding, cond u times ||x|| and ||b||.
    size = norm(problem.b) / float(problem.s[-1])
    assert found.x.shape == (n, k)
    assert 1 <= found.iterations < 60
    error = norm((found.x - expected) / problem.scales[:, None])
    assert (error <= 10 * (1e-12 + 100 * math.sqrt(m * n) * U64) * size).all()


@INNER
@pytest.mark.parametrize("kind", ["geometric", "cluster_large"])
def test_an_fp16_r_makes_cond_1e3_easy(inner: InnerSolver, kind: str) -> None:
    """Section 3.2.3: the error falls by ``(c - 1) / (c + 1)`` or more an iteration, c = cond(A R^-1)."""
    problem = spectrum(kind, 1e3, 1024)
    c = problem.preconditioned_condition()
    start = solve_rt(problem.r, problem.a.T @ problem.b)
    found = inner(problem.operator, problem.r, problem.b, stop=full_stop(1, 1e-10, start), max_iterations=200)
    # 2 c ((sqrt(c^2) - 1) / (sqrt(c^2) + 1))^k <= 1e-10, plus one for the last test.
    rate = (c - 1) / (c + 1)
    allowed = 1 + math.ceil(math.log(1e-10 / (2 * c)) / math.log(rate))
    assert found.iterations <= allowed
    left = solve_rt(problem.r, problem.a.T @ (problem.b - problem.a @ found.x))
    assert norm(left) <= 1.1e-10 * norm(start) + 100 * U64 * norm(problem.b)


@INNER
def test_the_stopping_rule_is_the_one_given(inner: InnerSolver) -> None:
    """Met after the last iteration, not met before it."""
    problem = spectrum("geometric", 1e4)
    start = solve_rt(problem.r, problem.a.T @ problem.b)
    for reduction in (1e-1, 1e-4, 1e-8):
        stop = full_stop(1, reduction, start)
        found = inner(problem.operator, problem.r, problem.b, stop=stop, max_iterations=100)
        left = solve_rt(problem.r, problem.a.T @ (problem.b - problem.a @ found.x))
        assert norm(left) <= 1.01 * reduction * norm(start)
        if found.iterations > 1:
            n = found.iterations - 1
            earlier = inner(problem.operator, problem.r, problem.b, stop=stop, max_iterations=n)
            left = solve_rt(problem.r, problem.a.T @ (problem.b - problem.a @ earlier.x))
            assert earlier.iterations <= n
            assert norm(left) > 0.99 * reduction * norm(start)


def test_cgls_stops_on_the_gradient_too() -> None:
    problem = spectrum("geometric", 1e4)
    target = 1e-6 * norm(problem.a.T @ problem.b)
    stop = Stop(torch.zeros(1, dtype=torch.float64), gradient=target)
    found = cgls(problem.operator, problem.r, problem.b, stop=stop, max_iterations=100)
    assert found.iterations < 100
    assert norm(problem.a.T @ (problem.b - problem.a @ found.x)) <= 1.01 * target


@pytest.mark.parametrize("cond", [1e4, 1e6])
@INNER
def test_enough_iterations_are_enough(inner: InnerSolver, cond: float) -> None:
    """Slow is not hopeless: CGLS may stop early only where its rate says that the iterations that are allowed
    do not suffice. Chebyshev's bound is ``(c / 2) ln(2 c / tolerance)``, c = cond(A R^-1); twice that is
    allowed here, as rounding delays convergence.
    """
    problem = spectrum("geometric", cond, 512, 128)
    c = problem.preconditioned_condition()
    allowed = math.ceil(c * math.log(2 * c / 1e-6)) + 10
    start = solve_rt(problem.r, problem.a.T @ problem.b)
    found = inner(
        problem.operator, problem.r, problem.b, stop=full_stop(1, 1e-6, start), max_iterations=allowed
    )
    left = solve_rt(problem.r, problem.a.T @ (problem.b - problem.a @ found.x))
    assert norm(left) <= 1.01e-6 * norm(start)


def test_cgls_sees_the_smallest_singular_value() -> None:
    """Its coefficients make a tridiagonal matrix, whose eigenvalues are those of ``A^T A`` in the end."""
    operator = LeastSquaresOperator(random_matrix("geometric", 60, 12, cond=10.0, seed=3))
    never = Stop(torch.zeros(1, dtype=torch.float64))
    b, identity = random_matrix("normal", 60, 1, seed=4), torch.eye(12, dtype=torch.float64)
    found = cgls(operator, identity, b, stop=never, max_iterations=12)
    assert found.smallest == pytest.approx(0.1, rel=1e-6)


def test_cgls_gives_up_where_it_is_hopeless() -> None:
    """A preconditioner that does nothing for cond 1e8: it does not burn all iterations that it is given."""
    problem = spectrum("geometric", 1e8)
    stop = Stop(1e-12 * norm(problem.b))
    identity = torch.eye(256, dtype=torch.float64)
    found = cgls(problem.operator, identity, problem.b, stop=stop, max_iterations=10_000)
    assert found.iterations < 5_000


def test_what_nobody_saw_is_not_counted() -> None:
    """Iterations after the last one that mattered change nothing, and are no iterations of the result."""
    problem = spectrum("arithmetic", 1e3)
    start = solve_rt(problem.r, problem.a.T @ problem.b)
    for reduction in (1e-2, 1e-6, 1e-10):
        stop = full_stop(1, reduction, start)
        found = cgls(problem.operator, problem.r, problem.b, stop=stop, max_iterations=100)
        exactly = cgls(problem.operator, problem.r, problem.b, stop=stop, max_iterations=found.iterations)
        assert torch.equal(found.x, exactly.x)
        assert found.smallest == exactly.smallest


@INNER
def test_refinement_goes_on_from_a_start(inner: InnerSolver) -> None:
    problem = spectrum("arithmetic", 1e3)
    found = problem.refine(inner=inner)
    again = problem.refine(inner=inner, start=found.x)
    assert again.iterations == 0, "nothing is left to do"
    assert torch.equal(again.x, found.x)
    rough = found.x * (1 + 1e-6)
    better = problem.refine(inner=inner, start=rough)
    assert better.iterations < found.iterations
    assert (better.measures.backward_error <= 1e-14).all()


# ---------------------------------------------------------------- refinement


@INNER
@pytest.mark.parametrize(("kind", "cond"), [*((k, 1e4) for k in SPECTRA), *((k, 1.0) for k in ENTRIES)])
def test_refinement_reaches_double_precision(inner: InnerSolver, kind: str, cond: float) -> None:
    """All eight matrices of section 4.2, with an fp16 R: the optimality that double precision allows."""
    problem = spectrum(kind, cond)
    found = problem.refine(inner=inner)
    assert (found.measures.backward_error <= 1e-14).all()
    assert (problem.optimality(found.x) <= max(1e-14, attainable(problem))).all()
    expected = problem.solution()
    # Wedin, with the backward error that both solutions have.
    c = float(problem.s[0] / problem.s[-1])
    residual, image = norm(problem.b - problem.a @ expected), norm(expected / problem.scales[:, None])
    sensitivity = c + c**2 * residual / (problem.scale.norm * image)
    error = norm((found.x - expected) / problem.scales[:, None])
    assert (error <= 2 * 4e-14 * sensitivity * image).all()


@INNER
def test_it_stays_converged_however_many_iterations_are_allowed(inner: InnerSolver) -> None:
    """The design's drift: plain CGLS comes back up from 1e-13 to 1e-4. Asked for more than there is (a
    tolerance of 0), refinement stops by itself and returns the best that it measured.
    """
    problem = spectrum("arithmetic", 1e3)
    found = problem.refine(inner=inner, tolerance=0.0, max_iterations=2000)
    assert (problem.optimality(found.x) <= max(1e-14, attainable(problem))).all()
    assert found.iterations < 200, "it stops by itself"


@INNER
@pytest.mark.parametrize(("kind", "cond"), [("arithmetic", 1e2), ("geometric", 1e4)])
def test_history_goes_down(inner: InnerSolver, kind: str, cond: float) -> None:
    """Each restart but the last lowers the backward error, or it is below the tolerance already (and the
    optimality improves); the first one by far more than a restart must; the result is the best of them.
    """
    problem = spectrum(kind, cond)
    restarts: list[float] = []
    found = problem.refine(inner=inner, on_restart=restarts.append)
    assert restarts == found.history
    assert found.history[0] == pytest.approx(1.0, abs=0.999), "x = 0 is no solution"
    for before, after in zip(found.history[:-2], found.history[1:-1], strict=True):
        assert after < before or after <= 1e-14
    assert found.history[1] <= STAGNATION * found.history[0]
    assert float(found.measures.backward_error.max()) <= max(1e-14, 1.01 * min(found.history))


def orthogonal_to(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The part of b outside the range of A: its least-squares solution is 0."""
    q = torch.linalg.qr(a)[0]
    for _ in range(3):
        b = b - q @ (q.T @ b)
    return b


@INNER
@pytest.mark.parametrize(("kind", "cond"), [("geometric", 1e4)])
@pytest.mark.parametrize("other", ["zero", "orthogonal", "consistent", "tiny", "huge"])
def test_a_converged_column_does_not_hold_back_another(
    inner: InnerSolver, kind: str, cond: float, other: str
) -> None:
    """Beside a column that is solved from the start (or later) the first one is solved as it is alone."""
    problem = spectrum(kind, cond)
    first = problem.b
    second = {
        "zero": torch.zeros_like(first),
        "orthogonal": orthogonal_to(problem.a, first),
        "consistent": problem.a @ torch.ones(256, 1, dtype=torch.float64),
        "tiny": 1e-100 * first,
        "huge": 1e100 * first,
    }[other]
    for alone in (first, second):
        assert (problem.refine(alone, inner=inner).measures.backward_error <= 1e-14).all()
    together = problem.refine(torch.cat([first, second], 1), inner=inner, max_iterations=200)
    assert (together.measures.backward_error <= 1e-14).all()
    if other == "zero":
        assert not together.x[:, 1].any()


@INNER
def test_a_consistent_system_is_solved_too(inner: InnerSolver) -> None:
    """No residual to be orthogonal: the other measures decide."""
    problem = spectrum("geometric", 1e3)
    known = random_matrix("normal", 256, 2, seed=5)
    found = problem.refine(problem.a @ known, inner=inner)
    assert (found.measures.backward_error <= 1e-14).all()
    # cond times the backward error.
    error = norm((found.x - known) / problem.scales[:, None]) / norm(known / problem.scales[:, None])
    assert (error <= 2 * 1e-14 * 1e3).all()


@INNER
def test_columns_of_any_size(inner: InnerSolver) -> None:
    """Units of 1e-30 to 1e30: the measures are those of the scaled problem."""
    units = 10.0 ** torch.linspace(-30, 30, 60, dtype=torch.float64)
    problem = Problem(random_matrix("arithmetic", 300, 60, cond=50.0, seed=6) * units, k=2)
    found = problem.refine(inner=inner)
    assert (found.measures.backward_error <= 1e-14).all()
    assert (problem.optimality(found.x) <= max(1e-14, attainable(problem))).all()


def test_a_useless_r_comes_back_with_an_honest_measure() -> None:
    """Never an answer that claims more than it has: the measure belongs to the x that is returned."""
    problem = spectrum("geometric", 1e8)
    identity = torch.eye(256, dtype=torch.float64)
    found = refine(
        problem.operator, identity, problem.b, scale=problem.scale, tolerance=1e-14, max_iterations=20
    )
    assert torch.isfinite(found.x).all()
    assert float(problem.optimality(found.x)) == pytest.approx(float(found.measures.optimality), rel=1e-6)
    assert norm(problem.b - problem.a @ found.x) == pytest.approx(float(found.residual_norm), rel=1e-12)


def test_nan_in_r_does_not_pass_for_convergence() -> None:
    problem = Problem(random_matrix("arithmetic", 60, 20, cond=1e2, seed=1))
    problem.r[3, 7] = math.nan
    assert not (problem.refine(max_iterations=20).measures.backward_error <= 1e-14).all()


# ---------------------------------------------------------------- measures


def optimal_backward_error(a: np.ndarray, b: np.ndarray, x: np.ndarray) -> float:
    """Smallest ``||E||_F`` with which x minimizes ``||(A + E) x - b||`` (Walden, Karlson, Sun, 1995)."""
    r = b - a @ x
    phi = np.linalg.norm(r) / np.linalg.norm(x)
    projector = np.eye(len(r)) - np.outer(r, r) / (r @ r)
    return min(phi, np.linalg.svd(np.hstack([a, phi * projector]), compute_uv=False)[-1])


@pytest.mark.parametrize("size", [1e-10, 1e-3, 1.0])
@pytest.mark.parametrize("noise", [1e-6, 1.0])
@pytest.mark.parametrize("seed", range(2))
def test_the_measure_bounds_the_backward_error(size: float, noise: float, seed: int) -> None:
    """For any wrong x: at least the optimal backward error, and not far above it where it can be small."""
    a = random_matrix("geometric", 40, 8, cond=100.0, seed=seed)
    q, r = torch.linalg.qr(a)
    b = a @ torch.ones(8, 1, dtype=torch.float64) + noise * random_matrix("normal", 40, 1, seed=seed + 10)
    x = torch.linalg.lstsq(a, b, driver="gelsd").solution
    x = x + size * random_matrix("normal", 8, 1, seed=seed + 20)
    residual = b - a @ x
    gradient = a.T @ residual
    largest = float(torch.linalg.svdvals(a)[0])
    scale = Scale(torch.ones(8, dtype=torch.float64), largest)
    norms = norms_of(scale, b, x, residual, gradient, solve_rt(r, gradient))
    measures = norms.measures(scale.norm)
    # Perturbations of A alone; changing b as well is the third measure, and may be smaller.
    of_a = min(float(measures.optimality), float(norm(q.T @ residual) / (largest * norm(x))))
    optimal = optimal_backward_error(a.numpy(), b[:, 0].numpy(), x[:, 0].numpy()) / largest
    # Projected by Q or by R^-T A^T: equal up to sqrt(m n) u cond.
    rounding = 4 * math.sqrt(40 * 8) * U64 * 100
    assert optimal <= of_a + rounding
    assert of_a <= 10 * (optimal + rounding)
    rigal_gaches = float(norm(residual) / (largest * norm(x) + norm(b)))
    expected = min(of_a, rigal_gaches)
    assert float(measures.backward_error) == pytest.approx(expected, rel=1e-6, abs=rounding)


def test_norms_are_those_of_the_scaled_problem() -> None:
    """Whoever measures columns in other units, by powers of two, measures the same."""
    a, b, x = (random_matrix("normal", *shape, seed=1) for shape in ((40, 5), (40, 2), (5, 2)))
    columns = 2.0 ** torch.arange(-4, 6, 2, dtype=torch.float64)
    found = []
    for d in (torch.ones_like(columns), columns):
        given, y = a / d, d[:, None] * x
        residual = b - given @ y
        found.append(norms_of(Scale(d, 3.0), b, y, residual, given.T @ residual, residual[:2]).stacked)
    torch.testing.assert_close(*found, rtol=1e-12, atol=0)


# ---------------------------------------------------------------- minimum norm


def shortest(b_matrix: torch.Tensor, r: torch.Tensor, rhs: torch.Tensor, tolerance: float, most: int = 100):
    """Refined, with the scale of the rows of A."""
    n, m = b_matrix.shape
    rows = Scale(torch.ones(m, dtype=torch.float64), float(torch.linalg.svdvals(b_matrix)[0]))
    scale = Scale(torch.ones(n, dtype=torch.float64), rows.norm)
    limits = {"tolerance": tolerance, "max_iterations": most}
    return refine_minimum_norm(LeastSquaresOperator(b_matrix), r, rhs, scale=scale, rows=rows, **limits)


def wide_problem(m: int, n: int, k: int, cond: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """B = A^T (n x m), its fp16 R, and right-hand sides."""
    b_matrix = random_matrix("arithmetic", n, m, cond=cond, seed=11)
    _, r = rgsqrf(b_matrix, EmulatedEngine("cpu", "fp16"), cutoff=16)
    return b_matrix, r.double(), random_matrix("normal", m, k, seed=12)


@pytest.mark.parametrize(
    ("m", "n", "k", "cond"),
    [(1, 1, 1, 1.0), (1, 300, 3, 1.0), (33, 33, 1, 1e2), *((60, 300, 2, c) for c in (1.0, 1e2, 1e4))],
)
def test_refined_minimum_norm(m: int, n: int, k: int, cond: float) -> None:
    b_matrix, r, rhs = wide_problem(m, n, k, cond)
    rhs[:, 1:] = 0
    before = rhs.clone()
    found = shortest(b_matrix, r, rhs, 1e-15)
    assert torch.equal(rhs, before)
    assert found.x.shape == (n, k)
    residual = norm(rhs - b_matrix.T @ found.x)
    error = residual[0] / (torch.linalg.matrix_norm(b_matrix, 2) * norm(found.x)[0] + norm(rhs)[0])
    # Double precision computes the residual to n u of what it subtracts.
    assert error <= 4 * math.sqrt(n) * U64
    assert found.row_error is not None
    for measured in (found.measures.backward_error, found.row_error):
        assert float(measured.max()) == pytest.approx(float(error), rel=1e-6, abs=0)
    assert not found.x[:, 1:].any()
    assert all(later < 2 * earlier for earlier, later in zip(found.history, found.history[1:], strict=False))
    # x in the range of B: of minimum norm.
    q = torch.linalg.qr(b_matrix)[0]
    outside = norm(found.x[:, 0] - q @ (q.T @ found.x[:, 0]))
    assert outside <= 16 * n * U64 * cond * norm(found.x[:, 0])
