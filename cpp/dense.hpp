// Dense factorizations of one matrix with contiguous rows, over real or complex scalars.
#pragma once

#include "rows.hpp"

NEULA_BEGIN

// Solve R^H y = b in the place of b, R being upper triangular.
template <typename T> inline void solve_transposed(const T *r, Index n, Index columns, T *y)
{
    for (Index i = 0; i < n; i++) {
        const T *row = r + i * columns;
        y[i] /= conj(row[i]);
        for (Index j = i + 1; j < n; j++)
            y[j] -= conj(row[j]) * y[i];
    }
}

inline double dot(const double *x, const double *y, Index n)
{
    double sum = 0.0;
#pragma omp simd reduction(+ : sum)
    for (Index j = 0; j < n; j++)
        sum += x[j] * y[j];
    return sum;
}

// Without a conjugate.
inline Complex dot(const Complex *x, const Complex *y, Index n)
{
    Complex sum = 0.0;
    for (Index j = 0; j < n; j++)
        sum += x[j] * y[j];
    return sum;
}

// Solve R x = y in the place of y.
template <typename T> inline void solve_upper(const T *r, Index n, Index columns, T *y)
{
    for (Index i = n - 1; i >= 0; i--) {
        const T *row = r + i * columns;
        y[i] -= dot(row + i + 1, y + i + 1, n - i - 1);
        y[i] /= row[i];
    }
}

// R of A = Q R in the upper triangle of A, m >= n, its diagonal real; below it vectors v of the reflections
// H_k = I - scale_k v v^H with v_k = 1, and R = H_{n-1}^H ... H_0^H A.
template <typename T> inline void householder(T *a, Index m, Index n, Index columns, T *scales)
{
    for (Index k = 0; k < n; k++) {
        T alpha = a[k * columns + k];
        double below = 0.0;
        for (Index i = k + 1; i < m; i++)
            below += square_of(a[i * columns + k]);
        double size = sqrt(square_of(alpha) + below), beta = real(alpha) > 0.0 ? -size : size;
        scales[k] = T(0.0);
        T difference = alpha;
        difference -= T(beta);
        if (!(size_of(difference) > 0.0)) // nothing to reflect
            continue;
        T scale = T(beta);
        scale -= alpha;
        scale /= beta;
        scales[k] = scale;
        for (Index i = k + 1; i < m; i++)
            a[i * columns + k] /= difference;
        a[k * columns + k] = T(beta);
        for (Index j = k + 1; j < n; j++) {
            T sum = a[k * columns + j];
            for (Index i = k + 1; i < m; i++)
                sum += conj(a[i * columns + k]) * a[i * columns + j];
            sum = conj(scale) * sum;
            a[k * columns + j] -= sum;
            for (Index i = k + 1; i < m; i++)
                a[i * columns + j] -= a[i * columns + k] * sum;
        }
    }
}

// Q^H b in the place of b.
template <typename T> inline void reflect(const T *a, Index m, Index n, Index columns, const T *scales, T *b)
{
    for (Index k = 0; k < n; k++) {
        T sum = b[k];
        for (Index i = k + 1; i < m; i++)
            sum += conj(a[i * columns + k]) * b[i];
        sum = conj(scales[k]) * sum;
        b[k] -= sum;
        for (Index i = k + 1; i < m; i++)
            b[i] -= a[i * columns + k] * sum;
    }
}

NEULA_END
