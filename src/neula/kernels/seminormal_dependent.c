/* Dependent columns: a part of seminormal.c. Pivots of the Gram matrix of B = A D^-1 name r columns that count,
 * B P = B1 [I F] + [0 E] with F by the corrected seminormal equations and an E that is computed. The solution has the
 * coefficients c = [I F] P^T D x with R c = Q^T b, and the shortest one is M (M^T M)^-1 c for M = D P [I F]^T, a sum of
 * rows (neula/algorithms/lapack/dependent.py says more, and by how much what is dropped turns their space).
 */
#include "doubled_rows.h"
#include "seminormal_shortest.h"
#include "triangles.h"

/* B^T B, all of it; columns of zeros stay. Norms of B are left in `worth`. */
static void form_gram_of(Shortest *s, const double *of_a)
{
    double *gram = s->independent.gram, *ones = s->independent.y, trace = 0.0;
    long n = s->n, wide = s->wide;
    if (of_a == NULL)
        form_gram(s->by_rows, s->m, wide, gram, 0), of_a = gram;
    for (long i = 0; i < n; i++) {
        for (long j = i; j < n; j++)
            gram[i * wide + j] = gram[j * wide + i] = of_a[i * wide + j] / s->sizes[i] / s->sizes[j];
        trace += gram[i * wide + i], ones[i] = 1.0;
    }
    double of_gram = norm_of(gram, n, wide, ones);
    s->worth.norm = of_gram / sqrt(trace), s->worth.norm_bound = CEILED * sqrt(of_gram);
}

/* Rows of R by pivots, their elements where the columns are, and the order of the columns; how many are larger than some
 * limit, or 0 where others are larger than what rounding errors make of zero.
 */
static long find_pivots(const Shortest *s, double least, double rounding)
{
    const Independent *of = &s->independent;
    long n = s->n, wide = s->wide, most = s->m < n ? s->m : n, r = 0;
    double *left = of->scaled; /* of the squares of the columns, negative of those that are chosen */
    for (long j = 0; j < n; j++)
        left[j] = of->gram[j * wide + j];
    for (; r < most; r++) {
        long p = 0;
        for (long j = 1; j < n; j++)
            p = left[j] > left[p] ? j : p;
        double *row = of->upper + r * wide;
        memcpy(row, of->gram + p * wide, wide * sizeof(double));
        add_rows(row, of->upper + p, wide, -1.0, of->upper, wide, 0, r, 0, 0);
        double pivot = row[p];
        if (!(left[p] > least && pivot > least))
            break;
        for (long j = 0; j < n; j++) {
            row[j] = left[j] < 0.0 ? 0.0 : row[j] / sqrt(pivot);
            left[j] = left[j] < 0.0 ? left[j] : fmax(0.0, left[j] - row[j] * row[j]);
        }
        left[p] = -1.0, of->order[r] = p;
    }
    for (long j = 0, next = r; j < n; j++)
        if (!(left[j] < 0.0)) {
            if (!(left[j] <= rounding))
                return 0;
            of->order[next++] = j;
        }
    return r;
}

/* R^-1 of B1, and what it is worth by the rounding errors of a Gram matrix (seminormal.h); 0 where it is no good. */
static int invert_first(Shortest *s, const Limits *limits)
{
    Independent *of = &s->independent;
    long r = s->rank, columns = of->columns;
    double *sums = of->y;
    memset(of->gram, 0, r * columns * sizeof(double));
    for (long i = 0; i < r; i++)
        for (long k = i; k < r; k++)
            of->gram[i * columns + k] = of->upper[i * s->wide + of->order[k]];
    invert(of->gram, r, columns, of->inverse);
    form_gram(of->inverse, r, columns, of->gram, 1);
    for (long k = 0; k < r; k++)
        sums[k] = 1.0;
    s->worth.inverse_norm = sqrt(norm_of(of->gram, r, columns, sums));
    memset(sums, 0, s->wide * sizeof(double));
    for (long i = 0; i < r; i++)
        for (long k = i; k < r; k++)
            sums[k] += fabs(of->inverse[i * columns + k]);
    double of_sums = length(columns, sums);
    s->worth.rate = CEILED * UNIT * of_sums * ((s->m + r + 5) * of_sums + 5 * r);
    s->worth.inverse_norm /= sqrt(1.0 - s->worth.rate);
    return s->worth.rate <= limits->max_rate;
}

/* X X^T v in place. */
static void apply(const Shortest *s, const double *x, double *v)
{
    times_transposed(x, s->rank, s->independent.columns, v, s->independent.multipliers);
    times(x, s->rank, s->independent.columns, s->independent.multipliers, v);
}

/* What F leaves of a column that does not count, in `error`; its length. */
static double find_error(const Shortest *s, long c)
{
    const Independent *of = &s->independent;
    long own = of->order[s->rank + c];
    memset(of->scaled, 0, s->wide * sizeof(double));
    for (long k = 0; k < s->rank; k++)
        of->scaled[of->order[k]] = -of->rest[c * of->columns + k] / s->sizes[of->order[k]];
    of->scaled[own] = 1.0 / s->sizes[own];
    memset(of->error, 0, s->tall * sizeof(double));
    image_of(s, of->scaled, 1.0, of->error);
    return length(s->tall, of->error);
}

/* Add to a column of F what makes the error orthogonal to B1. */
static void correct(const Shortest *s, long c)
{
    const Independent *of = &s->independent;
    sum_of_rows(s, of->error, s->gradient);
    memset(of->y, 0, s->wide * sizeof(double));
    for (long k = 0; k < s->rank; k++)
        of->y[k] = s->gradient[of->order[k]] / s->sizes[of->order[k]];
    apply(s, of->inverse, of->y);
    for (long k = 0; k < s->rank; k++)
        of->rest[c * of->columns + k] += of->y[k];
}

/* F, and what it drops: E, which is corrected where it is more than rounding errors, and rounding errors of that; 0 where
 * the rank is in doubt.
 */
static int find_rest(Shortest *s, const Limits *limits)
{
    const Independent *of = &s->independent;
    long r = s->rank, others = s->n - r, columns = of->columns, longest = s->m > s->n ? s->m : s->n;
    double doubt = longest * UNIT, of_e = 0.0, of_f = 0.0;
    double most = fmin((limits->rcond - doubt) * s->worth.norm, limits->rounding);
    for (long c = 0; c < others; c++) {
        double *row = of->rest + c * columns;
        memset(row, 0, columns * sizeof(double)), memset(of->y, 0, s->wide * sizeof(double));
        for (long k = 0; k < r; k++)
            of->y[k] = of->upper[k * s->wide + of->order[r + c]];
        times(of->inverse, r, columns, of->y, row);
        double error = find_error(s, c);
        if (error * sqrt(others) > 0.5 * most)
            correct(s, c), error = find_error(s, c);
        of_e = hypot(of_e, error), of_f = hypot(of_f, length(columns, row));
    }
    double through = s->worth.inverse_norm, rounding = (s->n + 4) * UNIT * (sqrt(r) * of_f + sqrt(others));
    s->growth = hypot(1.0, of_f), s->dropped = (of_e + rounding) * through;
    s->condition = most_of(1.0, s->worth.norm * through), s->condition_bound = (s->worth.norm_bound + of_e) * through;
    int full = r == s->m || r == s->n;
    return s->condition_bound * (limits->rcond + doubt) < 1.0 && s->dropped * GAP < 1.0 && (full || of_e < most);
}

/* The inverse of a factor of S1^2 + F S2^2 F^T, with a diagonal matrix S in the order of the columns. */
static int invert_shifted(const Shortest *s, const double *scales, double *inverse)
{
    const Independent *of = &s->independent;
    long r = s->rank, others = s->n - r, columns = of->columns;
    for (long c = 0; c < others; c++)
        for (long k = 0; k < columns; k++)
            of->upper[c * columns + k] = scales[r + c] * of->rest[c * columns + k];
    form_gram(of->upper, others, columns, of->gram, 0);
    for (long k = 0; k < r; k++)
        of->gram[k * columns + k] += scales[k] * scales[k];
    if (!cholesky(of->gram, r, columns, 0.0))
        return 0;
    invert(of->gram, r, columns, inverse);
    return 1;
}

static int invert_both(const Shortest *s)
{
    double *scales = s->independent.scaled;
    for (long k = 0; k < s->n; k++)
        scales[k] = 1.0;
    if (!invert_shifted(s, scales, s->independent.of_columns))
        return 0;
    for (long k = 0; k < s->n; k++)
        scales[k] = s->sizes[s->independent.order[k]] / s->largest;
    return invert_shifted(s, scales, s->independent.of_rows);
}

/* Q^T r by A^T r: R^-T (I + F F^T)^-1 [I F] P^T D^-1 A^T r. */
static void project(const Shortest *s)
{
    const Independent *of = &s->independent;
    memset(of->y, 0, s->wide * sizeof(double));
    for (long k = 0; k < s->n; k++)
        of->scaled[k] = s->gradient[of->order[k]] / s->sizes[of->order[k]];
    memcpy(of->y, of->scaled, s->rank * sizeof(double));
    add_rows(of->y, of->scaled + s->rank, 1, 1.0, of->rest, of->columns, 0, s->n - s->rank, 0, 0);
    apply(s, of->of_columns, of->y);
    times_transposed(of->inverse, s->rank, of->columns, of->y, of->projected);
}

/* Q R^-T (M^T M)^-1 R^-1 times that: Q R are columns of B. */
static void to_rows(const Shortest *s)
{
    const Independent *of = &s->independent;
    memset(of->y, 0, s->wide * sizeof(double));
    times(of->inverse, s->rank, of->columns, of->projected, of->y);
    apply(s, of->of_rows, of->y);
    apply(s, of->inverse, of->y);
    memset(of->scaled, 0, s->wide * sizeof(double));
    for (long k = 0; k < s->rank; k++)
        of->scaled[of->order[k]] = of->y[k] / s->sizes[of->order[k]] / (s->largest * s->largest);
    memset(s->added, 0, s->tall * sizeof(double));
    image_of(s, of->scaled, 1.0, s->added);
}

/* Of unit vectors where they are few, or else of random ones. */
static inline double element_of(const Probes *probes, long r, long k, long p)
{
    return r <= probes->count ? k == p : probes->vectors[k * probes->count + p];
}

/* ||I - P||_F from above, where P is what a step takes from the projected residual, along some vectors. */
static double measured_rate(const Shortest *s, const Probes *probes)
{
    const Independent *of = &s->independent;
    long r = s->rank, count = r < probes->count ? r : probes->count;
    double sum = 0.0;
    for (long p = 0; p < count; p++) {
        for (long k = 0; k < r; k++)
            of->projected[k] = element_of(probes, r, k, p);
        to_rows(s), sum_of_rows(s, s->added, s->x);
        memset(s->residual, 0, s->tall * sizeof(double));
        image_of(s, s->x, 1.0, s->residual), sum_of_rows(s, s->residual, s->gradient);
        project(s);
        for (long k = 0; k < r; k++) {
            double lost = element_of(probes, r, k, p) - of->projected[k];
            sum += lost * lost;
        }
    }
    return probes->margin * sqrt(sum) + probes->rounding * r * s->worth.inverse_norm;
}

int factorize_dependent(Shortest *s, const Limits *limits, const Probes *probes, const double *gram)
{
    Independent *of = &s->independent;
    memset(of->projected, 0, s->wide * sizeof(double));
    s->worth = (Worth){NAN, NAN, NAN, NAN, 0, 0}, s->condition = NAN;
    s->few_rows = 0;
    form_gram_of(s, gram);
    double square = limits->rcond * limits->rcond, rounding = (s->m + s->n + 2) * UNIT;
    s->rank = find_pivots(s, fmax(square, s->n * rounding), fmax(square, 4.0 * rounding));
    of->columns = (s->rank + PADDED - 1) & -PADDED;
    if (!(s->rank > 0 && invert_first(s, limits) && find_rest(s, limits) && invert_both(s)))
        return 0;
    s->worth.rate = measured_rate(s, probes);
    return s->worth.rate <= limits->max_rate;
}

Step step_of_dependent(const Shortest *s, double noise, int doubled)
{
    if (doubled)
        combine_doubled(NULL, 1.0, s->by_rows, s->wide, s->residual, s->residual_low, s->m, s->gradient, NULL);
    else
        sum_of_rows(s, s->residual, s->gradient);
    project(s), to_rows(s);
    double of_b = sqrt(s->n), projected = length(s->rank, s->independent.projected);
    double through = s->worth.inverse_norm, rate = s->worth.rate, along = s->spread * through;
    double of_gradient = through * length(s->tall, s->residual);
    double floor = noise * (of_b * (scaled_size(s->n, s->sizes, s->x, NULL) + of_gradient) + length(s->tall, s->b));
    /* Rounding errors of A^T w are those of x itself. */
    double of_rows = s->largest * s->largest * of_b * noise * length(s->tall, s->w);
    double left = along * ((1.0 + rate) * rate / (1.0 - rate) * projected + floor) + of_rows;
    return (Step){left, along * floor + of_rows};
}

double errors_of_dependent(const Shortest *s, Evidence *found)
{
    double residual = length(s->tall, s->residual), image = s->worth.norm * scaled_size(s->n, s->sizes, s->x, NULL);
    sum_of_rows(s, s->residual, s->gradient), project(s);
    double projected = length(s->rank, s->independent.projected) / (1.0 - s->worth.rate);
    double of_gradient = length(s->n, s->independent.scaled);
    found->optimality = quotient(of_gradient, s->worth.norm * residual);
    found->refined = least_of(found->optimality, quotient(residual, image + length(s->tall, s->b)));
    found->refined = least_of(found->refined, quotient(projected, image));
    /* F errs by at most as much as E says, times what makes singular values of that. */
    double turned = 3.0 * (s->dropped / (1.0 - s->dropped)) * (s->dropped / (1.0 - s->dropped));
    return turned * s->spread * s->spread * s->growth * (3.0 + (s->condition_bound + 1.0) * residual / image);
}
