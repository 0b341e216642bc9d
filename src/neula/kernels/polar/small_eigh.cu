// Eigenvalues and eigenvectors of batches of symmetric matrices of up to ORDER columns: one-sided Jacobi rotations
// (Hestenes, "Inversion of matrices by biorthogonalization and related results", J. Soc. Indust. Appl. Math. 6, 1958).
//
// A shift makes the matrix definite; its columns are rotated, two at a time, until all are orthogonal. Then they are
// eigenvectors times eigenvalues. A lane has two columns in registers. Rounds take turns: in even ones a lane rotates
// its two columns, in odd ones its second and the first of the next lane. After each rotation the two change places,
// so that in ORDER rounds each pair meets once (Luk and Park, "On parallel Jacobi orderings", SIAM J. Sci. Stat. Comput.
// 10, 1989).
//
// ORDER (a power of two from 4 to 64), REAL and TOLERANCE, the cosine of the angle between columns that count as
// orthogonal, are macros.

#define LANES (ORDER / 2)
#define SWEEPS 16
#define ALL 0xffffffffu

__device__ __forceinline__ REAL from_lane(REAL x, int lane) { return __shfl_sync(ALL, x, lane, LANES); }

__device__ __forceinline__ REAL sum_over_lanes(REAL x) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(ALL, x, distance);
    return x;
}

__device__ __forceinline__ REAL largest_over_lanes(REAL x) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) x = fmax(x, __shfl_xor_sync(ALL, x, distance));
    return x;
}

__device__ __forceinline__ REAL square(const REAL* x) {
    REAL sum = 0;
#pragma unroll
    for (int i = 0; i < ORDER; ++i) sum = fma(x[i], x[i], sum);
    return sum;
}

// Makes x and y orthogonal and lets them change places. Whether they were not orthogonal before.
__device__ __forceinline__ int rotate(REAL* x, REAL* y) {
    REAL xx = 0, yy = 0, xy = 0;
#pragma unroll
    for (int i = 0; i < ORDER; ++i) {
        xx = fma(x[i], x[i], xx);
        yy = fma(y[i], y[i], yy);
        xy = fma(x[i], y[i], xy);
    }
    const bool apart = xy * xy > REAL(TOLERANCE) * REAL(TOLERANCE) * xx * yy;
    const REAL difference = (yy - xx) / 2, root = sqrt(fma(difference, difference, xy * xy));
    const REAL tangent = apart ? xy / (difference + copysign(root, difference)) : REAL(0);
    const REAL cosine = 1 / sqrt(fma(tangent, tangent, REAL(1))), sine = tangent * cosine;
    // Not by the cosine, whose rounding error would make all columns longer or shorter (Rutishauser, "The Jacobi
    // method for real symmetric matrices", Numer. Math. 9, 1966).
    const REAL half = sine / (1 + cosine);
#pragma unroll
    for (int i = 0; i < ORDER; ++i) {
        const REAL first = x[i], second = y[i];
        x[i] = fma(sine, fma(-half, second, first), second);
        y[i] = fma(-sine, fma(half, first, second), first);
    }
    return apart;
}

// Matrices and eigenvectors are stored by rows, one matrix after the other. Where one has NaN or Inf all of its results
// are NaN.
extern "C" __global__ void __launch_bounds__(THREADS) small_eigh(
    const REAL* a, REAL* values, REAL* vectors, int count, int n
) {
    const int lane = threadIdx.x % LANES;
    const long long matrix = (long long)blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
    const bool there = matrix < count;
    const REAL* from = a + matrix * n * n;
    REAL x[ORDER], y[ORDER], largest = 0;
#pragma unroll
    for (int i = 0; i < ORDER; ++i) {
        x[i] = there && i < n && lane < n ? from[i * n + lane] : REAL(0);
        y[i] = there && i < n && lane + LANES < n ? from[i * n + lane + LANES] : REAL(0);
        largest = fmax(largest, fmax(fabs(x[i]), fabs(y[i])));
    }
    largest = largest_over_lanes(largest);
    const int exponent = largest > 0 ? max(-LARGEST_EXPONENT, min(LARGEST_EXPONENT, ilogb(largest))) : 0;
    const REAL scale = scalbn(REAL(1), -exponent);
#pragma unroll
    for (int i = 0; i < ORDER; ++i) x[i] *= scale, y[i] *= scale;
    const REAL size = sqrt(sum_over_lanes(square(x) + square(y)));
    const REAL shift = size > 0 ? REAL(1.25) * size : size + 1;  // NaN comes through
#pragma unroll
    for (int i = 0; i < ORDER; ++i) {
        if (i == lane && i < n) x[i] += shift;
        if (i == lane + LANES && i < n) y[i] += shift;
    }
    for (int sweep = 0; sweep < SWEEPS; ++sweep) {
        int rotated = 0;
#pragma unroll 1
        for (int round = 0; round < ORDER; round += 2) {
            rotated |= rotate(x, y);
#pragma unroll
            for (int i = 0; i < ORDER; ++i) x[i] = from_lane(x[i], (lane + 1) % LANES);
            if (lane < LANES - 1) rotated |= rotate(y, x);
#pragma unroll
            for (int i = 0; i < ORDER; ++i) x[i] = from_lane(x[i], (lane + LANES - 1) % LANES);
        }
        if (!__any_sync(ALL, rotated)) break;
    }
    // Columns without a matrix are zero: they come last.
    const REAL norms[2] = {sqrt(square(x)), sqrt(square(y))};
    int place[2] = {0, 0};
    for (int k = 0; k < ORDER; ++k) {
        const REAL first = from_lane(norms[0], k / 2), second = from_lane(norms[1], k / 2);
        const REAL other = k % 2 ? second : first;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int own = 2 * lane + j;
            const bool zero = norms[j] == 0, behind = other == norms[j] || !(shift == shift);
            place[j] += behind ? k < own : other != 0 && (zero || other < norms[j]);
        }
    }
    if (!there) return;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        if (place[j] >= n) continue;
        values[matrix * n + place[j]] = (norms[j] - shift) / scale;
        REAL* to = vectors + matrix * n * n + place[j];
#pragma unroll
        for (int i = 0; i < ORDER; ++i)
            if (i < n) to[i * n] = (j ? y[i] : x[i]) / norms[j];
    }
}
