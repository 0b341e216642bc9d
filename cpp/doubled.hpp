// Error-free transformations: sums and products as a rounded number and its rounding error
// (T. Ogita, S. M. Rump and S. Oishi, "Accurate sum and dot product", SIAM J. Sci. Comput. 26, 2005).
#pragma once

#include "level.hpp"

NEULA_BEGIN

// a + b = sum + error, whichever is larger (D. E. Knuth).
inline void two_sum(double a, double b, double &sum, double &error)
{
    double total = a + b, of_b = total - a;
    error = (a - (total - of_b)) + (b - of_b);
    sum = total;
}

// a b = product + error, unless that is below 2^-1022 or, without fused operations, a factor beyond 2^995.
inline void two_product(double a, double b, double &product, double &error)
{
    double rounded = a * b;
#if defined(__FMA__) || defined(__FP_FAST_FMA) || defined(__aarch64__)
    error = __builtin_fma(a, b, -rounded);
#else
    // Halves of 26 bits, whose products are exact (G. W. Veltkamp; T. J. Dekker, 1971).
    double far = 134217729.0 * a, high = far - (far - a), low = a - high;
    double far_b = 134217729.0 * b, high_b = far_b - (far_b - b), low_b = b - high_b;
    error = low * low_b - (((rounded - high * high_b) - low * high_b) - high * low_b);
#endif
    product = rounded;
}

// Add a b to high + low: after n of them, beginning with zeros, that is the sum of the products up to ((n + 1) u)^2 times
// the sum of their magnitudes, u = 2^-53.
inline void add_product(double a, double b, double &high, double &low)
{
    double product, of_product, of_sum;
    two_product(a, b, product, of_product);
    two_sum(high, product, high, of_sum);
    low += of_product + of_sum;
}

NEULA_END
