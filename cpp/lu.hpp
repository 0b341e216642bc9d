// LU factors with partial pivoting, or without for definite matrices, and solutions by them: of one real matrix by tiles of
// columns in registers (TiledLu), of many matrices in lanes column by column.
#pragma once

#include "lanes.hpp"
#include "rows.hpp"
#include "workspace.hpp"

NEULA_BEGIN

constexpr Index BLOCK = FACTOR_BLOCK;       // columns that are factorized before they are applied to others
constexpr Index TILE = WIDTH == 8 ? 8 : 4;  // columns that are worked on together
constexpr int STRIP = 3;                    // vectors of each of them whose sums stay in registers

template <typename Real> struct Registers;
template <> struct Registers<double> {
    using Vector = Vec;
    using Bits = Mask;
    using Whole = long long;
    static constexpr Whole MAGNITUDE = 0x7fffffffffffffffLL;
};
template <> struct Registers<float> {
    typedef float Vector __attribute__((vector_size(8 * WIDTH)));
    typedef int Bits __attribute__((vector_size(8 * WIDTH)));
    using Whole = int;
    static constexpr Whole MAGNITUDE = 0x7fffffff;
};
using FloatVec = Registers<float>::Vector;

inline FloatVec plus_product(FloatVec c, FloatVec a, FloatVec b)
{
#if defined(__AVX512F__)
    return FloatVec(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
#elif defined(__FMA__)
    return FloatVec(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
#else
    return c + a * b;
#endif
}

// One matrix in single or double precision, in whose place are its factors. Columns are contiguous, whole vectors, with zeros
// below row n, and there is memory for whole tiles of them.
template <typename Real> struct TiledLu {
    using Vector = typename Registers<Real>::Vector;
    using Bits = typename Registers<Real>::Bits;
    using Whole = typename Registers<Real>::Whole;
    static constexpr Index LANES = sizeof(Vector) / sizeof(Real);

    Real *a;
    Index n, stride;  // numbers from a column to the next
    int *pivots;      // counted from 0
    bool pivoting = true;

    static ALWAYS_INLINE Vector all(Real x) { return x - Vector{}; }

    ALWAYS_INLINE Real *column_of(Index j) const { return a + j * stride; }

    ALWAYS_INLINE Vector *vector_of(Index row, Index column) const
    {
        return reinterpret_cast<Vector *>(column_of(column) + row);
    }

    // Lanes behind lane i.
    static ALWAYS_INLINE Bits lanes_after(Index i)
    {
        Bits lane;
        for (int l = 0; l < LANES; l++)
            lane[l] = l;
        return lane > Whole(i) - Bits{};
    }

    // Rows of U in TILE columns from `first` on, as many as there are columns from `top` on; `upper` are their negatives.
    void solve_rows(Index top, Index depth, Index first, Real (*upper)[TILE])
    {
        for (Index v = 0; v < depth; v += LANES) {
            Index end = v + LANES < depth ? v + LANES : depth;
            Vector sums[TILE];
#pragma GCC unroll 8
            for (int c = 0; c < TILE; c++)
                sums[c] = *vector_of(top + v, first + c);
            for (Index k = 0; k < v; k++) {
                Vector rows = *vector_of(top + v, top + k);
#pragma GCC unroll 8
                for (int c = 0; c < TILE; c++)
                    sums[c] = plus_product(sums[c], rows, all(upper[k][c]));
            }
            for (Index k = v; k < end; k++) {
                Vector rows = Vector(Bits(*vector_of(top + v, top + k)) & lanes_after(k - v));
#pragma GCC unroll 8
                for (int c = 0; c < TILE; c++) {
                    upper[k][c] = -sums[c][k - v];
                    sums[c] = plus_product(sums[c], rows, all(upper[k][c]));
                }
            }
#pragma GCC unroll 8
            for (int c = 0; c < TILE; c++)
                *vector_of(top + v, first + c) = sums[c];
        }
    }

    // Trailing update of `count` vectors of TILE columns: add L times the negatives of rows of U.
    template <int count>
    static ALWAYS_INLINE void add_lower_times_upper(
        const Vector *lower, Index apart, Index depth, Real (*upper)[TILE], Vector *to)
    {
        Vector sums[count][TILE];
#pragma GCC unroll 8
        for (int c = 0; c < TILE; c++)
#pragma GCC unroll 3
            for (int r = 0; r < count; r++)
                sums[r][c] = to[c * apart + r];
        for (Index k = 0; k < depth; k++) {
            Vector rows[count];
#pragma GCC unroll 3
            for (int r = 0; r < count; r++)
                rows[r] = lower[k * apart + r];
#pragma GCC unroll 8
            for (int c = 0; c < TILE; c++) {
                Vector factor = all(upper[k][c]);
#pragma GCC unroll 3
                for (int r = 0; r < count; r++)
                    sums[r][c] = plus_product(sums[r][c], rows[r], factor);
            }
        }
#pragma GCC unroll 8
        for (int c = 0; c < TILE; c++)
#pragma GCC unroll 3
            for (int r = 0; r < count; r++)
                to[c * apart + r] = sums[r][c];
    }

    // Apply `depth` columns of the factors from `top` on to columns first to last, whole tiles.
    void eliminate(Index top, Index depth, Index first, Index last)
    {
        alignas(CACHE_LINE) Real upper[BLOCK / TILE][BLOCK][TILE];
        Index apart = stride / LANES, row = top + (depth + LANES - 1) / LANES * LANES;
        for (Index j = first; j < last; j += TILE)
            solve_rows(top, depth, j, upper[(j - first) / TILE]);
        for (Index next; row < stride; row = next) {
            next = row + STRIP * LANES < stride ? row + STRIP * LANES : stride;
            const Vector *lower = vector_of(row, top);
            for (Index j = first; j < last; j += TILE) {
                Real(*factors)[TILE] = upper[(j - first) / TILE];
                if (next - row == 3 * LANES)
                    add_lower_times_upper<3>(lower, apart, depth, factors, vector_of(row, j));
                else if (next - row == 2 * LANES)
                    add_lower_times_upper<2>(lower, apart, depth, factors, vector_of(row, j));
                else
                    add_lower_times_upper<1>(lower, apart, depth, factors, vector_of(row, j));
            }
        }
    }

    // Interchange rows of columns first to last by pivots from `start` to `end`.
    void interchange(Index start, Index end, Index first, Index last)
    {
        Index j = first;
        for (; pivoting && j + TILE <= last; j += TILE)
            for (Index i = start; i < end; i++)
#pragma GCC unroll 8
                for (int c = 0; c < TILE; c++)
                    exchange(column_of(j + c)[i], column_of(j + c)[pivots[i]]);
        for (; pivoting && j < last; j++)
            for (Index i = start; i < end; i++)
                exchange(column_of(j)[i], column_of(j)[pivots[i]]);
    }

    // Apply columns from `first` on to some vectors of column j; the largest elements, and the first row of their vectors.
    template <int count>
    ALWAYS_INLINE void eliminate_vectors(Index first, Index j, Index row, const Real *factors, Vector &most, Bits &where)
    {
        Vector sums[count];
        for (int r = 0; r < count; r++)
            sums[r] = vector_of(row, j)[r];
        for (Index k = first; k < j; k++)
            for (int r = 0; r < count; r++)
                sums[r] = plus_product(sums[r], vector_of(row, k)[r], all(factors[k - first]));
        for (int r = 0; r < count; r++) {
            Vector size = Vector(Bits(sums[r]) & Registers<Real>::MAGNITUDE);
            Bits larger = size > most, place = Whole(row + r * LANES) - Bits{};
            where = (place & larger) | (where & ~larger);
            most = Vector((Bits(size) & larger) | (Bits(most) & ~larger));
            vector_of(row, j)[r] = sums[r];
        }
    }

    // Apply columns from `first` on to column j; returns the row of its pivot.
    Index eliminate_column(Index first, Index j)
    {
        Real factors[TILE], *column = column_of(j), largest = 0;
        Index row = j / LANES * LANES + LANES, pivot = j;
        Vector most = {};
        Bits where = {};
        for (Index k = first; k < j; k++) {
            factors[k - first] = -column[k];
            for (Index v = k / LANES * LANES; v < row; v += LANES) {
                Vector lower = *vector_of(v, k);
                if (v <= k)
                    lower = Vector(Bits(lower) & lanes_after(k - v));
                *vector_of(v, j) = plus_product(*vector_of(v, j), lower, all(factors[k - first]));
            }
        }
        for (Index i = j; i < row && i < n; i++)
            if ((column[i] < 0 ? -column[i] : column[i]) > largest)
                largest = column[i] < 0 ? -column[i] : column[i], pivot = i;
        for (; row + 4 * LANES <= stride; row += 4 * LANES)
            eliminate_vectors<4>(first, j, row, factors, most, where);
        for (; row < stride; row += LANES)
            eliminate_vectors<1>(first, j, row, factors, most, where);
        for (int l = 0; l < LANES; l++)
            if (most[l] > largest || (most[l] == largest && largest > 0 && where[l] + l < pivot))
                largest = most[l], pivot = where[l] + l;
        return pivot;
    }

    // Factorize a tile, to which all columns before it have been applied; returns whether no pivot vanishes.
    bool factorize_tile(Index first, Index end)
    {
        for (Index j = first; j < end; j++) {
            Index largest = eliminate_column(first, j);
            pivots[j] = int(pivoting ? largest : j);
            interchange(j, j + 1, first, end);
            Real pivot = column_of(j)[j];
            if (pivot == 0)
                return false;
            Vector reciprocal = all(1 / pivot);
            Index row = j / LANES * LANES;
            Bits behind = lanes_after(j - row);
            Vector *to = vector_of(row, j);
            *to = Vector((Bits(*to * reciprocal) & behind) | (Bits(*to) & ~behind));
            for (row += LANES; row < stride; row += LANES)
                *vector_of(row, j) *= reciprocal;
        }
        return true;
    }

    // A panel, tile by tile; returns whether no pivot vanishes.
    bool factorize_panel(Index top)
    {
        Index end = top + BLOCK < n ? top + BLOCK : n;
        for (Index first = top; first < end; first += TILE) {
            Index last = first + TILE < end ? first + TILE : end;
            interchange(top, first, first, last);
            if (first > top)
                eliminate(top, first - top, first, first + TILE);
            if (!factorize_tile(first, last))
                return false;
            interchange(first, last, top, first);
        }
        return true;
    }

    // Apply `depth` columns from `top` on, a panel, to columns first to last.
    void apply_panel(Index top, Index depth, Index first, Index last)
    {
        interchange(top, top + depth, first, last);
        eliminate(top, depth, first, first + (last - first + TILE - 1) / TILE * TILE);
    }

    // All of it; returns whether no pivot vanishes.
    bool factorize()
    {
        for (Index top = 0, end; top < n; top = end) {
            end = top + BLOCK < n ? top + BLOCK : n;
            if (!factorize_panel(top))
                return false;
            interchange(top, end, 0, top);
            for (Index first = end; first < n; first += BLOCK)
                apply_panel(top, BLOCK, first, first + BLOCK < n ? first + BLOCK : n);
        }
        return true;
    }
};

// residual = b - A (x + rest), rounded once; `rest` is below the rounding errors of x. `low` is workspace.
template <typename Lanes>
void doubled_residual(
    const Vec *a, Index n, Index height, const Vec *b, const Vec *x, const Vec *rest, Vec *residual, Vec *low)
{
    memcpy(static_cast<void *>(residual), b, height * sizeof(Vec));
    clear(low, height);
    for (Index j = 0; j < n; j++) {
        const Vec *column = a + j * height;
        Vec factor = all(-get<Lanes>(x, j)), small = all(get<Lanes>(rest, j));
        for (Index v = 0; v < height; v++) {
            low[v] = minus_product(low[v], column[v], small);
            add_product(column[v], factor, residual[v], low[v]);
        }
    }
    for (Index v = 0; v < height; v++)
        residual[v] += low[v];
}

// L, whose diagonal is 1, and U in one place, but for the diagonal of U, of which reciprocals are stored, and for the part of L
// that shares vectors with U: those vectors have zeros below U, and `corners` have that part behind zeros.
template <typename Lanes> struct LuFactors {
    Index n, height;  // height: vectors of a column, with zeros behind row n
    Vec *factors, *corners, *reciprocals;
    int *order;       // row i of the factors is row order[i] of A, for each lane

    // Columns an odd number of vectors apart do not compete for places in a cache.
    explicit LuFactors(Index order_of_a)
        : n(order_of_a), height(ROWS_OF_VECTOR<Lanes> > 1 ? (n + WIDTH - 1) / WIDTH | 1 : n)
    {
    }

    Index column_size() const { return height * Index(sizeof(Vec) / sizeof(double)); }
    Index size() const { return (n + TILE) * column_size() + padded(n * WIDTH) + padded(LANES<Lanes> * n); }

    void take(Workspace &workspace)
    {
        workspace.take((n + TILE - 1) * column_size(), factors);
        workspace.take(column_size(), reciprocals);
        workspace.take(padded(n * WIDTH), corners);
        workspace.take(padded(LANES<Lanes> * n), order);
    }

    // Subtract products of the first j columns of L with U from a column, four at a time to read it less often.
    void eliminate(Vec *__restrict x, Index j) const
    {
        Index k = 0;
        for (; k + 4 <= j; k += 4) {
            const Vec *l0 = factors + k * height, *l1 = l0 + height, *l2 = l1 + height, *l3 = l2 + height;
            Vec x0 = x[k], x1 = minus_product(x[k + 1], l0[k + 1], x0);
            Vec x2 = minus_product(minus_product(x[k + 2], l0[k + 2], x0), l1[k + 2], x1);
            Vec x3 = minus_product(minus_product(minus_product(x[k + 3], l0[k + 3], x0), l1[k + 3], x1), l2[k + 3], x2);
            x[k + 1] = x1, x[k + 2] = x2, x[k + 3] = x3;
            for (Index v = k + 4; v < height; v++) {
                Vec y = minus_product(minus_product(x[v], l0[v], x0), l1[v], x1);
                x[v] = minus_product(minus_product(y, l2[v], x2), l3[v], x3);
            }
        }
        for (; k < j; k++) {
            const Vec *column = factors + k * height;
            Vec factor = x[k];
            for (Index v = k + 1; v < height; v++)
                x[v] = minus_product(x[v], column[v], factor);
        }
    }

    // Bring the largest element of column j from row j on to row j, in every column.
    void interchange_pivots(Index j)
    {
        for (int l = 0; l < LANES<Lanes>; l++) {
            double *x = reinterpret_cast<double *>(factors + j) + l;
            Index apart = height * LANES<Lanes>, best = 0;
            double most = magnitude(x[j * apart]);
            for (Index i = 1; i < n - j; i++) {
                double size = magnitude(x[j * apart + i * LANES<Lanes>]);
                best = size > most ? i : best;
                most = size > most ? size : most;
            }
            if (best == 0)
                continue;
            exchange(order[l * n + j], order[l * n + j + best]);
            for (Index c = 0; c < n; c++)
                exchange(x[c * apart], x[c * apart + best * LANES<Lanes>]);
        }
    }

    // L and U in the place of the matrix.
    void factorize_in_place(bool pivoting)
    {
        for (int l = 0; l < LANES<Lanes>; l++)
            for (Index i = 0; i < n; i++)
                order[l * n + i] = int(i);
        if constexpr (ROWS_OF_VECTOR<Lanes> > 1) {
            int *pivots = order + n;
            TiledLu<double> lu = {reinterpret_cast<double *>(factors), n, height * WIDTH, pivots, pivoting};
            bool regular = lu.factorize();
            if (!regular)
                factors[0][0] = 0.0; // no solution is finite; not all pivots are known
            for (Index j = 0; pivoting && regular && j < n; j++)
                exchange(order[j], order[pivots[j]]);
        } else {
            for (Index j = 0; j < n; j++) {
                Vec *column = factors + j * height;
                eliminate(column, j);
                if (pivoting)
                    interchange_pivots(j);
                Vec reciprocal = 1.0 / column[j];
                for (Index v = j + 1; v < height; v++)
                    column[v] = column[v] * reciprocal;
            }
        }
    }

    // Factors of a matrix; returns the largest element of U.
    auto factorize(const Vec *a, bool pivoting)
    {
        memcpy(static_cast<void *>(factors), a, n * height * sizeof(Vec));
        factorize_in_place(pivoting);
        decltype(magnitude(*a)) most = {};
        for (Index j = 0; j < n; j++) {
            Vec *column = factors + j * height;
            Lanes pivot = get<Lanes>(column, j);
            Index diagonal = place<Lanes>(j);
            set<Lanes>(reciprocals, j, 1.0 / pivot);
            most = larger(magnitude(all(pivot)), most);
            if constexpr (ROWS_OF_VECTOR<Lanes> > 1) {
                corners[j] = column[diagonal];
                for (Index i = diagonal * WIDTH; i < (diagonal + 1) * WIDTH; i++)
                    set<Lanes>(i > j ? column + diagonal : corners + j, i - diagonal * WIDTH, 0.0);
                set<Lanes>(column, j, 0.0);
                most = larger(magnitude(column[diagonal]), most);
            }
            for (Index v = 0; v < diagonal; v++)
                most = larger(magnitude(column[v]), most);
        }
        return largest<Lanes>(most);
    }

    // y -= x one + other_x other, for some of their vectors.
    static void subtract_two(Vec *y, const Vec *one, Vec x, const Vec *other, Vec other_x, Index from, Index to)
    {
        for (Index v = from; v < to; v++)
            y[v] = minus_product(minus_product(y[v], one[v], x), other[v], other_x);
    }

    // Solve in the place of some columns, whose rows are in the order of the factors: two rows at a time.
    void substitute(Vec *columns, Index count) const
    {
        const Index rows = n, length = height;
        Index j = 0;
        for (; j < rows - 1; j += 2) {
            const Vec *l = factors + j * length, *next = l + length;
            Index first = place<Lanes>(j + 1);
            Lanes across = ROWS_OF_VECTOR<Lanes> > 1 ? get<Lanes>(corners + j, j % WIDTH + 1) : get<Lanes>(l, j + 1);
            for (Index c = 0; c < count; c++) {
                Vec *y = columns + c * length;
                Lanes x = get<Lanes>(y, j);
                Lanes other = minus_product(get<Lanes>(y, j + 1), across, x);
                if constexpr (ROWS_OF_VECTOR<Lanes> > 1)
                    subtract_two(y + first, corners + j, all(x), corners + j + 1, all(other), 0, 1);
                else
                    y[first] = other;
                subtract_two(y, l, all(x), next, all(other), first + 1, length);
            }
        }
        for (j = rows - 1; j >= 0; j -= 2) {
            const Vec *u = factors + j * length, *next = j ? u - length : u;
            Lanes reciprocal = get<Lanes>(reciprocals, j), next_reciprocal = j ? get<Lanes>(reciprocals, j - 1) : Lanes{};
            Lanes across = j ? get<Lanes>(u, j - 1) : Lanes{};
            Index end = (j + ROWS_OF_VECTOR<Lanes> - 1) / ROWS_OF_VECTOR<Lanes>;
            for (Index c = 0; c < count; c++) {
                Vec *y = columns + c * length;
                Lanes x = get<Lanes>(y, j) * reciprocal;
                Lanes other = j ? minus_product(get<Lanes>(y, j - 1), across, x) * next_reciprocal : Lanes{};
                subtract_two(y, u, all(x), next, all(other), 0, end);
                set<Lanes>(y, j, x);
                if (j)
                    set<Lanes>(y, j - 1, other);
            }
        }
    }

    // A column, of elements from(lane, row), with its rows in the order of the factors.
    template <typename From> void permute_elements(const From &from, Vec *to) const
    {
        Index first = place<Lanes>(n), rows = n;
        clear(to + first, height - first);
        for (int l = 0; l < LANES<Lanes>; l++) {
            const int *order_of_lane = order + l * rows;
            for (Index i = 0; i < rows; i++)
                reinterpret_cast<double *>(to)[i * LANES<Lanes> + l] = from(l, Index(order_of_lane[i]));
        }
    }

    void permute(const Vec *from, Vec *to) const
    {
        const double *x = reinterpret_cast<const double *>(from);
        permute_elements([x](int l, Index i) { return x[i * LANES<Lanes> + l]; }, to);
    }
};

NEULA_END
