// CUDA C++ on a CPU: a thread of the host for each of a thread block, far slower, the same steps.

#pragma once

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)

struct float4 {
    float x, y, z, w;
};

struct Index {
    int x;
};

using Barrier = std::barrier<>;

static thread_local Index threadIdx;
static std::unique_ptr<Barrier> of_all;
static std::vector<std::unique_ptr<Barrier>> of_warps;

static inline void __syncthreads() { of_all->arrive_and_wait(); }
static inline void __syncwarp() { of_warps[threadIdx.x / 32]->arrive_and_wait(); }

template <class Body>
static void run_together(int count, Body body) {
    of_all = std::make_unique<Barrier>(count);
    of_warps.clear();
    for (int i = 0; i < count / 32; ++i) of_warps.push_back(std::make_unique<Barrier>(32));
    std::vector<std::thread> threads;
    for (int i = 0; i < count; ++i)
        threads.emplace_back([=] {
            threadIdx.x = i;
            body();
        });
    for (auto& thread : threads) thread.join();
}
