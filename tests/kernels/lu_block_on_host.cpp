// The kernel of LU of diagonal blocks on a CPU, with factors in float.

#include "cuda_on_host.h"

#define __shared__

typedef float Low;

static std::unique_ptr<Barrier> of_chain;

static Low rounded(float x) { return x; }
static void barrier_of_chain() { of_chain->arrive_and_wait(); }
static float reciprocal(float x) { return 1.0f / x; }

#include SOURCE

float4 shared[BYTES / sizeof(float4)];

extern "C" void factorize(
    const float* work, float* a, float* l_inverse, float* u_inverse, int n, int row, int column
) {
    std::fill(std::begin(shared), std::end(shared), float4{NAN, NAN, NAN, NAN});
    of_chain = std::make_unique<Barrier>(CHAIN);
    run_together(THREADS, [=] { lu_block(work, a, l_inverse, u_inverse, n, row, column); });
}
