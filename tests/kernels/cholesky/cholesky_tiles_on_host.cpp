// The kernel of Cholesky factors by tiles on a CPU: one thread block does all tasks, in the order in which they are
// handed out.

#include "cuda_on_host.h"

constexpr int MOST = 1024;

#ifndef REAL
#define REAL double
#endif

static REAL lanes[2][MOST];
static REAL shared[BYTES / sizeof(REAL)];

using std::fma;
using std::fmaxf;
using std::max;
using std::min;

static void copy_16(REAL* place, const REAL* from) { std::memcpy(place, from, 16); }
static void commit() {}
template <int N>
static void wait_for_all_but() {}
static int seen_at(const int* place) { return *place; }
static void show(int* place, int value) { *place = value; }
static void rest() { std::abort(); }  // the only thread block would wait for itself
static void __threadfence() {}

static int atomicAdd(int* place, int value) {
    const int before = *place;
    *place += value;
    return before;
}

static std::unique_ptr<Barrier> of_chain, before_chain;
static void barrier_of_chain() { of_chain->arrive_and_wait(); }
static void barrier_before_chain() { before_chain->arrive_and_wait(); }

static REAL reciprocal_root(REAL x) { return 1 / std::sqrt(x); }

static REAL __shfl_sync(unsigned, REAL x, int lane) {
    __syncwarp();
    lanes[0][threadIdx.x] = x;
    __syncwarp();
    const REAL found = lanes[0][threadIdx.x / 32 * 32 + lane];
    __syncwarp();
    return found;
}

// A of 8 x 4, a lane for each element; B of 4 x 8, by columns; C of 8 x 8, a lane for two that are side by side.
static void multiply_quarter(REAL* c, REAL a, REAL b) {
    const int first = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
    __syncwarp();
    lanes[0][threadIdx.x] = a, lanes[1][threadIdx.x] = b;
    __syncwarp();
    for (int e = 0; e < 2; ++e)
        for (int k = 0; k < 4; ++k)
            c[e] = fma(lanes[0][first + lane / 4 * 4 + k], lanes[1][first + (lane % 4 * 2 + e) * 4 + k], c[e]);
    __syncwarp();
}

static void multiply(REAL (&c)[4], const REAL (&a)[4], const REAL (&b)[2]) {
    for (int part = 0; part < 4; ++part) multiply_quarter(c + part % 2 * 2, a[part], b[part / 2]);
}

static void multiply_soon(REAL (&c)[4], const REAL (&a)[4], const REAL (&b)[2]) { multiply(c, a, b); }

#include SOURCE

extern "C" void factorize(
    const REAL* a, REAL* l, REAL* inverses, REAL* diagonal, REAL* unsolved, int* state, long long next, long long a_row,
    long long a_column, int n, int tiles, int per_block, int count, int together
) {
    std::fill(std::begin(shared), std::end(shared), NAN);
    of_chain = std::make_unique<Barrier>(CHAIN);
    before_chain = std::make_unique<Barrier>(FIRST);
    run_together(THREADS, [=] {
        cholesky_tiles(
            a, l, inverses, diagonal, unsolved, state, next, a_row, a_column, n, tiles, per_block, count, together
        );
    });
}
