// The kernel of small least-squares problems on a CPU.

#include "cuda_on_host.h"

#define __shared__
#define __noinline__ __attribute__((noinline))

using std::max;
using std::min;

static Index blockIdx, gridDim;
static std::vector<double> lanes;

static double __shfl_xor_sync(unsigned, double x, int distance) {
    lanes[threadIdx.x] = x;
    __syncwarp();
    const double other = lanes[threadIdx.x ^ distance];
    __syncwarp();
    return other;
}

static __attribute__((noinline)) double __dmul_rn(double x, double y) { return x * y; }

static double __longlong_as_double(long long x) {
    double same;
    std::memcpy(&same, &x, sizeof same);
    return same;
}

#include SOURCE

double memory[BYTES / sizeof(double)];

extern "C" void solve(
    const REAL* a, const REAL* b, double* x, double* numbers, double* forward, double* residual, long long* rank,
    unsigned char* accepted, const double* limits, int count, int m, int n, int k, const int* strides, int chunk,
    int bits, int square, int definite
) {
    lanes.assign(THREADS, NAN);
    gridDim.x = count;
    for (int member = 0; member < count; ++member) {
        std::fill(std::begin(memory), std::end(memory), NAN);
        blockIdx.x = member;
        run_together(THREADS, [=] {
            seminormal(
                a, b, x, numbers, forward, residual, rank, accepted, limits, m, n, k, strides[0], strides[1],
                strides[2], strides[3], strides[4], strides[5], chunk, bits, square, definite
            );
        });
    }
}
