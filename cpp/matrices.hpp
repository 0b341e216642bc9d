// Elements of matrices of float or of double, with any strides.
#pragma once

#include "complex.hpp"

NEULA_BEGIN

// As a Complex number also those of complex matrices.
template <typename Number = double> inline Number element(const Matrices &x, Index member, Index i, Index j)
{
    Index place = member * x.member + i * x.row + j * x.column;
    if constexpr (sizeof(Number) > sizeof(double))
        if (x.complex)
            return x.single ? Number(static_cast<const ComplexOf<float> *>(x.data)[place])
                            : static_cast<const ComplexOf<double> *>(x.data)[place];
    return x.single ? double(static_cast<const float *>(x.data)[place]) : static_cast<const double *>(x.data)[place];
}

// One matrix of a batch whose elements are of type T, and strides where they are not 0: what the compiler knows of them
// makes other loops.
template <typename T, Index row = 0, Index column = 0> struct View {
    T *data;
    Index row_stride, column_stride;

    View(T *first, Index row_apart, Index column_apart) : data(first), row_stride(row_apart), column_stride(column_apart) {}
    View(const Matrices &x, Index member)
        : data(static_cast<T *>(x.data) + member * x.member), row_stride(x.row), column_stride(x.column)
    {
    }

    T &operator()(Index i, Index j) const
    {
        return data[i * (row ? row : row_stride) + j * (column ? column : column_stride)];
    }

    View from_row(Index i) const { return {&(*this)(i, 0), row_stride, column_stride}; }
};

// A matrix of complex numbers as a real one of their parts, each number in two columns.
template <typename T> struct PartsView {
    T *data;
    Index row_stride, column_stride;  // in numbers

    explicit PartsView(const Matrices &x, Index member)
        : data(static_cast<T *>(x.data) + 2 * member * x.member), row_stride(x.row), column_stride(x.column)
    {
    }

    T &operator()(Index i, Index j) const { return data[2 * (i * row_stride + j / 2 * column_stride) + j % 2]; }

    // Where the numbers of a row lie together.
    View<T, 0, 1> by_rows() const { return {data, 2 * row_stride, 1}; }
};

NEULA_END
