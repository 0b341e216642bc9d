// Least-squares problems by the corrected seminormal equations: what the parts of the kernel share. Compilers work on the
// parts side by side.
#pragma once

#include "rows.hpp"
#include "workspace.hpp"

NEULA_BEGIN

constexpr double BOUND_MARGIN = 1.0 + 0x1p-10; // for the rounding errors of bounds themselves
constexpr double LOW_ACCURACY = 0x1p-45; // forward errors that residuals in working precision show of most problems
constexpr double GAP = 10.0; // between singular values that count and others (neula/certificates/rank.py)

// What is known of B, A with its columns divided by their norms, and of the factor R.
//
// If R is the factor of the Gram matrix, the rate of convergence is made by rounding errors. Those of the Gram matrix are
// m u |a_i|^T |a_j| at most, and those of its factorization (n + 1) u |r_i|^T |r_j|: both are below products of the norms
// of columns. So with w = |R^-T| D 1 they come to (m + n + 1) u ||w||^2, and those of the inverse, and of two products
// with it, to n u ||w|| each, the first of which counts twice.
struct FactorQuality {
    double norm, norm_bound; // ||B||_2 from below and from above, by its norms of Frobenius and Schatten
    double inverse_norm;     // ||B^+||_2 from above
    double rate;             // ||I - W^T W||_F for W = A R^-1, from above
    bool factorized;         // whether the Gram matrix of A has a factor
    bool shifted;            // whether R took shifted Cholesky QR: condition numbers beyond some 1e6
};

constexpr FactorQuality NO_FACTOR = {NAN, NAN, NAN, NAN, false, false};

// A problem with at least as many rows as columns.
struct Problem {
    Index m, n, rows, columns; // the last two as they are padded
    Workspace workspace;
    double *by_rows, *by_columns;                // A, padded in both directions
    double *gram, *inverse, *scaled;             // squares: R^-1 and D R^-1
    double *sizes;                               // the diagonal of D: norms of columns
    double *part, *gradient, *projected, *update; // vectors like x
    double *x, *x_low;                           // a solution in twice the working precision
    double *b, *residual, *residual_low;
    FactorQuality quality;

    Problem(Index m, Index n);
};

// Evidence of the solution for one right-hand side.
struct Evidence {
    double residual = 0.0, refined_error = 0.0, backward_error = 0.0, forward_error = 0.0, largest = 0.0;
    double optimality = 0.0, steps = 0.0;
    double residual_norm = 0.0; // of x as it is returned
    bool zero = false;          // whether x = 0 is the exact solution
};

inline double quotient(double a, double b) { return a == 0.0 ? 0.0 : a / b; }

// NaN if one of the numbers is.
inline double larger_of(double a, double b) { return a >= b || a != a ? a : b; }
inline double smaller_of(double a, double b) { return a <= b || a != a ? a : b; }

inline bool in_safe_range(double size, const SeminormalLimits &limits)
{
    return size >= 1.0 / limits.in_safe_range && size <= limits.in_safe_range;
}

// ||D (x - y)||; without y that of x.
inline double scaled_norm(Index n, const double *sizes, const double *x, const double *y = nullptr)
{
    double sum = 0.0;
    for (Index j = 0; j < n; j++) {
        double scaled = sizes[j] * (y ? x[j] - y[j] : x[j]);
        sum += scaled * scaled;
    }
    return sqrt(sum);
}

// R^-1 from the Gram matrix, and its quality; where that has no factor the rate is NaN, and the Gram matrix stays in
// `scaled`. False where numbers are not in the safe range.
bool begin_factor(Problem &p, const SeminormalLimits &limits);

// The rest of the quality, by shifted Cholesky QR where the rate is too large; false where it stays so.
bool finish_factor(Problem &p, const SeminormalLimits &limits);

// x by refinement, and a bound on ||D (x - x*)||: what a step leaves of the error before it, which the projected residual
// shows, and rounding errors of the residual, whose elements are sums of as many products as A has columns, and of the
// gradient, of as many as A has rows. The first step is in working precision if that may suffice, and the last if it does.
double refine(const Problem &p, const SeminormalLimits &limits, Evidence &found, double &projected_norm);

NEULA_END
