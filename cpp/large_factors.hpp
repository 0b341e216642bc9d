// Copies of A that become its factors, and solutions by them (large_systems.hpp).
#pragma once

#include "large_systems.hpp"

NEULA_BEGIN

// Copy some rows, and accumulate magnitudes, and squares of columns, of the parts of their numbers.
template <int rows, typename From, typename To, typename Number>
ALWAYS_INLINE void copy_some_rows(RowsPart &part, Rows<From, Number> a, Rows<To, Number> copy, Index i, Vec *most)
{
    const double *y = part.system->vectors + LARGE_PROBES * a.n + i;
    double *squares = part.squares, *images = part.image;
    Vec sums[rows] = {}, factors[rows];
    Index j = 0, length = a.length();
#pragma GCC unroll 4
    for (int l = 0; l < rows; l++)
        factors[l] = all(y[l]);
    for (; j + WIDTH <= length; j += WIDTH) {
        Vec square = load(squares + j), image = load(images + j);
#pragma GCC unroll 4
        for (int l = 0; l < rows; l++) {
            Vec x = load(a.row(i + l) + j), size = magnitude(x);
            store(copy.row(i + l) + j, x);
            sums[l] += size;
            most[l] = larger(size, most[l]);
            square = plus_product(square, x, x);
            image = plus_product(image, factors[l], x);
        }
        store(squares + j, square), store(images + j, image);
    }
    for (int l = 0; l < rows; l++) {
        double sum = lane_sum(sums[l]);
        for (Index rest = j; rest < length; rest++) {
            double x = double(a.row(i + l)[rest]), size = fabs(x);
            copy.row(i + l)[rest] = To(x);
            sum += size;
            raise(part.most, size);
            squares[rest] += x * x;
            images[rest] += y[l] * x;
        }
        column_of(*part.system, ROW_SUMS)[i + l] = sum;
    }
}

template <typename From, typename To, typename Number>
void copy_rows(RowsPart &part, Rows<From, Number> a, Rows<To, Number> copy)
{
    Vec most[ROWS] = {};
    Index i = part.first;
    for (; i + ROWS <= part.last; i += ROWS)
        copy_some_rows<ROWS>(part, a, copy, i, most);
    for (; i < part.last; i++)
        copy_some_rows<1>(part, a, copy, i, most);
    raise(part.most, largest_of(most, ROWS));
}

inline void copy_part(RowsPart &part)
{
    with_matrix(*part.system, [&](auto a) {
        constexpr int parts = decltype(a)::parts;
        with_factors(*part.system, [&](auto copy) {
            if constexpr (decltype(copy)::parts == parts)
                copy_rows(part, a, copy);
        });
    });
}

inline void eliminate_part(RowsPart &part)
{
    with_factors(*part.system, [&](auto factors) { subtract(part, factors); });
}

// Solve with a triangle on the diagonal of the factors: U from its first row on, or L from its last one. Returns the largest
// element of the triangle of U.
template <typename T, typename Number> double solve_triangle(const RowsPart &block, Rows<T, Number> factors, bool upper)
{
    constexpr Index EACH = PARTS<Number>;
    Index size = block.last - block.first, length = column_length(factors.length());
    Number triangle[WIDTH][WIDTH], read[WIDTH];
    double most = 0.0;
    for (Index i = 0; i < size; i++)
        for (Index j = 0; j < size; j++)
            triangle[i][j] = Number(factors(block.first + i, block.first + j));
    for (Index i = 0; i < size; i++)
        for (Index j = 0; j <= i; j++)
            raise(most, largest_part(triangle[i][j]));
    for (Index c = 0; c < (block.count == EACH ? EACH : (block.count + GROUP - 1) / GROUP * GROUP); c += EACH) {
        double *column = block.others + c * length + EACH * block.first;
        Number *x = EACH == 1 ? reinterpret_cast<Number *>(column) : read;
        for (Index i = 0; EACH > 1 && i < size; i++)
            x[i] = entry<Number>(column, i);
        for (Index i = 0; upper && i < size; i++) {
            for (Index j = 0; j < i; j++)
                x[i] = x[i] - triangle[i][j] * x[j];
            x[i] = x[i] / triangle[i][i];
        }
        for (Index i = size - 1; !upper && i >= 0; i--)
            for (Index j = size - 1; j > i; j--)
                x[i] = x[i] - triangle[i][j] * x[j];
        for (Index i = 0; EACH > 1 && i < size; i++)
            set_entry(column, length, i, x[i]);
    }
    return most;
}

// Of parts that lie together.
template <typename Number> inline void exchange_elements(double *x, Index i, Index j)
{
    Number *elements = reinterpret_cast<Number *>(x);
    exchange(elements[i], elements[j]);
}

// Solve in the place of some columns; returns the largest element of U where that is asked for. Each of several threads has
// some rows of a stripe, and one of them solves with the triangles on its diagonal.
template <typename T, typename Number>
double solve_columns(const LargeSystem &system, Rows<T, Number> factors, double *columns, Index count, bool find_largest)
{
    Index n = system.n, stripe = system.threads > 1 ? STRIPE : (n + WIDTH - 1) / WIDTH * WIDTH;
    RowsPart part = {};
    part.system = &system, part.work = eliminate_part, part.find_largest = find_largest, part.count = count;
    part.columns = part.others = columns;
    double most = 0.0;
    for (Index top = 0; top < n; top += stripe) {
        Index bottom = top + stripe < n ? top + stripe : n;
        part.first = top, part.last = bottom, part.start = 0, part.end = top;
        if (top > 0)
            raise(most, share_rows(part));
        for (Index i = top; i < bottom; i += WIDTH) {
            part.first = i, part.last = i + WIDTH < n ? i + WIDTH : n, part.start = top, part.end = i, part.most = 0.0;
            subtract(part, factors);
            raise(most, part.most);
            raise(most, solve_triangle(part, factors, true));
        }
    }
    part.find_largest = false;
    for (Index top = (n - 1) / stripe * stripe; top >= 0; top -= stripe) {
        Index bottom = top + stripe < n ? top + stripe : n;
        part.first = top, part.last = bottom, part.start = bottom, part.end = n;
        if (bottom < n)
            share_rows(part);
        for (Index i = (bottom - 1) / WIDTH * WIDTH; i >= top; i -= WIDTH) {
            part.first = i, part.last = i + WIDTH < n ? i + WIDTH : n, part.start = part.last, part.end = bottom;
            subtract(part, factors);
            solve_triangle(part, factors, false);
        }
    }
    for (Index c = 0; c < count; c++)
        for (Index j = n - 1; j >= 0; j--)
            exchange_elements<Number>(columns + c * column_length(system), j, system.pivots[j]);
    return most;
}

inline double substitute(const LargeSystem &system, double *columns, Index count, bool find_largest)
{
    double most = 0.0;
    with_factors(system, [&](auto factors) { most = solve_columns(system, factors, columns, count, find_largest); });
    return most;
}

// A^-T of a vector, in its place.
template <typename T, typename Number> void substitute_transposed(Rows<T, Number> factors, const int *pivots, double *vector)
{
    Index n = factors.n;
    Number *x = reinterpret_cast<Number *>(vector);
    for (Index j = 0; j < n; j++)
        exchange(x[j], x[pivots[j]]);
    for (Index j = 0; j < n; j++) {
        Number factor = x[j];
        const Stored<Number, T> *row = &factors(j, 0);
#pragma omp simd
        for (Index i = j + 1; i < n; i++)
            x[i] = x[i] - Number(row[i]) * factor;
    }
    for (Index j = n - 1; j >= 0; j--) {
        const Stored<Number, T> *row = &factors(j, 0);
        Number factor = x[j] = x[j] / Number(row[j]);
#pragma omp simd
        for (Index i = 0; i < j; i++)
            x[i] = x[i] - Number(row[i]) * factor;
    }
}

// Rows of a factor L of A^T = L L^H, one for each of its columns, of which the part behind the diagonal counts. They become those
// of P L U without P, for the diagonal D of L: L D^-1, and U = D L^H in two steps, since rows of U come from all of L.
template <typename T, typename Number> void divide_rows(Rows<T, Number> factors, Index first, Index last)
{
    for (Index j = first; j < last; j++) {
        double pivot = double(real_part(factors(j, j))), reciprocal = 1 / pivot;
        factors(j, j) = T(pivot * pivot);
        T *row = factors.row(j);
        for (Index i = PARTS<Number> * (j + 1); i < factors.length(); i++)
            row[i] *= T(reciprocal);
    }
}

inline void divide_part(RowsPart &part)
{
    with_factors(*part.system, [&](auto factors) { divide_rows(factors, part.first, part.last); });
}

// Some rows of U, a tile of the cache at a time.
inline void transpose_part(RowsPart &part)
{
    with_factors(*part.system, [&](auto factors) {
        for (Index top = part.first; top < part.last; top += TRANSPOSED)
            for (Index left = 0; left < part.last; left += TRANSPOSED) {
                Index bottom = top + TRANSPOSED < part.last ? top + TRANSPOSED : part.last;
                for (Index j = top; j < bottom; j++)
                    for (Index i = left; i < left + TRANSPOSED && i < j; i++)
                        factors(j, i) = real_part(factors(i, i)) * conjugate(factors(i, j));
            }
    });
}

NEULA_END
