// What threads of a warp tell one another, and arithmetic that a GPU has functions for, on a CPU.

#pragma once

#include "cuda_on_host.h"

static std::vector<double> lanes;  // as many as there are threads

[[maybe_unused]] static double __shfl_xor_sync(unsigned, double x, int distance) {
    lanes[threadIdx.x] = x;
    __syncwarp();
    const double other = lanes[threadIdx.x ^ distance];
    __syncwarp();
    return other;
}

// From a lane of the same part of the warp, which has so many lanes.
[[maybe_unused]] static double __shfl_sync(unsigned, double x, int lane, int width) {
    lanes[threadIdx.x] = x;
    __syncwarp();
    const double other = lanes[threadIdx.x / width * width + lane];
    __syncwarp();
    return other;
}

[[maybe_unused]] static int __any_sync(unsigned, int x) {
    lanes[threadIdx.x] = x;
    __syncwarp();
    const auto first = lanes.begin() + threadIdx.x / 32 * 32;
    const int some = std::any_of(first, first + 32, [](double y) { return y != 0; });
    __syncwarp();
    return some;
}

[[maybe_unused]] static __attribute__((noinline)) double __dmul_rn(double x, double y) { return x * y; }

[[maybe_unused]] static double __longlong_as_double(long long x) {
    double same;
    std::memcpy(&same, &x, sizeof same);
    return same;
}
