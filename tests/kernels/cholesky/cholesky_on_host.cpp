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

// The first bits of a number, down to a power of two.
static double truncated(double x, int exponent) { return std::ldexp(std::trunc(std::ldexp(x, -exponent)), exponent); }

// A sum of some products and a number, of which all is lost that is below the last bit but one of the largest.
static float sum_of(float start, const float* a, const float* b, int count) {
    int exponent;
    double largest = std::fabs(start), sum = 0.0;
    for (int k = 0; k < count; ++k) largest = std::fmax(largest, std::fabs(static_cast<double>(a[k]) * b[k]));
    std::frexp(largest, &exponent);
    for (int k = 0; k < count; ++k) sum += truncated(static_cast<double>(a[k]) * b[k], exponent - 25);
    sum += truncated(start, exponent - 25);
    std::frexp(sum, &exponent);
    return static_cast<float>(truncated(sum, exponent - 24));
}

// A product of 16 x 8 and 8 x 8 numbers, of which a tensor core drops what does not fit its format, as the least accurate
// ones add: four at a time.
static void multiply_on_host(float* d, const unsigned* a, const unsigned* b) {
    const int lane = threadIdx.x % 32, first = threadIdx.x - lane, g = lane / 4, t = lane % 4;
    Operands& mine = operands[threadIdx.x];
    std::copy(a, a + 4, mine.a);
    std::copy(b, b + 2, mine.b);
    __syncwarp();
    const auto number = [](unsigned bits) { return __uint_as_float(bits & 0xffffe000u); };
    for (int u = 0; u < 4; ++u) {
        const int column = 2 * t + u % 2;
        float left[8], right[8];
        for (int k = 0; k < 8; ++k) {
            left[k] = number(operands[first + 4 * g + k % 4].a[u / 2 + k / 4 * 2]);
            right[k] = number(operands[first + 4 * column + k % 4].b[k / 4]);
        }
        d[u] = sum_of(sum_of(d[u], left, right, 4), left + 4, right + 4, 4);
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
