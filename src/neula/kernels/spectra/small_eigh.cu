// Eigenvalues and eigenvectors of batches of Hermitian matrices of up to ORDER columns: one-sided Jacobi rotations
// (Hestenes, "Inversion of matrices by biorthogonalization and related results", J. Soc. Indust. Appl. Math. 6, 1958).
//
// A shift makes the matrix definite; its columns are rotated, two at a time, until all are orthogonal. Then they are
// eigenvectors times eigenvalues. SPLIT lanes have a pair of columns in registers, each every SPLIT-th row. Rounds take
// turns: in even ones a pair is rotated, in odd ones its second column and the first of the next pair. After each
// rotation the two change places, so that in ORDER rounds any two meet once (Luk and Park, "On parallel Jacobi
// orderings", SIAM J. Sci. Stat. Comput. 10, 1989).
//
// ORDER and SPLIT (powers of two), PARTS (1 for real numbers, 2 for complex ones), REAL, LARGEST_EXPONENT, THREADS and
// TOLERANCE, the cosine of the angle between columns that count as orthogonal, are macros.

#define ROWS (ORDER / SPLIT)
#define SIZE (PARTS * ROWS)  // numbers that a lane has of a column: real parts before imaginary ones
#define LANES (ORDER / 2 * SPLIT)  // of a matrix: a part of a warp, or all of a thread block
#define WARP (LANES < 32 ? LANES : 32)
#define SWEEPS 16
#define ALL 0xffffffffu

__device__ __forceinline__ REAL sum_over_lanes(REAL x, int lanes) {
    for (int distance = lanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(ALL, x, distance);
    return x;
}

// Real part of the inner product of what a lane has of two columns.
__device__ __forceinline__ REAL dot(const REAL* x, const REAL* y) {
    REAL sum = 0;
#pragma unroll
    for (int i = 0; i < SIZE; ++i) sum = fma(x[i], y[i], sum);
    return sum;
}

// Its imaginary part; zero of real numbers.
__device__ __forceinline__ REAL cross(const REAL* x, const REAL* y) {
    REAL sum = 0;
#if PARTS == 2
#pragma unroll
    for (int i = 0; i < ROWS; ++i) sum = fma(x[i], y[ROWS + i], fma(-x[ROWS + i], y[i], sum));
#endif
    return sum;
}

// The sum over all lanes of a matrix; room for a number a warp.
__device__ __forceinline__ REAL total(REAL x, REAL* room, int lane) {
    x = sum_over_lanes(x, WARP);
#if LANES > 32
    room[lane / 32] = x;
    __syncthreads();
    x = 0;
    for (int warp = 0; warp < LANES / 32; ++warp) x += room[warp];
    __syncthreads();
#endif
    return x;
}

// The column of a pair so many pairs ahead, around the end.
__device__ __forceinline__ void take_from(REAL* x, REAL* room, int lane, int pairs) {
    const int other = (lane + pairs * SPLIT + LANES) % LANES;
#if LANES <= 32
#pragma unroll
    for (int i = 0; i < SIZE; ++i) x[i] = __shfl_sync(ALL, x[i], other, LANES);
#else
#pragma unroll
    for (int i = 0; i < SIZE; ++i) room[i * LANES + lane] = x[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < SIZE; ++i) x[i] = room[i * LANES + other];
    __syncthreads();
#endif
}

// Makes x and y orthogonal and lets them change places, if they do not stay. Whether they were not orthogonal before.
__device__ __forceinline__ int rotate(REAL* x, REAL* y, bool stays) {
    const REAL xx = sum_over_lanes(dot(x, x), SPLIT), yy = sum_over_lanes(dot(y, y), SPLIT);
    REAL xy = sum_over_lanes(dot(x, y), SPLIT);
#if PARTS == 2
    const REAL real = xy, imaginary = sum_over_lanes(cross(x, y), SPLIT);
    xy = sqrt(fma(real, real, imaginary * imaginary));
    const REAL cos_phase = xy > 0 ? real / xy : REAL(1), sin_phase = xy > 0 ? imaginary / xy : REAL(0);
#endif
    if (stays) return 0;
    const bool apart = xy * xy > REAL(TOLERANCE) * REAL(TOLERANCE) * xx * yy;
    const REAL difference = (yy - xx) / 2, root = sqrt(fma(difference, difference, xy * xy));
    const REAL tangent = apart ? xy / (difference + copysign(root, difference)) : REAL(0);
    const REAL cosine = 1 / sqrt(fma(tangent, tangent, REAL(1))), sine = tangent * cosine;
    // Not by the cosine, whose rounding error would make all columns longer or shorter (Rutishauser, "The Jacobi
    // method for real symmetric matrices", Numer. Math. 9, 1966).
    const REAL half = sine / (1 + cosine);
#pragma unroll
#if PARTS == 2
    // As if y was turned by its phase to x before, and back again.
    for (int i = 0, j = ROWS; i < ROWS; ++i, ++j) {
        const REAL first[2] = {x[i], x[j]}, second[2] = {y[i], y[j]};
        const REAL turned[2] = {
            fma(cos_phase, first[0], -sin_phase * first[1]), fma(cos_phase, first[1], sin_phase * first[0])
        };
        const REAL back[2] = {
            fma(cos_phase, second[0], sin_phase * second[1]), fma(cos_phase, second[1], -sin_phase * second[0])
        };
        x[i] = fma(sine, fma(-half, second[0], turned[0]), second[0]);
        x[j] = fma(sine, fma(-half, second[1], turned[1]), second[1]);
        y[i] = fma(-sine, fma(half, first[0], back[0]), first[0]);
        y[j] = fma(-sine, fma(half, first[1], back[1]), first[1]);
    }
#else
    for (int i = 0; i < ROWS; ++i) {
        const REAL first = x[i], second = y[i];
        x[i] = fma(sine, fma(-half, second, first), second);
        y[i] = fma(-sine, fma(half, first, second), first);
    }
#endif
    return apart;
}

// Matrices and eigenvectors are stored by rows, one matrix after the other. Where one has NaN or Inf all of its results
// are NaN.
extern "C" __global__ void __launch_bounds__(THREADS) small_eigh(
    const REAL* a, REAL* values, REAL* vectors, int count, int n
) {
    __shared__ REAL norms[THREADS / LANES * ORDER];
#if LANES <= 32
    REAL* room = nullptr;
#else
    __shared__ REAL room[SIZE * LANES];
#endif
    const int lane = threadIdx.x % LANES, pair = lane / SPLIT, part = lane % SPLIT, in_block = threadIdx.x / LANES;
    const int columns[2] = {pair, pair + ORDER / 2};
    const long long matrix = (long long)blockIdx.x * (THREADS / LANES) + in_block;
    const bool there = matrix < count;
    const REAL* from = a + matrix * n * n * PARTS;
    REAL x[SIZE], y[SIZE], largest = 0;
#pragma unroll
    for (int i = 0; i < SIZE; ++i) {
        const int row = i % ROWS * SPLIT + part, of_parts = i / ROWS;
        x[i] = there && row < n && columns[0] < n ? from[(row * n + columns[0]) * PARTS + of_parts] : REAL(0);
        y[i] = there && row < n && columns[1] < n ? from[(row * n + columns[1]) * PARTS + of_parts] : REAL(0);
        largest = fmax(largest, fmax(fabs(x[i]), fabs(y[i])));
    }
    REAL* of_matrix = norms + in_block * ORDER;
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        largest = fmax(largest, __shfl_xor_sync(ALL, largest, distance));
#if LANES > 32
    of_matrix[lane / 32] = largest;
    __syncthreads();
    for (int warp = 0; warp < LANES / 32; ++warp) largest = fmax(largest, of_matrix[warp]);
    __syncthreads();
#endif
    const int exponent = largest > 0 ? max(-LARGEST_EXPONENT, min(LARGEST_EXPONENT, ilogb(largest))) : 0;
    const REAL scale = scalbn(REAL(1), -exponent);
#pragma unroll
    for (int i = 0; i < SIZE; ++i) x[i] *= scale, y[i] *= scale;
    // The root of ||A^T A||_F bounds the 2-norm, for random matrices within a factor of 2. All pairs meet, as below.
    const REAL xx = sum_over_lanes(dot(x, x), SPLIT), yy = sum_over_lanes(dot(y, y), SPLIT);
    REAL squares = xx * xx + yy * yy;
#pragma unroll 1
    for (int round = 0; round < ORDER; ++round) {
        const bool stays = round % 2 && pair == ORDER / 2 - 1;
        const REAL xy = sum_over_lanes(dot(x, y), SPLIT), imaginary = sum_over_lanes(cross(x, y), SPLIT);
        if (!stays) squares = fma(2 * xy, xy, fma(2 * imaginary, imaginary, squares));
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            const REAL first = x[i];
            // In even rounds x and y change places, and the next x comes; in odd ones these are y and the next x.
            x[i] = stays ? first : y[i];
            y[i] = stays ? y[i] : first;
        }
        take_from(x, room, lane, round % 2 ? -1 : 1);
    }
    const REAL size = sqrt(sqrt(total(squares, of_matrix, lane) / SPLIT));
    const REAL shift = size > 0 ? REAL(1.25) * size + (size - size) : size + 1;  // NaN, too, of Inf
    // The order of the columns is reversed now.
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int row = i * SPLIT + part;
        if (row == ORDER - 1 - pair && row < n) x[i] += shift;
        if (row == ORDER / 2 - 1 - pair && row < n) y[i] += shift;
    }
    for (int sweep = 0; sweep < SWEEPS; ++sweep) {
        int rotated = 0;
#pragma unroll 1
        for (int round = 0; round < ORDER; round += 2) {
            rotated |= rotate(x, y, false);
            take_from(x, room, lane, 1);
            rotated |= rotate(y, x, pair == ORDER / 2 - 1);
            take_from(x, room, lane, -1);
        }
#if LANES <= 32
        if (!__any_sync(ALL, rotated)) break;
#else
        if (!__syncthreads_or(rotated)) break;
#endif
    }
    const REAL own[2] = {sqrt(sum_over_lanes(dot(x, x), SPLIT)), sqrt(sum_over_lanes(dot(y, y), SPLIT))};
    if (part == 0) of_matrix[2 * pair] = own[0], of_matrix[2 * pair + 1] = own[1];
    __syncthreads();
    // Columns without a matrix are zero: they come last.
    int place[2] = {0, 0};
    for (int k = 0; k < ORDER; ++k) {
        const REAL other = of_matrix[k];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const bool alike = other == own[j] || !(shift == shift);
            place[j] += alike ? k < 2 * pair + j : other != 0 && (own[j] == 0 || other < own[j]);
        }
    }
    if (!there) return;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        if (place[j] >= n) continue;
        if (part == 0) values[matrix * n + place[j]] = (own[j] - shift) / scale;
        REAL* to = vectors + (matrix * n * n + place[j]) * PARTS;
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            const int row = i % ROWS * SPLIT + part;
            if (row < n) to[row * n * PARTS + i / ROWS] = (j ? y[i] : x[i]) / own[j];
        }
    }
}
