// The kernels of doubled products of many vectors on a CPU.

#include "arguments_on_host.h"

using std::fabs;
using std::fma;
using std::fmax;

static long long __double_as_longlong(double x) {
    long long same;
    std::memcpy(&same, &x, sizeof same);
    return same;
}

struct Two;
static void multiply_add(double (&sums)[4], const double (&a)[4], Two x);

#include SOURCE

// The unit's product of 16 rows, eight columns and eight vectors, which the threads of a warp have together.
static void multiply_add(double (&sums)[4], const double (&a)[4], Two x) {
    static double of_a[4][1024], of_x[2][1024];
    const int i = threadIdx.x, warp = i / 32 * 32, lane = i % 32;
    for (int e = 0; e < 4; ++e) of_a[e][i] = a[e];
    of_x[0][i] = x.first, of_x[1][i] = x.second;
    __syncwarp();
    for (int c = 0; c < 4; ++c)
        for (int j = 0; j < 8; ++j) {
            const int row = lane / 4, vector = lane % 4 * 2 + c % 2;
            sums[c] += of_a[c / 2 + j / 4 * 2][warp + row * 4 + j % 4] * of_x[j / 4][warp + vector * 4 + j % 4];
        }
    __syncwarp();
}

LAUNCHED(cut_vectors)
LAUNCHED(sliced_product)
LAUNCHED(sum_of_pieces)
