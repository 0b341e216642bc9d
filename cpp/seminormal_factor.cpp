// A triangular factor of A, or of A^T with few rows, its inverse, how good they are, and steps of refinement by them: a part of
// seminormal.cpp.
#include "seminormal.hpp"

NEULA_BEGIN

constexpr int PASSES = 4; // enough for condition numbers up to some 1e13

// D R^-1 in `scaled`, and the norm of the vector of sums of magnitudes in its columns.
double FullRank::scale_inverse() const
{
    memset(part, 0, columns * sizeof(double));
    for (Index i = 0; i < n; i++)
        for (Index j = 0; j < columns; j++) {
            double x = scaled[i * columns + j] = sizes[i] * inverse[i * columns + j];
            part[j] += fabs(x);
        }
    return norm(columns, part);
}

// The inverse of a factor of the shifted Gram matrix; false where there is no factor.
bool FullRank::factorize(double shift) const
{
    if (!cholesky(gram, n, columns, shift))
        return false;
    invert(gram, n, columns, inverse);
    return true;
}

// R^-1 times the inverse of a factor of the Gram matrix of W = A R^-1, in place; false where numbers are not finite.
bool FullRank::factorize_again() const
{
    Index bytes = columns * columns * sizeof(double);
    memcpy(scaled, inverse, bytes);
    if (!factorize(gram_shift(m, n)))
        return false;
    memset(gram, 0, bytes);
    for (Index i = 0; i < n; i++)
        add_multiples(
            gram + i * columns, scaled + i * columns, 1, 1.0, inverse, columns, i, n, i, true);
    memcpy(inverse, gram, bytes);
    return true;
}

// W = A R^-1, row by row.
void FullRank::multiply_by_inverse(bool by_parts, double *w) const
{
    for (Index i = 0; i < m; i++) {
        const double *row = by_rows + i * columns;
        if (by_parts)
            times_transposed_by_parts(inverse, n, columns, row, w + i * columns, part);
        else
            times_transposed(inverse, n, columns, row, w + i * columns);
    }
}

// The rate, measured for this R^-1. Rounding errors of W, whose Gram matrix is left in `gram`, are n u |A| |R^-1| at most,
// less by parts, which takes longer. Those of the Gram matrix are m u times the squares of its norm. R^-T times a gradient
// errs as W by parts does, and R^-1 times that by half of n u: sums are those of two lanes or more.
double FullRank::measure_rate(const SeminormalLimits &limits, double *w, double &sums_norm) const
{
    double loss = 0.0, square_of_w = 0.0;
    sums_norm = scale_inverse();
    bool by_parts = 8 * n * UNIT * sums_norm > limits.max_rate;
    double of_product = (by_parts ? partial_sum_terms(n) : n) * UNIT * sums_norm;
    double of_steps = (partial_sum_terms(n) + n / 2 + 4) * UNIT * sums_norm;
    multiply_by_inverse(by_parts, w);
    form_gram(w, m, columns, gram, false);
    for (Index i = 0; i < n; i++) {
        const double *row = gram + i * columns;
        square_of_w += row[i], loss += (row[i] - 1.0) * (row[i] - 1.0);
        for (Index j = i + 1; j < n; j++)
            loss += 2.0 * row[j] * row[j];
    }
    // ||W||_2^2 is at most 1 + ||I - W^T W||_F.
    double measured = sqrt(loss) + (m + 2) * UNIT * square_of_w;
    measured += (2.0 * sqrt(1.0 + measured) + of_product) * of_product;
    return BOUND_MARGIN * (measured + of_steps);
}

// The same by shifted Cholesky QR of W, until that is nearly orthonormal, from a factor or, where there is none, from the
// Gram matrix of A in `scaled`. NaN where numbers are not finite, or there is too little memory.
double FullRank::shifted_rate(const SeminormalLimits &limits) const
{
    Workspace workspace(rows * columns);
    if (!workspace)
        return NAN;
    double rate = NAN, sums_norm, *w = workspace.take(rows * columns);
    bool factorized = quality.factorized;
    if (!factorized) {
        memcpy(gram, scaled, columns * columns * sizeof(double));
        factorized = factorize(gram_shift(m, n));
    }
    for (int pass = 0; factorized && pass < PASSES; pass++) {
        rate = measure_rate(limits, w, sums_norm);
        // ||D R^-1|| is at least an n-th of `sums_norm`: of a matrix without full rank it soon says so.
        bool hopeless = sums_norm > n * limits.condition;
        factorized = !(rate <= limits.max_rate) && pass + 1 < PASSES && !hopeless && factorize_again();
    }
    return rate;
}

bool FullRank::begin_factor(const SeminormalLimits &limits)
{
    quality = NO_FACTOR;
    form_gram(by_rows, m, columns, gram, false);
    for (Index j = 0; j < n; j++) {
        sizes[j] = sqrt(gram[j * columns + j]);
        part[j] = 1.0 / sizes[j];
        if (!in_safe_range(sizes[j], limits))
            return false;
    }
    double gram_norm = symmetric_norm(gram, n, columns, part);
    quality.norm = gram_norm / sqrt(n), quality.norm_bound = sqrt(gram_norm);
    memcpy(scaled, gram, columns * columns * sizeof(double));
    quality.factorized = factorize(0.0);
    if (quality.factorized) {
        double sums_norm = scale_inverse();
        quality.rate = BOUND_MARGIN * UNIT * sums_norm * ((m + n + 2) * sums_norm + 5 * n);
    }
    return true;
}

bool FullRank::finish_factor(const SeminormalLimits &limits)
{
    quality.shifted = !(quality.rate <= limits.max_rate);
    if (quality.shifted)
        quality.rate = shifted_rate(limits);
    if (!(quality.rate <= limits.max_rate))
        return false;
    form_gram(scaled, n, columns, gram, true);
    for (Index j = 0; j < columns; j++)
        part[j] = 1.0;
    quality.inverse_norm = sqrt(symmetric_norm(gram, n, columns, part));
    return true;
}

// R^-T times the gradient.
void FullRank::project() const
{
    times_transposed_by_parts(inverse, n, columns, problem.gradient, projected, part);
}

void FullRank::find_update(bool doubled) const
{
    problem.find_gradient(doubled), project(), times(inverse, n, columns, projected, update);
}

StepError FullRank::error_left(double noise) const
{
    const Problem &p = problem;
    double of_residual = quality.inverse_norm * norm(rows, p.residual);
    double bounds = sqrt(n) * (p.norm_of_x() + of_residual) + p.b_norm; // ||B||_F is the root of n
    double floor = quality.inverse_norm * noise * bounds;
    return {quality.inverse_norm * quality.rate / (1.0 - quality.rate) * norm(columns, projected) + floor, floor};
}

void FullRank::add_update(bool) const
{
    for (Index j = 0; j < n; j++)
        add_doubled(problem.x[j], problem.x_low[j], update[j]);
}

double FullRank::measure(SeminormalNumbers &found) const
{
    const Problem &p = problem;
    p.multiply(update, -1.0, p.residual), p.find_gradient(false), project();
    for (Index j = 0; j < n; j++)
        p.gradient[j] /= sizes[j];
    measure_gradient(p, quality, norm(n, p.gradient), norm(columns, projected), found);
    return 0.0;
}

// Whether the rows of B = A D^-1, however small they are, are independent beyond the rounding errors of their Gram matrix,
// (m + n + 5) u times squares of norms, and those of its factor.
bool FewRows::are_independent()
{
    const FullRank &p = transposed;
    Index m = problem.m, n = problem.n, tall = problem.tall;
    double square_of_b = 0.0, *scaled = scaled_columns;
    for (Index j = 0; j < n; j++)
        for (Index i = 0; i < tall; i++)
            scaled[j * tall + i] = problem.by_columns[j * tall + i] / problem.sizes[j];
    form_gram(scaled, n, tall, p.gram, false);
    for (Index i = 0; i < tall; i++)
        square_of_b += i < m ? p.gram[i * tall + i] : 0.0, p.part[i] = 1.0;
    double gram_norm = symmetric_norm(p.gram, m, tall, p.part);
    if (!cholesky(p.gram, m, tall, 0.0))
        return false;
    invert(p.gram, m, tall, p.inverse);
    form_gram(p.inverse, m, tall, p.gram, true);
    double inverse_norm = sqrt(symmetric_norm(p.gram, m, tall, p.part));
    norm_of_b = gram_norm / sqrt(square_of_b), condition = norm_of_b * inverse_norm;
    double lost = (m + n + 5) * UNIT * square_of_b * inverse_norm * inverse_norm;
    condition_bound = BOUND_MARGIN * sqrt(gram_norm / (1.0 - lost)) * inverse_norm;
    return 4.0 * lost <= 1.0;
}

// ||E^-1 v|| for the norms E of the rows.
double FewRows::norm_by_rows(const double *v) const
{
    double sum = 0.0;
    for (Index i = 0; i < problem.m; i++)
        sum += (v[i] / transposed.sizes[i]) * (v[i] / transposed.sizes[i]);
    return sqrt(sum);
}

bool FewRows::factorize(const SeminormalLimits &limits)
{
    Index scaled = problem.n * problem.tall;
    if (!allocate(scaled))
        return false;
    if (scaled_columns == nullptr)
        workspace.take(scaled, scaled_columns);
    rank = problem.m;
    bool good = find_sizes(limits) && are_independent() && condition_bound < limits.condition &&
                transposed.begin_factor(limits) && transposed.finish_factor(limits);
    quality = transposed.quality;
    return good;
}

void FewRows::find_update(bool) const
{
    times_transposed(transposed.inverse, problem.m, problem.tall, problem.residual, transposed.projected);
    times(transposed.inverse, problem.m, problem.tall, transposed.projected, added);
}

// Rounding errors of the residual reach x through R^-T; those of A^T w are its own.
StepError FewRows::error_left(double noise) const
{
    const Problem &p = problem;
    double of_w = scaled_norm(p.m, transposed.sizes, p.w), rows_norm = sqrt(p.m); // ||E^-1 A||_F
    double of_residual = quality.inverse_norm * (rows_norm * norm(p.wide, p.x) + norm_by_rows(p.b));
    double floor = noise * ((1.0 + quality.rate) * of_residual + rows_norm * of_w);
    double rate = (1.0 + quality.rate) * quality.rate / (1.0 - quality.rate);
    return {largest * (rate * norm(p.tall, transposed.projected) + floor), largest * floor};
}

void FewRows::add_update(bool doubled) const
{
    MinimumNorm::add_update(doubled);
    problem.multiply(change, -1.0, problem.residual);
}

// That of J. L. Rigal and J. Gaches (1967), for B.
double FewRows::backward_error() const
{
    const Problem &p = problem;
    return quotient(norm(p.tall, p.residual), norm_of_b * p.norm_of_x() + p.b_norm);
}

double FewRows::measure(SeminormalNumbers &found) const
{
    found.optimality = found.refined_error = backward_error();
    return 0.0;
}

NEULA_END
