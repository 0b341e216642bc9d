/* What random vectors see of the errors of QR factorizations: in one pass over A and two over Q, some rows at a time,
 * while they are in the cache.
 */
#ifndef NEULA_PROBES_H
#define NEULA_PROBES_H

#include <math.h>
#include <string.h>

#include "matrices.h"
#include "vectors.h"

#define PROBES 4
#define OF_A ((PROBES + WIDTH - 1) / WIDTH) /* vectors for as many sums */
#define OF_Q (2 * PROBES / WIDTH)
#define ROWS 4 /* at a time: sums that do not wait for one another */
#define SUMMED 64
#define FOUND 5

/* A batch of factorizations, each of the same type, with random vectors, and room for what they show of each: its numbers
 * are as many places apart as there are members. In this order (probes_host.py).
 */
typedef struct {
    Matrices a, q, r;
    long count, m, n;
    const double *g;
    double *numbers;
    double enough; /* loss of orthogonality up to which nothing is done about it */
    long threads;
} Factorizations;

/* For each column, in the order in which they are read: what is multiplied by elements of A; of Q, for its product with
 * R and for Q^T Q; and what that comes to, of some rows and of all.
 */
typedef struct {
    double of_a[2 * PROBES], of_q[2 * PROBES], some[2 * PROBES], loss[2 * PROBES];
} Column;

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
            vec lost = vec_at(columns[j].some + t * WIDTH);
            for (int i = 0; i < rows; i++)
                lost = plus_product(lost, all(element(q, member, first + i, j)), of_q[i][t]);
            vec_put(columns[j].some + t * WIDTH, lost);
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

/* Rows, as many at a time as have sums that do not wait for one another; sums of sums err less than long ones. */
static inline void measure_rows(
    const Matrices *a, const Matrices *q, long member, long first, long last, long n, Column *columns, double *found)
{
    for (long end; first < last; first = end) {
        end = first + SUMMED < last ? first + SUMMED : last;
        for (long j = 0; j < n; j++)
            memset(columns[j].some, 0, sizeof(columns[j].some));
        for (; first + ROWS <= end; first += ROWS)
            measure(a, q, member, first, ROWS, n, columns, found);
        for (; first < end; first++)
            measure(a, q, member, first, 1, n, columns, found);
        for (long j = 0; j < n; j++)
            for (int p = 0; p < 2 * PROBES; p++)
                columns[j].loss[p] += columns[j].some[p];
    }
}

/* What is known of one once all rows were measured: residual, size, loss of orthogonality, the smallest and the largest
 * norm of a column.
 */
static inline void write_down(
    const double *found, long n, const double *g, const Column *columns, double *numbers, long apart)
{
    double loss = 0.0;
    for (long j = 0; j < n; j++)
        for (int p = 0; p < PROBES; p++) {
            double lost = columns[j].loss[PROBES + p] - g[j * PROBES + p];
            loss += lost * lost;
        }
    double known[FOUND] = {sqrt(found[0]), sqrt(found[1]), sqrt(loss), found[3], found[4]};
    for (int i = 0; i < FOUND; i++)
        numbers[i * apart] = known[i];
}

#endif
