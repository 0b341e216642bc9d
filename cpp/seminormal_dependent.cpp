// Dependent columns: a part of seminormal.cpp. Pivots of the Gram matrix of B = A D^-1 name r columns that count,
// B P = B1 [I F] + [0 E] with F by the corrected seminormal equations and an E that is computed. The solution has the
// coefficients c = [I F] P^T D x with R c = Q^T b, and the minimum-norm one is M (M^T M)^-1 c for M = D P [I F]^T, a sum of
// rows: it lies in their space whatever the errors of its coefficients. Q is never formed, since Q R are columns of B (Björck,
// "Numerical Methods for Least Squares Problems", SIAM, 1996).
//
// The dropped part, ||E|| = sigma_(r+1), counts by its square only, since the residual is made orthogonal to B P [I F]^T and not
// to r columns of B (Fierro and Bunch, "Bounding the subspaces from rank revealing two-sided orthogonal decompositions", SIAM
// J. Matrix Anal. Appl. 16, 1995): the truncated problem is solved, which singular values define, not one that pivots define.
#include "seminormal.hpp"

NEULA_BEGIN

// B^T B, all of it; columns of zeros stay. Norms of B are left in `quality`.
void Dependent::form_scaled_gram(const double *of_a)
{
    double *ones = y, trace = 0.0;
    Index n = problem.n, wide = problem.wide;
    if (of_a == nullptr)
        form_gram(problem.by_rows, problem.m, wide, gram, false), of_a = gram;
    for (Index i = 0; i < n; i++) {
        for (Index j = i; j < n; j++)
            gram[i * wide + j] = gram[j * wide + i] = of_a[i * wide + j] / problem.sizes[i] / problem.sizes[j];
        trace += gram[i * wide + i], ones[i] = 1.0;
    }
    double gram_norm = symmetric_norm(gram, n, wide, ones);
    quality.norm = gram_norm / sqrt(trace), quality.norm_bound = BOUND_MARGIN * sqrt(gram_norm);
}

// Rows of R by pivots, their elements where the columns are, and the order of the columns; the number of pivots larger than
// `least`, or 0 if another column is larger than what rounding errors make of zero.
Index Dependent::find_pivots(double least, double rounding) const
{
    Index n = problem.n, wide = problem.wide, most = problem.m < n ? problem.m : n, r = 0;
    double *left = scaled; // of the squares of the columns, negative of those that are chosen
    for (Index j = 0; j < n; j++)
        left[j] = gram[j * wide + j];
    for (; r < most; r++) {
        Index p = 0;
        for (Index j = 1; j < n; j++)
            p = left[j] > left[p] ? j : p;
        double *row = upper + r * wide;
        memcpy(row, gram + p * wide, wide * sizeof(double));
        add_multiples(row, upper + p, wide, -1.0, upper, wide, 0, r, 0, false);
        double pivot = row[p];
        if (!(left[p] > least && pivot > least))
            break;
        for (Index j = 0; j < n; j++) {
            row[j] = left[j] < 0.0 ? 0.0 : row[j] / sqrt(pivot);
            left[j] = left[j] < 0.0 ? left[j] : fmax(0.0, left[j] - row[j] * row[j]);
        }
        left[p] = -1.0, order[r] = p;
    }
    for (Index j = 0, next = r; j < n; j++)
        if (!(left[j] < 0.0)) {
            if (!(left[j] <= rounding))
                return 0;
            order[next++] = j;
        }
    return r;
}

// R^-1 of B1, and its quality by the rounding errors of a Gram matrix (seminormal.hpp); false where it is not good enough.
bool Dependent::invert_first(const SeminormalLimits &limits)
{
    Index r = rank;
    double *sums = y;
    memset(gram, 0, r * columns * sizeof(double));
    for (Index i = 0; i < r; i++)
        for (Index k = i; k < r; k++)
            gram[i * columns + k] = upper[i * problem.wide + order[k]];
    invert(gram, r, columns, inverse);
    form_gram(inverse, r, columns, gram, true);
    for (Index k = 0; k < r; k++)
        sums[k] = 1.0;
    quality.inverse_norm = sqrt(symmetric_norm(gram, r, columns, sums));
    memset(sums, 0, problem.wide * sizeof(double));
    for (Index i = 0; i < r; i++)
        for (Index k = i; k < r; k++)
            sums[k] += fabs(inverse[i * columns + k]);
    double sums_norm = norm(columns, sums);
    quality.rate = BOUND_MARGIN * UNIT * sums_norm * ((problem.m + r + 5) * sums_norm + 5 * r);
    quality.inverse_norm /= sqrt(1.0 - quality.rate);
    return quality.rate <= limits.max_rate;
}

// X X^T v in place.
void Dependent::apply(const double *x, double *v) const
{
    times_transposed(x, rank, columns, v, multipliers);
    times(x, rank, columns, multipliers, v);
}

// Remainder of a dependent column after F, in `error`; its norm.
double Dependent::find_error(Index c) const
{
    Index own = order[rank + c];
    memset(scaled, 0, problem.wide * sizeof(double));
    for (Index k = 0; k < rank; k++)
        scaled[order[k]] = -rest[c * columns + k] / problem.sizes[order[k]];
    scaled[own] = 1.0 / problem.sizes[own];
    memset(error, 0, problem.tall * sizeof(double));
    problem.multiply(scaled, 1.0, error);
    return norm(problem.tall, error);
}

// Correct a column of F so that the error is orthogonal to B1.
void Dependent::correct(Index c) const
{
    problem.multiply_transposed(error, problem.gradient);
    memset(y, 0, problem.wide * sizeof(double));
    for (Index k = 0; k < rank; k++)
        y[k] = problem.gradient[order[k]] / problem.sizes[order[k]];
    apply(inverse, y);
    for (Index k = 0; k < rank; k++)
        rest[c * columns + k] += y[k];
}

// F, and the dropped part E, which is corrected where it is more than rounding errors, and rounding errors of that; false
// where the rank is in doubt.
bool Dependent::find_rest(const SeminormalLimits &limits)
{
    Index r = rank, others = problem.n - r, longest = problem.m > problem.n ? problem.m : problem.n;
    double doubt = longest * UNIT, norm_of_e = 0.0, norm_of_f = 0.0;
    double most = fmin((limits.rcond - doubt) * quality.norm, limits.rounding);
    for (Index c = 0; c < others; c++) {
        double *row = rest + c * columns;
        memset(row, 0, columns * sizeof(double)), memset(y, 0, problem.wide * sizeof(double));
        for (Index k = 0; k < r; k++)
            y[k] = upper[k * problem.wide + order[r + c]];
        times(inverse, r, columns, y, row);
        double error = find_error(c);
        if (error * sqrt(others) > 0.5 * most)
            correct(c), error = find_error(c);
        norm_of_e = root_of_squares(norm_of_e, error), norm_of_f = root_of_squares(norm_of_f, norm(columns, row));
    }
    double inverse_norm = quality.inverse_norm;
    double rounding = (problem.n + 4) * UNIT * (sqrt(r) * norm_of_f + sqrt(others));
    growth = root_of_squares(1.0, norm_of_f), dropped = (norm_of_e + rounding) * inverse_norm;
    condition = worse(1.0, quality.norm * inverse_norm);
    condition_bound = (quality.norm_bound + norm_of_e) * inverse_norm;
    bool full = r == problem.m || r == problem.n;
    return condition_bound * (limits.rcond + doubt) < 1.0 && dropped * GAP < 1.0 && (full || norm_of_e < most);
}

// The inverse of a factor of S1^2 + F S2^2 F^T, with a diagonal matrix S in the order of the columns.
bool Dependent::invert_shifted(const double *scales, double *inverse) const
{
    Index r = rank, others = problem.n - r;
    for (Index c = 0; c < others; c++)
        for (Index k = 0; k < columns; k++)
            upper[c * columns + k] = scales[r + c] * rest[c * columns + k];
    form_gram(upper, others, columns, gram, false);
    for (Index k = 0; k < r; k++)
        gram[k * columns + k] += scales[k] * scales[k];
    if (!cholesky(gram, r, columns, 0.0))
        return false;
    invert(gram, r, columns, inverse);
    return true;
}

bool Dependent::invert_both() const
{
    double *scales = scaled;
    for (Index k = 0; k < problem.n; k++)
        scales[k] = 1.0;
    if (!invert_shifted(scales, of_columns))
        return false;
    for (Index k = 0; k < problem.n; k++)
        scales[k] = problem.sizes[order[k]] / largest;
    return invert_shifted(scales, of_rows);
}

// Q^T r by A^T r: R^-T (I + F F^T)^-1 [I F] P^T D^-1 A^T r.
void Dependent::project() const
{
    memset(y, 0, problem.wide * sizeof(double));
    for (Index k = 0; k < problem.n; k++)
        scaled[k] = problem.gradient[order[k]] / problem.sizes[order[k]];
    memcpy(y, scaled, rank * sizeof(double));
    add_multiples(y, scaled + rank, 1, 1.0, rest, columns, 0, problem.n - rank, 0, false);
    apply(of_columns, y);
    times_transposed(inverse, rank, columns, y, projected);
}

// Q R^-T (M^T M)^-1 R^-1 times that: Q R are columns of B.
void Dependent::find_added() const
{
    memset(y, 0, problem.wide * sizeof(double));
    times(inverse, rank, columns, projected, y);
    apply(of_rows, y);
    apply(inverse, y);
    memset(scaled, 0, problem.wide * sizeof(double));
    for (Index k = 0; k < rank; k++)
        scaled[order[k]] = y[k] / problem.sizes[order[k]] / (largest * largest);
    memset(added, 0, problem.tall * sizeof(double));
    problem.multiply(scaled, 1.0, added);
}

// Of unit vectors where they are few, or else of random ones.
double probe_element(const RateProbes &probes, Index r, Index k, Index p)
{
    return r <= probes.count ? k == p : probes.vectors[k * probes.count + p];
}

// Upper bound on ||I - P||_F along some vectors, where a step removes P times the projected residual.
double Dependent::measure_rate(const RateProbes &probes) const
{
    Index r = rank, count = r < probes.count ? r : probes.count;
    double sum = 0.0;
    for (Index p = 0; p < count; p++) {
        for (Index k = 0; k < r; k++)
            projected[k] = probe_element(probes, r, k, p);
        find_added(), problem.multiply_transposed(added, problem.x);
        memset(problem.residual, 0, problem.tall * sizeof(double));
        problem.multiply(problem.x, 1.0, problem.residual), problem.multiply_transposed(problem.residual, problem.gradient);
        project();
        for (Index k = 0; k < r; k++) {
            double lost = probe_element(probes, r, k, p) - projected[k];
            sum += lost * lost;
        }
    }
    return probes.margin * sqrt(sum) + probes.rounding * r * quality.inverse_norm;
}

bool Dependent::allocate()
{
    Index tall = problem.tall, wide = problem.wide, fewest = tall < wide ? tall : wide;  // of what has r columns
    if (!MinimumNorm::allocate(tall + 5 * wide + wide * wide + 3 * fewest * fewest + 2 * fewest * wide))
        return false;
    if (order == nullptr) {
        workspace.take(tall, error);
        workspace.take(wide, scaled, y, projected, multipliers, order);
        workspace.take(wide * wide, gram);
        workspace.take(fewest * fewest, inverse, of_columns, of_rows);
        workspace.take(fewest * wide, upper, rest);
    }
    return true;
}

bool Dependent::factorize(const SeminormalLimits &limits, const RateProbes &probes, const double *of_a)
{
    quality = NO_FACTOR, condition = NAN;
    if (!allocate() || !find_sizes(limits))
        return false;
    memset(projected, 0, problem.wide * sizeof(double));
    form_scaled_gram(of_a);
    double square = limits.rcond * limits.rcond, rounding = (problem.m + problem.n + 2) * UNIT;
    rank = find_pivots(fmax(square, problem.n * rounding), fmax(square, 4.0 * rounding));
    columns = padded(rank);
    if (!(rank > 0 && invert_first(limits) && find_rest(limits) && invert_both()))
        return false;
    quality.rate = measure_rate(probes);
    return quality.rate <= limits.max_rate;
}

void Dependent::find_update(bool doubled) const
{
    problem.find_gradient(doubled), project(), find_added();
}

StepError Dependent::error_left(double noise) const
{
    const Problem &p = problem;
    double b_bound = sqrt(p.n), projected_norm = norm(rank, projected); // ||B||_F
    double inverse_norm = quality.inverse_norm, rate = quality.rate, along = spread * inverse_norm;
    double of_gradient = inverse_norm * norm(p.tall, p.residual);
    double floor = noise * (b_bound * (p.norm_of_x() + of_gradient) + p.b_norm);
    // Rounding errors of A^T w are those of x itself.
    double of_rows = largest * largest * b_bound * noise * norm(p.tall, p.w);
    double bound = along * ((1.0 + rate) * rate / (1.0 - rate) * projected_norm + floor) + of_rows;
    return {bound, along * floor + of_rows};
}

double Dependent::measure(SeminormalNumbers &found) const
{
    const Problem &p = problem;
    p.multiply(change, -1.0, p.residual), p.find_gradient(false), project();
    double residual_norm = norm(p.tall, p.residual);
    measure_gradient(p, quality, norm(p.n, scaled), norm(rank, projected), found);
    // F errs by at most as much as E says, times what makes singular values of that.
    double turned = 3.0 * (dropped / (1.0 - dropped)) * (dropped / (1.0 - dropped));
    double relative = residual_norm / (quality.norm * p.norm_of_x());
    return turned * spread * spread * growth * (3.0 + (condition_bound + 1.0) * relative);
}

NEULA_END
