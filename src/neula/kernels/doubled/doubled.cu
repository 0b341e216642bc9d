// A (x + x_low), or b minus it, in twice the precision of double: sums, and beside them sums of their rounding errors.
//
// Memory decides for one or two vectors: each element of A is read once for up to four of them, and there are some
// twelve operations in double precision for each element and vector. Threads beside each other read elements beside
// each other. Where rows of the result are few, columns are dealt out as well, in pieces; what is summed up of those,
// and in which order, does not depend on what is ready first.
//
// VECTORS, for how many at most an element is read once, is defined by whoever compiles it.

#include "pairs.cuh"
#include "doubled.cuh"

#define ROWS 4    // that a thread adds up, where they are contiguous
#define ACROSS 2  // and where columns are
constexpr int STEPS = 4 / VECTORS;  // loads of a row that are under way at a time
#define ALL 0xffffffffu

// Sums of a thread over some rows, `apart` from one another from `top` on, in every `step`-th column from `from` on.
template <int SOME>
__device__ __forceinline__ void add_products(
    const Task& task, const Place& place, long long top, int apart, int from, int step, Pair (&sums)[SOME][VECTORS]
) {
    const double *a[SOME], *x[VECTORS], *low[VECTORS];
#pragma unroll
    for (int r = 0; r < SOME; ++r)
        a[r] = task.a.at + place.member * task.a.batch + min(top + r * apart, task.m - 1) * task.a.row;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const long long vector = min(place.vector + v, task.k - 1);
        x[v] = column_of(task.x, place.member, vector);
        low[v] = task.low.at ? column_of(task.low, place.member, vector) : nullptr;
    }
#pragma unroll (STEPS)
    for (long long j = place.first + from; j < place.last; j += step) {
        double element[SOME], factor[VECTORS], rest[VECTORS];
#pragma unroll
        for (int r = 0; r < SOME; ++r) element[r] = a[r][j * task.a.column];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            factor[v] = x[v][j * task.x.row];
            rest[v] = task.low.at ? low[v][j * task.low.row] : 0.0;
        }
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
#pragma unroll
            for (int r = 0; r < SOME; ++r) add_product(sums[r][v], element[r], factor[v], rest[v]);
    }
}

// Rows are contiguous, and some threads beside each other have some of them.
extern "C" __global__ void __launch_bounds__(THREADS) row_product(const Task task, int lanes) {
    __shared__ Pair parts[THREADS / 8][ROWS * VECTORS];
    const int lane = threadIdx.x % lanes;
    const Place place(task, THREADS / lanes * ROWS, VECTORS);
    const long long top = place.block + threadIdx.x / lanes * ROWS;
    Pair sums[ROWS][VECTORS] = {};
    add_products(task, place, top, 1, lane, lanes, sums);
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            Pair sum = sums[r][v];
#pragma unroll 1
            for (int distance = lanes / 2; distance > 0; distance /= 2)
                sum = sum + Pair{__shfl_xor_sync(ALL, sum.high, distance), __shfl_xor_sync(ALL, sum.low, distance)};
            if (lane == 0) parts[threadIdx.x / lanes][r * VECTORS + v] = sum;
        }
    __syncthreads();
#pragma unroll 1
    for (int found = threadIdx.x; found < THREADS / lanes * ROWS * VECTORS; found += THREADS)
        store(task, place, parts[found / (ROWS * VECTORS)][found % (ROWS * VECTORS)], place.block + found / VECTORS, found % VECTORS);
}

// Columns are contiguous, a thread has some rows, and some threads have the same ones.
extern "C" __global__ void __launch_bounds__(THREADS) column_product(const Task task, int height) {
    __shared__ Pair parts[ACROSS * VECTORS][THREADS];
    const int group = threadIdx.x / height, groups = THREADS / height;
    const Place place(task, height * ACROSS, VECTORS);
    const long long top = place.block + threadIdx.x % height;
    Pair sums[ACROSS][VECTORS] = {};
    add_products(task, place, top, height, group, groups, sums);
#pragma unroll
    for (int r = 0; r < ACROSS; ++r)
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) parts[r * VECTORS + v][threadIdx.x] = sums[r][v];
    __syncthreads();
#pragma unroll 1
    for (int found = threadIdx.x; found < ACROSS * VECTORS * height; found += THREADS) {
        const int which = found / height, i = found % height;
        Pair sum = parts[which][i];
#pragma unroll 1
        for (int other = 1; other < groups; ++other) sum = sum + parts[which][i + other * height];
        store(task, place, sum, place.block + i + which / VECTORS * height, which % VECTORS);
    }
}
