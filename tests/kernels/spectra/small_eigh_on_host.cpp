// The kernel of small eigenvalue problems on a CPU, one thread block after the other.

#include "warps_on_host.h"

static Index blockIdx;

using std::max, std::min, std::fmax, std::fabs, std::sqrt, std::fma, std::copysign, std::ilogb, std::scalbn;

#define __shared__ static

static int votes;

static int __syncthreads_or(int x) {
    __syncthreads();
    votes = 0;
    __syncthreads();
    votes |= x;
    __syncthreads();
    return votes;
}

#include SOURCE

extern "C" void decompose(const REAL* a, REAL* values, REAL* vectors, int count, int n) {
    lanes.assign(THREADS, NAN);
    const int blocks = (count * LANES + THREADS - 1) / THREADS;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        run_together(THREADS, [=] { small_eigh(a, values, vectors, count, n); });
}
