// A matrix and right-hand sides in a larger one: [A 0; 0 s I; 0 0] and [b; 0], s being the largest magnitude in the first
// column of A. REAL is float or double.

#define THREADS 256
#define TILE 32

// A thread block has a tile of the result, and one of the first tiles of rows right-hand sides as well. Threads side by
// side take what lies side by side in A.
extern "C" __global__ void bordered(
    const REAL* a, const REAL* b, REAL* to_a, REAL* to_b, int m, int n, int k, int rows, int columns, long long a_row,
    long long a_column, long long b_row, long long b_column
) {
    __shared__ REAL parts[THREADS];
    const int across = (columns + TILE - 1) / TILE, top = blockIdx.x / across * TILE, left = blockIdx.x % across * TILE;
    const int from = max(max(left, n), top - m + n), to = min(min(left + TILE, columns), top + TILE - m + n);
    REAL scale = 0;
    if (from < to) {
        for (int i = threadIdx.x; i < m; i += THREADS) {
            const REAL x = a[i * a_row], size = x < 0 ? -x : x;
            scale = size > scale ? size : scale;
        }
        parts[threadIdx.x] = scale;
        __syncthreads();
        for (int half = THREADS / 2; half > 0; half /= 2) {
            if (threadIdx.x < half && parts[threadIdx.x + half] > parts[threadIdx.x])
                parts[threadIdx.x] = parts[threadIdx.x + half];
            __syncthreads();
        }
        scale = parts[0];
    }
    const bool by_columns = a_row == 1 && a_column != 1;
    for (int place = threadIdx.x; place < TILE * TILE; place += THREADS) {
        const int fast = place % TILE, slow = place / TILE;
        const long long i = top + (by_columns ? fast : slow), j = left + (by_columns ? slow : fast);
        if (i >= rows || j >= columns) continue;
        const REAL beside = j >= n && i - m == j - n ? scale : 0;
        to_a[i * columns + j] = i < m && j < n ? a[i * a_row + j * a_column] : beside;
    }
    for (int place = threadIdx.x; left == 0 && place < TILE * k; place += THREADS) {
        const long long i = top + place / k, j = place % k;
        if (i < rows) to_b[i * k + j] = i < m ? b[i * b_row + j * b_column] : 0;
    }
}
