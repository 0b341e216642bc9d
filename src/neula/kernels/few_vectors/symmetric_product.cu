// Products of a symmetric matrix with a few vectors: what is below its blocks on the diagonal is read once, for the
// rows of the product that are its own and for those that are its columns'.
//
// Each thread block has a square tile, each warp some rows of it, each lane some columns. Sums of a row go from lane
// to lane, those of a column from warp to warp. Of every row of the product each tile that is part of it writes a
// share, so sums do not depend on what finishes first.
//
// V: vectors. TILE: order of a tile. ROWS: that a warp has at a time; 8 numbers of them are summed together.

#define WARPS (THREADS / 32)
#define EACH (TILE / 32)
#define ALL 0xffffffffu

// Of twice as many numbers each lane keeps one half, with what the lane that keeps the other half has there.
template <int HALF>
__device__ __forceinline__ void fold(double* x) {
    const bool high = threadIdx.x & 2 * HALF;
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
        const double other = __shfl_xor_sync(ALL, high ? x[i] : x[i + HALF], 2 * HALF);
        x[i] = (high ? x[i + HALF] : x[i]) + other;
    }
}

// The rows of a tile in the lower triangle of tiles, which are counted row by row.
__device__ __forceinline__ int row_of(int number) {
    int row = static_cast<int>((sqrt(8.0 * number + 1.0) - 1.0) / 2.0);
    while (row * (row + 1) / 2 > number) --row;
    while ((row + 1) * (row + 2) / 2 <= number) ++row;
    return row;
}

// a: rows contiguous, pitch apart. x: k vectors. shares: V numbers for each row of a tile, for each of them.
extern "C" __global__ void __launch_bounds__(THREADS, 2) symmetric_product(
    const double* a, const double* x, double* shares, int n, int k, int tiles, long long pitch, long long x_row,
    long long x_column
) {
    __shared__ double right[TILE * V];
    __shared__ double sums[WARPS * TILE * V];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int below = row_of(blockIdx.x), beside = blockIdx.x - below * (below + 1) / 2;
    const int top = below * TILE, left = beside * TILE;
    const long long apart = static_cast<long long>(tiles) * TILE * V;
    for (int i = thread; i < TILE * V; i += THREADS) {
        const int row = top + i / V, v = i % V;
        right[i] = row < n && v < k ? x[row * x_row + v * x_column] : 0.0;
    }
    double known[EACH * V], found[EACH * V] = {};
#pragma unroll
    for (int c = 0; c < EACH; ++c)
#pragma unroll
        for (int v = 0; v < V; ++v) {
            const int column = left + c * 32 + lane;
            known[c * V + v] = column < n && v < k ? x[column * x_row + v * x_column] : 0.0;
        }
    __syncthreads();
    for (int first = warp * (TILE / WARPS); first < (warp + 1) * (TILE / WARPS); first += ROWS) {
        double sum[ROWS * V] = {};
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int row = top + first + r;
            const double* place = a + row * pitch + left + lane;
            double element[EACH];
#pragma unroll
            for (int c = 0; c < EACH; ++c)
                element[c] = row < n && left + c * 32 + lane < n ? __ldcs(place + c * 32) : 0.0;
#pragma unroll
            for (int c = 0; c < EACH; ++c)
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    sum[r * V + v] = fma(element[c], known[c * V + v], sum[r * V + v]);
                    found[c * V + v] = fma(element[c], right[(first + r) * V + v], found[c * V + v]);
                }
        }
        fold<4>(sum);
        fold<2>(sum);
        fold<1>(sum);
        double total = sum[0] + __shfl_xor_sync(ALL, sum[0], 16);
        total += __shfl_xor_sync(ALL, total, 1);
        if (lane < 16 && lane % 2 == 0) shares[beside * apart + (top + first) * V + lane / 2] = total;
    }
    if (below == beside) return;  // both triangles of it were read
#pragma unroll
    for (int c = 0; c < EACH; ++c)
#pragma unroll
        for (int v = 0; v < V; ++v) sums[(warp * TILE + c * 32 + lane) * V + v] = found[c * V + v];
    __syncthreads();
    for (int i = thread; i < TILE * V; i += THREADS) {
        double total = 0.0;
        for (int w = 0; w < WARPS; ++w) total += sums[w * TILE * V + i];
        shares[below * apart + left * V + i] = total;
    }
}
