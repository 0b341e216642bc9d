/* Least-squares problems from the matrix to the evidence, one after the other: the corrected seminormal equations with
 * the inverse of a Cholesky factor, residuals and gradients in twice the working precision.
 *
 * A is copied by rows and by columns, both padded with zeros to whole vectors. What is added up along columns is then
 * added for as many columns at a time, and along rows for as many rows: never across the elements of a vector.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "matrices.h"
#include "rows.h"

#define EACH 4     /* products after which a sum is one of a number and its rounding error again */
#define UNIT 0x1p-53
#define COARSE 0x1p-45 /* errors that residuals in working precision show of most problems */
#define NUMBERS 10 /* of each problem */

/* Of what is long, and gains nothing from being inlined, for which a compiler takes a fourth of its time. */
#define APART __attribute__((noinline))

/* What decides when to stop and what to believe, in this order (seminormal_host.py). */
typedef struct {
    double tolerance, max_steps, max_rate, noise, floor, stagnation, computed, moderate, forward, backward, certain;
} Limits;

/* A problem with what is made of it; `rows` and `columns` are those of padded matrices. */
typedef struct {
    long m, n, rows, columns;
    double *by_rows, *by_columns, *gram, *inverse, *scaled; /* the last three are square */
    double *sizes, *work, *high, *low, *gradient, *projected, *update;
    double *b, *residual, *residual_low;
} Problem;

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

/* R^-1, row by row from the last one on: the computed one times R errs by n u |R^-1| |R| at most. */
static void invert(const Problem *p)
{
    for (long i = p->n - 1; i >= 0; i--) {
        double *row = p->inverse + i * p->columns, *of_r = p->gram + i * p->columns;
        memset(row, 0, p->columns * sizeof(double));
        row[i] = 1.0;
        add_rows(row, of_r, 1, -1.0, p->inverse, p->columns, i + 1, p->n, i, 1);
        for (long j = i; j < p->columns; j++)
            row[j] /= of_r[i];
    }
}

/* R^-T times the gradient, and R^-1 times that. */
static void project(const Problem *p)
{
    memset(p->projected, 0, p->columns * sizeof(double));
    add_rows(p->projected, p->gradient, 1, 1.0, p->inverse, p->columns, 0, p->n, 0, 1);
}

static void solve(const Problem *p)
{
    for (long i = 0; i < p->n; i++) {
        vec sum = all(0.0);
        for (long j = i & -WIDTH; j < p->columns; j += WIDTH)
            sum = plus_product(sum, vec_at(p->inverse + i * p->columns + j), vec_at(p->projected + j));
        double total = sum[0];
        for (int l = 1; l < WIDTH; l++)
            total += sum[l];
        p->update[i] = total;
    }
}

/* ||D (x - y)||; without y that of x. */
static double size_of(const Problem *p, const double *x, const double *y)
{
    double sum = 0.0;
    for (long j = 0; j < p->n; j++) {
        double scaled = p->sizes[j] * (y ? x[j] - y[j] : x[j]);
        sum += scaled * scaled;
    }
    return sqrt(sum);
}

/* Sums of the rows of a matrix times high + low, for some vectors of their elements. */
static inline void add_doubled(
    vec *sums, vec *rest, const double *rows, long columns, const double *high, const double *low, long count, int wide)
{
    for (int t = 0; t < wide; t++)
        sums[t] = rest[t] = all(0.0);
    for (long from = 0; from < count; from += EACH) {
        long to = from + EACH < count ? from + EACH : count;
        for (long k = from; k < to; k++)
            for (int t = 0; t < wide; t++) {
                vec x = vec_at(rows + k * columns + t * WIDTH);
                add_products(x, all(high[k]), sums + t, rest + t);
                rest[t] = plus_product(rest[t], x, all(low[k]));
            }
        for (int t = 0; t < wide; t++)
            two_sums(sums[t], rest[t], sums + t, rest + t);
    }
}

static inline void some_residuals(const Problem *p, long i, int wide)
{
    vec sums[AHEAD], rest[AHEAD];
    add_doubled(sums, rest, p->by_columns + i, p->rows, p->high, p->low, p->n, wide);
    for (int t = 0; t < wide; t++) {
        vec high, low;
        two_sums(vec_at(p->b + i + t * WIDTH), -sums[t], &high, &low);
        two_sums(high, low - rest[t], &high, &low);
        vec_put(p->residual + i + t * WIDTH, high), vec_put(p->residual_low + i + t * WIDTH, low);
    }
}

static inline void some_gradients(const Problem *p, long j, int wide)
{
    vec sums[AHEAD], rest[AHEAD];
    add_doubled(sums, rest, p->by_rows + j, p->columns, p->residual, p->residual_low, p->m, wide);
    for (int t = 0; t < wide; t++)
        vec_put(p->gradient + j + t * WIDTH, sums[t] + rest[t]);
}

/* A^T times the residual in working precision. */
static void find_gradient(const Problem *p)
{
    memset(p->gradient, 0, p->columns * sizeof(double));
    add_rows(p->gradient, p->residual, 1, 1.0, p->by_rows, p->columns, 0, p->m, 0, 0);
}

/* b - A (x + x_low) and its product with A^T, in working precision or in twice as much and rounded once. */
static APART void evaluate(const Problem *p, int doubled)
{
    long i = 0, j = 0;
    if (!doubled) {
        memcpy(p->residual, p->b, p->rows * sizeof(double));
        add_rows(p->residual, p->high, 1, -1.0, p->by_columns, p->rows, 0, p->n, 0, 0);
        find_gradient(p);
        return;
    }
    for (; i + AHEAD * WIDTH <= p->rows; i += AHEAD * WIDTH)
        some_residuals(p, i, AHEAD);
    for (; i < p->rows; i += WIDTH)
        some_residuals(p, i, 1);
    for (; j + AHEAD * WIDTH <= p->columns; j += AHEAD * WIDTH)
        some_gradients(p, j, AHEAD);
    for (; j < p->columns; j += WIDTH)
        some_gradients(p, j, 1);
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

/* What is known of B, A with its columns divided by their norms, and of the factor: ||B||_2 from below and from above,
 * by its norms of Frobenius and Schatten; ||B^+||_2 from above; and ||I - W^T W||_F for W = A R^-1, from above.
 *
 * The last one is what rounding errors make of it. Those of the Gram matrix are m u |a_i|^T |a_j| at most, and those of
 * its factorization (n + 1) u |r_i|^T |r_j|: both are below products of the norms of columns. So with w = |R^-T| D 1
 * they come to (m + n + 1) u ||w||^2, and those of the inverse, and of two products with it, to n u ||w|| each, the
 * first of which counts twice.
 */
typedef struct {
    double norm, norm_bound, inverse_norm, rate;
} Worth;

static int moderate(double size, const Limits *limits)
{
    return size >= 1.0 / limits->moderate && size <= limits->moderate;
}

static APART int worth_of(const Problem *p, const Limits *limits, Worth *worth)
{
    long n = p->n, columns = p->columns;
    form_gram(p->by_rows, p->m, columns, p->gram, 0);
    for (long j = 0; j < n; j++) {
        p->sizes[j] = sqrt(p->gram[j * columns + j]);
        p->work[j] = 1.0 / p->sizes[j];
        if (!moderate(p->sizes[j], limits))
            return 0;
    }
    double of_gram = norm_of(p->gram, n, columns, p->work);
    if (!cholesky(p->gram, n, columns))
        return 0;
    invert(p);
    for (long j = 0; j < columns; j++)
        p->work[j] = 0.0;
    for (long i = 0; i < n; i++)
        for (long j = 0; j < columns; j++) {
            double x = p->gram[i * columns + j] = p->sizes[i] * p->inverse[i * columns + j];
            p->work[j] += fabs(x);
        }
    double of_sums = length(columns, p->work);
    worth->rate = (1.0 + 0x1p-10) * UNIT * of_sums * ((p->m + n + 2) * of_sums + 5 * n);
    if (!(worth->rate <= limits->max_rate))
        return 0;
    form_gram(p->gram, n, columns, p->scaled, 1);
    for (long j = 0; j < columns; j++)
        p->work[j] = 1.0;
    worth->norm = of_gram / sqrt(n), worth->norm_bound = sqrt(of_gram);
    worth->inverse_norm = sqrt(norm_of(p->scaled, n, columns, p->work));
    return 1;
}

/* What is said of a solution: as `numbers` in seminormal.py, where the worst of several counts. */
typedef struct {
    double refined, forward, backward, largest, optimality, steps, given;
    int accepted, vanished;
} Evidence;

/* x as high + low by refinement, and a bound on ||D (x - x*)||: after a step what is left of the error before it, which
 * the projected residual shows, and rounding errors of the residual, whose elements are sums of so many products as A
 * has columns, and those of the gradient of so many as it has rows. Where few digits are asked for the first step is
 * made in working precision, and the last one if that is enough.
 */
static APART double refine(const Problem *p, const Worth *worth, const Limits *limits, Evidence *found, double *of_projected)
{
    double left = INFINITY, b_norm = length(p->rows, p->b);
    int doubled = limits->tolerance < COARSE, active = 1;
    memset(p->low, 0, p->columns * sizeof(double));
    /* The solution of the normal equations, its error unknown. */
    memcpy(p->residual, p->b, p->rows * sizeof(double));
    find_gradient(p), project(p), solve(p);
    memcpy(p->high, p->update, p->columns * sizeof(double));
    for (int step = 0; active && step < limits->max_steps; step++) {
        evaluate(p, doubled), project(p);
        double of_x = size_of(p, p->high, NULL), of_residual = length(p->rows, p->residual), before = left;
        double noise = 2.0 * (p->m + p->n) * (doubled ? limits->noise : UNIT); /* ||B||_F is the root of n */
        double bounds = sqrt(p->n) * (of_x + worth->inverse_norm * of_residual) + b_norm;
        double floor = worth->inverse_norm * noise * bounds;
        solve(p);
        for (long j = 0; j < p->n; j++)
            two_sum(p->high[j], p->update[j] + p->low[j], p->high + j, p->low + j);
        of_x = size_of(p, p->high, NULL), found->steps = step + 1;
        *of_projected = length(p->columns, p->projected);
        left = worth->inverse_norm * worth->rate / (1.0 - worth->rate) * *of_projected + floor;
        active = left > limits->tolerance * of_x && left < limits->stagnation * before && left > limits->floor * floor;
        if (!doubled && left > limits->tolerance * of_x)
            doubled = active = 1;
    }
    /* What the update has left of residual and gradient. */
    add_rows(p->residual, p->update, 1, -1.0, p->by_columns, p->rows, 0, p->n, 0, 0);
    find_gradient(p), project(p);
    *of_projected = length(p->columns, p->projected);
    return left;
}

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

static void write_down(const Evidence *e, double condition, long n, double *numbers, long count)
{
    double known[] = {
        e->accepted, e->refined, e->forward, e->backward, condition, e->largest, e->optimality, n, e->vanished, e->steps,
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
        Worth worth = {NAN, NAN, NAN, NAN};
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
        write_down(&worst, worth.norm * worth.inverse_norm, n, numbers + member, count);
    }
}

/* All of a batch; 0 where there is too little memory. Beginning at x, of shape (batch, n, k), there is room for the ten
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
