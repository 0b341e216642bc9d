// Eigenvalues and eigenvectors of real symmetric tridiagonal matrices whose norms are at most 1, a thread for each.
//
// No off-diagonal element is smaller than 2^-60, and eigenvalues are distinct: vectors are not
// orthogonalized. THREADS is a macro.

#define UNROLLED 8

// Eigenvalues by bisection: pivots of T - x are quotients of its leading minors, and as many eigenvalues are below x as
// pivots are negative (Givens 1954; Wilkinson, "The Algebraic Eigenvalue Problem", 1965, chapter 5). Minors take two
// multiplications each where pivots take a division.
//
// diagonal, squares (of off-diagonal elements, the last one of each matrix unused), values: shape (count, n).
// A thread computes two of them, THREADS apart.
extern "C" __global__ void __launch_bounds__(THREADS) tridiagonal_values(
    const double* diagonal, const double* squares, double* values, int n, int blocks
) {
    const long long matrix = blockIdx.x / blocks;
    const int k = blockIdx.x % blocks * 2 * THREADS + threadIdx.x;
    if (k >= n) return;
    diagonal += matrix * n;
    squares += matrix * n;
    double below[2] = {-1, -1}, above[2] = {1, 1};  // the eigenvalue is between these
    for (int step = 0; step < 54; ++step) {
        double x[2], before[2], minor[2];
        int negative[2];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            x[m] = (below[m] + above[m]) / 2;
            before[m] = 1;
            minor[m] = diagonal[0] - x[m];
            negative[m] = signbit(minor[m]) != 0;
        }
        for (int i = 1; i < n; i += UNROLLED) {
#pragma unroll
            for (int u = 0; u < UNROLLED; ++u)
                if (i + u < n) {
                    const double d = diagonal[i + u], e = squares[i + u - 1];
#pragma unroll
                    for (int m = 0; m < 2; ++m) {
                        const double after = fma(d - x[m], minor[m], -e * before[m]);
                        before[m] = minor[m];
                        minor[m] = after;
                        negative[m] += signbit(before[m]) != signbit(minor[m]);
                    }
                }
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const double size = fmax(fabs(before[m]), fabs(minor[m]));
                const double scale = size > 0x1p300 ? 0x1p-300 : size < 0x1p-300 ? 0x1p300 : 1;
                before[m] *= scale;
                minor[m] *= scale;
            }
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) (negative[m] > k + m * THREADS ? above : below)[m] = x[m];
    }
#pragma unroll
    for (int m = 0; m < 2; ++m)
        if (k + m * THREADS < n) values[matrix * n + k + m * THREADS] = (below[m] + above[m]) / 2;
}

// Eigenvectors by twisted factorizations: eliminated from both ends, T - value has its smallest pivot where the vector
// is large (Parlett and Dhillon, "Fernando's solution to Wilkinson's problem", Linear Algebra Appl. 267, 1997).
//
// down, up: workspaces of shape (count, n, n). vectors, shape (count, n, n): eigenvectors in columns, of length 1.
extern "C" __global__ void __launch_bounds__(THREADS) tridiagonal_vectors(
    const double* diagonal, const double* off_diagonal, const double* values, double* down, double* up, float* vectors,
    int n, int blocks
) {
    const long long matrix = blockIdx.x / blocks;
    const int k = blockIdx.x % blocks * THREADS + threadIdx.x;
    if (k >= n) return;
    diagonal += matrix * n;
    off_diagonal += matrix * n;
    down += matrix * n * n + k;
    up += matrix * n * n + k;
    vectors += matrix * n * n + k;
    const double value = values[matrix * n + k], least = 1e-40;
    // Multipliers: with up_i an element follows from the one before, with down_i from the one after.
    double pivot = diagonal[n - 1] - value;
    for (int i = n - 2; i >= 0; --i) {
        const double e = off_diagonal[i], multiplier = -e / (fabs(pivot) < least ? least : pivot);
        up[(long long)i * n] = multiplier;
        pivot = fma(e, multiplier, diagonal[i] - value);
    }
    int twist = 0;
    double smallest = fabs(pivot), own = diagonal[0] - value;
    for (int i = 1; i < n; ++i) {
        const double e = off_diagonal[i - 1], multiplier = -e / (fabs(own) < least ? least : own);
        down[(long long)(i - 1) * n] = multiplier;
        own = fma(e, multiplier, diagonal[i] - value);
        const double of_both = i < n - 1 ? fma(off_diagonal[i], up[(long long)i * n], own) : own;
        if (fabs(of_both) < smallest) {
            smallest = fabs(of_both);
            twist = i;
        }
    }
    // All threads of a warp go through the same rows, so that these are read together.
    double x = 0, squares = 0;
    for (int i = n - 1; i >= 0; --i) {
        if (i > twist) continue;
        x = i == twist ? 1 : x * down[(long long)i * n];
        vectors[(long long)i * n] = float(x);
        squares = fma(x, x, squares);
    }
    for (int i = 0; i < n - 1; ++i) {
        if (i < twist) continue;
        x = (i == twist ? 1 : x) * up[(long long)i * n];
        vectors[(long long)(i + 1) * n] = float(x);
        squares = fma(x, x, squares);
    }
    const float scale = float(1 / sqrt(squares));
    for (int i = 0; i < n; ++i) vectors[(long long)i * n] *= scale;
}
