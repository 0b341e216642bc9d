// QR factorizations and their errors, and products with a large matrix.
#include <nanobind/stl/optional.h>

#include <optional>

#include "module.hpp"

namespace neula {

namespace {

// Vectors one after the other, or a single vector; none where they are neither given nor asked for.
template <typename T> using Vectors = std::optional<nb::ndarray<T, nb::c_contig, nb::device::cpu>>;

// The first of k vectors of length n, whose number is written to k where it is not yet known (-1).
template <typename T> T *vectors(const Vectors<T> &x, size_t n, Index &k)
{
    if (!x)
        return nullptr;
    size_t dimensions = x->ndim();
    if (dimensions < 1 || dimensions > 2 || x->shape(dimensions - 1) != n)
        throw nb::value_error("one_pass takes x and back (k, n), b and image (k, m)");
    Index count = dimensions == 1 ? 1 : Index(x->shape(0));
    k = k < 0 ? count : k;
    if (count != k)
        throw nb::value_error("one_pass takes as many vectors everywhere");
    return x->data();
}

void one_pass(
    const Core &core, const Given &a, const Vectors<const double> &x, const Vectors<const double> &b,
    const Vectors<double> &image, const Vectors<double> &back, Index threads)
{
    Matrices rows = matrices(a);
    if (a.ndim() != 2 || a.shape(1) == 0 || (a.shape(1) > 1 && rows.column != 1))
        throw nb::value_error("one_pass takes a (m, n), n > 0, with rows without gaps");
    if ((!x && !b) || threads < 1)
        throw nb::value_error("one_pass takes x, b or both, and a positive number of threads");
    size_t m = a.shape(0), n = a.shape(1);
    Index k = -1;
    OnePassProblem problem = {rows.data, rows.single, Index(m), Index(n), rows.row, 0};
    problem.x = vectors(x, n, k), problem.b = vectors(b, m, k);
    problem.image = vectors(image, m, k), problem.back = vectors(back, n, k);
    problem.k = k, problem.threads = threads;
    Status status;
    {
        nb::gil_scoped_release release;
        status = core.kernels->one_pass(problem);
    }
    check(status);
}

}  // namespace

void define_qr(nb::class_<Core> &core)
{
    core.def("one_pass", one_pass, nb::arg("a"), nb::arg("x").none(), nb::arg("b").none(), nb::arg("image").noconvert().none(),
             nb::arg("back").noconvert().none(), nb::arg("threads"));
}

}  // namespace neula
