// The minimum-norm solution, with few rows or dependent columns: what the parts of seminormal.cpp share about it.
//
// It is a sum of rows as they are given, x = A^T w, and so is what refinement adds: x lies in the space of the rows
// whatever the errors of w (A. Björck, "Numerical Methods for Least Squares Problems", SIAM, 1996).
#pragma once

#include "seminormal.hpp"

NEULA_BEGIN

// r columns of B that count, B P = B1 [I F] except for what is dropped. Matrices of r columns are padded to `columns`.
struct IndependentColumns {
    Index columns;
    Index *order;                 // permutation P: columns that count first
    double *upper, *error;        // R of B, and what F leaves of another column
    double *inverse, *rest;       // of R of B1, and F^T
    double *gram;                 // temporary squares
    double *of_columns, *of_rows; // inverses of factors of I + F F^T and of M^T M, for M = D P [I F]^T
    double *scaled, *y, *projected, *multipliers; // vectors
};

struct MinimumNorm {
    Workspace workspace;
    Index m, n, tall, wide;             // rows and columns of A, and as they are padded
    const double *by_rows, *by_columns; // A
    double *b, *residual, *residual_low, *w, *zeros, *added;               // vectors of m elements
    double *sizes, *x, *x_low, *before, *before_low, *gradient, *returned; // of n: the first is the diagonal of D
    FactorQuality quality;
    Index rank;
    double norm, condition, condition_bound; // of B, the first from below
    double largest, spread; // of the norms of the columns: the largest, and its ratio to the smallest
    double dropped, growth; // sigma_(r+1) from above, in units of sigma_r; ||[I F]||_F from above
    bool few_rows;          // or dependent columns
    Problem *transposed;    // A^T, of few rows
    double *scaled_columns; // those of B, of few rows
    IndependentColumns independent;

    // Needed at the first problem that needs it; false where there is too little memory. Where columns cannot be
    // dependent it takes less.
    bool allocate(Problem &p, bool transposed, bool dependent);

    void multiply(const double *v, double sign, double *to) const // to += sign A v
    {
        add_multiples(to, v, 1, sign, by_columns, tall, 0, n, 0, false);
    }

    void multiply_transposed(const double *v, double *to) const // to = A^T v
    {
        memset(to, 0, wide * sizeof(double));
        add_multiples(to, v, 1, 1.0, by_rows, wide, 0, m, 0, false);
    }
};

// A bound on ||D (x - x*)|| after a step, of which `floor` is due to the rounding errors of the residual.
struct StepError {
    double bound, floor;
};

// D, where columns of zeros count as the longest one; false where numbers are not in the safe range.
bool find_sizes(MinimumNorm &s, const SeminormalLimits &limits);

// Factors; false where they are not good enough, or the rank is in doubt. `gram` is the Gram matrix of A, of which the upper
// triangle is read, or nullptr.
bool factorize_few_rows(MinimumNorm &s, const SeminormalLimits &limits);
bool factorize_dependent(
    MinimumNorm &s, const SeminormalLimits &limits, const RateProbes &probes, const double *gram);

// What the residual adds to w, in `added`; products err by `noise` times those of magnitudes.
StepError step_of_few_rows(const MinimumNorm &s, double noise);
StepError step_of_dependent(const MinimumNorm &s, double noise, bool doubled);

// The backward error of J. L. Rigal and J. Gaches (1967), for B.
double backward_error_of_few_rows(const MinimumNorm &s);

// Backward error and optimality; returns what the dropped part adds to the forward error.
double errors_of_dependent(const MinimumNorm &s, Evidence &found);

// One right-hand side; x as it is returned is left in `returned`.
Evidence solve_minimum_norm(const MinimumNorm &s, const SeminormalLimits &limits, bool single);

NEULA_END
