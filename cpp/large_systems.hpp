// One large linear system: its workspace, its rows shared among threads, and products of rows with columns.
//
// Rows of A are contiguous, and the factors are those of its transpose, P L U = A^T, column by column. So all products with A,
// and all solves, are inner products of contiguous numbers. So they are of complex matrices, whose rows are those of real ones
// of twice the length, if columns are written twice: real parts of products are those with (re, -im, re, -im, ...), imaginary
// parts those with (im, re, im, re, ...).
#pragma once

#include "lanes.hpp"
#include "rows.hpp"
#include "threads.hpp"

NEULA_BEGIN

constexpr int GROUP = 6;  // columns that rows are multiplied by together: the random vectors, another one, and a solution
constexpr int ROWS = WIDTH == 8 ? 4 : 2;  // rows likewise: their sums stay in registers. They divide WIDTH.
constexpr Index STRIPE = 256;             // rows that several threads solve for together
constexpr Index TRANSPOSED = 32;          // rows, and numbers of each, that are transposed together

// Columns of the workspace: sums of magnitudes of rows, norms of columns, A^T times a random vector, and one for a while; then
// two sums of each thread, and right-hand sides, solutions and updates.
enum : Index { ROW_SUMS, COLUMN_NORMS, IMAGE, SPARE, FIXED_COLUMNS };

// Parts of a number, and of a row: doubles, or floats.
inline Index parts_of(const LargeSystem &system) { return system.complex ? 2 : 1; }
inline Index row_length(const LargeSystem &system) { return parts_of(system) * system.n; }

// Elements of a column of the workspace: whole vectors, and zeros behind the last row.
inline Index column_length(Index parts) { return (parts + 7) / 8 * 8 + 8; }
inline Index column_length(const LargeSystem &system) { return column_length(row_length(system)); }

inline double *column_of(const LargeSystem &system, Index i) { return system.workspace + i * column_length(system); }

// Right-hand sides, random vectors and the one for the norm of A, filled up to whole groups.
inline Index side_columns(const LargeSystem &system)
{
    return (parts_of(system) * (system.k + LARGE_PROBES + 1) + GROUP - 1) / GROUP * GROUP;
}

// A square matrix with contiguous rows, whose numbers have parts of type T.
template <typename T, typename Number> struct Rows {
    static constexpr int parts = PARTS<Number>;

    T *first;
    Index n;
    Index length() const { return parts * n; }
    T *row(Index i) const { return first + i * length(); }
    Stored<Number, T> &operator()(Index i, Index j) const { return reinterpret_cast<Stored<Number, T> *>(row(i))[j]; }
};

// Call `work` with the rows of A, or of the factors.
template <typename T, typename Data, typename Work>
inline void with_rows(const LargeSystem &system, Data *data, const Work &work)
{
    if (system.complex)
        work(Rows<T, Complex>{static_cast<T *>(data), system.n});
    else
        work(Rows<T, double>{static_cast<T *>(data), system.n});
}

template <typename Work> inline void with_matrix(const LargeSystem &system, const Work &work)
{
    if (system.single)
        with_rows<const float>(system, system.a, work);
    else
        with_rows<const double>(system, system.a, work);
}

template <typename Work> inline void with_factors(const LargeSystem &system, const Work &work)
{
    if (system.single_factors)
        with_rows<float>(system, system.factors, work);
    else
        with_rows<double>(system, system.factors, work);
}

// Element i of a column, which is written once, or twice as products with it need.
template <typename Number> ALWAYS_INLINE Number entry(const double *column, Index i)
{
    if constexpr (PARTS<Number> == 1)
        return column[i];
    else
        return {column[2 * i], -column[2 * i + 1]};
}

template <typename Number> ALWAYS_INLINE void set_entry(double *column, Index length, Index i, Number x)
{
    if constexpr (PARTS<Number> == 1)
        column[i] = x;
    else
        column[2 * i] = column[length + 2 * i + 1] = x.re, column[2 * i + 1] = -x.im, column[length + 2 * i] = x.im;
}

// A number of its parts.
template <typename Number> ALWAYS_INLINE Number of_parts(const double *x, Index apart = 1)
{
    if constexpr (PARTS<Number> == 1)
        return x[0];
    else
        return {x[0], x[apart]};
}

// Some rows for one thread to work on.
struct RowsPart {
    const LargeSystem *system;
    void (*work)(RowsPart &);
    Index first, last;
    const double *columns;    // factors of the rows
    double *others;           // from which products are subtracted
    Index count, start, end;  // columns, of complex ones both; elements of rows
    bool find_largest;
    double *squares, *image, most;
};

inline void raise(double &most, double x) { most = x > most ? x : most; }

inline double largest_part(double x) { return fabs(x); }
inline double largest_part(Complex x) { return larger(fabs(x.re), fabs(x.im)); }

inline double largest_of(const double *x, Index n)
{
    double most = 0.0;
    for (Index i = 0; i < n; i++)
        most = fabs(x[i]) > most ? fabs(x[i]) : most;
    return most;
}

inline double largest_of(const Vec *x, int count)
{
    double most = 0.0;
    for (int v = 0; v < count; v++)
        for (int l = 0; l < WIDTH; l++)
            most = x[v][l] > most ? x[v][l] : most;
    return most;
}

// Of complex numbers, or of reals.
inline double largest_number(const LargeSystem &system, const double *x)
{
    double most = 0.0;
    for (Index i = 0; system.complex && i < system.n; i++)
        most = larger(squared(of_parts<Complex>(x + 2 * i)), most);
    return system.complex ? sqrt(most) : largest_of(x, system.n);
}

inline double smallest_of(const double *x, Index n)
{
    double least = x[0];
    for (Index i = 1; i < n; i++)
        least = x[i] < least ? x[i] : least;
    return least;
}

template <typename Number> ALWAYS_INLINE void subtract_entry(double *column, Index length, Index i, Number x)
{
    set_entry(column, length, i, entry<Number>(column, i) - x);
}

inline void work_on_part(RowsPart &part) { part.work(part); }

// Share the rows of a part among threads; returns the largest number that they find.
inline double share_rows(const RowsPart &whole)
{
    RowsPart parts[MOST_THREADS];
    const LargeSystem &system = *whole.system;
    Index threads = system.threads, rows = whole.last - whole.first;
    double most = 0.0;
    for (Index t = 0; t < threads; t++) {
        parts[t] = whole;
        parts[t].first = whole.first + t * rows / threads / WIDTH * WIDTH;
        parts[t].last = whole.first + (t + 1 < threads ? (t + 1) * rows / threads / WIDTH * WIDTH : rows);
        parts[t].squares = column_of(system, FIXED_COLUMNS + 2 * t);
        parts[t].image = column_of(system, FIXED_COLUMNS + 2 * t + 1);
    }
    side_by_side<work_on_part>(parts, threads);
    for (Index t = 0; t < threads; t++)
        raise(most, parts[t].most);
    return most;
}

// Inner products of some rows from row i on, from part `start` to `end`, with some columns; `most` are their largest
// elements. Rows whose elements are no whole number of vectors are read up to their ends.
template <int rows, int columns, bool find_largest, typename T, typename Number>
ALWAYS_INLINE void multiply_rows(
    Rows<T, Number> a, Index i, Index start, Index end, const double *x, Index length, double *found, Vec *most)
{
    Vec sums[GROUP * ROWS] = {};
    // Columns end with zeros: the last vector may have a part of the next row, where there is one.
    Index j = start, whole = (end + WIDTH - 1) / WIDTH * WIDTH;
    whole = (i + rows - 1) * a.length() + whole <= a.n * a.length() ? whole : end / WIDTH * WIDTH;
    for (; j < whole; j += WIDTH) {
        Vec element[rows];
#pragma GCC unroll 4
        for (int l = 0; l < rows; l++)
            element[l] = load(a.row(i + l) + j);
        if constexpr (find_largest)
#pragma GCC unroll 4
            for (int l = 0; l < rows; l++)
                most[l] = larger(magnitude(element[l]), most[l]);
#pragma GCC unroll 6
        for (int c = 0; c < columns; c++) {
            Vec factor = load(x + c * length + j);
#pragma GCC unroll 4
            for (int l = 0; l < rows; l++)
                sums[c * ROWS + l] = plus_product(sums[c * ROWS + l], element[l], factor);
        }
    }
#pragma GCC unroll 6
    for (int c = 0; c < GROUP * ROWS / WIDTH; c++)
        if (c * WIDTH < columns * ROWS)
            store(found + c * WIDTH, lane_sums(sums + c * WIDTH));
    for (; j < end; j++)
        for (int l = 0; l < rows; l++)
            for (int c = 0; c < columns; c++)
                found[c * ROWS + l] += double(a.row(i + l)[j]) * x[c * length + j];
}

// Subtract these products, of all rows of a part, from other columns.
template <int columns, bool find_largest, typename T, typename Number>
ALWAYS_INLINE void subtract_products(RowsPart &part, Rows<T, Number> a, Index first)
{
    constexpr int EACH = PARTS<Number>;
    Index length = column_length(a.length()), i = part.first, start = EACH * part.start, end = EACH * part.end;
    const double *x = part.columns + first * length;
    double *others = part.others + first * length, found[GROUP * ROWS];
    Vec most[ROWS] = {};
    for (; i + ROWS <= part.last; i += ROWS) {
        multiply_rows<ROWS, columns, find_largest>(a, i, start, end, x, length, found, most);
        for (int c = 0; c < columns; c += EACH)
            for (int l = 0; l < ROWS; l++)
                subtract_entry(others + c * length, length, i + l, of_parts<Number>(found + c * ROWS + l, ROWS));
    }
    for (; i < part.last; i++) {
        multiply_rows<1, columns, find_largest>(a, i, start, end, x, length, found, most);
        for (int c = 0; c < columns; c += EACH)
            subtract_entry(others + c * length, length, i, of_parts<Number>(found + c * ROWS, ROWS));
    }
    if constexpr (find_largest)
        raise(part.most, largest_of(most, ROWS));
}

// The same with any number of columns, of which the first group finds the largest element.
template <typename T, typename Number> void subtract(RowsPart &part, Rows<T, Number> a)
{
    for (Index c = 0; c < part.count; c += GROUP) {
        if (part.find_largest && c == 0)
            subtract_products<GROUP, true>(part, a, c);
        else if (part.count - c == PARTS<Number>)
            subtract_products<PARTS<Number>, false>(part, a, c);
        else
            subtract_products<GROUP, false>(part, a, c);
    }
}

NEULA_END
