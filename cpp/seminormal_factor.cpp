// A triangular factor of A, its inverse, and how good they are: a part of seminormal.cpp.
#include "seminormal.hpp"

NEULA_BEGIN

namespace {

constexpr int PASSES = 4; // enough for condition numbers up to some 1e13

// D R^-1 in `scaled`, and the norm of the vector of sums of magnitudes in its columns.
double scale_inverse(const Problem &p)
{
    memset(p.part, 0, p.columns * sizeof(double));
    for (Index i = 0; i < p.n; i++)
        for (Index j = 0; j < p.columns; j++) {
            double x = p.scaled[i * p.columns + j] = p.sizes[i] * p.inverse[i * p.columns + j];
            p.part[j] += fabs(x);
        }
    return norm(p.columns, p.part);
}

// The inverse of a factor of the shifted Gram matrix; false where there is no factor.
bool factorize(const Problem &p, double shift)
{
    if (!cholesky(p.gram, p.n, p.columns, shift))
        return false;
    invert(p.gram, p.n, p.columns, p.inverse);
    return true;
}

// R^-1 times the inverse of a factor of the Gram matrix of W = A R^-1, in place; false where numbers are not finite.
bool factorize_again(const Problem &p)
{
    Index columns = p.columns, bytes = columns * columns * sizeof(double);
    memcpy(p.scaled, p.inverse, bytes);
    if (!factorize(p, gram_shift(p.m, p.n)))
        return false;
    memset(p.gram, 0, bytes);
    for (Index i = 0; i < p.n; i++)
        add_multiples(
            p.gram + i * columns, p.scaled + i * columns, 1, 1.0, p.inverse, columns, i, p.n, i, true);
    memcpy(p.inverse, p.gram, bytes);
    return true;
}

// W = A R^-1, row by row.
void multiply_by_inverse(const Problem &p, bool by_parts, double *w)
{
    for (Index i = 0; i < p.m; i++) {
        const double *row = p.by_rows + i * p.columns;
        if (by_parts)
            times_transposed_by_parts(p.inverse, p.n, p.columns, row, w + i * p.columns, p.part);
        else
            times_transposed(p.inverse, p.n, p.columns, row, w + i * p.columns);
    }
}

// The rate, measured for this R^-1. Rounding errors of W, whose Gram matrix is left in `gram`, are n u |A| |R^-1| at most,
// less by parts, which takes longer. Those of the Gram matrix are m u times the squares of its norm. R^-T times a gradient
// errs as W by parts does, and R^-1 times that by half of n u: sums are those of two lanes or more.
double measure_rate(const Problem &p, const SeminormalLimits &limits, double *w, double &sums_norm)
{
    Index n = p.n, columns = p.columns;
    double loss = 0.0, square_of_w = 0.0;
    sums_norm = scale_inverse(p);
    bool by_parts = 8 * n * UNIT * sums_norm > limits.max_rate;
    double of_product = (by_parts ? partial_sum_terms(n) : n) * UNIT * sums_norm;
    double of_steps = (partial_sum_terms(n) + n / 2 + 4) * UNIT * sums_norm;
    multiply_by_inverse(p, by_parts, w);
    form_gram(w, p.m, columns, p.gram, false);
    for (Index i = 0; i < n; i++) {
        const double *row = p.gram + i * columns;
        square_of_w += row[i], loss += (row[i] - 1.0) * (row[i] - 1.0);
        for (Index j = i + 1; j < n; j++)
            loss += 2.0 * row[j] * row[j];
    }
    // ||W||_2^2 is at most 1 + ||I - W^T W||_F.
    double measured = sqrt(loss) + (p.m + 2) * UNIT * square_of_w;
    measured += (2.0 * sqrt(1.0 + measured) + of_product) * of_product;
    return BOUND_MARGIN * (measured + of_steps);
}

// The same by shifted Cholesky QR of W, until that is nearly orthonormal, from a factor or, where there is none, from the
// Gram matrix of A in `scaled`. NaN where numbers are not finite, or there is too little memory.
double shifted_rate(const Problem &p, const SeminormalLimits &limits)
{
    Workspace workspace(p.rows * p.columns);
    if (!workspace)
        return NAN;
    double rate = NAN, sums_norm, *w = workspace.take(p.rows * p.columns);
    bool factorized = p.quality.factorized;
    if (!factorized) {
        memcpy(p.gram, p.scaled, p.columns * p.columns * sizeof(double));
        factorized = factorize(p, gram_shift(p.m, p.n));
    }
    for (int pass = 0; factorized && pass < PASSES; pass++) {
        rate = measure_rate(p, limits, w, sums_norm);
        // ||D R^-1|| is at least an n-th of `sums_norm`: of a matrix without full rank it soon says so.
        bool hopeless = sums_norm > p.n * limits.condition;
        factorized = !(rate <= limits.max_rate) && pass + 1 < PASSES && !hopeless && factorize_again(p);
    }
    return rate;
}

}  // namespace

bool begin_factor(Problem &p, const SeminormalLimits &limits)
{
    Index m = p.m, n = p.n, columns = p.columns;
    FactorQuality &quality = p.quality;
    quality = NO_FACTOR;
    form_gram(p.by_rows, m, columns, p.gram, false);
    for (Index j = 0; j < n; j++) {
        p.sizes[j] = sqrt(p.gram[j * columns + j]);
        p.part[j] = 1.0 / p.sizes[j];
        if (!in_safe_range(p.sizes[j], limits))
            return false;
    }
    double gram_norm = symmetric_norm(p.gram, n, columns, p.part);
    quality.norm = gram_norm / sqrt(n), quality.norm_bound = sqrt(gram_norm);
    memcpy(p.scaled, p.gram, columns * columns * sizeof(double));
    quality.factorized = factorize(p, 0.0);
    if (quality.factorized) {
        double sums_norm = scale_inverse(p);
        quality.rate = BOUND_MARGIN * UNIT * sums_norm * ((m + n + 2) * sums_norm + 5 * n);
    }
    return true;
}

bool finish_factor(Problem &p, const SeminormalLimits &limits)
{
    FactorQuality &quality = p.quality;
    quality.shifted = !(quality.rate <= limits.max_rate);
    if (quality.shifted)
        quality.rate = shifted_rate(p, limits);
    if (!(quality.rate <= limits.max_rate))
        return false;
    form_gram(p.scaled, p.n, p.columns, p.gram, true);
    for (Index j = 0; j < p.columns; j++)
        p.part[j] = 1.0;
    quality.inverse_norm = sqrt(symmetric_norm(p.gram, p.n, p.columns, p.part));
    return true;
}

NEULA_END
