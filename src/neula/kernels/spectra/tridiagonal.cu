// Reduction of Hermitian matrices to tridiagonal form by Householder reflectors, a panel of columns in each launch
// (Dongarra, Sorensen and Hammarling, "Block reduction of matrices to condensed forms for eigenvalue computations",
// J. Comput. Appl. Math. 27, 1989; LAPACK's latrd).
//
// The trailing matrix stays as it is until the end of the panel; -V W^H - W V^H is to be added, with the reflectors V
// and the updates W so far. So each column takes one product of the trailing matrix with a vector, which takes most of
// the time: its lower triangle is read once, and each element multiplies two. BLOCKS thread blocks, a cluster, share a
// matrix.
//
// PARTS (1 for real numbers, 2 for complex ones), BLOCKS, PANEL (columns of a panel) and MOST_THREADS are macros.

#define WIDE (4 / PARTS)  // numbers that a thread loads at a time
#define ROWS 8            // rows that a warp loads together
#define CHUNK (32 * WIDE) // columns that a warp loads together
#define SUMS (2 * PANEL + 2)  // inner products with all updates and reflectors of a panel, and two more numbers
#define ALL 0xffffffffu
#define NEGLIGIBLE 0x1p-100f  // that of tridiagonal.py

#if BLOCKS > 1
#define CLUSTER __attribute__((cluster_dims(BLOCKS, 1, 1)))
#else
#define CLUSTER
#endif

#if PARTS == 2
struct alignas(8) Number {
    float re, im;
};
__device__ __forceinline__ Number number(float x) { return {x, 0}; }
__device__ __forceinline__ float real(Number x) { return x.re; }
__device__ __forceinline__ float imag(Number x) { return x.im; }
__device__ __forceinline__ Number conj(Number x) { return {x.re, -x.im}; }
__device__ __forceinline__ Number plus(Number x, Number y) { return {x.re + y.re, x.im + y.im}; }
__device__ __forceinline__ Number times(float x, Number y) { return {x * y.re, x * y.im}; }
// z + x y
__device__ __forceinline__ Number multiply_add(Number x, Number y, Number z) {
    return {fma(x.re, y.re, fma(-x.im, y.im, z.re)), fma(x.re, y.im, fma(x.im, y.re, z.im))};
}
#else
typedef float Number;
__device__ __forceinline__ Number number(float x) { return x; }
__device__ __forceinline__ float real(Number x) { return x; }
__device__ __forceinline__ float imag(Number) { return 0; }
__device__ __forceinline__ Number conj(Number x) { return x; }
__device__ __forceinline__ Number plus(Number x, Number y) { return x + y; }
__device__ __forceinline__ Number times(float x, Number y) { return x * y; }
__device__ __forceinline__ Number multiply_add(Number x, Number y, Number z) { return fma(x, y, z); }
#endif
__device__ __forceinline__ Number minus(Number x) { return times(-1, x); }

struct alignas(16) Pack {
    Number x[WIDE];
};

__device__ __forceinline__ float sum_of_warp(float x) {
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(ALL, x, distance);
    return x;
}

__device__ __forceinline__ Number from_lane(Number x, int distance) {
#if PARTS == 2
    return {float(__shfl_xor_sync(ALL, x.re, distance)), float(__shfl_xor_sync(ALL, x.im, distance))};
#else
    return __shfl_xor_sync(ALL, x, distance);
#endif
}

__device__ __forceinline__ Number sum_of_warp_of(Number x) {
#if PARTS == 2
    return {sum_of_warp(x.re), sum_of_warp(x.im)};
#else
    return sum_of_warp(x);
#endif
}

// The sum over all threads; `sums` has space for a number of each warp.
__device__ __forceinline__ float sum_of_block(float x, float* sums) {
    x = sum_of_warp(x);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
    for (int warp = 0; warp < blockDim.x / 32; ++warp) x += sums[warp];
    return x;
}

// Sums over the lanes of a warp: lane 4 u has that of x[u].
__device__ __forceinline__ Number sum_of_rows(Number* x, int lane) {
#pragma unroll
    for (int half = ROWS / 2; half > 0; half /= 2) {
        const bool second = lane & 4 * half;
#pragma unroll
        for (int u = 0; u < half; ++u) {
            const Number other = from_lane(second ? x[u] : x[u + half], 4 * half);
            x[u] = plus(second ? x[u + half] : x[u], other);
        }
    }
    for (int distance = 2; distance > 0; distance /= 2) x[0] = plus(x[0], from_lane(x[0], distance));
    return x[0];
}

// The first row below the diagonal of a chunk of columns that is not zero in the reflector of column j, or one before.
__device__ __forceinline__ int begin_of_rows(int start, int j) { return start + max(0, j + 1 - start) / ROWS * ROWS; }

// Asks for ROWS rows of a chunk, which are loaded later.
__device__ __forceinline__ void prefetch_rows(const Number* a, int stride, int start, int i, int n, int lane) {
#ifdef __CUDA_ARCH__
    const int row = i + lane / 4, column = start + lane % 4 * (CHUNK / 4);
    const Number* place = a + (long long)row * stride + column;
    if (row < n && column < stride) asm volatile("prefetch.global.L2 [%0];" ::"l"(place));
#endif
}

// Sums of ROWS rows of a chunk times the columns' elements, of lane 4 u that of row i + u; and adds to the sums of
// columns the rows' elements times theirs. `inside`: whether all are below the diagonal, and rows of the matrix.
template <bool inside>
__device__ __forceinline__ Number of_rows(
    const Number* a, int stride, int i, int n, int own, const Number* v, const Number* of_columns, Number* sum, int lane
) {
    Pack row[ROWS];
    Number found[ROWS];
    const Number* from = a + (long long)i * stride + own;
#pragma unroll
    for (int u = 0; u < ROWS; ++u) {
        if (inside || (i + u < n && own <= i + u)) row[u] = *reinterpret_cast<const Pack*>(from);
        else
#pragma unroll
            for (int k = 0; k < WIDE; ++k) row[u].x[k] = number(0);
        from += stride;
    }
#pragma unroll
    for (int u = 0; u < ROWS; ++u) {
        const Number x = v[i + u];
        found[u] = number(0);
#pragma unroll
        for (int k = 0; k < WIDE; ++k) {
            Number element = row[u].x[k];
            if (!inside && own + k > i + u) element = number(0);
            found[u] = multiply_add(element, of_columns[k], found[u]);
            if (!inside && own + k == i + u) element = number(0);
            sum[k] = multiply_add(conj(element), x, sum[k]);
        }
    }
    return sum_of_rows(found, lane);
}

// The next chunk of columns of a thread block.
__device__ __forceinline__ int next_chunk(int chunk, int part) {
    return chunk / BLOCKS % 2 ? (chunk / BLOCKS + 1) * BLOCKS + part : (chunk / BLOCKS + 2) * BLOCKS - 1 - part;
}

// Waits for all threads that share a matrix, and lets each see what the others have written.
__device__ __forceinline__ void meet() {
#if BLOCKS > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

// Reduces columns begin to begin + PANEL - 1 of each matrix.
//
// a: rows of the trailing matrices, zero-padded to a multiple of WIDE numbers (`stride`). vectors, shape (n, n) each: a
// row for each reflector I - factor v v^H, zero up to the diagonal; reflectors that are not needed are zero. panel,
// shape (3 PANEL, n): V, W and V again, for the update of the trailing matrix. exchanged, shape (n + BLOCKS * (SUMS +
// n)): workspace.
extern "C" __global__ CLUSTER void __launch_bounds__(MOST_THREADS) tridiagonal_panel(
    const Number* a, Number* vectors, Number* panel, Number* factors, float* diagonal, float* off_diagonal,
    Number* exchanged, int n, int stride, int begin
) {
    extern __shared__ float4 shared[];
    const int thread = threadIdx.x, threads = blockDim.x;
    const int warp = thread / 32, lane = thread % 32, warps = threads / 32;
    // Workspace for the trailing matrix, whose rows and columns keep their numbers.
    const int first = begin / WIDE * WIDE, active = n - first, chunks = (active + CHUNK - 1) / CHUNK;
    const int padded = (chunks + 1) * CHUNK, most_own = (active + BLOCKS - 1) / BLOCKS;
    const int most = chunks / BLOCKS + 1;                         // chunks of a thread block
    Number* v = reinterpret_cast<Number*>(shared) - first;        // the column, then the reflector; zeros around it
    Number* y = v + padded;                                       // the product of A and v
    Number* from_rows = y + active;                               // (most, active)
    Number* from_columns = from_rows + most * active + first;     // (warps, most, CHUNK)
    Number* own_v = from_columns + warps * most * CHUNK;          // (PANEL, most_own): reflectors
    Number* own_w = own_v + PANEL * most_own;                     // (PANEL, most_own): updates
    Number* sums = own_w + PANEL * most_own;                      // SUMS
    Number* v_before = sums + SUMS;                               // PANEL: elements of earlier reflectors in this row
    Number* w_before = v_before + PANEL;                          // PANEL: and of updates
    Number* next = w_before + PANEL;                              // the element of the last update in the next row
    float* of_warps = reinterpret_cast<float*>(next + 1);         // a number of each warp

    const long long matrix = blockIdx.x / BLOCKS;
    const int part = blockIdx.x % BLOCKS, columns = min(PANEL, n - begin);
    a += matrix * n * stride;
    vectors += (matrix * n + begin) * n;
    panel += matrix * 3 * PANEL * n;
    Number* updates = panel + (long long)PANEL * n;
    factors += matrix * n;
    diagonal += matrix * n;
    off_diagonal += matrix * n;
    exchanged += matrix * (n + BLOCKS * (SUMS + n));
    Number* of_parts = exchanged + n;

    // A thread block has a part of the elements of all vectors, and chunks of columns of A, taken in turns from the
    // left and from the right: those to the left have more rows.
    const int share = (n - begin + BLOCKS - 1) / BLOCKS, low = min(n, begin + part * share), high = min(n, low + share);

    for (int c = thread; c < padded; c += threads) v[first + c] = number(0);
    __syncthreads();
    for (int p = 0; p < columns; ++p) {
        const int j = begin + p;
        if (part < chunks) {
            const int start = first + part * CHUNK;
            prefetch_rows(a, stride, start, begin_of_rows(start, j) + warp * ROWS, n, lane);
        }
        if (thread < p) {
            v_before[thread] = conj(vectors[(long long)thread * n + j]);
            w_before[thread] = conj(thread < p - 1 ? updates[(long long)thread * n + j] : *next);
        }
        __syncthreads();
        for (int c = max(low, j) + thread; c < high; c += threads) {
            Number x = conj(a[(long long)j * stride + c]);
#pragma unroll 8
            for (int q = 0; q < p; ++q) {
                x = multiply_add(minus(own_v[q * most_own + c - low]), w_before[q], x);
                x = multiply_add(minus(own_w[q * most_own + c - low]), v_before[q], x);
            }
            exchanged[c] = x;
        }
        meet();
        float squares = 0;
        for (int c = j + thread; c < n; c += threads) {
            const Number x = v[c] = exchanged[c];
            if (c > j + 1) squares = fma(real(x), real(x), fma(imag(x), imag(x), squares));
        }
        squares = sum_of_block(squares, of_warps);
        if (j == n - 1) {
            if (part == 0 && thread == 0) diagonal[j] = real(v[j]), factors[j] = number(0), off_diagonal[j] = 0;
            break;
        }
        // I - factor v v^H takes the column below the diagonal to a real number, beta.
        const Number alpha = v[j + 1];
        const float along = real(alpha), turned = imag(alpha);
        const bool needed = fma(turned, turned, squares) > NEGLIGIBLE;
        const float length = sqrt(fma(along, along, fma(turned, turned, squares)));
        const float beta = needed ? (along > 0 ? -length : length) : along;
        Number factor = number(0), scale = number(0);
        if (needed) {
            const float away = along - beta, size = fma(away, away, turned * turned);
#if PARTS == 2
            factor = {-away / beta, -turned / beta};
            scale = {away / size, -turned / size};
#else
            factor = -away / beta;
            scale = away / size;
#endif
        }
        if (part == 0 && thread == 0) diagonal[j] = real(v[j]), off_diagonal[j] = beta, factors[j] = factor;
        __syncthreads();
        for (int c = j + 1 + thread; c < n; c += threads) {
            const Number x = c > j + 1 ? multiply_add(v[c], scale, number(0)) : number(needed);
            v[c] = x;
            if (c >= low && c < high) {
                const long long place = (long long)p * n + c;
                own_v[p * most_own + c - low] = vectors[place] = panel[place] = panel[2LL * PANEL * n + place] = x;
            }
        }
        if (thread == 0) v[j] = number(0);
        __syncthreads();
        int mine = 0;
        for (int chunk = part; chunk < chunks; chunk = next_chunk(chunk, part), ++mine) {
            const int start = first + chunk * CHUNK, own = start + lane * WIDE;
            Number sum[WIDE], of_columns[WIDE];
#pragma unroll
            for (int k = 0; k < WIDE; ++k) sum[k] = number(0), of_columns[k] = v[own + k];
            for (int i = begin_of_rows(start, j) + warp * ROWS; i < n; i += warps * ROWS) {
                prefetch_rows(a, stride, start, i + warps * ROWS, n, lane);
                const bool inside = i >= start + CHUNK && i + ROWS <= n;
                const Number total = inside ? of_rows<true>(a, stride, i, n, own, v, of_columns, sum, lane)
                                            : of_rows<false>(a, stride, i, n, own, v, of_columns, sum, lane);
                const int u = lane / 4;
                if (lane % 4 == 0 && i + u < n) from_rows[mine * active + i + u] = total;
            }
#pragma unroll
            for (int k = 0; k < WIDE; ++k) from_columns[(warp * most + mine) * CHUNK + lane * WIDE + k] = sum[k];
        }
        __syncthreads();
        for (int c = j + 1 + thread; c < n; c += threads) {
            Number sum = number(0);
            const int of_column = (c - first) / CHUNK;
            for (int chunk = part, k = 0; chunk <= of_column; chunk = next_chunk(chunk, part), ++k) {
                sum = plus(sum, from_rows[k * active + c]);
                if (chunk == of_column)
                    for (int w = 0; w < warps; ++w)
                        sum = plus(sum, from_columns[(w * most + k) * CHUNK + (c - first) % CHUNK]);
            }
            y[c] = sum;
#if BLOCKS > 1
            of_parts[BLOCKS * SUMS + part * n + c] = sum;
#endif
        }
        __syncthreads();
        // W^H v and V^H v of the own elements, and v^H y.
        for (int q = warp; q <= 2 * p; q += warps) {
            const Number* left = q < p ? own_w + q * most_own : own_v + (q - p) * most_own;
            Number sum = number(0);
            if (q < 2 * p)
                for (int c = max(low, j + 1) + lane; c < high; c += 32)
                    sum = multiply_add(conj(left[c - low]), v[c], sum);
            else
                for (int c = j + 1 + lane; c < n; c += 32) sum = multiply_add(conj(v[c]), y[c], sum);
            sum = sum_of_warp_of(sum);
            if (lane == 0) of_parts[part * SUMS + q] = sum;
        }
        if (thread == 0) of_parts[part * SUMS + 2 * p + 1] = y[j + 1];
        meet();
        if (thread < 2 * p + 2) {
            Number sum = number(0);
            for (int k = 0; k < BLOCKS; ++k) sum = plus(sum, of_parts[k * SUMS + thread]);
            sums[thread] = sum;
        }
        __syncthreads();
        // w = factor (A v - V W^H v - W V^H v) - factor (w^H v) v / 2, where v^H (...) is real.
        const Number *of_v = sums, *of_w = sums + p;
        float inner = real(sums[2 * p]);
        for (int q = 0; q < p; ++q) inner = fma(-2, real(multiply_add(conj(of_w[q]), of_v[q], number(0))), inner);
        const float shorter = -inner * fma(real(factor), real(factor), imag(factor) * imag(factor)) / 2;
        for (int c = max(low, j + 1) + thread; c < high; c += threads) {
            Number x = y[c];
#if BLOCKS > 1
            x = number(0);
            for (int k = 0; k < BLOCKS; ++k) x = plus(x, of_parts[BLOCKS * SUMS + k * n + c]);
#endif
#pragma unroll 8
            for (int q = 0; q < p; ++q) {
                x = multiply_add(minus(own_v[q * most_own + c - low]), of_v[q], x);
                x = multiply_add(minus(own_w[q * most_own + c - low]), of_w[q], x);
            }
            x = multiply_add(factor, x, times(shorter, v[c]));
            updates[(long long)p * n + c] = own_w[p * most_own + c - low] = x;
        }
        if (warp == 0) {
            Number x = number(0);
            for (int q = lane; q < p; q += 32) {
                x = multiply_add(vectors[(long long)q * n + j + 1], of_v[q], x);
                x = multiply_add(updates[(long long)q * n + j + 1], of_w[q], x);
            }
            x = plus(sums[2 * p + 1], minus(sum_of_warp_of(x)));
            if (lane == 0) *next = multiply_add(factor, x, times(shorter, v[j + 1]));
        }
        __syncthreads();
    }
}
