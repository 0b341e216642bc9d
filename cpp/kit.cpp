// The dense kit by itself, real or complex: one factorization, and one solution by it.
#include "dense.hpp"
#include "lu.hpp"
#include "refinement.hpp"
#include "workspace.hpp"

NEULA_BEGIN

namespace {

// Refinement by LU factors until updates stagnate.
template <typename T> struct KitRefinement {
    const LuFactors<T> &factors;
    const Stored<T> *a, *b;
    Stored<T> *x, *low, *residual, *change, *spare;
    double size = INFINITY;

    void find_residual() { doubled_residual<T>(a, factors.n, factors.height, b, x, low, residual, spare); }

    void find_update() { factors.permute(residual, change), factors.substitute(change, 1); }

    void add_update()
    {
        for (Index v = 0; v < factors.height; v++)
            add_doubled(x[v], low[v], change[v]);
    }

    bool needs_another(int)
    {
        double previous = size;
        size = 0.0;
        for (Index i = 0; i < factors.n; i++)
            size = worse(magnitude(get<T>(change, i)), size);
        return size > 0.0 && size <= 0.5 * previous;
    }
};

template <typename T> Status solve_by_lu(const KitProblem &p)
{
    constexpr int MOST_STEPS = 20;
    using Column = Stored<T>;
    LuFactors<T> factors(p.n);
    Index size = factors.column_size();
    Workspace workspace(factors.size() + (p.n + 6) * size);
    if (!workspace)
        return Status::no_memory;
    Column *a, *right, *x, *low, *residual, *change, *spare;
    factors.take(workspace), workspace.take(p.n * size, a), workspace.take(size, right, x, low, residual, change, spare);
    T *b = reinterpret_cast<T *>(p.right);
    for (Index j = 0; j < p.n; j++) {
        set<T>(right, j, b[j]);
        for (Index i = 0; i < p.n; i++)
            set<T>(a + j * factors.height, i, reinterpret_cast<const T *>(p.a)[i * p.n + j]);
    }
    factors.factorize(a, true);
    KitRefinement<T> refinement = {factors, a, right, x, low, residual, change, spare};
    refine(refinement, MOST_STEPS);
    bool regular = true;
    for (Index j = 0; j < p.n; j++) {
        b[j] = get<T>(x, j);
        regular = regular && magnitude(get<T>(factors.reciprocals, j)) < INFINITY;
    }
    return regular ? Status::done : Status::failed;
}

template <typename T, typename Solve> Status solve_padded(const KitProblem &p, const Solve &solve)
{
    Index columns = padded(p.n);
    constexpr Index DOUBLES = sizeof(T) / sizeof(double);
    Workspace workspace(DOUBLES * (p.m * columns + p.n));
    if (!workspace)
        return Status::no_memory;
    T *a = reinterpret_cast<T *>(workspace.take(DOUBLES * p.m * columns));
    T *scales = reinterpret_cast<T *>(workspace.take(DOUBLES * p.n));
    for (Index i = 0; i < p.m; i++)
        memcpy(static_cast<void *>(a + i * columns), reinterpret_cast<const T *>(p.a) + i * p.n, p.n * sizeof(T));
    return solve(a, columns, scales, reinterpret_cast<T *>(p.right)) ? Status::done : Status::failed;
}

template <typename T> Status solve_by(const KitProblem &p)
{
    switch (p.factorization) {
    case Factorization::cholesky:
        return solve_padded<T>(p, [&](T *a, Index columns, T *, T *x) {
            if (!cholesky(a, p.n, columns, 0.0))
                return false;
            solve_transposed(a, p.n, columns, x);
            solve_upper(a, p.n, columns, x);
            return true;
        });
    case Factorization::lu:
        return solve_by_lu<T>(p);
    default:
        return solve_padded<T>(p, [&](T *a, Index columns, T *scales, T *x) {
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
