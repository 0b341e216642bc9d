// Small least-squares problems from the matrix to the evidence, by one thread block each: the corrected seminormal
// equations with the inverse of a Cholesky factor, residuals and gradients in twice the working precision.
//
// A is copied to shared memory, some rows at a time where it has too many, each row to an odd number of elements:
// threads then read along columns and along rows at the full rate. For A x each thread has rows to itself, so that
// nothing is added across threads; for A^T r each has some rows of a column. Of matrices of the size of the Gram
// matrix each of 16 x 16 threads has elements 16 apart in both directions.
//
// REAL, the type of A and b, is defined by whoever compiles it. What is called more than once is not inlined, and
// loops are not unrolled where nothing is gained: it is compiled when it is needed.

#include "pairs.cuh"
#include "small_matrices.cuh"

#define CHAINS 4  // sums that a thread has under way, which are added in doubled precision at the end
#define UNIT 1.1102230246251565e-16
#define INFINITE __longlong_as_double(0x7ff0000000000000)

// Vectors in shared memory, then the Gram matrix, whose place residuals and sums take when it is no longer needed, and
// behind it rows of A.
enum Place {
    SIZE = REST,  // norms of the columns of A
    HIGH = SIZE + COLUMNS,
    LOW = HIGH + COLUMNS,
    GRADIENT = LOW + COLUMNS,
    PROJECTED = GRADIENT + COLUMNS,
    SOLVED = PROJECTED + COLUMNS,
    ROWS = SOLVED + COLUMNS,
    OTHER = ROWS + 2 * PITCH,
};

// Limits of the refinement and of its evidence, in this order (Limits and Square in seminormal.py).
struct Limits {
    double tolerance, max_steps, max_rate, rounding, noise, floor, stagnation, computed, moderate, near, alike;
};

__device__ __forceinline__ Pair total_of(const Pair* sums) { return (sums[0] + sums[1]) + (sums[2] + sums[3]); }

__device__ __noinline__ double quotient(double a, double b) { return a == 0.0 ? 0.0 : a / b; }

// ||D (x - y)|| where D is the norms of the columns of A; without D where there is no y.
__device__ __noinline__ double size_of(int n, int x, int y) {
    double square = 0.0;
#pragma unroll 1
    for (int j = threadIdx.x % 32; j < n; j += 32) {
        const double element = memory[x + j];
        const double scaled = y < 0 ? element : memory[SIZE + j] * (y ? element - memory[y + j] : element);
        square = fma(scaled, scaled, square);
    }
    return sqrt(over_lanes(square, false));
}

// The largest magnitude of elements of a vector.
__device__ __noinline__ double largest_of(int n, int x) {
    double most = 0.0;
#pragma unroll 1
    for (int j = threadIdx.x % 32; j < n; j += 32) most = most_of(most, fabs(memory[x + j]));
    return over_lanes(most, true);
}

// To the nearest number of so many bits, with exponents from some least one on: what a narrower format makes of it.
__device__ __forceinline__ double rounded_to(double x, int bits) {
    const int least = bits == 11 ? -14 : -126;
    const double beyond = bits == 11 ? 0x1p16 : 0x1p128;  // what rounds to it or more is infinite
    if (bits == 53 || !(fabs(x) < 2.0 * beyond)) return bits == 53 || x != x ? x : copysign(INFINITE, x);
#ifdef __CUDA_ARCH__
    const int exponent = max((__double2hiint(x) >> 20 & 0x7ff) - 1023, least);
    const double anchor = __hiloint2double((exponent + 1 - bits + 52 + 1023) << 20, 0) * 1.5;
#else
    const double anchor = std::ldexp(1.5, std::max(x == 0.0 ? least : std::ilogb(x), least) + 1 - bits + 52);
#endif
    const double rounded = (x + anchor) - anchor;
    return fabs(rounded) >= beyond ? copysign(INFINITE, x) : rounded;
}

// R^-T times a vector, or R^-1 times one; four threads have a row.
__device__ __noinline__ void multiply(int n, int x, int y, bool transposed) {
    const int i = threadIdx.x / 4, part = threadIdx.x % 4;
    const int from = INVERSE + (transposed ? i : i * PITCH), apart = transposed ? PITCH : 1;
    double sum = 0.0;
    if (i < n)
#pragma unroll 4
        for (int j = part; j < n; j += 4) sum = fma(memory[from + j * apart], memory[x + j], sum);
    sum += __shfl_xor_sync(ALL, sum, 1);
    sum += __shfl_xor_sync(ALL, sum, 2);
    if (i < n && part == 0) memory[y + i] = sum;
    __syncthreads();
}

__device__ __forceinline__ void copy(REAL* to, const REAL* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(place), "l"(from), "n"(sizeof(REAL)));
#else
    *to = *from;
#endif
}

__device__ __forceinline__ void wait_for_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// A matrix, of which some rows are in shared memory.
struct Matrix {
    const REAL* a;
    int m, n, row, column, chunk, start;

    __device__ int pitch() const { return n | 1; }
    __device__ int rows() const { return min(chunk, m - start); }
    __device__ Pair* pairs() const { return reinterpret_cast<Pair*>(memory + OTHER); }
    __device__ REAL* block() const {
        return reinterpret_cast<REAL*>(memory + OTHER + max(COLUMNS * PITCH, 2 * max(THREADS, chunk)));
    }

    // The rows from some place on; every thread comes here.
    __device__ void go_to(int place) {
        if (start == place) return;
        start = place;
        __syncthreads();
        load();
        __syncthreads();
    }

    // Neighbours in memory by neighbours; all that is read is on its way at once.
    __device__ __noinline__ void load() const {
        const bool by_rows = column <= row;
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, inner = by_rows ? n : rows();
        const int outer = by_rows ? rows() : n, down = by_rows ? pitch() : 1, right = by_rows ? 1 : pitch();
        const long long far = by_rows ? row : column, near = by_rows ? column : row;
        const REAL* const from = a + static_cast<long long>(start) * row;
        REAL* const to = block();
#pragma unroll 1
        for (int i = warp; i < outer; i += THREADS / 32)
#pragma unroll 1
            for (int j = lane; j < inner; j += 32) copy(to + i * down + j * right, from + i * far + j * near);
        wait_for_copies();
    }
};

// A^T A to OTHER, and the norms of columns.
__device__ void gram(Matrix& matrix) {
    const int n = matrix.n, down = threadIdx.x / SIDE, right = threadIdx.x % SIDE;
    double sums[TILES][TILES] = {};
#pragma unroll 1
    for (int start = 0; start < matrix.m; start += matrix.chunk) {
        matrix.go_to(start);
        const REAL* row = matrix.block();
#pragma unroll 1
        for (int left = matrix.rows(); left > 0; --left, row += matrix.pitch()) {
            double along[TILES], across[TILES];
#pragma unroll
            for (int t = 0; t < TILES; ++t)
                if (SIDE * t < n) along[t] = row[down + SIDE * t], across[t] = row[right + SIDE * t];
#pragma unroll
            for (int s = 0; s < TILES; ++s)
                if (SIDE * s < n) {
#pragma unroll
                    for (int t = 0; t <= s; ++t) sums[s][t] = fma(along[s], across[t], sums[s][t]);
                }
        }
    }
#pragma unroll
    for (int s = 0; s < TILES; ++s)
#pragma unroll
        for (int t = 0; t <= s; ++t) {
            const int i = down + SIDE * s, j = right + SIDE * t;
            if (i >= n || j > i) continue;
            memory[OTHER + i * PITCH + j] = memory[OTHER + j * PITCH + i] = sums[s][t];
            if (i == j) memory[SIZE + i] = sqrt(sums[s][t]);
        }
    __syncthreads();
}

// Norms of B, which is A with columns of norm 1, and of the factor: ||B||_2 from below and from above,
// by its norms of Frobenius and Schatten; ||B^+||_2 from above; and ||I - W^T W||_F for W = A R^-1, from above: that
// with the computed Gram matrix, and what the rounding errors of its inner products, and of this one, are at most.
struct Worth {
    double norm, norm_bound, inverse_norm, rate;
};

__device__ Worth factorize(Matrix& matrix, double of_solve) {
    const int n = matrix.n, i = threadIdx.x / 4, part = threadIdx.x % 4;
    const double columns = n;
    gram(matrix);
    if (threadIdx.x < n) memory[SOLVED + threadIdx.x] = 1.0 / memory[SIZE + threadIdx.x];
    __syncthreads();
    double square = 0.0, sum = 0.0;
    if (i < n)
#pragma unroll 1
        for (int j = part; j < n; j += 4) {
            const double x = memory[OTHER + i * PITCH + j] * memory[SOLVED + i] * memory[SOLVED + j];
            square = fma(x, x, square);
        }
    const double of_gram = sqrt(over_threads(square, false));
    invert(n, OTHER, ROWS, false);
    square = 0.0;
    if (i < n)
#pragma unroll 1
        for (int j = part; j < n; j += 4) {
            const double x = fabs(memory[INVERSE + i * PITCH + j]) * memory[SIZE + j];
            square = fma(x, x, square), sum += x;
        }
    sum += __shfl_xor_sync(ALL, sum, 1);
    sum += __shfl_xor_sync(ALL, sum, 2);
    const double of_sums = over_threads(part ? 0.0 : sum * sum, false);
    const double of_inverse = sqrt(over_threads(square, false));
    const View inverse{INVERSE, PITCH, 1}, columns_of_inverse{INVERSE, 1, PITCH};
    const double of_square = product(n, n, n, columns_of_inverse, inverse, SIZE_OF_IT, SIZE, 0);
    product(n, n, n, inverse, View{OTHER, PITCH, 1}, STORED, OTHER, PITCH);
    const double error = product(n, n, n, View{OTHER, PITCH, 1}, columns_of_inverse, ERROR, 0, 0);
    const double rounding = UNIT * ((matrix.m + 4 * columns) * of_sums + of_solve * sqrt(columns) * of_inverse);
    return {of_gram / sqrt(columns), sqrt(of_gram), sqrt(of_square), error + rounding};
}

// The right-hand side of a column.
struct Target {
    const REAL* b;
    int row;

    __device__ double operator[](int i) const { return b[static_cast<long long>(i) * row]; }
};

// Of residuals the norm and the largest element.
struct Residual {
    double norm, largest;
};

// A row times (x + x_low).
__device__ __forceinline__ Pair image_of(const REAL* row, int n) {
    Pair sums[CHAINS] = {};
#pragma unroll 1
    for (int first = 0; first < n; first += CHAINS)
#pragma unroll
        for (int c = 0; c < CHAINS; ++c)
            if (first + c < n) add_product(sums[c], row[first + c], memory[HIGH + first + c], memory[LOW + first + c]);
    return total_of(sums);
}

// A^T (b - A (x + x_low)) in doubled precision, rounded once, to GRADIENT; x is zero if n is.
__device__ __noinline__ Residual gradient(Matrix& matrix, const Target& b, int n) {
    const int column = threadIdx.x % COLUMNS, group = threadIdx.x / COLUMNS, groups = THREADS / COLUMNS;
    double square = 0.0, most = 0.0;
    Pair sums[CHAINS] = {};
#pragma unroll 1
    for (int start = 0; start < matrix.m; start += matrix.chunk) {
        matrix.go_to(start);
        const REAL* const block = matrix.block();
        const int rows = matrix.rows(), pitch = matrix.pitch();
#pragma unroll 1
        for (int i = threadIdx.x; i < rows; i += THREADS) {
            const Pair image = image_of(block + i * pitch, n), difference = two_sum(b[start + i], -image.high);
            const Pair r = two_sum(difference.high, difference.low - image.low);
            matrix.pairs()[i] = r;
            square = fma(r.high, r.high, square);
            most = most_of(most, fabs(r.high));
        }
        __syncthreads();
        if (column < matrix.n)
#pragma unroll 1
            for (int first = group; first < rows; first += CHAINS * groups)
#pragma unroll
                for (int c = 0; c < CHAINS; ++c) {
                    const int i = first + c * groups;
                    if (i < rows) {
                        const Pair r = matrix.pairs()[i];
                        add_product(sums[c], block[i * pitch + column], r.high, r.low);
                    }
                }
        __syncthreads();
    }
    Pair* const of_groups = matrix.pairs();
    of_groups[threadIdx.x] = total_of(sums);
    const Residual found{sqrt(over_threads(square, false)), over_threads(most, true)};
    if (threadIdx.x < matrix.n) {
        Pair total = of_groups[threadIdx.x];
#pragma unroll 1
        for (int place = threadIdx.x + COLUMNS; place < THREADS; place += COLUMNS) total = total + of_groups[place];
        memory[GRADIENT + threadIdx.x] = total.high + total.low;
    }
    __syncthreads();
    return found;
}

// ||b - A x|| of x as it is returned, in SOLVED.
__device__ double given_norm_of(Matrix& matrix, const Target& b) {
    double square = 0.0;
#pragma unroll 1
    for (int start = 0; start < matrix.m; start += matrix.chunk) {
        matrix.go_to(start);
#pragma unroll 1
        for (int i = threadIdx.x; i < matrix.rows(); i += THREADS) {
            const REAL* const row = matrix.block() + i * matrix.pitch();
            double r = b[start + i];
#pragma unroll 4
            for (int j = 0; j < matrix.n; ++j) r = fma(-static_cast<double>(row[j]), memory[SOLVED + j], r);
            square = fma(r, r, square);
        }
    }
    return sqrt(over_threads(square, false));
}

// The largest sum of magnitudes in a row of a square matrix, and whether rows and columns are of one size near 1.
struct Rows {
    double sum;
    bool moderate;
};

__device__ Rows rows_of(Matrix& matrix, const Limits& limits) {
    const int n = matrix.n, i = threadIdx.x;
    double sum = 0.0, of_row = 0.0, of_column = 0.0;
    if (i < n)
#pragma unroll 1
        for (int j = 0; j < n; ++j) {
            const double along = fabs(static_cast<double>(matrix.block()[i * matrix.pitch() + j]));
            sum += along;
            of_row = most_of(of_row, along);
            of_column = most_of(of_column, fabs(static_cast<double>(matrix.block()[j * matrix.pitch() + i])));
        }
    sum = over_threads(sum, true);
    const double most = over_threads(of_row, true), none = -INFINITE;
    const double least = -over_threads(i < n ? most_of(-of_row, -of_column) : none, true);
    return {sum, least >= 1.0 / limits.near && most <= limits.near / 2 && most <= limits.alike * least};
}

// Whether a square matrix has a Cholesky factor: no pivot is negative or NaN.
__device__ bool is_definite(Matrix& matrix) {
    const int n = matrix.n;
    matrix.go_to(0);
#pragma unroll 1
    for (int i = threadIdx.x / SIDE; i < n; i += SIDE)
#pragma unroll 1
        for (int j = threadIdx.x % SIDE; j < n; j += SIDE)
            memory[OTHER + i * PITCH + j] = matrix.block()[i * matrix.pitch() + j];
    __syncthreads();
    invert(n, OTHER, ROWS, false);
    return over_threads(threadIdx.x < n ? 1.0 / sqrt(memory[PIVOTS + threadIdx.x]) : 0.0, false) < INFINITE;
}

// One problem: its matrix, and then one right-hand side after the other, of which the worst counts.
extern "C" __global__ void __launch_bounds__(THREADS) seminormal(
    const REAL* a, const REAL* b, double* to_x, double* numbers, double* to_forward, double* to_residual,
    long long* to_rank, unsigned char* to_doubtful, const double* given_limits, int m, int n, int k, int a_batch,
    int a_row, int a_column, int b_batch, int b_row, int b_column, int chunk, int bits, int square, int definite
) {
    const long long member = blockIdx.x, count = gridDim.x;
    const int thread = threadIdx.x;
    const Limits limits = *reinterpret_cast<const Limits*>(given_limits);
    Matrix matrix{a + member * a_batch, m, n, a_row, a_column, chunk, -1};
    bool good = !definite || is_definite(matrix), vanished = false;
    const Worth worth = factorize(matrix, limits.rounding);
    const double rate = worth.rate;
    Rows rows{0.0, true};
    if (square) rows = rows_of(matrix, limits);
    good = good && rows.moderate;
    double shortened = 0.0, refined = 0.0, forward = 0.0, backward = 0.0, optimality = 0.0, largest = 0.0;
#pragma unroll 1
    for (int column = 0; column < k; ++column) {
        const Target target{b + member * b_batch + static_cast<long long>(column) * b_column, b_row};
        if (thread < n) memory[HIGH + thread] = memory[LOW + thread] = 0.0;
        __syncthreads();
        double left = INFINITE, of_projected, b_norm = 0.0, b_largest = 0.0;
        bool active = true;
        Residual residual;
        // From zero, which gives the solution of the normal equations, its error unknown. The last residual updates
        // nothing.
#pragma unroll 1
        for (int step = -1;; ++step) {
            residual = gradient(matrix, target, step < 0 ? 0 : n);
            multiply(n, GRADIENT, PROJECTED, false);
            of_projected = size_of(n, PROJECTED, -1);
            if (step >= 0 && !(active && step < limits.max_steps)) break;
            if (step < 0) b_norm = residual.norm, b_largest = residual.largest, active = b_norm >= 0.0;
            const double of_residual = worth.norm_bound * worth.inverse_norm * residual.norm;
            const double bounds = worth.norm_bound * size_of(n, HIGH, 0) + b_norm + of_residual;
            const double floor = worth.inverse_norm * limits.noise * (m + n) * bounds;
            multiply(n, PROJECTED, SOLVED, true);
            if (thread < n) {
                const Pair better = two_sum(memory[HIGH + thread], memory[SOLVED + thread] + memory[LOW + thread]);
                memory[HIGH + thread] = better.high, memory[LOW + thread] = better.low;
            }
            __syncthreads();
            if (step < 0) continue;
            const double before = left, of_x = size_of(n, HIGH, 0);
            left = worth.inverse_norm * rate / (1.0 - rate) * of_projected + floor;
            active = left > limits.tolerance * of_x && left < limits.stagnation * before && left > limits.floor * floor;
        }
        if (thread < n) memory[SOLVED + thread] = rounded_to(memory[HIGH + thread], bits);
        __syncthreads();
        const double given_norm = given_norm_of(matrix, target), of_x = size_of(n, HIGH, 0);
        const double of_low = quotient(size_of(n, LOW, 0), of_x), of_rounding = quotient(size_of(n, HIGH, SOLVED), of_x);
        double error = quotient(left, of_x) + of_low;
        error = limits.computed * error / (1.0 - error);  // relative to the exact solution
        bool known = rate <= limits.max_rate && error >= 0.0 && error < INFINITE;
#pragma unroll 1
        for (int j = 0; j < n; ++j) {
            const double size = memory[SIZE + j];
            known = known && size >= 1.0 / limits.moderate && size <= limits.moderate;
        }
        // Squares of what is smaller underflow.
        known = known && (b_largest == 0.0 || (b_norm >= 1.0 / limits.moderate && b_norm <= limits.moderate));
        error = known ? error + of_rounding * (1.0 + error) : INFINITE;
        const double biggest = largest_of(n, SOLVED);
        double stewart = 1.0, small;
        if (square) {
            small = quotient(residual.largest, rows.sum * largest_of(n, HIGH) + b_largest);
        } else {
            const double image = worth.norm * of_x;
            if (thread < n) memory[GRADIENT + thread] /= memory[SIZE + thread];
            __syncthreads();
            stewart = quotient(size_of(n, GRADIENT, -1), worth.norm * residual.norm);
            small = least_of(stewart, quotient(residual.norm, image + b_norm));
            small = least_of(small, quotient(of_projected, image * (rate < 1.0 ? 1.0 - rate : 0.0)));
        }
        shortened = most_of(shortened, quotient(given_norm, b_norm));
        vanished = vanished || (biggest == 0.0 && error == 0.0);
        refined = most_of(refined, small), forward = most_of(forward, error), optimality = most_of(optimality, stewart);
        backward = most_of(backward, small + (of_low + of_rounding)), largest = most_of(largest, biggest);
        if (thread < n) to_x[(member * n + thread) * k + column] = memory[SOLVED + thread];
        if (thread == 0) to_forward[member * k + column] = error, to_residual[member * k + column] = given_norm;
        __syncthreads();
    }
    if (thread) return;
    to_rank[member] = n, to_doubtful[member] = !good;
    numbers += member;
    numbers[0] = !good, numbers[count] = shortened, numbers[2 * count] = refined, numbers[3 * count] = backward;
    numbers[4 * count] = forward, numbers[5 * count] = worth.norm_bound * worth.inverse_norm;
    numbers[6 * count] = worth.norm * worth.inverse_norm, numbers[7 * count] = largest;
    numbers[8 * count] = optimality, numbers[9 * count] = n, numbers[10 * count] = vanished;
}
