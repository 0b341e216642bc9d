// LU factors with partial pivoting, or without for definite matrices, and solutions by them: of one matrix by tiles of columns
// in registers (TiledLu), of many matrices in lanes column by column.
#pragma once

#include "lanes.hpp"
#include "rows.hpp"
#include "workspace.hpp"

NEULA_BEGIN

// One matrix, in whose place are its factors. Columns are whole vectors, with zeros below row n. There is memory for whole
// tiles of them: as many as a vector has numbers.
template <typename Number> struct TiledLu {
    using Vectors = Column<Number>;
    static constexpr int STRIP = PARTS<Number> == 1 ? 3 : 1;  // vectors of a column whose sums stay in registers

    Vectors *a;
    Index n, height;  // vectors of a column
    Number *upper;    // workspace: n times a vector, negatives of rows of U in a tile
    int *pivots;      // counted from 0
    bool pivoting;

    // Lanes behind lane i.
    static ALWAYS_INLINE Mask lanes_after(Index i)
    {
        Mask lane;
        for (int l = 0; l < WIDTH; l++)
            lane[l] = l;
        return lane > i - Mask{};
    }

    // Subtract products of `depth` columns of L, some vectors of them from v on, with rows of U from a tile.
    template <int count> ALWAYS_INLINE void eliminate_rows(Index v, Index depth, Vectors *tile) const
    {
        Vectors sums[count][WIDTH];
#pragma GCC unroll 8
        for (int c = 0; c < WIDTH; c++)
#pragma GCC unroll 3
            for (int r = 0; r < count; r++)
                sums[r][c] = tile[c * height + v + r];
        for (Index k = 0; k < depth; k++) {
            Vectors rows[count];
#pragma GCC unroll 3
            for (int r = 0; r < count; r++)
                rows[r] = a[k * height + v + r];
#pragma GCC unroll 8
            for (int c = 0; c < WIDTH; c++) {
                Vectors factor = all(upper[k * WIDTH + c]);
#pragma GCC unroll 3
                for (int r = 0; r < count; r++)
                    sums[r][c] = plus_product(sums[r][c], rows[r], factor);
            }
        }
#pragma GCC unroll 8
        for (int c = 0; c < WIDTH; c++)
#pragma GCC unroll 3
            for (int r = 0; r < count; r++)
                tile[c * height + v + r] = sums[r][c];
    }

    // Apply all columns before the tile from column `first` on to it.
    void eliminate(Index first) const
    {
        Vectors *tile = a + first * height;
        Index v = 0;
        for (; v < first / WIDTH; v++) {
            eliminate_rows<1>(v, v * WIDTH, tile);
            for (int i = 0; i < WIDTH; i++) {
                Index k = v * WIDTH + i;
                Vectors rows = kept(lanes_after(i), a[k * height + v]);
                for (int c = 0; c < WIDTH; c++) {
                    upper[k * WIDTH + c] = -lane(tile[c * height + v], i);
                    tile[c * height + v] = plus_product(tile[c * height + v], rows, all(upper[k * WIDTH + c]));
                }
            }
        }
        for (; v + STRIP <= height; v += STRIP)
            eliminate_rows<STRIP>(v, first, tile);
        for (; v < height; v++)
            eliminate_rows<1>(v, first, tile);
    }

    // Interchange rows of columns first to last by pivots from `start` to `end`.
    void interchange(Index start, Index end, Index first, Index last) const
    {
        for (Index j = first; pivoting && j < last; j++)
            for (Index i = start; i < end; i++)
                exchange_numbers(a + j * height, i, pivots[i]);
    }

    // Apply columns from `first` on to column j of their tile, whose diagonal is in vector `top`; returns the row of its pivot.
    Index eliminate_column(Index top, Index first, Index j) const
    {
        Vectors factors[WIDTH], *column = a + j * height;
        Vec most = {};
        Mask where = {};
        for (Index k = first; k < j; k++) {
            Vectors lower = kept(lanes_after(k - first), a[k * height + top]);
            factors[k - first] = all(-lane(column[top], k - first));
            column[top] = plus_product(column[top], lower, factors[k - first]);
        }
        for (Index v = top; v < height; v++) {
            Vectors sum = column[v];
            for (Index k = first; k < j && v > top; k++)
                sum = plus_product(sum, a[k * height + v], factors[k - first]);
            column[v] = sum;
            Vec size = comparable(v > top ? sum : kept(lanes_after(j - first - 1), sum));
            where = (((v * WIDTH) - Mask{}) & (size > most)) | (where & ~(size > most));
            most = chosen(size > most, size, most);
        }
        double largest = 0.0;
        Index pivot = j;
        for (int l = 0; l < WIDTH; l++)
            if (most[l] > largest || (most[l] == largest && largest > 0 && where[l] + l < pivot))
                largest = most[l], pivot = where[l] + l;
        return pivot;
    }

    // The tile from column `first` on, to which all columns before it have been applied; returns whether no pivot vanishes.
    bool factorize_tile(Index first, Index last)
    {
        Index top = first / WIDTH;
        for (Index j = first; j < last; j++) {
            Index largest = eliminate_column(top, first, j);
            pivots[j] = int(pivoting ? largest : j);
            interchange(j, j + 1, first, last);
            Vectors *column = a + j * height;
            Number pivot = lane(column[top], j - first);
            if (vanishes(pivot))
                return false;
            Vectors factor = all(reciprocal(pivot));
            column[top] = chosen(lanes_after(j - first), column[top] * factor, column[top]);
            for (Index v = top + 1; v < height; v++)
                column[v] *= factor;
        }
        return true;
    }

    // All of it; returns whether no pivot vanishes.
    bool factorize()
    {
        for (Index first = 0; first < n; first += WIDTH) {
            Index last = first + WIDTH < n ? first + WIDTH : n;
            interchange(0, first, first, last);
            eliminate(first);
            if (!factorize_tile(first, last))
                return false;
            interchange(first, last, 0, first);
        }
        return true;
    }
};

// residual = b - A (x + rest), rounded once; `rest` is below the rounding errors of x. `low` is workspace.
template <typename Lanes>
void doubled_residual(
    const Column<Lanes> *a, Index n, Index height, const Column<Lanes> *b, const Column<Lanes> *x, const Column<Lanes> *rest,
    Column<Lanes> *residual, Column<Lanes> *low)
{
    memcpy(static_cast<void *>(residual), b, height * sizeof(*b));
    clear(low, height);
    for (Index j = 0; j < n; j++) {
        const Column<Lanes> *column = a + j * height;
        Column<Lanes> factor = all(-get<Lanes>(x, j)), small = all(get<Lanes>(rest, j));
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
    using Vectors = Column<Lanes>;

    Index n, height;  // height: vectors of a column, with zeros behind row n
    Vectors *factors, *corners, *reciprocals;
    int *order;       // row i of the factors is row order[i] of A, for each lane

    // Columns an odd number of vectors apart do not compete for places in a cache.
    explicit LuFactors(Index order_of_a)
        : n(order_of_a), height(ROWS_OF_VECTOR<Lanes> > 1 ? (n + WIDTH - 1) / WIDTH | 1 : n)
    {
    }

    Index column_size() const { return height * Index(sizeof(Vectors) / sizeof(double)); }
    Index size() const { return (n + WIDTH) * column_size() + PARTS<Lanes> * padded(n * WIDTH) + padded(LANES<Lanes> * n); }

    void take(Workspace &workspace)
    {
        workspace.take((n + WIDTH - 1) * column_size(), factors);
        workspace.take(column_size(), reciprocals);
        workspace.take(PARTS<Lanes> * padded(n * WIDTH), corners);
        workspace.take(padded(LANES<Lanes> * n), order);
    }

    // y -= x times a column, for some of their vectors.
    static ALWAYS_INLINE void subtract(Vectors *__restrict y, const Vectors *column, Vectors x, Index from, Index to)
    {
        for (Index v = from; v < to; v++)
            y[v] = minus_product(y[v], column[v], x);
    }

    // Bring the largest element of column j from row j on to row j, in every column.
    void interchange_pivots(Index j)
    {
        Vectors *rows = factors + j;
        for (int l = 0; l < LANES<Lanes>; l++) {
            Index apart = height * LANES<Lanes>, best = 0;
            auto most = comparable(number(rows, j * apart + l));
            for (Index i = 1; i < n - j; i++) {
                auto size = comparable(number(rows, j * apart + i * LANES<Lanes> + l));
                best = size > most ? i : best;
                most = size > most ? size : most;
            }
            if (best == 0)
                continue;
            exchange(order[l * n + j], order[l * n + j + best]);
            for (Index c = 0; c < n; c++)
                exchange_numbers(rows, c * apart + l, c * apart + best * LANES<Lanes> + l);
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
            TiledLu<Lanes> lu = {factors, n, height, reinterpret_cast<Lanes *>(corners), pivots, pivoting};
            bool regular = lu.factorize();
            if (!regular)
                set<Lanes>(factors, 0, 0.0); // no solution is finite; not all pivots are known
            for (Index j = 0; pivoting && regular && j < n; j++)
                exchange(order[j], order[pivots[j]]);
        } else {
            for (Index j = 0; j < n; j++) {
                Vectors *column = factors + j * height;
                for (Index k = 0; k < j; k++)
                    subtract(column, factors + k * height, column[k], k + 1, height);
                if (pivoting)
                    interchange_pivots(j);
                Vectors factor = reciprocal(column[j]);
                for (Index v = j + 1; v < height; v++)
                    column[v] = column[v] * factor;
            }
        }
    }

    // Factors of a matrix; returns the largest element of U.
    Real<Lanes> factorize(const Vectors *a, bool pivoting)
    {
        memcpy(static_cast<void *>(factors), a, n * height * sizeof(*a));
        factorize_in_place(pivoting);
        Vec most = {};
        for (Index j = 0; j < n; j++) {
            Vectors *column = factors + j * height;
            Lanes pivot = get<Lanes>(column, j);
            Index diagonal = place<Lanes>(j);
            set<Lanes>(reciprocals, j, reciprocal(pivot));
            most = larger(comparable(all(pivot)), most);
            if constexpr (ROWS_OF_VECTOR<Lanes> > 1) {
                corners[j] = column[diagonal];
                for (Index i = diagonal * WIDTH; i < (diagonal + 1) * WIDTH; i++)
                    set<Lanes>(i > j ? column + diagonal : corners + j, i - diagonal * WIDTH, 0.0);
                set<Lanes>(column, j, 0.0);
                most = larger(comparable(column[diagonal]), most);
            }
            for (Index v = 0; v < diagonal; v++)
                most = larger(comparable(column[v]), most);
        }
        return from_comparable<Lanes>(largest<Lanes>(most));
    }

    // Solve in the place of some columns, whose rows are in the order of the factors.
    void substitute(Vectors *columns, Index count) const
    {
        for (Index j = 0; j < n; j++)
            for (Index c = 0, first = place<Lanes>(j); c < count; c++) {
                Vectors *y = columns + c * height, x = all(get<Lanes>(y, j));
                if constexpr (ROWS_OF_VECTOR<Lanes> > 1)
                    y[first] = minus_product(y[first], corners[j], x);
                subtract(y, factors + j * height, x, first + 1, height);
            }
        for (Index j = n - 1; j >= 0; j--)
            for (Index c = 0, end = (j + ROWS_OF_VECTOR<Lanes> - 1) / ROWS_OF_VECTOR<Lanes>; c < count; c++) {
                Vectors *y = columns + c * height;
                Lanes x = get<Lanes>(y, j) * get<Lanes>(reciprocals, j);
                subtract(y, factors + j * height, all(x), 0, end);
                set<Lanes>(y, j, x);
            }
    }

    // A column, of elements from(lane, row), with its rows in the order of the factors.
    template <typename From> void permute_elements(const From &from, Vectors *to) const
    {
        Index first = place<Lanes>(n), rows = n;
        clear(to + first, height - first);
        for (int l = 0; l < LANES<Lanes>; l++) {
            const int *order_of_lane = order + l * rows;
            for (Index i = 0; i < rows; i++)
                set_number(to, i * LANES<Lanes> + l, from(l, Index(order_of_lane[i])));
        }
    }

    void permute(const Vectors *from, Vectors *to) const
    {
        permute_elements([from](int l, Index i) { return number(from, i * LANES<Lanes> + l); }, to);
    }
};

NEULA_END
