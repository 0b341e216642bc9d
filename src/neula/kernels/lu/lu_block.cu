// L and U of a block of 128 columns without interchanges, and the inverses of both, by one thread block.
//
// Elimination in [[A, I], [I, 0]] leaves [[L \ U, L^-1], [U^-1, ...]]. A step is a block of 16 columns and 16 rows.
// It computes 16 columns of [L; U^-1] and 16 rows of [U, L^-1], which leave for the caller's memory: rows
// of the one are done as those of the other begin, so one array has room for what is still to be done of both, U^-1
// above its diagonal blocks and L^-1 below them. Four warps follow the chain of pivots, with these rows and columns
// in registers, and each with the rows of the diagonal block as well, so that none waits for another. The other
// warps meanwhile subtract what the step before contributes to everything else, and write what it has computed.

#define BLOCK 16
#define WIDTH 128
#define BLOCKS (WIDTH / BLOCK)
#define PITCH 132  // four rows one below the other are in different banks
#define NARROW 20  // likewise, where rows have 16 numbers
#define THREADS 512
#define CHAIN 128  // threads along the chain: a warp for each two blocks of rows and of columns

#ifdef __CUDA_ARCH__
typedef unsigned short Low;

__device__ __forceinline__ Low rounded(float x) {
    Low y;
#ifdef BFLOAT16
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
#endif
    return y;
}

__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

extern __shared__ float4 shared[];

// Unfinished blocks; behind them the results of the last step: columns, rows, factors on the diagonal.
__device__ __forceinline__ float* at(int i, int j) {
    return reinterpret_cast<float*>(shared) + i * BLOCK * PITCH + j * BLOCK;
}
__device__ __forceinline__ float* columns_of_step() { return at(BLOCKS, 0); }
__device__ __forceinline__ float* rows_of_step() { return columns_of_step() + WIDTH * NARROW; }
__device__ __forceinline__ float* factors_of_step() { return rows_of_step() + BLOCK * PITCH; }

// Behind that, for each warp of the chain, a row of U and a column of L on their way.
__device__ __forceinline__ float* on_their_way() { return factors_of_step() + BLOCK * NARROW + threadIdx.x / 32 * 4 * BLOCK; }

__device__ __forceinline__ float4 load4(const float* place) { return *reinterpret_cast<const float4*>(place); }
__device__ __forceinline__ void store4(float* place, float4 x) { *reinterpret_cast<float4*>(place) = x; }

__device__ __forceinline__ float4 minus(float a, float4 b, float4 c) {
    return float4{fmaf(-a, b.x, c.x), fmaf(-a, b.y, c.y), fmaf(-a, b.z, c.z), fmaf(-a, b.w, c.w)};
}

// Block (i, j) without what a step contributes, by half a warp, with four rows and four columns for each thread.
__device__ __forceinline__ void subtract_block(int i, int j, int step) {
    const int row = threadIdx.x % 4, column = threadIdx.x % BLOCK / 4 * 4;
    const float* x = columns_of_step() + (i * BLOCK + row) * NARROW;
    const float* y = rows_of_step() + j * BLOCK + column;
    float* z = at(i, j) + row * PITCH + column;
    const bool begins = i == step || j == step;  // an inverse, where L or U were
    float4 t[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) t[u] = begins ? float4{0.0f, 0.0f, 0.0f, 0.0f} : load4(z + 4 * u * PITCH);
#pragma unroll
    for (int c = 0; c < BLOCK; c += 4) {
        const float4 y0 = load4(y + c * PITCH), y1 = load4(y + (c + 1) * PITCH);
        const float4 y2 = load4(y + (c + 2) * PITCH), y3 = load4(y + (c + 3) * PITCH);
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            const float4 a = load4(x + 4 * u * NARROW + c);
            t[u] = minus(a.w, y3, minus(a.z, y2, minus(a.y, y1, minus(a.x, y0, t[u]))));
        }
    }
#pragma unroll
    for (int u = 0; u < 4; ++u) store4(z + 4 * u * PITCH, t[u]);
}

// Contribution of the step before the k-th outside block k of the rows and columns.
__device__ __forceinline__ void subtract_step(int k) {
    const int after = BLOCKS - 1 - k;
    for (int turn = (threadIdx.x - CHAIN) / BLOCK; turn < after * (BLOCKS - 1 + k); turn += (THREADS - CHAIN) / BLOCK) {
        const int rest = turn - k * after;
        if (rest < 0) {
            subtract_block(turn / after, k + 1 + turn % after, k - 1);
        } else {
            const int j = rest % (BLOCKS - 1);
            subtract_block(k + 1 + rest / (BLOCKS - 1), j < k ? j : j + 1, k - 1);
        }
    }
}

// Contribution of the step before to block k of the rows and columns.
__device__ __forceinline__ void subtract_next(int k) {
    const int i = threadIdx.x / BLOCK, j = i - BLOCKS;
    if (i < BLOCKS) subtract_block(i, k, k - 1);
    else if (j < BLOCKS && j != k) subtract_block(k, j, k - 1);
}

struct Vector {
    float x[BLOCK];
};

// A row of U times a number, subtracted from what is to the right of that in a row.
__device__ __forceinline__ void eliminate_row(Vector& row, const float* u, float scale, int c) {
    row.x[c] *= scale;
#pragma unroll
    for (int j = 1; j < BLOCK; ++j)
        if (j > c) row.x[j] = fmaf(-row.x[c], u[j], row.x[j]);
}

__device__ __forceinline__ void load_row(Vector& row, int i, int k, int r) {
#pragma unroll
    for (int c = 0; c < BLOCK; c += 4) {
        const float4 v = load4(at(i, k) + r * PITCH + c);
        row.x[c] = v.x, row.x[c + 1] = v.y, row.x[c + 2] = v.z, row.x[c + 3] = v.w;
    }
}

__device__ __forceinline__ void store_row(const Vector& row, float* place) {
#pragma unroll
    for (int c = 0; c < BLOCK; c += 4)
        store4(place + c, float4{row.x[c], row.x[c + 1], row.x[c + 2], row.x[c + 3]});
}

// Step k: block k of the columns of L and U^-1, and of the rows of U and L^-1. Lanes of the first half of a warp have
// a row of the diagonal block in x, the others one of a block of rows; both have one of another block of rows in z,
// and a column of two blocks of columns in y.
__device__ __forceinline__ void eliminate(int k) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane % BLOCK;
    const int other = warp + BLOCKS / 2, mine = lane < BLOCK ? warp : other;
    const bool diagonal = lane < BLOCK;
    Vector x, y, z;
    load_row(x, diagonal ? k : warp, k, r);
    load_row(z, other, k, r);
#pragma unroll
    for (int c = 0; c < BLOCK; ++c) {
        const float unit = c == r ? 1.0f : 0.0f;
        y.x[c] = mine == k ? unit : at(k, mine)[c * PITCH + r];
        if (warp == k && !diagonal) x.x[c] = unit;
        if (other == k) z.x[c] = unit;
    }
    // The row of U goes out before its reciprocal is known, the column of L with the next row: one barrier a pivot.
    float *row = on_their_way(), *column = row + 2 * BLOCK;
#pragma unroll
    for (int c = 0; c < BLOCK; ++c) {
        if (lane == c) {
#pragma unroll
            for (int j = c / 4 * 4; j < BLOCK; j += 4)
                store4(row + c % 2 * BLOCK + j, float4{x.x[j], x.x[j + 1], x.x[j + 2], x.x[j + 3]});
        }
        __syncwarp();
        float u[BLOCK];
#pragma unroll
        for (int j = c / 4 * 4; j < BLOCK; j += 4) {
            const float4 v = load4(row + c % 2 * BLOCK + j);
            u[j] = v.x, u[j + 1] = v.y, u[j + 2] = v.z, u[j + 3] = v.w;
        }
        const float scale = reciprocal(u[c]);
        // Rows that are done are not touched: what is not finite stays where it arises.
        if (!diagonal || r > c) eliminate_row(x, u, scale, c);
        if (diagonal) column[c % 2 * BLOCK + r] = x.x[c];
        eliminate_row(z, u, scale, c);
        if (c == 0) continue;
#pragma unroll
        for (int j = c / 4 * 4; j < BLOCK; j += 4) {
            const float4 v = load4(column + (c - 1) % 2 * BLOCK + j);
            const float l[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (j + i >= c) y.x[j + i] = fmaf(-l[i], y.x[c - 1], y.x[j + i]);
        }
    }
    // Results of the step before are not needed any more.
    __syncthreads();
    if (!diagonal) store_row(x, columns_of_step() + (warp * BLOCK + r) * NARROW);
    else if (warp == 0) store_row(x, factors_of_step() + r * NARROW);
    if (diagonal) store_row(z, columns_of_step() + (other * BLOCK + r) * NARROW);
#pragma unroll
    for (int c = 0; c < BLOCK; ++c) rows_of_step()[c * PITCH + mine * BLOCK + r] = y.x[c];
}

// Results of step k: of the first n rows and columns of L and U, and of the inverses, which are column-major.
__device__ __forceinline__ void write_step(
    int k, Low* a, float* l_inverse, float* u_inverse, int n, int a_row, int a_column, int thread, int threads
) {
    const float *columns = columns_of_step(), *rows = rows_of_step(), *factors = factors_of_step();
    for (int c = thread / WIDTH; c < BLOCK; c += threads / WIDTH) {
        const int i = thread % WIDTH, j = k * BLOCK + c, block = i / BLOCK;
        const float x = columns[i * NARROW + c];
        u_inverse[j * WIDTH + i] = i <= j ? x : 0.0f;
        const float below = block == k ? factors[i % BLOCK * NARROW + c] : x;
        if (block >= k && i < n && j < n) a[i * a_row + j * a_column] = rounded(below);
    }
    for (int j = thread / BLOCK; j < WIDTH; j += threads / BLOCK) {
        const int c = thread % BLOCK, i = k * BLOCK + c;
        const float x = rows[c * PITCH + j];
        l_inverse[j * WIDTH + i] = j <= i ? x : 0.0f;
        if (j / BLOCK > k && i < n && j < n) a[i * a_row + j * a_column] = rounded(x);
    }
}

// work: the block, row-major, bordered by an identity to 128 rows. a: room for the n x n factors.
extern "C" __global__ void __launch_bounds__(THREADS) lu_block(
    const float* work, Low* a, float* l_inverse, float* u_inverse, int n, int a_row, int a_column
) {
    const int thread = threadIdx.x;
#pragma unroll
    for (int i = thread / 32; i < WIDTH; i += THREADS / 32)
        store4(at(0, 0) + i * PITCH + thread % 32 * 4, load4(work + i * WIDTH + thread % 32 * 4));
    __syncthreads();
    for (int k = 0; k < BLOCKS; ++k) {
        if (k > 0) {
            subtract_next(k);
            __syncthreads();
        }
        if (thread < CHAIN) {
            eliminate(k);
        } else {
            if (k > 0) {
                subtract_step(k);
                write_step(k - 1, a, l_inverse, u_inverse, n, a_row, a_column, thread - CHAIN, THREADS - CHAIN);
            }
            __syncthreads();
        }
        __syncthreads();
    }
    write_step(BLOCKS - 1, a, l_inverse, u_inverse, n, a_row, a_column, thread, THREADS);
}
