// A tournament of rows for the pivots of up to 32 columns, and the factors of the block that they form.
//
// A thread block eliminates with partial pivoting in a tile of rows, which stay in the registers of its threads, a
// row each, and its pivot rows meet those of other tiles in the next round. Nobody waits: the last thread block of a
// group to finish plays the next round for it. So a column costs a maximum over a thread block in each round and not
// one over the GPU.

#define WIDTH 32
#define LANES 32
#define GROUP (TILE / WIDTH)  // tiles whose pivot rows fill a tile of the next round
#define WARPS (TILE / LANES)
#define HALF (WIDTH / 2)
#define PITCH (WIDTH + 1)
#define ALL 0xffffffffu

__device__ __forceinline__ float reciprocal(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return 1.0f / x;
#endif
}

// The inverse of a lower triangle of order HALF, whose column i is in t[i * PITCH], by the first HALF lanes of a
// warp, each of which has a column: rows i of the inverse go to out[i * PITCH].
__device__ __forceinline__ void invert(const float* t, bool unit, float* out) {
    const int lane = threadIdx.x % LANES;
    float y[HALF];
#pragma unroll
    for (int i = 0; i < HALF; ++i) y[i] = i == lane ? 1.0f : 0.0f;
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
        if (!unit) y[i] *= reciprocal(t[i * PITCH + i]);
#pragma unroll
        for (int k = i + 1; k < HALF; ++k) y[k] = fmaf(-t[i * PITCH + k], y[i], y[k]);
    }
#pragma unroll
    for (int i = 0; i < HALF; ++i)
        if (lane < HALF) out[i * PITCH + lane] = y[i];
}

struct Shared {
    float4 rows[2][WARPS][WIDTH / 4];  // the best row of each warp
    uint4 bids[2][WARPS / 4];
    float scales[2][WARPS];  // reciprocals of the pivots that these would be
    int winners[WIDTH];
};

struct Player {
    Shared& shared;
    float x[WIDTH];
    int row, rank;
};

// The bid of a warp for a column, as one number, of which the largest wins: the leading bits of its largest element
// and the thread that has it. Elements that differ by less than 2^-16 count as equal, but zero is less than all
// others.
#define BITS 8  // of the number of a thread: TILE is 2^8

struct Bid {
    unsigned top;
    float scale;  // reciprocal of a thread's own element, 0 for 0
};

// For column j, of which the number comes first in all rows.
__device__ __forceinline__ Bid bid(const Player& p, int j, int count) {
    // The order of floating-point numbers is that of their bits, NaN above all.
    const unsigned size = ((__float_as_uint(p.x[0]) & 0x7fffffffu) + (1u << BITS) - 1u) >> BITS;
    const unsigned key = j < count && p.row >= 0 && p.rank < 0 ? (size + 1u) << BITS | threadIdx.x : 0u;
    // A zero pivot has nothing but zeros below it.
    return {__reduce_max_sync(ALL, key), p.x[0] == 0.0f ? 0.0f : reciprocal(p.x[0])};
}

// Eliminates up to 8 columns from the first one on, in rows of which the first N numbers still count.
//
// The loop is not unrolled, and there are only four of them: code that runs once takes longer to arrive than to
// run. So rows are turned instead, and the next column is always the first. What is done, L and the finished
// rows of U, comes in at the end.
template <int N>
__device__ __forceinline__ void steps(Player& p, Bid& offer, int first, int count) {
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
#pragma unroll 1
    for (int j = first; j < first + 8; ++j) {
        const int half = j % 2;
        if (lane == offer.top % LANES) {
            reinterpret_cast<unsigned*>(p.shared.bids[half])[warp] = offer.top;
            p.shared.scales[half][warp] = offer.scale;
#pragma unroll
            for (int c = 0; c < N; c += 4)
                p.shared.rows[half][warp][c / 4] = float4{p.x[c], p.x[c + 1], p.x[c + 2], p.x[c + 3]};
        }
        // One barrier a column: what is written next goes to the other half.
        __syncthreads();
        unsigned highest = 0;
#pragma unroll
        for (int w = 0; w < WARPS / 4; ++w) {
            const uint4 bids = p.shared.bids[half][w];
            highest = max(highest, max(max(bids.x, bids.y), max(bids.z, bids.w)));
        }
        // Where all columns are done, or fewer rows than columns are left, there is no winner, and nothing to subtract.
        const bool found = highest > 0;
        if (found && threadIdx.x == highest % TILE) {
            p.rank = j;
            p.shared.winners[j] = p.row;
        }
        const int winner = highest % TILE / LANES;
        const float scale = p.shared.scales[half][winner];
        float u[N];
#pragma unroll
        for (int c = 0; c < N; c += 4) {
            const float4 v = p.shared.rows[half][winner][c / 4];
            u[c] = v.x, u[c + 1] = v.y, u[c + 2] = v.z, u[c + 3] = v.w;
        }
#pragma unroll
        for (int c = N - 8; c < N; ++c)
            if (c >= N - (j - first)) u[c] = 0.0f;
        // The next column first: while its maximum is on its way, the others follow.
        const bool plays = found && p.rank < 0;
        const float l = plays ? p.x[0] * scale : 0.0f, done = plays ? l : p.x[0];
        p.x[0] = fmaf(-l, u[1], p.x[1]);
        offer = bid(p, j + 1, count);
#pragma unroll
        for (int c = 1; c + 1 < N; ++c) p.x[c] = fmaf(-l, u[c + 1], p.x[c + 1]);
        p.x[N - 1] = done;
    }
}

// A float rounded to the format of the factors, which lacks some bits: to nearest, ties to even.
__device__ __forceinline__ float rounded(float x, int dropped) {
    if (dropped == 0 || !(fabsf(x) <= 3.4028235e38f)) return x;
    const unsigned bits = __float_as_uint(x), odd = bits >> dropped & 1u;
    return __uint_as_float((bits + (1u << (dropped - 1)) - 1u + odd) >> dropped << dropped);
}

// block: m rows of 32 numbers. places: where each row has ended, -1 if nowhere; the latter are the pivot candidates.
// Columns from count on are zero. dropped: bits of a float that factors do not have; inverses are those of what
// is left. arrived: zeros, which it leaves as zeros.
extern "C" __global__ void __launch_bounds__(TILE) tournament(
    const float* block, int* places, int* pivots, float* factors, float* l_inverse, float* u_inverse,
    int* candidates, int* arrived, int dropped, int m, int start, int count
) {
    __shared__ Shared shared;
    // L^T, with ones on the diagonal, and U; L^-1, and U^-T.
    __shared__ float triangles[2][WIDTH * PITCH], inverses[2][WIDTH * PITCH];
    __shared__ int is_last;
    const int thread = threadIdx.x, warp = thread / LANES;
    int tile = blockIdx.x, tiles = gridDim.x;
    bool first = true;
    Player player{shared};
    auto& x = player.x;
    auto& row = player.row;
    auto& rank = player.rank;

    while (true) {
        const int i = tile * TILE + thread;
        if (first) row = i < m && places[i] < 0 ? i : -1;
        else row = __ldcg(candidates + i);
        rank = -1;
        const float4* source = reinterpret_cast<const float4*>(block + (long long)row * WIDTH);
#pragma unroll
        for (int c = 0; c < WIDTH / 4; ++c) {
            const float4 v = row >= 0 ? source[c] : float4{0.0f, 0.0f, 0.0f, 0.0f};
            x[4 * c] = v.x, x[4 * c + 1] = v.y, x[4 * c + 2] = v.z, x[4 * c + 3] = v.w;
        }
        if (thread < WIDTH) shared.winners[thread] = -1;
        Bid offer = bid(player, 0, count);
        steps<WIDTH>(player, offer, 0, count);
        steps<WIDTH - 8>(player, offer, 8, count);
        steps<WIDTH - 16>(player, offer, 16, count);
        steps<WIDTH - 24>(player, offer, 24, count);
        if (tiles == 1) break;
        __syncthreads();
        // Tiles of candidates are rounded up to whole ones: missing rows are no candidates.
        const int group = tile / GROUP, groups = (tiles + GROUP - 1) / GROUP;
        const int members = group + 1 < groups ? GROUP : tiles - group * GROUP;
        if (!first) candidates += tiles * TILE;
        if (thread < WIDTH) __stcg(candidates + tile * WIDTH + thread, shared.winners[thread]);
        if (group + 1 == groups)
            for (int i = tiles * WIDTH + thread; i < groups * TILE; i += TILE) __stcg(candidates + i, -1);
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
    float* lower = triangles[0];
    float* upper = triangles[1];
    for (int i = thread; i < 2 * WIDTH * PITCH; i += TILE) {
        triangles[0][i] = i % (WIDTH * PITCH) % PITCH == i % (WIDTH * PITCH) / PITCH ? 1.0f : 0.0f;
        inverses[0][i] = 0.0f;
    }
    __syncthreads();
    if (rank >= 0) {
        places[row] = start + rank;
        pivots[start + rank] = row;
#pragma unroll
        for (int c = 0; c < WIDTH; ++c) {
            // Where rows were turned to, four times by eight columns.
            const int column = (WIDTH / 8 - 1 - c / 8) * 8 + c % 8;
            const float value = rounded(x[c], dropped);
            if (column >= count) continue;
            if (column < rank) lower[column * PITCH + rank] = value;
            else upper[rank * PITCH + column] = value;
        }
    }
    __syncthreads();
    for (int i = thread; i < WIDTH * WIDTH; i += TILE) {
        const int r = i / WIDTH, c = i % WIDTH;
        factors[i] = c < r ? lower[c * PITCH + r] : upper[r * PITCH + c];
    }
    // The diagonal blocks of both inverses, and -T22^-1 T21 T11^-1 below them.
    if (warp < 4) {
        const int corner = warp % 2 * HALF * (PITCH + 1);
        invert(triangles[warp / 2] + corner, warp < 2, inverses[warp / 2] + corner);
    }
    __syncthreads();
    const int half = HALF * PITCH, i = thread / HALF % HALF, j = thread % HALF;
    float sums[2];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
        sums[t] = 0.0f;
        for (int k = 0; k < HALF; ++k)
            sums[t] = fmaf(triangles[t][k * PITCH + HALF + i], inverses[t][k * PITCH + j], sums[t]);
    }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < 2; ++t)
        if (thread < HALF * HALF) triangles[t][i * PITCH + j] = sums[t];
    __syncthreads();
#pragma unroll
    for (int t = 0; t < 2; ++t) {
        float sum = 0.0f;
        for (int k = 0; k < HALF; ++k)
            sum = fmaf(inverses[t][half + i * PITCH + HALF + k], triangles[t][k * PITCH + j], sum);
        if (thread < HALF * HALF) inverses[t][half + i * PITCH + j] = -sum;
    }
    __syncthreads();
    for (int e = thread; e < WIDTH * WIDTH; e += TILE) {
        const int r = e / WIDTH, c = e % WIDTH;
        l_inverse[e] = inverses[0][r * PITCH + c];
        u_inverse[e] = inverses[1][c * PITCH + r];
    }
}
