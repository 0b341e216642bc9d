/* One least-squares problem with bounds by block principal pivoting on its normal equations, with what its evidence is
 * made of: neula/algorithms/lapack/bounded.py in loops.
 *
 * Variables are those of B, A with its columns divided by their norms: B^T B has ones on its diagonal.
 */
#include <stdlib.h>

#include "matrices.h"
#include "rows.h"
#include "triangles.h"

/* What decides (bounded_host.py), in this order. */
typedef struct {
    double moderate, rough, settled, steps, patience, sets;
} Limits;

/* What is said of a solution: `Numbers` there. */
typedef struct {
    double sets, width, b, residual, gradient, optimality, projected, rest, image, sum, pushed;
    double norm, inverse_norm, norm_of_all, inverse_norm_of_all, margin;
} Numbers;

/* A problem; `columns` are those of padded matrices, and vectors have as many elements. */
typedef struct {
    long m, n, columns, width; /* variables that are free */
    double *a, *b, *residual;
    double *gram, *factor, *inverse, *square;
    double *sizes, *right, *low, *high, *at, *z, *x, *left, *gradient, *update, *ones;
    const double *lower, *upper;
    long *free;
} Problem;

#define SQUARES 4
#define VECTORS 12

static void *allocate(Problem *p, long m, long n)
{
    long columns = (n + PADDED - 1) & -PADDED, rows = (m + PADDED - 1) & -PADDED;
    long size = m * columns + 2 * rows + SQUARES * columns * columns + VECTORS * columns;
    double *room = aligned_alloc(64, (size * sizeof(double) + 63) & -64), *next = room;
    if (room == NULL)
        return NULL;
    memset(room, 0, size * sizeof(double));
    p->m = m, p->n = n, p->columns = columns;
    p->a = next, next += m * columns;
    p->b = next, p->residual = next + rows, next += 2 * rows;
    double **const squares[SQUARES] = {&p->gram, &p->factor, &p->inverse, &p->square};
    for (int i = 0; i < SQUARES; i++, next += columns * columns)
        *squares[i] = next;
    double **const vectors[VECTORS] = {
        &p->sizes, &p->right, &p->low, &p->high, &p->at, &p->z, &p->x, &p->left, &p->gradient, &p->update, &p->ones,
        (double **)&p->free,
    };
    for (int i = 0; i < VECTORS; i++, next += columns)
        *vectors[i] = next;
    return room;
}

static inline int moderate(double x, const Limits *limits)
{
    return x >= 1.0 / limits->moderate && x <= limits->moderate;
}

/* Whether a bound is zero or infinite, or moderate for a column of norm 1. */
static inline int is_kept(double bound, double size, const Limits *limits)
{
    return bound == 0.0 || bound == INFINITY || bound == -INFINITY || moderate(fabs(bound * size), limits);
}

/* Norms of columns, B^T B and B^T b; 0 where numbers are not moderate. */
static int form(Problem *p, const Limits *limits)
{
    long n = p->n, columns = p->columns;
    form_gram(p->a, p->m, columns, p->gram, 0);
    for (long j = 0; j < n; j++) {
        p->sizes[j] = sqrt(p->gram[j * columns + j]), p->ones[j] = 1.0;
        p->low[j] = p->lower[j] * p->sizes[j], p->high[j] = p->upper[j] * p->sizes[j];
        int kept = is_kept(p->lower[j], p->sizes[j], limits) && is_kept(p->upper[j], p->sizes[j], limits);
        if (!moderate(p->sizes[j], limits) || !kept)
            return 0;
    }
    for (long i = 0; i < n; i++)
        for (long j = i; j < n; j++) {
            double x = p->gram[i * columns + j] / p->sizes[i] / p->sizes[j];
            p->gram[i * columns + j] = p->gram[j * columns + i] = x;
        }
    for (long i = 0; i < n; i++)
        memset(p->gram + i * columns + n, 0, (columns - n) * sizeof(double));
    add_rows(p->right, p->b, 1, 1.0, p->a, columns, 0, p->m, 0, 0);
    for (long j = 0; j < n; j++)
        p->right[j] /= p->sizes[j];
    return moderate(length(p->m, p->b), limits);
}

static inline long padded(const Problem *p) { return (p->width + PADDED - 1) & -PADDED; }

/* R with R^T R = B_F^T B_F; 0 where there is none. */
static int factorize(Problem *p)
{
    p->width = 0;
    for (long j = 0; j < p->n; j++)
        if (p->at[j] == 0.0)
            p->free[p->width++] = j;
    long wide = padded(p);
    for (long i = 0; i < p->width; i++) {
        double *row = p->factor + i * wide;
        const double *of_gram = p->gram + p->free[i] * p->columns;
        for (long j = 0; j < p->width; j++)
            row[j] = of_gram[p->free[j]];
        for (long j = p->width; j < wide; j++)
            row[j] = 0.0;
    }
    return cholesky(p->factor, p->width, wide, 0.0);
}

/* (B_F^T B_F)^-1 times the free elements of a gradient, in `update`. */
static void solve(Problem *p, const double *gradient)
{
    long width = p->width, wide = padded(p);
    double *y = p->update;
    for (long i = 0; i < width; i++)
        y[i] = gradient[p->free[i]];
    for (long i = 0; i < width; i++) {
        const double *row = p->factor + i * wide;
        double found = y[i] /= row[i];
        for (long j = i + 1; j < width; j++)
            y[j] -= found * row[j];
    }
    for (long i = width - 1; i >= 0; i--) {
        const double *row = p->factor + i * wide;
        double sum = 0.0;
#pragma omp simd reduction(+ : sum)
        for (long j = i + 1; j < width; j++)
            sum += row[j] * y[j];
        y[i] = (y[i] - sum) / row[i];
    }
}

/* What is left of a gradient after the update. */
static void subtract(Problem *p, const double *gradient)
{
    memcpy(p->left, gradient, p->columns * sizeof(double));
    for (long k = 0; k < p->width; k++)
        add_rows(p->left, p->update + k, 0, -1.0, p->gram, p->columns, p->free[k], p->free[k] + 1, 0, 0);
}

/* The minimum over the free variables by normal equations alone. */
static void minimize_roughly(Problem *p)
{
    memcpy(p->gradient, p->right, p->columns * sizeof(double));
    for (long j = 0; j < p->n; j++) {
        p->z[j] = p->at[j] < 0.0 ? p->low[j] : p->at[j] > 0.0 ? p->high[j] : 0.0;
        if (p->z[j] != 0.0)
            add_rows(p->gradient, p->z + j, 0, -1.0, p->gram, p->columns, j, j + 1, 0, 0);
    }
    solve(p, p->gradient);
    for (long k = 0; k < p->width; k++)
        p->z[p->free[k]] = p->update[k];
    subtract(p, p->gradient);
}

/* The residual of x, its gradient, and the update of free variables. */
static void evaluate(Problem *p)
{
    for (long j = 0; j < p->n; j++)
        p->x[j] = p->at[j] < 0.0 ? p->lower[j] : p->at[j] > 0.0 ? p->upper[j] : p->z[j] / p->sizes[j];
    for (long i = 0; i < p->m; i++) {
        vec sum = all(0.0);
        for (long j = 0; j < p->columns; j += WIDTH)
            sum = plus_product(sum, vec_at(p->a + i * p->columns + j), vec_at(p->x + j));
        double total = sum[0];
        for (int l = 1; l < WIDTH; l++)
            total += sum[l];
        p->residual[i] = p->b[i] - total;
    }
    memset(p->gradient, 0, p->columns * sizeof(double));
    add_rows(p->gradient, p->residual, 1, 1.0, p->a, p->columns, 0, p->m, 0, 0);
    for (long j = 0; j < p->n; j++)
        p->gradient[j] /= p->sizes[j];
    solve(p, p->gradient);
}

/* The same by corrected seminormal equations, with residuals of A. */
static void refine(Problem *p, const Limits *limits)
{
    evaluate(p);
    for (int step = 0, settled = 0; step < limits->steps && !settled; step++) {
        settled = length(p->width, p->update) <= limits->settled * length(p->n, p->z);
        for (long k = 0; k < p->width; k++)
            p->z[p->free[k]] += p->update[k];
        evaluate(p);
    }
    subtract(p, p->gradient);
}

/* Sum of the magnitudes of z. */
static double sum_of(const Problem *p)
{
    double sum = 0.0;
    for (long j = 0; j < p->n; j++)
        sum += fabs(p->z[j]);
    return sum;
}

/* What rounding errors make of what is left of the gradient; a residual that is rounding errors has one that says
 * nothing.
 */
static double noise_of(const Problem *p, int exactly, const Limits *limits)
{
    double b = length(p->m, p->b), residual = length(p->m, p->residual), u = 4.0 * sqrt(p->n) * UNIT;
    if (!exactly)
        return limits->rough * (b + sqrt(p->n) * length(p->n, p->z));
    return residual > u * (b + sum_of(p)) ? 2.0 * u * residual : INFINITY;
}

/* Where an infeasible variable goes; its own side where it is feasible. */
static inline double side_of(const Problem *p, long j, double noise)
{
    if (p->at[j] != 0.0)
        return p->at[j] * p->left[j] < -noise ? 0.0 : p->at[j];
    return p->z[j] < p->low[j] ? -1.0 : p->z[j] > p->high[j] ? 1.0 : 0.0;
}

/* How many variables are infeasible, and which one of them is the last. */
static long count_infeasible(const Problem *p, double noise, long *last)
{
    long count = 0;
    for (long j = 0; j < p->n; j++)
        if (side_of(p, j, noise) != p->at[j])
            count++, *last = j;
    return count;
}

/* Block principal pivoting from the solution without bounds on; how many sets were tried, 0 where there is no end. */
static long pivot(Problem *p, const Limits *limits)
{
    long best = p->n + 1, patience = limits->patience, last = 0;
    int exactly = 0;
    minimize_roughly(p);
    for (long j = 0; j < p->n; j++)
        p->at[j] = p->z[j] <= p->low[j] ? -1.0 : p->z[j] >= p->high[j] ? 1.0 : 0.0;
    for (long sets = 1; sets <= limits->sets; sets++) {
        if (!factorize(p))
            return 0;
        minimize_roughly(p);
        double noise = noise_of(p, 0, limits);
        exactly = exactly || count_infeasible(p, noise, &last) == 0;
        if (exactly)
            refine(p, limits), noise = noise_of(p, 1, limits);
        long count = count_infeasible(p, noise, &last);
        if (count == 0)
            return sets;
        patience = count < best ? limits->patience : patience - 1;
        best = count < best ? count : best;
        for (long j = patience < 0 ? last : 0; j < p->n; j++) /* all at once lead nowhere */
            p->at[j] = side_of(p, j, noise);
    }
    return 0;
}

/* Schatten 4-norms of the free columns and of their pseudoinverse. */
static void find_norms(Problem *p, double *norm, double *inverse_norm)
{
    double sum = 0.0;
    long wide = padded(p);
    *norm = *inverse_norm = 0.0;
    if (p->width == 0)
        return;
    for (long i = 0; i < p->width; i++)
        for (long j = 0; j < p->width; j++) {
            double x = p->gram[p->free[i] * p->columns + p->free[j]];
            sum += x * x;
        }
    invert(p->factor, p->width, wide, p->inverse);
    form_gram(p->inverse, p->width, wide, p->square, 1);
    *norm = sqrt(sqrt(sum)), *inverse_norm = sqrt(norm_of(p->square, p->width, wide, p->ones));
}

/* What of a gradient no bound forbids to follow. */
static inline double wrong(const Problem *p, const double *gradient, long j)
{
    double push = p->at[j] * gradient[j];
    return p->at[j] == 0.0 ? gradient[j] : push < 0.0 ? push : 0.0;
}

static void measure(const Problem *p, Numbers *found)
{
    double gradient = 0.0, rest = 0.0, projected = 0.0;
    found->pushed = INFINITY, found->optimality = 0.0, found->margin = 1.0;
    for (long j = 0; j < p->n; j++) {
        double x = wrong(p, p->gradient, j), push = p->at[j] * p->left[j];
        gradient += x * x, rest += push < 0.0 ? push * push : 0.0;
        if (p->at[j] != 0.0 && push < found->pushed)
            found->pushed = push;
        if (fabs(x) * p->sizes[j] > found->optimality)
            found->optimality = fabs(x) * p->sizes[j];
    }
    for (long k = 0; k < p->width; k++)
        projected += p->update[k] * p->gradient[p->free[k]];
    found->gradient = sqrt(gradient), found->rest = sqrt(rest), found->projected = sqrt(projected > 0.0 ? projected : 0.0);
    found->b = length(p->m, p->b), found->residual = length(p->m, p->residual);
    found->image = length(p->n, p->z), found->sum = sum_of(p), found->width = p->width;
}

static void load(Problem *p, const Matrices *a, const Matrices *b)
{
    for (long i = 0; i < p->m; i++) {
        p->b[i] = element(b, 0, i, 0);
        for (long j = 0; j < p->n; j++)
            p->a[i * p->columns + j] = element(a, 0, i, j);
    }
}

/* Numbers, then x, the sides of its elements, norms of columns and the solution without bounds: the last one, and norms
 * of all columns, where they are asked for. 0 where there is too little memory, or nothing is found.
 */
int bounded(
    const Matrices *a, const Matrices *b, const long sizes[3], const double *bounds, const Limits *limits, double *to)
{
    Problem p = {.lower = bounds, .upper = bounds + sizes[1]};
    Numbers *found = (Numbers *)to;
    double *vectors = to + sizeof(Numbers) / sizeof(double);
    void *room = allocate(&p, sizes[0], sizes[1]);
    if (room == NULL)
        return 0;
    long n = p.n, bytes = n * sizeof(double);
    load(&p, a, b);
    int done = form(&p, limits) && factorize(&p);
    found->norm_of_all = found->inverse_norm_of_all = NAN;
    if (done && sizes[2]) {
        find_norms(&p, &found->norm_of_all, &found->inverse_norm_of_all);
        minimize_roughly(&p), refine(&p, limits);
        memcpy(vectors + 3 * n, p.x, bytes);
    }
    found->sets = done ? pivot(&p, limits) : 0;
    if (found->sets > 0) {
        find_norms(&p, &found->norm, &found->inverse_norm);
        measure(&p, found);
        memcpy(vectors, p.x, bytes), memcpy(vectors + n, p.at, bytes), memcpy(vectors + 2 * n, p.sizes, bytes);
    }
    free(room);
    return found->sets > 0;
}
