// R and R^-1 of Gram matrices of up to 32 columns in double precision, a thread block for each.
//
// G = L D L^T and [G; I] = [L D; R^-1] L^T but for scales: the operations on columns that turn G into L D turn the
// identity below it into R^-1. A lane of the first warp has a row of each in registers, half of the columns at a time
// in the same ones, so that the code is short: what takes time are 32 reciprocals, one after the other, and to fetch
// instructions. The other warp helps to add up the parts that G comes in, and to write.

#define SIZE 32
#define HALF 16
#define PITCH 33  // rows one below the other are in different banks
#define THREADS 64
#define BLOCKS 5  // for which a multiprocessor is to have room
#define ALL 0xffffffffu
#define LOST 5.6843418860808015e-14  // 2^-44 of a diagonal element: what a pivot may owe to rounding errors
#define ENOUGH 0.015625              // 2^-6: a first pass whose pivots are no smaller leaves nothing to a second one

// Zero of zero; of what is not in the range of normal numbers something that is not a number.
__device__ __forceinline__ double reciprocal(double x) {
#ifdef __CUDA_ARCH__
    double y;
    asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));
#pragma unroll
    for (int step = 0; step < 2; ++step) y = fma(y, fma(-x, y, 1.0), y);
    return x == 0.0 ? 0.0 : y;
#else
    return x == 0.0 ? 0.0 : 1.0 / x;
#endif
}

// R and its inverse by one warp, in the place of G and of `inverse`; returns whether the pivots are large enough. A
// pivot that is less than the smallest is taken to be that, and what is below it to be zero. What is not a number
// stays so, and the root of a column that vanishes is zero.
__device__ __forceinline__ bool eliminate(double* gram, double* inverse, double* multipliers, double* roots) {
    const int lane = threadIdx.x % 32;
    const double diagonal = gram[lane * PITCH + lane], least = LOST * diagonal;
    double a[HALF], b[HALF], x[HALF], y[HALF];  // halves of a row of L D, and of one of R^-1
#pragma unroll
    for (int j = 0; j < HALF; ++j) {
        a[j] = gram[lane * PITCH + j], b[j] = gram[lane * PITCH + HALF + j];
        x[j] = j == lane ? 1.0 : 0.0, y[j] = HALF + j == lane ? 1.0 : 0.0;
    }
    __syncwarp();
    double mine = 0.0;  // pivot of column `lane`
    unsigned lost = 0;
#pragma unroll 1
    for (int first = 0; first < SIZE; first += HALF) {
#pragma unroll
        for (int c = 0; c < HALF; ++c) {
            const int k = first + c;
            const double found = __shfl_sync(ALL, a[c], k), bound = __shfl_sync(ALL, least, k);
            const bool gone = found < bound;
            const double pivot = gone ? bound : found;
            lost |= gone ? 1u << k : 0u;
            mine = lane == k ? pivot : mine;
            multipliers[c * SIZE + lane] = gone || lane <= k ? 0.0 : a[c] * reciprocal(pivot);
            __syncwarp();
#pragma unroll
            for (int j = c + 1; j < HALF; ++j) {
                const double multiplier = multipliers[c * SIZE + first + j];
                a[j] = fma(-a[c], multiplier, a[j]);
                x[j] = fma(-x[c], multiplier, x[j]);
            }
        }
        roots[lane] = mine == 0.0 ? 0.0 : 1.0 / sqrt(mine);
        __syncwarp();
#pragma unroll
        for (int c = 0; c < HALF; ++c) {
            const int k = first + c;
            const double below = lost >> k & 1 ? 0.0 : a[c];
            gram[k * PITCH + lane] = (lane > k ? below : lane == k ? mine : 0.0) * roots[k];
            inverse[lane * PITCH + k] = x[c] * roots[k];
        }
        if (first > 0) break;
#pragma unroll
        for (int c = 0; c < HALF; ++c)
#pragma unroll
            for (int j = 0; j < HALF; ++j) {
                const double multiplier = multipliers[c * SIZE + HALF + j];
                b[j] = fma(-a[c], multiplier, b[j]);
                y[j] = fma(-x[c], multiplier, y[j]);
            }
#pragma unroll
        for (int j = 0; j < HALF; ++j) a[j] = b[j], x[j] = y[j];
        __syncwarp();
    }
    return __all_sync(ALL, lost == 0 && mine >= ENOUGH * diagonal);
}

// The first pass: R and its inverse, and whether that is all. The second pass, where it is not: the product of both R,
// and the inverse of the second one. `r` is the result, rows of `kept` and `inverses` are contiguous.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) panel_factors(
    const double* parts, double* kept, double* inverses, int* done, double* r, int blocks, int n, int r_batch, int r_row,
    int r_column, int second
) {
    __shared__ double gram[SIZE * PITCH], inverse[SIZE * PITCH], multipliers[HALF * SIZE], roots[SIZE];
    __shared__ int enough;
    const int thread = threadIdx.x;
    const long long matrix = blockIdx.x;
    if (second && done[matrix]) return;
    kept += matrix * SIZE * SIZE, inverses += matrix * SIZE * SIZE, r += matrix * r_batch;
    parts += matrix * blocks * SIZE * SIZE;
    double sums[SIZE * SIZE / THREADS] = {};
#pragma unroll 2
    for (int block = 0; block < blocks; ++block)
#pragma unroll
        for (int e = 0; e < SIZE * SIZE / THREADS; ++e)
            sums[e] += parts[block * SIZE * SIZE + e * THREADS + thread];
#pragma unroll
    for (int e = 0; e < SIZE * SIZE / THREADS; ++e) {
        const int place = e * THREADS + thread;
        gram[place / SIZE * PITCH + place % SIZE] = sums[e];
    }
    __syncthreads();
    if (thread < 32) {
        const bool all = eliminate(gram, inverse, multipliers, roots);
        if (thread == 0) enough = all;
    }
    __syncthreads();
    if (!second && thread == 0) done[matrix] = enough;
#pragma unroll 1
    for (int place = thread; place < SIZE * SIZE; place += THREADS) {
        const int i = place / SIZE, j = place % SIZE;
        inverses[place] = inverse[i * PITCH + j];
        double x = gram[i * PITCH + j];
        if (second) {
            x = 0.0;
            for (int k = i; k <= j; ++k) x = fma(gram[i * PITCH + k], kept[k * SIZE + j], x);
        } else if (!enough) {
            kept[place] = x;
        }
        if ((second || enough) && i < n && j < n) r[i * r_row + j * r_column] = x;
    }
}
