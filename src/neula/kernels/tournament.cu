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
#define PITCH (2 * WIDTH + 1)
#define ALL 0xffffffffu

// Rows of T^-1 for a lower triangle T, whose column i is in t[i * PITCH], a zero in each place below the last
// row. Each lane has a column of the inverse, of which the next element is always the first.
__device__ __forceinline__ void invert(const float* t, bool unit, float* out, int down, int across) {
    const int lane = threadIdx.x % LANES;
    float y[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) y[i] = i == lane ? 1.0f : 0.0f;
#pragma unroll 1
    for (int i = 0; i < WIDTH; ++i) {
        const float known = unit ? y[0] : y[0] / t[i * (PITCH + 1)];
        out[i * down + lane * across] = known;
#pragma unroll
        for (int k = 0; k + 1 < WIDTH; ++k) y[k] = fmaf(-t[i * (PITCH + 1) + k + 1], known, y[k + 1]);
        y[WIDTH - 1] = 0.0f;
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
    __shared__ float lower[WIDTH * PITCH], upper[WIDTH * PITCH];
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
        // Not unrolled: code that runs once takes longer to arrive than to run. So rows are turned instead, and
        // the next column is always the first. What is done, L and the finished rows of U, comes in at the end.
#pragma unroll 1
        for (int j = 0; j < count; ++j) {
            // The order of floating-point numbers is that of their bits, NaN above all.
            unsigned key = 0;
            int mine = 0;
#pragma unroll
            for (int q = 0; q < ROWS; ++q) {
                const unsigned k = (__float_as_uint(x[q][0]) & 0x7fffffffu) + 1u;
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
                        for (int c = 0; c < WIDTH; c += 4)
                            rows[j % 2][warp][c / 4] = float4{x[q][c], x[q][c + 1], x[q][c + 2], x[q][c + 3]};
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
            for (int c = 0; c < WIDTH; c += 4) {
                const float4 v = rows[j % 2][winner][c / 4];
                u[c] = v.x, u[c + 1] = v.y, u[c + 2] = v.z, u[c + 3] = v.w;
            }
            // A zero pivot has nothing but zeros below it.
            const float reciprocal = u[0] == 0.0f ? 0.0f : 1.0f / u[0];
#pragma unroll
            for (int c = 1; c < WIDTH; ++c) u[c] = c < WIDTH - j ? u[c] : 0.0f;
#pragma unroll
            for (int q = 0; q < ROWS; ++q) {
                const float l = rank[q] < 0 ? x[q][0] * reciprocal : 0.0f, done = rank[q] < 0 ? l : x[q][0];
#pragma unroll
                for (int c = 0; c + 1 < WIDTH; ++c) x[q][c] = fmaf(-l, u[c + 1], x[q][c + 1]);
                x[q][WIDTH - 1] = done;
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
    for (int i = thread; i < WIDTH * PITCH; i += THREADS) {
        lower[i] = upper[i] = i % PITCH == i / PITCH ? 1.0f : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int q = 0; q < ROWS; ++q) {
        if (rank[q] < 0) continue;
        places[row[q]] = start + rank[q];
        pivots[start + rank[q]] = row[q];
#pragma unroll
        for (int c = 0; c < WIDTH; ++c) {
            const int column = (c + count) % WIDTH;
            if (column >= count) continue;
            if (column < rank[q]) lower[column * PITCH + rank[q]] = x[q][c];
            else upper[rank[q] * PITCH + column] = x[q][c];
        }
    }
    __syncthreads();
    for (int i = thread; i < WIDTH * WIDTH; i += THREADS) {
        const int r = i / WIDTH, c = i % WIDTH;
        factors[i] = c < r ? lower[c * PITCH + r] : upper[r * PITCH + c];
    }
    if (warp == 0) invert(lower, true, l_inverse, WIDTH, 1);
    if (warp == 1) invert(upper, false, u_inverse, 1, WIDTH);
}
