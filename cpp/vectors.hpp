// Vectors of as many doubles as a register of the instruction set has, and error-free transformations of them: doubled.hpp
// lane by lane.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "doubled.hpp"

NEULA_BEGIN

#if defined(__AVX512F__)
constexpr int WIDTH = 8;
#elif defined(__AVX2__)
constexpr int WIDTH = 4;
#else
constexpr int WIDTH = 2;
#endif

typedef double Vec __attribute__((vector_size(8 * WIDTH)));
typedef long long Mask __attribute__((vector_size(8 * WIDTH)));
typedef float Narrow __attribute__((vector_size(4 * WIDTH)));  // as many floats

template <typename T> inline void exchange(T &x, T &y)
{
    T other = x;
    x = y, y = other;
}

inline Vec all(double x)
{
    return x - Vec{};
}

// Zeros in registers: GCC makes a slow `rep stos` of `= {}`, a tenth of the time of a Gram matrix of 128 columns.
template <int rows, int columns> ALWAYS_INLINE void set_zero(Vec (&x)[rows][columns])
{
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++)
            x[i][j] = Vec{};
}

// From and to any place of memory.
typedef Vec UnalignedVec __attribute__((aligned(8), may_alias));
typedef Narrow UnalignedNarrow __attribute__((aligned(4), may_alias));

inline Vec load(const double *x)
{
    return *reinterpret_cast<const UnalignedVec *>(x);
}

inline void store(double *x, Vec a)
{
    *reinterpret_cast<UnalignedVec *>(x) = a;
}

inline Vec load(const float *x)
{
#if defined(__AVX512F__) && !defined(__clang__)  // GCC converts the halves one after the other
    return Vec(_mm512_cvtps_pd(_mm256_loadu_ps(x)));
#else
    return __builtin_convertvector(*reinterpret_cast<const UnalignedNarrow *>(x), Vec);
#endif
}

inline void store(float *x, Vec a)
{
#if defined(__AVX512F__) && !defined(__clang__)
    _mm256_storeu_ps(x, _mm512_cvtpd_ps(__m512d(a)));
#else
    *reinterpret_cast<UnalignedNarrow *>(x) = __builtin_convertvector(a, Narrow);
#endif
}

// c + a b, with one rounding or with two.
inline Vec plus_product(Vec c, Vec a, Vec b)
{
#if defined(__AVX512F__)
    return Vec(_mm512_fmadd_pd(__m512d(a), __m512d(b), __m512d(c)));
#elif defined(__FMA__)
    return Vec(_mm256_fmadd_pd(__m256d(a), __m256d(b), __m256d(c)));
#elif defined(__FP_FAST_FMA)
    for (int l = 0; l < WIDTH; l++)
        c[l] = __builtin_fma(a[l], b[l], c[l]);
    return c;
#else
    return c + a * b;
#endif
}

// c - a b, likewise.
inline Vec minus_product(Vec c, Vec a, Vec b)
{
    return plus_product(c, -a, b);
}

inline Vec chosen(Mask where, Vec a, Vec b)
{
    return Vec((Mask(a) & where) | (Mask(b) & ~where));
}

// a > b ? a : b; of NaN and a number it may be the number.
inline Vec larger(Vec a, Vec b)
{
#if defined(__AVX512F__)
    return Vec(_mm512_max_pd(__m512d(a), __m512d(b)));
#elif defined(__AVX2__)
    return Vec(_mm256_max_pd(__m256d(a), __m256d(b)));
#elif defined(__SSE2__)
    return Vec(_mm_max_pd(__m128d(a), __m128d(b)));
#else
    return chosen(a > b, a, b);
#endif
}

inline Vec magnitude(Vec a)
{
    return Vec(Mask(a) & 0x7fffffffffffffffLL);
}

inline Vec square_root(Vec a)
{
    for (int l = 0; l < WIDTH; l++)
        a[l] = __builtin_sqrt(a[l]);
    return a;
}

// The sum of the lanes, from the first one on.
inline double lane_sum(Vec a)
{
    double sum = a[0];
    for (int l = 1; l < WIDTH; l++)
        sum += a[l];
    return sum;
}

// a + b = sum + error.
inline void two_sum(Vec a, Vec b, Vec &sum, Vec &error)
{
    Vec total = a + b, of_b = total - a;
    error = (a - (total - of_b)) + (b - of_b);
    sum = total;
}

// Add a b to high + low.
inline void add_product(Vec a, Vec b, Vec &high, Vec &low)
{
    Vec product = a * b, error, of_sum;
#if defined(__FMA__) || defined(__FP_FAST_FMA)
    error = plus_product(-product, a, b);
#else
    for (int l = 0; l < WIDTH; l++) {
        double rounded, lost;
        two_product(a[l], b[l], rounded, lost);
        error[l] = lost;
    }
#endif
    two_sum(high, product, high, of_sum);
    low += of_sum + error;
}

// Groups of `size` lanes with even numbers, or with odd ones, of two vectors by turns.
template <int size, bool odd> ALWAYS_INLINE Vec lanes_by_turns(Vec a, Vec b)
{
    Mask place;
    for (int l = 0; l < WIDTH; l++)
        place[l] = l & size ? WIDTH + l - (odd ? 0 : size) : l + (odd ? size : 0);
#ifdef __clang__
    Vec found;
    for (int l = 0; l < WIDTH; l++)
        found[l] = place[l] < WIDTH ? a[place[l]] : b[place[l] - WIDTH];
    return found;
#else
    return __builtin_shuffle(a, b, place);
#endif
}

// The sum of the lanes of each of WIDTH vectors.
template <int size = 1> inline Vec lane_sums(const Vec *x)
{
    if constexpr (size == WIDTH) {
        return x[0];
    } else {
        Vec sums[WIDTH / size / 2];
        for (int i = 0; i < WIDTH / size / 2; i++)
            sums[i] = lanes_by_turns<size, false>(x[2 * i], x[2 * i + 1]) + lanes_by_turns<size, true>(x[2 * i], x[2 * i + 1]);
        return lane_sums<2 * size>(sums);
    }
}

NEULA_END
