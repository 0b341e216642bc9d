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
    return chosen(a > b, a, b);
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
