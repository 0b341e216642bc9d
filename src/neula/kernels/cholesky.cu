// R and R^-1 of a Gram matrix of up to 128 columns, by one thread block.
//
// Blocks of 32 columns. The diagonal blocks are a chain of square roots, which one warp follows with a row in
// the registers of each lane; the other warps meanwhile update the blocks that are not needed next, and invert.
// Every product is X^T Y with the contracted index as the row of both operands, so that a thread reads four
// numbers at a time.

#define BLOCK 32
#define WIDTH 128
#define PITCH 132
#define THREADS 384
#define GROUP 64
#define GROUPS (THREADS / GROUP)
#define LOST 1.9073486e-6f  // 2^-19 of a diagonal element: what a pivot may owe to rounding errors

__device__ __forceinline__ void barrier_of_group() {
    asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.x / GROUP + 1), "n"(GROUP) : "memory");
}

struct Tile {
    float x[4][4];
};

// Adds X^T Y, four rows and four columns of it for each of the 64 threads of a group.
__device__ __forceinline__ void multiply(Tile& t, const float* x, const float* y) {
    const int i = threadIdx.x % GROUP / 8 * 4, j = threadIdx.x % 8 * 4;
#pragma unroll 8
    for (int k = 0; k < BLOCK; ++k) {
        const float4 a = *reinterpret_cast<const float4*>(x + k * PITCH + i);
        const float4 b = *reinterpret_cast<const float4*>(y + k * PITCH + j);
        const float p[4] = {a.x, a.y, a.z, a.w}, q[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int u = 0; u < 4; ++u)
#pragma unroll
            for (int v = 0; v < 4; ++v) t.x[u][v] = fmaf(p[u], q[v], t.x[u][v]);
    }
}

__device__ __forceinline__ void store(const Tile& t, float* z, float sign) {
    const int i = threadIdx.x % GROUP / 8 * 4, j = threadIdx.x % 8 * 4;
#pragma unroll
    for (int u = 0; u < 4; ++u)
        *reinterpret_cast<float4*>(z + (i + u) * PITCH + j) =
            float4{sign * t.x[u][0], sign * t.x[u][1], sign * t.x[u][2], sign * t.x[u][3]};
}

__device__ __forceinline__ void scale_rows(Tile& t, const float* factors) {
    const int i = threadIdx.x % GROUP / 8 * 4;
#pragma unroll
    for (int u = 0; u < 4; ++u)
#pragma unroll
        for (int v = 0; v < 4; ++v) t.x[u][v] *= factors[i + u];
}

__device__ __forceinline__ void subtract(float* z, const float* x, const float* y) {
    Tile t;
    const int i = threadIdx.x % GROUP / 8 * 4, j = threadIdx.x % 8 * 4;
#pragma unroll
    for (int u = 0; u < 4; ++u) {
        const float4 c = *reinterpret_cast<const float4*>(z + (i + u) * PITCH + j);
        t.x[u][0] = -c.x, t.x[u][1] = -c.y, t.x[u][2] = -c.z, t.x[u][3] = -c.w;
    }
    multiply(t, x, y);
    store(t, z, -1.0f);
}

__device__ __forceinline__ float reciprocal_root(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return 1.0f / sqrtf(x);
#endif
}

// One warp: G = L L^T, a row of L in each lane, and L^-1, a column of it in each lane, from the same shuffles.
// Only the upper triangle of G is read. L^-1 goes to v, its transpose to g. A pivot that is less than what comes
// in keep is taken to be that, and what is below it, nothing but rounding errors, to be zero: otherwise errors
// would grow from pivot to pivot. Then a zero goes out in keep, else a one. What is not a number stays so, and a
// zero column becomes NaN.
__device__ void factor_diagonal(float* g, float* v, float* lower, float* keep) {
    const int lane = threadIdx.x % BLOCK;
    float row[BLOCK], x[BLOCK];
#pragma unroll
    for (int k = 0; k < BLOCK; ++k) {
        row[k] = g[k * PITCH + lane];
        x[k] = k == lane ? 1.0f : 0.0f;
    }
    float pivot = g[lane * PITCH + lane];
    const float bound = keep[lane];
    float kept = 1.0f;
    // The sign says that a pivot is lost. The next one is sent before the columns that it does not depend on
    // are updated.
    float signed_d = __shfl_sync(0xffffffffu, pivot < bound ? -bound : pivot, 0);
#pragma unroll
    for (int c = 0; c < BLOCK; ++c) {
        const float d = fabsf(signed_d), s = reciprocal_root(d), below_s = signed_d < 0.0f ? 0.0f : s;
        const float l = lane == c ? d * s : (lane > c ? row[c] * below_s : 0.0f);
        if (lane == c) kept = signed_d < 0.0f ? 0.0f : 1.0f;
        pivot = fmaf(-l, l, pivot);
        if (c + 1 < BLOCK) signed_d = __shfl_sync(0xffffffffu, pivot < bound ? -bound : pivot, c + 1);
        x[c] *= s;
#pragma unroll
        for (int k = c + 1; k < BLOCK; ++k) {
            const float below = __shfl_sync(0xffffffffu, l, k);
            row[k] = fmaf(-l, below, row[k]);
            x[k] = fmaf(-x[c], below, x[k]);
        }
        row[c] = l;
    }
    keep[lane] = kept;
#pragma unroll
    for (int k = 0; k < BLOCK; k += 4) {
        *reinterpret_cast<float4*>(lower + lane * 36 + k) =
            float4{row[k], row[k + 1], row[k + 2], row[k + 3]};
        *reinterpret_cast<float4*>(g + lane * PITCH + k) = float4{x[k], x[k + 1], x[k + 2], x[k + 3]};
    }
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) v[i * PITCH + lane] = x[i];
}

__device__ __forceinline__ float* at(float* matrix, int i, int j) {
    return matrix + i * BLOCK * PITCH + j * BLOCK;
}

// Block i of row j of L^-1, L^-1_ji = -L^-1_jj sum_k L_jk L^-1_ki, in two steps by one group: the sum needs
// nothing of row j but L, so it is ready when the diagonal block is.
__device__ __forceinline__ void begin_inverse(float* g, float* v, int j, int i) {
    Tile t = {};
    for (int k = i; k < j; ++k) multiply(t, at(g, k, j), at(v, k, i));
    store(t, at(v, j, i), 1.0f);
    barrier_of_group();
}

__device__ __forceinline__ void finish_inverse(float* g, float* v, int j, int i) {
    Tile t = {};
    multiply(t, at(g, j, j), at(v, j, i));
    barrier_of_group();
    store(t, at(v, j, i), -1.0f);
    barrier_of_group();
}

extern "C" __global__ void __launch_bounds__(THREADS) cholesky_inverse(
    const double* gram, float* r, float* inverse, float* norms, int n, int r_row, int r_column
) {
    extern __shared__ float4 memory[];
    float* g = reinterpret_cast<float*>(memory);  // R above the diagonal blocks, R_jj^-1 in them
    float* v = g + WIDTH * PITCH;                 // R^-T, a lower triangle
    float* lower = v + WIDTH * PITCH;             // R_jj^T
    float* keep = lower + WIDTH * 36;             // smallest pivots; which rows of R are kept
    const int thread = threadIdx.x, group = thread / GROUP;
    const int blocks = (n + BLOCK - 1) / BLOCK, padded = blocks * BLOCK;

    // Many loads in flight: one after the other they would take longer than all that follows.
    const int column = thread % WIDTH;
#pragma unroll 16
    for (int i = thread / WIDTH; i < WIDTH; i += THREADS / WIDTH) {
        const bool inside = i < n && column < n;
        const float padding = i == column ? 1.0f : 0.0f;
        g[i * PITCH + column] = inside ? static_cast<float>(gram[i * n + column]) : padding;
    }
    __syncthreads();
#pragma unroll 8
    for (int i = thread / WIDTH; i < padded; i += THREADS / WIDTH) {
        if (i < column) g[i * PITCH + column] = 0.5f * (g[i * PITCH + column] + g[column * PITCH + i]);
        if (i == column) {
            keep[i] = LOST * g[i * PITCH + i];
            if (i < n) norms[i] = sqrtf(g[i * PITCH + i]);
        }
    }
    __syncthreads();
    for (int j = 0; j < blocks; ++j) {
        if (group == 0) {
            if (thread < BLOCK)
                factor_diagonal(at(g, j, j), at(v, j, j), lower + j * BLOCK * 36, keep + j * BLOCK);
        } else if (j > 0) {
            int turn = 1;  // the next diagonal block has been seen to already
            for (int a = j; a < blocks; ++a)
                for (int b = a == j ? j + 1 : a; b < blocks; ++b, turn = turn % (GROUPS - 1) + 1)
                    if (turn == group) subtract(at(g, a, b), at(g, j - 1, a), at(g, j - 1, b));
            const int i = GROUPS - 1 - group;
            if (i < j - 1) finish_inverse(g, v, j - 1, i);
            if (i < j) begin_inverse(g, v, j, i);
        }
        __syncthreads();
        Tile t = {};
        const int b = j + 1 + group;
        if (b < blocks) multiply(t, at(g, j, j), at(g, j, b));
        __syncthreads();
        if (b < blocks) {
            scale_rows(t, keep + j * BLOCK);
            store(t, at(g, j, b), 1.0f);
        }
        __syncthreads();
        if (group == 0 && j + 1 < blocks) subtract(at(g, j + 1, j + 1), at(g, j, j + 1), at(g, j, j + 1));
        __syncthreads();
    }
    if (GROUPS - 1 - group < blocks - 1) finish_inverse(g, v, blocks - 1, GROUPS - 1 - group);
    __syncthreads();
    // Down the columns of R, along the rows of its inverse transposed.
#pragma unroll 4
    for (int j = thread / WIDTH; j < n; j += THREADS / WIDTH) {
        const int i = column;
        if (i >= n) continue;
        const bool diagonal = i / BLOCK == j / BLOCK;
        const float x = diagonal ? lower[(j / BLOCK * BLOCK + j % BLOCK) * 36 + i % BLOCK] : g[i * PITCH + j];
        r[i * r_row + j * r_column] = i <= j ? x : 0.0f;
        inverse[j * n + i] = i <= j ? v[j * PITCH + i] : 0.0f;
    }
}
