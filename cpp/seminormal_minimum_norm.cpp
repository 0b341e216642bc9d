// The minimum-norm solution of one problem, refined in twice the working precision: a part of seminormal.cpp.
#include "seminormal_minimum_norm.hpp"

#include "doubled_rows.hpp"

NEULA_BEGIN

bool MinimumNorm::allocate(Problem &p, bool is_transposed, bool dependent)
{
    m = is_transposed ? p.n : p.m, n = is_transposed ? p.m : p.n;
    tall = is_transposed ? p.columns : p.rows, wide = is_transposed ? p.rows : p.columns;
    by_rows = is_transposed ? p.by_columns : p.by_rows, by_columns = is_transposed ? p.by_rows : p.by_columns;
    transposed = &p;
    IndependentColumns &of = independent;
    double *order;
    double **const columns_of_a[] = {&b, &residual, &residual_low, &w, &zeros, &added, &of.error};
    double **const rows_of_a[] = {&sizes,      &x,     &x_low,     &before,         &before_low, &gradient, &returned,
                                  &of.scaled, &of.y, &of.projected, &of.multipliers, &order};
    Index fewest = tall < wide ? tall : wide; // columns and rows of what has r columns
    Index scaled = is_transposed ? n * tall : 0, vectors = 7 * tall + 12 * wide;
    if (!workspace.allocate(vectors + scaled + (dependent ? wide * wide + 3 * fewest * fewest + 2 * fewest * wide : 0)))
        return false;
    for (double **vector : columns_of_a)
        *vector = workspace.take(tall);
    for (double **vector : rows_of_a)
        *vector = workspace.take(wide);
    of.order = reinterpret_cast<Index *>(order);
    scaled_columns = workspace.take(scaled);
    if (!dependent)
        return true;
    of.gram = workspace.take(wide * wide);
    double **const squares[] = {&of.inverse, &of.of_columns, &of.of_rows};
    for (double **square : squares)
        *square = workspace.take(fewest * fewest);
    of.upper = workspace.take(fewest * wide), of.rest = workspace.take(fewest * wide);
    return true;
}

bool find_sizes(MinimumNorm &s, const SeminormalLimits &limits)
{
    double smallest = INFINITY;
    s.largest = 0.0;
    for (Index j = 0; j < s.n; j++) {
        const double *column = s.by_columns + j * s.tall;
        double size = s.sizes[j] = norm(s.tall, column);
        if (!in_safe_range(size, limits)) {
            for (Index i = 0; i < s.m; i++)
                if (column[i] != 0.0) // or NaN
                    return false;
            continue;
        }
        s.largest = size > s.largest ? size : s.largest, smallest = size < smallest ? size : smallest;
    }
    for (Index j = 0; j < s.n; j++)
        s.sizes[j] = s.sizes[j] > 0.0 ? s.sizes[j] : s.largest;
    s.spread = s.largest / smallest;
    return s.largest > 0.0;
}

namespace {

StepError find_step(const MinimumNorm &s, double noise, bool doubled)
{
    return s.few_rows ? step_of_few_rows(s, noise) : step_of_dependent(s, noise, doubled);
}

// x + x_low grows by `before` + `before_low` = A^T v: a sum of rows, whatever the errors of residuals are.
void add_rows(const MinimumNorm &s, const double *v, bool doubled)
{
    memset(s.before_low, 0, s.wide * sizeof(double));
    if (doubled)
        combine_doubled(nullptr, 1.0, s.by_rows, s.wide, v, s.zeros, s.m, s.before, s.before_low);
    else
        s.multiply_transposed(v, s.before);
    for (Index j = 0; j < s.wide; j++) {
        double rest;
        two_sum(s.x[j], s.before[j], s.x[j], rest);
        two_sum(s.x[j], rest + (s.before_low[j] + s.x_low[j]), s.x[j], s.x_low[j]);
    }
}

// x = A^T w
void begin(const MinimumNorm &s, bool doubled)
{
    memset(s.x, 0, s.wide * sizeof(double)), memset(s.x_low, 0, s.wide * sizeof(double));
    add_rows(s, s.w, doubled);
}

void find_residual(const MinimumNorm &s, bool doubled)
{
    if (doubled) {
        combine_doubled(s.b, -1.0, s.by_columns, s.tall, s.x, s.x_low, s.n, s.residual, s.residual_low);
        return;
    }
    memcpy(s.residual, s.b, s.tall * sizeof(double));
    s.multiply(s.x, -1.0, s.residual);
}

// A bound on ||D (x - x*)||; the residual is that of x. The first step is in working precision if that may suffice, and the
// last if it does.
//
// What a step adds to w is multiplied by A^T alone: the residual then corrects what rounding errors of A^T w, however
// large compared with an element of x in large units, have left of A x = b.
double refine_rows(const MinimumNorm &s, const SeminormalLimits &limits, Evidence &found)
{
    double error = INFINITY;
    bool doubled = limits.tolerance < LOW_ACCURACY, active = true;
    memcpy(s.residual, s.b, s.tall * sizeof(double));
    find_step(s, 0.0, false);
    memcpy(s.w, s.added, s.tall * sizeof(double));
    begin(s, doubled);
    for (int step = 0; active && step < limits.max_steps; step++) {
        find_residual(s, doubled);
        StepError of_step = find_step(s, 2.0 * (s.m + s.n) * (doubled ? limits.noise : UNIT), doubled);
        double previous = error;
        for (Index i = 0; i < s.m; i++)
            s.w[i] += s.added[i];
        add_rows(s, s.added, doubled);
        error = of_step.bound, found.steps = step + 1;
        bool inaccurate = error > limits.tolerance * scaled_norm(s.n, s.sizes, s.x);
        s.multiply(s.before, -1.0, s.residual);
        active = inaccurate && error < limits.stagnation * previous && error > limits.floor * of_step.floor;
        active |= s.few_rows && backward_error_of_few_rows(s) > limits.backward_error;
        if (!doubled && inaccurate && step + 1 < limits.max_steps)
            doubled = active = true, begin(s, doubled);
    }
    return error;
}

// ||b - A x|| of x as it is returned; it takes the place of the residual.
double returned_residual_norm(const MinimumNorm &s)
{
    memcpy(s.residual, s.b, s.tall * sizeof(double));
    s.multiply(s.returned, -1.0, s.residual);
    return norm(s.tall, s.residual);
}

}  // namespace

Evidence solve_minimum_norm(const MinimumNorm &s, const SeminormalLimits &limits, bool single)
{
    Evidence found;
    double bound = refine_rows(s, limits, found);
    double b_norm = norm(s.tall, s.b), x_norm = scaled_norm(s.n, s.sizes, s.x);
    for (Index j = 0; j < s.n; j++) {
        s.returned[j] = single ? float(s.x[j]) : s.x[j];
        found.largest = larger_of(found.largest, fabs(s.returned[j]));
    }
    double of_low = scaled_norm(s.n, s.sizes, s.x_low) / x_norm;
    double of_rounding = scaled_norm(s.n, s.sizes, s.x, s.returned) / x_norm;
    double error = bound / x_norm + of_low + of_rounding;
    double of_dropped = s.few_rows ? 0.0 : errors_of_dependent(s, found);
    if (s.few_rows)
        found.optimality = found.refined_error = backward_error_of_few_rows(s);
    found.backward_error = found.refined_error + (of_low + of_rounding);
    // Relative to the exact solution.
    error = error < 1.0 ? limits.computed * error / (1.0 - error) + of_dropped : INFINITY;
    found.forward_error = error < INFINITY && in_safe_range(b_norm, limits) ? error : INFINITY;
    found.residual_norm = returned_residual_norm(s);
    found.residual = quotient(found.residual_norm, b_norm);
    return found;
}

NEULA_END
