// Code shared by kernels of matrices of up to 64 columns: one thread block for each matrix, 16 x 16 threads of which
// each has elements 16 apart in both directions, in double precision, in shared memory.

#define COLUMNS 64
#define THREADS 256
#define SIDE 16
#define TILES (COLUMNS / SIDE)
#define PITCH (COLUMNS + 1)
#define ALL 0xffffffffu

extern __shared__ double memory[];

// Layout of shared memory, in double precision.
enum Common {
    INVERSE = 0,  // R^-T
    PIVOTS = INVERSE + COLUMNS * PITCH,
    WARPS = PIVOTS + COLUMNS,
    REST = WARPS + THREADS / 32,
};

// These are NaN if one of the numbers is.
__device__ __forceinline__ double most_of(double a, double b) { return a >= b || a != a ? a : b; }
__device__ __forceinline__ double least_of(double a, double b) { return a <= b || a != a ? a : b; }

// The last bit does not matter where it is used, and a division would be what other threads wait for.
__device__ __forceinline__ double reciprocal_of(double x) {
#ifdef __CUDA_ARCH__
    double y;
    asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));
    y = fma(y, fma(-x, y, 1.0), y);
    return fma(y, fma(-x, y, 1.0), y);
#else
    return 1.0 / x;
#endif
}

// The sum over a warp, or the largest.
__device__ __noinline__ double over_lanes(double x, bool largest) {
#pragma unroll 1
    for (int distance = 16; distance > 0; distance /= 2) {
        const double other = __shfl_xor_sync(ALL, x, distance);
        x = largest ? most_of(x, other) : x + other;
    }
    return x;
}

// The same over all threads.
__device__ __noinline__ double over_threads(double x, bool largest) {
    x = over_lanes(x, largest);
    if (threadIdx.x % 32 == 0) memory[WARPS + threadIdx.x / 32] = x;
    __syncthreads();
    x = memory[WARPS];
#pragma unroll 1
    for (int warp = 1; warp < THREADS / 32; ++warp) {
        const double other = memory[WARPS + warp];
        x = largest ? most_of(x, other) : x + other;
    }
    __syncthreads();
    return x;
}

// Destination of a matrix product.
enum Wanted {
    STORED,      // from some place on, its rows PITCH apart or less
    SIZE_OF_IT,  // ||D P D||_F of a symmetric one, D being at some place
    ERROR,       // ||I - P||_F of a symmetric one
};

// A matrix in shared memory: its address and strides.
struct View {
    int at, row, column;
};

// Up to 64 rows and columns of X Y, with so many terms.
__device__ __noinline__ double product(int rows, int columns, int terms, View x, View y, Wanted wanted, int place, int pitch) {
    const int down = threadIdx.x / SIDE, right = threadIdx.x % SIDE;
    const bool symmetric = wanted != STORED;
    const double* left = memory + x.at + down * x.row;
    const double* beside = memory + y.at + right * y.column;
    double sums[TILES][TILES] = {};
#pragma unroll 1
    for (int k = 0; k < terms; ++k, left += x.column, beside += y.row) {
        double along[TILES], across[TILES];
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            if (SIDE * t < rows) along[t] = left[SIDE * t * x.row];
            if (SIDE * t < columns) across[t] = beside[SIDE * t * y.column];
        }
#pragma unroll
        for (int s = 0; s < TILES; ++s)
            if (SIDE * s < rows) {
#pragma unroll
                for (int t = 0; t < TILES; ++t)
                    if (SIDE * t < columns && (t <= s || !symmetric)) sums[s][t] = fma(along[s], across[t], sums[s][t]);
            }
    }
    __syncthreads();
    double square = 0.0;
#pragma unroll
    for (int s = 0; s < TILES; ++s)
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            const int i = down + SIDE * s, j = right + SIDE * t;
            if (i >= rows || j >= columns) continue;
            const double found = sums[s][t];
            if (!symmetric) {
                memory[place + i * pitch + j] = found;
            } else if (t <= s) {
                const double element = wanted == ERROR ? (i == j) - found : found * memory[place + i] * memory[place + j];
                square = fma(s == t ? element : 2.0 * element, element, square);
            }
        }
    if (symmetric) return sqrt(over_threads(square, false));
    __syncthreads();
    return 0.0;
}

// R^-T of the Cholesky factor of a matrix that is at some place, whose upper half is read: what elimination makes of an identity.
// Columns that are eliminated make room for those of the inverse.
//
// Its rows, each divided by the root of its pivot, are those of R from the diagonal on: they are at some place, all of
// them, or two in turn.
__device__ __noinline__ void invert(int n, int matrix, int rows, bool all) {
    const int down = threadIdx.x / SIDE, right = threadIdx.x % SIDE;
    double g[TILES][TILES];
#pragma unroll
    for (int s = 0; s < TILES; ++s)
#pragma unroll
        for (int t = 0; t < TILES; ++t) g[s][t] = memory[matrix + (down + SIDE * s) * PITCH + right + SIDE * t];
#pragma unroll 1
    for (int step = 0; step < n; ++step) {
        double* const row = memory + rows + (all ? step : step % 2) * PITCH;
#pragma unroll
        for (int s = 0; s < TILES; ++s)
            if (step == down + SIDE * s) {
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    row[right + SIDE * t] = g[s][t];
                    if (step == right + SIDE * t) memory[PIVOTS + step] = g[s][t];
                }
            }
        if (step % SIDE == down && step % SIDE == right) row[COLUMNS] = reciprocal_of(memory[PIVOTS + step]);
        __syncthreads();
        const double reciprocal = row[COLUMNS];
#pragma unroll
        for (int s = 0; s < TILES; ++s)
            if (SIDE * s < n && step < SIDE * (s + 1)) {
                const int i = down + SIDE * s;
                const double factor = -row[i] * reciprocal;
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    const double rest = fma(factor, row[right + SIDE * t], g[s][t]);
                    if (i > step) g[s][t] = right + SIDE * t == step ? factor : rest;
                }
            }
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < TILES; ++s) {
        const int i = down + SIDE * s;
        if (i >= n) continue;
        const double scale = 1.0 / sqrt(memory[PIVOTS + i]);
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            const int j = right + SIDE * t;
            memory[INVERSE + i * PITCH + j] = (i > j ? g[s][t] : i == j ? 1.0 : 0.0) * scale;
        }
    }
    __syncthreads();
}
