// Complex numbers: one of them (Real = double), or as many as a vector has lanes, real parts and imaginary parts each in a
// vector (Real = Vec). Operations on real numbers that templates over both need have the same names here and there.
#pragma once

#include "vectors.hpp"

NEULA_BEGIN

inline double plus_product(double c, double a, double b)
{
#if defined(__FMA__) || defined(__FP_FAST_FMA)
    return __builtin_fma(a, b, c);
#else
    return c + a * b;
#endif
}

inline double minus_product(double c, double a, double b) { return plus_product(c, -a, b); }

template <typename Real> struct ComplexOf {
    Real re, im;

    ComplexOf() = default;
    ALWAYS_INLINE ComplexOf(Real real) : re(real), im() {}
    ALWAYS_INLINE ComplexOf(Real real, Real imaginary) : re(real), im(imaginary) {}
    template <typename Other>
    ALWAYS_INLINE explicit ComplexOf(ComplexOf<Other> other) : re(Real(other.re)), im(Real(other.im))
    {
    }

    ALWAYS_INLINE ComplexOf &operator+=(ComplexOf b) { return *this = {re + b.re, im + b.im}; }
    ALWAYS_INLINE ComplexOf &operator*=(ComplexOf b) { return *this = *this * b; }
    friend ALWAYS_INLINE ComplexOf operator+(ComplexOf a, ComplexOf b) { return {a.re + b.re, a.im + b.im}; }
    friend ALWAYS_INLINE ComplexOf operator-(ComplexOf a, ComplexOf b) { return {a.re - b.re, a.im - b.im}; }
    friend ALWAYS_INLINE ComplexOf operator-(ComplexOf a) { return {-a.re, -a.im}; }
    friend ALWAYS_INLINE ComplexOf operator*(Real a, ComplexOf b) { return {a * b.re, a * b.im}; }
    friend ALWAYS_INLINE ComplexOf operator/(ComplexOf a, Real b) { return {a.re / b, a.im / b}; }
    friend ALWAYS_INLINE ComplexOf operator/(ComplexOf a, ComplexOf b) { return a * ComplexOf(b.re, -b.im) / (b.re * b.re + b.im * b.im); }
    friend ALWAYS_INLINE ComplexOf operator*(ComplexOf a, ComplexOf b)
    {
        return {minus_product(a.re * b.re, a.im, b.im), plus_product(a.re * b.im, a.im, b.re)};
    }
};
using Complex = ComplexOf<double>;
using ComplexVec = ComplexOf<Vec>;

template <typename Real> ALWAYS_INLINE ComplexOf<Real> plus_product(ComplexOf<Real> c, ComplexOf<Real> a, ComplexOf<Real> b)
{
    return {plus_product(minus_product(c.re, a.im, b.im), a.re, b.re), plus_product(plus_product(c.im, a.im, b.re), a.re, b.im)};
}

template <typename Real> ALWAYS_INLINE ComplexOf<Real> minus_product(ComplexOf<Real> c, ComplexOf<Real> a, ComplexOf<Real> b)
{
    return plus_product(c, -a, b);
}

inline double chosen(bool where, double a, double b) { return where ? a : b; }
// By a mask: GCC 12 fails to compile a choice between vectors by a bool without AVX.
inline Vec chosen(bool where, Vec a, Vec b) { return chosen(Mask{} - static_cast<long long>(where), a, b); }
inline ComplexVec chosen(Mask where, ComplexVec a, ComplexVec b) { return {chosen(where, a.re, b.re), chosen(where, a.im, b.im)}; }
inline ComplexVec chosen(bool where, ComplexVec a, ComplexVec b) { return {chosen(where, a.re, b.re), chosen(where, a.im, b.im)}; }

inline double larger(double a, double b) { return a > b ? a : b; }
inline double magnitude(double a) { return fabs(a); }
inline double square_root(double a) { return __builtin_sqrt(a); }
inline Vec all(Vec a) { return a; }
inline ComplexVec all(Complex a) { return {all(a.re), all(a.im)}; }
inline ComplexVec all(ComplexVec a) { return a; }

inline void set_lane(double &a, int, double x) { a = x; }
inline void set_lane(Vec &a, int l, double x) { a[l] = x; }
inline double lane(double a, int) { return a; }
inline double lane(Vec a, Index l) { return a[l]; }
inline Complex lane(const ComplexVec &a, Index l) { return {a.re[l], a.im[l]}; }

// The square of the magnitude.
template <typename Real> ALWAYS_INLINE Real squared(Real a) { return a * a; }
template <typename Real> ALWAYS_INLINE Real squared(ComplexOf<Real> a) { return plus_product(a.re * a.re, a.im, a.im); }
template <typename Real> ALWAYS_INLINE Real magnitude(ComplexOf<Real> a) { return square_root(squared(a)); }

// What magnitudes are compared by, without a square root, and the magnitude from it.
template <typename Number> ALWAYS_INLINE auto comparable(Number a) { return magnitude(a); }
template <typename Real> ALWAYS_INLINE Real comparable(ComplexOf<Real> a) { return squared(a); }
template <typename Number, typename Real> ALWAYS_INLINE Real from_comparable(Real size)
{
    if constexpr (sizeof(Number) == sizeof(Real))
        return size;
    else
        return square_root(size);
}

template <typename Real> ALWAYS_INLINE Real real_part(Real a) { return a; }
template <typename Real> ALWAYS_INLINE Real real_part(ComplexOf<Real> a) { return a.re; }
template <typename Real> ALWAYS_INLINE Real conjugate(Real a) { return a; }
template <typename Real> ALWAYS_INLINE ComplexOf<Real> conjugate(ComplexOf<Real> a) { return {a.re, -a.im}; }
template <typename Real> ALWAYS_INLINE Real reciprocal(Real a) { return 1.0 / a; }
template <typename Real> ALWAYS_INLINE ComplexOf<Real> reciprocal(ComplexOf<Real> a) { return conjugate(a) / squared(a); }
inline bool vanishes(double a) { return a == 0; }
inline bool vanishes(Complex a) { return a.re == 0 && a.im == 0; }

// Lanes by a mask, and zeros.
inline Vec kept(Mask where, Vec a) { return Vec(Mask(a) & where); }
inline ComplexVec kept(Mask where, ComplexVec a) { return {kept(where, a.re), kept(where, a.im)}; }

template <typename Real> ALWAYS_INLINE void two_sum(
    ComplexOf<Real> a, ComplexOf<Real> b, ComplexOf<Real> &sum, ComplexOf<Real> &error)
{
    two_sum(a.re, b.re, sum.re, error.re), two_sum(a.im, b.im, sum.im, error.im);
}

ALWAYS_INLINE void add_product(ComplexVec a, ComplexVec b, ComplexVec &high, ComplexVec &low)
{
    add_product(a.re, b.re, high.re, low.re), add_product(-a.im, b.im, high.re, low.re);
    add_product(a.re, b.im, high.im, low.im), add_product(a.im, b.re, high.im, low.im);
}

inline double rounded_to_single(double a) { return double(float(a)); }
inline Complex rounded_to_single(Complex a) { return Complex(ComplexOf<float>(a)); }

// Number i of an array.
inline double number(const Vec *x, Index i) { return reinterpret_cast<const double *>(x)[i]; }
inline void set_number(Vec *x, Index i, double a) { reinterpret_cast<double *>(x)[i] = a; }
inline Complex number(const ComplexVec *x, Index i)
{
    const double *parts = reinterpret_cast<const double *>(x + i / WIDTH) + i % WIDTH;
    return {parts[0], parts[WIDTH]};
}
inline void set_number(ComplexVec *x, Index i, Complex a)
{
    double *parts = reinterpret_cast<double *>(x + i / WIDTH) + i % WIDTH;
    parts[0] = a.re, parts[WIDTH] = a.im;
}
template <typename Column> inline void exchange_numbers(Column *x, Index i, Index j)
{
    auto other = number(x, i);
    set_number(x, i, number(x, j)), set_number(x, j, other);
}

NEULA_END
