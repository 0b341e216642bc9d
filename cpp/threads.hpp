// Parts of a computation in parallel. Compiled once, for all instruction sets: std::thread is a template.
#pragma once

#include "kernels.hpp"

namespace neula {

constexpr Index MOST_THREADS = 64;

// GOMP_parallel, which calls a function in all threads of an OpenMP.
using Pool = void (*)(void (*)(void *), void *, unsigned, unsigned);

// Run parts in the threads of a pool from now on, or in threads of their own: nullptr. Torch's threads wait busily after
// its products; others would first have to take the processors from them.
void share_threads(Pool pool);

// work(part) for each of `count` parts, which are `size` bytes apart; returns when all are done.
void run_parts(void (*work)(void *), void *parts, size_t size, Index count);

// The same for an array and a function of its elements. Internal linkage: each instruction set has its own.
template <auto work, typename Part> static inline void side_by_side(Part *parts, Index count)
{
    if (count == 1)
        work(*parts);
    else
        run_parts([](void *part) { work(*static_cast<Part *>(part)); }, parts, sizeof(Part), count);
}

}  // namespace neula
