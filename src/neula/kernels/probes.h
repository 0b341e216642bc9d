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
#define ROWS 4     /* at a time: sums that do not wait for one another */
#define TOGETHER 4 /* columns of R */
#define SUMMED 64  /* rows, and columns, whose sums are added to others */
#define FOUND 5
#define INLINED static inline __attribute__((always_inline)) /* loops by what is known where they are called */

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
 * R and for Q^T Q; and what that comes to.
 */
typedef struct {
    double of_a[2 * PROBES], of_q[2 * PROBES], loss[2 * PROBES];
} Column;

/* Products of a row of A and of Q with these. */
typedef struct {
    vec of_a[OF_A], of_q[OF_Q];
} Row;

/* Add to sums, one after the other, products of some columns of R with random vectors divided by their norms. */
INLINED void prepare_some(
    const Matrices *r, long member, long first, int count, long n, const double *g, Column *columns, double *sums,
    double *extremes)
{
    long last = first + count;
    for (int s = 0; s < count; s++) {
        double square = 0.0, norm;
#pragma omp simd reduction(+ : square)
        for (long i = 0; i < last; i++)
            square += element(r, member, i, first + s) * element(r, member, i, first + s);
        norm = sqrt(square);
        extremes[0] = norm >= extremes[0] ? extremes[0] : norm;
        extremes[1] = norm <= extremes[1] ? extremes[1] : norm;
        for (int p = 0; p < PROBES; p++) {
            columns[first + s].of_a[p] = g[(first + s) * PROBES + p] / norm;
            columns[first + s].of_q[PROBES + p] = g[(first + s) * PROBES + p];
        }
    }
    for (int p = 0; p < PROBES; p++) {
        double *sum = sums + p * n;
#pragma omp simd
        for (long i = 0; i < last; i++) {
            double some = 0.0;
            for (int s = 0; s < count; s++)
                some += element(r, member, i, first + s) * columns[first + s].of_a[p];
            sum[i] += some;
        }
    }
}

/* Divide the random vectors by the norms of columns, and multiply them by R, which has zeros below its diagonal: one of
 * some parts, with room for PROBES sums for each column.
 */
INLINED void prepare(
    const Matrices *r, long member, long n, long part, long parts, const double *g, Column *columns, double *sums,
    double *extremes)
{
    extremes[0] = INFINITY, extremes[1] = 0.0;
    memset(sums, 0, n * PROBES * sizeof(double));
    for (long first = part * TOGETHER; first < n; first += parts * TOGETHER)
        if (first + TOGETHER <= n)
            prepare_some(r, member, first, TOGETHER, n, g, columns, sums, extremes);
        else
            for (long j = first; j < n; j++)
                prepare_some(r, member, j, 1, n, g, columns, sums, extremes);
}

/* Products with R, once all columns are prepared. */
static inline void add_to_columns(long n, const double *sums, Column *columns)
{
    for (long j = 0; j < n; j++)
        for (int p = 0; p < PROBES; p++)
            columns[j].of_q[p] += sums[p * n + j];
}

/* Add products of some columns with vectors to the sums of some rows. */
INLINED void multiply(
    const Matrices *a, const Matrices *q, long member, long first, int rows, long start, long stop, const Column *columns,
    Row *sums)
{
    vec of_a[ROWS][OF_A] = {0}, of_q[ROWS][OF_Q] = {0};
    for (long j = start; j < stop; j++)
        for (int i = 0; i < rows; i++) {
            vec x = all(element(a, member, first + i, j)), y = all(element(q, member, first + i, j));
            for (int t = 0; t < OF_A; t++)
                of_a[i][t] = plus_product(of_a[i][t], x, vec_at(columns[j].of_a + t * WIDTH));
            for (int t = 0; t < OF_Q; t++)
                of_q[i][t] = plus_product(of_q[i][t], y, vec_at(columns[j].of_q + t * WIDTH));
        }
    for (int i = 0; i < rows; i++) {
        for (int t = 0; t < OF_A; t++)
            sums[i].of_a[t] += of_a[i][t];
        for (int t = 0; t < OF_Q; t++)
            sums[i].of_q[t] += of_q[i][t];
    }
}

/* Add what the transpose of Q makes of these to the sums of some columns. */
INLINED void multiply_back(
    const Matrices *q, long member, long first, int rows, long start, long stop, const Row *sums, vec (*of_columns)[OF_Q])
{
    for (long j = start; j < stop; j++)
        for (int t = OF_Q / 2; t < OF_Q; t++) {
            vec lost = of_columns[j - start][t];
            for (int i = 0; i < rows; i++)
                lost = plus_product(lost, all(element(q, member, first + i, j)), sums[i].of_q[t]);
            of_columns[j - start][t] = lost;
        }
}

/* SUMMED rows at most, by as many columns: what these need stays in the nearest cache. */
INLINED void measure(
    const Matrices *a, const Matrices *q, long member, long first, long count, long n, Column *columns, double *found)
{
    Row sums[SUMMED];
    memset(sums, 0, count * sizeof(Row));
    for (long start = 0; start < n; start += SUMMED) {
        long stop = start + SUMMED < n ? start + SUMMED : n, i = 0;
        for (; i + ROWS <= count; i += ROWS)
            multiply(a, q, member, first + i, ROWS, start, stop, columns, sums + i);
        for (; i < count; i++)
            multiply(a, q, member, first + i, 1, start, stop, columns, sums + i);
    }
    for (long start = 0; start < n; start += SUMMED) {
        vec of_columns[SUMMED][OF_Q];
        long stop = start + SUMMED < n ? start + SUMMED : n, i = 0;
        memset(of_columns, 0, (stop - start) * sizeof(of_columns[0]));
        for (; i + ROWS <= count; i += ROWS)
            multiply_back(q, member, first + i, ROWS, start, stop, sums + i, of_columns);
        for (; i < count; i++)
            multiply_back(q, member, first + i, 1, start, stop, sums + i, of_columns);
        for (long j = start; j < stop; j++)
            for (int t = OF_Q / 2; t < OF_Q; t++)
                vec_put(columns[j].loss + t * WIDTH, vec_at(columns[j].loss + t * WIDTH) + of_columns[j - start][t]);
    }
    for (long i = 0; i < count; i++) {
        double image[2 * PROBES], product[2 * PROBES];
        memcpy(image, sums[i].of_a, PROBES * sizeof(double)), memcpy(product, sums[i].of_q, PROBES * sizeof(double));
        for (int p = 0; p < PROBES; p++) {
            found[0] += (image[p] - product[p]) * (image[p] - product[p]);
            found[1] += image[p] * image[p];
        }
    }
}

INLINED void measure_rows(
    const Matrices *a, const Matrices *q, long member, long first, long last, long n, Column *columns, double *found)
{
    for (; first < last; first += SUMMED)
        measure(a, q, member, first, last - first < SUMMED ? last - first : SUMMED, n, columns, found);
}

/* What other rows have come to. */
static inline void add_sums(long n, const double *found, const Column *columns, double *all_found, Column *all_columns)
{
    for (int i = 0; i < FOUND; i++)
        all_found[i] += found[i];
    for (long j = 0; j < n; j++)
        for (int p = 0; p < 2 * PROBES; p++)
            all_columns[j].loss[p] += columns[j].loss[p];
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
