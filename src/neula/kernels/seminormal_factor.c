/* A triangular factor of A, its inverse, and how good they are: a part of seminormal.c. */
#include <stdlib.h>

#include "seminormal.h"
#include "triangles.h"

#define PASSES 4 /* as many do for condition numbers up to some 1e13 */

/* D R^-1 in `scaled`, and the norm of the sums of the magnitudes in its columns. */
static double scale_inverse(const Problem *p)
{
    memset(p->work, 0, p->columns * sizeof(double));
    for (long i = 0; i < p->n; i++)
        for (long j = 0; j < p->columns; j++) {
            double x = p->scaled[i * p->columns + j] = p->sizes[i] * p->inverse[i * p->columns + j];
            p->work[j] += fabs(x);
        }
    return length(p->columns, p->work);
}

/* The inverse of a factor of the Gram matrix, with a shift; 0 where there is none. */
static int factorize(const Problem *p, double shift)
{
    if (!cholesky(p->gram, p->n, p->columns, shift))
        return 0;
    invert(p->gram, p->n, p->columns, p->inverse);
    return 1;
}

/* R^-1 times the inverse of a factor of the Gram matrix of W = A R^-1, in place; 0 where numbers are not finite. */
static int factorize_again(const Problem *p)
{
    long columns = p->columns, bytes = columns * columns * sizeof(double);
    memcpy(p->scaled, p->inverse, bytes);
    if (!factorize(p, shift_of(p->m, p->n)))
        return 0;
    memset(p->gram, 0, bytes);
    for (long i = 0; i < p->n; i++)
        add_rows(p->gram + i * columns, p->scaled + i * columns, 1, 1.0, p->inverse, columns, i, p->n, i, 1);
    memcpy(p->inverse, p->gram, bytes);
    return 1;
}

/* The rate, measured for the R^-1 that is there: rounding errors of W, whose Gram matrix is left in `gram`, are
 * n u |A| |R^-1| at most, less by parts, which takes longer. Those of the Gram matrix are m u times the squares of its
 * norm. R^-T times a gradient errs as W by parts does, and R^-1 times that by half of n u: sums are those of two lanes
 * or more.
 */
static double measured_rate(const Problem *p, const Limits *limits, double *w, double *of_sums)
{
    long n = p->n, columns = p->columns;
    double lost = 0.0, of_w = 0.0;
    *of_sums = scale_inverse(p);
    int by_parts = 8 * n * UNIT * *of_sums > limits->max_rate;
    double of_product = (by_parts ? of_parts(n) : n) * UNIT * *of_sums;
    double of_steps = (of_parts(n) + n / 2 + 4) * UNIT * *of_sums;
    for (long i = 0; i < p->m; i++) {
        const double *row = p->by_rows + i * columns;
        if (by_parts)
            times_by_parts(p->inverse, n, columns, row, w + i * columns, p->work);
        else
            times_transposed(p->inverse, n, columns, row, w + i * columns);
    }
    form_gram(w, p->m, columns, p->gram, 0);
    for (long i = 0; i < n; i++) {
        const double *row = p->gram + i * columns;
        of_w += row[i], lost += (row[i] - 1.0) * (row[i] - 1.0);
        for (long j = i + 1; j < n; j++)
            lost += 2.0 * row[j] * row[j];
    }
    /* ||W||_2^2 is at most 1 + ||I - W^T W||_F. */
    double measured = sqrt(lost) + (p->m + 2) * UNIT * of_w;
    measured += (2.0 * sqrt(1.0 + measured) + of_product) * of_product;
    return CEILED * (measured + of_steps);
}

/* The same by shifted Cholesky QR of W, until that is nearly orthonormal, from a factor or, where there is none, from the
 * Gram matrix of A in `scaled`. NaN where numbers are not finite, or there is too little memory.
 */
static double by_shifted(const Problem *p, const Limits *limits, int factorized)
{
    double rate = NAN, of_sums, *w = aligned_alloc(64, p->rows * p->columns * sizeof(double));
    if (w == NULL)
        return NAN;
    if (!factorized) {
        memcpy(p->gram, p->scaled, p->columns * p->columns * sizeof(double));
        factorized = factorize(p, shift_of(p->m, p->n));
    }
    for (int pass = 0; factorized && pass < PASSES; pass++) {
        rate = measured_rate(p, limits, w, &of_sums);
        /* ||D R^-1|| is a part of n of these sums at least: of a matrix without full rank it soon says so. */
        int hopeless = of_sums > p->n * limits->condition;
        factorized = !(rate <= limits->max_rate) && pass + 1 < PASSES && !hopeless && factorize_again(p);
    }
    free(w);
    return rate;
}

int begin_factor(const Problem *p, const Limits *limits, Worth *worth)
{
    long m = p->m, n = p->n, columns = p->columns;
    *worth = (Worth){NAN, NAN, NAN, NAN, 0, 0};
    form_gram(p->by_rows, m, columns, p->gram, 0);
    for (long j = 0; j < n; j++) {
        p->sizes[j] = sqrt(p->gram[j * columns + j]);
        p->work[j] = 1.0 / p->sizes[j];
        if (!moderate(p->sizes[j], limits))
            return 0;
    }
    double of_gram = norm_of(p->gram, n, columns, p->work);
    worth->norm = of_gram / sqrt(n), worth->norm_bound = sqrt(of_gram);
    memcpy(p->scaled, p->gram, columns * columns * sizeof(double));
    worth->factorized = factorize(p, 0.0);
    if (worth->factorized) {
        double of_sums = scale_inverse(p);
        worth->rate = CEILED * UNIT * of_sums * ((m + n + 2) * of_sums + 5 * n);
    }
    return 1;
}

int finish_factor(const Problem *p, const Limits *limits, Worth *worth)
{
    worth->shifted = !(worth->rate <= limits->max_rate);
    if (worth->shifted)
        worth->rate = by_shifted(p, limits, worth->factorized);
    if (!(worth->rate <= limits->max_rate))
        return 0;
    form_gram(p->scaled, p->n, p->columns, p->gram, 1);
    for (long j = 0; j < p->columns; j++)
        p->work[j] = 1.0;
    worth->inverse_norm = sqrt(norm_of(p->gram, p->n, p->columns, p->work));
    return 1;
}
