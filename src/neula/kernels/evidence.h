/* What seminormal.c says of solutions: as `numbers` in seminormal.py, where the worst of several counts. */
#ifndef NEULA_EVIDENCE_H
#define NEULA_EVIDENCE_H

typedef struct {
    double residual, refined, forward, backward, largest, optimality, steps, given;
    int vanished;
} Evidence;

static inline double quotient(double a, double b) { return a == 0.0 ? 0.0 : a / b; }

/* These are NaN if one of the numbers is. */
static inline double most_of(double a, double b) { return a >= b || a != a ? a : b; }
static inline double least_of(double a, double b) { return a <= b || a != a ? a : b; }

#endif
