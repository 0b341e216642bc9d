// Batches of small linear systems: a group of them that is solved together, its matrices, and their norms.
#pragma once

#include "lanes.hpp"
#include "matrices.hpp"
#include "rows.hpp"
#include "workspace.hpp"

NEULA_BEGIN

constexpr Index PANEL = 8;      // columns that are factorized together
constexpr Index LINE_ROWS = 8;  // doubles of a line of the cache

// A group of as many systems as Lanes has numbers, and its workspace: columns of `height` vectors, with zeros behind the last
// row.
template <typename Lanes> struct Group {
    const SystemsProblem &problem;
    const Index n, height;
    Workspace workspace;
    Vec *a, *lower, *upper, *reciprocals;  // reciprocals of the pivots
    Vec *column_norms, *row_sums, *sides;
    Vec *before, *after;                   // residuals of an update
    Vec *change, *rest, *images;
    int *order;                            // row i of the factors is row order[i] of A, for each lane

    // Columns an odd number of vectors apart do not compete for places in a cache.
    static Index height_of(Index n) { return ALONE<Lanes> ? ((n + WIDTH - 1) / WIDTH | 1) : n; }

    explicit Group(const SystemsProblem &p)
        : problem(p), n(p.n), height(height_of(p.n)),
          workspace((3 * n + PANEL - 1 + 3 + columns_of_sides(p) + 7) * height * WIDTH + LANES<Lanes> * n, Filled::no)
    {
        if (!workspace)
            return;
        struct {
            Vec **part;
            Index columns;
        } parts[] = {{&a, n}, {&lower, n}, {&upper, n + PANEL - 1},  // whole panels
                     {&reciprocals, 1}, {&column_norms, 1}, {&row_sums, 1}, {&sides, columns_of_sides(p)},
                     {&before, 1}, {&after, 1}, {&change, 1}, {&rest, 2}, {&images, 2}};
        for (auto &part : parts)
            *part.part = reinterpret_cast<Vec *>(workspace.take(part.columns * height * WIDTH));
        order = reinterpret_cast<int *>(workspace.take(LANES<Lanes> * n));
    }

    // Right-hand sides, then these and random vectors in the order of the factors.
    static Index columns_of_sides(const SystemsProblem &p) { return 2 * p.k + p.probes; }

    // Systems of a group behind the last one repeat that.
    Index member(Index first, int l) const { return first + l < problem.count ? first + l : problem.count - 1; }
};

inline void clear(Vec *column, Index vectors)
{
    memset(column, 0, vectors * sizeof(Vec));
}

// Known of a matrix before it is factorized. `largest` is its largest element.
template <typename Lanes> struct Norms {
    Lanes infinity_norm, norm, smallest_column, largest;
    Truth<Lanes> in_safe_range, equilibrated;
};

// Transpose contiguous rows of A to columns, WIDTH rows and columns at a time; returns how many of either.
template <typename T> ALWAYS_INLINE Index read_squares(const T *a, Index apart, Index n, double *to, Index width)
{
    Index taken = n / LINE_ROWS * LINE_ROWS;
    for (Index i = 0; i < taken; i += WIDTH)
        for (Index j = 0; j < taken; j += WIDTH) {
            Vec square[WIDTH];
#pragma GCC unroll 8
            for (int l = 0; l < WIDTH; l++)
                square[l] = load_as_doubles(a + (i + l) * apart + j);
            transpose(square);
#pragma GCC unroll 8
            for (int l = 0; l < WIDTH; l++)
                store(to + (j + l) * width + i, square[l]);
        }
    return taken;
}

template <typename T, typename Lanes> void read_matrices(Group<Lanes> &g, Index first)
{
    const Matrices &x = g.problem.a;
    Index n = g.n, width = g.height * WIDTH;
    for (int l = 0; l < LANES<Lanes>; l++) {
        const T *a = static_cast<const T *>(x.data) + g.member(first, l) * x.member;
        double *to = reinterpret_cast<double *>(g.a) + l;
        Index taken = ALONE<Lanes> && x.column == 1 ? read_squares(a, x.row, n, to, width) : 0;
        for (Index top = 0; top < n; top += LINE_ROWS)
            for (Index j = top < taken ? taken : 0; j < n; j++)
                for (Index i = top; i < n && i < top + LINE_ROWS; i++)
                    to[j * width + i * LANES<Lanes>] = double(a[i * x.row + j * x.column]);
    }
    if constexpr (ALONE<Lanes>)
        for (Index j = 0; j < n; j++)
            for (Index i = n; i < width; i++)
                reinterpret_cast<double *>(g.a)[j * width + i] = 0.0;
}

template <typename Lanes> void read_right_side(const Group<Lanes> &g, Index first, Index column, Vec *to)
{
    clear(to, g.height);
    for (int l = 0; l < LANES<Lanes>; l++) {
        Index member = g.member(first, l);
        for (Index i = 0; i < g.n; i++)
            reinterpret_cast<double *>(to)[i * LANES<Lanes> + l] = element(g.problem.b, member, i, column);
    }
}

template <typename Lanes> Norms<Lanes> measure_matrices(Group<Lanes> &g)
{
    const SystemLimits &limits = g.problem.limits;
    Index n = g.n, height = g.height;
    Lanes square_of_norm = {};
    Vec most = {};
    clear(g.row_sums, height);
    clear(g.column_norms, height);
    for (Index j = 0; j < n; j++) {
        const Vec *column = g.a + j * height;
        Vec square = {};
        for (Index v = 0; v < height; v++) {
            Vec size = magnitude(column[v]);
            g.row_sums[v] += size;
            most = larger(size, most);
            square += size * size;
        }
        Lanes sum = total<Lanes>(square);
        square_of_norm += sum;
        set(g.column_norms, j, square_root(sum));
    }
    Norms<Lanes> norms;
    norms.infinity_norm = largest_magnitude<Lanes>(g.row_sums, height);
    norms.norm = square_root(square_of_norm);
    norms.smallest_column = smallest_element<Lanes>(g.column_norms, n);
    norms.largest = largest<Lanes>(most);
    Lanes widest = largest_magnitude<Lanes>(g.column_norms, height), least = smallest_element<Lanes>(g.row_sums, n);
    Lanes lower = constant<Lanes>(1 / limits.in_safe_range), upper = constant<Lanes>(limits.in_safe_range);
    norms.equilibrated = (norms.infinity_norm <= limits.equilibrated * least) &
                         (widest <= limits.equilibrated * norms.smallest_column);
    // The norm shows numbers that are not finite, comparisons with which are false.
    norms.in_safe_range = (least >= lower) & (norms.smallest_column >= lower) & (norms.infinity_norm <= upper) &
                          (norms.norm <= constant<Lanes>(n * limits.in_safe_range));
    return norms;
}

NEULA_END
