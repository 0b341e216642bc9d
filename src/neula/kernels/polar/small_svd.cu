// Singular values and right singular vectors of a matrix of up to 128 columns, by one thread block: one-sided Jacobi
// (Hestenes, "Inversion of matrices by biorthogonalization and related results", J. Soc. Indust. Appl. Math. 6, 1958).
//
// The columns of R^T are rotated, two at a time, until all are orthogonal: then they are right singular vectors of R
// times its singular values. For triangular factors that takes fewer sweeps than the columns of R would
// (Drmac and Veselic, "New fast and accurate Jacobi SVD algorithm", SIAM J. Matrix Anal. Appl. 29, 2008). Half a warp
// has a pair of columns in registers. In a round each column is in one pair, in a sweep each pair has had its turn.

#define LANES 16
#define LARGEST 128
#define SWEEPS 30
#define MOST_THREADS 1024
#define SMALL 1e-14  // cosine of the angle between columns that are orthogonal, up to rounding errors
#define ALL 0xffffffffu

extern __shared__ double columns[];

// The sum over half a warp.
__device__ __forceinline__ double sum_over_lanes(double x) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(ALL, x, distance);
    return x;
}

// So that x times it is between one half and two: numbers of single precision have as many digits there.
__device__ __forceinline__ double power_of_two_near_reciprocal(double x) {
#ifdef __CUDA_ARCH__
    const int exponent = __double2hiint(x) >> 20;
    return __hiloint2double(max(1, min(2045, 2046 - exponent)) << 20, 0);
#else
    return std::ldexp(1.0, -std::ilogb(x));
#endif
}

// Columns i and j, if both are there: whether they were rotated. All threads of a warp have to come here.
__device__ __forceinline__ int rotate(int i, int j, int n, int pitch, bool there) {
    const int lane = threadIdx.x % LANES;
    double x[LARGEST / LANES], y[LARGEST / LANES], xx = 0.0, yy = 0.0, xy = 0.0;
#pragma unroll
    for (int k = 0; k < LARGEST / LANES; ++k)
        if (there && LANES * k < n) {
            x[k] = columns[i * pitch + LANES * k + lane];
            y[k] = columns[j * pitch + LANES * k + lane];
            xx = fma(x[k], x[k], xx);
            yy = fma(y[k], y[k], yy);
            xy = fma(x[k], y[k], xy);
        }
    xx = sum_over_lanes(xx), yy = sum_over_lanes(yy), xy = sum_over_lanes(xy);
    if (!there || !(xy * xy > SMALL * SMALL * (xx * yy))) return 0;
    // The tangent of the smaller of the two angles, in single precision, which costs a sweep at most: what makes the
    // rotation one is that the cosine belongs to it.
    const double scale = power_of_two_near_reciprocal(xx + yy);
    const float difference = static_cast<float>((yy - xx) * scale), twice = static_cast<float>(2.0 * xy * scale);
    const float root = sqrtf(fmaf(difference, difference, twice * twice));
    const double t = twice / (difference + copysignf(root, difference)), square = fma(t, t, 1.0);
    double c = rsqrtf(static_cast<float>(square));
#pragma unroll
    for (int step = 0; step < 2; ++step) c *= fma(-0.5 * square, c * c, 1.5);
    const double s = c * t;
#pragma unroll
    for (int k = 0; k < LARGEST / LANES; ++k)
        if (LANES * k < n) {
            columns[i * pitch + LANES * k + lane] = fma(c, x[k], -s * y[k]);
            columns[j * pitch + LANES * k + lane] = fma(s, x[k], c * y[k]);
        }
    return 1;
}

// Right singular vectors are rows of x, in descending order of their values. Where R has NaN or Inf all are NaN.
extern "C" __global__ void __launch_bounds__(MOST_THREADS) small_svd(
    const double* r, double* x, double* values, int n, int r_row, int r_column
) {
    const int thread = threadIdx.x, lane = thread % LANES, group = thread / LANES, groups = blockDim.x / LANES;
    const int pitch = (n + LANES - 1) / LANES * LANES, others = n + n % 2 - 1, pairs = (others + 1) / 2;
    double* norms = columns + n * pitch;
    for (int place = thread; place < n * pitch; place += blockDim.x) {
        const int i = place % pitch, j = place / pitch;
        columns[place] = i < n ? r[j * r_row + i * r_column] : 0.0;
    }
    __syncthreads();
    for (int sweep = 0; sweep < SWEEPS; ++sweep) {
        int rotated = 0;
        for (int round = 0; round < others; ++round) {
            // Players around a table, one of whom keeps his place.
            for (int first = group / 2 * 2; first < pairs; first += groups) {
                const int p = first + group % 2;
                const int i = p == 0 ? others : (round + p) % others, j = (round + others - p) % others;
                rotated |= rotate(i, j, n, pitch, p < pairs && i < n && j < n);
            }
            __syncthreads();
        }
        if (!__syncthreads_or(rotated)) break;
    }
    int bad = 0;
    for (int first = group / 2 * 2; first < n; first += groups) {
        const int j = first + group % 2;
        double square = 0.0;
        for (int i = lane; i < n && j < n; i += LANES) {
            const double element = columns[j * pitch + i];
            square = fma(element, element, square);
        }
        square = sum_over_lanes(square);
        if (lane == 0 && j < n) norms[j] = sqrt(square);
        bad |= !(square >= 0.0);
    }
    bad = __syncthreads_or(bad);
    for (int j = group; j < n; j += groups) {
        const double norm = bad ? sqrt(-1.0) : norms[j];
        int before = 0;
        for (int k = 0; k < n; ++k) before += bad ? k < j : norms[k] > norm || (norms[k] == norm && k < j);
        for (int i = lane; i < n; i += LANES) x[before * n + i] = columns[j * pitch + i] / norm;
        if (lane == 0) values[before] = norm;
    }
}
