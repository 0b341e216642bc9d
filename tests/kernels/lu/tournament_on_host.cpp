// The kernel of pivot rows on a CPU, one thread block after the other.

#include "cuda_on_host.h"

#define __shared__ static

using std::max;

struct uint4 {
    unsigned x, y, z, w;
};

static Index blockIdx, gridDim;
static unsigned lanes[TILE];

static void __threadfence() {}

// What all lanes of a warp say, one after the other.
template <class Combine>
static unsigned gathered(unsigned value, Combine combine) {
    __syncwarp();
    lanes[threadIdx.x] = value;
    __syncwarp();
    unsigned result = 0;
    for (int i = 0; i < 32; ++i) result = combine(result, lanes[threadIdx.x / 32 * 32 + i], i);
    return result;
}

static unsigned __reduce_max_sync(unsigned, unsigned value) {
    return gathered(value, [](unsigned a, unsigned b, int) { return std::max(a, b); });
}

static int __ldcg(const int* place) { return *place; }
static void __stcg(int* place, int value) { *place = value; }

static int atomicAdd(int* place, int value) {
    const int before = *place;
    *place += value;
    return before;
}

#include SOURCE

extern "C" void play(
    const float* block, int* places, int* pivots, float* factors, float* l_inverse, float* u_inverse,
    int* candidates, int* arrived, int dropped, int m, int start, int count
) {
    gridDim.x = (m + TILE - 1) / TILE;
    run_together(TILE, [=] {
        for (int b = 0; b < gridDim.x; ++b) {
            __syncthreads();
            if (threadIdx.x == 0) blockIdx.x = b;
            __syncthreads();
            tournament(
                block, places, pivots, factors, l_inverse, u_inverse, candidates, arrived, dropped, m, start, count
            );
        }
    });
}
