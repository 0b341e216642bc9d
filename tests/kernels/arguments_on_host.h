// Kernels on a CPU that are launched with their arguments as a GPU is given them, eight bytes or more for each.

#pragma once

#include <tuple>

#include "warps_on_host.h"

#define __shared__ static

using std::max;
using std::min;

[[maybe_unused]] static Index blockIdx, blockDim;

template <class T>
static std::remove_const_t<T> taken(const char*& place) {
    std::remove_const_t<T> x;
    std::memcpy(&x, place, sizeof x);
    place += (sizeof x + 7) / 8 * 8;
    return x;
}

template <class... Arguments>
static void launch(void (*kernel)(Arguments...), int blocks, int threads, const char* place) {
    const std::tuple<std::remove_const_t<Arguments>...> arguments{taken<Arguments>(place)...};
    lanes.assign(threads, NAN);
    blockDim.x = threads;
    for (int block = 0; block < blocks; ++block) {
        blockIdx.x = block;
        run_together(threads, [&] { std::apply(kernel, arguments); });
    }
}

#define LAUNCHED(kernel) \
    extern "C" void launch_##kernel(int blocks, int threads, const char* place) { launch(kernel, blocks, threads, place); }
