/* One linear system whose factors are known, with its evidence, in as few passes over A and the factors as that
 * takes: two and one, and one more of each where the solution is updated.
 *
 * Rows of A are contiguous, and the factors are LAPACK's of its transpose, P L U = A^T, column by column: all
 * products with A, and all solves, are inner products of contiguous numbers.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "solved.h"
#include "vectors.h"

#define U 0x1p-53
#define PROBES 4 /* random vectors that the norm of the inverse is known from */
#define GROUP 5  /* vectors that a line is multiplied by while it is in registers */
#define MOST_THREADS 64

typedef double loose __attribute__((vector_size(8 * WIDTH), aligned(8)));
typedef float narrow __attribute__((vector_size(4 * WIDTH), aligned(4)));

/* What the caller decides, in its order. */
struct limits {
    double moderate, alike, max_rate, margin, computed, largest_error, bound;
};

struct system {
    long n, k;
    const char *a, *factors; /* float or double */
    long a_is_float, factors_are_float;
    const int *pivots;       /* counted from 0 */
    const double *b;         /* (k, n) */
    const double *vectors;   /* (PROBES + 1, n), the last one to look at A with */
    long updates, x_is_float; /* whether to update once; what x is rounded to */
    double *x;               /* (k, n) */
    double *known;           /* (FORWARD_ERRORS + k) */
    long threads;
    const struct limits *limits;
};

/* Elements j to j + WIDTH of a line of n, zeros behind them. */
static inline vec part(const char *line, long is_float, long j, long n)
{
    if (j + WIDTH <= n)
        return is_float ? __builtin_convertvector(*(const narrow *)((const float *)line + j), vec)
                        : (vec) * (const loose *)((const double *)line + j);
    vec rest = {0};
    for (long l = 0; j + l < n; l++)
        rest[l] = is_float ? ((const float *)line)[j + l] : ((const double *)line)[j + l];
    return rest;
}

static inline const char *line_of(const char *a, long is_float, long i, long n)
{
    return a + i * n * (is_float ? 4 : 8);
}

static inline double sum_of(vec x)
{
    double sum = 0;
    for (int l = 0; l < WIDTH; l++)
        sum += x[l];
    return sum;
}

static double largest_of(const double *x, long n)
{
    double most = 0;
    for (long i = 0; i < n; i++)
        most = __builtin_fabs(x[i]) > most ? __builtin_fabs(x[i]) : most;
    return most;
}

static double least_of(const double *x, long n)
{
    double least = x[0];
    for (long i = 1; i < n; i++)
        least = x[i] < least ? x[i] : least;
    return least;
}

/* ||D x||; without D, ||x||. */
static double length_of(const double *sizes, const double *x, long n)
{
    double square = 0;
#pragma omp simd reduction(+ : square)
    for (long i = 0; i < n; i++) {
        double y = sizes == NULL ? x[i] : sizes[i] * x[i];
        square += y * y;
    }
    return __builtin_sqrt(square);
}

/* Some rows of A, and what is made of them. Columns of vectors are `wide` long, and end with zeros. */
struct rows {
    const struct system *system;
    long first, last, wide;
    /* Before there are factors: sums of magnitudes of rows; of columns their squares, and A^T y. */
    double *sums, *squares, *image, largest;
    /* With solutions: residuals, and A times other vectors. */
    const double *x, *others;
    double *residuals, *images;
};

static void *look(void *given)
{
    struct rows *rows = given;
    const struct system *system = rows->system;
    const double *y = system->vectors + PROBES * system->n;
    long n = system->n;
    vec *squares = (vec *)rows->squares, *image = (vec *)rows->image, most = {0};
    for (long i = rows->first; i < rows->last; i++) {
        const char *line = line_of(system->a, system->a_is_float, i, n);
        vec sum = {0}, factor = all(-y[i]);
        for (long j = 0; j < n; j += WIDTH) {
            vec a = part(line, system->a_is_float, j, n), size = magnitude(a);
            sum += size;
            most = larger(size, most);
            squares[j / WIDTH] = minus_product(squares[j / WIDTH], -a, a);
            image[j / WIDTH] = minus_product(image[j / WIDTH], factor, a);
        }
        rows->sums[i] = sum_of(sum);
    }
    rows->largest = largest_of((double *)&most, WIDTH);
    return NULL;
}

/* b_i - a_i x, in twice the working precision. */
static double residual_of(const char *line, long is_float, const double *x, double b, long n)
{
    vec high = {0}, low = {0};
    high[0] = b;
    for (long j = 0; j < n; j += WIDTH)
        add_products(part(line, is_float, j, n), -*(const vec *)(x + j), &high, &low);
    double total = high[0], rest = low[0];
    for (int l = 1; l < WIDTH; l++) {
        double error;
        two_sum(total, high[l], &total, &error);
        rest += error + low[l];
    }
    return total + rest;
}

/* Inner products of a line with GROUP vectors. */
static inline void products(const char *line, long is_float, const double *x, long wide, long n, double *found)
{
    vec s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0}, s4 = {0};
    for (long j = 0; j < n; j += WIDTH) {
        vec a = -part(line, is_float, j, n);
        s0 = minus_product(s0, a, *(const loose *)(x + j));
        s1 = minus_product(s1, a, *(const loose *)(x + wide + j));
        s2 = minus_product(s2, a, *(const loose *)(x + 2 * wide + j));
        s3 = minus_product(s3, a, *(const loose *)(x + 3 * wide + j));
        s4 = minus_product(s4, a, *(const loose *)(x + 4 * wide + j));
    }
    found[0] = sum_of(s0), found[1] = sum_of(s1), found[2] = sum_of(s2), found[3] = sum_of(s3);
    found[4] = sum_of(s4);
}

static double product(const char *line, long is_float, const double *x, long n)
{
    vec sum = {0};
    for (long j = 0; j < n; j += WIDTH)
        sum = minus_product(sum, -part(line, is_float, j, n), *(const loose *)(x + j));
    return sum_of(sum);
}

static void *measure(void *given)
{
    struct rows *rows = given;
    const struct system *system = rows->system;
    long n = system->n;
    for (long i = rows->first; i < rows->last; i++) {
        const char *line = line_of(system->a, system->a_is_float, i, n);
        double found[GROUP];
        for (long c = 0; c < system->k; c++)
            rows->residuals[c * rows->wide + i] =
                residual_of(line, system->a_is_float, rows->x + c * rows->wide, system->b[c * n + i], n);
        products(line, system->a_is_float, rows->others, rows->wide, n, found);
        for (int c = 0; c < GROUP; c++)
            rows->images[c * rows->wide + i] = found[c];
    }
    return NULL;
}

/* What updates leave of residuals. */
static void *update(void *given)
{
    struct rows *rows = given;
    const struct system *system = rows->system;
    for (long i = rows->first; i < rows->last; i++)
        for (long c = 0; c < system->k; c++)
            rows->residuals[c * rows->wide + i] -=
                product(line_of(system->a, system->a_is_float, i, system->n), system->a_is_float,
                        rows->x + c * rows->wide, system->n);
    return NULL;
}

/* Do something with all rows, some in each thread: no number depends on how many there are, but sums of columns. */
static void with_all(void *(*what)(void *), struct rows *parts, long threads)
{
    pthread_t others[MOST_THREADS];
    int started[MOST_THREADS] = {0};
    for (long t = 1; t < threads; t++)
        started[t] = pthread_create(&others[t], NULL, what, &parts[t]) == 0;
    for (long t = 0; t < threads; t++)
        if (!started[t])
            what(&parts[t]);
    for (long t = 1; t < threads; t++)
        if (started[t])
            pthread_join(others[t], NULL);
}

/* A^-1 of columns, GROUP at a time, in their place; returns the largest element of U. */
static double substitute(const struct system *system, double *columns, long wide, long groups)
{
    long n = system->n, narrow_ones = system->factors_are_float;
    vec most = {0};
    double found[GROUP];
    for (long j = 0; j < n; j++) {
        const char *line = line_of(system->factors, narrow_ones, j, n);
        double pivot = narrow_ones ? ((const float *)line)[j] : ((const double *)line)[j];
        for (long i = 0; i <= j; i += WIDTH)
            most = larger(magnitude(part(line, narrow_ones, i, j + 1)), most);
        for (long g = 0; g < groups; g++) {
            double *x = columns + g * GROUP * wide;
            products(line, narrow_ones, x, wide, j, found);
            for (int c = 0; c < GROUP; c++)
                x[c * wide + j] = (x[c * wide + j] - found[c]) / pivot;
        }
    }
    for (long j = n - 2; j >= 0; j--) {
        const char *line = line_of(system->factors, narrow_ones, j, n) + (j + 1) * (narrow_ones ? 4 : 8);
        for (long g = 0; g < groups; g++) {
            double *x = columns + g * GROUP * wide;
            products(line, narrow_ones, x + j + 1, wide, n - j - 1, found);
            for (int c = 0; c < GROUP; c++)
                x[c * wide + j] -= found[c];
        }
    }
    for (long c = 0; c < groups * GROUP; c++)
        for (long j = n - 1; j >= 0; j--) {
            double *x = columns + c * wide, other = x[j];
            x[j] = x[system->pivots[j]];
            x[system->pivots[j]] = other;
        }
    return largest_of((double *)&most, WIDTH);
}

/* What is known of A. */
struct known {
    double infinity_norm, norm, smallest, largest, condition, through;
    int good;
};

/* One right-hand side: accepted, and its errors. `x` is what is given back, `lost` what rounding has lost. */
static int judge(const struct system *system, const struct known *known, const double *sizes, const double *x,
                 const double *lost, const double *b, const double *residual, double of_before, double of_update,
                 double *errors)
{
    const struct limits *limits = system->limits;
    long n = system->n;
    double left = length_of(NULL, residual, n), of_b = length_of(NULL, b, n), size = length_of(sizes, x, n);
    double of_lost = length_of(NULL, lost, n), doubled = (n + WIDTH + 2) * U * (n + WIDTH + 2) * U;
    double floor = doubled * (known->norm * length_of(NULL, x, n) + of_b);
    /* Rounding of the residual to one number, and of A times an update and the difference. */
    double noise = floor + (n + 2) * U * (of_before + known->norm * of_update);
    double scale = known->infinity_norm * largest_of(x, n) + largest_of(b, n);
    double error = known->through * (left + noise) / size, rounding = length_of(sizes, lost, n) / size;
    errors[REFINED_ERROR] = largest_of(residual, n) / scale;
    errors[BACKWARD_ERROR] = errors[REFINED_ERROR] + rounding;
    errors[FORWARD_ERRORS] = error < 1 ? limits->computed * (error + rounding) / (1 - error) : __builtin_inf();
    int shorter = left + noise + known->norm * of_lost <= of_b * (1 + n * U);
    int converges = !system->updates || left <= limits->max_rate * of_before + noise;
    int moderate = of_b >= 1 / limits->moderate && of_b <= limits->moderate;
    return known->good && shorter && converges && moderate && errors[FORWARD_ERRORS] <= limits->largest_error &&
           errors[REFINED_ERROR] <= limits->bound;
}

static void raise(double *most, double x)
{
    *most = x > *most ? x : *most;
}

/* What rows of A, random vectors and solutions for them say of it. */
static struct known known_of(const struct system *system, struct rows *all, const double *sizes,
                             const double *solutions, long wide)
{
    const struct limits *limits = system->limits;
    long n = system->n;
    struct known known = {.largest = all->largest, .smallest = least_of(sizes, n)};
    known.infinity_norm = largest_of(all->sums, n);
    known.norm = length_of(NULL, sizes, n);
    double least = least_of(all->sums, n), estimate = 0, lost = 0;
    for (int p = 0; p < PROBES; p++) {
        const double *x = solutions + p * wide, *image = all->images + p * wide, *z = system->vectors + p * n;
        double of_one = length_of(sizes, x, n), missed = (n + 2) * U * known.norm * length_of(NULL, x, n);
        for (long i = 0; i < n; i++)
            all->image[i] = image[i] - z[i];
        missed += length_of(NULL, all->image, n);
        estimate += of_one * of_one;
        lost += missed * missed;
    }
    /* With the inverse X that the factors are, A^-1 Z = X Z + A^-1 (Z - A X Z). */
    double rate = limits->margin * __builtin_sqrt(lost);
    estimate = __builtin_sqrt(estimate);
    known.through = limits->margin * estimate / (1 - rate);
    /* The largest singular value from below: sums of fourth powers of all over sums of squares, at least their
     * mean. */
    double fourth = 0;
    for (int p = 0; p < PROBES; p++)
        for (int q = 0; q < p; q++) {
            double both = 0;
            for (long i = 0; i < n; i++)
                both += sizes[i] * sizes[i] * solutions[p * wide + i] * solutions[q * wide + i];
            fourth += both * both;
        }
    fourth *= PROBES * PROBES / (PROBES * (PROBES - 1) / 2.0);
    known.condition = __builtin_sqrt(fourth) / estimate;
    raise(&known.condition, estimate / __builtin_sqrt(n));
    int alike = known.infinity_norm <= limits->alike * least &&
                largest_of(sizes, n) <= limits->alike * known.smallest;
    int moderate = least >= 1 / limits->moderate && known.smallest >= 1 / limits->moderate &&
                   known.infinity_norm <= limits->moderate && known.norm <= n * limits->moderate;
    known.good = alike && moderate && rate <= limits->max_rate;
    return known;
}

/* Round what was found, and add its update where there is one: x as it is given back, and what it lacks. */
static void round_off(const struct system *system, const double *x, const double *update, double *given,
                      double *lost)
{
    for (long i = 0; i < system->n; i++) {
        double sum = x[i], low = 0;
        if (update != NULL)
            two_sum(x[i], update[i], &sum, &low);
        given[i] = system->x_is_float ? (float)sum : sum;
        lost[i] = (sum - given[i]) + low;
    }
}

/* Columns of `wide` numbers. */
struct work {
    long wide, groups, last;
    double *sizes, *solutions, *others, *images, *residuals, *updates, *lost;
};

/* Room for all that is computed, zeros at first; what is to be freed, or NULL. */
static void *make_room(const struct system *system, struct work *work, struct rows *parts)
{
    long n = system->n, k = system->k, threads = system->threads;
    work->groups = (PROBES + k + GROUP - 1) / GROUP;
    work->last = (k + GROUP - 1) / GROUP;
    work->wide = (n + WIDTH - 1) / WIDTH * WIDTH + WIDTH;
    double **places[] = {&work->sizes,     &work->lost,    &work->others,   &work->images,
                         &work->residuals, &work->updates, &work->solutions};
    long counts[] = {1, 1, GROUP, GROUP, k, work->last * GROUP, work->groups * GROUP};
    long of_parts = 1 + 2 * threads, columns = of_parts;
    for (unsigned i = 0; i < sizeof(counts) / sizeof(*counts); i++)
        columns += counts[i];
    size_t size = (columns * work->wide * sizeof(double) + 63) / 64 * 64;
    double *room = aligned_alloc(64, size), *next = room;
    if (room == NULL)
        return NULL;
    memset(room, 0, size);
    for (unsigned i = 0; i < sizeof(counts) / sizeof(*counts); next += counts[i++] * work->wide)
        *places[i] = next;
    for (long t = 0; t < threads; t++)
        parts[t] = (struct rows){.system = system,
                                 .first = t * n / threads,
                                 .last = (t + 1) * n / threads,
                                 .wide = work->wide,
                                 .sums = next,
                                 .squares = next + (1 + 2 * t) * work->wide,
                                 .image = next + (2 + 2 * t) * work->wide,
                                 .x = work->solutions + PROBES * work->wide,
                                 .others = work->others,
                                 .residuals = work->residuals,
                                 .images = work->images};
    return room;
}

/* Sums over all rows of A, in the first part; sizes of its columns; the vector that shows the norm of A D^-1, by a
 * step of the power method, and its length. */
static double gather(const struct system *system, const struct work *work, struct rows *parts)
{
    double square = 0;
    for (long t = 1; t < system->threads; t++) {
        for (long j = 0; j < system->n; j++) {
            parts[0].squares[j] += parts[t].squares[j];
            parts[0].image[j] += parts[t].image[j];
        }
        parts[0].largest = parts[t].largest > parts[0].largest ? parts[t].largest : parts[0].largest;
    }
    for (long j = 0; j < system->n; j++) {
        double size = __builtin_sqrt(parts[0].squares[j]), y = parts[0].image[j] / size;
        work->sizes[j] = size;
        work->others[PROBES * work->wide + j] = y / size;
        square += y * y;
    }
    return __builtin_sqrt(square);
}

/* Solve with factors, and measure what is found; 0, or 1 where there is no memory. */
int solve_factored(const struct system *system)
{
    long n = system->n, k = system->k;
    struct rows parts[MOST_THREADS];
    struct work work;
    void *memory = make_room(system, &work, parts);
    if (memory == NULL)
        return 1;
    long wide = work.wide;
    double *x = work.solutions + PROBES * wide, *told = system->known, errors[FORWARD_ERRORS + 1];
    for (long c = 0; c < PROBES + k; c++)
        memcpy(work.solutions + c * wide, c < PROBES ? system->vectors + c * n : system->b + (c - PROBES) * n,
               n * sizeof(double));
    with_all(look, parts, system->threads);
    double seen = gather(system, &work, parts);
    double growth = substitute(system, work.solutions, wide, work.groups) / parts[0].largest;
    memcpy(work.others, work.solutions, PROBES * wide * sizeof(double));
    with_all(measure, parts, system->threads);
    struct known known = known_of(system, parts, work.sizes, work.solutions, wide);
    double condition = known.condition * length_of(NULL, work.images + PROBES * wide, n) / seen;
    memset(told, 0, FORWARD_ERRORS * sizeof(double));
    told[ACCEPTED] = known.good, told[GROWTH] = growth, told[CONDITION] = condition > 1 ? condition : 1;
    for (long c = 0; c < k; c++) {
        double scale = known.infinity_norm * largest_of(x + c * wide, n) + largest_of(system->b + c * n, n);
        raise(&told[HISTORY], largest_of(work.residuals + c * wide, n) / scale);
    }
    told[UPDATES] = system->updates;
    if (system->updates) {
        memcpy(work.updates, work.residuals, k * wide * sizeof(double));
        substitute(system, work.updates, wide, work.last);
        for (long t = 0; t < system->threads; t++)
            parts[t].x = work.updates;
        for (long c = 0; c < k; c++) /* kept for the judge, behind the last number */
            x[c * wide + n] = length_of(NULL, work.residuals + c * wide, n);
        with_all(update, parts, system->threads);
    }
    for (long c = 0; c < k; c++) {
        const double *change = system->updates ? work.updates + c * wide : NULL;
        double *residual = work.residuals + c * wide, *given = system->x + c * n;
        double of_before = change ? x[c * wide + n] : length_of(NULL, residual, n);
        round_off(system, x + c * wide, change, given, work.lost);
        int accepted = judge(system, &known, work.sizes, given, work.lost, system->b + c * n, residual, of_before,
                             change ? length_of(NULL, change, n) : 0, errors);
        for (int step = 1; step <= MOST_UPDATES; step++)
            raise(&told[HISTORY + step], errors[REFINED_ERROR]);
        raise(&told[BACKWARD_ERROR], errors[BACKWARD_ERROR]);
        told[FORWARD_ERRORS + c] = errors[FORWARD_ERRORS];
        if (!accepted)
            told[ACCEPTED] = 0;
    }
    free(memory);
    return 0;
}
