/* Refinement with residuals and gradients in working precision or in twice as much: a part of seminormal.c. */
#include "seminormal.h"

#define EACH 4         /* products after which a sum is one of a number and its rounding error again */
#define COARSE 0x1p-45 /* errors that residuals in working precision show of most problems */

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

double refine(const Problem *p, const Worth *worth, const Limits *limits, Evidence *found, double *of_projected)
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
