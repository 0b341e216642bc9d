// The kernel of small singular value decompositions on a CPU.

#include "warps_on_host.h"

#define __shared__

static Index blockDim;
static int votes;

static float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

static int __syncthreads_or(int x) {
    __syncthreads();
    votes = 0;
    __syncthreads();
    votes |= x;
    __syncthreads();
    return votes;
}

#include SOURCE

double columns[BYTES / sizeof(double)];

extern "C" void decompose(const double* r, double* x, double* s, int n, int row, int column, int threads) {
    std::fill(std::begin(columns), std::end(columns), NAN);
    blockDim.x = threads;
    lanes.assign(threads, NAN);
    run_together(threads, [=] { small_svd(r, x, s, n, row, column); });
}
