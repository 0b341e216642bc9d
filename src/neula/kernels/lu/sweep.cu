// Triangular solves by thread blocks that take tasks from one list, in order.
//
// For each block of unknowns first rows of the inverse of its diagonal block are multiplied by what is left of its
// right-hand sides, then tiles of its columns by these unknowns, which is subtracted from what is left of later ones.
// A thread block waits until what its task needs is there. That comes from tasks further up in the list, which some
// thread block has taken before: so the first one that is not done never waits, however few run at a time. What the
// next task reads of the matrices comes to the L2 cache meanwhile. Columns of a block are divided into pieces, of
// which each has a copy of the right-hand sides to subtract from, so sums do not depend on what finishes first.
//
// V: right-hand sides. ROWS, PIECE: of a tile. FEW: rows of an inverse that are multiplied at a time.

#define WARPS (THREADS / 32)
#define LINE 128     // bytes that are fetched at a time
#define ALL 0xffffffffu

#ifdef __CUDA_ARCH__
__device__ __forceinline__ int seen(const int* flag) {
    int value;
    asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}
__device__ __forceinline__ void show(int* flag, int value) {
    asm volatile("st.release.gpu.s32 [%0], %1;" : : "l"(flag), "r"(value) : "memory");
}
__device__ __forceinline__ void fetch(const void* place) {
    asm volatile("prefetch.global.L2 [%0];" : : "l"(place));
}
__device__ __forceinline__ float wide(unsigned bits) {
#ifdef BFLOAT16
    return __uint_as_float(bits << 16);
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)bits));
    return value;
#endif
}
#endif

struct Four {
    float x[4];
};

__device__ __forceinline__ Four four(const unsigned short* place) {
    const uint2 bits = __ldg(reinterpret_cast<const uint2*>(place));
    return {wide(bits.x & 0xffffu), wide(bits.x >> 16), wide(bits.y & 0xffffu), wide(bits.y >> 16)};
}

__device__ __forceinline__ Four four(const float* place) {
    const float4 v = __ldg(reinterpret_cast<const float4*>(place));
    return {v.x, v.y, v.z, v.w};
}

__device__ __forceinline__ Four shared_four(const float* place) {
    const float4 v = *reinterpret_cast<const float4*>(place);
    return {v.x, v.y, v.z, v.w};
}

// Of twice as many numbers each lane keeps one half, with what the lane that keeps the other half has there.
template <int HALF>
__device__ __forceinline__ void fold(float* x) {
    const bool upper = threadIdx.x & HALF;
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
        const float sent = upper ? x[i] : x[i + HALF];
        x[i] = (upper ? x[i + HALF] : x[i]) + __shfl_xor_sync(ALL, sent, HALF);
    }
}

// Adds the numbers of all lanes: lane i has the sum of those with number i.
__device__ __forceinline__ float total(float* x) {
    fold<16>(x), fold<8>(x), fold<4>(x), fold<2>(x), fold<1>(x);
    return x[0];
}

// Adds products of four rows, contiguous, with right-hand sides that lie one after the other in shared memory: every
// ``stride`` columns 128 of them from ``first`` on, up to ``last``; those from ``size`` on are not there.
template <typename T>
__device__ __forceinline__ void add_rows(
    const T* rows, long long pitch, const float* x, int first, int last, int stride, int size, float (&sums)[32]
) {
    for (int j = first + threadIdx.x % 32 * 4; j < last; j += stride) {
        Four a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a[i] = j < size ? four(rows + i * pitch + j) : Four{};
            if (j + 3 >= size)
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    if (j + c >= size) a[i].x[c] = 0.0f;
        }
#pragma unroll
        for (int v = 0; v < V; ++v) {
            const Four y = shared_four(x + v * PIECE + j);
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int c = 0; c < 4; ++c) sums[i * V + v] = fmaf(a[i].x[c], y.x[c], sums[i * V + v]);
        }
    }
}

struct Problem {
    const unsigned short* t;
    const float* inverses;
    float *rest, *x;
    int* flags;
    int n, blocks, width, upper;
    long long row, column, next_inverse, inverse_row;

    __device__ int block_of(int step) const { return upper ? blocks - 1 - step : step; }
    __device__ const float* inverse(int step) const { return inverses + block_of(step) * next_inverse; }
    __device__ int pieces() const { return width / PIECE; }
    __device__ int* solved(int step) const { return flags + 1 + step * (width / FEW); }
    __device__ int* updated(int tile) const { return flags + 1 + blocks * (width / FEW) + tile * pieces(); }
    __device__ float* copy(int piece) const { return rest + (long long)piece * blocks * width * V; }
};

struct Task {
    int number, step, within;  // the number in the list, the step, and the number in that
    __device__ bool advance(const Problem& p) {
        for (; step < p.blocks; ++step) {
            const int count = p.width / FEW + (p.blocks - 1 - step) * (p.width / ROWS) * p.pieces();
            if (within < count) return true;
            within -= count;
        }
        return false;
    }
};

struct Tile {
    int place, piece, top, left;  // in the order in which blocks are solved for; the first row and column
    __device__ Tile(const Problem& p, const Task& task) {
        const int number = task.within - p.width / FEW;
        piece = number % p.pieces();
        place = (task.step + 1) * (p.width / ROWS) + number / p.pieces();
        const int step = place / (p.width / ROWS);
        top = p.block_of(step) * p.width + place % (p.width / ROWS) * ROWS;
        left = p.block_of(task.step) * p.width + piece * PIECE;
    }
};

// Prefetch the part of a matrix that a task reads to the L2 cache.
__device__ void fetch_task(const Problem& p, const Task& task) {
    if (task.within < p.width / FEW) {
        const float* rows = p.inverse(task.step) + task.within * FEW * p.inverse_row;
        const int first = p.upper ? task.within * FEW : 0, last = p.upper ? p.width : (task.within + 1) * FEW;
        const int lines = LINE / sizeof(float), across = p.width / lines;
        for (int i = threadIdx.x; i < FEW * across; i += THREADS) {
            const int j = i % across * lines;
            if (j + lines > first && j < last) fetch(rows + i / across * p.inverse_row + j);
        }
        return;
    }
    const Tile tile(p, task);
    const int down = min(ROWS, p.n - tile.top), across = min(PIECE, p.n - tile.left);
    const int lines = LINE / sizeof(unsigned short);
    const int outer = p.row == 1 ? across : down, inner = p.row == 1 ? down : across;
    const long long pitch = p.row == 1 ? p.column : p.row;
    const unsigned short* origin = p.t + tile.top * p.row + tile.left * p.column;
    const int per = (inner + lines - 1) / lines;
    for (int i = threadIdx.x; i < outer * per; i += THREADS) fetch(origin + i / per * pitch + i % per * lines);
}

// The sum of some copies of V numbers.
__device__ __forceinline__ void load(const Problem& p, int row, int copies, const float* from, float (&y)[V]) {
    const long long copy = (long long)p.blocks * p.width * V;
#pragma unroll
    for (int v = 0; v < V; ++v) y[v] = 0.0f;
    for (int c = 0; c < copies; ++c) {
        const float4* place = reinterpret_cast<const float4*>(from + c * copy + (long long)row * V);
        const float4 low = __ldcg(place), high = __ldcg(place + 1);
        y[0] += low.x, y[1] += low.y, y[2] += low.z, y[3] += low.w;
        y[4] += high.x, y[5] += high.y, y[6] += high.z, y[7] += high.w;
    }
}

// Right-hand sides to shared memory, one after the other.
__device__ __forceinline__ void load_turned(const Problem& p, int row, int copies, const float* from, float* x) {
    for (int i = threadIdx.x; i < PIECE; i += THREADS) {
        float y[V];
        load(p, row + i, copies, from, y);
#pragma unroll
        for (int v = 0; v < V; ++v) x[v * PIECE + i] = y[v];
    }
    __syncthreads();
}

// Some unknowns: rows of an inverse times what is left of the right-hand sides.
__device__ void multiply_inverse(const Problem& p, const Task& task, float* x, float* sums) {
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, per_block = p.width / ROWS;
    const int left = p.block_of(task.step) * p.width, top = task.within * FEW;
    for (int i = thread; i < per_block * p.pieces(); i += THREADS)
        while (seen(p.updated(task.step * per_block) + i) < task.step) {}
    __syncthreads();
    const int first = p.upper ? top / 128 * 128 : 0, last = p.upper ? p.width : top + FEW;
    // Half of the warps have every other 128 columns.
    const float* rows = p.inverse(task.step) + (top + warp / 2 * 4) * p.inverse_row;
    float found[32] = {};
    for (int start = first / PIECE * PIECE; start < last; start += PIECE) {
        load_turned(p, left + start, p.pieces(), p.rest, x);
        const int begin = max(0, first - start) + warp % 2 * 128;
        add_rows(rows + start, p.inverse_row, x, begin, min(PIECE, last - start), 256, PIECE, found);
        __syncthreads();
    }
    sums[warp * 32 + lane] = total(found);
    __syncthreads();
    if (thread < FEW * V) {
        const int pair = thread / 32 * 64 + thread % 32;
        p.x[((long long)left + top) * V + thread] = sums[pair] + sums[pair + 32];
    }
}

// Contribution of unknowns to the right-hand sides of a tile.
__device__ void multiply_tile(const Problem& p, const Task& task, float* x, float* sums) {
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const Tile tile(p, task);
    if (thread < PIECE / FEW)
        while (seen(p.solved(task.step) + tile.piece * (PIECE / FEW) + thread) == 0) {}
    if (thread == PIECE / FEW)
        while (seen(p.updated(tile.place) + tile.piece) < task.step) {}
    __syncthreads();
    const unsigned short* origin = p.t + tile.top * p.row + tile.left * p.column;
    const int size = p.n - tile.left;
    const float4* known = reinterpret_cast<const float4*>(p.x + (long long)tile.left * V);
    if (p.row == 1) {
        for (int i = thread; i < PIECE * V / 4; i += THREADS) reinterpret_cast<float4*>(x)[i] = __ldcg(known + i);
        __syncthreads();
        // A warp has two columns at a time, a lane four rows.
        float a[32] = {};
        const int i = lane % 16 * 4;
        const bool inside = tile.top + i < p.n;
#pragma unroll 8
        for (int j = warp * 2 + lane / 16; j < PIECE; j += 2 * WARPS) {
            const Four t = inside && j < size ? four(origin + i + j * p.column) : Four{};
            const Four low = shared_four(x + j * V), high = shared_four(x + j * V + 4);
#pragma unroll
            for (int r = 0; r < 4; ++r)
#pragma unroll
                for (int v = 0; v < 4; ++v) {
                    a[r * V + v] = fmaf(t.x[r], low.x[v], a[r * V + v]);
                    a[r * V + v + 4] = fmaf(t.x[r], high.x[v], a[r * V + v + 4]);
                }
        }
        // Of the two columns each lane keeps two of its rows.
        fold<16>(a);
        float4* own = reinterpret_cast<float4*>(sums + warp * (ROWS * V) + (i + lane / 16 * 2) * V);
#pragma unroll
        for (int k = 0; k < 4; ++k) own[k] = float4{a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3]};
        __syncthreads();
    } else {
        load_turned(p, tile.left, 1, p.x, x);
        const int last = min(PIECE, size);
        for (int i = warp * 4; i < ROWS; i += 4 * WARPS) {
            float found[32] = {};
            if (tile.top + i < p.n) add_rows(origin + i * p.row, p.row, x, 0, last, 128, size, found);
            sums[i * V + lane] = total(found);
        }
        __syncthreads();
    }
    const int count = p.row == 1 ? WARPS : 1;
    float* target = p.copy(tile.piece) + (long long)tile.top * V;
    for (int i = thread; i < min(ROWS, p.n - tile.top) * V; i += THREADS) {  // zeros below the matrix stay
        float sum = 0.0f;
        for (int w = 0; w < count; ++w) sum += sums[w * (ROWS * V) + i];
        target[i] = __ldcg(target + i) - sum;
    }
}

// rest: right-hand sides, and zeros in the other copies. flags: zeros.
extern "C" __global__ void __launch_bounds__(THREADS, 2) sweep(
    const unsigned short* t, const float* inverses, float* rest, float* x, int* flags, int n, int blocks, int width,
    int upper, long long row, long long column, long long next_inverse, long long inverse_row
) {
    extern __shared__ float4 room[];
    float* right = reinterpret_cast<float*>(room);
    float* sums = right + V * PIECE;
    int& ticket = *reinterpret_cast<int*>(sums + WARPS * ROWS * V);
    const Problem p{t, inverses, rest, x, flags, n, blocks, width, upper, row, column, next_inverse, inverse_row};
    if (threadIdx.x == 0) ticket = atomicAdd(flags, 1);
    __syncthreads();
    Task task{ticket, 0, ticket};
    bool going = task.advance(p);
    if (going) fetch_task(p, task);
    int after = 0;
    if (threadIdx.x == 0) after = atomicAdd(flags, 1);
    while (going) {
        __syncthreads();
        if (threadIdx.x == 0) {
            ticket = after;
            after = atomicAdd(flags, 1);  // it comes while this task is at work
        }
        __syncthreads();
        Task next{ticket, task.step, task.within + ticket - task.number};
        going = next.advance(p);
        if (going) fetch_task(p, next);
        const bool solves = task.within < width / FEW;
        if (solves) multiply_inverse(p, task, right, sums);
        else multiply_tile(p, task, right, sums);
        __syncthreads();
        if (threadIdx.x == 0) {
            if (solves) show(p.solved(task.step) + task.within, 1);
            else {
                const Tile tile(p, task);
                show(p.updated(tile.place) + tile.piece, task.step + 1);
            }
        }
        task = next;
    }
}
