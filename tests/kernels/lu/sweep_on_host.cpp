// The kernel of triangular solves on a CPU: a single thread block takes all tasks.

#include "cuda_on_host.h"

#define __shared__

using std::max;
using std::min;

struct uint2 {
    unsigned x, y;
};

static float sent[256];

static float __shfl_xor_sync(unsigned, float value, int other) {
    __syncwarp();
    sent[threadIdx.x] = value;
    __syncwarp();
    return sent[threadIdx.x ^ other];
}

template <class T>
static T __ldg(const T* place) { return *place; }
template <class T>
static T __ldcg(const T* place) { return *place; }

static int atomicAdd(int* place, int value) {
    const int before = *place;
    *place += value;
    return before;
}

static int seen(const int* flag) { return *flag; }
static void show(int* flag, int value) { *flag = value; }
static void fetch(const void*) {}

static float wide(unsigned bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 31) return NAN;  // there is no infinity in what is tested
    const float size = exponent ? std::ldexp(1024.0f + fraction, exponent - 25) : std::ldexp(1.0f * fraction, -24);
    return bits >> 15 ? -size : size;
}

float4 room[1 << 13];  // NaN before each launch

#include SOURCE

extern "C" void solve(
    const unsigned short* t, const float* inverses, float* rest, float* x, int* flags, int n, int blocks, int width,
    int upper, long long row, long long column, long long next_inverse, long long inverse_row
) {
    std::fill(std::begin(room), std::end(room), float4{NAN, NAN, NAN, NAN});
    run_together(THREADS, [=] {
        sweep(t, inverses, rest, x, flags, n, blocks, width, upper, row, column, next_inverse, inverse_row);
    });
}
