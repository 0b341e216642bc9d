// Bindings of the least-squares kernel.
#include <nanobind/stl/optional.h>

#include <optional>

#include "module.hpp"

namespace neula {
namespace {

constexpr size_t NUMBERS = sizeof(SeminormalNumbers) / sizeof(double);

struct AllLimits {
    SeminormalLimits limits;
    double probe_margin, probe_rounding;
};

// `written` is filled with the arrays of SeminormalSolutions, one behind the other; false where there is too little memory.
bool seminormal(
    const Core &core, const Given &a, const Given &b, const Contiguous<double, 1> &written,
    const std::optional<Contiguous<const double, 2>> &probes, const Numbers<AllLimits> &limits, bool single)
{
    Matrices matrix = matrices(a), right = matrices(b);
    size_t row = a.ndim() - 2, count = row ? a.shape(0) : 1, m = a.shape(row), n = a.shape(row + 1);
    if (m == 0 || n == 0 || b.ndim() != a.ndim() || (row && b.shape(0) != count) || b.shape(row) != m)
        throw nb::value_error("seminormal takes a (batch, m, n), m > 0, n > 0, and b (batch, m, k), or both without batch");
    size_t k = b.shape(row + 1);
    if (written.shape(0) != (NUMBERS + (n + 2) * k) * count)
        throw nb::value_error("written holds x, numbers, forward errors and norms of residuals");
    if (probes && probes->shape(0) != n)
        throw nb::value_error("probes have n rows");
    AllLimits all = same_numbers<AllLimits>(limits);
    RateProbes rate_probes = {nullptr, 0, all.probe_margin, all.probe_rounding};
    if (probes)
        rate_probes.vectors = probes->data(), rate_probes.count = Index(probes->shape(1));
    SeminormalProblems problems = {
        matrix, right, Index(count), Index(m), Index(n), Index(k), single, all.limits, probes ? &rate_probes : nullptr};
    double *x = written.data(), *numbers = x + count * n * k, *forward_error = numbers + NUMBERS * count;
    nb::gil_scoped_release release;
    return core.kernels->seminormal(problems, {x, numbers, forward_error, forward_error + count * k}) == Status::done;
}

}  // namespace

void define_least_squares(nb::module_ &m, nb::class_<Core> &core)
{
#define FIELD(name) #name,
    const char *const names[] = {NEULA_SEMINORMAL_NUMBERS(FIELD)};
#undef FIELD
    nb::list numbers;
    for (const char *name : names)
        numbers.append(name);
    m.attr("SEMINORMAL_NUMBERS") = nb::tuple(numbers);
    core.def("seminormal", seminormal, nb::arg("a"), nb::arg("b"), nb::arg("written"), nb::arg("probes").none(),
             nb::arg("limits"), nb::arg("single"));
}

}  // namespace neula
