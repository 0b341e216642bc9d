// Errors of QR factorizations along random vectors; first, R is made to have no negative diagonal element.
#include "probes.hpp"
#include "threads.hpp"
#include "workspace.hpp"

NEULA_BEGIN

namespace {

constexpr Index HELD = 65536;  // elements of some rows of Q that stay in the cache
constexpr Index HEIGHT = 16;   // their number is a multiple of this: whole cache lines of columns

// The work of one thread: some columns of R, then some rows of A and Q; and its sums.
struct Part {
    const QRProblem *problem;
    Index number, count, first, last, height;
    Index member;
    bool reflects;  // whether any sign changes
    double *signs, *rows;
    ProbedColumn *columns, *shared_columns;
    ProbeSums sums;
    ColumnNorms norms;
};

// Change the signs of columns of some rows of Q, in place, and keep these rows in double precision, in the same order.
template <typename T, Index row, Index column>
ALWAYS_INLINE void reflect_rows(const View<T, row, column> &q, const Part &p, Index count)
{
    Index n = p.problem->n;
    if constexpr (column == 1) {
        for (Index i = 0; i < count; i++) {
            double *to = p.rows + i * n;
#pragma omp simd
            for (Index j = 0; j < n; j++)
                to[j] = p.signs[j] * q(i, j);
            if (p.reflects)
#pragma omp simd
                for (Index j = 0; j < n; j++)
                    q(i, j) = T(to[j]);
        }
    } else {
        for (Index j = 0; j < n; j++) {
            double *to = p.rows + j * p.height;
#pragma omp simd
            for (Index i = 0; i < count; i++)
                to[i] = p.signs[j] * q(i, j);
            if (p.signs[j] < 0.0)
#pragma omp simd
                for (Index i = 0; i < count; i++)
                    q(i, j) = T(to[i]);
        }
    }
}

template <typename T> void probe_part(Part &p)
{
    const Matrices &q = p.problem->q;
    bool by_rows = q.column == 1;
    Index n = p.problem->n;
    View<const double> held = {p.rows, by_rows ? n : 1, by_rows ? 1 : p.height};
    View<const T> a(p.problem->a, p.member);
    for (Index first = p.first; first < p.last; first += p.height) {
        Index count = p.last - first < p.height ? p.last - first : p.height;
        if (by_rows)
            reflect_rows(View<T, 0, 1>(q, p.member).from_row(first), p, count);
        else if (q.row == 1)
            reflect_rows(View<T, 1, 0>(q, p.member).from_row(first), p, count);
        else
            reflect_rows(View<T>(q, p.member).from_row(first), p, count);
        probe_all_rows(a.from_row(first), held, 0, count, n, p.columns, p.sums);
    }
}

void work_on_rows(Part &p)
{
    with_type(p.problem->a.single, [&](auto type) { probe_part<decltype(type)>(p); });
}

// Signs of a diagonal of R that is to be nonnegative; whether any is negative.
bool find_signs(const QRProblem &problem, Index member, double *signs)
{
    bool reflects = false;
    for (Index i = 0; i < problem.n; i++) {
        signs[i] = signbit(element(problem.r, member, i, i)) ? -1.0 : 1.0;
        reflects |= signs[i] < 0.0;
    }
    return reflects;
}

template <typename RView> ALWAYS_INLINE void reflect_and_probe(Part &p, const RView &r)
{
    Index n = p.problem->n;
    for (Index j = p.number; p.reflects && j < n; j += p.count)
#pragma omp simd
        for (Index i = 0; i <= j; i++)
            r(i, j) = p.signs[i] * r(i, j);
    probe_r(r, n, p.number, p.count, p.problem->probes, p.shared_columns, p.rows, p.norms);
}

template <typename T> void probe_part_of_r(Part &p)
{
    const Matrices &r = p.problem->r;
    if (r.row == 1)
        reflect_and_probe(p, View<T, 1, 0>(r, p.member));
    else
        reflect_and_probe(p, View<T>(r, p.member));
}

void work_on_r(Part &p)
{
    with_type(p.problem->r.single, [&](auto type) { probe_part_of_r<decltype(type)>(p); });
}

QRErrors probe_member(const QRProblem &problem, Index member, Part *parts, Index count)
{
    Index n = problem.n;
    bool reflects = find_signs(problem, member, parts[0].signs);
    memset(parts[0].columns, 0, n * sizeof(ProbedColumn));
    for (Index t = 0; t < count; t++)
        parts[t].member = member, parts[t].reflects = reflects, parts[t].sums = {};
    side_by_side<work_on_r>(parts, count);
    for (Index t = 0; t < count; t++)
        add_image_of_r(n, parts[t].rows, parts[0].columns);
    for (Index t = 1; t < count; t++) {
        parts[0].norms.add(parts[t].norms);
        memcpy(parts[t].columns, parts[0].columns, n * sizeof(ProbedColumn));
    }
    side_by_side<work_on_rows>(parts, count);
    for (Index t = 1; t < count; t++)
        add_sums(n, parts[t].sums, parts[t].columns, parts[0].sums, parts[0].columns);
    return errors_of(parts[0].sums, parts[0].norms, n, problem.probes, parts[0].columns, margin(n));
}

}  // namespace

Status probe_errors(const QRProblem &problem)
{
    Index m = problem.m, n = problem.n, count = problem.threads < MOST_THREADS ? problem.threads : MOST_THREADS;
    Index most = HELD / n < BLOCK ? HELD / n & -HEIGHT : BLOCK, height = most > HEIGHT ? most : HEIGHT;
    Index of_columns = n * Index(sizeof(ProbedColumn) / sizeof(double));
    Workspace workspace(n + count * (height * n + of_columns));
    if (!workspace)
        return Status::no_memory;
    double *signs = workspace.take(n);
    Part parts[MOST_THREADS];
    for (Index t = 0; t < count; t++) {
        Part &part = parts[t] = {&problem, t, count};
        part.first = t ? parts[t - 1].last : 0;
        part.last = t + 1 < count ? (t + 1) * m / count / height * height : m;
        part.height = height, part.signs = signs;
        part.columns = reinterpret_cast<ProbedColumn *>(workspace.take(of_columns));
        part.rows = workspace.take(height * n), part.shared_columns = parts[0].columns;
    }
    for (Index member = 0; member < problem.batch; member++)
        problem.errors[member] = probe_member(problem, member, parts, count);
    return Status::done;
}

NEULA_END
