// Least-squares problems by the corrected seminormal equations: code shared by the parts of the kernel. Compilers work on the
// parts side by side.
#pragma once

#include "doubled_rows.hpp"
#include "refinement.hpp"
#include "workspace.hpp"

NEULA_BEGIN

constexpr double BOUND_MARGIN = 1.0 + 0x1p-10; // for the rounding errors of bounds themselves
constexpr double GAP = 10.0; // between singular values that count and others (neula/certificates/rank.py)

// Norms of B, which is A with columns of norm 1, and of the factor R.
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

// A problem with one right-hand side, and its solution x + x_low in twice the working precision.
struct Problem {
    Index m, n, tall, wide;                  // rows and columns of A, and as they are padded
    const double *by_rows, *by_columns;      // A, padded in both directions
    double *b, *residual, *residual_low, *w; // vectors of m elements; x = A^T w where it is a minimum-norm solution
    double *sizes;                           // of n elements: the diagonal of D, norms of columns
    double *x, *x_low, *gradient, *returned;
    double b_norm;

    void multiply(const double *v, double sign, double *to) const // to += sign A v
    {
        add_multiples(to, v, 1, sign, by_columns, tall, 0, n, 0, false);
    }

    void multiply_transposed(const double *v, double *to) const // to = A^T v
    {
        memset(to, 0, wide * sizeof(double));
        add_multiples(to, v, 1, 1.0, by_rows, wide, 0, m, 0, false);
    }

    // b - A v for a v in working precision.
    void find_residual(const double *v) const
    {
        memcpy(residual, b, tall * sizeof(double));
        multiply(v, -1.0, residual);
    }

    // b - A (x + x_low), in working precision or in twice that.
    void find_residual(bool doubled) const
    {
        if (doubled)
            combine_doubled(b, -1.0, by_columns, tall, x, x_low, n, residual, residual_low);
        else
            find_residual(x);
    }

    // A^T times the residual, likewise, rounded once.
    void find_gradient(bool doubled) const
    {
        if (doubled)
            combine_doubled(nullptr, 1.0, by_rows, wide, residual, residual_low, m, gradient, nullptr);
        else
            multiply_transposed(residual, gradient);
    }

    double norm_of_x() const { return scaled_norm(n, sizes, x); }
};

// A bound on ||D (x - x*)|| after a step, of which `floor` is due to the rounding errors of the residual.
struct StepError {
    double bound, floor;
};

// How a problem is refined by factors of its matrix:
//   find_update(doubled)        an update of x from the residual;
//   error_left(noise)           a bound on the error that it leaves, if products err by `noise` times those of magnitudes;
//   add_update(doubled), and restart(doubled), which forms x again before the first step in doubled precision;
//   is_backward_stable(limits)  whether the backward error of x is small enough;
//   measure(found)              optimality and backward error; returns what is dropped, an addition to the forward error.

// R of A, which has full rank, or of A^T with few rows, from the Gram matrix.
struct FullRank {
    const Problem &problem;
    Index m, n, rows, columns;         // of the matrix, which has at least as many rows as columns, and as they are padded
    double *by_rows, *by_columns;      // padded in both directions
    double *gram, *inverse, *scaled;   // squares: R^-1 and D R^-1
    double *sizes;                     // norms of columns
    double *part, *projected, *update; // vectors of n elements
    FactorQuality quality;

    // R^-1 from the Gram matrix, and its quality; where that has no factor the rate is NaN, and the Gram matrix stays in
    // `scaled`. False where numbers are not in the safe range.
    bool begin_factor(const SeminormalLimits &limits);

    // The rest of the quality, by shifted Cholesky QR where the rate is too large; false where it stays so.
    bool finish_factor(const SeminormalLimits &limits);

    void find_update(bool doubled) const;
    StepError error_left(double noise) const;
    void add_update(bool doubled) const;
    void restart(bool) const {}
    bool is_backward_stable(const SeminormalLimits &) const { return true; }
    double measure(SeminormalNumbers &found) const;

private:
    void project() const;
    double scale_inverse() const;
    bool factorize(double shift) const;
    bool factorize_again() const;
    void multiply_by_inverse(bool by_parts, double *w) const;
    double measure_rate(const SeminormalLimits &limits, double *w, double &sums_norm) const;
    double shifted_rate(const SeminormalLimits &limits) const;
};

// The minimum-norm solution. It is a sum of rows as they are given, x = A^T w, and so is what refinement adds: x lies in the
// space of the rows whatever the errors of w (A. Björck, "Numerical Methods for Least Squares Problems", SIAM, 1996).
struct MinimumNorm {
    const Problem &problem;
    Workspace workspace = {};
    double *zeros, *added;                   // vectors of m elements
    double *change, *change_low;             // of n: A^T times what is added to w
    Index rank = 0;
    FactorQuality quality = NO_FACTOR;
    double norm_of_b, condition, condition_bound; // the first from below
    double largest, spread;                       // of the norms of the columns: the largest, and its ratio to the smallest

    explicit MinimumNorm(const Problem &p) : problem(p) {}

    void add_update(bool doubled) const;
    void restart(bool doubled) const; // x = A^T w

protected:
    // Memory at the first problem that needs it, and some more; false where there is too little.
    bool allocate(Index more);

    // D, where columns of zeros count as the longest one; false where numbers are not in the safe range.
    bool find_sizes(const SeminormalLimits &limits);

    void add_rows(const double *v, bool doubled) const;
};

// Fewer rows than columns. With R of A^T the seminormal equations of the second kind are R^T R w = b for a w that is refined.
struct FewRows : MinimumNorm {
    FullRank &transposed;
    double *scaled_columns = nullptr; // those of B

    FewRows(const Problem &p, FullRank &of_transposed) : MinimumNorm(p), transposed(of_transposed) {}

    // False where factors are not good enough, or there is too little memory.
    bool factorize(const SeminormalLimits &limits);

    void find_update(bool doubled) const;
    StepError error_left(double noise) const;
    void add_update(bool doubled) const;
    bool is_backward_stable(const SeminormalLimits &limits) const { return !(backward_error() > limits.backward_error); }
    double measure(SeminormalNumbers &found) const;

private:
    bool are_independent();
    double norm_by_rows(const double *v) const;
    double backward_error() const;
};

// Dependent columns: r columns of B that count, B P = B1 [I F] except for what is dropped. Matrices of r columns are padded to
// `columns`.
struct Dependent : MinimumNorm {
    Index columns;
    Index *order = nullptr;       // permutation P: columns that count first
    double *upper, *error;        // R of B, and what F leaves of another column
    double *inverse, *rest;       // of R of B1, and F^T
    double *gram;                 // temporary squares
    double *of_columns, *of_rows; // inverses of factors of I + F F^T and of M^T M, for M = D P [I F]^T
    double *scaled, *y, *projected, *multipliers; // vectors
    double dropped, growth; // sigma_(r+1) from above, in units of sigma_r; ||[I F]||_F from above

    explicit Dependent(const Problem &p) : MinimumNorm(p) {}

    // Likewise, or where the rank is in doubt. `of_a` is the Gram matrix of A, of which the upper triangle is read, or nullptr.
    bool factorize(const SeminormalLimits &limits, const RateProbes &probes, const double *of_a);

    void find_update(bool doubled) const;
    StepError error_left(double noise) const;
    bool is_backward_stable(const SeminormalLimits &) const { return true; }
    double measure(SeminormalNumbers &found) const;

private:
    bool allocate();
    void form_scaled_gram(const double *of_a);
    Index find_pivots(double least, double rounding) const;
    bool invert_first(const SeminormalLimits &limits);
    void apply(const double *x, double *v) const;
    double find_error(Index c) const;
    void correct(Index c) const;
    bool find_rest(const SeminormalLimits &limits);
    bool invert_shifted(const double *scales, double *to) const;
    bool invert_both() const;
    void project() const;
    void find_added() const;
    double measure_rate(const RateProbes &probes) const;
};

// Optimality and backward error of x from its residual and norms of the gradient D^-1 A^T r and of Q^T r.
void measure_gradient(
    const Problem &p, const FactorQuality &quality, double gradient_norm, double projected_norm, SeminormalNumbers &found);

NEULA_END
