// Least-squares problems from the matrix to the evidence, one after the other: the corrected seminormal equations with the
// inverse of R, residuals and gradients in twice the working precision.
//
// A is copied by rows and by columns, both padded with zeros to whole vectors. Sums along columns are formed for a vector
// of columns at a time, and sums along rows for a vector of rows: never across the elements of a vector.
#include "seminormal.hpp"

#include "matrices.hpp"
#include "seminormal_minimum_norm.hpp"

NEULA_BEGIN

Problem::Problem(Index m, Index n)
    : m(m), n(n), rows(padded(m)), columns(padded(n)),
      workspace(2 * rows * columns + 3 * columns * columns + 7 * columns + 3 * rows)
{
    if (!workspace)
        return;
    double **const matrices[] = {&by_rows, &by_columns};
    double **const squares[] = {&gram, &inverse, &scaled};
    double **const vectors[] = {&sizes, &part, &x, &x_low, &gradient, &projected, &update};
    double **const tall_vectors[] = {&b, &residual, &residual_low};
    for (double **matrix : matrices)
        *matrix = workspace.take(rows * columns);
    for (double **square : squares)
        *square = workspace.take(columns * columns);
    for (double **vector : vectors)
        *vector = workspace.take(columns);
    for (double **vector : tall_vectors)
        *vector = workspace.take(rows);
}

namespace {

// One member of a batch of matrices of T.
template <typename T> void read(const Matrices &a, Index member, const Problem &p)
{
    const T *first = static_cast<const T *>(a.data) + member * a.member;
    for (Index i = 0; i < p.m; i++)
        for (Index j = 0; j < p.n; j++)
            p.by_rows[i * p.columns + j] = double(first[i * a.row + j * a.column]);
    for (Index top = 0; top < p.rows; top += PADDED)
        for (Index left = 0; left < p.columns; left += PADDED) {
            const double *from = p.by_rows + top * p.columns + left;
            double *to = p.by_columns + left * p.rows + top;
            for (Index j = 0; j < PADDED; j++)
                for (Index i = 0; i < PADDED; i++)
                    to[j * p.rows + i] = from[i * p.columns + j];
        }
}

// ||b - A x|| of an x in working precision, in `update`; it takes the place of the residual.
double returned_residual_norm(const Problem &p)
{
    memcpy(p.residual, p.b, p.rows * sizeof(double));
    add_multiples(p.residual, p.update, 1, -1.0, p.by_columns, p.rows, 0, p.n, 0, false);
    return norm(p.rows, p.residual);
}

bool is_zero(Index count, const double *x)
{
    for (Index i = 0; i < count; i++)
        if (x[i] != 0.0)
            return false;
    return true;
}

// One right-hand side; x as it is returned is left in `update`.
Evidence solve_full_rank(const Problem &p, const SeminormalLimits &limits, bool single)
{
    Evidence found;
    const FactorQuality &quality = p.quality;
    double projected_norm, bound = refine(p, limits, found, projected_norm);
    double b_norm = norm(p.rows, p.b), residual_norm = norm(p.rows, p.residual);
    double x_norm = scaled_norm(p.n, p.sizes, p.x), image = quality.norm * x_norm;
    for (Index j = 0; j < p.n; j++) {
        p.update[j] = single ? float(p.x[j]) : p.x[j];
        p.gradient[j] /= p.sizes[j];
        found.largest = larger_of(found.largest, fabs(p.update[j]));
    }
    double of_low = quotient(scaled_norm(p.n, p.sizes, p.x_low), x_norm);
    double of_rounding = quotient(scaled_norm(p.n, p.sizes, p.x, p.update), x_norm);
    double error = quotient(bound, x_norm) + of_low + of_rounding;
    found.optimality = quotient(norm(p.n, p.gradient), quality.norm * residual_norm);
    found.refined_error = smaller_of(found.optimality, quotient(residual_norm, image + b_norm));
    found.refined_error =
        smaller_of(found.refined_error, quotient(projected_norm, image * (1.0 - quality.rate)));
    found.backward_error = found.refined_error + (of_low + of_rounding);
    error = limits.computed * error / (1.0 - error); // relative to the exact solution
    // The square of a norm may have underflowed.
    bool safe = b_norm == 0.0 ? is_zero(p.m, p.b) : in_safe_range(b_norm, limits);
    found.forward_error = safe && error >= 0.0 && error < INFINITY ? error : INFINITY;
    found.residual_norm = returned_residual_norm(p);
    found.zero = found.largest == 0.0 && found.forward_error == 0.0;
    found.residual = quotient(found.residual_norm, b_norm);
    return found;
}

void join(Evidence &worst, const Evidence &found)
{
    double Evidence::*const fields[] = {
        &Evidence::residual, &Evidence::refined_error, &Evidence::backward_error, &Evidence::forward_error,
        &Evidence::largest, &Evidence::optimality, &Evidence::steps,
    };
    for (double Evidence::*field : fields)
        worst.*field = larger_of(worst.*field, found.*field);
    worst.zero |= found.zero;
}

// How a problem is solved (SolutionMethod in seminormal_host.py).
enum class Method { gram, shifted, few_rows, dependent };

// What is known of a matrix; the bound is 0 where singular values have decided its rank.
struct Known {
    double condition_bound, condition, rank;
};

// A batch, and where its problems are solved, one after the other.
struct Batch {
    const SeminormalProblems &given;
    const SeminormalLimits &limits;
    bool few_rows;
    Problem problem; // of A, or of A^T with few rows
    MinimumNorm minimum_norm = {};
    Method method = Method::gram;
    double doubtful_condition = NAN; // the condition number of what may lack full rank

    explicit Batch(const SeminormalProblems &problems)
        : given(problems), limits(problems.limits), few_rows(given.m < given.n),
          problem(few_rows ? given.n : given.m, few_rows ? given.m : given.n)
    {
    }

    bool is_minimum_norm() const { return method == Method::few_rows || method == Method::dependent; }

    bool has_memory()
    {
        return minimum_norm.workspace || minimum_norm.allocate(problem, few_rows, given.probes != nullptr);
    }

    // By the Gram matrix of A, where it is known.
    bool factorize_as_dependent(const double *gram)
    {
        method = Method::dependent;
        return given.probes != nullptr && has_memory() && find_sizes(minimum_norm, limits) &&
               factorize_dependent(minimum_norm, limits, *given.probes, gram);
    }

    // Whether there are factors that are good enough.
    bool factorize()
    {
        doubtful_condition = NAN;
        if (few_rows) {
            method = Method::few_rows;
            if (!has_memory())
                return false;
            bool good = find_sizes(minimum_norm, limits) && factorize_few_rows(minimum_norm, limits);
            return good || factorize_as_dependent(nullptr);
        }
        const FactorQuality &quality = problem.quality;
        bool begun = begin_factor(problem, limits), singular = begun && !quality.factorized;
        if (singular && factorize_as_dependent(problem.scaled))
            return true;
        bool good = begun && finish_factor(problem, limits);
        method = quality.shifted ? Method::shifted : Method::gram;
        if (good && quality.norm_bound * quality.inverse_norm < limits.condition)
            return true;
        doubtful_condition = good ? quality.norm * quality.inverse_norm : NAN;
        return !singular && factorize_as_dependent(nullptr);
    }

    Known known(bool good) const
    {
        if (!good)
            return {INFINITY, doubtful_condition, NAN};
        const MinimumNorm &s = minimum_norm;
        if (is_minimum_norm())
            return {method == Method::few_rows ? s.condition_bound : 0.0, s.condition, double(s.rank)};
        const FactorQuality &quality = problem.quality;
        return {quality.norm_bound * quality.inverse_norm, quality.norm * quality.inverse_norm, double(problem.n)};
    }

    // All right-hand sides of a member: x, forward errors and norms of residuals; the worst evidence.
    Evidence solve_member(Index member, const SeminormalSolutions &to) const
    {
        Evidence worst;
        Index m = given.m, n = given.n, k = given.k;
        double *b = is_minimum_norm() ? minimum_norm.b : problem.b;
        const double *x = is_minimum_norm() ? minimum_norm.returned : problem.update;
        for (Index c = 0; c < k; c++) {
            for (Index i = 0; i < m; i++)
                b[i] = element(given.b, member, i, c);
            Evidence found = is_minimum_norm() ? solve_minimum_norm(minimum_norm, limits, given.single)
                                               : solve_full_rank(problem, limits, given.single);
            join(worst, found);
            for (Index j = 0; j < n; j++)
                to.x[(member * n + j) * k + c] = x[j];
            to.forward_error[member * k + c] = found.forward_error;
            to.residual_norm[member * k + c] = found.residual_norm;
        }
        return worst;
    }

    // A member without a solution.
    Evidence give_up(Index member, const SeminormalSolutions &to) const
    {
        Index n = given.n, k = given.k;
        for (Index i = 0; i < n * k; i++)
            to.x[member * n * k + i] = NAN;
        for (Index c = 0; c < k; c++)
            to.forward_error[member * k + c] = INFINITY, to.residual_norm[member * k + c] = NAN;
        Evidence none;
        none.residual = none.refined_error = none.backward_error = none.largest = none.optimality = NAN;
        none.forward_error = INFINITY;
        return none;
    }

    void write_numbers(Index member, bool good, const Evidence &worst, double *to) const
    {
        Known of = known(good);
        SeminormalNumbers numbers;
        numbers.doubtful = !good, numbers.rank = of.rank, numbers.way = double(method);
        numbers.condition_bound = of.condition_bound, numbers.condition = of.condition;
        numbers.residual = worst.residual, numbers.refined_error = worst.refined_error;
        numbers.backward_error = worst.backward_error, numbers.forward_error = worst.forward_error;
        numbers.largest = worst.largest, numbers.optimality = worst.optimality;
        numbers.zero = worst.zero, numbers.steps = worst.steps;
#define FIELD(name) to[member] = numbers.name, to += given.count;
        NEULA_SEMINORMAL_NUMBERS(FIELD)
#undef FIELD
    }

    template <typename T> void solve(const SeminormalSolutions &to)
    {
        Matrices a = given.a;
        if (few_rows)
            a.row = given.a.column, a.column = given.a.row;
        for (Index member = 0; member < given.count; member++) {
            read<T>(a, member, problem);
            bool good = factorize();
            Evidence worst = good ? solve_member(member, to) : give_up(member, to);
            write_numbers(member, good, worst, to.numbers);
        }
    }
};

}  // namespace

Status seminormal(const SeminormalProblems &problems, const SeminormalSolutions &solutions)
{
    Batch batch(problems);
    if (!batch.problem.workspace)
        return Status::no_memory;
    if (problems.a.single)
        batch.solve<float>(solutions);
    else
        batch.solve<double>(solutions);
    return Status::done;
}

NEULA_END
