// Real and complex scalars for the templates of the dense kit.
#pragma once

#include "vectors.hpp"

NEULA_BEGIN

// As NumPy's complex128. Not std::complex: its functions would be shared between instruction sets (level.hpp).
struct Complex {
    double re, im;
    Complex() = default;
    Complex(double x, double y = 0.0) : re(x), im(y) {}
    Complex &operator+=(Complex x) { return re += x.re, im += x.im, *this; }
    Complex &operator-=(Complex x) { return re -= x.re, im -= x.im, *this; }
    Complex &operator*=(double x) { return re *= x, im *= x, *this; }
    Complex &operator/=(double x) { return re /= x, im /= x, *this; }
    Complex &operator/=(Complex x);
};

inline Complex operator-(Complex x) { return {-x.re, -x.im}; }
inline Complex operator+(Complex x, Complex y) { return x += y; }
inline Complex operator*(Complex x, Complex y) { return {x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re}; }
inline Complex operator*(double x, Complex y) { return {x * y.re, x * y.im}; }

// By R. L. Smith's quotients, which do not overflow before the result does.
inline Complex &Complex::operator/=(Complex x)
{
    if (fabs(x.re) >= fabs(x.im)) {
        double ratio = x.im / x.re, size = x.re + x.im * ratio;
        return *this = {(re + im * ratio) / size, (im - re * ratio) / size};
    }
    double ratio = x.re / x.im, size = x.im + x.re * ratio;
    return *this = {(re * ratio + im) / size, (im * ratio - re) / size};
}

inline Complex operator/(double x, Complex y) { return Complex(x) /= y; }

template <typename T> inline void exchange(T &x, T &y)
{
    T other = x;
    x = y, y = other;
}

template <typename T> constexpr bool is_complex = false;
template <> constexpr bool is_complex<Complex> = true;

inline double conj(double x) { return x; }
inline Complex conj(Complex x) { return {x.re, -x.im}; }
inline double real(double x) { return x; }
inline double real(Complex x) { return x.re; }
inline double square_of(double x) { return x * x; }
inline double square_of(Complex x) { return x.re * x.re + x.im * x.im; }
// Within a factor of sqrt(2) of |x|: LAPACK compares pivots by it.
inline double size_of(double x) { return fabs(x); }
inline double size_of(Complex x) { return fabs(x.re) + fabs(x.im); }

NEULA_END
