// A (x + x_low), or b minus it, in twice the precision of double: sums, and beside them sums of their rounding errors.
//
// Memory decides for one or two vectors: each element of A is read once for up to four of them, and there are some
// twelve operations in double precision for each element and vector. Threads beside each other read elements beside
// each other. Where rows of the result are few, columns are dealt out as well, in pieces; what is summed up of those,
// and in which order, does not depend on what is ready first.

#include "pairs.cuh"

#define THREADS 128
#define ROWS 2  // that a thread adds up, where rows are contiguous
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

__device__ __forceinline__ void store(const Task& task, Pair sum, long long part, long long column, long long i) {
    if (task.pieces == 1) {
        finish(task, task.sums, sum, column, i);
    } else {
        double* const high = task.sums + part * task.size + column * task.m + i;
        high[0] = sum.high, high[task.pieces * task.size] = sum.low;
    }
}

// Rows, columns and vectors of this thread block.
struct Place {
    long long member, block, part, vector, first, last;

    __device__ Place(const Task& task, int vectors, int rows) {
        const long long groups = (task.k + vectors - 1) / vectors, blocks = (task.m + rows - 1) / rows;
        long long rest = blockIdx.x;  // those with the same part of A follow each other, so that it is read once
        vector = rest % groups * vectors, rest /= groups;
        part = rest % task.pieces, rest /= task.pieces;
        block = rest % blocks * rows, member = rest / blocks;
        first = part * task.piece, last = min(first + task.piece, task.n);
    }
};

// Rows are contiguous, and some lanes of a warp have some of them.
template <int VECTORS>
__device__ __forceinline__ void along_rows(const Task& task, int lanes) {
    const int rows = THREADS / lanes * ROWS, lane = threadIdx.x % lanes;
    const Place place(task, VECTORS, rows);
    const long long top = place.block + threadIdx.x / lanes * ROWS;
    const double *a[ROWS], *x[VECTORS], *low[VECTORS];
    Pair sums[ROWS][VECTORS] = {};
    const long long vectors = task.k - place.vector;  // or more
#pragma unroll
    for (int r = 0; r < ROWS; ++r) a[r] = task.a.at + place.member * task.a.batch + min(top + r, task.m - 1) * task.a.row;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const long long vector = min(place.vector + v, task.k - 1);
        x[v] = column_of(task.x, place.member, vector);
        low[v] = task.low.at ? column_of(task.low, place.member, vector) : nullptr;
    }
#pragma unroll (VECTORS == 1 ? 4 : 1)
    for (long long j = place.first + lane; j < place.last; j += lanes) {
        double element[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) element[r] = a[r][j * task.a.column];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (v >= vectors) break;
            const double factor = x[v][j * task.x.row], rest = task.low.at ? low[v][j * task.low.row] : 0.0;
#pragma unroll
            for (int r = 0; r < ROWS; ++r) add_product(sums[r][v], element[r], factor, rest);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            Pair sum = sums[r][v];
#pragma unroll 1
            for (int distance = lanes / 2; distance > 0; distance /= 2)
                sum = sum + Pair{__shfl_xor_sync(ALL, sum.high, distance), __shfl_xor_sync(ALL, sum.low, distance)};
            const long long i = top + r, vector = place.vector + v;
            if (lane == 0 && i < task.m && vector < task.k) store(task, sum, place.part, place.member * task.k + vector, i);
        }
}

// Columns are contiguous, a thread has a row, and some threads have the same one.
template <int VECTORS>
__device__ __forceinline__ void along_columns(const Task& task, int rows) {
    __shared__ Pair of_groups[THREADS];
    const int group = threadIdx.x / rows, groups = THREADS / rows;
    const Place place(task, VECTORS, rows);
    const long long i = place.block + threadIdx.x % rows;
    const double* const a = task.a.at + place.member * task.a.batch + min(i, task.m - 1) * task.a.row;
    const double *x[VECTORS], *low[VECTORS];
    Pair sums[VECTORS] = {};
    const long long vectors = task.k - place.vector;  // or more
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const long long vector = min(place.vector + v, task.k - 1);
        x[v] = column_of(task.x, place.member, vector);
        low[v] = task.low.at ? column_of(task.low, place.member, vector) : nullptr;
    }
#pragma unroll (VECTORS == 1 ? 8 : 2)
    for (long long j = place.first + group; j < place.last; j += groups) {
        const double element = a[j * task.a.column];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
            if (v < vectors)
                add_product(sums[v], element, x[v][j * task.x.row], task.low.at ? low[v][j * task.low.row] : 0.0);
    }
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        Pair sum = sums[v];
        if (groups > 1) {
            __syncthreads();
            of_groups[threadIdx.x] = sum;
            __syncthreads();
#pragma unroll 1
            for (int other = 1; other < groups; ++other) sum = sum + of_groups[(threadIdx.x + other * rows) % THREADS];
        }
        if (group == 0 && i < task.m && place.vector + v < task.k)
            store(task, sum, place.part, place.member * task.k + place.vector + v, i);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) row_product(const Task task, int lanes) { along_rows<1>(task, lanes); }
extern "C" __global__ void __launch_bounds__(THREADS) row_products(const Task task, int lanes) { along_rows<4>(task, lanes); }
extern "C" __global__ void __launch_bounds__(THREADS) column_product(const Task task, int rows) { along_columns<1>(task, rows); }
extern "C" __global__ void __launch_bounds__(THREADS) column_products(const Task task, int rows) { along_columns<4>(task, rows); }

// Pieces are added, one after the other.
extern "C" __global__ void __launch_bounds__(THREADS) sum_of_pieces(const Task task, double* result) {
    const long long place = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
    if (place >= task.size) return;
    Pair total{0.0, 0.0};
#pragma unroll 4
    for (long long part = 0; part < task.pieces; ++part) {
        const double* const high = task.sums + part * task.size + place;
        total = total + Pair{high[0], high[task.pieces * task.size]};
    }
    finish(task, result, total, place / task.m, place % task.m);
}
