// Arguments of products in twice the precision of double, and sums of their pieces.

#define THREADS 128
#define ELEMENTS 16  // of which a thread block adds the pieces

struct Matrix {
    const double* at;
    long long batch, row, column;
};

// Arguments of a product.
struct Task {
    Matrix a, x, low, b;  // low.at and b.at may be null
    double* sums;         // pieces of the result, (2, pieces, batch * k, m); of one piece the result itself
    long long m, n, k, size, pieces, piece;
};

__device__ __forceinline__ const double* column_of(const Matrix& x, long long member, long long vector) {
    return x.at + member * x.batch + vector * x.column;
}

// The result as it is returned: from b, if that is given, and the smaller part no more than a rounding error.
__device__ __forceinline__ void finish(const Task& task, double* high, Pair sum, long long column, long long i) {
    if (task.b.at) {
        const Pair rest = two_sum(column_of(task.b, column / task.k, column % task.k)[i * task.b.row], -sum.high);
        sum = {rest.high, rest.low - sum.low};
    }
    sum = two_sum(sum.high, sum.low);
    high[column * task.m + i] = sum.high;
    high[task.size + column * task.m + i] = sum.low;
}

// Rows, columns and vectors of this thread block, which has so many rows and vectors at a time.
struct Place {
    long long member, block, part, vector, first, last;

    __device__ Place(const Task& task, int rows, int vectors) {
        const long long groups = (task.k + vectors - 1) / vectors, blocks = (task.m + rows - 1) / rows;
        long long rest = blockIdx.x;  // those with the same part of A follow each other, so that it is read once
        vector = rest % groups * vectors, rest /= groups;
        part = rest % task.pieces, rest /= task.pieces;
        block = rest % blocks * rows, member = rest / blocks;
        first = part * task.piece, last = min(first + task.piece, task.n);
    }
};

// Result for a row and a vector, if these exist.
__device__ __forceinline__ void store(const Task& task, const Place& place, Pair sum, long long i, int v) {
    const long long vector = place.vector + v, column = place.member * task.k + vector;
    if (i >= task.m || vector >= task.k) return;
    if (task.pieces == 1) {
        finish(task, task.sums, sum, column, i);
    } else {
        double* const high = task.sums + place.part * task.size + column * task.m + i;
        high[0] = sum.high, high[task.pieces * task.size] = sum.low;
    }
}

// Pieces are added, always in the same order: some threads beside each other have some of one element each.
extern "C" __global__ void __launch_bounds__(THREADS) sum_of_pieces(const Task task, double* result) {
    __shared__ Pair of_groups[THREADS];
    const int groups = THREADS / ELEMENTS, group = threadIdx.x / ELEMENTS;
    const long long place = blockIdx.x * static_cast<long long>(ELEMENTS) + threadIdx.x % ELEMENTS;
    Pair sum{0.0, 0.0};
#pragma unroll 4
    for (long long part = group; part < task.pieces; part += groups) {
        const double* const high = task.sums + part * task.size + min(place, task.size - 1);
        sum = sum + Pair{high[0], high[task.pieces * task.size]};
    }
    of_groups[threadIdx.x] = sum;
    __syncthreads();
    if (group || place >= task.size) return;
#pragma unroll 1
    for (int other = threadIdx.x + ELEMENTS; other < THREADS; other += ELEMENTS) sum = sum + of_groups[other];
    finish(task, result, sum, place / task.m, place % task.m);
}
