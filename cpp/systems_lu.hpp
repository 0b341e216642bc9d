// LU factors of the matrices of a group (systems.hpp), with partial pivoting unless they are definite, and solutions by them.
//
// Zeros are below U and above L. The diagonal of neither is stored, but reciprocals of the pivots.
#pragma once

#include "systems.hpp"

NEULA_BEGIN

// Elements i and j of a column of one lane.
template <typename Lanes> inline void interchange(Vec *column, Index i, Index j, int lane)
{
    double *x = reinterpret_cast<double *>(column) + lane, other = x[i * LANES<Lanes>];
    x[i * LANES<Lanes>] = x[j * LANES<Lanes>];
    x[j * LANES<Lanes>] = other;
}

// Many systems: subtract products of the first j columns of L with U from a column, four at a time to read it less often.
inline void eliminate(const Group<Vec> &g, Vec *__restrict x, Index j)
{
    Index height = g.height, k = 0;
    for (; k + 4 <= j; k += 4) {
        const Vec *l0 = g.lower + k * height, *l1 = l0 + height, *l2 = l1 + height, *l3 = l2 + height;
        Vec x0 = x[k], x1 = minus_product(x[k + 1], l0[k + 1], x0);
        Vec x2 = minus_product(minus_product(x[k + 2], l0[k + 2], x0), l1[k + 2], x1);
        Vec x3 = minus_product(minus_product(minus_product(x[k + 3], l0[k + 3], x0), l1[k + 3], x1), l2[k + 3], x2);
        for (Index v = k + 1; v < height; v++) {
            Vec y = minus_product(minus_product(x[v], l0[v], x0), l1[v], x1);
            x[v] = minus_product(minus_product(y, l2[v], x2), l3[v], x3);
        }
    }
    for (; k < j; k++) {
        const Vec *lower = g.lower + k * height;
        Vec factor = x[k];
        for (Index v = k + 1; v < height; v++)
            x[v] = minus_product(x[v], lower[v], factor);
    }
}

// Bring the largest element of a column from row j on to row j, in every column; returns these elements.
inline Vec interchange_pivots(Group<Vec> &g, Index j)
{
    Index n = g.n, height = g.height;
    Vec *column = g.upper + j * height;
    for (int l = 0; l < WIDTH; l++) {
        const double *x = reinterpret_cast<const double *>(column) + l;
        Index best = j;
        double most = fabs(x[j * WIDTH]);
        for (Index i = j + 1; i < n; i++) {
            double size = fabs(x[i * WIDTH]);
            best = size > most ? i : best;
            most = size > most ? size : most;
        }
        if (best == j)
            continue;
        int *order = g.order + l * n, other = order[j];
        order[j] = order[best];
        order[best] = other;
        for (Index c = 0; c < n; c++)
            interchange<Vec>((c < j ? g.lower : g.upper) + c * height, j, best, l);
    }
    return column[j];
}

// Returns the largest element of U.
inline Vec factorize(Group<Vec> &g)
{
    Index n = g.n, height = g.height;
    Vec most = {};
    memcpy(g.upper, g.a, n * height * sizeof(Vec));
    for (int l = 0; l < WIDTH; l++)
        for (Index i = 0; i < n; i++)
            g.order[l * n + i] = int(i);
    for (Index j = 0; j < n; j++) {
        Vec *upper = g.upper + j * height, *lower = g.lower + j * height;
        eliminate(g, upper, j);
        Vec diagonal = g.problem.definite ? upper[j] : interchange_pivots(g, j), reciprocal = 1 / diagonal;
        most = larger(magnitude(diagonal), most);
        g.reciprocals[j] = reciprocal;
        clear(lower, j + 1);
        for (Index v = j + 1; v < height; v++)
            lower[v] = upper[v] * reciprocal;
        for (Index v = 0; v < j; v++)
            most = larger(magnitude(upper[v]), most);
        clear(upper + j, height - j);
    }
    return most;
}

// One system: products of the first j columns of L, in a vector of rows, with U in the columns of a panel.
ALWAYS_INLINE void sum_products(const Vec *lower, Index height, const Vec *panel, Index j, Vec sums[PANEL])
{
#pragma GCC unroll 8
    for (int c = 0; c < PANEL; c++)
        sums[c] = all(0.0);
    for (Index k = 0; k < j; k++) {
        Vec rows = lower[k * height];
#pragma GCC unroll 8
        for (int c = 0; c < PANEL; c++)
            sums[c] = plus_product(sums[c], rows, all(get<double>(panel + c * height, k)));
    }
}

// Rows of U above a panel that begins with column j, vector by vector, then the update of its other rows.
inline void eliminate(const Group<double> &g, Vec *panel, Index j)
{
    Index height = g.height, v = 0;
    Vec sums[PANEL];
    for (; v * WIDTH < j; v++) {
        Index first = v * WIDTH, end = first + WIDTH < j ? first + WIDTH : j;
        sum_products(g.lower + v, height, panel, first, sums);
#pragma GCC unroll 8
        for (int c = 0; c < PANEL; c++)
            sums[c] = panel[c * height + v] - sums[c];
        for (Index k = first; k < end; k++) // zeros are above and on the diagonal of L
#pragma GCC unroll 8
            for (int c = 0; c < PANEL; c++)
                sums[c] = minus_product(sums[c], g.lower[k * height + v], all(sums[c][k - first]));
        for (int c = 0; c < PANEL; c++)
            panel[c * height + v] = sums[c];
    }
    for (; v < height; v++) {
        sum_products(g.lower + v, height, panel, j, sums);
#pragma GCC unroll 8
        for (int c = 0; c < PANEL; c++)
            panel[c * height + v] -= sums[c];
    }
}

// The row of the largest element of a column from row j on.
inline Index pivot_row(const Vec *column, Index height, Index n, Index j)
{
    const double *x = reinterpret_cast<const double *>(column);
    Vec found = {};
    double most = 0.0;
    Index next = (place<double>(j) + 1) * WIDTH;
    for (Index i = j; i < next && i < n; i++)
        most = fabs(x[i]) > most ? fabs(x[i]) : most;
    for (Index v = place<double>(j) + 1; v < height; v++)
        found = larger(magnitude(column[v]), found);
    most = largest<double>(larger(found, all(most)));
    for (Index i = j; i < n; i++)
        if (fabs(x[i]) == most)
            return i;
    return j; // not a number
}

// Split column j of the factors, its pivot in row j, into those of L and U; returns the largest element of U in it.
inline Vec split(Group<double> &g, Index j)
{
    Index height = g.height, first = place<double>(j);
    Vec *upper = g.upper + j * height, *lower = g.lower + j * height, most = {};
    double pivot = get<double>(upper, j), reciprocal = 1 / pivot;
    most[0] = fabs(pivot);
    set(g.reciprocals, j, reciprocal);
    clear(lower, first);
    for (Index v = first; v < height; v++)
        lower[v] = upper[v] * reciprocal;
    for (Index i = first * WIDTH; i <= j; i++)
        set(lower, i, 0.0);
    for (Index i = j; i < (first + 1) * WIDTH; i++)
        set(upper, i, 0.0);
    clear(upper + first + 1, height - first - 1);
    for (Index v = 0; v <= first; v++)
        most = larger(magnitude(upper[v]), most);
    return most;
}

// Factorize a panel, whose other columns follow each interchange; `best` are rows of the pivots.
inline Vec factorize_panel(Group<double> &g, Index j, Index count, Index *best)
{
    Index height = g.height;
    Vec most = {};
    for (Index c = 0; c < count; c++) {
        Vec *column = g.upper + (j + c) * height;
        for (Index k = j; k < j + c; k++) {
            const Vec *lower = g.lower + k * height;
            Vec factor = all(get<double>(column, k));
            for (Index v = place<double>(k); v < height; v++)
                column[v] = minus_product(column[v], lower[v], factor);
        }
        best[c] = g.problem.definite ? j + c : pivot_row(column, height, g.n, j + c);
        for (Index k = 0; k < count && best[c] != j + c; k++)
            interchange<double>((k < c ? g.lower : g.upper) + (j + k) * height, j + c, best[c], 0);
        most = larger(split(g, j + c), most);
    }
    return most;
}

// Columns of A with their rows in the order of the pivots so far.
inline void copy_panel(const Group<double> &g, Index j, Index count)
{
    for (Index c = j; c < j + count; c++) {
        const double *from = reinterpret_cast<const double *>(g.a + c * g.height);
        double *to = reinterpret_cast<double *>(g.upper + c * g.height);
        for (Index i = 0; i < g.n; i++)
            to[i] = from[g.order[i]];
        for (Index i = g.n; i < g.height * WIDTH; i++)
            to[i] = 0.0;
    }
}

inline double factorize(Group<double> &g)
{
    Index n = g.n, best[PANEL];
    Vec most = {};
    for (Index i = 0; i < n; i++)
        g.order[i] = int(i);
    for (Index j = 0; j < n; j += PANEL) {
        Index count = n - j < PANEL ? n - j : PANEL;
        copy_panel(g, j, count);
        eliminate(g, g.upper + j * g.height, j);
        most = larger(factorize_panel(g, j, count, best), most);
        for (Index c = 0; c < count; c++) {
            int other = g.order[j + c];
            g.order[j + c] = g.order[best[c]], g.order[best[c]] = other;
        }
        for (Index c = 0; c < j && !g.problem.definite; c++)
            for (Index k = 0; k < count; k++)
                interchange<double>(g.lower + c * g.height, j + k, best[k], 0);
    }
    return largest<double>(most);
}

// Whether matrices are symmetric up to rounding errors, and all pivots positive: then they are definite, U is D L^T, and no
// element has grown.
template <typename Lanes> Truth<Lanes> is_definite(const Group<Lanes> &g, Lanes largest_element)
{
    Index n = g.n, height = g.height;
    Lanes difference = {};
    for (Index j = 0; j < n; j++)
        for (Index i = 0; i < j; i++)
            difference = larger(magnitude(get<Lanes>(g.a + j * height, i) - get<Lanes>(g.a + i * height, j)), difference);
    return (difference <= n * UNIT * largest_element) & (smallest_element<Lanes>(g.reciprocals, n) > constant<Lanes>(0.0));
}

// y -= x one + other_x other, for some of their vectors.
inline void subtract_two(Vec *y, const Vec *one, Vec x, const Vec *other, Vec other_x, Index from, Index to)
{
    for (Index v = from; v < to; v++)
        y[v] = minus_product(minus_product(y[v], one[v], x), other[v], other_x);
}

// Solve in the place of some columns, whose rows are in the order of the factors: two rows at a time.
template <typename Lanes> void substitute(const Group<Lanes> &g, Vec *columns, Index count)
{
    Index n = g.n, height = g.height, j = 0;
    for (; j < n - 1; j += 2) {
        const Vec *lower = g.lower + j * height, *next = lower + height;
        Lanes across = get<Lanes>(lower, j + 1);
        for (Index c = 0; c < count; c++) {
            Vec *y = columns + c * height;
            Lanes x = get<Lanes>(y, j);
            Lanes other = minus_product(get<Lanes>(y, j + 1), across, x);
            subtract_two(y, lower, all(x), next, all(other), place<Lanes>(j + 1), height);
        }
    }
    for (j = n - 1; j >= 0; j -= 2) {
        const Vec *upper = g.upper + j * height, *next = j ? upper - height : upper;
        Lanes reciprocal = get<Lanes>(g.reciprocals, j), next_reciprocal = j ? get<Lanes>(g.reciprocals, j - 1) : Lanes{};
        Lanes across = j ? get<Lanes>(upper, j - 1) : Lanes{};
        Index end = ALONE<Lanes> ? (j + WIDTH - 1) / WIDTH : j;
        for (Index c = 0; c < count; c++) {
            Vec *y = columns + c * height;
            Lanes x = get<Lanes>(y, j) * reciprocal;
            Lanes other = j ? minus_product(get<Lanes>(y, j - 1), across, x) * next_reciprocal : Lanes{};
            subtract_two(y, upper, all(x), next, all(other), 0, end);
            set(y, j, x);
            if (j)
                set(y, j - 1, other);
        }
    }
}

// A column with its rows in the order of the factors.
template <typename Lanes> void permute(const Group<Lanes> &g, const Vec *from, Vec *to)
{
    Index first = place<Lanes>(g.n);
    clear(to + first, g.height - first);
    for (int l = 0; l < LANES<Lanes>; l++)
        for (Index i = 0; i < g.n; i++)
            reinterpret_cast<double *>(to)[i * LANES<Lanes> + l] =
                reinterpret_cast<const double *>(from)[g.order[l * g.n + i] * LANES<Lanes> + l];
}

NEULA_END
