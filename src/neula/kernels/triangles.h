/* Upper triangular matrices row by row, padded as in rows.h: inverses, and products with a vector. */
#ifndef NEULA_TRIANGLES_H
#define NEULA_TRIANGLES_H

#include "rows.h"

/* R^-1, row by row from the last one on: the computed one times R errs by n u |R^-1| |R| at most. */
static inline void invert(const double *r, long n, long columns, double *inverse)
{
    for (long i = n - 1; i >= 0; i--) {
        double *row = inverse + i * columns;
        const double *of_r = r + i * columns;
        memset(row, 0, columns * sizeof(double));
        row[i] = 1.0;
        add_rows(row, of_r, 1, -1.0, inverse, columns, i + 1, n, i, 1);
        for (long j = i; j < columns; j++)
            row[j] /= of_r[i];
    }
}

/* X^T v, as long as rows are. */
static inline void times_transposed(const double *x, long n, long columns, const double *v, double *to)
{
    memset(to, 0, columns * sizeof(double));
    add_rows(to, v, 1, 1.0, x, columns, 0, n, 0, 1);
}

#define SOME 16 /* products that are added up before their sum is added to others */

/* The same with smaller rounding errors, as many u as `of_parts` says; there is room for a row. */
static inline void times_by_parts(const double *x, long n, long columns, const double *v, double *to, double *room)
{
    memset(to, 0, columns * sizeof(double));
    add_rows(to, v, 1, 1.0, x, columns, 0, n < SOME ? n : SOME, 0, 1);
    for (long from = SOME; from < n; from += SOME) {
        memset(room, 0, columns * sizeof(double));
        add_rows(room, v, 1, 1.0, x, columns, from, n - from < SOME ? n : from + SOME, 0, 1);
        for (long j = 0; j < columns; j++)
            to[j] += room[j];
    }
}

static inline double of_parts(long n)
{
    return n <= SOME ? n : SOME + n / SOME + 2;
}

/* X v of a v that is padded; what follows the n elements is left as it is. */
static inline void times(const double *x, long n, long columns, const double *v, double *to)
{
    for (long i = 0; i < n; i++) {
        vec sum = all(0.0);
        for (long j = i & -WIDTH; j < columns; j += WIDTH)
            sum = plus_product(sum, vec_at(x + i * columns + j), vec_at(v + j));
        double total = sum[0];
        for (int l = 1; l < WIDTH; l++)
            total += sum[l];
        to[i] = total;
    }
}

#endif
