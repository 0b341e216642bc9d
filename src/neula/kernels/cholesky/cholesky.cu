// R and R^-1 of a Gram matrix of up to 128 columns, by one thread block; or L and L^-T of each of a batch of
// symmetric matrices, of which the lower triangles are read.
//
// G = L L^T and [G; I] = [L; L^-T] L^T: the operations on columns that turn G into L turn the identity below it
// into L^-T = R^-1. Rows of the one are done as those of the other begin, so one array has room for both: L below
// its diagonal blocks, R^-1 above them. A step is a block of 16 columns. A quarter of the warps follow the chain of its
// square roots, with all rows of these columns in registers, and each with the rows of the diagonal block as
// well, so that none waits for another. The other warps meanwhile subtract what the step before contributes to
// the columns after these, and write what it has computed.

#define BLOCK 16
#ifndef WIDTH
#define WIDTH 128  // or 64 or 32, for matrices with no more columns
#endif
#define BLOCKS (WIDTH / BLOCK)
#define PITCH (WIDTH + 4)  // four rows one below the other are in different banks
#define THREADS (4 * WIDTH)
#define CHAIN WIDTH  // threads along the chain: a warp for each two blocks of rows
#define ALL 0xffffffffu
#define LOST 1.9073486e-6f  // 2^-19 of a diagonal element: what a pivot may owe to rounding errors

extern __shared__ float4 shared[];

// L below its diagonal blocks, R^-1 above them.
__device__ __forceinline__ float* at(int i, int j) {
    return reinterpret_cast<float*>(shared) + i * BLOCK * PITCH + j * BLOCK;
}

// Diagonal blocks of L and of R^-1, side by side, and behind them what pivots may be, and columns on their way.
__device__ __forceinline__ float* diagonal_of_l(int j) { return at(BLOCKS, j); }
__device__ __forceinline__ float* diagonal_of_inverse(int j) { return at(BLOCKS + 1, j); }
__device__ __forceinline__ float* smallest_pivots() { return at(BLOCKS + 2, 0); }
__device__ __forceinline__ float* columns_of_warp() { return at(BLOCKS + 2, BLOCKS) + threadIdx.x / 32 * 64; }

// Block i of the rows that step j computes.
__device__ __forceinline__ float* panel(int i, int j) { return i == j ? diagonal_of_inverse(j) : at(i, j); }

__device__ __forceinline__ void barrier_of_chain() {
#ifdef __CUDA_ARCH__
    asm volatile("bar.sync 1, %0;" ::"n"(CHAIN) : "memory");
#else
    barrier_on_host();  // of the tests
#endif
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

__device__ __forceinline__ float4 load4(const float* place) { return *reinterpret_cast<const float4*>(place); }

// A float32 number as the sum of two of the tensor cores' format, which reads the first 11 bits of a significand.
struct Parts {
    unsigned high, low;
};

__device__ __forceinline__ Parts split(float x) {
    const unsigned high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    return {high, __float_as_uint(x - __uint_as_float(high))};  // what is not a number stays so in the second
}

// D + A B, D of 16 x 8 and A of 16 x 8 and B of 8 x 8 numbers, spread over a warp as tensor cores have them.
__device__ __forceinline__ void multiply(float* d, const unsigned* a, const unsigned* b) {
#ifdef __CUDA_ARCH__
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1])
    );
#else
    multiply_on_host(d, a, b);  // of the tests
#endif
}

// Block (i, k) without what step j contributes, by a warp: as accurate as in float32, on tensor cores, which read a
// third of what float32 arithmetic would of shared memory, and that is what takes time. A lane has columns t and t + 4
// of each eight where the unit says 2 t and 2 t + 1: so all lanes read different banks. Tensor cores truncate sums, by as
// much as these are large: products of eight columns each are subtracted by themselves, since where columns have a
// direction in common the first ones leave little.
__device__ __forceinline__ void subtract_block(int i, int k, int j) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const float* x = panel(i, j) + g * PITCH + t;
    const float* y = at(k, j) + (g / 2 + g % 2 * 4) * PITCH + t;
    float* z = at(i, k) + g * PITCH + t;
    float product[BLOCK / 8][2][4] = {}, correction[2][4] = {};
#pragma unroll
    for (int c = 0; c < BLOCK; c += 8) {
        unsigned high[4], low[4];
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            const Parts parts = split(x[u % 2 * 8 * PITCH + c + u / 2 * 4]);
            high[u] = parts.high, low[u] = parts.low;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Parts first = split(y[half * 8 * PITCH + c]), second = split(y[half * 8 * PITCH + c + 4]);
            const unsigned y_high[2] = {first.high, second.high}, y_low[2] = {first.low, second.low};
            multiply(correction[half], high, y_low);
            multiply(correction[half], low, y_high);
            multiply(product[c / 8][half], high, y_high);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            float& element = z[u / 2 * 8 * PITCH + half * 8 + u % 2 * 4];
            float rest = i == j ? 0.0f : element;  // zero before step i
#pragma unroll
            for (int c = 0; c < BLOCK / 8; ++c) rest -= product[c][half][u];
            element = rest - correction[half][u];
        }
}

// Contribution of step j to the columns after the next, except to blocks that stay zero.
__device__ __forceinline__ void subtract_step(int j, int blocks) {
    for (int turn = (threadIdx.x - CHAIN) / 32;; turn += (THREADS - CHAIN) / 32) {
        int k = j + 2, i = turn;  // the i-th of j + 1 blocks of R^-1 and blocks - k of L
        for (; k < blocks && i > j + blocks - k; ++k) i -= j + 1 + blocks - k;
        if (k >= blocks) return;
        subtract_block(i > j ? i + k - j - 1 : i, k, j);
    }
}

struct Row {
    float x[BLOCK];
};

__device__ __forceinline__ Row loaded(const float* place) {
    Row row;
#pragma unroll
    for (int k = 0; k < BLOCK; k += 4) {
        const float4 x = load4(place + k);
        row.x[k] = x.x, row.x[k + 1] = x.y, row.x[k + 2] = x.z, row.x[k + 3] = x.w;
    }
    return row;
}

__device__ __forceinline__ void store(const Row& row, float* place) {
#pragma unroll
    for (int k = 0; k < BLOCK; k += 4)
        *reinterpret_cast<float4*>(place + k) = float4{row.x[k], row.x[k + 1], row.x[k + 2], row.x[k + 3]};
}

// Step j: block j of the columns of L and of R^-1. Lanes of the first half of a warp have a row of the diagonal
// block in a, the others one of a block of rows, and both one of the next block in b. A pivot that is less than
// the smallest is taken to be that, and what is below it, nothing but rounding errors, to be zero: otherwise
// errors would grow from pivot to pivot. What is not a number stays so, and a zero column becomes NaN. Returns the
// first pivot of the block that is lost or not a number, or BLOCK.
__device__ __forceinline__ int eliminate(int j) {
    const int lane = threadIdx.x % 32, r = lane % BLOCK, i_b = threadIdx.x / 32 * 2 + 1;
    const bool diagonal = lane < BLOCK;
    const int i_a = diagonal ? j : i_b - 1;
    if (j > 0) {
        subtract_block(i_b - 1, j, j - 1);
        subtract_block(i_b, j, j - 1);
        barrier_of_chain();
    }
    Row a = loaded(at(i_a, j) + r * PITCH), b = loaded(at(i_b, j) + r * PITCH);
    float pivot = at(j, j)[r * PITCH + r];
    const float bound = smallest_pivots()[j * BLOCK + r];
#pragma unroll
    for (int k = 0; k < BLOCK; ++k) {
        if (!diagonal && i_a == j) a.x[k] = k == r ? 1.0f : 0.0f;
        if (i_b == j) b.x[k] = k == r ? 1.0f : 0.0f;
    }
    // Rest of a row below a pivot that is lost.
    const float keep_a = !diagonal && i_a <= j ? 1.0f : 0.0f, keep_b = i_b <= j ? 1.0f : 0.0f;
    float* column = columns_of_warp();
    // The sign says that a pivot is lost. The next one is sent before the columns that it does not depend on
    // are updated.
    float signed_d = __shfl_sync(ALL, pivot < bound ? -bound : pivot, 0);
    int first = BLOCK;
#pragma unroll
    for (int c = 0; c < BLOCK; ++c) {
        const bool lost = signed_d < 0.0f;
        if (first == BLOCK && !(signed_d > 0.0f)) first = c;
        const float d = fabsf(signed_d), s = reciprocal_root(d);
        a.x[c] = lane == c ? d * s : a.x[c] * (lost ? s * keep_a : s);
        b.x[c] *= lost ? s * keep_b : s;
        if (c + 1 == BLOCK) break;
        pivot = fmaf(-a.x[c], a.x[c], pivot);
        signed_d = __shfl_sync(ALL, pivot < bound ? -bound : pivot, c + 1);
        column[c % 2 * 32 + lane] = a.x[c];
        __syncwarp();
#pragma unroll
        for (int k = (c + 1) / 4 * 4; k < BLOCK; k += 4) {
            const float4 below = load4(column + c % 2 * 32 + k);
            const float l[4] = {below.x, below.y, below.z, below.w};
#pragma unroll
            for (int v = 0; v < 4; ++v)
                if (k + v > c) {
                    a.x[k + v] = fmaf(-a.x[c], l[v], a.x[k + v]);
                    b.x[k + v] = fmaf(-b.x[c], l[v], b.x[k + v]);
                }
        }
    }
    if (!diagonal || threadIdx.x < BLOCK)
        store(a, (diagonal ? diagonal_of_l(j) : panel(i_a, j)) + r * PITCH);
    if (diagonal) store(b, panel(i_b, j) + r * PITCH);
    return first;
}

// Results of step j: columns of R^T and of R^-1, a row for each half of a warp at a time.
__device__ __forceinline__ void write_step(
    int j, float* r, float* inverse, int n, int r_row, int r_column, int thread, int threads
) {
    const int c = thread % BLOCK, column = j * BLOCK + c;
    if (column >= n) return;
#pragma unroll 4
    for (int i = thread / BLOCK; i < n; i += threads / BLOCK) {
        const float x = panel(i / BLOCK, j)[i % BLOCK * PITCH + c];
        const float l = i / BLOCK == j ? diagonal_of_l(j)[i % BLOCK * PITCH + c] : x;
        r[column * r_row + i * r_column] = column <= i ? l : 0.0f;
        if (inverse) inverse[i * n + column] = i <= column ? x : 0.0f;
    }
}

// All steps, by all threads: columns of R and of R^-1. The first thread knows the order of the first leading minor
// whose pivot is lost, or 0.
__device__ __forceinline__ int eliminate_all(float* r, float* inverse, int n, int r_row, int r_column) {
    const int thread = threadIdx.x, blocks = (n + BLOCK - 1) / BLOCK;
    int found = 0;
    for (int step = 0; step < blocks; ++step) {
        if (thread < CHAIN) {
            const int first = eliminate(step);
            if (found == 0 && first < BLOCK) found = step * BLOCK + first + 1;
        } else if (step > 0) {
            subtract_step(step - 1, blocks);
            write_step(step - 1, r, inverse, n, r_row, r_column, thread - CHAIN, THREADS - CHAIN);
        }
        __syncthreads();
    }
    write_step(blocks - 1, r, inverse, n, r_row, r_column, thread, THREADS);
    return found;
}

extern "C" __global__ void __launch_bounds__(THREADS) cholesky_inverse(
    const double* gram, float* r, float* inverse, float* norms, int n, int r_row, int r_column
) {
    const int thread = threadIdx.x;
    float* w = at(0, 0);

    // All loads in flight: one after the other they would take longer than all that follows. A warp has eight
    // columns, of which it reads four rows at a time: so they are in different banks the other way round, too.
    const int row = thread % 32 / 8, j = thread / 32 * 8 + thread % 8;
    float element[WIDTH / 4];
#pragma unroll
    for (int k = 0; k < WIDTH / 4; ++k) {
        const int i = 4 * k + row;
        element[k] = i < n && j < n ? static_cast<float>(gram[i * n + j]) : (i == j ? 1.0f : 0.0f);
    }
#pragma unroll
    for (int k = 0; k < WIDTH / 4; ++k) w[(4 * k + row) * PITCH + j] = element[k];
    __syncthreads();
    // The lower triangle becomes symmetric: what is above it is not needed.
#pragma unroll
    for (int k = 0; k < WIDTH / 4; ++k) {
        const int i = 4 * k + row;
        if (i > j) w[i * PITCH + j] = 0.5f * (element[k] + w[j * PITCH + i]);
    }
    if (thread < WIDTH) {
        const float square = w[thread * PITCH + thread];
        smallest_pivots()[thread] = LOST * square;
        if (thread < n) norms[thread] = sqrtf(square);
    }
    __syncthreads();
    eliminate_all(r, inverse, n, r_row, r_column);
}

// L of each matrix, which may take the place of its lower triangle, zeros above it, and, if inverted, L^-T. Unlike a
// Gram matrix these need not be definite: info is the order of the first leading minor that is not positive, or lost
// to rounding errors, or 0.
extern "C" __global__ void __launch_bounds__(THREADS) cholesky_lower(
    const float* matrices, float* factors, float* inverses, int* info, int n, int row, int column, int next, int l_row,
    int l_column, int l_next, int inverted
) {
    const int thread = threadIdx.x;
    const long long member = blockIdx.x;
    const float* a = matrices + member * next;
    float* w = at(0, 0);
    const int i_first = thread % 32 / 8, j = thread / 32 * 8 + thread % 8;
    float element[WIDTH / 4];
#pragma unroll
    for (int k = 0; k < WIDTH / 4; ++k) {
        const int i = 4 * k + i_first;
        element[k] = j <= i && i < n ? a[i * row + j * column] : (i == j ? 1.0f : 0.0f);
    }
#pragma unroll
    for (int k = 0; k < WIDTH / 4; ++k) w[(4 * k + i_first) * PITCH + j] = element[k];
    __syncthreads();
    // Of a negative diagonal element no part is small enough.
    if (thread < WIDTH) smallest_pivots()[thread] = LOST * fmaxf(w[thread * PITCH + thread], 0.0f);
    __syncthreads();
    float* inverse = inverted ? inverses + member * n * n : nullptr;
    const int found = eliminate_all(factors + member * l_next, inverse, n, l_column, l_row);
    if (thread == 0) info[member] = found;
}
