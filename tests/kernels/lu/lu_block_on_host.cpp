// The kernel of LU of diagonal blocks on a CPU, with factors in float.

#include "cuda_on_host.h"

#define __shared__

typedef float Low;

static Low rounded(float x) { return x; }
static float reciprocal(float x) { return 1.0f / x; }

#include SOURCE

float4 shared[BYTES / sizeof(float4)];

extern "C" void factorize(
    const float* work, float* a, float* l_inverse, float* u_inverse, int n, int row, int column
) {
    std::fill(std::begin(shared), std::end(shared), float4{NAN, NAN, NAN, NAN});
    run_together(THREADS, [=] { lu_block(work, a, l_inverse, u_inverse, n, row, column); });
}
