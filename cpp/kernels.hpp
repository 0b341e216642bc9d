// The kernels as the Python module sees them: the same table of functions from each instruction set.
#pragma once

#include <cstddef>

namespace neula {

using Index = std::ptrdiff_t;

// Matrices of a batch: of float or double, or of complex numbers of these, any strides (in elements).
struct Matrices {
    void *data;
    bool single;
    Index member, row, column;
    bool complex = false;
};

// Limits of least squares with bounds (documented in bounded_host.py).
struct BoundedLimits {
    double in_safe_range, rough, settled, steps, patience, sets;
};

// Evidence of its solution, for columns of norm 1: of B = A D^-1 and D x.
struct BoundedNumbers {
    double sets, width, b, residual, gradient, optimality, projected, rest, image, sum, pushed;
    double norm, inverse_norm, norm_of_all, inverse_norm_of_all, margin;
};

struct BoundedProblem {
    Matrices a, b;
    Index m, n;
    const double *lower, *upper;
    BoundedLimits limits;
    bool of_all;  // whether norms of all columns and the solution without bounds are asked for
};

// Vectors of length n; `unbounded` is written where `of_all` is set.
struct BoundedSolution {
    BoundedNumbers numbers;
    double *x, *at, *sizes, *unbounded;
};

constexpr Index PROBES = 4;  // random vectors

// Errors of a factorization A = Q R along random vectors g, for columns of A divided by their norms d: norms of the residual
// (A - Q R) D^-1 g, of A D^-1 g, and of the loss of orthogonality (Q^T Q - I) g; an upper estimate of ||I - Q^T Q||_2, less than
// half of it with a probability of 5e-7; the smallest and the largest d.
struct QRErrors {
    double residual, image, loss, norm, smallest, largest;
};

// QR factorizations of a batch, all of one type. They are given, and R is made to have no negative diagonal element; or
// they are found, also of complex numbers.
struct QRProblem {
    Matrices a, q, r;
    Index batch, m, n;
    const double *probes;  // (n, PROBES), for complex numbers (2 n, PROBES)
    QRErrors *errors;      // (batch)
    double loss;           // ||I - Q^T Q||_F / sqrt(n) at which factorizations that are found may end
    Index threads;
};

// Products with a matrix whose rows have no gaps, and with its transpose: R = A X, or B - A X, or B without x, and A^T R.
// Vectors lie one after the other; image (R) and back (A^T R) may be nullptr.
struct OnePassProblem {
    const void *a;
    bool single;      // whether a is of float
    Index m, n, row;  // row: elements from a row to the next
    Index k;          // vectors
    const double *x, *b;
    double *image, *back;
    Index threads;
};

// R = B - A (X + X_low) and A^T R in twice the working precision. Vectors lie one after the other; numbers of a pair behind
// all larger ones.
struct DoubledNormalProblem {
    Matrices a;  // of double
    Index m, n, k;
    const double *x, *x_low, *b;  // (k, n), also nullptr; (k, m)
    double *residual, *gradient;  // (2, k, m), (2, k, n)
    Index threads;
};

constexpr Index FMA_TILE = 8;  // columns of B that lie together

// C = A B for a batch, as a matrix unit sums: `block` products at a time, aligned to their largest exponent and truncated. Powers
// are 2 to the exponents of the elements, 0 for 0.
struct BlockFmaProblem {
    const double *a, *a_powers;  // (batch, m, k)
    const double *b, *b_powers;  // (batch, tiles, k, FMA_TILE)
    double *c;                   // (batch, tiles, m, FMA_TILE)
    Index batch, tiles, m, k;    // k is a multiple of the block
    Index block;
    double ulp;  // last bit that alignment keeps, relative to the largest power
    Index threads;
};

// Limits of the refinement of least-squares problems, and of their ranks (documented in seminormal_host.py).
struct SeminormalLimits {
    double tolerance, max_steps, max_rate, rounding, noise, floor, stagnation, computed, in_safe_range;
    double backward_error, condition, rcond;
};

// Vectors along which the rate of convergence is measured: columns of a matrix (n, count) with contiguous rows; by how much
// they may understate the rate, and what rounding errors make of it for each column and unit of ||R^-1||.
struct RateProbes {
    const double *vectors;
    Index count;
    double margin, rounding;
};

struct SeminormalProblems {
    Matrices a, b;
    Index count, m, n, k;
    bool single;  // whether x is rounded to float
    SeminormalLimits limits;
    const RateProbes *probes;  // nullptr: no columns are taken to be dependent
};

// Evidence of one problem, the worst of its right-hand sides: as rows of an array, in this order.
#define NEULA_SEMINORMAL_NUMBERS(FIELD) \
    FIELD(doubtful) FIELD(residual) FIELD(refined_error) FIELD(backward_error) FIELD(forward_error) \
    FIELD(condition_bound) FIELD(condition) FIELD(largest) FIELD(optimality) FIELD(rank) FIELD(zero) \
    FIELD(steps) FIELD(way)
struct SeminormalNumbers {
#define FIELD(name) double name;
    NEULA_SEMINORMAL_NUMBERS(FIELD)
#undef FIELD
};

// x of shape (count, n, k), fields of SeminormalNumbers (fields, count), forward errors and norms of residuals (count, k).
struct SeminormalSolutions {
    double *x, *numbers, *forward_error, *residual_norm;
};

constexpr int MOST_UPDATES = 3;  // of a solution by residuals

// Limits of linear systems (compiled.py says where they come from). Solutions are refined until bounds on their forward errors
// are below `digits`.
struct SystemLimits {
    double in_safe_range, equilibrated, max_rate, rounding, margin, computed, estimated, digits;
};

// Evidence of a linear system, of the worst right-hand side: first the numbers of SystemsSolutions.names.
template <typename Lanes> struct SystemNumbers {
    Lanes doubtful;         // 1, or 0
    Lanes residual;         // ||b - A x|| / ||b||
    Lanes refined_error;    // backward error of x before it is rounded
    Lanes backward_error;   // of x as it is rounded
    Lanes forward_error;
    Lanes condition_bound;  // of A with columns of norm 1
    Lanes condition;        // its estimate
    Lanes largest;          // element of x as it is rounded
    Lanes growth;           // of the elements
    Lanes updates;          // how many
    // Backward errors before the first update and after each; the last one is that of the solution before it is rounded.
    Lanes history[MOST_UPDATES + 1];
};
using SystemEvidence = SystemNumbers<double>;

struct SystemsProblem {
    Matrices a, b;  // (count, n, n) and (count, n, k)
    Index count, n, k, probes, threads;
    const double *vectors;  // (probes + 1, n), random: the last one is for the norm of A, the others for that of its inverse
    bool definite;          // whether matrices are said to be symmetric and positive definite
    bool single_result;     // whether x is rounded to single precision
    SystemLimits limits;
};

struct SystemsSolution {
    double *x;              // (count, n, k)
    double *forward_error;  // (count, k), bounds on ||D (x - x*)|| / ||D x*||, D being the norms of columns
    double *evidence;       // (numbers of SystemEvidence, count)
};

constexpr Index LARGE_PROBES = 4;  // random vectors that the norm of the inverse of a large system is known from

// One linear system by LU or Cholesky factors, which are made from a copy of A with contiguous rows. Solutions are updated once
// where factors are in single precision.
struct LargeSystem {
    Index n, k, threads;  // MOST_THREADS at most
    const void *a;        // (n, n)
    void *factors;        // of A^T, column by column
    bool single, single_factors, single_result, complex;
    bool doubled;           // whether residuals of solutions by factors in double precision are in twice that
    int *pivots;            // counted from 0
    const double *b;        // (k, n), of complex numbers their parts
    const double *vectors;  // (LARGE_PROBES + 1, n): random, the last one for the norm of A
    SystemLimits limits;    // without rounding and digits
    double *workspace;      // as large as large_workspace says
};

enum class Status { done, failed, no_memory };

// The functions of the table: return type, name and arguments.
#define NEULA_KERNELS(KERNEL) \
    KERNEL(Status, bounded, const BoundedProblem &, BoundedSolution &) \
    KERNEL(Status, probe_errors, const QRProblem &) \
    KERNEL(Status, cholesky_qr, const QRProblem &) \
    KERNEL(Status, one_pass, const OnePassProblem &) \
    KERNEL(Status, doubled_normal, const DoubledNormalProblem &) \
    KERNEL(void, block_fma, const BlockFmaProblem &) \
    KERNEL(Status, seminormal, const SeminormalProblems &, const SeminormalSolutions &) \
    KERNEL(Status, solve_systems, const SystemsProblem &, SystemsSolution &) \
    KERNEL(Index, large_workspace, const LargeSystem &) \
    KERNEL(double, copy_large, const LargeSystem &) \
    KERNEL(void, solve_large, const LargeSystem &, double largest, bool definite, SystemsSolution &)
struct Kernels {
    const char *level;
    bool (*arithmetic_is_exact)();
#define KERNEL(result, name, ...) result (*name)(__VA_ARGS__);
    NEULA_KERNELS(KERNEL)
#undef KERNEL
};

namespace baseline { extern const Kernels kernels; }
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }

}  // namespace neula
