// QR factorizations and their errors, products with a large matrix, and products as a GPU sums them.
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
    run([&] { return core.kernels->one_pass(problem); });
}

void doubled_normal(
    const Core &core, const Given &a, const Contiguous<const double, 2> &x, const Vectors<const double> &x_low,
    const Contiguous<const double, 2> &b, const Contiguous<double, 3> &residual, const Contiguous<double, 3> &gradient,
    Index threads)
{
    Matrices matrix = matrices(a);
    size_t k = x.shape(0), m = a.shape(0), n = a.shape(1);
    bool fits = x.shape(1) == n && b.shape(0) == k && b.shape(1) == m && residual.shape(0) == 2 && residual.shape(1) == k &&
                residual.shape(2) == m && gradient.shape(0) == 2 && gradient.shape(1) == k && gradient.shape(2) == n;
    Index of_low = Index(k);
    const double *low = vectors(x_low, n, of_low);
    if (matrix.single || a.ndim() != 2 || n == 0 || threads < 1 || !fits)
        throw nb::value_error("doubled_normal takes a (m, n), n > 0, x and x_low (k, n), b (k, m), residual (2, k, m) and "
                              "gradient (2, k, n), all float64, and a positive number of threads");
    DoubledNormalProblem problem = {matrix, Index(m), Index(n), Index(k), x.data(), low, b.data(), residual.data(),
                                    gradient.data(), threads};
    run([&] { return core.kernels->doubled_normal(problem); });
}

void block_fma(
    const Core &core, const Contiguous<const double, 4> &a, const Contiguous<const double, 5> &b, const Contiguous<double, 4> &c,
    Index block, double ulp, Index threads)
{
    size_t batch = a.shape(1), m = a.shape(2), k = a.shape(3), tiles = b.shape(2);
    if (block < 1 || k % block != 0 || threads < 1 || a.shape(0) != 2 || b.shape(0) != 2 || b.shape(1) != batch ||
        b.shape(3) != k || b.shape(4) != FMA_TILE || c.shape(0) != batch || c.shape(1) != tiles || c.shape(2) != m ||
        c.shape(3) != FMA_TILE)
        throw nb::value_error("block_fma takes a (2, batch, m, k), b (2, batch, tiles, k, 8) and c (batch, tiles, m, 8)");
    BlockFmaProblem problem = {a.data(), a.data() + batch * m * k, b.data(), b.data() + batch * tiles * k * FMA_TILE, c.data(),
                               Index(batch), Index(tiles), Index(m), Index(k), block, ulp, threads};
    nb::gil_scoped_release release;
    core.kernels->block_fma(problem);
}

// A single matrix is a batch of one.
template <typename Array> Index batch_of(const Array &x) { return x.ndim() == 3 ? x.shape(0) : 1; }

bool has_shape(const Overwritten &x, Index batch, Index rows, Index columns)
{
    return batch_of(x) == batch && Index(x.shape(x.ndim() - 2)) == rows && Index(x.shape(x.ndim() - 1)) == columns;
}

using Errors = nb::ndarray<nb::numpy, double>;

// Some doubles with their owner, for an array that shares them.
struct Memory {
    double *data;
    nb::capsule owner;
    explicit Memory(size_t count)
        : data(new double[count]), owner(data, [](void *p) noexcept { delete[] static_cast<double *>(p); })
    {
    }
};

// Run a kernel for A and Q (m, n) and R (n, n), or batches of them: errors, a row for each name in QRErrors.
template <bool finds>
Errors factorizations(
    const Core &core, const Given &a, const Overwritten &q, const Overwritten &r, const Contiguous<const double, 2> &probes,
    double loss, Index threads)
{
    if (threads < 1)
        throw nb::value_error("A, Q and R must be for a positive number of threads");
    QRProblem problem = {complex_matrices(a), complex_matrices(q), complex_matrices(r)};
    bool complex = problem.a.complex;
    if (complex && !finds)
        throw nb::type_error("A, Q and R must be real");
    Index batch = batch_of(a), m = a.shape(a.ndim() - 2), n = a.shape(a.ndim() - 1);
    if (n == 0 || !has_shape(q, batch, m, n) || !has_shape(r, batch, n, n) || Index(probes.shape(0)) != (complex ? 2 * n : n) ||
        Index(probes.shape(1)) != PROBES)
        throw nb::value_error("A and Q must be (m, n), n > 0, R (n, n), random vectors (n, 4), of complex A (2 n, 4)");
    problem.batch = batch, problem.m = m, problem.n = n, problem.probes = probes.data();
    if (problem.q.single != problem.a.single || problem.r.single != problem.a.single || problem.q.complex != complex ||
        problem.r.complex != complex)
        throw nb::value_error("A, Q and R must have one dtype");
    if (finds && (m < n || (n > 1 && problem.q.column != 1)))
        throw nb::value_error("A must have no more columns than rows, and Q rows without gaps");
    constexpr size_t NUMBERS = sizeof(QRErrors) / sizeof(double);
    Memory memory(NUMBERS * batch);
    problem.errors = reinterpret_cast<QRErrors *>(memory.data), problem.loss = loss, problem.threads = threads;
    run([&] { return finds ? core.kernels->cholesky_qr(problem) : core.kernels->probe_errors(problem); });
    return Errors(memory.data, {NUMBERS, size_t(batch)}, memory.owner, {1, int64_t(NUMBERS)});
}

Errors probe_errors(
    const Core &core, const Given &a, const Overwritten &q, const Overwritten &r, const Contiguous<const double, 2> &probes,
    Index threads)
{
    return factorizations<false>(core, a, q, r, probes, 0.0, threads);
}

}  // namespace

void define_qr(nb::class_<Core> &core)
{
    core.def("probe_errors", probe_errors, nb::arg("a"), nb::arg("q").noconvert(), nb::arg("r").noconvert(), nb::arg("probes"),
             nb::arg("threads"), nb::rv_policy::reference);
    core.def("cholesky_qr", factorizations<true>, nb::arg("a"), nb::arg("q").noconvert(), nb::arg("r").noconvert(),
             nb::arg("probes"), nb::arg("loss"), nb::arg("threads"), nb::rv_policy::reference);
    core.def("one_pass", one_pass, nb::arg("a"), nb::arg("x").none(), nb::arg("b").none(), nb::arg("image").noconvert().none(),
             nb::arg("back").noconvert().none(), nb::arg("threads"));
    core.def("doubled_normal", doubled_normal, nb::arg("a"), nb::arg("x"), nb::arg("x_low").none(), nb::arg("b"),
             nb::arg("residual").noconvert(), nb::arg("gradient").noconvert(), nb::arg("threads"));
    core.def("block_fma", block_fma, nb::arg("a"), nb::arg("b"), nb::arg("c").noconvert(), nb::arg("block"), nb::arg("ulp"),
             nb::arg("threads"));
}

}  // namespace neula
