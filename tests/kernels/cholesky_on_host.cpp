// The kernel of Cholesky factors on a CPU.

#include "cuda_on_host.h"

#define __shared__

static Index blockIdx;

static std::unique_ptr<Barrier> of_chain;
static std::vector<float> lanes;

static void barrier_on_host() { of_chain->arrive_and_wait(); }

static float __shfl_sync(unsigned, float x, int lane) {
    __syncwarp();
    lanes[threadIdx.x] = x;
    __syncwarp();
    return lanes[threadIdx.x / 32 * 32 + lane];
}

#include SOURCE

float4 shared[BYTES / sizeof(float4)];

extern "C" void factorize(const double* gram, float* r, float* inverse, float* norms, int n, int row, int column) {
    std::fill(std::begin(shared), std::end(shared), float4{NAN, NAN, NAN, NAN});
    of_chain = std::make_unique<Barrier>(CHAIN);
    lanes.assign(THREADS, NAN);
    run_together(THREADS, [=] { cholesky_inverse(gram, r, inverse, norms, n, row, column); });
}

extern "C" void factorize_batch(
    const float* a, float* lower, float* inverses, int* info, int count, int n, int row, int column, int next, int l_row,
    int l_column, int l_next, int inverted
) {
    for (blockIdx.x = 0; blockIdx.x < count; ++blockIdx.x) {
        std::fill(std::begin(shared), std::end(shared), float4{NAN, NAN, NAN, NAN});
        of_chain = std::make_unique<Barrier>(CHAIN);
        lanes.assign(THREADS, NAN);
        run_together(THREADS, [=] {
            cholesky_lower(a, lower, inverses, info, n, row, column, next, l_row, l_column, l_next, inverted);
        });
    }
}
