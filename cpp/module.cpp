// neula._core: the kernels for small problems on a CPU, for NumPy arrays. src/neula/_core.pyi documents them.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "module.hpp"
#include "threads.hpp"

using namespace neula;

namespace {

using Doubles = Contiguous<const double, 2>;

bool has_instructions([[maybe_unused]] const std::string &level)
{
    if (level == "baseline")
        return true;
#if defined(NEULA_X86)
    bool wide = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (level == "avx2")
        return wide;
    return wide && level == "avx512" && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
    return false;
#endif
}

std::vector<std::string> levels()
{
    std::vector<std::string> found;
    for (const char *level : {"baseline", "avx2", "avx512"})
        if (has_instructions(level))
            found.push_back(level);
    return found;
}

const Kernels *kernels_of(const std::string &level)
{
    if (!has_instructions(level))
        throw std::invalid_argument("this processor has no instructions of level '" + level + "'");
#if defined(NEULA_X86)
    if (level == "avx512")
        return &avx512::kernels;
    if (level == "avx2")
        return &avx2::kernels;
#endif
    return &baseline::kernels;
}

std::optional<Numbers<BoundedNumbers>> bounded(
    const Core &core, const Given &a, const Given &b, const Doubles &bounds, const Contiguous<double, 2> &vectors,
    const Numbers<BoundedLimits> &limits, bool of_all)
{
    size_t m = a.shape(0), n = a.ndim() == 2 ? a.shape(1) : 0;
    if (n == 0 || m < n || b.ndim() != 2 || b.shape(0) != m || bounds.shape(0) != 2 || bounds.shape(1) != n ||
        vectors.shape(0) != 4 || vectors.shape(1) != n)
        throw nb::value_error("bounded takes a (m, n), m >= n > 0, b (m, 1), bounds (2, n) and vectors (4, n)");
    BoundedProblem problem = {
        matrices(a), matrices(b), Index(m), Index(n), bounds.data(), bounds.data() + n, same_numbers<BoundedLimits>(limits), of_all};
    double *x = vectors.data();
    BoundedSolution to = {{}, x, x + n, x + 2 * n, x + 3 * n};
    if (!run([&] { return core.kernels->bounded(problem, to); }))
        return std::nullopt;
    return same_numbers<Numbers<BoundedNumbers>>(to.numbers);
}

}  // namespace

NB_MODULE(_core, m)
{
    nb::set_leak_warnings(false);  // plans and settings live as long as the process
    m.attr("source_hash") = NEULA_SOURCE_HASH;
    m.def("levels", levels);
    m.def("share_threads", [](uintptr_t pool) { share_threads(reinterpret_cast<Pool>(pool)); }, nb::arg("pool"));
    nb::class_<Core> core(m, "Core");
    core.def("__init__", [](Core *self, const std::string &level) { new (self) Core{kernels_of(level)}; }, nb::arg("level"))
        .def_prop_ro("level", [](const Core &c) { return c.kernels->level; })
        .def("arithmetic_is_exact", [](const Core &c) { return c.kernels->arithmetic_is_exact(); });

    core.def("bounded", bounded, nb::arg("a"), nb::arg("b"), nb::arg("bounds"), nb::arg("vectors"), nb::arg("limits"),
             nb::arg("of_all"));
    define_qr(core);
    define_least_squares(m, core);
    define_systems(m, core);
}
