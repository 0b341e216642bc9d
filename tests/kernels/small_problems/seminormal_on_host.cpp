// The kernel of small least-squares problems on a CPU.

#include "warps_on_host.h"

#define __shared__
#define __noinline__ __attribute__((noinline))

using std::max;
using std::min;

static Index blockIdx, gridDim;

#include SOURCE

double memory[BYTES / sizeof(double)];

extern "C" void launch(
    int count, const REAL* a, const REAL* b, double* to_x, double* numbers, double* to_forward, double* to_residual,
    long long* to_rank, unsigned char* to_doubtful, const double* limits, int m, int n, int k, int a_batch, int a_row,
    int a_column, int b_batch, int b_row, int b_column, int chunk, int bits, int square, int definite
) {
    lanes.assign(THREADS, NAN);
    gridDim.x = count;
    for (int member = 0; member < count; ++member) {
        std::fill(std::begin(memory), std::end(memory), NAN);
        blockIdx.x = member;
        run_together(THREADS, [=] {
            seminormal(
                a, b, to_x, numbers, to_forward, to_residual, to_rank, to_doubtful, limits, m, n, k, a_batch, a_row,
                a_column, b_batch, b_row, b_column, chunk, bits, square, definite
            );
        });
    }
}
