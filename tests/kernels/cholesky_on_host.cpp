// The kernel of Cholesky factors on a CPU: a thread of the host for each of the GPU, far slower, the same steps.

#include <algorithm>
#include <barrier>
#include <cmath>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(threads)

struct float4 {
    float x, y, z, w;
};

struct Index {
    int x;
};

using Barrier = std::barrier<>;

static thread_local Index threadIdx;
static std::unique_ptr<Barrier> of_all, of_chain;
static std::vector<std::unique_ptr<Barrier>> of_warps;
static std::vector<float> lanes;

static void __syncthreads() { of_all->arrive_and_wait(); }
static void __syncwarp() { of_warps[threadIdx.x / 32]->arrive_and_wait(); }
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
    of_all = std::make_unique<Barrier>(THREADS);
    of_chain = std::make_unique<Barrier>(CHAIN);
    of_warps.clear();
    for (int i = 0; i < THREADS / 32; ++i) of_warps.push_back(std::make_unique<Barrier>(32));
    lanes.assign(THREADS, NAN);
    std::vector<std::thread> threads;
    for (int i = 0; i < THREADS; ++i)
        threads.emplace_back([=] {
            threadIdx.x = i;
            cholesky_inverse(gram, r, inverse, norms, n, row, column);
        });
    for (auto& thread : threads) thread.join();
}
