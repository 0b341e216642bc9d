/* Sums of multiples of the rows of a matrix in twice the working precision. */
#ifndef NEULA_DOUBLED_ROWS_H
#define NEULA_DOUBLED_ROWS_H

#include "rows.h"

#define EACH 4 /* products after which a sum is one of a number and its rounding error again */

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

static inline void some_combined(
    const double *b, double sign, const double *rows, long columns, const double *high, const double *low, long count,
    double *to, double *to_low, int wide)
{
    vec sums[AHEAD], rest[AHEAD];
    add_doubled(sums, rest, rows, columns, high, low, count, wide);
    for (int t = 0; t < wide; t++) {
        vec of_sum, of_rest;
        two_sums(b ? vec_at(b + t * WIDTH) : all(0.0), sign * sums[t], &of_sum, &of_rest);
        two_sums(of_sum, of_rest + sign * rest[t], &of_sum, &of_rest);
        vec_put(to + t * WIDTH, of_sum);
        if (to_low)
            vec_put(to_low + t * WIDTH, of_rest);
    }
}

/* b plus or minus the rows times high + low, as to + to_low, or else rounded to one number; without b it is zero. */
static inline void combine_doubled(
    const double *b, double sign, const double *rows, long columns, const double *high, const double *low, long count,
    double *to, double *to_low)
{
    long j = 0;
    for (; j + AHEAD * WIDTH <= columns; j += AHEAD * WIDTH)
        some_combined(
            b ? b + j : NULL, sign, rows + j, columns, high, low, count, to + j, to_low ? to_low + j : NULL, AHEAD);
    for (; j < columns; j += WIDTH)
        some_combined(
            b ? b + j : NULL, sign, rows + j, columns, high, low, count, to + j, to_low ? to_low + j : NULL, 1);
}

#endif
