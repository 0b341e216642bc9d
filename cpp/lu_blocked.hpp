// LU with partial pivoting of one matrix by several threads, in blocks of columns that fit a cache, in single or double
// precision.
//
// Columns are contiguous. What is done to a block next follows from how many panels (blocks that are factorized) have been
// applied to it. Any thread may do any of that as soon as it can be done, the next panel first: threads do not wait for one
// another while a panel is factorized, and no number depends on how many there are. A thread prefers blocks in its cache.
#pragma once

#include "threads.hpp"
#include "vectors.hpp"

NEULA_BEGIN

constexpr Index BLOCK = FACTOR_BLOCK;  // columns
constexpr Index TILE = WIDTH == 8 ? 8 : 4;  // columns that are worked on together
constexpr int STRIP = 3;                    // vectors of each of them whose sums stay in registers
constexpr Index PATIENCE = 1000;            // searches for work before another process may have the processor

// A matrix, and how far its blocks of columns are.
struct Blocks {
    void *a;
    Index n, stride;  // numbers from a column to the next: whole lines of the cache, with zeros below row n
    Index count, threads;
    int *pivots;  // counted from 0
    // What threads write, apart from what they only read.
    alignas(CACHE_LINE) Index factorized;
    Index finished, joined, singular;
    struct {
        alignas(CACHE_LINE) Index applied;  // panels, interchanges of later ones included
        Index busy;                         // whether a thread works on it
    } block[MOST_FACTOR_BLOCKS];
};

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

template <typename Real> struct BlockedLu {
    using Vector = typename Registers<Real>::Vector;
    using Bits = typename Registers<Real>::Bits;
    using Whole = typename Registers<Real>::Whole;
    static constexpr Index LANES = sizeof(Vector) / sizeof(Real);

    Blocks &work;

    static ALWAYS_INLINE Vector all(Real x) { return x - Vector{}; }

    ALWAYS_INLINE Real *column_of(Index j) const { return static_cast<Real *>(work.a) + j * work.stride; }

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
        Index apart = work.stride / LANES, row = top + (depth + LANES - 1) / LANES * LANES;
        for (Index j = first; j < last; j += TILE)
            solve_rows(top, depth, j, upper[(j - first) / TILE]);
        for (Index next; row < work.stride; row = next) {
            next = row + STRIP * LANES < work.stride ? row + STRIP * LANES : work.stride;
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
        for (Index j = first; j < last; j++) {
            Real *column = column_of(j);
            for (Index i = start; i < end; i++) {
                Real other = column[i];
                column[i] = column[work.pivots[i]];
                column[work.pivots[i]] = other;
            }
        }
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
        for (Index i = j; i < row && i < work.n; i++)
            if ((column[i] < 0 ? -column[i] : column[i]) > largest)
                largest = column[i] < 0 ? -column[i] : column[i], pivot = i;
        for (; row + 4 * LANES <= work.stride; row += 4 * LANES)
            eliminate_vectors<4>(first, j, row, factors, most, where);
        for (; row < work.stride; row += LANES)
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
            work.pivots[j] = int(eliminate_column(first, j));
            interchange(j, j + 1, first, end);
            Real pivot = column_of(j)[j];
            if (pivot == 0)
                return false;
            Vector reciprocal = all(1 / pivot);
            Index row = j / LANES * LANES;
            Bits behind = lanes_after(j - row);
            Vector *to = vector_of(row, j);
            *to = Vector((Bits(*to * reciprocal) & behind) | (Bits(*to) & ~behind));
            for (row += LANES; row < work.stride; row += LANES)
                *vector_of(row, j) *= reciprocal;
        }
        return true;
    }

    // A panel, tile by tile; returns whether no pivot vanishes.
    bool factorize_panel(Index top)
    {
        Index end = top + BLOCK < work.n ? top + BLOCK : work.n;
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

    // Whether the next panel can be applied to a block. Interchanges of later panels wait until nothing reads the block; where
    // a pivot has vanished there is nothing to do any more.
    bool is_ready(Index j)
    {
        Index next = __atomic_load_n(&work.block[j].applied, __ATOMIC_ACQUIRE);
        Index factorized = __atomic_load_n(&work.factorized, __ATOMIC_ACQUIRE);
        if (__atomic_load_n(&work.singular, __ATOMIC_ACQUIRE))
            return false;
        if (next >= factorized)
            return next == 0 && j == 0;
        for (Index i = j + 1; i < work.count && next > j; i++)
            if (__atomic_load_n(&work.block[i].applied, __ATOMIC_ACQUIRE) <= j)
                return false;
        return true;
    }

    // Apply the next panel to a block, and factorize the block if no other panel is before it. Where a pivot vanishes no thread
    // sees the panel: not all of its pivots are known.
    void advance(Index j)
    {
        Index next = work.block[j].applied, first = j * BLOCK, last = first + BLOCK < work.n ? first + BLOCK : work.n;
        Index top = next * BLOCK, end = top + BLOCK < work.n ? top + BLOCK : work.n;
        if (next != j) {
            interchange(top, end, first, last);
            next++;
        }
        if (next <= j && j > 0)
            eliminate(top, BLOCK, first, first + (last - first + TILE - 1) / TILE * TILE);
        bool panel = next == j;
        if (panel && !factorize_panel(first)) {
            __atomic_store_n(&work.singular, Index(1), __ATOMIC_RELEASE);
            return;
        }
        next += panel;
        __atomic_store_n(&work.block[j].applied, next, __ATOMIC_RELEASE);
        if (panel)
            __atomic_store_n(&work.factorized, j + 1, __ATOMIC_RELEASE);
        if (next == work.count)
            __atomic_fetch_add(&work.finished, Index(1), __ATOMIC_RELEASE);
    }

    // Advance a block if it is free and ready.
    bool take(Index j)
    {
        if (j >= work.count || __atomic_load_n(&work.block[j].busy, __ATOMIC_RELAXED) || !is_ready(j))
            return false;
        if (__atomic_exchange_n(&work.block[j].busy, Index(1), __ATOMIC_ACQUIRE))
            return false;
        bool ready = is_ready(j);
        if (ready)
            advance(j);
        __atomic_store_n(&work.block[j].busy, Index(0), __ATOMIC_RELEASE);
        return ready;
    }

    bool take_any(Index own)
    {
        Index panel = __atomic_load_n(&work.factorized, __ATOMIC_RELAXED);
        if (take(panel))
            return true;
        for (Index j = panel + 1; j < work.count; j++)
            if (j % work.threads == own && take(j))
                return true;
        for (Index j = panel + 1; j < work.count; j++)
            if (take(j))
                return true;
        for (Index j = 0; j < panel; j++)
            if (take(j))
                return true;
        return false;
    }
};

// Work of one thread on the blocks of a matrix, until all are done or a pivot vanishes.
template <typename Real> void advance_blocks(Blocks *&given)
{
    Blocks &work = *given;
    BlockedLu<Real> lu{work};
    Index own = __atomic_fetch_add(&work.joined, Index(1), __ATOMIC_RELAXED) % work.threads;
    for (Index idle = 0; __atomic_load_n(&work.finished, __ATOMIC_ACQUIRE) < work.count;) {
        if (__atomic_load_n(&work.singular, __ATOMIC_ACQUIRE))
            return;
        if (lu.take_any(own))
            idle = 0;
        else if (++idle % PATIENCE == 0)
            let_others_run(); // where threads share a processor
    }
}

NEULA_END
