// R and R^-1 of a Gram matrix of up to 128 columns, by one thread block.
//
// Blocks of 32 columns. The diagonal blocks are a chain of square roots, which one warp follows with a row in
// the registers of each lane; the other warps meanwhile update the blocks that are not needed next, and invert. Every product is X^T Y with the contracted index as the row
// of both operands, so that a thread reads four numbers at a time.

#define BLOCK 32
#define WIDTH 128
#define PITCH 132
#define THREADS 512
#define GROUP 64
#define GROUPS (THREADS / GROUP)

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

// One warp: G = L L^T. Only the upper triangle of G is read. L^-1 goes to v, its transpose to g; a pivot that is not positive makes NaN.
__device__ void factor_diagonal(float* g, float* v, float* lower) {
    const int lane = threadIdx.x % BLOCK;
    float row[BLOCK], inverse_diagonal = 0.0f;
#pragma unroll
    for (int k = 0; k < BLOCK; ++k) row[k] = g[k * PITCH + lane];
    float pivot = g[lane * PITCH + lane];
#pragma unroll
    for (int c = 0; c < BLOCK; ++c) {
        const float d = __shfl_sync(0xffffffffu, pivot, c);
        const float s = rsqrtf(d);  // to 1.2 units in the last place
        const float l = lane == c ? d * s : (lane > c ? row[c] * s : 0.0f);
        if (lane == c) inverse_diagonal = s;
        pivot = fmaf(-l, l, pivot);
#pragma unroll
        for (int k = c + 1; k < BLOCK; ++k) row[k] = fmaf(-l, __shfl_sync(0xffffffffu, l, k), row[k]);
        row[c] = l;
    }
#pragma unroll
    for (int k = 0; k < BLOCK; ++k) lower[lane * 36 + k] = row[k];
    __syncwarp();
    // Lane c solves L x = e_c.
    float x[BLOCK];
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) x[i] = i == lane ? 1.0f : 0.0f;
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) {
        x[i] *= __shfl_sync(0xffffffffu, inverse_diagonal, i);
#pragma unroll
        for (int k = i + 1; k < BLOCK; ++k) x[k] = fmaf(-lower[k * 36 + i], x[i], x[k]);
    }
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) {
        v[i * PITCH + lane] = x[i];
        g[lane * PITCH + i] = x[i];
    }
}

__device__ __forceinline__ float* at(float* matrix, int i, int j) {
    return matrix + i * BLOCK * PITCH + j * BLOCK;
}

// Block i of row j of L^-1, by one group, from what is above: L^-1_ji = -L^-1_jj sum_k L_jk L^-1_ki.
__device__ __forceinline__ void invert_row(float* g, float* v, int j, int i) {
    if (i < j) {
        Tile t = {};
        for (int k = i; k < j; ++k) multiply(t, at(g, k, j), at(v, k, i));
        store(t, at(v, j, i), 1.0f);
        barrier_of_group();
        Tile u = {};
        multiply(u, at(g, j, j), at(v, j, i));
        barrier_of_group();
        store(u, at(v, j, i), -1.0f);
    }
}

extern "C" __global__ void cholesky_inverse(
    const double* gram, float* r, float* inverse, float* norms, int n, int r_row, int r_column
) {
    extern __shared__ float4 memory[];
    float* g = reinterpret_cast<float*>(memory);  // R above the diagonal blocks, R_jj^-1 in them
    float* v = g + WIDTH * PITCH;                 // R^-T, a lower triangle
    float* lower = v + WIDTH * PITCH;             // R_jj^T
    const int thread = threadIdx.x, group = thread / GROUP;
    const int blocks = (n + BLOCK - 1) / BLOCK, padded = blocks * BLOCK;

    // Many loads in flight: one after the other they would take longer than all that follows.
    const int column = thread % WIDTH;
#pragma unroll 16
    for (int i = thread / WIDTH; i < WIDTH; i += THREADS / WIDTH) {
        const bool inside = i < n && column < n;
        g[i * PITCH + column] = inside ? static_cast<float>(gram[i * n + column]) : (i == column ? 1.0f : 0.0f);
        v[i * PITCH + column] = 0.0f;
    }
    __syncthreads();
#pragma unroll 4
    for (int i = thread / WIDTH; i < padded; i += THREADS / WIDTH) {
        if (i < column) g[i * PITCH + column] = 0.5f * (g[i * PITCH + column] + g[column * PITCH + i]);
        if (i == column && i < n) norms[i] = sqrtf(g[i * PITCH + i]);
    }
    __syncthreads();
    for (int j = 0; j < blocks; ++j) {
        if (group == 0) {
            if (thread < BLOCK) factor_diagonal(at(g, j, j), at(v, j, j), lower + j * BLOCK * 36);
        } else if (j > 0) {
            int turn = 1;  // the next diagonal block has been seen to already
            for (int a = j; a < blocks; ++a)
                for (int b = a == j ? j + 1 : a; b < blocks; ++b, turn = turn % (GROUPS - 1) + 1)
                    if (turn == group) subtract(at(g, a, b), at(g, j - 1, a), at(g, j - 1, b));
            invert_row(g, v, j - 1, GROUPS - 1 - group);
        }
        __syncthreads();
        Tile t = {};
        const int b = j + 1 + group;
        if (b < blocks) multiply(t, at(g, j, j), at(g, j, b));
        __syncthreads();
        if (b < blocks) store(t, at(g, j, b), 1.0f);
        __syncthreads();
        if (group == 0 && j + 1 < blocks) subtract(at(g, j + 1, j + 1), at(g, j, j + 1), at(g, j, j + 1));
        __syncthreads();
    }
    invert_row(g, v, blocks - 1, group);
    __syncthreads();
    // Down the columns of R, along the rows of its inverse transposed.
#pragma unroll 4
    for (int j = thread / WIDTH; j < n; j += THREADS / WIDTH) {
        const int i = column;
        if (i >= n) continue;
        const bool diagonal = i / BLOCK == j / BLOCK;
        const float x = diagonal ? lower[(j / BLOCK * BLOCK + j % BLOCK) * 36 + i % BLOCK] : g[i * PITCH + j];
        r[i * r_row + j * r_column] = i <= j ? x : 0.0f;
        inverse[j * n + i] = v[j * PITCH + i];
    }
}
