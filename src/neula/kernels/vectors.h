/* Vectors of as many doubles as the processor has instructions for, and error-free transformations of them:
 * doubled.h lane by lane.
 */
#ifndef NEULA_VECTORS_H
#define NEULA_VECTORS_H

#include "doubled.h"

#if defined(__AVX512F__)
#define WIDTH 8
#elif defined(__AVX__)
#define WIDTH 4
#else
#define WIDTH 2
#endif

typedef double vec __attribute__((vector_size(8 * WIDTH)));
typedef long long mask __attribute__((vector_size(8 * WIDTH)));

/* The functions of immintrin.h, which takes a compiler ten times as long as all of a kernel. */
#if defined(__AVX512F__)
#define FUSED(a, b, c) __builtin_ia32_vfmaddpd512_mask(a, b, c, (unsigned char)-1, 4)
#elif defined(__FMA__)
#define FUSED(a, b, c) __builtin_ia32_vfmaddpd256(a, b, c)
#endif

/* a > b ? a : b, which compilers do not see in a choice by masks. */
#if defined(__AVX512F__) && defined(__clang__)
#define LARGER(a, b) __builtin_ia32_maxpd512(a, b, 4)
#elif defined(__AVX512F__)
#define LARGER(a, b) __builtin_ia32_maxpd512_mask(a, b, a, (unsigned char)-1, 4)
#elif defined(__AVX__)
#define LARGER(a, b) __builtin_ia32_maxpd256(a, b)
#elif defined(__SSE2__)
#define LARGER(a, b) __builtin_ia32_maxpd(a, b)
#endif

static inline vec all(double x)
{
    return x - (vec){0};
}

/* From and to any place of memory. */
typedef vec unaligned __attribute__((aligned(8), may_alias));

static inline vec vec_at(const double *x)
{
    return *(const unaligned *)x;
}

static inline void vec_put(double *x, vec a)
{
    *(unaligned *)x = a;
}

/* As many floats. */
typedef float narrow __attribute__((vector_size(4 * WIDTH)));
typedef narrow unaligned_narrow __attribute__((aligned(4), may_alias));

/* GCC converts halves. */
#if defined(__AVX512F__) && !defined(__clang__)
#define WIDENED(x) __builtin_ia32_cvtps2pd512_mask(x, (vec){0}, (unsigned char)-1, 4)
#define NARROWED(x) __builtin_ia32_cvtpd2ps512_mask(x, (narrow){0}, (unsigned char)-1, 4)
#else
#define WIDENED(x) __builtin_convertvector(x, vec)
#define NARROWED(x) __builtin_convertvector(x, narrow)
#endif

static inline vec vec_of_floats(const float *x)
{
    return WIDENED(*(const unaligned_narrow *)x);
}

static inline void put_floats(float *x, vec a)
{
    *(unaligned_narrow *)x = NARROWED(a);
}

static inline void copy_floats(float *to, const float *from)
{
    *(unaligned_narrow *)to = *(const unaligned_narrow *)from;
}

/* Lanes of two vectors, by their numbers. */
#ifdef __clang__
#define CHOSEN(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define CHOSEN(a, b, ...) __builtin_shuffle(a, b, (mask){__VA_ARGS__})
#endif

/* Of groups of one, two or four lanes those with even numbers, then those with odd ones, of two vectors by turns. */
#if WIDTH == 2
#define EVEN_ONES(a, b) CHOSEN(a, b, 0, 2)
#define ODD_ONES(a, b) CHOSEN(a, b, 1, 3)
#elif WIDTH == 4
#define EVEN_ONES(a, b) CHOSEN(a, b, 0, 4, 2, 6)
#define ODD_ONES(a, b) CHOSEN(a, b, 1, 5, 3, 7)
#define EVEN_TWOS(a, b) CHOSEN(a, b, 0, 1, 4, 5)
#define ODD_TWOS(a, b) CHOSEN(a, b, 2, 3, 6, 7)
#else
#define EVEN_ONES(a, b) CHOSEN(a, b, 0, 8, 2, 10, 4, 12, 6, 14)
#define ODD_ONES(a, b) CHOSEN(a, b, 1, 9, 3, 11, 5, 13, 7, 15)
#define EVEN_TWOS(a, b) CHOSEN(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define ODD_TWOS(a, b) CHOSEN(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#define EVEN_FOURS(a, b) CHOSEN(a, b, 0, 1, 2, 3, 8, 9, 10, 11)
#define ODD_FOURS(a, b) CHOSEN(a, b, 4, 5, 6, 7, 12, 13, 14, 15)
#endif

/* The columns of WIDTH rows, in their place. */
static inline void transpose(vec *x)
{
    vec y[WIDTH];
    for (int i = 0; i < WIDTH; i += 2)
        y[i] = EVEN_ONES(x[i], x[i + 1]), y[i + 1] = ODD_ONES(x[i], x[i + 1]);
#if WIDTH >= 4
    for (int i = 0; i < WIDTH; i += i % 4 == 1 ? 3 : 1)
        x[i] = EVEN_TWOS(y[i], y[i + 2]), x[i + 2] = ODD_TWOS(y[i], y[i + 2]);
    for (int i = 0; i < WIDTH; i++)
        y[i] = x[i];
#endif
#if WIDTH == 8
    for (int i = 0; i < 4; i++)
        y[i] = EVEN_FOURS(x[i], x[i + 4]), y[i + 4] = ODD_FOURS(x[i], x[i + 4]);
#endif
    for (int i = 0; i < WIDTH; i++)
        x[i] = y[i];
}

/* The sum of each of WIDTH vectors: of pairs of lanes, of pairs of these, and so on. */
static inline vec sums_of(const vec *x)
{
    vec sums[WIDTH];
    for (int i = 0; i < WIDTH / 2; i++)
        sums[i] = EVEN_ONES(x[2 * i], x[2 * i + 1]) + ODD_ONES(x[2 * i], x[2 * i + 1]);
#if WIDTH >= 4
    for (int i = 0; i < WIDTH / 4; i++)
        sums[i] = EVEN_TWOS(sums[2 * i], sums[2 * i + 1]) + ODD_TWOS(sums[2 * i], sums[2 * i + 1]);
#endif
#if WIDTH == 8
    sums[0] = EVEN_FOURS(sums[0], sums[1]) + ODD_FOURS(sums[0], sums[1]);
#endif
    return sums[0];
}

/* c + a b, with one rounding or with two. */
static inline vec plus_product(vec c, vec a, vec b)
{
#ifdef FUSED
    return FUSED(a, b, c);
#else
    return c + a * b;
#endif
}

/* c - a b, likewise. */
static inline vec minus_product(vec c, vec a, vec b)
{
#ifdef FUSED
    return FUSED(-a, b, c);
#else
    return c - a * b;
#endif
}

static inline vec chosen(mask where, vec a, vec b)
{
    return (vec)(((mask)a & where) | ((mask)b & ~where));
}

/* Of two numbers; of NaN and a number it may be the number. */
static inline vec larger(vec a, vec b)
{
#ifdef LARGER
    return LARGER(a, b);
#else
    return chosen(a > b, a, b);
#endif
}

static inline vec magnitude(vec a)
{
    return (vec)((mask)a & 0x7fffffffffffffffLL);
}

static inline vec root(vec a)
{
    for (int l = 0; l < WIDTH; l++)
        a[l] = __builtin_sqrt(a[l]);
    return a;
}

/* a + b = *sum + *error. */
static inline void two_sums(vec a, vec b, vec *sum, vec *error)
{
    vec total = a + b, of_b = total - a;
    *error = (a - (total - of_b)) + (b - of_b);
    *sum = total;
}

/* Add a b to *high + *low. */
static inline void add_products(vec a, vec b, vec *high, vec *low)
{
    vec product = a * b, error;
#ifdef FUSED
    error = FUSED(a, b, -product);
#else
    for (int l = 0; l < WIDTH; l++) {
        double rounded, lost;
        two_product(a[l], b[l], &rounded, &lost);
        error[l] = lost;
    }
#endif
    vec of_sum;
    two_sums(*high, product, high, &of_sum);
    *low += of_sum + error;
}

#endif
