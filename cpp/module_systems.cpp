// Bindings of the kernels for linear systems.
#include <nanobind/stl/unique_ptr.h>

#include <complex>
#include <memory>
#include <new>

#include "module.hpp"
#include "threads.hpp"

namespace neula {

namespace {

using Doubles = Contiguous<double, 2>;
using Vectors = Contiguous<const double, 2>;
using Solutions = nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu>;  // of double, or of complex numbers

constexpr size_t NUMBERS = sizeof(SystemEvidence) / sizeof(double);

// Names of the numbers of SystemEvidence, each with its place among them and how many it is.
nb::dict evidence_fields()
{
    nb::dict fields;
#define FIELD(name) \
    fields[#name] = nb::make_tuple( \
        offsetof(SystemEvidence, name) / sizeof(double), sizeof(SystemEvidence::name) / sizeof(double));
    FIELD(doubtful) FIELD(residual) FIELD(refined_error) FIELD(backward_error) FIELD(forward_error) FIELD(condition_bound)
    FIELD(condition) FIELD(largest) FIELD(growth) FIELD(updates) FIELD(history)
#undef FIELD
    return fields;
}

// Random vectors and limits, which are the same for many systems.
struct SystemsSetting {
    Vectors vectors;
    SystemLimits limits;
};

SystemsSetting systems_setting(const Core &, const Vectors &vectors, const Numbers<SystemLimits> &limits)
{
    return {vectors, same_numbers<SystemLimits>(limits)};
}

void require(bool condition, const char *message)
{
    if (!condition)
        throw nb::value_error(message);
}

// Memory of solutions of a matrix.
double *memory_of(const Solutions &x, const Matrices &a)
{
    if (x.dtype() != (a.complex ? nb::dtype<std::complex<double>>() : nb::dtype<double>()))
        throw nb::type_error("x must be float64 where A is real, and complex128 where it is not");
    return static_cast<double *>(x.data());
}

bool solve_systems(
    const Core &core, const Given &a, const Given &b, const SystemsSetting &setting, const Solutions &x,
    const Doubles &forward_error, const Doubles &evidence, bool definite, bool single_result, Index threads)
{
    require(a.ndim() == b.ndim() && (a.ndim() == 2 || a.ndim() == 3), "a and b must be matrices, or batches of matrices");
    size_t first = a.ndim() - 2, count = first == 0 ? 1 : a.shape(0), n = a.shape(first), k = b.shape(first + 1);
    require(count > 0 && n > 0 && k > 0 && a.shape(first + 1) == n && b.shape(first) == n &&
                (first == 0 || b.shape(0) == count),
            "solve_systems takes a (count, n, n) and b (count, n, k), or without count, and none may be zero");
    require(setting.vectors.shape(1) == n && setting.vectors.shape(0) > 1, "vectors must be of length n, and two at least");
    SystemsProblem problem = {};
    problem.a = complex_matrices(a), problem.b = complex_matrices(b);
    require(problem.a.complex || !problem.b.complex, "b must be real where a is");
    require(x.shape(0) == count * n && x.shape(1) == k, "x must be (count n, k)");
    require(forward_error.shape(0) == count && forward_error.shape(1) == k, "forward errors must be (count, k)");
    require(evidence.shape(0) == NUMBERS && evidence.shape(1) == count, "evidence must be (all its numbers, count)");
    problem.count = Index(count), problem.n = Index(n), problem.k = Index(k);
    problem.probes = Index(setting.vectors.shape(0)) - 1, problem.threads = threads > 1 ? threads : 1;
    problem.vectors = setting.vectors.data();
    problem.definite = definite, problem.single_result = single_result;
    problem.limits = setting.limits;
    SystemsSolution solution = {memory_of(x, problem.a), forward_error.data(), evidence.data()};
    nb::gil_scoped_release release;
    return core.kernels->solve_systems(problem, solution) == Status::done;
}

constexpr std::align_val_t LINE{64}; // of the cache

struct Freed {
    void operator()(double *memory) const { operator delete(memory, LINE); }
};

// One large system, between the copy of A that is to be factorized and the solution by its factors.
struct Large {
    const Core &core;
    Given a;
    Overwritten factors;
    Contiguous<int, 1> pivots;
    Given b;
    SystemsSetting setting;
    Solutions x;
    Doubles forward_error, evidence;
    LargeSystem system = {};
    std::unique_ptr<double, Freed> workspace;
    double largest = 0.0;

    void prepare(bool single_result, bool doubled, Index threads)
    {
        require(a.ndim() == 2 && factors.ndim() == 2 && b.ndim() == 2, "a, b and factors must be matrices");
        size_t n = a.shape(0), k = b.shape(0);
        Matrices of_a = complex_matrices(a), of_b = complex_matrices(b), of_factors = complex_matrices(factors);
        require(n > 0 && a.shape(1) == n && a.stride(0) == Index(n) && a.stride(1) == 1,
                "a must be (n, n) with contiguous rows");
        require(of_factors.complex == of_a.complex && of_b.complex == of_a.complex && !of_b.single,
                "factors and b must be complex where a is, and b in double precision");
        require(factors.shape(0) == n && factors.shape(1) == n && factors.stride(0) == Index(n) && factors.stride(1) == 1,
                "factors must be (n, n) with contiguous rows");
        require(b.shape(1) == n && b.stride(0) == Index(n) && b.stride(1) == 1 && x.shape(0) == n && x.shape(1) == k && pivots.shape(0) == n,
                "b must be (k, n) with contiguous rows, x (n, k), and pivots (n)");
        require(setting.vectors.shape(0) == LARGE_PROBES + 1 && setting.vectors.shape(1) == n, "there must be five vectors");
        require(k > 0 && forward_error.size() == k && evidence.size() == NUMBERS, "evidence must be that of one system");
        memory_of(x, of_a);
        threads = threads > 1 ? threads : 1;
        system = {Index(n), Index(k), threads < MOST_THREADS ? threads : MOST_THREADS, of_a.data, factors.data(),
                  of_a.single, of_factors.single, single_result, of_a.complex,
                  doubled && !of_factors.single, pivots.data(),
                  static_cast<const double *>(of_b.data), setting.vectors.data(),
                  setting.limits, nullptr};
        workspace.reset(static_cast<double *>(operator new(
            core.kernels->large_workspace(system) * sizeof(double), LINE)));
        system.workspace = workspace.get();
    }

    SystemsSolution solution() const { return {static_cast<double *>(x.data()), forward_error.data(), evidence.data()}; }

    void copy()
    {
        nb::gil_scoped_release release;
        largest = core.kernels->copy_large(system);
    }

    void solve(bool definite)
    {
        SystemsSolution to = solution();
        // Interchanges of rows that do not exist would write anywhere.
        for (Index i = 0; i < system.n && !definite; i++)
            require(system.pivots[i] >= 0 && system.pivots[i] < system.n, "pivots must be rows");
        nb::gil_scoped_release release;
        core.kernels->solve_large(system, largest, definite, to);
    }
};

std::unique_ptr<Large> large_system(
    const Core &core, const Given &a, const Given &b, const SystemsSetting &setting, const Overwritten &factors,
    const Contiguous<int, 1> &pivots, const Solutions &x, const Doubles &forward_error, const Doubles &evidence,
    bool single_result, bool doubled, Index threads)
{
    std::unique_ptr<Large> large(new Large{core, a, factors, pivots, b, setting, x, forward_error, evidence, {}, {}, 0.0});
    large->prepare(single_result, doubled, threads);
    return large;
}

}  // namespace

void define_systems(nb::module_ &m, nb::class_<Core> &core)
{
    nb::class_<SystemsSetting>(m, "SystemsSetting");
    core.def_prop_ro_static("system_evidence", [](nb::handle) { return evidence_fields(); });
    core.def("systems_setting", systems_setting, nb::arg("vectors"), nb::arg("limits"));
    core.def("solve_systems", solve_systems, nb::arg("a"), nb::arg("b"), nb::arg("setting"), nb::arg("x"),
             nb::arg("forward_error"), nb::arg("evidence"), nb::arg("definite"), nb::arg("single_result"), nb::arg("threads"));
    nb::class_<Large>(m, "LargeSystem")
        .def("copy", &Large::copy)
        .def("solve", &Large::solve, nb::kw_only(), nb::arg("definite"));
    core.def("large_system", large_system, nb::keep_alive<0, 1>(), nb::arg("a"), nb::arg("b"), nb::arg("setting"),
             nb::arg("factors"), nb::arg("pivots"), nb::arg("x"), nb::arg("forward_error"), nb::arg("evidence"),
             nb::arg("single_result"), nb::arg("doubled"), nb::arg("threads"));
}

}  // namespace neula
