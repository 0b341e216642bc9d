/* LU with partial pivoting of one matrix by several threads, in blocks that fit a cache. REAL is float or double, and
 * TAKE_BLOCKS the name of the function.
 *
 * Columns are contiguous, and BLOCK of them a block: what is done to it next is known from how many panels (blocks that
 * are factorized) have been applied to it. Any thread may do any of that as soon as it can be done, the next panel first:
 * so threads do not wait for one another while a panel is factorized, and it does not matter how many there are. A thread
 * prefers blocks that are in its cache.
 */
#include <sched.h>

#include "lu_blocks.h"

/* A vector of registers, and columns that are worked on together: STRIP vectors of each are sums that stay in registers.
 */
#if defined(__AVX512F__)
#define BYTES 64
#define TILE 8
#elif defined(__AVX__)
#define BYTES 32
#define TILE 4
#else
#define BYTES 16
#define TILE 4
#endif
#define STRIP 3
#define LANES ((long)(BYTES / sizeof(REAL)))
#define INLINE static inline __attribute__((always_inline))

typedef REAL vec __attribute__((vector_size(BYTES)));
typedef WHOLE mask __attribute__((vector_size(BYTES)));

INLINE vec all(REAL x)
{
    return x - (vec){0};
}

/* c + a b, which is rounded once where the processor can. */
INLINE vec plus_product(vec c, vec a, vec b)
{
#if defined(__AVX512F__) && SINGLE
    return __builtin_ia32_vfmaddps512_mask(a, b, c, (unsigned short)-1, 4);
#elif defined(__AVX512F__)
    return __builtin_ia32_vfmaddpd512_mask(a, b, c, (unsigned char)-1, 4);
#elif defined(__FMA__) && SINGLE
    return __builtin_ia32_vfmaddps256(a, b, c);
#elif defined(__FMA__)
    return __builtin_ia32_vfmaddpd256(a, b, c);
#else
    return c + a * b;
#endif
}

INLINE vec *vector_of(const struct blocks *work, long row, long column)
{
    return (vec *)((REAL *)work->a + column * work->apart + row);
}

/* Lanes behind lane i. */
INLINE mask after(long i)
{
    mask lane;
    for (int l = 0; l < LANES; l++)
        lane[l] = l;
    return lane > (WHOLE)i - (mask){0};
}

/* Rows of U in TILE columns: what `depth` columns from `top` on make of as many rows from there. Their negatives go to `upper`. */
static void solve_rows(const struct blocks *work, long top, long depth, long first, REAL (*upper)[TILE])
{
    for (long v = 0; v < depth; v += LANES) {
        long end = v + LANES < depth ? v + LANES : depth;
        vec sums[TILE];
#pragma GCC unroll 8
        for (int c = 0; c < TILE; c++)
            sums[c] = *vector_of(work, top + v, first + c);
        for (long k = 0; k < v; k++) {
            vec rows = *vector_of(work, top + v, top + k);
#pragma GCC unroll 8
            for (int c = 0; c < TILE; c++)
                sums[c] = plus_product(sums[c], rows, all(upper[k][c]));
        }
        for (long k = v; k < end; k++) {
            vec rows = (vec)((mask)*vector_of(work, top + v, top + k) & after(k - v));
#pragma GCC unroll 8
            for (int c = 0; c < TILE; c++) {
                upper[k][c] = -sums[c][k - v];
                sums[c] = plus_product(sums[c], rows, all(upper[k][c]));
            }
        }
#pragma GCC unroll 8
        for (int c = 0; c < TILE; c++)
            *vector_of(work, top + v, first + c) = sums[c];
    }
}

/* Add to `count` vectors of TILE columns the product of as many of `depth` columns and the negatives of rows of U. */
INLINE void add_product(const vec *lower, long apart, long depth, REAL (*upper)[TILE], vec *to, int count)
{
    vec sums[STRIP][TILE];
#pragma GCC unroll 8
    for (int c = 0; c < TILE; c++)
#pragma GCC unroll 3
        for (int r = 0; r < count; r++)
            sums[r][c] = to[c * apart + r];
    for (long k = 0; k < depth; k++) {
        vec rows[STRIP];
#pragma GCC unroll 3
        for (int r = 0; r < count; r++)
            rows[r] = lower[k * apart + r];
#pragma GCC unroll 8
        for (int c = 0; c < TILE; c++) {
            vec factor = all(upper[k][c]);
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

/* What `depth` columns from `top` on make of columns first to last, whole tiles. */
static void eliminate(const struct blocks *work, long top, long depth, long first, long last)
{
    REAL upper[BLOCK / TILE][BLOCK][TILE] __attribute__((aligned(64)));
    long apart = work->apart / LANES, row = top + (depth + LANES - 1) / LANES * LANES;
    for (long j = first; j < last; j += TILE)
        solve_rows(work, top, depth, j, upper[(j - first) / TILE]);
    for (long next; row < work->apart; row = next) {
        next = row + STRIP * LANES < work->apart ? row + STRIP * LANES : work->apart;
        const vec *lower = vector_of(work, row, top);
        for (long j = first; j < last; j += TILE) {
            REAL(*factors)[TILE] = upper[(j - first) / TILE];
            if (next - row == 3 * LANES)
                add_product(lower, apart, depth, factors, vector_of(work, row, j), 3);
            else if (next - row == 2 * LANES)
                add_product(lower, apart, depth, factors, vector_of(work, row, j), 2);
            else
                add_product(lower, apart, depth, factors, vector_of(work, row, j), 1);
        }
    }
}

/* Interchange rows of columns first to last as pivots from `start` to `end` say. */
static void interchange(const struct blocks *work, long start, long end, long first, long last)
{
    for (long j = first; j < last; j++) {
        REAL *column = (REAL *)work->a + j * work->apart;
        for (long i = start; i < end; i++) {
            REAL other = column[i];
            column[i] = column[work->pivots[i]];
            column[work->pivots[i]] = other;
        }
    }
}

/* What columns from `first` on make of column j, some vectors below their last row; the largest elements, and where. */
INLINE void eliminate_vectors(
    const struct blocks *work, long first, long j, long row, const REAL *factors, int count, vec *most, mask *where)
{
    vec sums[4];
    for (int r = 0; r < count; r++)
        sums[r] = vector_of(work, row, j)[r];
    for (long k = first; k < j; k++)
        for (int r = 0; r < count; r++)
            sums[r] = plus_product(sums[r], vector_of(work, row, k)[r], all(factors[k - first]));
    for (int r = 0; r < count; r++) {
        vec size = (vec)((mask)sums[r] & LARGEST_WHOLE);
        mask larger = size > *most, place = (WHOLE)(row + r * LANES) - (mask){0};
        *where = (place & larger) | (*where & ~larger);
        *most = (vec)(((mask)size & larger) | ((mask)*most & ~larger));
        vector_of(work, row, j)[r] = sums[r];
    }
}

/* What columns from `first` on make of column j; returns the row of its pivot. */
static long eliminate_column(const struct blocks *work, long first, long j)
{
    REAL factors[TILE], *column = (REAL *)work->a + j * work->apart, largest = 0;
    long row = j / LANES * LANES + LANES, pivot = j;
    vec most = {0};
    mask where = {0};
    for (long k = first; k < j; k++) {
        factors[k - first] = -column[k];
        for (long v = k / LANES * LANES; v < row; v += LANES) {
            vec lower = *vector_of(work, v, k);
            if (v <= k)
                lower = (vec)((mask)lower & after(k - v));
            *vector_of(work, v, j) = plus_product(*vector_of(work, v, j), lower, all(factors[k - first]));
        }
    }
    for (long i = j; i < row && i < work->n; i++)
        if ((column[i] < 0 ? -column[i] : column[i]) > largest)
            largest = column[i] < 0 ? -column[i] : column[i], pivot = i;
    for (; row + 4 * LANES <= work->apart; row += 4 * LANES)
        eliminate_vectors(work, first, j, row, factors, 4, &most, &where);
    for (; row < work->apart; row += LANES)
        eliminate_vectors(work, first, j, row, factors, 1, &most, &where);
    for (int l = 0; l < LANES; l++)
        if (most[l] > largest || (most[l] == largest && largest > 0 && where[l] + l < pivot))
            largest = most[l], pivot = where[l] + l;
    return pivot;
}

/* Factorize a tile, to which all columns before it have been applied; returns whether no pivot vanishes. */
static int factorize_tile(const struct blocks *work, long first, long end)
{
    for (long j = first; j < end; j++) {
        REAL *column = (REAL *)work->a + j * work->apart;
        work->pivots[j] = eliminate_column(work, first, j);
        interchange(work, j, j + 1, first, end);
        if (column[j] == 0)
            return 0;
        vec reciprocal = all(1 / column[j]);
        long row = j / LANES * LANES;
        mask behind = after(j - row);
        vec *to = vector_of(work, row, j);
        *to = (vec)(((mask)(*to * reciprocal) & behind) | ((mask)*to & ~behind));
        for (row += LANES; row < work->apart; row += LANES)
            *vector_of(work, row, j) *= reciprocal;
    }
    return 1;
}

/* A panel, tile by tile; returns whether no pivot vanishes. */
static int factorize_panel(const struct blocks *work, long top)
{
    long end = top + BLOCK < work->n ? top + BLOCK : work->n;
    for (long first = top; first < end; first += TILE) {
        long last = first + TILE < end ? first + TILE : end;
        interchange(work, top, first, first, last);
        if (first > top)
            eliminate(work, top, first - top, first, first + TILE);
        if (!factorize_tile(work, first, last))
            return 0;
        interchange(work, first, last, top, first);
    }
    return 1;
}

/* Whether the next panel can be applied to a block. Interchanges that come after its own wait until nothing reads it; where a
 * pivot has vanished there is nothing to do any more. */
static int ready(struct blocks *work, long j)
{
    long next = __atomic_load_n(&work->block[j].applied, __ATOMIC_ACQUIRE);
    long factorized = __atomic_load_n(&work->factorized, __ATOMIC_ACQUIRE);
    if (__atomic_load_n(&work->singular, __ATOMIC_ACQUIRE))
        return 0;
    if (next >= factorized)
        return next == 0 && j == 0;
    for (long i = j + 1; i < work->count && next > j; i++)
        if (__atomic_load_n(&work->block[i].applied, __ATOMIC_ACQUIRE) <= j)
            return 0;
    return 1;
}

/* Apply the next panel to a block, and make a panel of it if it was the last one before. Where a pivot vanishes nobody is
 * told of the panel: not all of its pivots are known. */
static void advance(struct blocks *work, long j)
{
    long next = work->block[j].applied, first = j * BLOCK, last = first + BLOCK < work->n ? first + BLOCK : work->n;
    long top = next * BLOCK, end = top + BLOCK < work->n ? top + BLOCK : work->n;
    if (next != j) {
        interchange(work, top, end, first, last);
        next++;
    }
    if (next <= j && j > 0)
        eliminate(work, top, BLOCK, first, first + (last - first + TILE - 1) / TILE * TILE);
    int panel = next == j;
    if (panel && !factorize_panel(work, first)) {
        __atomic_store_n(&work->singular, 1, __ATOMIC_RELEASE);
        return;
    }
    next += panel;
    __atomic_store_n(&work->block[j].applied, next, __ATOMIC_RELEASE);
    if (panel)
        __atomic_store_n(&work->factorized, j + 1, __ATOMIC_RELEASE);
    if (next == work->count)
        __atomic_fetch_add(&work->finished, 1, __ATOMIC_RELEASE);
}

/* Take a block if something can be done to it. */
static int take(struct blocks *work, long j)
{
    if (j >= work->count || __atomic_load_n(&work->block[j].busy, __ATOMIC_RELAXED) || !ready(work, j))
        return 0;
    if (__atomic_exchange_n(&work->block[j].busy, 1, __ATOMIC_ACQUIRE))
        return 0;
    int can = ready(work, j);
    if (can)
        advance(work, j);
    __atomic_store_n(&work->block[j].busy, 0, __ATOMIC_RELEASE);
    return can;
}

static int take_any(struct blocks *work, long own)
{
    long panel = __atomic_load_n(&work->factorized, __ATOMIC_RELAXED);
    if (take(work, panel))
        return 1;
    for (long j = panel + 1; j < work->count; j++)
        if (j % work->threads == own && take(work, j))
            return 1;
    for (long j = panel + 1; j < work->count; j++)
        if (take(work, j))
            return 1;
    for (long j = 0; j < panel; j++)
        if (take(work, j))
            return 1;
    return 0;
}

void *TAKE_BLOCKS(void *given)
{
    struct blocks *work = given;
    long own = __atomic_fetch_add(&work->joined, 1, __ATOMIC_RELAXED) % work->threads;
    for (long idle = 0; __atomic_load_n(&work->finished, __ATOMIC_ACQUIRE) < work->count;) {
        if (__atomic_load_n(&work->singular, __ATOMIC_ACQUIRE))
            return NULL;
        if (take_any(work, own))
            idle = 0;
        else if (++idle % PATIENT == 0)
            sched_yield(); /* where threads share a processor */
    }
    return NULL;
}
