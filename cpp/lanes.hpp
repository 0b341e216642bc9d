// Numbers of one problem (Lanes = double), or of as many problems as a vector has lanes (Lanes = Vec), for templates over
// both. Columns are arrays of Vec in either case: rows of one problem, or one row of many problems in each vector.
#pragma once

#include "vectors.hpp"

NEULA_BEGIN

template <typename Lanes> constexpr int LANES = sizeof(Lanes) / sizeof(double);
template <typename Lanes> constexpr int ROWS_OF_VECTOR = sizeof(Vec) / sizeof(Lanes);
template <typename Lanes> constexpr bool ALONE = LANES<Lanes> == 1;

template <typename Lanes> struct TruthOf {
    using Type = Mask;
};
template <> struct TruthOf<double> {
    using Type = bool;
};
template <typename Lanes> using Truth = typename TruthOf<Lanes>::Type;

inline double plus_product(double c, double a, double b)
{
#if defined(__FMA__) || defined(__FP_FAST_FMA)
    return __builtin_fma(a, b, c);
#else
    return c + a * b;
#endif
}

inline double minus_product(double c, double a, double b) { return plus_product(c, -a, b); }
inline double chosen(bool where, double a, double b) { return where ? a : b; }
// By a mask: GCC 12 fails to compile a choice between vectors by a bool without AVX.
inline Vec chosen(bool where, Vec a, Vec b) { return chosen(Mask{} - static_cast<long long>(where), a, b); }
inline double larger(double a, double b) { return a > b ? a : b; }
// The larger one, or NaN if one of them is.
template <typename Lanes> inline Lanes worse(Lanes a, Lanes b) { return chosen(b <= a, a, chosen(a == a, b, a)); }
inline double magnitude(double a) { return fabs(a); }
inline double square_root(double a) { return __builtin_sqrt(a); }
inline Vec all(Vec a) { return a; }

inline bool any_of(bool where) { return where; }
inline bool all_of(bool where) { return where; }

inline bool any_of(Mask where)
{
    long long any = where[0];
    for (int l = 1; l < WIDTH; l++)
        any |= where[l];
    return any != 0;
}

inline bool all_of(Mask where)
{
    long long every = where[0];
    for (int l = 1; l < WIDTH; l++)
        every &= where[l];
    return every != 0;
}

inline void set_lane(double &a, int, double x) { a = x; }
inline void set_lane(Vec &a, int l, double x) { a[l] = x; }
inline double lane(double a, int) { return a; }
inline double lane(Vec a, int l) { return a[l]; }

// The same number for each problem.
template <typename Lanes> inline Lanes constant(double x)
{
    if constexpr (ALONE<Lanes>)
        return x;
    else
        return all(x);
}

// Element i of a column.
template <typename Lanes> inline Lanes get(const Vec *column, Index i)
{
    return reinterpret_cast<const Lanes *>(column)[i];
}
template <typename Lanes> inline void set(Vec *column, Index i, Lanes x) { reinterpret_cast<Lanes *>(column)[i] = x; }

// The vector that element i of a column is in.
template <typename Lanes> inline Index place(Index i) { return i / ROWS_OF_VECTOR<Lanes>; }

template <typename T> inline void clear(T *column, Index vectors)
{
    memset(static_cast<void *>(column), 0, vectors * sizeof(T));
}

// The sum over the rows, from sums of vectors.
template <typename Lanes> inline Lanes total(Vec sum)
{
    if constexpr (ALONE<Lanes>)
        return lane_sum(sum);
    else
        return sum;
}

// The largest number of any row, from those of vectors.
template <typename Lanes> inline auto largest(Vec found)
{
    if constexpr (ROWS_OF_VECTOR<Lanes> > 1) {
        double most = found[0];
        for (int l = 1; l < WIDTH; l++)
            most = found[l] > most ? found[l] : most;
        return most;
    } else {
        return found;
    }
}

template <typename Lanes> inline Lanes smallest_element(const Vec *column, Index n)
{
    Lanes least = get<Lanes>(column, 0);
    for (Index i = 1; i < n; i++) {
        Lanes other = get<Lanes>(column, i);
        least = chosen(other < least, other, least);
    }
    return least;
}

template <typename Lanes> inline Lanes largest_magnitude(const Vec *column, Index height)
{
    Vec most = {};
    for (Index v = 0; v < height; v++)
        most = larger(magnitude(column[v]), most);
    return largest<Lanes>(most);
}

template <typename Lanes> inline Lanes inner_product(const Vec *x, const Vec *y, Index height)
{
    Vec sum = {};
    for (Index v = 0; v < height; v++)
        sum += x[v] * y[v];
    return total<Lanes>(sum);
}

template <typename Lanes> inline Lanes column_norm(const Vec *x, Index height)
{
    return square_root(inner_product<Lanes>(x, x, height));
}

// ||D x||, D being diagonal.
template <typename Lanes> inline Lanes scaled_norm(const Vec *scales, const Vec *x, Index height)
{
    Vec sum = {};
    for (Index v = 0; v < height; v++) {
        Vec y = scales[v] * x[v];
        sum += y * y;
    }
    return square_root(total<Lanes>(sum));
}

NEULA_END
