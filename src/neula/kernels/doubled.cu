// A (x + x_low), or b minus it, in twice the precision of double: sums, and beside them sums of their rounding errors.
//
// Memory decides for one or two vectors: each element of A is read once for up to four of them, and there are some
// twelve operations in double precision for each element and vector. Threads beside each other read elements beside
// each other. Where rows of the result are few, columns are dealt out as well, in pieces; what is summed up of those,
// and in which order, does not depend on what is ready first.
//
// VECTORS, for how many at most an element is read once, is defined by whoever compiles it.

#include "pairs.cuh"

#define THREADS 128
#define ROWS 4    // that a thread adds up, where they are contiguous
#define ACROSS 2  // and where columns are
constexpr int STEPS = 4 / VECTORS;  // loads of a row that are under way at a time
#define ELEMENTS 16  // of which a thread block adds the pieces
#define ALL 0xffffffffu

struct Matrix {
    const double* at;
    long long batch, row, column;
};

// What there is to compute, and where it is.
struct Task {
    Matrix a, x, low, b;  // low.at and b.at may be null
    double* sums;         // pieces of the result, (2, pieces, batch * k, m); of one piece the result itself
    long long m, n, k, size, pieces, piece;
};

__device__ __forceinline__ const double* column_of(const Matrix& x, long long member, long long vector) {
    return x.at + member * x.batch + vector * x.column;
}

// The result as it is returned: from b, if that is given, and the smaller part no more than a rounding error.
__device__ __forceinline__ void finish(const Task& task, double* high, Pair sum, long long column, long long i) {
    if (task.b.at) {
        const Pair rest = two_sum(column_of(task.b, column / task.k, column % task.k)[i * task.b.row], -sum.high);
        sum = {rest.high, rest.low - sum.low};
    }
    sum = two_sum(sum.high, sum.low);
    high[column * task.m + i] = sum.high;
    high[task.size + column * task.m + i] = sum.low;
}

// Rows, columns and vectors of this thread block.
struct Place {
    long long member, block, part, vector, first, last;

    __device__ Place(const Task& task, int rows) {
        const long long groups = (task.k + VECTORS - 1) / VECTORS, blocks = (task.m + rows - 1) / rows;
        long long rest = blockIdx.x;  // those with the same part of A follow each other, so that it is read once
        vector = rest % groups * VECTORS, rest /= groups;
        part = rest % task.pieces, rest /= task.pieces;
        block = rest % blocks * rows, member = rest / blocks;
        first = part * task.piece, last = min(first + task.piece, task.n);
    }
};

// What has been found of a row and a vector, if there are these.
__device__ __forceinline__ void store(const Task& task, const Place& place, Pair sum, long long i, int v) {
    const long long vector = place.vector + v, column = place.member * task.k + vector;
    if (i >= task.m || vector >= task.k) return;
    if (task.pieces == 1) {
        finish(task, task.sums, sum, column, i);
    } else {
        double* const high = task.sums + place.part * task.size + column * task.m + i;
        high[0] = sum.high, high[task.pieces * task.size] = sum.low;
    }
}

// What a thread finds of some rows, `apart` from one another from `top` on, in every `step`-th column from `from` on.
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
    const Place place(task, THREADS / lanes * ROWS);
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
    const Place place(task, height * ACROSS);
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

// Pieces are added, always in the same order: some threads beside each other have some of one element each.
extern "C" __global__ void __launch_bounds__(THREADS) sum_of_pieces(const Task task, double* result) {
    __shared__ Pair of_groups[THREADS];
    const int groups = THREADS / ELEMENTS, group = threadIdx.x / ELEMENTS;
    const long long place = blockIdx.x * static_cast<long long>(ELEMENTS) + threadIdx.x % ELEMENTS;
    Pair sum{0.0, 0.0};
#pragma unroll 4
    for (long long part = group; part < task.pieces; part += groups) {
        const double* const high = task.sums + part * task.size + min(place, task.size - 1);
        sum = sum + Pair{high[0], high[task.pieces * task.size]};
    }
    of_groups[threadIdx.x] = sum;
    __syncthreads();
    if (group || place >= task.size) return;
#pragma unroll 1
    for (int other = threadIdx.x + ELEMENTS; other < THREADS; other += ELEMENTS) sum = sum + of_groups[other];
    finish(task, result, sum, place / task.m, place % task.m);
}
