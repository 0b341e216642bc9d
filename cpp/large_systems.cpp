// One linear system by LU or Cholesky factors, with its evidence, in as few passes as that takes: two over A, of which one
// makes the copy that is factorized, and one over the factors. An update of the solution takes one more of each.
#include "large_factors.hpp"
#include "refinement.hpp"

NEULA_BEGIN

namespace {

// b_i - a_i x, or a part of it, in twice the working precision.
template <typename T, typename Number> double doubled_residual(Rows<T, Number> a, Index i, const double *x, double b)
{
    Vec high = {}, low = {};
    Index j = 0;
    for (; j + WIDTH <= a.length(); j += WIDTH)
        add_product(load(a.row(i) + j), -load(x + j), high, low);
    double sum = b, rest = 0.0;
    for (int l = 0; l < WIDTH; l++) {
        double error;
        two_sum(sum, high[l], sum, error);
        rest += error + low[l];
    }
    for (; j < a.length(); j++)
        add_product(double(a.row(i)[j]), -x[j], sum, rest);
    return sum + rest;
}

// Residuals of solutions, and of those for random vectors. Sums are in double precision, which is twice that of single factors;
// where factors are in double precision, those of right-hand sides may be in twice that.
template <typename T, typename Number> void measure_rows(RowsPart &part, Rows<T, Number> a)
{
    constexpr Index EACH = PARTS<Number>;
    const LargeSystem &system = *part.system;
    Index length = column_length(system);
    RowsPart block = part;
    for (; block.first < part.last; block.first = block.last) {
        block.last = block.first + WIDTH < part.last ? block.first + WIDTH : part.last;
        subtract(block, a);
        for (Index c = 0; c < system.k && system.doubled; c++)
            for (Index i = block.first; i < block.last; i++) {
                double found[EACH];
                for (Index p = 0; p < EACH; p++)
                    found[p] = doubled_residual(
                        a, i, part.columns + (EACH * c + p) * length, system.b[c * a.length() + EACH * i + p]);
                set_entry(part.others + EACH * c * length, length, i, of_parts<Number>(found));
            }
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

// By how much vectors of rounding errors of both parts may be larger than those of magnitudes (systems.cpp).
double rounding_of_parts(const LargeSystem &system) { return system.complex ? 0x1.6a09e667f3bcdp0 : 1.0; }

// Relative rounding errors of inner products, and of differences from them.
double rounding_of(const LargeSystem &system)
{
    return (row_length(system) / WIDTH + 2 * WIDTH + 4) * UNIT * rounding_of_parts(system);
}

// ||D A^-1||_2 from below, by a step of the power method from the best of the random vectors, whose solutions are known.
double inverse_norm(const LargeSystem &system, const double *solutions)
{
    Index n = row_length(system);
    double *norms = column_of(system, COLUMN_NORMS), *v = column_of(system, SPARE), best = -1.0;
    const double *best_solution = solutions;
    for (Index p = 0; p < LARGE_PROBES; p++) {
        const double *x = solutions + parts_of(system) * (system.k + p) * column_length(system);
        double size = scaled_norm(n, norms, x);
        if (size > best)
            best = size, best_solution = x;
    }
    for (Index j = 0; j < n; j++)  // the conjugates of complex numbers, as they are written first: A^-H v is of the same norm
        v[j] = norms[j] * (norms[j] * best_solution[j] / best);
    with_factors(system, [&](auto factors) { substitute_transposed(factors, system.pivots, v); });
    return norm(n, v);
}

// ||A||_oo. Sums of rows are those of parts of complex numbers; magnitudes of the row with the largest come close to the norm.
double infinity_norm(const LargeSystem &system)
{
    const double *sums = column_of(system, ROW_SUMS);
    Index largest = 0;
    for (Index i = 1; i < system.n; i++)
        largest = sums[i] > sums[largest] ? i : largest;
    double sum = system.complex ? 0.0 : largest_of(sums, system.n);
    with_matrix(system, [&](auto a) {
        for (Index j = 0; system.complex && j < a.length(); j += 2)
            sum += magnitude(Complex(double(a.row(largest)[j]), double(a.row(largest)[j + 1])));
    });
    return sum;
}

// From rows of A. The factors solve up to a `rate`, which residuals of solutions for random vectors show.
SystemNorms<double> matrix_evidence(const LargeSystem &system, const double *solutions, const double *residuals, double &rate)
{
    Index n = row_length(system), length = column_length(system), parts = parts_of(system);
    const double *sums = column_of(system, ROW_SUMS), *norms = column_of(system, COLUMN_NORMS);
    SystemNorms<double> found;
    found.infinity_norm = infinity_norm(system), found.smallest_column = smallest_of(norms, n);
    found.norm = norm(n, norms) / sqrt(parts); // norms of columns are there for each part
    found.judge(smallest_of(sums, system.n), largest_of(norms, n), system.n, system.limits);
    double left = 0.0;
    for (Index p = system.k; p < system.k + LARGE_PROBES; p++) {
        const double *residual = residuals + parts * p * length, *x = solutions + parts * p * length;
        // Rounding errors of its measurement add to a residual.
        double size = norm(n, residual) + rounding_of(system) * found.norm * norm(n, x);
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
    Index n = row_length(system);
    bool updated = system.single_factors;
    double *lost = column_of(system, SPARE), *norms = column_of(system, COLUMN_NORMS);
    SystemEvidence to = {};
    for (Index i = 0; i < n; i++) {
        double sum, low;
        two_sum(x[i], updated ? change[i] : 0.0, sum, low);
        x[i] = system.single_result ? double(float(sum)) : sum;
        lost[i] = (sum - x[i]) + low;
        to.largest = system.complex ? to.largest : worse(to.largest, fabs(x[i]));
    }
    for (Index i = 0; system.complex && i < n; i += 2)
        to.largest = worse(to.largest, magnitude(of_parts<Complex>(x + i)));
    double left = norm(n, residual), norm_b = norm(n, b), size = scaled_norm(n, norms, x);
    double doubled = (n + WIDTH + 2) * UNIT * (n + WIDTH + 2) * UNIT * rounding_of_parts(system);
    double rounding_errors = rounding_of(system);
    double floor = (system.doubled ? doubled : rounding_errors) * (matrix.norm * norm(n, x) + norm_b);
    // Rounding of the residual to one number, and of A times an update and the difference.
    double norm_change = updated ? norm(n, change) : 0.0;
    double noise = floor + rounding_errors * (norm_before + matrix.norm * norm_change);
    double scale = matrix.infinity_norm * largest_number(system, x) + largest_number(system, b);
    double error = largest_number(system, residual) / scale;
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
    Index n = row_length(system);
    double norm_a = norm(n, probe) / norm(n, column_of(system, IMAGE));
    double condition = inverse_norm * (norm_a > 1 ? norm_a : 1.0);
    return condition > 1 ? condition : 1.0;
}

// Update solutions once, and those for random vectors where their residuals do not show how well the factors solve.
SystemNorms<double> update_once(
    const LargeSystem &system, double &rate, RowsPart &all_rows, double *solutions, double *residuals, double *updates)
{
    Index k = parts_of(system) * system.k, length = column_length(system);
    Index count = rate <= system.limits.max_rate ? k : k + parts_of(system) * LARGE_PROBES;
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
template <typename Number> void solve_with_factors(const LargeSystem &system, double largest, SystemsSolution &to)
{
    constexpr Index EACH = PARTS<Number>;
    Index n = system.n, k = system.k, length = column_length(system), each = EACH * length, probes = k + LARGE_PROBES;
    double *solutions = column_of(system, FIXED_COLUMNS + 2 * system.threads);
    double *residuals = solutions + side_columns(system) * length, *updates = residuals + side_columns(system) * length;
    double *image = column_of(system, IMAGE), *norms = column_of(system, COLUMN_NORMS), *look = solutions + probes * each;
    SystemEvidence &evidence = evidence_of(to) = {};
    for (Index c = 0; c < k; c++)
        for (Index i = 0; i < n; i++)
            set_entry(residuals + c * each, length, i, of_parts<Number>(system.b + EACH * (c * n + i)));
    for (Index p = 0; p < LARGE_PROBES; p++)
        for (Index i = 0; i < n; i++)
            set_entry(residuals + (k + p) * each, length, i, Number(system.vectors[p * n + i]));
    memcpy(solutions, residuals, side_columns(system) * length * sizeof(double));
    evidence.growth = substitute(system, solutions, EACH * probes, true) / largest;
    for (Index j = 0; j < EACH * n; j++) // a step of the power method for the norm of A D^-1
        image[j] /= norms[j];
    for (Index j = 0; j < n; j++)
        set_entry(look, length, j, conjugate(of_parts<Number>(image + EACH * j) / norms[EACH * j]));
    RowsPart all_rows = {};
    all_rows.system = &system, all_rows.work = measure_part, all_rows.last = all_rows.end = n;
    all_rows.columns = solutions, all_rows.others = residuals, all_rows.count = EACH * (probes + 1);
    share_rows(all_rows);
    double norm_of_a = infinity_norm(system), *before = to.forward_error, rate;
    for (Index c = 0; c < k; c++) {
        const double *residual = residuals + c * each;
        double scale = norm_of_a * largest_number(system, solutions + c * each) + largest_number(system, system.b + c * EACH * n);
        evidence.history[0] = worse(evidence.history[0], largest_number(system, residual) / scale);
        before[c] = norm(EACH * n, residual);
    }
    SystemNorms<double> matrix = matrix_evidence(system, solutions, residuals, rate);
    if (system.single_factors)
        matrix = update_once(system, rate, all_rows, solutions, residuals, updates);
    double size = inverse_norm(system, solutions);
    evidence.doubtful = !(rate <= system.limits.max_rate);
    evidence.condition = condition_of(system, residuals + probes * each, size);
    evidence.condition_bound = system.limits.estimated * evidence.condition;
    // With X Z for A^-1 Z, A^-1 Z = X Z + A^-1 (Z - A X Z).
    double bound = system.limits.margin * size / (1 - rate);
    for (Index c = 0; c < k; c++) {
        double *x = solutions + c * each;
        SystemEvidence found = finish_column(
            system, matrix, bound, x, updates + c * each, residuals + c * each, before[c], system.b + c * EACH * n);
        join_worst<double>(evidence, found);
        to.forward_error[c] = found.forward_error;
        for (Index i = 0; i < n; i++)
            reinterpret_cast<Number *>(to.x)[i * k + c] = entry<Number>(x, i);
    }
}

}  // namespace

// Workspace in doubles.
Index large_workspace(const LargeSystem &system)
{
    return (FIXED_COLUMNS + 2 * system.threads + 3 * side_columns(system)) * column_length(system);
}

// Copy A to the place of the factors, with magnitudes of its rows and columns; returns the largest element.
double copy_large(const LargeSystem &system)
{
    Index n = system.n;
    memset(system.workspace, 0, large_workspace(system) * sizeof(double));
    RowsPart all_rows = {};
    all_rows.system = &system, all_rows.work = copy_part, all_rows.last = n;
    double most = share_rows(all_rows);
    double *norms = column_of(system, COLUMN_NORMS);
    for (Index j = 0; j < row_length(system); j++) {
        double square = 0.0, image = 0.0;
        for (Index t = 0; t < system.threads; t++) {
            square += column_of(system, FIXED_COLUMNS + 2 * t)[j];
            image += column_of(system, FIXED_COLUMNS + 2 * t + 1)[j];
        }
        norms[j] = sqrt(square), column_of(system, IMAGE)[j] = image;
    }
    for (Index j = 0; system.complex && j < n; j++)
        norms[2 * j] = norms[2 * j + 1] = root_of_squares(norms[2 * j], norms[2 * j + 1]);
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
    if (system.complex)
        solve_with_factors<Complex>(system, largest, to);
    else
        solve_with_factors<double>(system, largest, to);
    if (definite) // no element of U exceeds all of A
        raise(evidence_of(to).growth, 1.0);
}

NEULA_END
