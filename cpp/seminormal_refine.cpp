// Refinement with residuals and gradients in working precision or in twice that: a part of seminormal.cpp.
#include "doubled_rows.hpp"
#include "seminormal.hpp"

NEULA_BEGIN

namespace {

// R^-T times the gradient.
void project(const Problem &p)
{
    times_transposed_by_parts(p.inverse, p.n, p.columns, p.gradient, p.projected, p.part);
}

// R^-1 times that.
void find_update(const Problem &p) { times(p.inverse, p.n, p.columns, p.projected, p.update); }

// A^T times the residual in working precision.
void find_gradient(const Problem &p)
{
    memset(p.gradient, 0, p.columns * sizeof(double));
    add_multiples(p.gradient, p.residual, 1, 1.0, p.by_rows, p.columns, 0, p.m, 0, false);
}

// b - A (x + x_low) and its product with A^T, in working precision or in twice that and rounded once.
void evaluate(const Problem &p, bool doubled)
{
    if (doubled) {
        combine_doubled(p.b, -1.0, p.by_columns, p.rows, p.x, p.x_low, p.n, p.residual, p.residual_low);
        combine_doubled(
            nullptr, 1.0, p.by_rows, p.columns, p.residual, p.residual_low, p.m, p.gradient, nullptr);
        return;
    }
    memcpy(p.residual, p.b, p.rows * sizeof(double));
    add_multiples(p.residual, p.x, 1, -1.0, p.by_columns, p.rows, 0, p.n, 0, false);
    find_gradient(p);
}

// The solution of the normal equations, whose error is unknown.
void begin(const Problem &p)
{
    memset(p.x_low, 0, p.columns * sizeof(double));
    memcpy(p.residual, p.b, p.rows * sizeof(double));
    find_gradient(p), project(p), find_update(p);
    memcpy(p.x, p.update, p.columns * sizeof(double));
}

}  // namespace

double refine(const Problem &p, const SeminormalLimits &limits, Evidence &found, double &projected_norm)
{
    const FactorQuality &quality = p.quality;
    double error = INFINITY, b_norm = norm(p.rows, p.b);
    bool doubled = limits.tolerance < LOW_ACCURACY, active = true;
    begin(p);
    for (int step = 0; active && step < limits.max_steps; step++) {
        evaluate(p, doubled), project(p);
        double x_norm = scaled_norm(p.n, p.sizes, p.x), residual_norm = norm(p.rows, p.residual), previous = error;
        double noise = 2.0 * (p.m + p.n) * (doubled ? limits.noise : UNIT); // ||B||_F is the root of n
        double bounds = sqrt(p.n) * (x_norm + quality.inverse_norm * residual_norm) + b_norm;
        double floor = quality.inverse_norm * noise * bounds;
        find_update(p);
        for (Index j = 0; j < p.n; j++)
            two_sum(p.x[j], p.update[j] + p.x_low[j], p.x[j], p.x_low[j]);
        x_norm = scaled_norm(p.n, p.sizes, p.x), found.steps = step + 1;
        projected_norm = norm(p.columns, p.projected);
        error = quality.inverse_norm * quality.rate / (1.0 - quality.rate) * projected_norm + floor;
        bool inaccurate = error > limits.tolerance * x_norm;
        active = inaccurate && error < limits.stagnation * previous && error > limits.floor * floor;
        if (!doubled && inaccurate)
            doubled = active = true;
    }
    // Residual and gradient after the update.
    add_multiples(p.residual, p.update, 1, -1.0, p.by_columns, p.rows, 0, p.n, 0, false);
    find_gradient(p), project(p);
    projected_norm = norm(p.columns, p.projected);
    return error;
}

NEULA_END
