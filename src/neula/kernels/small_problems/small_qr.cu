// QR of matrices of up to 64 columns from the matrix to the certificate, by one thread block each: Cholesky QR in double
// precision, repeated until Q is orthonormal; then Q and R are rounded, and both are measured as they are returned.
// Of 16 x 16 threads each has elements 16 apart in both directions.
//
// REAL, the type of the matrix and its factors, is defined by whoever compiles it.

#define COLUMNS 64
#define THREADS 256
#define SIDE 16
#define TILES (COLUMNS / SIDE)
#define PITCH (COLUMNS + 1)
#define ALL 0xffffffffu
#define MODERATE 0x1p200
#define NOT_A_NUMBER __longlong_as_double(0x7ff8000000000000)

extern __shared__ double memory[];

// Layout of shared memory, in double precision.
enum Common {
    INVERSE = 0,  // R^-T
    PIVOTS = INVERSE + COLUMNS * PITCH,
    WARPS = PIVOTS + COLUMNS,
    REST = WARPS + THREADS / 32,
};

// The last bit does not matter where it is used, and a division would be what other threads wait for.
__device__ __forceinline__ double reciprocal_of(double x) {
#ifdef __CUDA_ARCH__
    double y;
    asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));
    y = fma(y, fma(-x, y, 1.0), y);
    return fma(y, fma(-x, y, 1.0), y);
#else
    return 1.0 / x;
#endif
}

// The sum over all threads.
__device__ __noinline__ double over_threads(double x) {
#pragma unroll 1
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(ALL, x, distance);
    if (threadIdx.x % 32 == 0) memory[WARPS + threadIdx.x / 32] = x;
    __syncthreads();
    x = memory[WARPS];
#pragma unroll 1
    for (int warp = 1; warp < THREADS / 32; ++warp) x += memory[WARPS + warp];
    __syncthreads();
    return x;
}

// A matrix in shared memory: its address and strides.
struct View {
    int at, row, column;
};

// Up to 64 rows and columns of X Y, with so many terms, stored from some place on, its rows PITCH apart or less.
__device__ __noinline__ void product(int rows, int columns, int terms, View x, View y, int place, int pitch) {
    const int down = threadIdx.x / SIDE, right = threadIdx.x % SIDE;
    const double* left = memory + x.at + down * x.row;
    const double* beside = memory + y.at + right * y.column;
    double sums[TILES][TILES] = {};
#pragma unroll 1
    for (int k = 0; k < terms; ++k, left += x.column, beside += y.row) {
        double along[TILES], across[TILES];
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            if (SIDE * t < rows) along[t] = left[SIDE * t * x.row];
            if (SIDE * t < columns) across[t] = beside[SIDE * t * y.column];
        }
#pragma unroll
        for (int s = 0; s < TILES; ++s)
            if (SIDE * s < rows) {
#pragma unroll
                for (int t = 0; t < TILES; ++t)
                    if (SIDE * t < columns) sums[s][t] = fma(along[s], across[t], sums[s][t]);
            }
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < TILES; ++s)
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            const int i = down + SIDE * s, j = right + SIDE * t;
            if (i < rows && j < columns) memory[place + i * pitch + j] = sums[s][t];
        }
    __syncthreads();
}

// R^-T of the Cholesky factor of a matrix that is at some place, whose upper half is read: what elimination makes of an identity.
// Columns that are eliminated make room for those of the inverse.
// Its rows, each divided by the root of its pivot, are those of R from the diagonal on: they are at some place.
__device__ __noinline__ void invert(int n, int matrix, int rows) {
    const int down = threadIdx.x / SIDE, right = threadIdx.x % SIDE;
    double g[TILES][TILES];
#pragma unroll
    for (int s = 0; s < TILES; ++s)
#pragma unroll
        for (int t = 0; t < TILES; ++t) g[s][t] = memory[matrix + (down + SIDE * s) * PITCH + right + SIDE * t];
#pragma unroll 1
    for (int step = 0; step < n; ++step) {
        double* const row = memory + rows + step * PITCH;
#pragma unroll
        for (int s = 0; s < TILES; ++s)
            if (step == down + SIDE * s) {
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    row[right + SIDE * t] = g[s][t];
                    if (step == right + SIDE * t) memory[PIVOTS + step] = g[s][t];
                }
            }
        if (step % SIDE == down && step % SIDE == right) row[COLUMNS] = reciprocal_of(memory[PIVOTS + step]);
        __syncthreads();
        const double reciprocal = row[COLUMNS];
#pragma unroll
        for (int s = 0; s < TILES; ++s)
            if (SIDE * s < n && step < SIDE * (s + 1)) {
                const int i = down + SIDE * s;
                const double factor = -row[i] * reciprocal;
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    const double rest = fma(factor, row[right + SIDE * t], g[s][t]);
                    if (i > step) g[s][t] = right + SIDE * t == step ? factor : rest;
                }
            }
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < TILES; ++s) {
        const int i = down + SIDE * s;
        if (i >= n) continue;
        const double scale = 1.0 / sqrt(memory[PIVOTS + i]);
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            const int j = right + SIDE * t;
            memory[INVERSE + i * PITCH + j] = (i > j ? g[s][t] : i == j ? 1.0 : 0.0) * scale;
        }
    }
    __syncthreads();
}

// A matrix with what is made of it: Gram matrices, R of one pass and of all, reciprocal norms of the columns of A, and Q, its rows
// an odd number of elements apart. Tiles read some rows more than there are.
struct Matrix {
    int m, n;

    __device__ int other() const { return REST; }
    __device__ int step() const { return other() + n * PITCH; }
    __device__ int upper() const { return step() + n * PITCH; }
    __device__ int size() const { return upper() + n * PITCH; }
    __device__ int basis() const { return size() + COLUMNS; }
    __device__ int pitch() const { return n | 1; }
    __device__ View rows(int start) const { return {basis() + start * pitch(), pitch(), 1}; }
};

// The Gram matrix of Q.
__device__ void gram(const Matrix& x) {
    product(x.n, x.n, x.m, View{x.basis(), 1, x.pitch()}, x.rows(0), x.other(), PITCH);
}

// ||I - Q^T Q||_F of the Gram matrix.
__device__ double loss_of(const Matrix& matrix) {
    double square = 0.0;
    for (int i = threadIdx.x / SIDE; i < matrix.n; i += SIDE)
        for (int j = threadIdx.x % SIDE; j < matrix.n; j += SIDE) {
            const double x = memory[matrix.other() + i * PITCH + j] - (i == j);
            square = fma(x, x, square);
        }
    return sqrt(over_threads(square));
}

// ||E^2||_F^(1/2) of E = Q^T Q - I, which takes the place of the Gram matrix: at most n^(1/4) times its 2-norm.
__device__ double norm_of(const Matrix& x) {
    const View lost{x.other(), PITCH, 1};
    if (threadIdx.x < x.n) memory[x.other() + threadIdx.x * (PITCH + 1)] -= 1.0;
    __syncthreads();
    product(x.n, x.n, x.n, lost, lost, x.step(), PITCH);
    double square = 0.0;
    for (int i = threadIdx.x / SIDE; i < x.n; i += SIDE)
        for (int j = threadIdx.x % SIDE; j < x.n; j += SIDE)
            square = fma(memory[x.step() + i * PITCH + j], memory[x.step() + i * PITCH + j], square);
    return sqrt(sqrt(over_threads(square)));
}

// Q R^-1 in the place of Q, and the product of this R with those before.
__device__ void divide(const Matrix& x, bool first) {
    const int n = x.n;
    invert(n, x.other(), x.step());
    for (int i = threadIdx.x / SIDE; i < n; i += SIDE)
        for (int j = threadIdx.x % SIDE; j < n; j += SIDE) {
            double& element = memory[x.step() + i * PITCH + j];
            element = j < i ? 0.0 : element * memory[INVERSE + i * (PITCH + 1)];  // by the root of its pivot
            if (first) memory[x.upper() + i * PITCH + j] = element;
        }
    __syncthreads();
    for (int start = 0; start < x.m; start += COLUMNS) {
        const View rows = x.rows(start);
        product(min(COLUMNS, x.m - start), n, n, rows, View{INVERSE, 1, PITCH}, rows.at, x.pitch());
    }
    if (!first) product(n, n, n, View{x.step(), PITCH, 1}, View{x.upper(), PITCH, 1}, x.upper(), PITCH);
}

extern "C" __global__ void __launch_bounds__(THREADS) small_qr(
    const REAL* __restrict__ a, REAL* q, REAL* r, double* measures, double enough, int most, int m, int n, int row, int column, int next
) {
    const long long member = blockIdx.x;
    a += member * next, q += member * m * n, r += member * n * n, measures += member * 3;
    const Matrix x{m, n};
    const int pitch = x.pitch(), basis = x.basis();
    const int down = threadIdx.x / SIDE, right = threadIdx.x % SIDE;
    const bool by_rows = column <= row;  // neighbours in memory by neighbours
#pragma unroll 4
    for (int place = threadIdx.x; place < m * n; place += THREADS) {
        const int i = by_rows ? place / n : place % m, j = by_rows ? place % n : place / m;
        memory[basis + i * pitch + j] = a[static_cast<long long>(i) * row + static_cast<long long>(j) * column];
    }
    __syncthreads();
    gram(x);
    if (threadIdx.x < n) {
        const double size = sqrt(memory[x.other() + threadIdx.x * (PITCH + 1)]);
        // Squares of other numbers underflow or overflow, and nothing relative to them is known.
        memory[x.size() + threadIdx.x] = size >= 1.0 / MODERATE && size <= MODERATE ? 1.0 / size : NOT_A_NUMBER;
    }
    double loss = 0.0;
    for (int pass = 1; pass == 1 || (pass <= most && loss > enough); ++pass) {
        divide(x, pass == 1);
        gram(x);
        loss = loss_of(x);
    }
    for (int i = down; i < m; i += SIDE)
        for (int j = right; j < n; j += SIDE) {
            double& element = memory[basis + i * pitch + j];
            element = q[i * n + j] = static_cast<REAL>(element);
        }
    for (int i = down; i < n; i += SIDE)
        for (int j = right; j < n; j += SIDE) {
            double& element = memory[x.upper() + i * PITCH + j];
            element = r[i * n + j] = static_cast<REAL>(element);
        }
    __syncthreads();
    if (sizeof(REAL) < sizeof(double)) {
        gram(x);
        loss = loss_of(x);
    }
    const double norm = norm_of(x);
    double square = 0.0;
    for (int start = 0; start < m; start += COLUMNS) {
        const int rows = min(COLUMNS, m - start);
        product(rows, n, n, x.rows(start), View{x.upper(), PITCH, 1}, x.other(), pitch);
#pragma unroll 4
        for (int place = threadIdx.x; place < rows * n; place += THREADS) {
            const int i = place / n, j = place % n;
            const double given = a[static_cast<long long>(start + i) * row + static_cast<long long>(j) * column];
            const double missed = (given - memory[x.other() + i * pitch + j]) * memory[x.size() + j];
            square = fma(missed, missed, square);
        }
        __syncthreads();
    }
    const double residual = sqrt(over_threads(square) / n);
    if (threadIdx.x == 0) measures[0] = residual, measures[1] = loss / sqrt(static_cast<double>(n)), measures[2] = norm;
}
