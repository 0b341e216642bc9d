/* What the parts of seminormal.c know of a problem whose shortest solution is asked for: of few rows, or of dependent
 * columns. It is a sum of rows as they were given, x = A^T w, and so is what refinement adds: so x lies in their space
 * whatever the errors of w (A. Björck, "Numerical Methods for Least Squares Problems", SIAM, 1996).
 */
#ifndef NEULA_SEMINORMAL_SHORTEST_H
#define NEULA_SEMINORMAL_SHORTEST_H

#include "seminormal.h"

/* Vectors that show the rate, so many columns of n elements; by how much they may understate it, and what rounding errors
 * make of it for each column and unit of ||R^-1||.
 */
typedef struct {
    const double *vectors;
    long count;
    double margin, rounding;
} Probes;

/* r columns of B that count, B P = B1 [I F] but for what is dropped. Matrices of r columns are padded to `columns`. */
typedef struct {
    long columns;
    long *order;                  /* where columns are, those that count first */
    double *upper, *error;        /* R of B, and what F leaves of another column */
    double *inverse, *rest;       /* of R of B1, and F^T */
    double *gram;                 /* for what is needed for a while */
    double *of_columns, *of_rows; /* inverses of factors of I + F F^T and of M^T M, for M = D P [I F]^T */
    double *scaled, *y, *projected, *multipliers; /* vectors */
} Independent;

typedef struct {
    long m, n, tall, wide;              /* rows and columns of A, and as they are padded */
    const double *by_rows, *by_columns; /* A */
    double *b, *residual, *residual_low, *w, *zeros, *added;            /* vectors of m elements */
    double *sizes, *x, *x_low, *before, *before_low, *gradient, *given; /* of n: the first is the diagonal of D */
    Worth worth;
    long rank;
    double norm, condition, condition_bound; /* of B, the first from below */
    double largest, spread;  /* of the norms of the columns: the largest, and its ratio to the smallest */
    double dropped, growth;  /* sigma_(r+1) from above, in units of sigma_r; ||[I F]||_F from above */
    int few_rows;            /* or dependent columns */
    Problem *transposed;     /* A^T, of few rows */
    double *scaled_columns;  /* those of B, of few rows */
    Independent independent;
} Shortest;

/* How far x is from the solution after a step, of which `floor` is due to the rounding errors of the residual. */
typedef struct {
    double left, floor;
} Step;

static inline void image_of(const Shortest *s, const double *x, double sign, double *to)
{
    add_rows(to, x, 1, sign, s->by_columns, s->tall, 0, s->n, 0, 0);
}

static inline void sum_of_rows(const Shortest *s, const double *w, double *to)
{
    memset(to, 0, s->wide * sizeof(double));
    add_rows(to, w, 1, 1.0, s->by_rows, s->wide, 0, s->m, 0, 0);
}

/* D, where columns of zeros count as the longest one; 0 where numbers are not moderate. */
WITHIN int find_sizes(Shortest *s, const Limits *limits);

/* Factors; 0 where they are no good, or the rank is in doubt. Of the Gram matrix of A, if it is known, the upper triangle
 * is read.
 */
WITHIN int factorize_few_rows(Shortest *s, const Limits *limits);
WITHIN int factorize_dependent(Shortest *s, const Limits *limits, const Probes *probes, const double *gram);

/* What to add to w, in `added`, by the residual; products err by `noise` times those of magnitudes. */
WITHIN Step step_of_few_rows(const Shortest *s, double noise);
WITHIN Step step_of_dependent(const Shortest *s, double noise, int doubled);

/* The backward error of J. L. Rigal and J. Gaches (1967), for B. */
WITHIN double error_of_few_rows(const Shortest *s);

/* Backward error and optimality in `found`; what is returned is to be added to the forward error. */
WITHIN double errors_of_dependent(const Shortest *s, Evidence *found);

/* One right-hand side; x is left in `given`, as it is given back. */
WITHIN Evidence shortest(const Shortest *s, const Limits *limits, int single);

#endif
