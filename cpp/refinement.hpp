// Iterative refinement of one problem (Lanes = double) or of as many as a vector has lanes (Lanes = Vec), and what is known of
// its solutions: the same for all families of problems.
#pragma once

#include "lanes.hpp"

NEULA_BEGIN

// x <- x + C (b - A x) until another step gains nothing, C being what factors make of a residual; returns the number of steps.
// A problem says how it finds its residual and the update, adds that to x, and whether it needs another step.
template <typename Problem> inline int refine(Problem &p, int max_steps)
{
    int steps = 0;
    for (bool active = max_steps > 0; active && steps < max_steps;) {
        p.find_residual();
        p.find_update();
        p.add_update();
        active = p.needs_another(++steps);
    }
    return steps;
}

// x + low grows by an update, whose rounding errors are below those of x.
template <typename Lanes> ALWAYS_INLINE void add_doubled(Lanes &x, Lanes &low, Lanes update)
{
    two_sum(x, update + low, x, low);
}

// ||x - x*|| / ||x*|| from a bound on ||x - x*|| / ||x||; infinite where that is not below 1.
template <typename Lanes> inline Lanes relative_to_exact(Lanes error, double computed)
{
    return chosen(error < constant<Lanes>(1.0), computed * error / (1.0 - error), constant<Lanes>(INFINITY));
}

// Errors of x as it is rounded, from those before and from the `rounding`, relative to x in its norm.
template <typename Lanes, typename Evidence>
inline void measure_rounded(Evidence &found, Lanes refined_error, Lanes error, Lanes rounding, double computed)
{
    found.refined_error = refined_error;
    found.backward_error = refined_error + rounding;
    found.forward_error = relative_to_exact(error + rounding, computed);
}

// 0 / 0 = 0: where x, or b, vanishes.
inline double quotient(double a, double b) { return a == 0.0 ? 0.0 : a / b; }

// NaN if one of the numbers is.
inline double smaller_of(double a, double b) { return a <= b || a != a ? a : b; }

// Whether squares of numbers of this size neither overflow nor underflow.
template <typename Lanes, typename Limits> inline Truth<Lanes> in_safe_range(Lanes size, const Limits &limits)
{
    return (size >= constant<Lanes>(1.0 / limits.in_safe_range)) & (size <= constant<Lanes>(limits.in_safe_range));
}

// Evidence is a struct of numbers alone. Of several right-hand sides the worst counts.
template <typename Lanes, typename Evidence> inline void join_worst(Evidence &worst, const Evidence &found)
{
    Lanes *to = reinterpret_cast<Lanes *>(&worst);
    const Lanes *from = reinterpret_cast<const Lanes *>(&found);
    for (size_t i = 0; i < sizeof(Evidence) / sizeof(Lanes); i++)
        to[i] = worse(from[i], to[i]);
}

// Evidence of members from `first` on of a batch, as columns of an array.
template <typename Lanes, typename Evidence>
inline void write_evidence(const Evidence &evidence, double *to, Index first, Index count)
{
    const Lanes *numbers = reinterpret_cast<const Lanes *>(&evidence);
    for (size_t i = 0; i < sizeof(Evidence) / sizeof(Lanes); i++, to += count)
        for (int l = 0; l < LANES<Lanes> && first + l < count; l++)
            to[first + l] = lane(numbers[i], l);
}

// Norms of the matrix of a linear system, or of as many as a vector has lanes; its largest element.
template <typename Lanes> struct SystemNorms {
    Lanes infinity_norm, norm, smallest_column, largest;
    Truth<Lanes> in_safe_range, equilibrated;

    void judge(Lanes smallest_row, Lanes largest_column, Index n, const SystemLimits &limits)
    {
        Lanes lower = constant<Lanes>(1 / limits.in_safe_range), upper = constant<Lanes>(limits.in_safe_range);
        equilibrated = (infinity_norm <= limits.equilibrated * smallest_row) &
                       (largest_column <= limits.equilibrated * smallest_column);
        // The norm shows numbers that are not finite, comparisons with which are false.
        in_safe_range = (smallest_row >= lower) & (smallest_column >= lower) & (infinity_norm <= upper) &
                        (norm <= constant<Lanes>(n * limits.in_safe_range));
    }
};

NEULA_END
