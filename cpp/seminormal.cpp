// Least-squares problems from the matrix to the evidence, one after the other: the corrected seminormal equations with the
// inverse of R, residuals and gradients in twice the working precision.
//
// A is copied by rows and by columns, both padded with zeros to whole vectors. Sums along columns are formed for a vector
// of columns at a time, and sums along rows for a vector of rows: never across the elements of a vector.
#include "seminormal.hpp"

#include "matrices.hpp"

NEULA_BEGIN

void measure_gradient(
    const Problem &p, const FactorQuality &quality, double gradient_norm, double projected_norm, SeminormalNumbers &found)
{
    double residual_norm = norm(p.tall, p.residual), image = quality.norm * p.norm_of_x();
    found.optimality = quotient(gradient_norm, quality.norm * residual_norm);
    found.refined_error = smaller_of(found.optimality, quotient(residual_norm, image + p.b_norm));
    found.refined_error = smaller_of(found.refined_error, quotient(projected_norm, image * (1.0 - quality.rate)));
}

bool MinimumNorm::allocate(Index more)
{
    if (workspace)
        return true;
    if (!workspace.allocate(2 * problem.tall + 2 * problem.wide + more))
        return false;
    workspace.take(problem.tall, zeros, added);
    workspace.take(problem.wide, change, change_low);
    return true;
}

bool MinimumNorm::find_sizes(const SeminormalLimits &limits)
{
    double smallest = INFINITY;
    largest = 0.0;
    for (Index j = 0; j < problem.n; j++) {
        const double *column = problem.by_columns + j * problem.tall;
        double size = problem.sizes[j] = norm(problem.tall, column);
        if (in_safe_range(size, limits))
            largest = size > largest ? size : largest, smallest = size < smallest ? size : smallest;
        else if (!is_zero(problem.m, column))
            return false;
    }
    for (Index j = 0; j < problem.n; j++)
        problem.sizes[j] = problem.sizes[j] > 0.0 ? problem.sizes[j] : largest;
    spread = largest / smallest;
    return largest > 0.0;
}

// x + x_low grows by A^T v: a sum of rows, whatever the errors of residuals are.
void MinimumNorm::add_rows(const double *v, bool doubled) const
{
    const Problem &p = problem;
    memset(change_low, 0, p.wide * sizeof(double));
    if (doubled)
        combine_doubled(nullptr, 1.0, p.by_rows, p.wide, v, zeros, p.m, change, change_low);
    else
        p.multiply_transposed(v, change);
    for (Index j = 0; j < p.wide; j++) {
        double rest;
        two_sum(p.x[j], change[j], p.x[j], rest);
        add_doubled(p.x[j], p.x_low[j], rest + change_low[j]);
    }
}

// The update of w is multiplied by A^T alone: the residual then corrects what rounding errors of A^T w, however
// large compared with an element of x in large units, have left of A x = b.
void MinimumNorm::add_update(bool doubled) const
{
    for (Index i = 0; i < problem.m; i++)
        problem.w[i] += added[i];
    add_rows(added, doubled);
}

void MinimumNorm::restart(bool doubled) const
{
    memset(problem.x, 0, problem.wide * sizeof(double)), memset(problem.x_low, 0, problem.wide * sizeof(double));
    add_rows(problem.w, doubled);
}

namespace {

// One member of a batch of matrices of T.
template <typename T> void read(const Matrices &a, Index member, const FullRank &p)
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

constexpr double LOW_ACCURACY = 0x1p-45; // forward errors that residuals in working precision show of most problems

// Refinement by some factors. The first step is in working precision if that may suffice, and the last if it does.
template <typename Factors> struct Refinement {
    const Problem &problem;
    const Factors &factors;
    const SeminormalLimits &limits;
    bool doubled = limits.tolerance < LOW_ACCURACY;
    StepError error = {INFINITY, 0.0};
    double previous = INFINITY;

    // The solution of the normal equations, whose error is unknown.
    void begin() const
    {
        const Problem &p = problem;
        memset(p.x, 0, p.wide * sizeof(double)), memset(p.x_low, 0, p.wide * sizeof(double));
        memset(p.w, 0, p.tall * sizeof(double));
        memcpy(p.residual, p.b, p.tall * sizeof(double));
        factors.find_update(false);
        factors.add_update(doubled);
    }

    void find_residual() const { problem.find_residual(doubled); }

    void find_update()
    {
        previous = error.bound;
        factors.find_update(doubled);
        error = factors.error_left(2.0 * (problem.m + problem.n) * (doubled ? limits.noise : UNIT));
    }

    void add_update() const { factors.add_update(doubled); }

    bool needs_another(int steps)
    {
        bool inaccurate = error.bound > limits.tolerance * problem.norm_of_x();
        if (!doubled && inaccurate && steps < limits.max_steps) {
            doubled = true, factors.restart(true);
            return true;
        }
        bool improves = error.bound < limits.stagnation * previous && error.bound > limits.floor * error.floor;
        return (inaccurate && improves) || !factors.is_backward_stable(limits);
    }
};

// One right-hand side, with its evidence; x as it is returned is left in `returned`, and its residual in its place.
template <typename Factors>
SeminormalNumbers solve_by(const Problem &p, const Factors &factors, const SeminormalLimits &limits, bool single)
{
    SeminormalNumbers found = {};
    Refinement<Factors> refinement = {p, factors, limits};
    refinement.begin();
    found.steps = refine(refinement, int(limits.max_steps));
    double x_norm = p.norm_of_x(), dropped = factors.measure(found);
    for (Index j = 0; j < p.n; j++) {
        p.returned[j] = single ? float(p.x[j]) : p.x[j];
        found.largest = worse(fabs(p.returned[j]), found.largest);
    }
    double rounding = quotient(scaled_norm(p.n, p.sizes, p.x_low), x_norm) +
                      quotient(scaled_norm(p.n, p.sizes, p.x, p.returned), x_norm);
    measure_rounded(found, found.refined_error, quotient(refinement.error.bound, x_norm), rounding, limits.computed);
    // The square of a norm may have underflowed.
    bool safe = p.b_norm == 0.0 ? is_zero(p.m, p.b) : in_safe_range(p.b_norm, limits);
    double error = found.forward_error + dropped;
    found.forward_error = safe && error < INFINITY ? error : INFINITY;
    found.zero = found.largest == 0.0 && found.forward_error == 0.0;
    p.find_residual(p.returned);
    found.residual = quotient(norm(p.tall, p.residual), p.b_norm);
    return found;
}

// How a problem is solved (SolutionMethod in seminormal_host.py).
enum class Method { gram, shifted, few_rows, dependent };

// A batch, and where its problems are solved, one after the other.
struct Batch {
    const SeminormalProblems &given;
    const SeminormalLimits &limits;
    const bool transposes;
    Workspace workspace;
    Problem problem;
    FullRank full_rank{problem};
    FewRows few_rows{problem, full_rank};
    Dependent dependent{problem};
    Method method = Method::gram;
    double doubtful_condition = NAN; // the condition number of what may lack full rank

    explicit Batch(const SeminormalProblems &problems)
        : given(problems), limits(problems.limits), transposes(given.m < given.n)
    {
        Problem &p = problem;
        FullRank &of = full_rank;
        p.m = given.m, p.n = given.n, p.tall = padded(p.m), p.wide = padded(p.n);
        of.m = transposes ? p.n : p.m, of.n = transposes ? p.m : p.n, of.rows = padded(of.m), of.columns = padded(of.n);
        Index of_a = of.rows * of.columns, square = of.columns * of.columns;
        if (!workspace.allocate(2 * of_a + 3 * square + 4 * of.columns + 4 * p.tall + 5 * p.wide))
            return;
        workspace.take(of_a, of.by_rows, of.by_columns);
        workspace.take(square, of.gram, of.inverse, of.scaled);
        workspace.take(of.columns, of.sizes, of.part, of.projected, of.update);
        workspace.take(p.tall, p.b, p.residual, p.residual_low, p.w);
        workspace.take(p.wide, p.sizes, p.x, p.x_low, p.gradient, p.returned);
        p.by_rows = transposes ? of.by_columns : of.by_rows, p.by_columns = transposes ? of.by_rows : of.by_columns;
        if (!transposes)
            p.sizes = of.sizes;
    }

    // By the Gram matrix of A, where it is known.
    bool factorize_as_dependent(const double *gram)
    {
        method = Method::dependent;
        return given.probes != nullptr && dependent.factorize(limits, *given.probes, gram);
    }

    // Whether there are factors that are good enough.
    bool factorize()
    {
        doubtful_condition = NAN;
        if (transposes) {
            method = Method::few_rows;
            return few_rows.factorize(limits) || factorize_as_dependent(nullptr);
        }
        const FactorQuality &quality = full_rank.quality;
        bool begun = full_rank.begin_factor(limits), singular = begun && !quality.factorized;
        if (singular && factorize_as_dependent(full_rank.scaled))
            return true;
        bool good = begun && full_rank.finish_factor(limits);
        method = quality.shifted ? Method::shifted : Method::gram;
        if (good && quality.norm_bound * quality.inverse_norm < limits.condition)
            return true;
        doubtful_condition = good ? quality.norm * quality.inverse_norm : NAN;
        return !singular && factorize_as_dependent(nullptr);
    }

    SeminormalNumbers solve_column() const
    {
        switch (method) {
        case Method::few_rows:
            return solve_by(problem, few_rows, limits, given.single);
        case Method::dependent:
            return solve_by(problem, dependent, limits, given.single);
        default:
            return solve_by(problem, full_rank, limits, given.single);
        }
    }

    // All right-hand sides of a member: x, forward errors and norms of residuals; the worst evidence.
    SeminormalNumbers solve_member(Index member, const SeminormalSolutions &to)
    {
        SeminormalNumbers worst = {};
        Problem &p = problem;
        for (Index c = 0, k = given.k; c < k; c++) {
            for (Index i = 0; i < p.m; i++)
                p.b[i] = element(given.b, member, i, c);
            p.b_norm = norm(p.tall, p.b);
            SeminormalNumbers found = solve_column();
            join_worst<double>(worst, found);
            for (Index j = 0; j < p.n; j++)
                to.x[(member * p.n + j) * k + c] = p.returned[j];
            to.forward_error[member * k + c] = found.forward_error;
            to.residual_norm[member * k + c] = norm(p.tall, p.residual);
        }
        return worst;
    }

    // A member without a solution.
    SeminormalNumbers give_up(Index member, const SeminormalSolutions &to) const
    {
        Index n = given.n, k = given.k;
        for (Index i = 0; i < n * k; i++)
            to.x[member * n * k + i] = NAN;
        for (Index c = 0; c < k; c++)
            to.forward_error[member * k + c] = INFINITY, to.residual_norm[member * k + c] = NAN;
        SeminormalNumbers none = {};
        none.residual = none.refined_error = none.backward_error = none.largest = none.optimality = none.rank = NAN;
        none.doubtful = 1.0, none.forward_error = none.condition_bound = INFINITY, none.condition = doubtful_condition;
        return none;
    }

    // Norms of the matrix; the bound is 0 where singular values have decided its rank.
    void add_evidence_of_matrix(SeminormalNumbers &to) const
    {
        const FactorQuality &quality = full_rank.quality;
        if (method == Method::few_rows)
            to.condition_bound = few_rows.condition_bound, to.condition = few_rows.condition, to.rank = few_rows.rank;
        else if (method == Method::dependent)
            to.condition = dependent.condition, to.rank = dependent.rank;
        else
            to.condition_bound = quality.norm_bound * quality.inverse_norm,
            to.condition = quality.norm * quality.inverse_norm, to.rank = given.n;
    }

    template <typename T> void solve(const SeminormalSolutions &to)
    {
        Matrices a = given.a;
        if (transposes)
            a.row = given.a.column, a.column = given.a.row;
        for (Index member = 0; member < given.count; member++) {
            read<T>(a, member, full_rank);
            bool good = factorize();
            SeminormalNumbers worst = good ? solve_member(member, to) : give_up(member, to);
            if (good)
                add_evidence_of_matrix(worst);
            worst.way = double(method);
            write_evidence<double>(worst, to.numbers, member, given.count);
        }
    }
};

}  // namespace

Status seminormal(const SeminormalProblems &problems, const SeminormalSolutions &solutions)
{
    Batch batch(problems);
    if (!batch.workspace)
        return Status::no_memory;
    with_type(problems.a.single, [&](auto type) { batch.solve<decltype(type)>(solutions); });
    return Status::done;
}

NEULA_END
