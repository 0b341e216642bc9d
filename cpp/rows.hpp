// Upper triangular and other matrices row by row, whose rows are padded with zeros to a multiple of PADDED elements: sums of
// multiples of rows, of which Gram matrices, Cholesky factors, inverses and products are made.
#pragma once

#include "vectors.hpp"

NEULA_BEGIN

constexpr double UNIT = 0x1p-53, SINGLE_UNIT = 0x1p-24;

constexpr Index PADDED = 8;  // elements: whole vectors, and rows of a tile
constexpr int TALL = 4;      // rows of a tile of a Gram matrix
constexpr int WIDE = 2;      // its vectors
constexpr int UNDER_WAY = 4; // vectors whose sums are kept in registers
constexpr Index NEAR = 4096; // elements of rows that stay in the nearest cache
constexpr Index SUMMED = 16; // products that are added up before their sum is added to others

inline Index padded(Index n)
{
    return (n + PADDED - 1) & -PADDED;
}

inline bool is_zero(Index count, const double *x)
{
    for (Index i = 0; i < count; i++)
        if (x[i] != 0.0)
            return false;
    return true;
}

inline double norm(Index n, const double *x)
{
    double sum = 0.0;
#pragma omp simd reduction(+ : sum)
    for (Index i = 0; i < n; i++)
        sum += x[i] * x[i];
    return sqrt(sum);
}

// ||D (x - y)|| for a diagonal D; without y that of D x, for which masked loads from nowhere take long where this is no
// constant.
ALWAYS_INLINE double scaled_norm(Index n, const double *scales, const double *x, const double *y = nullptr)
{
    double sum = 0.0;
#pragma omp simd reduction(+ : sum)
    for (Index j = 0; j < n; j++) {
        double scaled = scales[j] * (y ? x[j] - y[j] : x[j]);
        sum += scaled * scaled;
    }
    return sqrt(sum);
}

// Of numbers near 1: hypot, whose newest version not every C library has, guards against overflow as well.
inline double root_of_squares(double x, double y)
{
    return sqrt(x * x + y * y);
}

// Add a tile of X^T X for some rows to what is there: sums of sums err less than long ones.
template <int wide> ALWAYS_INLINE void add_tile(const double *x, Index rows, Index columns, Index i, Index j, double *to)
{
    Vec sums[TALL][wide];
    set_zero(sums);
    for (const double *row = x; row < x + rows * columns; row += columns)
        for (int s = 0; s < TALL; s++)
            for (int t = 0; t < wide; t++)
                sums[s][t] = plus_product(sums[s][t], all(row[i + s]), load(row + j + t * WIDTH));
    for (int s = 0; s < TALL; s++)
        for (int t = 0; t < wide; t++) {
            double *place = to + (i + s) * columns + j + t * WIDTH;
            store(place, load(place) + sums[s][t]);
        }
}

// Add the upper triangle of X^T X; zeros of an upper triangle X are left out.
inline void add_gram(const double *x, Index rows, Index columns, double *to, bool triangle)
{
    Index step = NEAR / columns > PADDED ? NEAR / columns : PADDED;
    for (Index k = 0; k < rows; k += step)
        for (Index i = 0; i < columns; i += TALL) {
            Index end = triangle && i + TALL < rows ? i + TALL : rows, some = end - k < step ? end - k : step;
            Index j = i & -Index(WIDTH);
            if (some <= 0)
                continue;
            for (; j + WIDE * WIDTH <= columns; j += WIDE * WIDTH)
                add_tile<WIDE>(x + k * columns, some, columns, i, j, to);
            if (j < columns)
                add_tile<1>(x + k * columns, some, columns, i, j, to);
        }
}

// The upper triangle of X^T X.
inline void form_gram(const double *x, Index rows, Index columns, double *to, bool triangle)
{
    memset(to, 0, columns * columns * sizeof(double));
    add_gram(x, rows, columns, to, triangle);
}

// ||S X S||_F of a symmetric X given by its upper triangle, S being a diagonal matrix.
inline double symmetric_norm(const double *x, Index n, Index columns, const double *scales)
{
    double sum = 0.0;
    for (Index i = 0; i < n; i++) {
        double of_row = 0.0, own = scales[i] * scales[i] * x[i * columns + i];
#pragma omp simd reduction(+ : of_row)
        for (Index j = i + 1; j < n; j++)
            of_row += (scales[j] * x[i * columns + j]) * (scales[j] * x[i * columns + j]);
        sum += own * own + 2.0 * scales[i] * scales[i] * of_row;
    }
    return sqrt(sum);
}

template <int wide>
ALWAYS_INLINE void add_multiples_of_part(
    double *to, const double *factors, Index apart, double sign, const double *rows, Index columns, Index count)
{
    Vec sums[wide];
    for (int t = 0; t < wide; t++)
        sums[t] = load(to + t * WIDTH);
    for (Index k = 0; k < count; k++)
        for (int t = 0; t < wide; t++)
            sums[t] = plus_product(sums[t], all(sign * factors[k * apart]), load(rows + k * columns + t * WIDTH));
    for (int t = 0; t < wide; t++)
        store(to + t * WIDTH, sums[t]);
}

// to += sign * sum of factors[k apart] times row k of a matrix, for rows start to stop, from some
// column on. Where the matrix is upper triangular, zeros are left out.
inline void add_multiples(
    double *to, const double *factors, Index apart, double sign, const double *rows, Index columns, Index start, Index stop,
    Index first, bool triangle)
{
    constexpr Index EACH = UNDER_WAY * WIDTH;
    factors += start * apart, rows += start * columns;
    Index j = first & -Index(WIDTH);
    for (; j + EACH <= columns; j += EACH) {
        Index end = triangle && j + EACH < stop ? j + EACH : stop;
        add_multiples_of_part<UNDER_WAY>(to + j, factors, apart, sign, rows + j, columns, end - start);
    }
    for (; j < columns; j += WIDTH) {
        Index end = triangle && j + WIDTH < stop ? j + WIDTH : stop;
        add_multiples_of_part<1>(to + j, factors, apart, sign, rows + j, columns, end - start);
    }
}

// The second row (-x2, x1) of each pair of parts from the first one (x1, x2): numbers times i.
inline void turn_row(const double *row, Index count, double *to)
{
    for (Index j = 0; j < count; j += 2)
        to[j] = -row[j + 1], to[j + 1] = row[j];
}

// Part of itself by which the diagonal of a Gram matrix of m rows is enlarged: by more than rounding errors, its own and
// those of its factorization, so that there is a factor (Fukaya, Kannan, Nakatsukasa, Yamamoto and Yanagisawa, 2020).
inline double gram_shift(Index m, Index n)
{
    return (m + n + 2) * n * UNIT;
}

// R with R^T R = X in the upper triangle of X, which has n columns before padding, its diagonal enlarged by some part of
// itself; false where there is none. Where numbers have two parts, X is [x1 x2; -x2 x1] for each of them, and so is R: of X
// only the first rows of these are read.
inline bool cholesky(double *x, Index n, Index columns, double shift, Index parts = 1)
{
    for (Index i = 0; i < n; i += parts) {
        double *row = x + i * columns;
        row[i] *= 1.0 + shift;
        add_multiples(row, x + i, columns, -1.0, x, columns, 0, i, i, false);
        double pivot = row[i];
        if (!(pivot > 0.0 && pivot < INFINITY))
            return false;
        double scale = sqrt(pivot);
        for (Index j = i; j < columns; j++)
            row[j] /= scale;
        if (parts == 2) {
            row[i + 1] = 0.0;  // the diagonal is real
            turn_row(row + i, columns - i, row + i + columns);
        }
    }
    return true;
}

// R^-1, row by row from the last one on: the computed one times R errs by n u |R^-1| |R| at most.
inline void invert(const double *r, Index n, Index columns, double *inverse)
{
    for (Index i = n - 1; i >= 0; i--) {
        double *row = inverse + i * columns;
        const double *of_r = r + i * columns;
        memset(row, 0, columns * sizeof(double));
        row[i] = 1.0;
        add_multiples(row, of_r, 1, -1.0, inverse, columns, i + 1, n, i, true);
        for (Index j = i; j < columns; j++)
            row[j] /= of_r[i];
    }
}

// X^T v of an upper triangle, padded as its rows are.
inline void times_transposed(const double *x, Index n, Index columns, const double *v, double *to)
{
    memset(to, 0, columns * sizeof(double));
    add_multiples(to, v, 1, 1.0, x, columns, 0, n, 0, true);
}

// The same with smaller rounding errors: `partial_sum_terms` units of roundoff. `part` has room for a row.
inline void times_transposed_by_parts(const double *x, Index n, Index columns, const double *v, double *to, double *part)
{
    memset(to, 0, columns * sizeof(double));
    add_multiples(to, v, 1, 1.0, x, columns, 0, n < SUMMED ? n : SUMMED, 0, true);
    for (Index from = SUMMED; from < n; from += SUMMED) {
        memset(part, 0, columns * sizeof(double));
        add_multiples(part, v, 1, 1.0, x, columns, from, n - from < SUMMED ? n : from + SUMMED, 0, true);
        for (Index j = 0; j < columns; j++)
            to[j] += part[j];
    }
}

inline double partial_sum_terms(Index n)
{
    return n <= SUMMED ? n : SUMMED + n / SUMMED + 2;
}

// X v of an upper triangle and a padded v; elements of `to` after the first n are left as they are.
inline void times(const double *x, Index n, Index columns, const double *v, double *to)
{
    for (Index i = 0; i < n; i++) {
        Vec sum = all(0.0);
        for (Index j = i & -Index(WIDTH); j < columns; j += WIDTH)
            sum = plus_product(sum, load(x + i * columns + j), load(v + j));
        to[i] = lane_sum(sum);
    }
}

NEULA_END
