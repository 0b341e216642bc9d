/* Least-squares problems from the matrix to the evidence, one after the other: the corrected seminormal equations with
 * the inverse of R, residuals and gradients in twice the working precision.
 *
 * A is copied by rows and by columns, both padded with zeros to whole vectors. What is added up along columns is then
 * added for as many columns at a time, and along rows for as many rows: never across the elements of a vector.
 */
#include <stdlib.h>

#include "matrices.h"
#include "seminormal_shortest.h"

#define NUMBERS 13 /* of each problem */

/* How a problem is solved; the last two are for the shortest solution. */
enum { BY_GRAM, SHIFTED, FEW_ROWS, DEPENDENT };

/* Room for numbers in one piece, shared out to some places, the first of which are zero; NULL where there is too little
 * memory.
 */
static double *share_out(double **const places[], const long *sizes, int count, int zero)
{
    long elements = 0, first = 0;
    for (int i = 0; i < count; i++)
        elements += sizes[i], first += i < zero ? sizes[i] : 0;
    double *room = aligned_alloc(64, elements * sizeof(double)), *next = room;
    if (room == NULL)
        return NULL;
    memset(room, 0, first * sizeof(double));
    for (int i = 0; i < count; i++)
        *places[i] = next, next += sizes[i];
    return room;
}

static double *allocate(Problem *p, long m, long n)
{
    p->m = m, p->n = n;
    p->rows = (m + PADDED - 1) & -PADDED, p->columns = (n + PADDED - 1) & -PADDED;
    double **const places[] = {
        &p->by_rows, &p->by_columns, &p->gram, &p->inverse, &p->scaled, &p->sizes, &p->work, &p->high,
        &p->low, &p->gradient, &p->projected, &p->update, &p->b, &p->residual, &p->residual_low,
    };
    long sizes[15], tall = p->rows * p->columns, square = p->columns * p->columns;
    for (int i = 0; i < 15; i++)
        sizes[i] = i < 2 ? tall : i < 5 ? square : i < 12 ? p->columns : p->rows;
    return share_out(places, sizes, 15, 15);
}

/* What is needed beside A, or A^T where there are few rows; less where columns cannot be dependent. */
static double *allocate_shortest(Shortest *s, Problem *p, int few_rows, int dependent)
{
    Independent *of = &s->independent;
    double *order;
    s->m = few_rows ? p->n : p->m, s->n = few_rows ? p->m : p->n;
    s->tall = few_rows ? p->columns : p->rows, s->wide = few_rows ? p->rows : p->columns;
    s->by_rows = few_rows ? p->by_columns : p->by_rows, s->by_columns = few_rows ? p->by_rows : p->by_columns;
    s->transposed = p;
    double **const places[] = {
        &s->b, &s->residual, &s->residual_low, &s->w, &s->zeros, &s->added,
        &of->error, &s->sizes, &s->x, &s->x_low, &s->before, &s->before_low, &s->gradient, &s->given,
        &of->scaled, &of->y, &of->projected, &of->multipliers, &order,
        &s->scaled_columns,
        &of->gram, &of->inverse, &of->of_columns, &of->of_rows, &of->upper, &of->rest,
    };
    long most = s->tall < s->wide ? s->tall : s->wide; /* of r columns */
    long sizes[26] = {
        [19] = few_rows ? s->n * s->tall : 0, [20] = s->wide * s->wide, [21] = most * most, [22] = most * most,
        [23] = most * most, [24] = most * s->wide, [25] = most * s->wide,
    };
    for (int i = 0; i < 19; i++)
        sizes[i] = i < 7 ? s->tall : s->wide;
    double *room = share_out(places, sizes, dependent ? 26 : 20, 19);
    of->order = (long *)order;
    return room;
}

static inline void load(const Problem *p, const Matrices *a, long member)
{
    for (long i = 0; i < p->m; i++)
        for (long j = 0; j < p->n; j++)
            p->by_rows[i * p->columns + j] = element(a, member, i, j);
    for (long top = 0; top < p->rows; top += PADDED)
        for (long left = 0; left < p->columns; left += PADDED) {
            const double *from = p->by_rows + top * p->columns + left;
            double *to = p->by_columns + left * p->rows + top;
            for (long j = 0; j < PADDED; j++)
                for (long i = 0; i < PADDED; i++)
                    to[j * p->rows + i] = from[i * p->columns + j];
        }
}

/* ||b - A x|| of an x in working precision, in `update`; it takes the place of the residual. */
static double given_norm_of(const Problem *p)
{
    memcpy(p->residual, p->b, p->rows * sizeof(double));
    add_rows(p->residual, p->update, 1, -1.0, p->by_columns, p->rows, 0, p->n, 0, 0);
    return length(p->rows, p->residual);
}

/* One right-hand side; x is left in `update`, as it is given back. */
static APART Evidence solved(const Problem *p, const Worth *worth, const Limits *limits, int single)
{
    Evidence found = {0};
    double of_projected, left = refine(p, worth, limits, &found, &of_projected);
    double b_norm = length(p->rows, p->b), of_residual = length(p->rows, p->residual);
    double of_x = scaled_size(p->n, p->sizes, p->high, NULL);
    double image = worth->norm * of_x;
    for (long j = 0; j < p->n; j++) {
        p->update[j] = single ? (float)p->high[j] : p->high[j];
        p->gradient[j] /= p->sizes[j];
        found.largest = most_of(found.largest, fabs(p->update[j]));
    }
    double of_low = quotient(scaled_size(p->n, p->sizes, p->low, NULL), of_x);
    double of_rounding = quotient(scaled_size(p->n, p->sizes, p->high, p->update), of_x);
    double error = quotient(left, of_x) + of_low + of_rounding;
    found.optimality = quotient(length(p->n, p->gradient), worth->norm * of_residual);
    found.refined = least_of(found.optimality, quotient(of_residual, image + b_norm));
    found.refined = least_of(found.refined, quotient(of_projected, image * (1.0 - worth->rate)));
    found.backward = found.refined + (of_low + of_rounding);
    error = limits->computed * error / (1.0 - error); /* relative to the exact solution */
    int known = error >= 0.0 && error < INFINITY && (b_norm == 0.0 || moderate(b_norm, limits));
    for (long i = 0; b_norm == 0.0 && i < p->m; i++) /* its square may have underflowed */
        known = known && p->b[i] == 0.0;
    found.forward = known ? error : INFINITY;
    found.given = given_norm_of(p);
    found.vanished = found.largest == 0.0 && found.forward == 0.0;
    found.residual = quotient(found.given, b_norm);
    return found;
}

static void join(Evidence *worst, const Evidence *found)
{
    worst->residual = most_of(worst->residual, found->residual);
    worst->refined = most_of(worst->refined, found->refined);
    worst->forward = most_of(worst->forward, found->forward);
    worst->backward = most_of(worst->backward, found->backward);
    worst->largest = most_of(worst->largest, found->largest);
    worst->optimality = most_of(worst->optimality, found->optimality);
    worst->steps = most_of(worst->steps, found->steps);
    worst->vanished |= found->vanished;
}

/* What is known of a matrix in the end; `condition_bound` is 0 where singular values have decided its rank. */
typedef struct {
    double condition_bound, condition, rank;
    int good, way;
} Known;

static void write_down(const Evidence *e, const Known *known, double *numbers, long count)
{
    double written[] = {
        !known->good, e->residual,   e->refined,    e->backward, e->forward,  known->condition_bound, known->condition,
        e->largest,   e->optimality, known->rank, e->vanished, e->steps, known->way,
    };
    for (int i = 0; i < NUMBERS; i++)
        numbers[i * count] = written[i];
}

/* A batch, and where its problems are worked on, one after the other. */
typedef struct {
    const long *sizes;
    const Limits *limits;
    const Probes *probes;
    int single, way;
    Problem problem;
    Worth worth;
    Shortest shortest;
    double in_doubt; /* the condition number of what may lack full rank, or NaN */
    double *more;    /* room for what is shortest, once it was needed */
} Work;

static int has_room(Work *work)
{
    int few_rows = work->sizes[1] < work->sizes[2], dependent = work->probes != NULL;
    if (work->more == NULL)
        work->more = allocate_shortest(&work->shortest, &work->problem, few_rows, dependent);
    return work->more != NULL;
}

/* By the Gram matrix of A, where it is known. */
static int is_dependent(Work *work, const double *gram)
{
    work->way = DEPENDENT;
    return work->probes != NULL && has_room(work) && find_sizes(&work->shortest, work->limits) &&
           factorize_dependent(&work->shortest, work->limits, work->probes, gram);
}

/* Whether there are factors that are good enough. */
static int factorize_one(Work *work)
{
    const Limits *limits = work->limits;
    work->in_doubt = NAN;
    if (work->sizes[1] < work->sizes[2]) {
        Shortest *s = &work->shortest;
        work->way = FEW_ROWS;
        return has_room(work) && ((find_sizes(s, limits) && factorize_few_rows(s, limits)) || is_dependent(work, NULL));
    }
    const Problem *p = &work->problem;
    Worth *worth = &work->worth;
    int begun = begin_factor(p, limits, worth), singular = begun && !worth->factorized;
    if (singular && is_dependent(work, p->scaled))
        return 1;
    int good = begun && finish_factor(p, limits, worth);
    work->way = worth->shifted ? SHIFTED : BY_GRAM;
    if (good && worth->norm_bound * worth->inverse_norm < limits->condition)
        return 1;
    work->in_doubt = good ? worth->norm * worth->inverse_norm : NAN;
    return !singular && is_dependent(work, NULL);
}

static Known known_of(const Work *work, int good)
{
    const Worth *worth = &work->worth;
    const Shortest *shortest = &work->shortest;
    if (!good)
        return (Known){INFINITY, work->in_doubt, NAN, 0, work->way};
    if (work->way == FEW_ROWS || work->way == DEPENDENT) {
        double bound = work->way == FEW_ROWS ? shortest->condition_bound : 0.0;
        return (Known){bound, shortest->condition, shortest->rank, good, work->way};
    }
    double bound = worth->norm_bound * worth->inverse_norm;
    return (Known){bound, worth->norm * worth->inverse_norm, work->problem.n, good, work->way};
}

static inline Evidence solve_one(Work *work)
{
    if (work->way == FEW_ROWS || work->way == DEPENDENT)
        return shortest(&work->shortest, work->limits, work->single);
    return solved(&work->problem, &work->worth, work->limits, work->single);
}

/* Matrices come by value: what is known of their elements makes other loops. */
static inline void solve_all(Matrices a, Matrices right, long of_a, long of_b, Work *work, double *x)
{
    long count = work->sizes[0], m = work->sizes[1], n = work->sizes[2], k = work->sizes[3];
    double *numbers = x + count * n * k, *forward = numbers + NUMBERS * count, *residual = forward + count * k;
    a.single = of_a, right.single = of_b;
    for (long member = 0; member < count; member++) {
        Evidence worst = {0};
        load(&work->problem, &a, member);
        Known known = known_of(work, factorize_one(work));
        int is_shortest = work->way == FEW_ROWS || work->way == DEPENDENT;
        double *b = is_shortest ? work->shortest.b : work->problem.b;
        const double *found_x = is_shortest ? work->shortest.given : work->problem.update;
        if (!known.good)
            worst = (Evidence){NAN, NAN, INFINITY, NAN, NAN, NAN, 0.0, NAN, 0};
        for (long c = 0; c < k; c++) {
            Evidence found = worst;
            if (known.good) {
                for (long i = 0; i < m; i++)
                    b[i] = element(&right, member, i, c);
                found = solve_one(work);
                join(&worst, &found);
            }
            for (long j = 0; j < n; j++)
                x[(member * n + j) * k + c] = known.good ? found_x[j] : NAN;
            forward[member * k + c] = found.forward, residual[member * k + c] = found.given;
        }
        write_down(&worst, &known, numbers + member, count);
    }
}

/* All of a batch; 0 where there is too little memory. Beginning at x, of shape (batch, n, k), there is room for the
 * numbers of each, and for forward errors and norms of residuals, of shape (batch, k). Of problems without an
 * answer all is NaN. Without probes no columns are taken to be dependent.
 */
int seminormal(
    const Matrices *a, const Matrices *right, const long *sizes, const Limits *limits, const Probes *probes, int single,
    double *x)
{
    Work work = {.sizes = sizes, .limits = limits, .probes = probes, .single = single};
    Matrices given = *a;
    int few_rows = sizes[1] < sizes[2];
    if (few_rows)
        given.row = a->column, given.column = a->row;
    double *room = allocate(&work.problem, sizes[1 + few_rows], sizes[2 - few_rows]);
    if (room == NULL)
        return 0;
    if (a->single)
        solve_all(given, *right, 1, right->single, &work, x);
    else
        solve_all(given, *right, 0, right->single, &work, x);
    free(work.more);
    free(room);
    return 1;
}
