// Products with a matrix and with its transpose in one pass over its rows: R = A X, B - A X or B, and A^T R while the rows
// are in the nearest cache. Elements are float or double, sums double.
#include "threads.hpp"
#include "vectors.hpp"
#include "workspace.hpp"

NEULA_BEGIN

namespace {

constexpr int TOGETHER = 2;      // vectors that are multiplied each time an element is read
constexpr Index BLOCK_ROWS = 256; // rows whose multiples are summed before that sum is added to others

// The rows of one thread; `columns` is n padded to whole vectors.
struct Part {
    const OnePassProblem *problem;
    Index first, last, columns;
    const double *x;        // (k, columns), zero-padded
    double *sums, *totals;  // (TOGETHER, columns), (k, columns)
};

// WIDTH elements, or the first `count` of them and zeros.
template <typename T> ALWAYS_INLINE Vec load_first(const T *x, Index count)
{
    if (count >= WIDTH)
        return load(x);
    Vec found = {};
    for (int l = 0; l < count; l++)
        found[l] = x[l];
    return found;
}

inline void store_first(double *to, Vec x, Index count)
{
    for (int l = 0; l < count && l < WIDTH; l++)
        to[l] = x[l];
}

// Products of WIDTH rows with vectors.
template <int count, typename T>
ALWAYS_INLINE void multiply(const T *const *rows, Index n, const double *x, Index columns, Vec *products)
{
    Vec sums[count][WIDTH];
    set_zero(sums);
    for (Index j = 0; j < columns; j += WIDTH)
        for (int r = 0; r < WIDTH; r++) {
            Vec elements = load_first(rows[r] + j, n - j);
            for (int c = 0; c < count; c++)
                sums[c][r] = plus_product(sums[c][r], elements, load(x + c * columns + j));
        }
    for (int c = 0; c < count; c++)
        products[c] = lane_sums(sums[c]);
}

// Add multiples of WIDTH rows.
template <int count, typename T>
ALWAYS_INLINE void multiply_transposed(const T *const *rows, Index n, const Vec *factors, Index columns, double *to)
{
    for (Index j = 0; j < columns; j += WIDTH) {
        Vec sums[count];
        for (int c = 0; c < count; c++)
            sums[c] = load(to + c * columns + j);
        for (int r = 0; r < WIDTH; r++) {
            Vec elements = load_first(rows[r] + j, n - j);
            for (int c = 0; c < count; c++)
                sums[c] = plus_product(sums[c], elements, all(factors[c][r]));
        }
        for (int c = 0; c < count; c++)
            store(to + c * columns + j, sums[c]);
    }
}

// Some rows, for vectors c to c + count.
template <int count, typename T> ALWAYS_INLINE void multiply_rows(const Part &part, Index first, Index last, Index c)
{
    const OnePassProblem &p = *part.problem;
    for (Index i = first; i < last; i += WIDTH) {
        const T *rows[WIDTH];
        Vec products[count] = {};
        for (int r = 0; r < WIDTH; r++)  // after the last row that row again, times zero
            rows[r] = static_cast<const T *>(p.a) + (i + r < last ? i + r : last - 1) * p.row;
        if (p.x)
            multiply<count>(rows, p.n, part.x + c * part.columns, part.columns, products);
        for (int d = 0; d < count; d++) {
            if (p.b) {
                Vec right = load_first(p.b + (c + d) * p.m + i, last - i);
                products[d] = p.x ? right - products[d] : right;
            }
            for (Index r = last - i; r < WIDTH; r++)
                products[d][r] = 0.0;
            if (p.image)
                store_first(p.image + (c + d) * p.m + i, products[d], last - i);
        }
        if (p.back)
            multiply_transposed<count>(rows, p.n, products, part.columns, part.sums);
    }
}

template <int count, typename T> ALWAYS_INLINE void multiply_block(const Part &part, Index first, Index last, Index c)
{
    double *totals = part.totals + c * part.columns;
    memset(part.sums, 0, count * part.columns * sizeof(double));
    multiply_rows<count, T>(part, first, last, c);
    for (Index j = 0; part.problem->back && j < count * part.columns; j++)
        totals[j] += part.sums[j];
}

template <typename T> void multiply_part(const Part &part)
{
    for (Index i = part.first; i < part.last; i += BLOCK_ROWS) {
        Index last = i + BLOCK_ROWS < part.last ? i + BLOCK_ROWS : part.last, c = 0;
        for (; c + TOGETHER <= part.problem->k; c += TOGETHER)
            multiply_block<TOGETHER, T>(part, i, last, c);
        for (; c < part.problem->k; c++)
            multiply_block<1, T>(part, i, last, c);
    }
}

void work(Part &part)
{
    with_type(part.problem->single, [&](auto type) { multiply_part<decltype(type)>(part); });
}

}  // namespace

Status one_pass(const OnePassProblem &p)
{
    Index count = p.threads < MOST_THREADS ? p.threads : MOST_THREADS, columns = (p.n + WIDTH - 1) / WIDTH * WIDTH;
    Workspace workspace(p.k * columns + count * (TOGETHER + p.k) * columns);
    if (!workspace)
        return Status::no_memory;
    double *x = workspace.take(p.k * columns);
    for (Index c = 0; p.x && c < p.k; c++)
        memcpy(x + c * columns, p.x + c * p.n, p.n * sizeof(double));
    Part parts[MOST_THREADS];
    for (Index t = 0; t < count; t++) {
        Index first = t ? parts[t - 1].last : 0, last = t + 1 < count ? (t + 1) * p.m / count / WIDTH * WIDTH : p.m;
        double *sums = workspace.take(TOGETHER * columns), *totals = workspace.take(p.k * columns);
        parts[t] = {&p, first, last, columns, x, sums, totals};
    }
    side_by_side<work>(parts, count);
    for (Index c = 0; p.back && c < p.k; c++)
        for (Index j = 0; j < p.n; j++) {
            double total = 0.0;
            for (Index t = 0; t < count; t++)
                total += parts[t].totals[c * columns + j];
            p.back[c * p.n + j] = total;
        }
    return Status::done;
}

NEULA_END
