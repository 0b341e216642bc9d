/* What the parts of seminormal.c know of a problem: compilers work on them side by side. */
#ifndef NEULA_SEMINORMAL_H
#define NEULA_SEMINORMAL_H

#include "evidence.h"
#include "rows.h"

#define CEILED (1.0 + 0x1p-10) /* for the rounding errors of bounds themselves */

#define COARSE 0x1p-45 /* errors that residuals in working precision show of most problems */

/* Of what is long, and gains nothing from being inlined, for which a compiler takes a fourth of its time. */
#define APART __attribute__((noinline))

/* Of what parts call of one another, and nobody else. */
#define WITHIN __attribute__((visibility("hidden")))

/* What decides when to stop, which updates show an error, and which factors are worth a try, in this order
 * (seminormal_host.py). `condition` is that of the verdict.
 */
typedef struct {
    double tolerance, max_steps, max_rate, noise, floor, stagnation, computed, moderate, backward, condition, rcond,
        rounding;
} Limits;

#define GAP 10.0 /* between singular values that count and others (neula/certificates/rank.py) */

/* A problem with what is made of it; `rows` and `columns` are those of padded matrices. */
typedef struct {
    long m, n, rows, columns;
    double *by_rows, *by_columns, *gram, *inverse, *scaled; /* the last three are square */
    double *sizes, *work, *high, *low, *gradient, *projected, *update;
    double *b, *residual, *residual_low;
} Problem;

/* What is known of B, A with its columns divided by their norms, and of the factor: ||B||_2 from below and from above,
 * by its norms of Frobenius and Schatten; ||B^+||_2 from above; ||I - W^T W||_F for W = A R^-1, from above; whether the
 * Gram matrix of A has a factor; and whether R took more than that, since columns were too dependent: condition numbers
 * beyond some 1e6.
 *
 * With the factor of that matrix the rate is what rounding errors make of it. Those of the Gram matrix are
 * m u |a_i|^T |a_j| at most, and those of its factorization (n + 1) u |r_i|^T |r_j|: both are below products of the norms
 * of columns. So with w = |R^-T| D 1 they come to (m + n + 1) u ||w||^2, and those of the inverse, and of two products
 * with it, to n u ||w|| each, the first of which counts twice.
 */
typedef struct {
    double norm, norm_bound, inverse_norm, rate;
    int factorized, shifted;
} Worth;

static inline int moderate(double size, const Limits *limits)
{
    return size >= 1.0 / limits->moderate && size <= limits->moderate;
}

/* ||D (x - y)||; without y that of x. */
static inline double scaled_size(long n, const double *sizes, const double *x, const double *y)
{
    double sum = 0.0;
    for (long j = 0; j < n; j++) {
        double scaled = sizes[j] * (y ? x[j] - y[j] : x[j]);
        sum += scaled * scaled;
    }
    return sqrt(sum);
}

/* R^-1 in `inverse`, and what it is worth: the rate is NaN where the Gram matrix, which stays in `scaled` then, has no
 * factor. 0 where numbers are not moderate.
 */
WITHIN int begin_factor(const Problem *p, const Limits *limits, Worth *worth);

/* The rest of it, by shifted Cholesky QR where the rate is too large; 0 where that is no good. */
WITHIN int finish_factor(const Problem *p, const Limits *limits, Worth *worth);

/* x as high + low by refinement, and a bound on ||D (x - x*)||: after a step what is left of the error before it, which
 * the projected residual shows, and rounding errors of the residual, whose elements are sums of so many products as A
 * has columns, and those of the gradient of so many as it has rows. Where few digits are asked for the first step is
 * made in working precision, and the last one if that is enough.
 */
WITHIN double refine(
    const Problem *p, const Worth *worth, const Limits *limits, Evidence *found, double *of_projected);

#endif
