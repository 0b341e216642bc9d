// The factors of panels in double precision on a CPU.

#include "cuda_on_host.h"

#define __shared__ static

static Index blockIdx;
static double lanes[32];
static bool votes[32];

static double __shfl_sync(unsigned, double x, int from) {
    lanes[threadIdx.x] = x;
    __syncwarp();
    const double other = lanes[from];
    __syncwarp();
    return other;
}

static bool __all_sync(unsigned, bool x) {
    votes[threadIdx.x] = x;
    __syncwarp();
    bool all = true;
    for (const bool vote : votes) all = all && vote;
    __syncwarp();
    return all;
}

using std::fabs;
using std::fma;
using std::sqrt;

#include SOURCE

extern "C" void factors(
    const double* parts, double* kept, double* inverses, int* done, double* r, int count, int blocks, int n, int r_batch,
    int r_row, int r_column, int second
) {
    for (int i = 0; i < count; ++i) {
        blockIdx.x = i;
        run_together(THREADS, [=] {
            panel_factors(parts, kept, inverses, done, r, blocks, n, r_batch, r_row, r_column, second);
        });
    }
}
