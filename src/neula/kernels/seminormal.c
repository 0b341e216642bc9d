/* Least-squares problems from the matrix to the evidence, one after the other: the corrected seminormal equations with
 * the inverse of R, residuals and gradients in twice the working precision.
 *
 * A is copied by rows and by columns, both padded with zeros to whole vectors. What is added up along columns is then
 * added for as many columns at a time, and along rows for as many rows: never across the elements of a vector.
 */
#include <stdlib.h>

#include "matrices.h"
#include "seminormal.h"

#define NUMBERS 11 /* of each problem */

static double *allocate(Problem *p, long m, long n)
{
    p->m = m, p->n = n;
    p->rows = (m + PADDED - 1) & -PADDED, p->columns = (n + PADDED - 1) & -PADDED;
    double **places[] = {
        &p->by_rows, &p->by_columns, &p->gram, &p->inverse, &p->scaled, &p->sizes, &p->work, &p->high,
        &p->low, &p->gradient, &p->projected, &p->update, &p->b, &p->residual, &p->residual_low,
    };
    long tall = p->rows * p->columns, square = p->columns * p->columns;
    long bytes = (2 * tall + 3 * square + 7 * p->columns + 3 * p->rows) * sizeof(double);
    double *room = aligned_alloc(64, bytes), *next = room;
    if (room == NULL)
        return NULL;
    memset(room, 0, bytes);
    for (int i = 0; i < 15; i++) {
        *places[i] = next;
        next += i < 2 ? tall : i < 5 ? square : i < 12 ? p->columns : p->rows;
    }
    return room;
}

static inline void load(const Problem *p, const Matrices *a, long member)
{
    for (long i = 0; i < p->m; i++)
        for (long j = 0; j < p->n; j++)
            p->by_rows[i * p->columns + j] = element(a, member, i, j);
    for (long top = 0; top < p->rows; top += PADDED)
        for (long left = 0; left < p->columns; left += PADDED) {
            const double *from = p->by_rows + top * p->columns + left;
            double *to = p->by_columns + left * p->rows + top;
            for (long j = 0; j < PADDED; j++)
                for (long i = 0; i < PADDED; i++)
                    to[j * p->rows + i] = from[i * p->columns + j];
        }
}

/* ||b - A x|| of an x in working precision, in `update`; it takes the place of the residual. */
static double given_norm_of(const Problem *p)
{
    memcpy(p->residual, p->b, p->rows * sizeof(double));
    add_rows(p->residual, p->update, 1, -1.0, p->by_columns, p->rows, 0, p->n, 0, 0);
    return length(p->rows, p->residual);
}

static inline double quotient(double a, double b) { return a == 0.0 ? 0.0 : a / b; }

/* These are NaN if one of the numbers is. */
static inline double most_of(double a, double b) { return a >= b || a != a ? a : b; }
static inline double least_of(double a, double b) { return a <= b || a != a ? a : b; }

/* One right-hand side; x is left in `update`, as it is given back. */
static APART Evidence solved(const Problem *p, const Worth *worth, const Limits *limits, int single)
{
    Evidence found = {.accepted = 1};
    double of_projected, left = refine(p, worth, limits, &found, &of_projected);
    double b_norm = length(p->rows, p->b), of_residual = length(p->rows, p->residual), of_x = size_of(p, p->high, NULL);
    double image = worth->norm * of_x;
    for (long j = 0; j < p->n; j++) {
        p->update[j] = single ? (float)p->high[j] : p->high[j];
        p->gradient[j] /= p->sizes[j];
        found.largest = most_of(found.largest, fabs(p->update[j]));
    }
    double of_low = quotient(size_of(p, p->low, NULL), of_x);
    double of_rounding = quotient(size_of(p, p->high, p->update), of_x);
    double error = quotient(left, of_x) + of_low + of_rounding;
    found.optimality = quotient(length(p->n, p->gradient), worth->norm * of_residual);
    found.refined = least_of(found.optimality, quotient(of_residual, image + b_norm));
    found.refined = least_of(found.refined, quotient(of_projected, image * (1.0 - worth->rate)));
    found.backward = found.refined + (of_low + of_rounding);
    error = limits->computed * error / (1.0 - error); /* relative to the exact solution */
    int known = error >= 0.0 && error < INFINITY && (b_norm == 0.0 || moderate(b_norm, limits));
    for (long i = 0; b_norm == 0.0 && i < p->m; i++) /* its square may have underflowed */
        known = known && p->b[i] == 0.0;
    found.forward = known ? error : INFINITY;
    found.given = given_norm_of(p);
    found.vanished = found.largest == 0.0 && found.forward == 0.0;
    found.accepted = found.forward <= limits->forward && found.refined <= limits->backward &&
                     found.given <= b_norm * (1.0 + (p->m + p->n) * UNIT) &&
                     worth->norm_bound * worth->inverse_norm * limits->certain < 1.0;
    return found;
}

static void join(Evidence *worst, const Evidence *found)
{
    worst->refined = most_of(worst->refined, found->refined);
    worst->forward = most_of(worst->forward, found->forward);
    worst->backward = most_of(worst->backward, found->backward);
    worst->largest = most_of(worst->largest, found->largest);
    worst->optimality = most_of(worst->optimality, found->optimality);
    worst->steps = most_of(worst->steps, found->steps);
    worst->accepted &= found->accepted, worst->vanished |= found->vanished;
}

static void write_down(const Evidence *e, const Worth *worth, long n, double *numbers, long count)
{
    double known[] = {
        e->accepted, e->refined,  e->forward, e->backward, worth->norm * worth->inverse_norm, e->largest, e->optimality, n,
        e->vanished, e->steps, worth->shifted,
    };
    for (int i = 0; i < NUMBERS; i++)
        numbers[i * count] = known[i];
}

/* Matrices come by value: what is known of their elements makes other loops. */
static inline void solve_all(
    Matrices a, Matrices right, long of_a, long of_b, Problem *p, const long *sizes, const Limits *limits, int single,
    double *x)
{
    long count = sizes[0], m = sizes[1], n = sizes[2], k = sizes[3];
    double *numbers = x + count * n * k, *forward = numbers + NUMBERS * count, *residual = forward + count * k;
    a.single = of_a, right.single = of_b;
    for (long member = 0; member < count; member++) {
        Worth worth = {NAN, NAN, NAN, NAN, 0};
        Evidence worst = {.accepted = 1};
        load(p, &a, member);
        int good = worth_of(p, limits, &worth);
        if (!good)
            worst = (Evidence){NAN, INFINITY, NAN, NAN, NAN, 0.0, NAN, 0, 0};
        for (long c = 0; c < k; c++) {
            Evidence found = worst;
            if (good) {
                for (long i = 0; i < m; i++)
                    p->b[i] = element(&right, member, i, c);
                found = solved(p, &worth, limits, single);
                join(&worst, &found);
            }
            for (long j = 0; j < n; j++)
                x[(member * n + j) * k + c] = good ? p->update[j] : NAN;
            forward[member * k + c] = found.forward, residual[member * k + c] = found.given;
        }
        write_down(&worst, &worth, n, numbers + member, count);
    }
}

/* All of a batch; 0 where there is too little memory. Beginning at x, of shape (batch, n, k), there is room for the eleven
 * numbers of each, and for forward errors and norms of residuals, of shape (batch, k). Of problems without an answer all
 * is NaN.
 */
int seminormal(
    const Matrices *a, const Matrices *right, const long *sizes, const Limits *limits, int single, double *x)
{
    Problem p;
    double *room = allocate(&p, sizes[1], sizes[2]);
    if (room == NULL)
        return 0;
    if (a->single)
        solve_all(*a, *right, 1, right->single, &p, sizes, limits, single, x);
    else
        solve_all(*a, *right, 0, right->single, &p, sizes, limits, single, x);
    free(room);
    return 1;
}
