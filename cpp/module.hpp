// Code shared by the bindings of the kernels.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>

#include <array>
#include <cstring>
#include <new>

#include "kernels.hpp"

namespace nb = nanobind;

namespace neula {

// Float or double, any strides; never written to.
using Given = nb::ndarray<nb::ro, nb::device::cpu>;
// The same, written to.
using Overwritten = nb::ndarray<nb::device::cpu>;
template <typename T, size_t dimensions> using Contiguous = nb::ndarray<T, nb::ndim<dimensions>, nb::c_contig, nb::device::cpu>;

struct Core {
    const Kernels *kernels;
};

// A structure of doubles as Python has it: their sequence.
template <typename T> using Numbers = std::array<double, sizeof(T) / sizeof(double)>;
template <typename To, typename From> To same_numbers(const From &x)
{
    static_assert(sizeof(To) <= sizeof(From), "as many numbers");
    To found;
    std::memcpy(&found, &x, sizeof(To));
    return found;
}

// A matrix or a batch of matrices, as kernels take them: some take complex ones.
template <typename Array> Matrices complex_matrices(const Array &x)
{
    auto type = x.dtype();
    bool complex = type.code == uint8_t(nb::dlpack::dtype_code::Complex);
    int bits = complex ? type.bits / 2 : type.bits;
    if (!(complex || type.code == uint8_t(nb::dlpack::dtype_code::Float)) || type.lanes != 1 || (bits != 32 && bits != 64))
        throw nb::type_error("matrices must be float64, float32, or complex numbers of these");
    if (x.ndim() != 2 && x.ndim() != 3)
        throw nb::value_error("matrices must have two or three dimensions");
    size_t last = x.ndim() - 1;
    Index member = x.ndim() == 3 ? x.stride(0) : 0;
    return {const_cast<void *>(static_cast<const void *>(x.data())), bits == 32, member, x.stride(last - 1), x.stride(last), complex};
}

template <typename Array> Matrices matrices(const Array &x)
{
    Matrices found = complex_matrices(x);
    if (found.complex)
        throw nb::type_error("matrices must be float64 or float32");
    return found;
}

// Run a kernel while other threads of Python may run; false if it failed for another reason than a lack of memory.
template <typename Work> bool run(const Work &work)
{
    Status status;
    {
        nb::gil_scoped_release release;
        status = work();
    }
    if (status == Status::no_memory)
        throw std::bad_alloc();
    return status == Status::done;
}

// The bindings of a family of kernels, each in a file of its own.
void define_qr(nb::class_<Core> &);
void define_least_squares(nb::module_ &m, nb::class_<Core> &core);
void define_systems(nb::module_ &, nb::class_<Core> &);

}  // namespace neula
