/* Refinement with residuals and gradients in working precision or in twice as much: a part of seminormal.c. */
#include "doubled_rows.h"
#include "seminormal.h"
#include "triangles.h"

/* R^-T times the gradient, and R^-1 times that. */
static void project(const Problem *p)
{
    times_by_parts(p->inverse, p->n, p->columns, p->gradient, p->projected, p->work);
}

static void solve(const Problem *p) { times(p->inverse, p->n, p->columns, p->projected, p->update); }

/* A^T times the residual in working precision. */
static void find_gradient(const Problem *p)
{
    memset(p->gradient, 0, p->columns * sizeof(double));
    add_rows(p->gradient, p->residual, 1, 1.0, p->by_rows, p->columns, 0, p->m, 0, 0);
}

/* b - A (x + x_low) and its product with A^T, in working precision or in twice as much and rounded once. */
static APART void evaluate(const Problem *p, int doubled)
{
    if (doubled) {
        combine_doubled(
            p->b, -1.0, p->by_columns, p->rows, p->high, p->low, p->n, p->residual, p->residual_low);
        combine_doubled(
            NULL, 1.0, p->by_rows, p->columns, p->residual, p->residual_low, p->m, p->gradient, NULL);
        return;
    }
    memcpy(p->residual, p->b, p->rows * sizeof(double));
    add_rows(p->residual, p->high, 1, -1.0, p->by_columns, p->rows, 0, p->n, 0, 0);
    find_gradient(p);
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
        double of_x = scaled_size(p->n, p->sizes, p->high, NULL);
        double of_residual = length(p->rows, p->residual), before = left;
        double noise = 2.0 * (p->m + p->n) * (doubled ? limits->noise : UNIT); /* ||B||_F is the root of n */
        double bounds = sqrt(p->n) * (of_x + worth->inverse_norm * of_residual) + b_norm;
        double floor = worth->inverse_norm * noise * bounds;
        solve(p);
        for (long j = 0; j < p->n; j++)
            two_sum(p->high[j], p->update[j] + p->low[j], p->high + j, p->low + j);
        of_x = scaled_size(p->n, p->sizes, p->high, NULL), found->steps = step + 1;
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
