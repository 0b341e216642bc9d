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

struct Operands {
    unsigned a[4], b[2];
};

static std::vector<Operands> operands;

// A product of 16 x 8 and 8 x 8 numbers, of which a tensor core drops what does not fit its format.
static void multiply_on_host(float* d, const unsigned* a, const unsigned* b) {
    const int lane = threadIdx.x % 32, first = threadIdx.x - lane, g = lane / 4, t = lane % 4;
    Operands& mine = operands[threadIdx.x];
    std::copy(a, a + 4, mine.a);
    std::copy(b, b + 2, mine.b);
    __syncwarp();
    const auto number = [](unsigned bits) { return __uint_as_float(bits & 0xffffe000u); };
    for (int u = 0; u < 4; ++u) {
        const int column = 2 * t + u % 2;
        float sum = d[u];
        for (int k = 0; k < 8; ++k)
            sum += number(operands[first + 4 * g + k % 4].a[u / 2 + k / 4 * 2]) *
                   number(operands[first + 4 * column + k % 4].b[k / 4]);
        d[u] = sum;
    }
    __syncwarp();
}

#include SOURCE

float4 shared[BYTES / sizeof(float4)];

extern "C" void factorize(const double* gram, float* r, float* inverse, float* norms, int n, int row, int column) {
    std::fill(std::begin(shared), std::end(shared), float4{NAN, NAN, NAN, NAN});
    of_chain = std::make_unique<Barrier>(CHAIN);
    lanes.assign(THREADS, NAN);
    operands.resize(THREADS);
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
        operands.resize(THREADS);
        run_together(THREADS, [=] {
            cholesky_lower(a, lower, inverses, info, n, row, column, next, l_row, l_column, l_next, inverted);
        });
    }
}
