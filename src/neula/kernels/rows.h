/* Sums of multiples of the rows of a matrix, whose columns are padded with zeros to PADDED: Gram matrices, factors and
 * products are made of them.
 */
#ifndef NEULA_ROWS_H
#define NEULA_ROWS_H

#include <math.h>
#include <string.h>

#include "vectors.h"

#define UNIT 0x1p-53

#define PADDED 8  /* elements: whole vectors, and rows of a tile */
#define TALL 4    /* rows of a tile of a Gram matrix */
#define WIDE 2    /* its vectors */
#define AHEAD 4   /* vectors whose sums are under way */
#define NEAR 4096 /* elements of rows that stay in the cache */

static inline double length(long n, const double *x)
{
    double sum = 0.0;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < n; i++)
        sum += x[i] * x[i];
    return sqrt(sum);
}

/* A tile of X^T X for some rows, added to what is there: sums of sums err less than long ones. */
static inline void add_tile(const double *x, long rows, long columns, long i, long j, double *to, int wide)
{
    vec sums[TALL][WIDE];
    for (int s = 0; s < TALL; s++)
        for (int t = 0; t < wide; t++)
            sums[s][t] = all(0.0);
    for (const double *row = x; row < x + rows * columns; row += columns)
        for (int s = 0; s < TALL; s++)
            for (int t = 0; t < wide; t++)
                sums[s][t] = plus_product(sums[s][t], all(row[i + s]), vec_at(row + j + t * WIDTH));
    for (int s = 0; s < TALL; s++)
        for (int t = 0; t < wide; t++) {
            double *place = to + (i + s) * columns + j + t * WIDTH;
            vec_put(place, vec_at(place) + sums[s][t]);
        }
}

/* The upper triangle of X^T X added to what is there; of an upper triangle X the zeros are left out. */
static inline void add_gram(const double *x, long rows, long columns, double *to, int triangle)
{
    long step = NEAR / columns > PADDED ? NEAR / columns : PADDED;
    for (long k = 0; k < rows; k += step)
        for (long i = 0; i < columns; i += TALL) {
            long end = triangle && i + TALL < rows ? i + TALL : rows, some = end - k < step ? end - k : step;
            long j = i & -WIDTH;
            if (some <= 0)
                continue;
            for (; j + WIDE * WIDTH <= columns; j += WIDE * WIDTH)
                add_tile(x + k * columns, some, columns, i, j, to, WIDE);
            if (j < columns)
                add_tile(x + k * columns, some, columns, i, j, to, 1);
        }
}

/* The upper triangle of X^T X. */
static inline void form_gram(const double *x, long rows, long columns, double *to, int triangle)
{
    memset(to, 0, columns * columns * sizeof(double));
    add_gram(x, rows, columns, to, triangle);
}

/* ||S X S||_F of a symmetric X with its upper triangle, S being a diagonal matrix. */
static inline double norm_of(const double *x, long n, long columns, const double *scales)
{
    double sum = 0.0;
    for (long i = 0; i < n; i++) {
        double of_row = 0.0, own = scales[i] * scales[i] * x[i * columns + i];
#pragma omp simd reduction(+ : of_row)
        for (long j = i + 1; j < n; j++)
            of_row += (scales[j] * x[i * columns + j]) * (scales[j] * x[i * columns + j]);
        sum += own * own + 2.0 * scales[i] * scales[i] * of_row;
    }
    return sqrt(sum);
}

static inline void add_some_rows(
    double *to, const double *factors, long apart, double sign, const double *rows, long columns, long count, int wide)
{
    vec sums[AHEAD];
    for (int t = 0; t < wide; t++)
        sums[t] = vec_at(to + t * WIDTH);
    for (long k = 0; k < count; k++)
        for (int t = 0; t < wide; t++)
            sums[t] = plus_product(sums[t], all(sign * factors[k * apart]), vec_at(rows + k * columns + t * WIDTH));
    for (int t = 0; t < wide; t++)
        vec_put(to + t * WIDTH, sums[t]);
}

/* Add multiples of rows start to stop of a matrix to a row, from some column on. Where the matrix is upper triangular,
 * zeros are left out.
 */
static inline void add_rows(
    double *to, const double *factors, long apart, double sign, const double *rows, long columns, long start, long stop,
    long first, int triangle)
{
    factors += start * apart, rows += start * columns;
    long j = first & -WIDTH;
    for (; j + AHEAD * WIDTH <= columns; j += AHEAD * WIDTH) {
        long end = triangle && j + AHEAD * WIDTH < stop ? j + AHEAD * WIDTH : stop;
        add_some_rows(to + j, factors, apart, sign, rows + j, columns, end - start, AHEAD);
    }
    for (; j < columns; j += WIDTH) {
        long end = triangle && j + WIDTH < stop ? j + WIDTH : stop;
        add_some_rows(to + j, factors, apart, sign, rows + j, columns, end - start, 1);
    }
}

/* Part of itself by which the diagonal of a Gram matrix of m rows is enlarged: by more than rounding errors, its own and
 * those of its factorization, so that there is a factor (Fukaya, Kannan, Nakatsukasa, Yamamoto and Yanagisawa, 2020).
 */
static inline double shift_of(long m, long n)
{
    return (m + n + 2) * n * UNIT;
}

/* R with R^T R = X in the upper triangle of X, which has n columns before padding, its diagonal enlarged by some part of
 * itself; 0 where there is none.
 */
static inline int cholesky(double *x, long n, long columns, double shift)
{
    for (long i = 0; i < n; i++) {
        double *row = x + i * columns;
        row[i] *= 1.0 + shift;
        add_rows(row, x + i, columns, -1.0, x, columns, 0, i, i, 0);
        if (!(row[i] > 0.0 && row[i] < INFINITY))
            return 0;
        double scale = sqrt(row[i]);
        for (long j = i; j < columns; j++)
            row[j] /= scale;
    }
    return 1;
}

#endif
