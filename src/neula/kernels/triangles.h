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
