/* The shortest solution of one problem, refined in twice the working precision: a part of seminormal.c. */
#include "doubled_rows.h"
#include "seminormal_shortest.h"

int find_sizes(Shortest *s, const Limits *limits)
{
    double smallest = INFINITY;
    s->largest = 0.0;
    for (long j = 0; j < s->n; j++) {
        const double *column = s->by_columns + j * s->tall;
        double size = s->sizes[j] = length(s->tall, column);
        if (!moderate(size, limits)) {
            for (long i = 0; i < s->m; i++)
                if (column[i] != 0.0) /* or NaN */
                    return 0;
            continue;
        }
        s->largest = size > s->largest ? size : s->largest, smallest = size < smallest ? size : smallest;
    }
    for (long j = 0; j < s->n; j++)
        s->sizes[j] = s->sizes[j] > 0.0 ? s->sizes[j] : s->largest;
    s->spread = s->largest / smallest;
    return s->largest > 0.0;
}

static Step step_of(const Shortest *s, double noise, int doubled)
{
    return s->few_rows ? step_of_few_rows(s, noise) : step_of_dependent(s, noise, doubled);
}

/* x + x_low grows by `before` + `before_low` = A^T v: a sum of rows, whatever residuals err by. */
static void grow(const Shortest *s, const double *v, int doubled)
{
    memset(s->before_low, 0, s->wide * sizeof(double));
    if (doubled)
        combine_doubled(NULL, 1.0, s->by_rows, s->wide, v, s->zeros, s->m, s->before, s->before_low);
    else
        sum_of_rows(s, v, s->before);
    for (long j = 0; j < s->wide; j++) {
        double rest;
        two_sum(s->x[j], s->before[j], s->x + j, &rest);
        two_sum(s->x[j], rest + (s->before_low[j] + s->x_low[j]), s->x + j, s->x_low + j);
    }
}

/* x = A^T w */
static void begin(const Shortest *s, int doubled)
{
    memset(s->x, 0, s->wide * sizeof(double)), memset(s->x_low, 0, s->wide * sizeof(double));
    grow(s, s->w, doubled);
}

static void find_residual(const Shortest *s, int doubled)
{
    if (doubled) {
        combine_doubled(s->b, -1.0, s->by_columns, s->tall, s->x, s->x_low, s->n, s->residual, s->residual_low);
        return;
    }
    memcpy(s->residual, s->b, s->tall * sizeof(double));
    image_of(s, s->x, -1.0, s->residual);
}

/* A bound on ||D (x - x*)||; the residual is that of x. Where few digits are asked for the first step is made in working
 * precision, and the last one if that is enough.
 *
 * What a step adds to w is lifted by itself: the residual then corrects what rounding errors of A^T w, however large
 * beside an element of x in large units, have left of A x = b.
 */
static double refine_rows(const Shortest *s, const Limits *limits, Evidence *found)
{
    double left = INFINITY;
    int doubled = limits->tolerance < COARSE;
    memcpy(s->residual, s->b, s->tall * sizeof(double));
    step_of(s, 0.0, 0);
    memcpy(s->w, s->added, s->tall * sizeof(double));
    begin(s, doubled);
    for (int step = 0, active = 1; active && step < limits->max_steps; step++) {
        find_residual(s, doubled);
        Step known = step_of(s, 2.0 * (s->m + s->n) * (doubled ? limits->noise : UNIT), doubled);
        double last = left;
        for (long i = 0; i < s->m; i++)
            s->w[i] += s->added[i];
        grow(s, s->added, doubled);
        double enough = limits->tolerance * scaled_size(s->n, s->sizes, s->x, NULL);
        left = known.left, found->steps = step + 1;
        image_of(s, s->before, -1.0, s->residual);
        active = left > enough && left < limits->stagnation * last && left > limits->floor * known.floor;
        active |= s->few_rows && error_of_few_rows(s) > limits->backward;
        if (!doubled && left > enough && step + 1 < limits->max_steps)
            doubled = active = 1, begin(s, doubled);
    }
    return left;
}

/* ||b - A x|| of x as it is given back; it takes the place of the residual. */
static double given_norm_of(const Shortest *s)
{
    memcpy(s->residual, s->b, s->tall * sizeof(double));
    image_of(s, s->given, -1.0, s->residual);
    return length(s->tall, s->residual);
}

Evidence shortest(const Shortest *s, const Limits *limits, int single)
{
    Evidence found = {0};
    double left = refine_rows(s, limits, &found);
    double b_norm = length(s->tall, s->b), of_x = scaled_size(s->n, s->sizes, s->x, NULL);
    for (long j = 0; j < s->n; j++) {
        s->given[j] = single ? (float)s->x[j] : s->x[j];
        found.largest = most_of(found.largest, fabs(s->given[j]));
    }
    double of_low = scaled_size(s->n, s->sizes, s->x_low, NULL) / of_x;
    double of_rounding = scaled_size(s->n, s->sizes, s->x, s->given) / of_x;
    double error = left / of_x + of_low + of_rounding;
    double of_dropped = s->few_rows ? 0.0 : errors_of_dependent(s, &found);
    if (s->few_rows)
        found.optimality = found.refined = error_of_few_rows(s);
    found.backward = found.refined + (of_low + of_rounding);
    /* Relative to the exact solution. */
    error = error < 1.0 ? limits->computed * error / (1.0 - error) + of_dropped : INFINITY;
    found.forward = error < INFINITY && moderate(b_norm, limits) ? error : INFINITY;
    found.given = given_norm_of(s);
    found.residual = quotient(found.given, b_norm);
    return found;
}
