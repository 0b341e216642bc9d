// A (x + x_low) for many vectors, or b minus it, in twice the precision of double, on matrix units.
//
// Numbers are cut as K. Ozaki, T. Ogita, S. Oishi and S. M. Rump do ("Error-free transformations of matrix
// multiplication by using fast routines of matrix multiplication and its applications", Numer. Algorithms 59, 2012),
// but while they are in registers, and every CHUNK columns by themselves: relative to the largest number of a row
// there, and of a vector. With 24 bits in a first slice and as many in a second one,
//
//     a x = a1 x1 + (a1 x2 + a2 x1) + (a x3 + (a - a1) x2 + a3 x1),    a = a1 + a2 + a3, x = x1 + x2 + x3.
//
// Of a chunk, the first two sums are of integers of at most 53 bits (times a power of two), and so without rounding
// errors whatever the order in which a unit adds; those of the third are 2^-53 of 2^-47 of the largest product. Sums of
// chunks are added as pairs of numbers.
//
// TILES, of eight vectors each, for which a number is read and cut once, is defined by whoever compiles it.

#include "pairs.cuh"
#include "doubled.cuh"

#define CHUNK 32  // columns that are cut at the same places
#define STEPS 4   // that they take, of eight columns
#define ROWS 16   // of a warp
#define WARPS (THREADS / 32)
#define ALL 0xffffffffu

struct Two {
    double first, second;
};

#ifdef __CUDACC__
// Eight more columns of sums of 16 rows and eight vectors. Of rows and columns 4 apart, eight and four threads have one.
__device__ __forceinline__ void multiply_add(double (&sums)[4], const double (&a)[4], Two x) {
    asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+d"(sums[0]), "+d"(sums[1]), "+d"(sums[2]), "+d"(sums[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(x.first), "d"(x.second));
}
#endif

// A power of two that is more than half as large: the exponent alone.
__device__ __forceinline__ double power_of(double largest) {
    return __longlong_as_double(__double_as_longlong(largest) & 0x7ffLL << 52);
}

__device__ __forceinline__ double inverse_power_of(double size) {
    return __longlong_as_double((0x7feLL << 52) - (__double_as_longlong(size) & 0x7ffLL << 52));
}

// The largest of four threads beside each other.
__device__ __forceinline__ double largest_of_four(double x) {
    x = fmax(x, __shfl_xor_sync(ALL, x, 1));
    return fmax(x, __shfl_xor_sync(ALL, x, 2));
}

// Where to cut: a sum with these numbers rounds to multiples of 2^-23 and 2^-47 times the power.
struct Anchors {
    double first, second;

    __device__ explicit Anchors(double largest) {
        const double power = power_of(largest);
        first = power * 1.5 * (1LL << 29), second = power * 1.5 * (1LL << 5);
    }
};

__device__ __forceinline__ double rounded(double x, double anchor) { return (x + anchor) - anchor; }

__device__ __forceinline__ long long chunks_of(const Task& task) { return (max(task.n, 1LL) + CHUNK - 1) / CHUNK; }

// Vectors in slices, as warps need them: of each chunk, step, slice and tile the two numbers of each thread.
extern "C" __global__ void __launch_bounds__(THREADS) cut_vectors(
    const Task task, Two* slices, const double* columns
) {
    const long long groups = (task.k + 8 * TILES - 1) / (8 * TILES), tiles = groups * TILES, chunks = chunks_of(task);
    const long long warp = blockIdx.x * static_cast<long long>(WARPS) + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const long long tile = warp % tiles, chunk = warp / tiles % chunks, member = warp / tiles / chunks;
    const long long vector = tile * 8 + lane / 4;
    const bool needed = member * task.k < task.size / task.m, there = needed && vector < task.k;
    double x[2 * STEPS], low[2 * STEPS], largest = 0.0;
#pragma unroll
    for (int e = 0; e < 2 * STEPS; ++e) {
        const long long j = chunk * CHUNK + 4 * e + lane % 4;
        x[e] = low[e] = 0.0;
        if (there && j < task.n) {
            const double scale = columns ? power_of(columns[member * task.n + j]) : 1.0;
            x[e] = column_of(task.x, member, vector)[j * task.x.row] * scale;
            if (task.low.at) low[e] = column_of(task.low, member, vector)[j * task.low.row] * scale;
        }
        largest = fmax(largest, fabs(x[e]));
    }
    const Anchors at(largest_of_four(largest));
    if (!needed) return;
    Two* const here = slices + ((member * groups + tile / TILES) * chunks + chunk) * STEPS * 3 * TILES * 32;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        double cut[2][3];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const double all = x[2 * step + half];
            cut[half][0] = rounded(all, at.first);
            const double rest = all - cut[half][0];
            cut[half][1] = rounded(rest, at.second);
            cut[half][2] = (rest - cut[half][1]) + low[2 * step + half];
        }
#pragma unroll
        for (int slice = 0; slice < 3; ++slice)
            here[((step * 3 + slice) * TILES + tile % TILES) * 32 + lane] = Two{cut[0][slice], cut[1][slice]};
    }
}

// Numbers of a chunk that a thread has: of two rows in every fourth column.
struct Numbers {
    double of[2][2 * STEPS];

    __device__ __forceinline__ void load(
        const Task& task, const double* const (&rows)[2], const double* columns, long long from, long long last
    ) {
#pragma unroll
        for (int e = 0; e < 2 * STEPS; ++e) {
            const long long j = from + 4 * e + threadIdx.x % 4;
            const double scale = columns && j < last ? inverse_power_of(columns[j]) : 1.0;
#pragma unroll
            for (int r = 0; r < 2; ++r) of[r][e] = j < last ? rows[r][j * task.a.column] * scale : 0.0;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) sliced_product(
    const Task task, const Two* slices, const double* columns
) {
    const int lane = threadIdx.x % 32;
    const Place place(task, WARPS * ROWS, 8 * TILES);
    const long long top = place.block + threadIdx.x / 32 * ROWS + lane / 4;
    if (columns) columns += place.member * task.n;
    const double* rows[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
        rows[r] = task.a.at + place.member * task.a.batch + min(top + 8 * r, task.m - 1) * task.a.row;
    const long long groups = (task.k + 8 * TILES - 1) / (8 * TILES), group = place.vector / (8 * TILES);
    const Two* x = slices + ((place.member * groups + group) * chunks_of(task) + place.first / CHUNK) * STEPS * 3 * TILES * 32 + lane;
    Pair found[TILES][4] = {};
    Numbers next;
    next.load(task, rows, columns, place.first, place.last);
#pragma unroll 1
    for (long long from = place.first; from < place.last; from += CHUNK) {
        const Numbers now = next;
        if (from + CHUNK < place.last) next.load(task, rows, columns, from + CHUNK, place.last);
        double largest[2] = {0.0, 0.0};
#pragma unroll
        for (int e = 0; e < 2 * STEPS; ++e)
#pragma unroll
            for (int r = 0; r < 2; ++r) largest[r] = fmax(largest[r], fabs(now.of[r][e]));
        const Anchors at[2] = {Anchors(largest_of_four(largest[0])), Anchors(largest_of_four(largest[1]))};
        double sums[3][TILES][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; ++step, x += 3 * TILES * 32) {
            double all[4], first[4], second[4], rest[4], third[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                all[i] = now.of[i % 2][2 * step + i / 2];
                first[i] = rounded(all[i], at[i % 2].first);
                rest[i] = all[i] - first[i];
                second[i] = rounded(rest[i], at[i % 2].second);
                third[i] = rest[i] - second[i];
            }
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const Two x1 = x[tile * 32], x2 = x[(TILES + tile) * 32], x3 = x[(2 * TILES + tile) * 32];
                multiply_add(sums[0][tile], first, x1);
                multiply_add(sums[1][tile], first, x2);
                multiply_add(sums[2][tile], all, x3);
                multiply_add(sums[1][tile], second, x1);
                multiply_add(sums[2][tile], rest, x2);
                multiply_add(sums[2][tile], third, x1);
            }
        }
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                // The first sum is a multiple of the last bit of the second: three operations find the error.
                const double sum = sums[0][tile][i] + sums[1][tile][i];
                const double error = sums[1][tile][i] - (sum - sums[0][tile][i]);
                found[tile][i] = found[tile][i] + Pair{sum, error + sums[2][tile][i]};
            }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            store(task, place, found[tile][i], top + i / 2 * 8, tile * 8 + lane % 4 * 2 + i % 2);
}
