/* Small QR factorizations by reflections, and what random vectors see of the errors of such and of others, whose R is
 * made to have no negative diagonal element before: in one pass over A and two over Q, some rows at a time, while they
 * are in the cache.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "matrices.h"
#include "vectors.h"

#define PROBES 4
#define OF_A ((PROBES + WIDTH - 1) / WIDTH) /* vectors for as many sums */
#define OF_Q (2 * PROBES / WIDTH)
#define ROWS 4 /* at a time: sums that do not wait for one another */
#define AHEAD 4 /* columns at a time */
#define FOUND 5

/* For each column, in the order in which they are read: what is multiplied by elements of A; of Q, for its product with
 * R and for Q^T Q; and what that comes to.
 */
typedef struct {
    double of_a[2 * PROBES], of_q[2 * PROBES], loss[2 * PROBES];
} Column;

/* Make the diagonal of R nonnegative, rows of R and columns of Q changing their signs. */
static inline void reflect(const Matrices *q, const Matrices *r, long member, long m, long n)
{
    for (long i = 0; i < n; i++) {
        if (!signbit(element(r, member, i, i)))
            continue;
        for (long j = i; j < n; j++)
            set(r, member, i, j, -element(r, member, i, j));
        for (long k = 0; k < m; k++)
            set(q, member, k, i, -element(q, member, k, i));
    }
}

/* Divide the random vectors by the norms of columns, and multiply them by R. */
static inline void prepare(const Matrices *r, long member, long n, const double *g, Column *columns, double *extremes)
{
    extremes[0] = INFINITY, extremes[1] = 0.0;
    memset(columns, 0, n * sizeof(Column));
    for (long j = 0; j < n; j++) {
        double square = 0.0;
        for (long i = 0; i <= j; i++)
            square += element(r, member, i, j) * element(r, member, i, j);
        double norm = sqrt(square);
        extremes[0] = norm >= extremes[0] ? extremes[0] : norm;
        extremes[1] = norm <= extremes[1] ? extremes[1] : norm;
        for (int p = 0; p < PROBES; p++) {
            columns[j].of_a[p] = g[j * PROBES + p] / norm;
            columns[j].of_q[PROBES + p] = g[j * PROBES + p];
        }
        for (long i = 0; i <= j; i++)
            for (int p = 0; p < PROBES; p++)
                columns[i].of_q[p] += element(r, member, i, j) * columns[j].of_a[p];
    }
}

static inline void measure(
    const Matrices *a, const Matrices *q, long member, long first, int rows, long n, Column *columns, double *found)
{
    vec of_a[ROWS][OF_A] = {0}, of_q[ROWS][OF_Q] = {0};
    for (long j = 0; j < n; j++)
        for (int i = 0; i < rows; i++) {
            vec x = all(element(a, member, first + i, j)), y = all(element(q, member, first + i, j));
            for (int t = 0; t < OF_A; t++)
                of_a[i][t] = plus_product(of_a[i][t], x, vec_at(columns[j].of_a + t * WIDTH));
            for (int t = 0; t < OF_Q; t++)
                of_q[i][t] = plus_product(of_q[i][t], y, vec_at(columns[j].of_q + t * WIDTH));
        }
    for (long j = 0; j < n; j++)
        for (int t = OF_Q / 2; t < OF_Q; t++) {
            vec lost = vec_at(columns[j].loss + t * WIDTH);
            for (int i = 0; i < rows; i++)
                lost = plus_product(lost, all(element(q, member, first + i, j)), of_q[i][t]);
            vec_put(columns[j].loss + t * WIDTH, lost);
        }
    for (int i = 0; i < rows; i++) {
        double image[2 * PROBES], product[2 * PROBES];
        memcpy(image, of_a[i], PROBES * sizeof(double)), memcpy(product, of_q[i], PROBES * sizeof(double));
        for (int p = 0; p < PROBES; p++) {
            found[0] += (image[p] - product[p]) * (image[p] - product[p]);
            found[1] += image[p] * image[p];
        }
    }
}

/* Residual, size, loss of orthogonality, the smallest and the largest norm of a column of one of a batch. */
static inline void measure_one(
    const Matrices *a, const Matrices *q, const Matrices *r, long member, const long *sizes, const double *g,
    Column *columns, double *numbers, long apart)
{
    long m = sizes[1], n = sizes[2], first = 0;
    double found[FOUND] = {0};
    reflect(q, r, member, m, n);
    prepare(r, member, n, g, columns, found + 3);
    for (; first + ROWS <= m; first += ROWS)
        measure(a, q, member, first, ROWS, n, columns, found);
    for (; first < m; first++)
        measure(a, q, member, first, 1, n, columns, found);
    for (long j = 0; j < n; j++)
        for (int p = 0; p < PROBES; p++) {
            double lost = columns[j].loss[PROBES + p] - g[j * PROBES + p];
            found[2] += lost * lost;
        }
    for (int i = 0; i < FOUND; i++)
        numbers[i * apart] = i < 3 ? sqrt(found[i]) : found[i];
}

/* Matrices come by value: what is known of their elements makes other loops. */
static inline void measure_all(
    Matrices a, Matrices q, Matrices r, long single, const long *sizes, const double *g, Column *columns, double *numbers)
{
    a.single = q.single = r.single = single;
    for (long member = 0; member < sizes[0]; member++)
        measure_one(&a, &q, &r, member, sizes, g, columns, numbers + member, sizes[0]);
}

/* A matrix by columns, each padded with zeros, in which R comes to be above the diagonal; the vectors of reflections,
 * with zeros before their leading 1, and their factors; and Q.
 */
typedef struct {
    long m, n, rows;
    double *a, *v, *q, *tau;
} Reflections;

static inline double sum_of(vec x)
{
    double sum = x[0];
    for (int l = 1; l < WIDTH; l++)
        sum += x[l];
    return sum;
}

/* H = I - tau v v^T times some columns, from a row on. */
static inline void reflect_some(const double *v, double tau, double *x, long rows, long first, int columns)
{
    vec sums[AHEAD];
    for (int t = 0; t < columns; t++)
        sums[t] = all(0.0);
    for (long i = first; i < rows; i += WIDTH)
        for (int t = 0; t < columns; t++)
            sums[t] = plus_product(sums[t], vec_at(v + i), vec_at(x + t * rows + i));
    for (int t = 0; t < columns; t++)
        sums[t] = all(tau * sum_of(sums[t]));
    for (long i = first; i < rows; i += WIDTH)
        for (int t = 0; t < columns; t++)
            vec_put(x + t * rows + i, minus_product(vec_at(x + t * rows + i), sums[t], vec_at(v + i)));
}

static void reflect_columns(const Reflections *p, long k, double *x, long from)
{
    const double *v = p->v + k * p->rows;
    long j = from, first = k & -WIDTH;
    for (; j + AHEAD <= p->n; j += AHEAD)
        reflect_some(v, p->tau[k], x + j * p->rows, p->rows, first, AHEAD);
    for (; j < p->n; j++)
        reflect_some(v, p->tau[k], x + j * p->rows, p->rows, first, 1);
}

static void factorize(const Reflections *p)
{
    for (long k = 0; k < p->n; k++) {
        double *column = p->a + k * p->rows, *v = p->v + k * p->rows, square = 0.0, alpha = column[k];
#pragma omp simd reduction(+ : square)
        for (long i = k + 1; i < p->m; i++)
            square += column[i] * column[i];
        double beta = -copysign(sqrt(alpha * alpha + square), alpha);
        memset(v, 0, p->rows * sizeof(double));
        v[k] = 1.0, p->tau[k] = 0.0;
        if (square == 0.0) /* nothing to reflect */
            continue;
        for (long i = k + 1; i < p->m; i++)
            v[i] = column[i] / (alpha - beta);
        p->tau[k] = (beta - alpha) / beta;
        column[k] = beta;
        reflect_columns(p, k, p->a, k + 1);
    }
    memset(p->q, 0, p->n * p->rows * sizeof(double));
    for (long k = p->n - 1; k >= 0; k--) {
        p->q[k * p->rows + k] = 1.0;
        reflect_columns(p, k, p->q, k);
    }
}

/* Q and R of each of a batch, and the same numbers as of those of others. */
static inline void factorize_all(
    Matrices a, Matrices q, Matrices r, long single, const long *sizes, const double *g, const Reflections *p,
    Column *columns, double *numbers)
{
    long count = sizes[0], m = sizes[1], n = sizes[2];
    a.single = q.single = r.single = single;
    for (long member = 0; member < count; member++) {
        for (long j = 0; j < n; j++)
            for (long i = 0; i < m; i++)
                p->a[j * p->rows + i] = element(&a, member, i, j);
        factorize(p);
        for (long j = 0; j < n; j++) {
            for (long i = 0; i < m; i++)
                set(&q, member, i, j, p->q[j * p->rows + i]);
            for (long i = 0; i < n; i++)
                set(&r, member, i, j, i <= j ? p->a[j * p->rows + i] : 0.0);
        }
        measure_one(&a, &q, &r, member, sizes, g, columns, numbers + member, count);
    }
}

/* All of the same type; 0 where there is too little memory. */
int reflect_and_measure(
    const Matrices *a, const Matrices *q, const Matrices *r, const long *sizes, const double *g, double *numbers)
{
    Reflections p = {sizes[1], sizes[2], (sizes[1] + 7) & -8, NULL, NULL, NULL, NULL};
    long each = p.rows * p.n;
    Column *columns = malloc(p.n * sizeof(Column));
    double *room = p.a = calloc(3 * each + p.n, sizeof(double));
    if (columns != NULL && room != NULL) {
        p.v = room + each, p.q = room + 2 * each, p.tau = room + 3 * each;
        if (a->single)
            factorize_all(*a, *q, *r, 1, sizes, g, &p, columns, numbers);
        else
            factorize_all(*a, *q, *r, 0, sizes, g, &p, columns, numbers);
    }
    free(columns), free(room);
    return columns != NULL && room != NULL;
}

/* All three of the same type; 0 where there is too little memory. */
int probe_errors(
    const Matrices *a, const Matrices *q, const Matrices *r, const long *sizes, const double *g, double *numbers)
{
    Column *columns = malloc(sizes[2] * sizeof(Column));
    if (columns == NULL)
        return 0;
    if (a->single)
        measure_all(*a, *q, *r, 1, sizes, g, columns, numbers);
    else
        measure_all(*a, *q, *r, 0, sizes, g, columns, numbers);
    free(columns);
    return 1;
}
