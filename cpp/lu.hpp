// LU factors with partial pivoting, or without for definite matrices, and solutions by them: of one matrix by tiles of columns
// in registers (TiledLu), of many matrices in lanes column by column.
#pragma once

#include "lanes.hpp"
#include "rows.hpp"
#include "workspace.hpp"

NEULA_BEGIN

constexpr int STRIP = 3; // vectors of a column whose sums stay in registers

// One matrix, in whose place are its factors. Columns are whole vectors, with zeros below row n. There is memory for whole
// tiles of them: as many as a vector has numbers.
struct TiledLu {
    Vec *a;
    Index n, height;  // vectors of a column
    double *upper;    // workspace: n times a vector, negatives of rows of U in a tile
    int *pivots;      // counted from 0
    bool pivoting;

    double *column_of(Index j) const { return reinterpret_cast<double *>(a + j * height); }

    // Lanes behind lane i.
    static ALWAYS_INLINE Mask lanes_after(Index i)
    {
        Mask lane;
        for (int l = 0; l < WIDTH; l++)
            lane[l] = l;
        return lane > i - Mask{};
    }

    // Subtract products of `depth` columns of L, some vectors of them from v on, with rows of U from a tile.
    template <int count> ALWAYS_INLINE void eliminate_rows(Index v, Index depth, Vec *tile) const
    {
        Vec sums[count][WIDTH];
#pragma GCC unroll 8
        for (int c = 0; c < WIDTH; c++)
#pragma GCC unroll 3
            for (int r = 0; r < count; r++)
                sums[r][c] = tile[c * height + v + r];
        for (Index k = 0; k < depth; k++) {
            Vec rows[count];
#pragma GCC unroll 3
            for (int r = 0; r < count; r++)
                rows[r] = a[k * height + v + r];
#pragma GCC unroll 8
            for (int c = 0; c < WIDTH; c++) {
                Vec factor = all(upper[k * WIDTH + c]);
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
        Vec *tile = a + first * height;
        Index v = 0;
        for (; v < first / WIDTH; v++) {
            eliminate_rows<1>(v, v * WIDTH, tile);
            for (int i = 0; i < WIDTH; i++) {
                Index k = v * WIDTH + i;
                Vec rows = Vec(Mask(a[k * height + v]) & lanes_after(i));
                for (int c = 0; c < WIDTH; c++) {
                    upper[k * WIDTH + c] = -tile[c * height + v][i];
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
                exchange(column_of(j)[i], column_of(j)[pivots[i]]);
    }

    // Apply columns from `first` on to column j of their tile, whose diagonal is in vector `top`; returns the row of its pivot.
    Index eliminate_column(Index top, Index first, Index j) const
    {
        Vec factors[WIDTH], most = {}, *column = a + j * height;
        Mask where = {};
        for (Index k = first; k < j; k++) {
            Vec lower = Vec(Mask(a[k * height + top]) & lanes_after(k - first));
            factors[k - first] = all(-column[top][k - first]);
            column[top] = plus_product(column[top], lower, factors[k - first]);
        }
        for (Index v = top; v < height; v++) {
            Vec sum = column[v];
            for (Index k = first; k < j && v > top; k++)
                sum = plus_product(sum, a[k * height + v], factors[k - first]);
            column[v] = sum;
            Vec size = magnitude(v > top ? sum : Vec(Mask(sum) & lanes_after(j - first - 1)));
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
            Vec *column = a + j * height;
            if (column[top][j - first] == 0)
                return false;
            Vec reciprocal = all(1 / column[top][j - first]);
            column[top] = chosen(lanes_after(j - first), column[top] * reciprocal, column[top]);
            for (Index v = top + 1; v < height; v++)
                column[v] *= reciprocal;
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
    Index size() const { return (n + WIDTH) * column_size() + padded(n * WIDTH) + padded(LANES<Lanes> * n); }

    void take(Workspace &workspace)
    {
        workspace.take((n + WIDTH - 1) * column_size(), factors);
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
            TiledLu lu = {factors, n, height, reinterpret_cast<double *>(corners), pivots, pivoting};
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
