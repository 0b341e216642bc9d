// Dependent columns: a part of seminormal.cpp. Pivots of the Gram matrix of B = A D^-1 name r columns that count,
// B P = B1 [I F] + [0 E] with F by the corrected seminormal equations and an E that is computed. The solution has the
// coefficients c = [I F] P^T D x with R c = Q^T b, and the minimum-norm one is M (M^T M)^-1 c for M = D P [I F]^T, a sum of
// rows: it lies in their space whatever the errors of its coefficients. Q is never formed, since Q R are columns of B (Björck,
// "Numerical Methods for Least Squares Problems", SIAM, 1996).
//
// What is dropped, ||E|| = sigma_(r+1), counts by its square only, since the residual is made orthogonal to B P [I F]^T and not
// to r columns of B (Fierro and Bunch, "Bounding the subspaces from rank revealing two-sided orthogonal decompositions", SIAM
// J. Matrix Anal. Appl. 16, 1995): the truncated problem is solved, which singular values define, not one that pivots define.
#include "doubled_rows.hpp"
#include "seminormal_minimum_norm.hpp"

NEULA_BEGIN

namespace {

// B^T B, all of it; columns of zeros stay. Norms of B are left in `quality`.
void form_scaled_gram(MinimumNorm &s, const double *of_a)
{
    double *gram = s.independent.gram, *ones = s.independent.y, trace = 0.0;
    Index n = s.n, wide = s.wide;
    if (of_a == nullptr)
        form_gram(s.by_rows, s.m, wide, gram, false), of_a = gram;
    for (Index i = 0; i < n; i++) {
        for (Index j = i; j < n; j++)
            gram[i * wide + j] = gram[j * wide + i] = of_a[i * wide + j] / s.sizes[i] / s.sizes[j];
        trace += gram[i * wide + i], ones[i] = 1.0;
    }
    double gram_norm = symmetric_norm(gram, n, wide, ones);
    s.quality.norm = gram_norm / sqrt(trace), s.quality.norm_bound = BOUND_MARGIN * sqrt(gram_norm);
}

// Rows of R by pivots, their elements where the columns are, and the order of the columns; the number of pivots larger than
// `least`, or 0 if another column is larger than what rounding errors make of zero.
Index find_pivots(const MinimumNorm &s, double least, double rounding)
{
    const IndependentColumns &of = s.independent;
    Index n = s.n, wide = s.wide, most = s.m < n ? s.m : n, r = 0;
    double *left = of.scaled; // of the squares of the columns, negative of those that are chosen
    for (Index j = 0; j < n; j++)
        left[j] = of.gram[j * wide + j];
    for (; r < most; r++) {
        Index p = 0;
        for (Index j = 1; j < n; j++)
            p = left[j] > left[p] ? j : p;
        double *row = of.upper + r * wide;
        memcpy(row, of.gram + p * wide, wide * sizeof(double));
        add_multiples(row, of.upper + p, wide, -1.0, of.upper, wide, 0, r, 0, false);
        double pivot = row[p];
        if (!(left[p] > least && pivot > least))
            break;
        for (Index j = 0; j < n; j++) {
            row[j] = left[j] < 0.0 ? 0.0 : row[j] / sqrt(pivot);
            left[j] = left[j] < 0.0 ? left[j] : fmax(0.0, left[j] - row[j] * row[j]);
        }
        left[p] = -1.0, of.order[r] = p;
    }
    for (Index j = 0, next = r; j < n; j++)
        if (!(left[j] < 0.0)) {
            if (!(left[j] <= rounding))
                return 0;
            of.order[next++] = j;
        }
    return r;
}

// R^-1 of B1, and its quality by the rounding errors of a Gram matrix (seminormal.hpp); false where it is not good enough.
bool invert_first(MinimumNorm &s, const SeminormalLimits &limits)
{
    const IndependentColumns &of = s.independent;
    FactorQuality &quality = s.quality;
    Index r = s.rank, columns = of.columns;
    double *sums = of.y;
    memset(of.gram, 0, r * columns * sizeof(double));
    for (Index i = 0; i < r; i++)
        for (Index k = i; k < r; k++)
            of.gram[i * columns + k] = of.upper[i * s.wide + of.order[k]];
    invert(of.gram, r, columns, of.inverse);
    form_gram(of.inverse, r, columns, of.gram, true);
    for (Index k = 0; k < r; k++)
        sums[k] = 1.0;
    quality.inverse_norm = sqrt(symmetric_norm(of.gram, r, columns, sums));
    memset(sums, 0, s.wide * sizeof(double));
    for (Index i = 0; i < r; i++)
        for (Index k = i; k < r; k++)
            sums[k] += fabs(of.inverse[i * columns + k]);
    double sums_norm = norm(columns, sums);
    quality.rate = BOUND_MARGIN * UNIT * sums_norm * ((s.m + r + 5) * sums_norm + 5 * r);
    quality.inverse_norm /= sqrt(1.0 - quality.rate);
    return quality.rate <= limits.max_rate;
}

// X X^T v in place.
void apply(const MinimumNorm &s, const double *x, double *v)
{
    times_transposed(x, s.rank, s.independent.columns, v, s.independent.multipliers);
    times(x, s.rank, s.independent.columns, s.independent.multipliers, v);
}

// What F leaves of a column that does not count, in `error`; its norm.
double find_error(const MinimumNorm &s, Index c)
{
    const IndependentColumns &of = s.independent;
    Index own = of.order[s.rank + c];
    memset(of.scaled, 0, s.wide * sizeof(double));
    for (Index k = 0; k < s.rank; k++)
        of.scaled[of.order[k]] = -of.rest[c * of.columns + k] / s.sizes[of.order[k]];
    of.scaled[own] = 1.0 / s.sizes[own];
    memset(of.error, 0, s.tall * sizeof(double));
    s.multiply(of.scaled, 1.0, of.error);
    return norm(s.tall, of.error);
}

// Add to a column of F what makes the error orthogonal to B1.
void correct(const MinimumNorm &s, Index c)
{
    const IndependentColumns &of = s.independent;
    s.multiply_transposed(of.error, s.gradient);
    memset(of.y, 0, s.wide * sizeof(double));
    for (Index k = 0; k < s.rank; k++)
        of.y[k] = s.gradient[of.order[k]] / s.sizes[of.order[k]];
    apply(s, of.inverse, of.y);
    for (Index k = 0; k < s.rank; k++)
        of.rest[c * of.columns + k] += of.y[k];
}

// F, and what it drops: E, which is corrected where it is more than rounding errors, and rounding errors of that; false
// where the rank is in doubt.
bool find_rest(MinimumNorm &s, const SeminormalLimits &limits)
{
    const IndependentColumns &of = s.independent;
    Index r = s.rank, others = s.n - r, columns = of.columns, longest = s.m > s.n ? s.m : s.n;
    double doubt = longest * UNIT, norm_of_e = 0.0, norm_of_f = 0.0;
    double most = fmin((limits.rcond - doubt) * s.quality.norm, limits.rounding);
    for (Index c = 0; c < others; c++) {
        double *row = of.rest + c * columns;
        memset(row, 0, columns * sizeof(double)), memset(of.y, 0, s.wide * sizeof(double));
        for (Index k = 0; k < r; k++)
            of.y[k] = of.upper[k * s.wide + of.order[r + c]];
        times(of.inverse, r, columns, of.y, row);
        double error = find_error(s, c);
        if (error * sqrt(others) > 0.5 * most)
            correct(s, c), error = find_error(s, c);
        norm_of_e = root_of_squares(norm_of_e, error), norm_of_f = root_of_squares(norm_of_f, norm(columns, row));
    }
    double inverse_norm = s.quality.inverse_norm;
    double rounding = (s.n + 4) * UNIT * (sqrt(r) * norm_of_f + sqrt(others));
    s.growth = root_of_squares(1.0, norm_of_f), s.dropped = (norm_of_e + rounding) * inverse_norm;
    s.condition = larger_of(1.0, s.quality.norm * inverse_norm);
    s.condition_bound = (s.quality.norm_bound + norm_of_e) * inverse_norm;
    bool full = r == s.m || r == s.n;
    return s.condition_bound * (limits.rcond + doubt) < 1.0 && s.dropped * GAP < 1.0 && (full || norm_of_e < most);
}

// The inverse of a factor of S1^2 + F S2^2 F^T, with a diagonal matrix S in the order of the columns.
bool invert_shifted(const MinimumNorm &s, const double *scales, double *inverse)
{
    const IndependentColumns &of = s.independent;
    Index r = s.rank, others = s.n - r, columns = of.columns;
    for (Index c = 0; c < others; c++)
        for (Index k = 0; k < columns; k++)
            of.upper[c * columns + k] = scales[r + c] * of.rest[c * columns + k];
    form_gram(of.upper, others, columns, of.gram, false);
    for (Index k = 0; k < r; k++)
        of.gram[k * columns + k] += scales[k] * scales[k];
    if (!cholesky(of.gram, r, columns, 0.0))
        return false;
    invert(of.gram, r, columns, inverse);
    return true;
}

bool invert_both(const MinimumNorm &s)
{
    double *scales = s.independent.scaled;
    for (Index k = 0; k < s.n; k++)
        scales[k] = 1.0;
    if (!invert_shifted(s, scales, s.independent.of_columns))
        return false;
    for (Index k = 0; k < s.n; k++)
        scales[k] = s.sizes[s.independent.order[k]] / s.largest;
    return invert_shifted(s, scales, s.independent.of_rows);
}

// Q^T r by A^T r: R^-T (I + F F^T)^-1 [I F] P^T D^-1 A^T r.
void project(const MinimumNorm &s)
{
    const IndependentColumns &of = s.independent;
    memset(of.y, 0, s.wide * sizeof(double));
    for (Index k = 0; k < s.n; k++)
        of.scaled[k] = s.gradient[of.order[k]] / s.sizes[of.order[k]];
    memcpy(of.y, of.scaled, s.rank * sizeof(double));
    add_multiples(of.y, of.scaled + s.rank, 1, 1.0, of.rest, of.columns, 0, s.n - s.rank, 0, false);
    apply(s, of.of_columns, of.y);
    times_transposed(of.inverse, s.rank, of.columns, of.y, of.projected);
}

// Q R^-T (M^T M)^-1 R^-1 times that: Q R are columns of B.
void find_added(const MinimumNorm &s)
{
    const IndependentColumns &of = s.independent;
    memset(of.y, 0, s.wide * sizeof(double));
    times(of.inverse, s.rank, of.columns, of.projected, of.y);
    apply(s, of.of_rows, of.y);
    apply(s, of.inverse, of.y);
    memset(of.scaled, 0, s.wide * sizeof(double));
    for (Index k = 0; k < s.rank; k++)
        of.scaled[of.order[k]] = of.y[k] / s.sizes[of.order[k]] / (s.largest * s.largest);
    memset(s.added, 0, s.tall * sizeof(double));
    s.multiply(of.scaled, 1.0, s.added);
}

// Of unit vectors where they are few, or else of random ones.
double probe_element(const RateProbes &probes, Index r, Index k, Index p)
{
    return r <= probes.count ? k == p : probes.vectors[k * probes.count + p];
}

// ||I - P||_F from above, where P is what a step takes from the projected residual, along some vectors.
double measure_rate(const MinimumNorm &s, const RateProbes &probes)
{
    const IndependentColumns &of = s.independent;
    Index r = s.rank, count = r < probes.count ? r : probes.count;
    double sum = 0.0;
    for (Index p = 0; p < count; p++) {
        for (Index k = 0; k < r; k++)
            of.projected[k] = probe_element(probes, r, k, p);
        find_added(s), s.multiply_transposed(s.added, s.x);
        memset(s.residual, 0, s.tall * sizeof(double));
        s.multiply(s.x, 1.0, s.residual), s.multiply_transposed(s.residual, s.gradient);
        project(s);
        for (Index k = 0; k < r; k++) {
            double lost = probe_element(probes, r, k, p) - of.projected[k];
            sum += lost * lost;
        }
    }
    return probes.margin * sqrt(sum) + probes.rounding * r * s.quality.inverse_norm;
}

}  // namespace

bool factorize_dependent(
    MinimumNorm &s, const SeminormalLimits &limits, const RateProbes &probes, const double *gram)
{
    IndependentColumns &of = s.independent;
    memset(of.projected, 0, s.wide * sizeof(double));
    s.quality = NO_FACTOR, s.condition = NAN;
    s.few_rows = false;
    form_scaled_gram(s, gram);
    double square = limits.rcond * limits.rcond, rounding = (s.m + s.n + 2) * UNIT;
    s.rank = find_pivots(s, fmax(square, s.n * rounding), fmax(square, 4.0 * rounding));
    of.columns = padded(s.rank);
    if (!(s.rank > 0 && invert_first(s, limits) && find_rest(s, limits) && invert_both(s)))
        return false;
    s.quality.rate = measure_rate(s, probes);
    return s.quality.rate <= limits.max_rate;
}

StepError step_of_dependent(const MinimumNorm &s, double noise, bool doubled)
{
    if (doubled)
        combine_doubled(
            nullptr, 1.0, s.by_rows, s.wide, s.residual, s.residual_low, s.m, s.gradient, nullptr);
    else
        s.multiply_transposed(s.residual, s.gradient);
    project(s), find_added(s);
    double b_bound = sqrt(s.n), projected_norm = norm(s.rank, s.independent.projected); // ||B||_F
    double inverse_norm = s.quality.inverse_norm, rate = s.quality.rate, along = s.spread * inverse_norm;
    double of_gradient = inverse_norm * norm(s.tall, s.residual);
    double floor =
        noise * (b_bound * (scaled_norm(s.n, s.sizes, s.x) + of_gradient) + norm(s.tall, s.b));
    // Rounding errors of A^T w are those of x itself.
    double of_rows = s.largest * s.largest * b_bound * noise * norm(s.tall, s.w);
    double error = along * ((1.0 + rate) * rate / (1.0 - rate) * projected_norm + floor) + of_rows;
    return {error, along * floor + of_rows};
}

double errors_of_dependent(const MinimumNorm &s, Evidence &found)
{
    double residual_norm = norm(s.tall, s.residual), image = s.quality.norm * scaled_norm(s.n, s.sizes, s.x);
    s.multiply_transposed(s.residual, s.gradient), project(s);
    double projected_norm = norm(s.rank, s.independent.projected) / (1.0 - s.quality.rate);
    double gradient_norm = norm(s.n, s.independent.scaled);
    found.optimality = quotient(gradient_norm, s.quality.norm * residual_norm);
    found.refined_error = smaller_of(found.optimality, quotient(residual_norm, image + norm(s.tall, s.b)));
    found.refined_error = smaller_of(found.refined_error, quotient(projected_norm, image));
    // F errs by at most as much as E says, times what makes singular values of that.
    double turned = 3.0 * (s.dropped / (1.0 - s.dropped)) * (s.dropped / (1.0 - s.dropped));
    return turned * s.spread * s.spread * s.growth * (3.0 + (s.condition_bound + 1.0) * residual_norm / image);
}

NEULA_END
