// The dense kit by itself, real or complex: one factorization, and one solution by it.
#include "dense.hpp"
#include "workspace.hpp"

NEULA_BEGIN

namespace {

template <typename T, typename Solve> Status solve_padded(const KitProblem &p, const Solve &solve)
{
    Index columns = padded(p.n);
    constexpr Index DOUBLES = sizeof(T) / sizeof(double);
    Workspace workspace(DOUBLES * (p.m * columns + p.n) + p.n);
    if (!workspace)
        return Status::no_memory;
    T *a = reinterpret_cast<T *>(workspace.take(DOUBLES * p.m * columns));
    T *scales = reinterpret_cast<T *>(workspace.take(DOUBLES * p.n));
    Index *pivots = reinterpret_cast<Index *>(workspace.take(p.n));
    for (Index i = 0; i < p.m; i++)
        memcpy(static_cast<void *>(a + i * columns), reinterpret_cast<const T *>(p.a) + i * p.n, p.n * sizeof(T));
    return solve(a, columns, scales, pivots, reinterpret_cast<T *>(p.right)) ? Status::done : Status::failed;
}

template <typename T> Status solve_by(const KitProblem &p)
{
    switch (p.factorization) {
    case Factorization::cholesky:
        return solve_padded<T>(p, [&](T *a, Index columns, T *, Index *, T *x) {
            if (!cholesky(a, p.n, columns, 0.0))
                return false;
            solve_transposed(a, p.n, columns, x);
            solve_upper(a, p.n, columns, x);
            return true;
        });
    case Factorization::lu:
        return solve_padded<T>(p, [&](T *a, Index columns, T *, Index *pivots, T *x) {
            if (!lu(a, p.n, columns, pivots))
                return false;
            solve_lu(a, p.n, columns, pivots, x);
            return true;
        });
    default:
        return solve_padded<T>(p, [&](T *a, Index columns, T *scales, Index *, T *x) {
            householder(a, p.m, p.n, columns, scales);
            reflect(a, p.m, p.n, columns, scales, x);
            solve_upper(a, p.n, columns, x);
            return true;
        });
    }
}

}  // namespace

Status kit_solve(const KitProblem &p) { return p.complex ? solve_by<Complex>(p) : solve_by<double>(p); }

NEULA_END
