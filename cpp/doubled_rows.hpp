// Sums of multiples of the rows of a matrix in twice the working precision.
#pragma once

#include "rows.hpp"

NEULA_BEGIN

constexpr Index RENORMALIZED = 4; // products after which a sum becomes a number and its rounding error again

// Sums of the rows of a matrix times high + low, for some vectors of their elements.
template <int wide>
ALWAYS_INLINE void sum_doubled(
    Vec *sums, Vec *rest, const double *rows, Index columns, const double *high, const double *low, Index count)
{
    for (int t = 0; t < wide; t++)
        sums[t] = rest[t] = all(0.0);
    for (Index from = 0; from < count; from += RENORMALIZED) {
        Index to = from + RENORMALIZED < count ? from + RENORMALIZED : count;
        for (Index k = from; k < to; k++)
            for (int t = 0; t < wide; t++) {
                Vec x = load(rows + k * columns + t * WIDTH);
                add_product(x, all(high[k]), sums[t], rest[t]);
                rest[t] = plus_product(rest[t], x, all(low[k]));
            }
        for (int t = 0; t < wide; t++)
            two_sum(sums[t], rest[t], sums[t], rest[t]);
    }
}

template <int wide>
ALWAYS_INLINE void combine_doubled_part(
    const double *b, double sign, const double *rows, Index columns, const double *high, const double *low, Index count,
    double *to, double *to_low)
{
    Vec sums[wide], rest[wide];
    sum_doubled<wide>(sums, rest, rows, columns, high, low, count);
    for (int t = 0; t < wide; t++) {
        Vec sum, error;
        two_sum(b ? load(b + t * WIDTH) : all(0.0), sign * sums[t], sum, error);
        two_sum(sum, error + sign * rest[t], sum, error);
        store(to + t * WIDTH, sum);
        if (to_low)
            store(to_low + t * WIDTH, error);
    }
}

// b plus or minus the rows times high + low, as to + to_low, or rounded to one number without `to_low`; without b it is zero.
inline void combine_doubled(
    const double *b, double sign, const double *rows, Index columns, const double *high, const double *low, Index count,
    double *to, double *to_low)
{
    constexpr Index STEP = UNDER_WAY * WIDTH;
    Index j = 0;
    for (; j + STEP <= columns; j += STEP)
        combine_doubled_part<UNDER_WAY>(
            b ? b + j : nullptr, sign, rows + j, columns, high, low, count, to + j, to_low ? to_low + j : nullptr);
    for (; j < columns; j += WIDTH)
        combine_doubled_part<1>(
            b ? b + j : nullptr, sign, rows + j, columns, high, low, count, to + j, to_low ? to_low + j : nullptr);
}

NEULA_END
