// Matrix products as the matrix unit of a GPU sums them, block by block (kernels/products/block_fma.py says how).
#include "threads.hpp"
#include "vectors.hpp"

NEULA_BEGIN

namespace {

struct Part {
    const BlockFmaProblem *problem;
    Index first, last;  // tiles
};

inline Vec truncated(Vec x)
{
#if defined(__AVX512F__)
    return Vec(_mm512_roundscale_pd(__m512d(x), _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC));
#elif defined(__AVX2__)
    return Vec(_mm256_round_pd(__m256d(x), _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC));
#else
    for (int l = 0; l < WIDTH; l++)
        x[l] = __builtin_trunc(x[l]);
    return x;
#endif
}

constexpr long long EXPONENT = 0x7ff0000000000000LL, SINGLE = ~((1LL << 29) - 1);  // masks: the power of 2, 24 bits
constexpr long long RECIPROCAL = 2046LL << 52;  // minus the bits of a power of 2: those of its reciprocal
constexpr double SMALLEST = 0x1p-900;           // keeps the quantum of zeros from being zero

// Sums of the products of some rows with WIDTH columns of a tile. The rows hide each other's latency.
template <int rows> ALWAYS_INLINE void multiply(const BlockFmaProblem &p, Index row, Index tile, Index i, Index j)
{
    const double *a = p.a + row * p.k, *a_powers = p.a_powers + row * p.k;
    const double *b = p.b + tile * p.k * FMA_TILE + j, *b_powers = p.b_powers + tile * p.k * FMA_TILE + j;
    Vec total[rows] = {}, quantum[rows], inverse[rows], sum[rows];
    for (Index k = 0; k < p.k; k += p.block) {
        for (int r = 0; r < rows; r++)
            quantum[r] = Vec(Mask(total[r]) & EXPONENT);
        for (Index l = k; l < k + p.block; l++)
            for (int r = 0; r < rows; r++)
                quantum[r] = larger(quantum[r], all(a_powers[r * p.k + l]) * load(b_powers + l * FMA_TILE));
        for (int r = 0; r < rows; r++) {
            quantum[r] = larger(quantum[r] * all(p.ulp), all(SMALLEST));
            inverse[r] = Vec(RECIPROCAL - Mask(quantum[r]));
            sum[r] = truncated(total[r] * inverse[r]);
        }
        for (Index l = k; l < k + p.block; l++)
            for (int r = 0; r < rows; r++)
                sum[r] += truncated(all(a[r * p.k + l]) * load(b + l * FMA_TILE) * inverse[r]);
        for (int r = 0; r < rows; r++)
            total[r] = Vec(Mask(sum[r] * quantum[r]) & SINGLE);
    }
    for (int r = 0; r < rows; r++)
        store(p.c + (tile * p.m + i + r) * FMA_TILE + j, total[r]);
}

void work(Part &part)
{
    constexpr int ROWS = 4;
    const BlockFmaProblem &p = *part.problem;
    for (Index tile = part.first; tile < part.last; tile++)
        for (Index j = 0; j < FMA_TILE; j += WIDTH) {
            Index i = 0, first = tile / p.tiles * p.m;
            for (; i + ROWS <= p.m; i += ROWS)
                multiply<ROWS>(p, first + i, tile, i, j);
            for (; i < p.m; i++)
                multiply<1>(p, first + i, tile, i, j);
        }
}

}  // namespace

void block_fma(const BlockFmaProblem &p)
{
    Index count = p.threads < MOST_THREADS ? p.threads : MOST_THREADS, tiles = p.batch * p.tiles;
    Part parts[MOST_THREADS];
    for (Index t = 0; t < count; t++)
        parts[t] = {&p, t * tiles / count, (t + 1) * tiles / count};
    side_by_side<work>(parts, count);
}

NEULA_END
