// L of symmetric matrices A = L L^T, and inverses of blocks of L, by one launch for all of some matrices.
//
// [A; I] = [L; L^-T] L^T: the operations on columns that turn A into L turn an identity below it into L^-T. The rows of
// both are cut into square tiles. A tile is a task: what all tiles to its left contribute is subtracted, then it is
// solved with L of its column's diagonal tile. Tasks are handed out column by column, and a task waits only for such as
// were handed out before. So whatever number of thread blocks runs, one of them can go on; and while some solve with a
// column, others have begun the next ones. First in a column comes what the next diagonal tile waits for, then that.
//
// Where few tiles are on the way at a time, the chain of diagonal tiles is what takes time. Then a thread block takes
// the tile to the left of its diagonal tile as it was before it was solved, and solves it, too: it waits for the
// diagonal tile before that alone, and not for another thread block which waits for it as well.

#ifndef REAL
#define REAL double
#endif
#define TILE 64
#define PITCH (TILE + 4)  // of a tile: four columns of some rows one below the other are in different banks
#define DEPTH (128 / static_cast<int>(sizeof(REAL)))  // columns that are multiplied at a time
#define DEPTH_PITCH (DEPTH + 4)
#define STAGES 3
#define PER_TILE (TILE / DEPTH)
#define CHUNK (16 / static_cast<int>(sizeof(REAL)))  // numbers that are copied at a time
#define SIDE 8  // of the blocks on the diagonal of a tile
#define SIDES (TILE / SIDE)
#define THREADS 256
#define CHAIN 96   // threads along the chain of square roots
#define FIRST 128  // threads that subtract what the chain waits for: a warp for each two blocks of rows
#ifndef BLOCKS
#define BLOCKS 2  // for which a multiprocessor is to have room
#endif
#define CHAINED (BLOCKS == 1)  // few tiles are on the way at a time
#define ALL 0xffffffffu

#ifdef __CUDA_ARCH__
extern __shared__ double2 shared_room[];
#define shared reinterpret_cast<REAL*>(shared_room)

__device__ __forceinline__ void copy_16(REAL* place, const REAL* from) {
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(place));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wait_for_all_but() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
// Later reads come from the cache that all multiprocessors share, so no other instruction has to wait.
__device__ __forceinline__ int seen_at(const int* place) {
    int seen;
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(seen) : "l"(place) : "memory");
    return seen;
}
__device__ __forceinline__ void show(int* place, int value) {
    asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(place), "r"(value) : "memory");
}
__device__ __forceinline__ void rest() {}
__device__ __forceinline__ void barrier_of_chain() { asm volatile("bar.sync 1, %0;" ::"n"(CHAIN) : "memory"); }
__device__ __forceinline__ void barrier_before_chain() { asm volatile("bar.sync 2, %0;" ::"n"(FIRST) : "memory"); }

// C + A B: of A of 16 x 8 a lane has column t and t + 4 of row g and of row g + 8, of B of 8 x 8 rows t and t + 4 of
// column g, and of C columns 2 t and 2 t + 1 of row g and of row g + 8, for t = lane % 4, g = lane / 4.
__device__ __forceinline__ void multiply(double (&c)[4], const double (&a)[4], const double (&b)[2]) {
#if __CUDA_ARCH__ >= 900 && !defined(NARROW)
    asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
#else
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int i = 0; i < 2; ++i)
            asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                : "+d"(c[2 * i]), "+d"(c[2 * i + 1])
                : "d"(a[2 * k + i]), "d"(b[k]));
#endif
}

__device__ __forceinline__ unsigned rounded(float x) {
    unsigned y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ void multiply_parts(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <int N>
__device__ __forceinline__ void split(const float (&x)[N], unsigned (&high)[N], unsigned (&low)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i)
        high[i] = rounded(x[i]), low[i] = __float_as_uint(x[i] - __uint_as_float(high[i]));
}
// Each number is a sum of two that the unit multiplies, and the smallest of four products is dropped.
__device__ __forceinline__ void multiply(float (&c)[4], const float (&a)[4], const float (&b)[2]) {
    unsigned a_high[4], a_low[4], b_high[2], b_low[2];
    split(a, a_high, a_low), split(b, b_high, b_low);
    multiply_parts(c, a_low, b_high);
    multiply_parts(c, a_high, b_low);
    multiply_parts(c, a_high, b_high);
}

// The same, sooner: the products that are small have a sum of their own.
__device__ __forceinline__ void multiply_soon(float (&c)[4], const float (&a)[4], const float (&b)[2]) {
    unsigned a_high[4], a_low[4], b_high[2], b_low[2];
    float small[4] = {};
    split(a, a_high, a_low), split(b, b_high, b_low);
    multiply_parts(small, a_high, b_low);
    multiply_parts(c, a_high, b_high);
    multiply_parts(small, a_low, b_high);
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] += small[i];
}
__device__ __forceinline__ void multiply_soon(double (&c)[4], const double (&a)[4], const double (&b)[2]) {
    multiply(c, a, b);
}

// A part in 2^20 is left by the unit, and cubed by a step.
__device__ __forceinline__ double reciprocal_root(double x) {
    double y;
    asm("rsqrt.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));
    const double e = fma(-x * y, y, 1.0);
    return fma(y * e, fma(0.375, e, 0.5), y);
}
__device__ __forceinline__ float reciprocal_root(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

struct Matrices {
    const REAL* a;  // of any strides; lower triangles are read
    long long next, a_row, a_column;
    REAL* l;         // row-major, `size` numbers in a row
    REAL* inverses;  // L^-T of blocks of `per_block` tiles, one after the other, row-major; of a single matrix
    REAL* diagonal;  // L^-T of blocks of SIDE columns
    int* orders;     // of minors that are not positive, or 0
    int* done;       // how far each row of tiles is
    REAL* unsolved;  // where CHAINED, tiles below diagonal ones before they are solved, one after the other
    int* offered;    // whether they are there
    int n, tiles, per_block;

    __device__ int size() const { return tiles * TILE; }
    __device__ int rows() const { return per_block > 0 ? 2 * tiles : tiles; }
    __device__ Matrices at(int member) const {
        Matrices m = *this;
        const long long rows_before = static_cast<long long>(member) * size();
        m.a += member * next, m.l += rows_before * size(), m.diagonal += rows_before * SIDE;
        m.orders += member, m.done += member * rows();
        if (CHAINED) m.unsolved += rows_before * TILE, m.offered += member * tiles;
        return m;
    }
};

// A row of tiles, of L or of the inverses.
struct Row {
    REAL* first;  // where column 0 of it would be
    long long pitch;
    int begin;  // the first column of tiles that is not zero
    int* done;  // columns of tiles that are done

    __device__ Row(const Matrices& m, int i, bool inverse) {
        if (!inverse) {
            pitch = m.size(), first = m.l + i * TILE * pitch, begin = 0, done = m.done + i;
            return;
        }
        const int block = i / m.per_block;
        pitch = m.per_block * TILE;
        first = m.inverses + block * pitch * pitch + (i - block * m.per_block) * TILE * pitch - block * pitch;
        begin = i, done = m.done + m.tiles + i;
    }
};

__device__ __forceinline__ REAL* stage_of(int stage) { return shared + stage % STAGES * 2 * TILE * DEPTH_PITCH; }
__device__ __forceinline__ REAL* tile_of_sums() { return shared; }
__device__ __forceinline__ REAL* tile_of_l() { return shared + STAGES * 2 * TILE * DEPTH_PITCH; }
__device__ __forceinline__ REAL* diagonal_inverses() { return tile_of_l() + TILE * PITCH; }
__device__ __forceinline__ int* seen_in_turn() { return reinterpret_cast<int*>(diagonal_inverses() + TILE * SIDE); }

// Some columns of two rows of tiles, on their way to shared memory.
__device__ __forceinline__ void fetch(const Row& x, const Row& y, int stage) {
    const int row = threadIdx.x / 8, part = threadIdx.x % 8 * CHUNK;  // 128 bytes
    const long long column = x.begin * TILE + stage * DEPTH + part;
    REAL* to = stage_of(stage) + row * DEPTH_PITCH + part;
#pragma unroll
    for (int i = 0; i < TILE; i += THREADS / 8) {
        copy_16(to + i * DEPTH_PITCH, x.first + (row + i) * x.pitch + column);
        if (x.first != y.first) copy_16(to + (TILE + i) * DEPTH_PITCH, y.first + (row + i) * y.pitch + column);
    }
    commit();
}

// Contribution of columns of two tiles to 16 rows and 32 columns of a third, by a warp.
__device__ __forceinline__ void add_columns(const REAL* x, const REAL* y, REAL (&sums)[4][4]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    x += (warp / 2 * 16 + g) * DEPTH_PITCH + t, y += (warp % 2 * 32 + g) * DEPTH_PITCH + t;
#pragma unroll
    for (int k = 0; k < DEPTH; k += 8) {
        const REAL a[4] = {x[k], x[8 * DEPTH_PITCH + k], x[k + 4], x[8 * DEPTH_PITCH + k + 4]};
#pragma unroll
        for (int v = 0; v < 4; ++v) {
            const REAL b[2] = {y[8 * v * DEPTH_PITCH + k], y[8 * v * DEPTH_PITCH + k + 4]};
            multiply(sums[v], a, b);
        }
    }
}

// L of a diagonal tile and inverses of the blocks on its diagonal, on their way to shared memory.
__device__ __forceinline__ void fetch_diagonal(const Matrices& m, const Row& y, int j) {
    const int thread = threadIdx.x;
#pragma unroll
    for (int e = 0; e < TILE * TILE; e += CHUNK * THREADS) {
        const int r = (e + CHUNK * thread) / TILE, c = (e + CHUNK * thread) % TILE;
        if (c <= r) copy_16(tile_of_l() + r * PITCH + c, y.first + r * y.pitch + j * TILE + c);
    }
    if (CHUNK * thread < TILE * SIDE)
        copy_16(diagonal_inverses() + CHUNK * thread, m.diagonal + j * TILE * SIDE + CHUNK * thread);
}

// The same; sums on the unit are truncated in single precision, so these stay short.
__device__ __forceinline__ void add_stage(const REAL* x, const REAL* y, REAL (&sums)[4][4]) {
    if (sizeof(REAL) == 8) {
        add_columns(x, y, sums);
        return;
    }
    REAL part[4][4] = {};
    add_columns(x, y, part);
#pragma unroll
    for (int v = 0; v < 4; ++v)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[v][e] += part[v][e];
}

// Contribution of some columns of tiles to column j. Returns whether the diagonal tile of that is on its way already.
__device__ __forceinline__ bool add_products(
    const Matrices& m, const Row& x, const Row& y, int j, int columns, REAL (&sums)[4][4]
) {
    const int stages = (columns - x.begin) * PER_TILE;
    const bool square = x.first == y.first;
    int* seen = seen_in_turn();
    int ready = 0, issued = 0;  // stages
    bool fetched = false;
    for (int stage = 0; stage < stages; ++stage) {
        if (issued == stage) {
            if (ready == stage) {
                if (threadIdx.x == 0) {
                    const int wanted = x.begin + stage / PER_TILE + 1;
                    int known, of_y;
                    while ((known = min(seen_at(x.done), of_y = seen_at(y.done))) < wanted) rest();
                    seen[2] = known, seen[4] = of_y;
                }
                __syncthreads();
                ready = min(stages, (seen[2] - x.begin) * PER_TILE);
                if (!fetched && !square && seen[4] > j) fetch_diagonal(m, y, j), fetched = true;
            }
            fetch(x, y, issued++);
        }
        const bool asks = issued < stages && issued == ready;
        if (asks && threadIdx.x == 0) seen[stage % 2] = min(seen_at(x.done), seen_at(y.done));
        if (issued - stage == 1) wait_for_all_but<0>();
        else if (issued - stage == 2) wait_for_all_but<1>();
        else wait_for_all_but<2>();
        __syncthreads();
        if (asks) ready = min(stages, (seen[stage % 2] - x.begin) * PER_TILE);
        while (issued < min(ready, stage + STAGES)) fetch(x, y, issued++);
        add_stage(stage_of(stage), stage_of(stage) + (square ? 0 : TILE * DEPTH_PITCH), sums);
    }
    __syncthreads();
    return fetched;
}

// Rows of block r, of twice as many, and columns of block c of the tile without what columns of block k contribute.
__device__ __forceinline__ void subtract_block(int r, int c, int k) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    REAL* s = tile_of_sums();
    REAL* place = s + (r * 2 * SIDE + g) * PITCH + c * SIDE + 2 * t;
    REAL* below = place + SIDE * PITCH;
    const REAL* x = s + (r * 2 * SIDE + g) * PITCH + k * SIDE + t;
    const REAL* y = s + (c * SIDE + g) * PITCH + k * SIDE + t;
    REAL sum[4] = {place[0], place[1], below[0], below[1]};
    const REAL a[4] = {-x[0], -x[SIDE * PITCH], -x[4], -x[SIDE * PITCH + 4]}, b[2] = {y[0], y[4]};
    multiply_soon(sum, a, b);
    place[0] = sum[0], place[1] = sum[1], below[0] = sum[2], below[1] = sum[3];
}

// Contribution of block k to the columns after the next, some blocks for each warp that does not follow the chain.
__device__ __forceinline__ void subtract_beside(int k) {
    const int warps = (THREADS - CHAIN) / 32;
    for (int turn = (threadIdx.x - FIRST + THREADS - CHAIN) / 32 % warps;; turn += warps) {
        int r = SIDES / 2 - 1, c = turn + k + 2;  // rows of block r end with columns of block 2 r + 1
        for (; r >= 0 && c > 2 * r + 1; --r) c -= max(0, 2 * r - k);
        if (r < 0) return;
        subtract_block(r, c, k);
    }
}

struct alignas(16) Chunk {
    REAL x[CHUNK];
};

__device__ __forceinline__ void load_side(const REAL* from, REAL (&row)[SIDE]) {
#pragma unroll
    for (int k = 0; k < SIDE; k += CHUNK) {
        const Chunk some = *reinterpret_cast<const Chunk*>(from + k);
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) row[k + i] = some.x[i];
    }
}

__device__ __forceinline__ void store_side(const REAL (&row)[SIDE], REAL* to) {
#pragma unroll
    for (int k = 0; k < SIDE; k += CHUNK) {
        Chunk some;
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) some.x[i] = row[k + i];
        *reinterpret_cast<Chunk*>(to + k) = some;
    }
}

// Columns of block p of L, and the inverse of the block on its diagonal. Each thread has a row and all of the diagonal
// block in registers, so none waits for another. Returns the first column whose pivot is not positive, or SIDE.
__device__ __forceinline__ int eliminate(int p) {
    const int thread = threadIdx.x, row = p * SIDE + thread;
    REAL* s = tile_of_sums() + p * SIDE;
    REAL d[SIDE][SIDE], x[SIDE];
    const bool identity = thread >= TILE, inside = !identity && row < TILE;
#pragma unroll
    for (int i = 0; i < SIDE; ++i) load_side(s + (p * SIDE + i) * PITCH, d[i]);
    load_side(s + (inside ? row : p * SIDE) * PITCH, x);
#pragma unroll
    for (int i = 0; i < SIDE; ++i)
        if (identity) x[i] = thread - TILE == i ? 1 : 0;
    barrier_of_chain();
    int first = SIDE;
#pragma unroll
    for (int c = 0; c < SIDE; ++c) {
        if (first == SIDE && !(d[c][c] > 0)) first = c;
        const REAL root = reciprocal_root(d[c][c]);
        x[c] *= root;
#pragma unroll
        for (int i = c + 1; i < SIDE; ++i) {
            d[i][c] *= root;
            x[i] = fma(-x[c], d[i][c], x[i]);
#pragma unroll
            for (int k = c + 1; k <= i; ++k) d[i][k] = fma(-d[i][c], d[k][c], d[i][k]);
        }
    }
#pragma unroll
    for (int c = 0; c < SIDE; ++c)
        if (identity ? thread - TILE > c : thread < c) x[c] = 0;
    if (inside) store_side(x, s + row * PITCH);
    else if (identity && thread < TILE + SIDE) store_side(x, diagonal_inverses() + (p * SIDE + thread - TILE) * SIDE);
    return first;
}

// L of a diagonal tile in its place. Beside a block of columns those after it are updated by the one before it. The
// first thread knows the first column whose pivot is not positive, or TILE.
__device__ __forceinline__ int factorize_tile() {
    const int warp = threadIdx.x / 32;
    int found = TILE;
#pragma unroll 1
    for (int p = 0; p < SIDES; ++p) {
        if (p > 0 && threadIdx.x < FIRST) {
            if (p / 2 + warp < SIDES / 2) subtract_block(p / 2 + warp, p, p - 1);
            barrier_before_chain();
        }
        if (threadIdx.x < CHAIN) {
            const int first = eliminate(p);
            if (found == TILE && first < SIDE) found = p * SIDE + first;
        } else if (p > 0) {
            subtract_beside(p - 1);
        }
        __syncthreads();
    }
    return found;
}

// Of eight columns, of which a lane has two beside each other in rows g and g + 8, those that it multiplies.
__device__ __forceinline__ void as_factor(const REAL (&c)[4], REAL (&a)[4]) {
    const int lane = threadIdx.x % 32, from = lane / 4 * 4 + lane % 4 / 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const REAL even = __shfl_sync(ALL, c[i % 2 * 2], from + i / 2 * 2);
        const REAL odd = __shfl_sync(ALL, c[i % 2 * 2 + 1], from + i / 2 * 2);
        a[i] = lane % 2 ? odd : even;
    }
}

// Sixteen rows of a tile become those times L^-T of the diagonal tile, by a warp.
__device__ __forceinline__ void solve_rows(REAL (&sums)[SIDES][4]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const REAL* l = tile_of_l() + g * PITCH + t;
    const REAL* inverse = diagonal_inverses() + t * SIDE + g;
#pragma unroll
    for (int c = 0; c < SIDES; ++c) {
        REAL a[4], found[4] = {};
        as_factor(sums[c], a);
        const REAL of_inverse[2] = {inverse[c * SIDE * SIDE], inverse[(c * SIDE + 4) * SIDE]};
        multiply_soon(found, a, of_inverse);
        as_factor(found, a);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[c][i] = found[i], a[i] = -a[i];
#pragma unroll
        for (int d = c + 1; d < SIDES; ++d) {
            const REAL b[2] = {l[d * SIDE * PITCH + c * SIDE], l[d * SIDE * PITCH + c * SIDE + 4]};
            if (d == c + 1) multiply_soon(sums[d], a, b);
            else multiply(sums[d], a, b);
        }
    }
}

// Elements of a tile in a warp before anything is subtracted, with the other sign: of the lower triangle of A, bordered by
// an identity. All loads are in flight together.
__device__ __forceinline__ void begin_sums(const Matrices& m, int i, int j, bool inverse, REAL (&sums)[4][4]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, last = m.n - 1;
    const int top = i * TILE + warp / 2 * 16 + lane / 4, left = j * TILE + warp % 2 * 32 + lane % 4 * 2;
    if (inverse) {
        for (int v = 0; v < 4; ++v)
            for (int e = 0; e < 4; ++e) sums[v][e] = 0;
    } else if (i > j) {
        const REAL* rows[2] = {m.a + min(top, last) * m.a_row, m.a + min(top + 8, last) * m.a_row};
#pragma unroll
        for (int v = 0; v < 4; ++v)
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[v][e] = -rows[e / 2][(left + 8 * v + e % 2) * m.a_column];
    } else {
#pragma unroll
        for (int v = 0; v < 4; ++v)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = top + e / 2 * 8, column = left + 8 * v + e % 2;
                const int r = min(max(row, column), last), c = min(min(row, column), last);
                sums[v][e] = -m.a[r * m.a_row + c * m.a_column];
            }
    }
    if (!inverse && (i + 1) * TILE <= m.n) return;
#pragma unroll
    for (int v = 0; v < 4; ++v)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int row = top + e / 2 * 8, column = left + 8 * v + e % 2;
            if (inverse || max(row, column) > last) sums[v][e] = row == column ? -1 : 0;
        }
}

__device__ __forceinline__ void store_sums(const REAL (&sums)[4][4]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    REAL* place = tile_of_sums() + (warp / 2 * 16 + lane / 4) * PITCH + warp % 2 * 32 + lane % 4 * 2;
#pragma unroll
    for (int v = 0; v < 4; ++v) {
        place[8 * v] = -sums[v][0], place[8 * v + 1] = -sums[v][1];
        place[8 * PITCH + 8 * v] = -sums[v][2], place[8 * PITCH + 8 * v + 1] = -sums[v][3];
    }
    __syncthreads();
}

// That a row of tiles has come so far, once all threads have stored what they have of it.
__device__ __forceinline__ void publish(int* done, int columns) {
    __syncthreads();
    if (threadIdx.x == 0) show(done, columns);
}

// Contribution of the tile to the left of a diagonal tile, once it is solved here.
__device__ __forceinline__ void add_unsolved(const Matrices& m, int j, REAL (&sums)[4][4]) {
    const Row above(m, j - 1, false);
    const int thread = threadIdx.x, row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
    REAL found[SIDES][4];
    if (thread == 0) {
        while (seen_at(m.offered + j - 1) == 0) rest();
        __threadfence();  // these loads may find what a cache of this multiprocessor has
    }
    __syncthreads();
    if (row < TILE) {
        const REAL* place = m.unsolved + ((j - 1) * TILE + row) * TILE + column;
#pragma unroll
        for (int c = 0; c < SIDES; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e) found[c][e] = place[e / 2 * 8 * TILE + c * SIDE + e % 2];
    }
    if (thread == 0)
        while (seen_at(above.done) < j) rest();
    __syncthreads();
    fetch_diagonal(m, above, j - 1);
    commit();
    wait_for_all_but<0>();
    __syncthreads();
    if (row < TILE) {
        solve_rows(found);
#pragma unroll
        for (int c = 0; c < SIDES; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int k = c * SIDE + column + e % 2;
                shared[(k / DEPTH * TILE + row + e / 2 * 8) * DEPTH_PITCH + k % DEPTH] = found[c][e];
            }
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < PER_TILE; ++k)
        add_stage(shared + k * TILE * DEPTH_PITCH, shared + k * TILE * DEPTH_PITCH, sums);
    __syncthreads();
}

// Returns the task that comes next, as the next function does: it is asked for when nothing is waited for any more.
__device__ __forceinline__ int diagonal_task(const Matrices& m, const Row& x, int j, int* tasks) {
    const int thread = threadIdx.x, found = factorize_tile(), next = thread == 0 ? atomicAdd(tasks, 1) : 0;
    if (thread == 0 && found < TILE && seen_at(m.orders) == 0) show(m.orders, j * TILE + found + 1);
    REAL* place = x.first + thread / 8 * x.pitch + j * TILE + thread % 8;
#pragma unroll
    for (int i = 0; i < TILE; i += THREADS / 8)
#pragma unroll
        for (int k = 0; k < TILE; k += 8)
            place[i * x.pitch + k] =
                i + thread / 8 < k + thread % 8 ? 0 : tile_of_sums()[(i + thread / 8) * PITCH + k + thread % 8];
#pragma unroll
    for (int e = 0; e < TILE * SIDE; e += THREADS)
        m.diagonal[j * TILE * SIDE + e + thread] = diagonal_inverses()[e + thread];
    // The tile to the left was solved here, but whoever stores it may not have come so far.
    if (CHAINED && thread == 0)
        while (seen_at(x.done) < j) rest();
    publish(x.done, j + 1);
    return next;
}

__device__ __forceinline__ int solve_task(
    const Matrices& m, const Row& x, int i, int j, bool inverse, bool fetched, int* tasks
) {
    const Row y(m, j, false), other(m, j, inverse);
    const int thread = threadIdx.x, lane = thread % 32, t = lane % 4, row = thread / 32 * 16 + lane / 4;
    if (CHAINED && i == j + 1 && !inverse) {
        REAL* place = m.unsolved + j * TILE * TILE;
#pragma unroll
        for (int e = 0; e < TILE * TILE; e += THREADS)
            place[e + thread] = tile_of_sums()[(e + thread) / TILE * PITCH + thread % TILE];
        publish(m.offered + j, 1);
    }
    if (!fetched) {
        if (thread == 0)
            while (seen_at(y.done) <= j) rest();
        __syncthreads();
        fetch_diagonal(m, y, j);
        commit();
    }
    const int next = thread == 0 ? atomicAdd(tasks, 1) : 0;
    REAL sums[SIDES][4];
    if (row < TILE)
#pragma unroll
        for (int c = 0; c < SIDES; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                sums[c][e] = tile_of_sums()[(row + e / 2 * 8) * PITCH + c * SIDE + 2 * t + e % 2];
    wait_for_all_but<0>();
    __syncthreads();
    if (row < TILE) {
        solve_rows(sums);
#pragma unroll
        for (int c = 0; c < SIDES; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                x.first[(row + e / 2 * 8) * x.pitch + j * TILE + c * SIDE + 2 * t + e % 2] = sums[c][e];
    }
    publish(x.done, j + 1);
    // On the other side of the diagonal there is nothing.
    if (i != j)
        for (int e = thread; e < TILE * TILE; e += THREADS)
            other.first[e / TILE * other.pitch + i * TILE + e % TILE] = 0;
    return next;
}

// `state`: the next task, orders of all matrices, how far their rows are, what is offered. Matrices are handed out
// `together` at a time.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) cholesky_tiles(
    const REAL* a, REAL* l, REAL* inverses, REAL* diagonal, REAL* unsolved, int* state, long long next, long long a_row,
    long long a_column, int n, int tiles, int per_block, int count, int together
) {
    const int rows_of_tiles = per_block > 0 ? 2 * tiles : tiles;
    int* done = state + 1 + count;
    const Matrices all{
        a, next, a_row, a_column, l, inverses, diagonal, state + 1, done, unsolved, done + count * rows_of_tiles,
        n, tiles, per_block
    };
    int first = 0, step = 0, before = 0;  // a matrix, a column of its tiles and one, and tasks before them
    int following = threadIdx.x == 0 ? atomicAdd(state, 1) : 0;
    for (;;) {
        __syncthreads();
        if (threadIdx.x == 0) seen_in_turn()[3] = following;
        __syncthreads();
        const int task = seen_in_turn()[3];
        int members, rows, inverted;
        for (;;) {
            if (first >= count) return;
            members = min(together, count - first);
            inverted = per_block > 0 && step > 0 ? (step - 1) % per_block + 1 : 0;
            rows = step == 0 ? 1 : step == tiles ? inverted : tiles - step + 1 + inverted;
            if (task - before < rows * members) break;
            before += rows * members;
            if (step++ == tiles) step = 0, first += together;
        }
        const int turn = (task - before) / members;
        const Matrices m = all.at(first + (task - before) % members);
        const bool inverse = turn >= rows - inverted, diagonal = step == 0 || (turn == 1 && !inverse);
        const int j = diagonal ? step : step - 1;
        const int i = diagonal ? step : inverse ? j - (turn - (rows - inverted)) : turn == 0 ? step : j + turn;
        const Row x(m, i, inverse);
        REAL sums[4][4];
        begin_sums(m, i, j, inverse, sums);
        const bool alone = CHAINED && diagonal && j > 0;
        const bool fetched = add_products(m, x, Row(m, j, false), j, alone ? j - 1 : j, sums);
        if (alone) add_unsolved(m, j, sums);
        store_sums(sums);
        following = diagonal ? diagonal_task(m, x, j, state) : solve_task(m, x, i, j, inverse, fetched, state);
    }
}
