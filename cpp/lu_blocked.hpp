// LU with partial pivoting of one matrix by several threads, in blocks of columns that fit a cache.
//
// The next operation on a block follows from the number of panels (factorized blocks) applied to it. Any thread
// may do any of that as soon as it can be done, the next panel first: threads do not wait for one another while a panel is
// factorized, and no number depends on how many there are. A thread prefers blocks in its cache.
#pragma once

#include "lu.hpp"
#include "threads.hpp"

NEULA_BEGIN

constexpr Index PATIENCE = 1000;  // searches for work before another process may have the processor

// A matrix (TiledLu), and how far its blocks of columns are.
struct Blocks {
    void *a;
    Index n, stride;  // whole lines of the cache
    Index count, threads;
    int *pivots;
    // Written by threads, apart from data that they only read.
    alignas(CACHE_LINE) Index factorized;
    Index finished, joined, singular;
    struct {
        alignas(CACHE_LINE) Index applied;  // panels, interchanges of later ones included
        Index busy;                         // whether a thread works on it
    } block[MOST_FACTOR_BLOCKS];
};

template <typename Real> struct BlockedLu {
    Blocks &work;
    TiledLu<Real> lu;

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
        if (next < j)
            lu.apply_panel(top, BLOCK, first, last);
        else if (next > j)
            lu.interchange(top, end, first, last);
        next += next != j;
        bool panel = next == j;
        if (panel && !lu.factorize_panel(first)) {
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
    BlockedLu<Real> blocks = {work, {static_cast<Real *>(work.a), work.n, work.stride, work.pivots}};
    Index own = __atomic_fetch_add(&work.joined, Index(1), __ATOMIC_RELAXED) % work.threads;
    for (Index idle = 0; __atomic_load_n(&work.finished, __ATOMIC_ACQUIRE) < work.count;) {
        if (__atomic_load_n(&work.singular, __ATOMIC_ACQUIRE))
            return;
        if (blocks.take_any(own))
            idle = 0;
        else if (++idle % PATIENCE == 0)
            let_others_run(); // where threads share a processor
    }
}

NEULA_END
