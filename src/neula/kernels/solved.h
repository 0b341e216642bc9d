/* What kernels tell of a linear system that they have solved; of several right-hand sides the worst. */
#ifndef NEULA_SOLVED_H
#define NEULA_SOLVED_H

#define MOST_UPDATES 3

/* Whether it is doubtful, ||b - A x|| / ||b|| and the backward error of x as it is given back, the condition number,
 * the growth of the elements, how many updates there were; backward errors before the first update, and after each
 * (after the last one again, where there are fewer); from then on bounds on the forward errors. */
enum {
    DOUBTFUL,
    RESIDUAL,
    BACKWARD_ERROR,
    CONDITION,
    GROWTH,
    UPDATES,
    HISTORY,
    REFINED_ERROR = HISTORY + MOST_UPDATES,
    FORWARD_ERRORS
};

#endif
