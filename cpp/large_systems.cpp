// One linear system by LU or Cholesky factors, with its evidence, in as few passes as that takes: two over A, of which one
// makes the copy that is factorized, and one over the factors. An update of the solution takes one more of each.
#include "large_factors.hpp"
#include "refinement.hpp"

NEULA_BEGIN

namespace {

// b_i - a_i x, in twice the working precision.
template <typename T> double doubled_residual(Rows<T> a, Index i, const double *x, double b)
{
    Vec high = {}, low = {};
    Index j = 0;
    for (; j + WIDTH <= a.n; j += WIDTH)
        add_product(load(a.row(i) + j), -load(x + j), high, low);
    double sum = b, rest = 0.0;
    for (int l = 0; l < WIDTH; l++) {
        double error;
        two_sum(sum, high[l], sum, error);
        rest += error + low[l];
    }
    for (; j < a.n; j++)
        add_product(double(a.row(i)[j]), -x[j], sum, rest);
    return sum + rest;
}

// Residuals of solutions, and of those for random vectors. Sums are in double precision, which is twice that of single factors;
// where factors are in double precision, those of right-hand sides are in twice that.
template <typename T> void measure_rows(RowsPart &part, Rows<T> a)
{
    const LargeSystem &system = *part.system;
    Index length = column_length(a.n);
    RowsPart block = part;
    for (; block.first < part.last; block.first = block.last) {
        block.last = block.first + WIDTH < part.last ? block.first + WIDTH : part.last;
        subtract(block, a);
        for (Index c = 0; c < system.k && !system.single_factors; c++)
            for (Index i = block.first; i < block.last; i++)
                part.others[c * length + i] = doubled_residual(a, i, part.columns + c * length, system.b[c * a.n + i]);
    }
}

void measure_part(RowsPart &part)
{
    with_matrix(*part.system, [&](auto a) { measure_rows(part, a); });
}

// Residuals after updates.
void update_part(RowsPart &part)
{
    with_matrix(*part.system, [&](auto a) { subtract(part, a); });
}

// Relative rounding errors of inner products, and of differences from them.
double rounding_of(Index n) { return (n / WIDTH + 2 * WIDTH + 4) * UNIT; }

// ||D A^-1||_2 from below, by a step of the power method from the best of the random vectors, whose solutions are known.
double inverse_norm(const LargeSystem &system, const double *solutions)
{
    Index n = system.n;
    double *norms = column_of(system, COLUMN_NORMS), *v = column_of(system, SPARE), best = -1.0;
    const double *best_solution = solutions;
    for (Index p = 0; p < LARGE_PROBES; p++) {
        const double *x = solutions + (system.k + p) * column_length(n);
        double size = scaled_norm(n, norms, x);
        if (size > best)
            best = size, best_solution = x;
    }
    for (Index j = 0; j < n; j++)
        v[j] = norms[j] * (norms[j] * best_solution[j] / best);
    with_factors(system, [&](auto factors) { substitute_transposed(factors, system.pivots, v); });
    return norm(n, v);
}

// From rows of A. The factors solve up to a `rate`, which residuals of solutions for random vectors show.
SystemNorms<double> matrix_evidence(const LargeSystem &system, const double *solutions, const double *residuals, double &rate)
{
    Index n = system.n, length = column_length(n);
    const double *sums = column_of(system, ROW_SUMS), *norms = column_of(system, COLUMN_NORMS);
    SystemNorms<double> found;
    found.infinity_norm = largest_of(sums, n), found.norm = norm(n, norms), found.smallest_column = smallest_of(norms, n);
    found.judge(smallest_of(sums, n), largest_of(norms, n), n, system.limits);
    double left = 0.0;
    for (Index p = system.k; p < system.k + LARGE_PROBES; p++) {
        // Rounding errors of its measurement add to a residual.
        double size = norm(n, residuals + p * length) + rounding_of(n) * found.norm * norm(n, solutions + p * length);
        left += size * size;
    }
    rate = system.limits.margin * sqrt(left);
    return found;
}

// Add the update where there is one, round x in its place, and measure it.
SystemEvidence finish_column(
    const LargeSystem &system, const SystemNorms<double> &matrix, double inverse_norm, double *x, const double *change,
    const double *residual, double norm_before, const double *b)
{
    const SystemLimits &limits = system.limits;
    Index n = system.n;
    bool updated = system.single_factors;
    double *lost = column_of(system, SPARE), *norms = column_of(system, COLUMN_NORMS);
    SystemEvidence to = {};
    for (Index i = 0; i < n; i++) {
        double sum, low;
        two_sum(x[i], updated ? change[i] : 0.0, sum, low);
        x[i] = system.single_result ? double(float(sum)) : sum;
        lost[i] = (sum - x[i]) + low;
        to.largest = worse(to.largest, fabs(x[i]));
    }
    double left = norm(n, residual), norm_b = norm(n, b), size = scaled_norm(n, norms, x);
    double doubled = (n + WIDTH + 2) * UNIT * (n + WIDTH + 2) * UNIT, rounding_errors = rounding_of(n);
    double floor = (updated ? rounding_errors : doubled) * (matrix.norm * norm(n, x) + norm_b);
    // Rounding of the residual to one number, and of A times an update and the difference.
    double norm_change = updated ? norm(n, change) : 0.0;
    double noise = floor + rounding_errors * (norm_before + matrix.norm * norm_change);
    double error = largest_of(residual, n) / (matrix.infinity_norm * largest_of(x, n) + largest_of(b, n));
    measure_rounded(
        to, error, inverse_norm * (left + noise) / size, scaled_norm(n, norms, lost) / size, limits.computed);
    for (int step = 1; step <= MOST_UPDATES; step++)
        to.history[step] = error;
    to.updates = updated;
    to.residual = (left + noise + matrix.norm * norm(n, lost)) / norm_b;
    bool converges = !updated || left <= limits.max_rate * norm_before + noise;
    to.doubtful = !(converges && matrix.equilibrated && matrix.in_safe_range && in_safe_range(norm_b, limits));
    return to;
}

// The condition number of A D^-1, whose columns have norm 1. `probe` is the residual of 0 - A D^-1 v.
double condition_of(const LargeSystem &system, const double *probe, double inverse_norm)
{
    double norm_a = norm(system.n, probe) / norm(system.n, column_of(system, IMAGE));
    double condition = inverse_norm * (norm_a > 1 ? norm_a : 1.0);
    return condition > 1 ? condition : 1.0;
}

// Update solutions once, and those for random vectors where their residuals do not show how well the factors solve.
SystemNorms<double> update_once(
    const LargeSystem &system, double &rate, RowsPart &all_rows, double *solutions, double *residuals, double *updates)
{
    Index k = system.k, length = column_length(system.n);
    Index count = rate <= system.limits.max_rate ? k : k + LARGE_PROBES;
    memcpy(updates, residuals, count * length * sizeof(double));
    substitute(system, updates, count, false);
    all_rows.work = update_part, all_rows.columns = updates, all_rows.count = count;
    share_rows(all_rows);
    for (Index i = k * length; i < count * length; i++)
        solutions[i] += updates[i];
    return matrix_evidence(system, solutions, residuals, rate);
}

// Of the only system.
SystemEvidence &evidence_of(SystemsSolution &to) { return *reinterpret_cast<SystemEvidence *>(to.evidence); }

// Solve with the factors, and measure the solutions; `largest` is the largest element of A.
void solve_with_factors(const LargeSystem &system, double largest, SystemsSolution &to)
{
    Index n = system.n, k = system.k, length = column_length(n), probes = k + LARGE_PROBES;
    double *solutions = column_of(system, FIXED_COLUMNS + 2 * system.threads);
    double *residuals = solutions + side_columns(system) * length, *updates = residuals + side_columns(system) * length;
    double *image = column_of(system, IMAGE), *norms = column_of(system, COLUMN_NORMS), *look = solutions + probes * length;
    SystemEvidence &evidence = evidence_of(to) = {};
    for (Index c = 0; c < probes; c++)
        memcpy(residuals + c * length, c < k ? system.b + c * n : system.vectors + (c - k) * n, n * sizeof(double));
    memcpy(solutions, residuals, side_columns(system) * length * sizeof(double));
    evidence.growth = substitute(system, solutions, probes, true) / largest;
    for (Index j = 0; j < n; j++) { // a step of the power method for the norm of A D^-1
        image[j] /= norms[j];
        look[j] = image[j] / norms[j];
    }
    RowsPart all_rows = {};
    all_rows.system = &system, all_rows.work = measure_part, all_rows.last = all_rows.end = n;
    all_rows.columns = solutions, all_rows.others = residuals, all_rows.count = probes + 1;
    share_rows(all_rows);
    double infinity_norm = largest_of(column_of(system, ROW_SUMS), n), *before = to.forward_error, rate;
    for (Index c = 0; c < k; c++) {
        double scale = infinity_norm * largest_of(solutions + c * length, n) + largest_of(system.b + c * n, n);
        evidence.history[0] = worse(evidence.history[0], largest_of(residuals + c * length, n) / scale);
        before[c] = norm(n, residuals + c * length);
    }
    SystemNorms<double> matrix = matrix_evidence(system, solutions, residuals, rate);
    if (system.single_factors)
        matrix = update_once(system, rate, all_rows, solutions, residuals, updates);
    double size = inverse_norm(system, solutions);
    evidence.doubtful = !(rate <= system.limits.max_rate);
    evidence.condition = condition_of(system, residuals + probes * length, size);
    evidence.condition_bound = system.limits.estimated * evidence.condition;
    // With X Z for A^-1 Z, A^-1 Z = X Z + A^-1 (Z - A X Z).
    double bound = system.limits.margin * size / (1 - rate);
    for (Index c = 0; c < k; c++) {
        double *x = solutions + c * length;
        SystemEvidence found = finish_column(
            system, matrix, bound, x, updates + c * length, residuals + c * length, before[c], system.b + c * n);
        join_worst<double>(evidence, found);
        to.forward_error[c] = found.forward_error;
        for (Index i = 0; i < n; i++)
            to.x[i * k + c] = x[i];
    }
}

}  // namespace

// Workspace in doubles.
Index large_workspace(const LargeSystem &system)
{
    return (FIXED_COLUMNS + 2 * system.threads + 3 * side_columns(system)) * column_length(system.n);
}

// Copy A to the place of the factors, with magnitudes of its rows and columns; returns the largest element.
double copy_large(const LargeSystem &system)
{
    Index n = system.n;
    memset(system.workspace, 0, large_workspace(system) * sizeof(double));
    RowsPart all_rows = {};
    all_rows.system = &system, all_rows.work = copy_part, all_rows.last = n;
    double most = share_rows(all_rows);
    for (Index j = 0; j < n; j++) {
        double square = 0.0, image = 0.0;
        for (Index t = 0; t < system.threads; t++) {
            square += column_of(system, FIXED_COLUMNS + 2 * t)[j];
            image += column_of(system, FIXED_COLUMNS + 2 * t + 1)[j];
        }
        column_of(system, COLUMN_NORMS)[j] = sqrt(square), column_of(system, IMAGE)[j] = image;
    }
    return most;
}

void solve_large(const LargeSystem &system, double largest, bool definite, SystemsSolution &to)
{
    if (definite) {
        RowsPart all_rows = {};
        all_rows.system = &system, all_rows.work = divide_part, all_rows.last = system.n;
        share_rows(all_rows);
        all_rows.work = transpose_part;
        share_rows(all_rows);
        for (Index i = 0; i < system.n; i++)
            system.pivots[i] = int(i);
    }
    solve_with_factors(system, largest, to);
    if (definite) // no element of U exceeds all of A
        raise(evidence_of(to).growth, 1.0);
}

NEULA_END
