// Elements of matrices of float or of double, with any strides.
#pragma once

#include "level.hpp"

NEULA_BEGIN

inline double element(const Matrices &x, Index member, Index i, Index j)
{
    Index place = member * x.member + i * x.row + j * x.column;
    return x.single ? double(static_cast<const float *>(x.data)[place]) : static_cast<const double *>(x.data)[place];
}

inline void set_element(const Matrices &x, Index member, Index i, Index j, double to)
{
    Index place = member * x.member + i * x.row + j * x.column;
    if (x.single)
        static_cast<float *>(x.data)[place] = float(to);
    else
        static_cast<double *>(x.data)[place] = to;
}

inline void *address(const Matrices &x, Index member, Index i, Index j)
{
    Index place = member * x.member + i * x.row + j * x.column;
    return x.single ? static_cast<void *>(static_cast<float *>(x.data) + place)
                    : static_cast<void *>(static_cast<double *>(x.data) + place);
}

// The rows of one member from some row on.
inline Matrices from_row(Matrices x, Index member, Index first)
{
    x.data = address(x, member, first, 0);
    return x;
}

NEULA_END
