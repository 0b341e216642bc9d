// One least-squares problem with bounds by block principal pivoting on its normal equations, and the evidence of its solution
// (neula/algorithms/bounded/active_set.py has the algorithm). A is not factorized: sets of free variables are tried with
// parts of the Gram matrix, and the last one is solved for by corrected seminormal equations, with residuals of A itself. It is
// held against the gradient of a residual that is orthogonal to the free columns.
//
// Variables are those of B, A with its columns divided by their norms: B^T B has ones on its diagonal.
#include "matrices.hpp"
#include "refinement.hpp"
#include "rows.hpp"
#include "workspace.hpp"

NEULA_BEGIN

namespace {

// Solve R^T y = b in the place of b, R being upper triangular.
void solve_transposed(const double *r, Index n, Index columns, double *y)
{
    for (Index i = 0; i < n; i++) {
        const double *row = r + i * columns;
        y[i] /= row[i];
        for (Index j = i + 1; j < n; j++)
            y[j] -= row[j] * y[i];
    }
}

// Solve R x = y in the place of y.
void solve_upper(const double *r, Index n, Index columns, double *y)
{
    for (Index i = n - 1; i >= 0; i--) {
        const double *row = r + i * columns;
        double sum = 0.0;
#pragma omp simd reduction(+ : sum)
        for (Index j = i + 1; j < n; j++)
            sum += row[j] * y[j];
        y[i] -= sum;
        y[i] /= row[i];
    }
}

// A problem; squares have `columns` padded columns, and vectors as many elements.
struct Bounded {
    const BoundedProblem &given;
    const BoundedLimits &limits;
    Index m, n, columns, width = 0;  // width: variables that are free
    Workspace workspace;
    double *a, *b, *residual;
    double *gram, *factor, *inverse, *square;
    double *sizes, *right, *low, *high, *at, *z, *x, *left, *gradient, *update, *ones;
    Index *free_variables;

    static constexpr int SQUARES = 4, VECTORS = 12;

    explicit Bounded(const BoundedProblem &problem)
        : given(problem), limits(problem.limits), m(problem.m), n(problem.n), columns(padded(problem.n)),
          workspace(m * columns + 2 * padded(m) + SQUARES * columns * columns + VECTORS * columns)
    {
        if (!workspace)
            return;
        workspace.take(m * columns, a);
        workspace.take(padded(m), b, residual);
        workspace.take(columns * columns, gram, factor, inverse, square);
        workspace.take(columns, sizes, right, low, high, at, z, x, left, gradient, update, ones, free_variables);
    }

    // Whether a bound is zero, infinite, or in the safe range for a column of norm 1.
    bool is_safe_bound(double bound, double size) const
    {
        return bound == 0.0 || isinf(bound) || in_safe_range(fabs(bound * size), limits);
    }

    void read()
    {
        for (Index i = 0; i < m; i++) {
            b[i] = element(given.b, 0, i, 0);
            for (Index j = 0; j < n; j++)
                a[i * columns + j] = element(given.a, 0, i, j);
        }
    }

    // Norms of columns, B^T B and B^T b; false where numbers are not in the safe range.
    bool form_normal_equations()
    {
        form_gram(a, m, columns, gram, false);
        for (Index j = 0; j < n; j++) {
            sizes[j] = sqrt(gram[j * columns + j]), ones[j] = 1.0;
            low[j] = given.lower[j] * sizes[j], high[j] = given.upper[j] * sizes[j];
            bool safe = is_safe_bound(given.lower[j], sizes[j]) && is_safe_bound(given.upper[j], sizes[j]);
            if (!in_safe_range(sizes[j], limits) || !safe)
                return false;
        }
        for (Index i = 0; i < n; i++)
            for (Index j = i; j < n; j++)
                gram[i * columns + j] = gram[j * columns + i] = gram[i * columns + j] / sizes[i] / sizes[j];
        for (Index i = 0; i < n; i++)
            memset(gram + i * columns + n, 0, (columns - n) * sizeof(double));
        add_multiples(right, b, 1, 1.0, a, columns, 0, m, 0, false);
        for (Index j = 0; j < n; j++)
            right[j] /= sizes[j];
        return in_safe_range(norm(m, b), limits);
    }

    // R with R^T R = B_F^T B_F, F being the free variables; false where there is none.
    bool factorize()
    {
        width = 0;
        for (Index j = 0; j < n; j++)
            if (at[j] == 0.0)
                free_variables[width++] = j;
        Index wide = padded(width);
        for (Index i = 0; i < width; i++) {
            double *row = factor + i * wide;
            const double *of_gram = gram + free_variables[i] * columns;
            for (Index j = 0; j < width; j++)
                row[j] = of_gram[free_variables[j]];
            for (Index j = width; j < wide; j++)
                row[j] = 0.0;
        }
        return cholesky(factor, width, wide, 0.0);
    }

    // update = (B_F^T B_F)^-1 times the free elements of a gradient.
    void solve(const double *of_gradient)
    {
        for (Index i = 0; i < width; i++)
            update[i] = of_gradient[free_variables[i]];
        solve_transposed(factor, width, padded(width), update);
        solve_upper(factor, width, padded(width), update);
    }

    // left = the gradient after the update.
    void subtract_update(const double *of_gradient)
    {
        memcpy(left, of_gradient, columns * sizeof(double));
        for (Index k = 0; k < width; k++) {
            Index j = free_variables[k];
            add_multiples(left, update + k, 0, -1.0, gram, columns, j, j + 1, 0, false);
        }
    }

    // The minimum over the free variables by normal equations alone.
    void minimize_roughly()
    {
        memcpy(gradient, right, columns * sizeof(double));
        for (Index j = 0; j < n; j++) {
            z[j] = at[j] < 0.0 ? low[j] : at[j] > 0.0 ? high[j] : 0.0;
            if (z[j] != 0.0)
                add_multiples(gradient, z + j, 0, -1.0, gram, columns, j, j + 1, 0, false);
        }
        solve(gradient);
        for (Index k = 0; k < width; k++)
            z[free_variables[k]] = update[k];
        subtract_update(gradient);
    }

    void find_residual()
    {
        for (Index j = 0; j < n; j++)
            x[j] = at[j] < 0.0 ? given.lower[j] : at[j] > 0.0 ? given.upper[j] : z[j] / sizes[j];
        for (Index i = 0; i < m; i++) {
            Vec sum = all(0.0);
            for (Index j = 0; j < columns; j += WIDTH)
                sum = plus_product(sum, load(a + i * columns + j), load(x + j));
            residual[i] = b[i] - lane_sum(sum);
        }
    }

    // The gradient, and the update of the free variables.
    void find_update()
    {
        memset(gradient, 0, columns * sizeof(double));
        add_multiples(gradient, residual, 1, 1.0, a, columns, 0, m, 0, false);
        for (Index j = 0; j < n; j++)
            gradient[j] /= sizes[j];
        solve(gradient);
    }

    void add_update()
    {
        for (Index k = 0; k < width; k++)
            z[free_variables[k]] += update[k];
    }

    bool needs_another(int) const { return !(norm(width, update) <= limits.settled * norm(n, z)); }

    // The minimum over the free variables by corrected seminormal equations, with residuals of A.
    void minimize()
    {
        refine(*this, int(limits.steps));
        find_residual(), find_update(), subtract_update(gradient);
    }

    double sum_of_magnitudes() const
    {
        double sum = 0.0;
        for (Index j = 0; j < n; j++)
            sum += fabs(z[j]);
        return sum;
    }

    // Rounding errors of `left`. A residual that is rounding errors has a gradient that says nothing.
    double gradient_noise(bool refined) const
    {
        double size = norm(m, b), unexplained = norm(m, residual), u = 4.0 * sqrt(double(n)) * UNIT;
        if (!refined)
            return limits.rough * (size + sqrt(double(n)) * norm(n, z));
        return unexplained > u * (size + sum_of_magnitudes()) ? 2.0 * u * unexplained : INFINITY;
    }

    // Where an infeasible variable goes (-1 lower bound, 0 free, 1 upper bound); its present place if it is feasible.
    double side(Index j, double noise) const
    {
        if (at[j] != 0.0)
            return at[j] * left[j] < -noise ? 0.0 : at[j];
        return z[j] < low[j] ? -1.0 : z[j] > high[j] ? 1.0 : 0.0;
    }

    // The number of infeasible variables, and the last one of them.
    Index count_infeasible(double noise, Index &last) const
    {
        Index count = 0;
        for (Index j = 0; j < n; j++)
            if (side(j, noise) != at[j])
                count++, last = j;
        return count;
    }

    // Block principal pivoting from the solution without bounds: the number of sets that were tried, 0 without an end.
    Index pivot()
    {
        Index best = n + 1, patience = Index(limits.patience), last = 0;
        bool refined = false;
        minimize_roughly();
        for (Index j = 0; j < n; j++)
            at[j] = z[j] <= low[j] ? -1.0 : z[j] >= high[j] ? 1.0 : 0.0;
        for (Index sets = 1; sets <= limits.sets; sets++) {
            if (!factorize())
                return 0;
            minimize_roughly();
            double noise = gradient_noise(false);
            refined = refined || count_infeasible(noise, last) == 0;
            if (refined)
                minimize(), noise = gradient_noise(true);
            Index count = count_infeasible(noise, last);
            if (count == 0)
                return sets;
            patience = count < best ? Index(limits.patience) : patience - 1;
            best = count < best ? count : best;
            for (Index j = patience < 0 ? last : 0; j < n; j++) // exchanging all of them may cycle, one alone does not
                at[j] = side(j, noise);
        }
        return 0;
    }

    // Schatten 4-norms of the free columns and of their pseudoinverse.
    void find_norms(double &of_columns, double &of_inverse)
    {
        double sum = 0.0;
        Index wide = padded(width);
        of_columns = of_inverse = 0.0;
        if (width == 0)
            return;
        for (Index i = 0; i < width; i++)
            for (Index j = 0; j < width; j++) {
                double cosine = gram[free_variables[i] * columns + free_variables[j]];
                sum += cosine * cosine;
            }
        invert(factor, width, wide, inverse);
        form_gram(inverse, width, wide, square, true);
        of_columns = sqrt(sqrt(sum)), of_inverse = sqrt(symmetric_norm(square, width, wide, ones));
    }

    // The part of a gradient that no bound forbids to follow.
    double forbidden_by_none(const double *of_gradient, Index j) const
    {
        double push = at[j] * of_gradient[j];
        return at[j] == 0.0 ? of_gradient[j] : push < 0.0 ? push : 0.0;
    }

    void measure(BoundedNumbers &found) const
    {
        double square_of_gradient = 0.0, rest = 0.0, projected = 0.0;
        found.pushed = INFINITY, found.optimality = 0.0, found.margin = 1.0;
        for (Index j = 0; j < n; j++) {
            double component = forbidden_by_none(gradient, j), push = at[j] * left[j];
            square_of_gradient += component * component, rest += push < 0.0 ? push * push : 0.0;
            if (at[j] != 0.0 && push < found.pushed)
                found.pushed = push;
            if (fabs(component) * sizes[j] > found.optimality)
                found.optimality = fabs(component) * sizes[j];
        }
        for (Index k = 0; k < width; k++)
            projected += update[k] * gradient[free_variables[k]];
        found.gradient = sqrt(square_of_gradient), found.rest = sqrt(rest);
        found.projected = sqrt(projected > 0.0 ? projected : 0.0);
        found.b = norm(m, b), found.residual = norm(m, residual);
        found.image = norm(n, z), found.sum = sum_of_magnitudes(), found.width = double(width);
    }

    Status run(BoundedSolution &to)
    {
        size_t bytes = n * sizeof(double);
        BoundedNumbers &found = to.numbers;
        found.norm_of_all = found.inverse_norm_of_all = NAN;
        read();
        if (!form_normal_equations() || !factorize())
            return Status::failed;
        if (given.of_all) {
            find_norms(found.norm_of_all, found.inverse_norm_of_all);
            minimize_roughly(), minimize();
            memcpy(to.unbounded, x, bytes);
        }
        found.sets = double(pivot());
        if (found.sets == 0.0)
            return Status::failed;
        find_norms(found.norm, found.inverse_norm);
        measure(found);
        memcpy(to.x, x, bytes), memcpy(to.at, at, bytes), memcpy(to.sizes, sizes, bytes);
        return Status::done;
    }
};

}  // namespace

Status bounded(const BoundedProblem &problem, BoundedSolution &solution)
{
    Bounded work(problem);
    return work.workspace ? work.run(solution) : Status::no_memory;
}

NEULA_END
