// A tournament of rows for the pivots of up to 32 columns, and the factors of the block that they form.
//
// A thread block eliminates with partial pivoting in a tile of rows, which stay in the registers of its threads,
// and its pivot rows meet those of other tiles in the next round. Nobody waits: the last thread block of a group
// to finish plays the next round for it. So a column costs a maximum over a thread block in each round and not
// one over the GPU.

#define WIDTH 32
#define LANES 32
#define GROUP (TILE / WIDTH)  // tiles whose pivot rows fill a tile of the next round
#define ROWS (TILE / THREADS)
#define WARPS (THREADS / LANES)
#define ALL 0xffffffffu

// Solves T y = e for the unit vector of each lane, T being lower triangular with elements [i * down + j * across].
__device__ __forceinline__ void invert(const float* t, int down, int across, bool unit, float* y) {
    const int lane = threadIdx.x % LANES;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) y[i] = i == lane ? 1.0f : 0.0f;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
        if (!unit) y[i] /= t[i * (down + across)];
#pragma unroll
        for (int k = i + 1; k < WIDTH; ++k) y[k] = fmaf(-t[k * down + i * across], y[i], y[k]);
    }
}

// block: m rows of 32 numbers. places: where each row has ended, -1 if nowhere; those are the ones that play.
// Columns from count on are zero. arrived: zeros, which it leaves as zeros.
extern "C" __global__ void __launch_bounds__(THREADS) tournament(
    const float* block, int* places, int* pivots, float* factors, float* l_inverse, float* u_inverse,
    int* candidates, int* arrived, int m, int start, int count
) {
    __shared__ float4 rows[2][WARPS][WIDTH / 4];  // the best row of each warp
    __shared__ unsigned best[2][WARPS];
    __shared__ float lu[WIDTH * (WIDTH + 1)];
    __shared__ int winners[WIDTH], is_last;
    const int thread = threadIdx.x, warp = thread / LANES, lane = thread % LANES;
    int tile = blockIdx.x, tiles = gridDim.x;
    bool first = true;
    float x[ROWS][WIDTH];
    int row[ROWS], rank[ROWS];

    while (true) {
#pragma unroll
        for (int q = 0; q < ROWS; ++q) {
            const int i = tile * TILE + q * THREADS + thread;
            if (first) row[q] = i < m && places[i] < 0 ? i : -1;
            else row[q] = __ldcg(candidates + i);
            rank[q] = -1;
            const float4* source = reinterpret_cast<const float4*>(block + (long long)row[q] * WIDTH);
#pragma unroll
            for (int c = 0; c < WIDTH / 4; ++c) {
                const float4 v = row[q] >= 0 ? source[c] : float4{0.0f, 0.0f, 0.0f, 0.0f};
                x[q][4 * c] = v.x, x[q][4 * c + 1] = v.y, x[q][4 * c + 2] = v.z, x[q][4 * c + 3] = v.w;
            }
        }
        if (thread < WIDTH) winners[thread] = -1;
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            if (j >= count) break;
            // The order of floating-point numbers is that of their bits, NaN above all.
            unsigned key = 0;
            int mine = 0;
#pragma unroll
            for (int q = 0; q < ROWS; ++q) {
                const unsigned k = (__float_as_uint(x[q][j]) & 0x7fffffffu) + 1u;
                if (row[q] >= 0 && rank[q] < 0 && k > key) key = k, mine = q;
            }
            const unsigned top = __reduce_max_sync(ALL, key);
            const int leader = __ffs(__ballot_sync(ALL, key == top)) - 1;
            if (lane == leader) {
                best[j % 2][warp] = top;
#pragma unroll
                for (int q = 0; q < ROWS; ++q)
                    if (q == mine)
#pragma unroll
                        for (int c = j / 4; c < WIDTH / 4; ++c)
                            rows[j % 2][warp][c] =
                                float4{x[q][4 * c], x[q][4 * c + 1], x[q][4 * c + 2], x[q][4 * c + 3]};
            }
            // One barrier a column: what is written next goes to the other half.
            __syncthreads();
            const unsigned bid = lane < WARPS ? best[j % 2][lane] : 0;
            const unsigned highest = __reduce_max_sync(ALL, bid);
            if (highest == 0) break;  // fewer rows than columns
            const int winner = __ffs(__ballot_sync(ALL, bid == highest)) - 1;
            if (warp == winner && lane == leader) {
#pragma unroll
                for (int q = 0; q < ROWS; ++q)
                    if (q == mine) {
                        rank[q] = j;
                        winners[j] = row[q];
                    }
            }
            float u[WIDTH];
#pragma unroll
            for (int c = j / 4; c < WIDTH / 4; ++c) {
                const float4 v = rows[j % 2][winner][c];
                u[4 * c] = v.x, u[4 * c + 1] = v.y, u[4 * c + 2] = v.z, u[4 * c + 3] = v.w;
            }
            // A zero pivot has nothing but zeros below it.
            const float reciprocal = u[j] == 0.0f ? 0.0f : 1.0f / u[j];
#pragma unroll
            for (int q = 0; q < ROWS; ++q) {
                if (rank[q] >= 0) continue;
                const float l = x[q][j] * reciprocal;
                x[q][j] = l;
#pragma unroll
                for (int c = j + 1; c < WIDTH; ++c) x[q][c] = fmaf(-l, u[c], x[q][c]);
            }
        }
        if (tiles == 1) break;
        __syncthreads();
        // Tiles of candidates are rounded up to whole ones: what is missing does not play.
        const int group = tile / GROUP, groups = (tiles + GROUP - 1) / GROUP;
        const int members = group + 1 < groups ? GROUP : tiles - group * GROUP;
        if (!first) candidates += tiles * TILE;
        if (thread < WIDTH) __stcg(candidates + tile * WIDTH + thread, winners[thread]);
        if (group + 1 == groups)
            for (int i = tiles * WIDTH + thread; i < groups * TILE; i += THREADS) __stcg(candidates + i, -1);
        __threadfence();
        __syncthreads();
        if (thread == 0) {
            is_last = atomicAdd(arrived + group, 1) == members - 1;
            if (is_last) arrived[group] = 0;
        }
        __syncthreads();
        if (!is_last) return;
        __threadfence();
        arrived += groups;
        tile = group, tiles = groups, first = false;
    }
    __syncthreads();
    for (int i = thread; i < WIDTH * WIDTH; i += THREADS)
        lu[i / WIDTH * (WIDTH + 1) + i % WIDTH] = i / WIDTH == i % WIDTH ? 1.0f : 0.0f;
    __syncthreads();
#pragma unroll
    for (int q = 0; q < ROWS; ++q) {
        if (rank[q] < 0) continue;
        places[row[q]] = start + rank[q];
        pivots[start + rank[q]] = row[q];
#pragma unroll
        for (int c = 0; c < WIDTH; ++c)
            if (c < count) lu[rank[q] * (WIDTH + 1) + c] = x[q][c];
    }
    __syncthreads();
    for (int i = thread; i < WIDTH * WIDTH; i += THREADS)
        factors[i] = lu[i / WIDTH * (WIDTH + 1) + i % WIDTH];
    if (warp > 1) return;
    float y[WIDTH];
    if (warp == 0) {
        invert(lu, WIDTH + 1, 1, true, y);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) l_inverse[i * WIDTH + lane] = y[i];
    } else {
        invert(lu, 1, WIDTH + 1, false, y);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) u_inverse[lane * WIDTH + i] = y[i];
    }
}
