// Numbers of one problem (Lanes = double, or Complex), or of as many problems as a vector has lanes (Lanes = Vec, or
// ComplexVec), for templates over all. Columns are arrays of Vec, or of ComplexVec: rows of one problem, or one row of many
// problems in each vector.
#pragma once

#include "complex.hpp"

NEULA_BEGIN

template <typename Lanes> struct NumberTraits {
    using Real = Lanes;
    using Column = Vec;
    using One = double;
    template <typename T> using Stored = T;
};
template <typename Part> struct NumberTraits<ComplexOf<Part>> {
    using Real = Part;
    using Column = ComplexVec;
    using One = Complex;
    template <typename T> using Stored = ComplexOf<T>;
};
template <typename Lanes> using Real = typename NumberTraits<Lanes>::Real;
template <typename Lanes> using Column = typename NumberTraits<Lanes>::Column;  // its elements
template <typename Lanes> using One = typename NumberTraits<Lanes>::One;        // number of one problem

template <typename Lanes, typename T> using Stored = typename NumberTraits<Lanes>::template Stored<T>;  // of parts of type T

template <typename Lanes> constexpr int PARTS = sizeof(Lanes) / sizeof(Real<Lanes>);
template <typename Lanes> constexpr int LANES = sizeof(Real<Lanes>) / sizeof(double);
template <typename Lanes> constexpr int ROWS_OF_VECTOR = WIDTH / LANES<Lanes>;
template <typename Lanes> constexpr bool ALONE = LANES<Lanes> == 1;

template <typename Lanes> struct TruthOf {
    using Type = Mask;
};
template <> struct TruthOf<double> {
    using Type = bool;
};
template <typename Lanes> using Truth = typename TruthOf<Real<Lanes>>::Type;

// The larger one, or NaN if one of them is.
template <typename Lanes> inline Lanes worse(Lanes a, Lanes b) { return chosen(b <= a, a, chosen(a == a, b, a)); }

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

// The same number for each problem.
template <typename Lanes> inline Lanes constant(double x)
{
    if constexpr (ALONE<Lanes>)
        return x;
    else
        return all(x);
}

// Element i of a column.
template <typename Lanes> inline Lanes get(const Column<Lanes> *column, Index i)
{
    if constexpr (ALONE<Lanes>)
        return number(column, i);
    else
        return column[i];
}
template <typename Lanes> inline void set(Column<Lanes> *column, Index i, Lanes x)
{
    if constexpr (ALONE<Lanes>)
        set_number(column, i, x);
    else
        column[i] = x;
}

// The vector that element i of a column is in.
template <typename Lanes> inline Index place(Index i) { return i / ROWS_OF_VECTOR<Lanes>; }

template <typename T> inline void clear(T *column, Index vectors)
{
    memset(static_cast<void *>(column), 0, vectors * sizeof(T));
}

// The sum over the rows, from sums of vectors.
template <typename Lanes> inline Lanes total(Column<Lanes> sum)
{
    if constexpr (!ALONE<Lanes>)
        return sum;
    else if constexpr (PARTS<Lanes> > 1)
        return {lane_sum(sum.re), lane_sum(sum.im)};
    else
        return lane_sum(sum);
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

// Of the real parts.
template <typename Lanes> inline Real<Lanes> smallest_element(const Column<Lanes> *column, Index n)
{
    Real<Lanes> least = real_part(get<Lanes>(column, 0));
    for (Index i = 1; i < n; i++) {
        Real<Lanes> other = real_part(get<Lanes>(column, i));
        least = chosen(other < least, other, least);
    }
    return least;
}

template <typename Lanes> inline Real<Lanes> largest_magnitude(const Column<Lanes> *column, Index height)
{
    Vec most = {};
    for (Index v = 0; v < height; v++)
        most = larger(comparable(column[v]), most);
    return from_comparable<Lanes>(largest<Lanes>(most));
}

// x^H y.
template <typename Lanes> inline Lanes inner_product(const Column<Lanes> *x, const Column<Lanes> *y, Index height)
{
    Column<Lanes> sum = {};
    for (Index v = 0; v < height; v++)
        sum += conjugate(x[v]) * y[v];
    return total<Lanes>(sum);
}

template <typename Lanes> inline Real<Lanes> column_norm(const Column<Lanes> *x, Index height)
{
    Vec sum = {};
    for (Index v = 0; v < height; v++)
        sum += squared(x[v]);
    return square_root(total<Real<Lanes>>(sum));
}

// ||D x||, D being diagonal.
template <typename Lanes> inline Real<Lanes> scaled_norm(const Vec *scales, const Column<Lanes> *x, Index height)
{
    Vec sum = {};
    for (Index v = 0; v < height; v++)
        sum += squared(scales[v] * x[v]);
    return square_root(total<Real<Lanes>>(sum));
}

NEULA_END
