/* One linear system and its evidence, by LAPACK's factors, in as few passes over A and the factors as that takes:
 * two over A, of which one makes the copy that is factorized, and one over the factors. Where the solution is
 * updated there is one more of each.
 *
 * Rows of A are contiguous, and the factors are those of its transpose, P L U = A^T, column by column: all products
 * with A, and all solves, are inner products of contiguous numbers.
 */
#include <string.h>

#include "solved.h"
#include "vectors.h"

#define U 0x1p-53
#define PROBES 4 /* random vectors that the norm of the inverse is known from */
#define GROUP 5  /* vectors that a line is multiplied by while it is in registers */

typedef double loose __attribute__((vector_size(8 * WIDTH), aligned(8)));
typedef float narrow __attribute__((vector_size(4 * WIDTH), aligned(4)));

/* What the caller decides, in its order. */
struct limits {
    double moderate, alike, max_rate, margin, computed, largest_error, bound;
};

struct system {
    long n, k;
    long wide; /* a multiple of WIDTH, at least n + WIDTH: columns of the room end with zeros */
    const char *a;
    char *factors; /* float or double; at first a copy of A */
    long a_is_float, factors_are_float;
    const int *pivots;        /* counted from 0 */
    const double *b;          /* (k, n) */
    const double *vectors;    /* (PROBES + 1, n), the last one to look at A with */
    long updates, x_is_float; /* whether to update once; what x is rounded to */
    double *room;             /* COLUMNS and three times `count_of` columns */
    double *x;                /* (k, n) */
    double *known;            /* (FORWARD_ERRORS + k) */
    const struct limits *limits;
};

/* Columns of the room: sums of magnitudes of rows, sizes of columns, A^T times a random vector and A times what
 * that shows, something for a while, and what the solutions are multiplied beside. */
enum { SUMS, SIZES, IMAGE, LOOK, SPARE, OTHERS, COLUMNS = OTHERS + GROUP };

static double *column_of(const struct system *system, long i)
{
    return system->room + i * system->wide;
}

/* Random vectors and right-hand sides, filled up to whole groups. */
static long count_of(const struct system *system)
{
    return (PROBES + system->k + GROUP - 1) / GROUP * GROUP;
}

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

/* Write so many elements of a vector, at most, from place i of an array on. */
static inline void put(char *to, long is_float, long i, long count, vec x)
{
    if (count >= WIDTH) {
        if (is_float)
            *(narrow *)((float *)to + i) = __builtin_convertvector(x, narrow);
        else
            *(loose *)((double *)to + i) = (loose)x;
        return;
    }
    for (long l = 0; l < count; l++) {
        if (is_float)
            ((float *)to)[i + l] = x[l];
        else
            ((double *)to)[i + l] = x[l];
    }
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

static void raise(double *most, double x)
{
    *most = x > *most ? x : *most;
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

/* Copy A, and sum up what there is to know of its rows and columns; returns the largest element. */
double copy_and_look(const struct system *system)
{
    long n = system->n;
    const double *y = system->vectors + PROBES * n;
    memset(system->room, 0, (COLUMNS + 3 * count_of(system)) * system->wide * sizeof(double));
    double *sums = column_of(system, SUMS), *sizes = column_of(system, SIZES);
    vec *squares = (vec *)sizes, *image = (vec *)column_of(system, IMAGE), most = {0};
    for (long i = 0; i < n; i++) {
        const char *line = line_of(system->a, system->a_is_float, i, n);
        vec sum = {0}, factor = all(-y[i]);
        for (long j = 0; j < n; j += WIDTH) {
            vec a = part(line, system->a_is_float, j, n), size = magnitude(a);
            put(system->factors, system->factors_are_float, i * n + j, n - j, a);
            sum += size;
            most = larger(size, most);
            squares[j / WIDTH] = minus_product(squares[j / WIDTH], -a, a);
            image[j / WIDTH] = minus_product(image[j / WIDTH], factor, a);
        }
        sums[i] = sum_of(sum);
    }
    for (long j = 0; j < n; j++)
        sizes[j] = __builtin_sqrt(sizes[j]);
    return largest_of((double *)&most, WIDTH);
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

/* A^-1 of columns, GROUP at a time, in their place; returns the largest element of U. */
static double substitute(const struct system *system, double *columns)
{
    long n = system->n, wide = system->wide, groups = count_of(system) / GROUP;
    long narrow_ones = system->factors_are_float;
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

/* Residuals of random vectors and right-hand sides, the latter in twice the working precision, and A times the vector
 * that shows its norm. */
static void measure(const struct system *system, const double *solutions, double *residuals)
{
    long n = system->n, wide = system->wide;
    double *others = column_of(system, OTHERS), found[GROUP];
    memcpy(others, solutions, PROBES * wide * sizeof(double));
    for (long i = 0; i < n; i++) {
        const char *line = line_of(system->a, system->a_is_float, i, n);
        products(line, system->a_is_float, others, wide, n, found);
        for (long p = 0; p < PROBES; p++)
            residuals[p * wide + i] = system->vectors[p * n + i] - found[p];
        column_of(system, LOOK)[i] = found[PROBES];
        for (long c = PROBES; c < PROBES + system->k; c++)
            residuals[c * wide + i] =
                residual_of(line, system->a_is_float, solutions + c * wide, system->b[(c - PROBES) * n + i], n);
    }
}

/* What updates leave of residuals. */
static void update(const struct system *system, const double *updates, double *residuals)
{
    long n = system->n, wide = system->wide;
    double found[GROUP];
    for (long i = 0; i < n; i++)
        for (long c = 0; c < count_of(system); c += GROUP) {
            const char *line = line_of(system->a, system->a_is_float, i, n);
            products(line, system->a_is_float, updates + c * wide, wide, n, found);
            for (int g = 0; g < GROUP; g++)
                residuals[(c + g) * wide + i] -= found[g];
        }
}

/* What is known of A. */
struct known {
    double infinity_norm, norm, condition, through;
    int good;
};

/* What rows of A, random vectors, solutions for them and what these leave say of it. */
static struct known known_of(const struct system *system, const double *solutions, const double *residuals)
{
    const struct limits *limits = system->limits;
    long n = system->n, wide = system->wide;
    const double *sums = column_of(system, SUMS), *sizes = column_of(system, SIZES);
    double infinity_norm = largest_of(sums, n), norm = length_of(NULL, sizes, n), estimate = 0, lost = 0, fourth = 0;
    for (int p = 0; p < PROBES; p++) {
        const double *x = solutions + p * wide;
        double of_one = length_of(sizes, x, n);
        /* Beside what is left there are the rounding errors of its measurement. */
        double missed = length_of(NULL, residuals + p * wide, n) + (n + 2) * U * norm * length_of(NULL, x, n);
        estimate += of_one * of_one;
        lost += missed * missed;
        for (int q = 0; q < p; q++) {
            double both = 0;
            for (long i = 0; i < n; i++)
                both += sizes[i] * sizes[i] * x[i] * solutions[q * wide + i];
            fourth += both * both;
        }
    }
    estimate = __builtin_sqrt(estimate);
    /* With X Z for A^-1 Z, A^-1 Z = X Z + A^-1 (Z - A X Z). */
    double rate = limits->margin * __builtin_sqrt(lost);
    /* The largest singular value from below: sums of fourth powers of all over sums of squares, and the mean. */
    double condition = __builtin_sqrt(fourth * 2 * PROBES / (PROBES - 1)) / estimate;
    raise(&condition, estimate / __builtin_sqrt(n));
    double least = least_of(sums, n), narrowest = least_of(sizes, n);
    int alike = infinity_norm <= limits->alike * least && largest_of(sizes, n) <= limits->alike * narrowest;
    int moderate = least >= 1 / limits->moderate && narrowest >= 1 / limits->moderate &&
                   infinity_norm <= limits->moderate && norm <= n * limits->moderate;
    return (struct known){infinity_norm, norm, condition, limits->margin * estimate / (1 - rate),
                          alike && moderate && rate <= limits->max_rate};
}

/* What is known of one right-hand side. */
struct told {
    double refined, backward, forward;
    int accepted;
};

/* Add the update where there is one, round, and say what x is then. */
static struct told judge(const struct system *system, const struct known *known, const double *solution,
                         const double *change, const double *residual, double of_before, const double *b, double *x)
{
    const struct limits *limits = system->limits;
    long n = system->n;
    double *lost = column_of(system, SPARE), *sizes = column_of(system, SIZES);
    for (long i = 0; i < n; i++) {
        double sum, low;
        two_sum(solution[i], system->updates ? change[i] : 0, &sum, &low);
        x[i] = system->x_is_float ? (float)sum : sum;
        lost[i] = (sum - x[i]) + low;
    }
    double left = length_of(NULL, residual, n), of_b = length_of(NULL, b, n), size = length_of(sizes, x, n);
    double doubled = (n + WIDTH + 2) * U * (n + WIDTH + 2) * U;
    double floor = doubled * (known->norm * length_of(NULL, x, n) + of_b);
    /* Rounding of the residual to one number, and of A times an update and the difference. */
    double of_change = system->updates ? length_of(NULL, change, n) : 0;
    double noise = floor + (n + 2) * U * (of_before + known->norm * of_change);
    double error = known->through * (left + noise) / size, rounding = length_of(sizes, lost, n) / size;
    struct told told;
    told.refined = largest_of(residual, n) / (known->infinity_norm * largest_of(x, n) + largest_of(b, n));
    told.backward = told.refined + rounding;
    error += rounding;
    told.forward = error < 1 ? limits->computed * error / (1 - error) : __builtin_inf();
    int shorter = left + noise + known->norm * length_of(NULL, lost, n) <= of_b * (1 + n * U);
    int converges = !system->updates || left <= limits->max_rate * of_before + noise;
    int moderate = of_b >= 1 / limits->moderate && of_b <= limits->moderate;
    told.accepted = known->good && shorter && converges && moderate && told.forward <= limits->largest_error &&
                    told.refined <= limits->bound;
    return told;
}

/* Solve with the factors, and measure what is found; `largest` is the largest element of A. */
void solve_factored(const struct system *system, double largest)
{
    long n = system->n, k = system->k, wide = system->wide, size = count_of(system) * wide;
    double *solutions = column_of(system, COLUMNS), *residuals = solutions + size, *updates = residuals + size;
    double *image = column_of(system, IMAGE), *sizes = column_of(system, SIZES), *told = system->known;
    for (long c = 0; c < PROBES + k; c++)
        memcpy(solutions + c * wide, c < PROBES ? system->vectors + c * n : system->b + (c - PROBES) * n,
               n * sizeof(double));
    memset(told, 0, FORWARD_ERRORS * sizeof(double));
    told[GROWTH] = substitute(system, solutions) / largest;
    for (long j = 0; j < n; j++) { /* a step of the power method for the norm of A D^-1 */
        image[j] /= sizes[j];
        column_of(system, OTHERS + PROBES)[j] = image[j] / sizes[j];
    }
    measure(system, solutions, residuals);
    const double *x = solutions + PROBES * wide, *left = residuals + PROBES * wide;
    double infinity_norm = largest_of(column_of(system, SUMS), n), *before = told + FORWARD_ERRORS;
    for (long c = 0; c < k; c++) {
        double scale = infinity_norm * largest_of(x + c * wide, n) + largest_of(system->b + c * n, n);
        raise(&told[HISTORY], largest_of(left + c * wide, n) / scale);
        before[c] = length_of(NULL, left + c * wide, n);
    }
    if (system->updates) {
        memcpy(updates, residuals, size * sizeof(double));
        substitute(system, updates);
        update(system, updates, residuals);
        for (long i = 0; i < PROBES * wide; i++)
            solutions[i] += updates[i];
    }
    struct known known = known_of(system, solutions, residuals);
    known.condition *= length_of(NULL, column_of(system, LOOK), n) / length_of(NULL, image, n);
    told[ACCEPTED] = known.good, told[UPDATES] = system->updates;
    told[CONDITION] = known.condition > 1 ? known.condition : 1;
    for (long c = 0; c < k; c++) {
        struct told found = judge(system, &known, x + c * wide, updates + (PROBES + c) * wide, left + c * wide,
                                  before[c], system->b + c * n, system->x + c * n);
        for (int step = 1; step <= MOST_UPDATES; step++)
            raise(&told[HISTORY + step], found.refined);
        raise(&told[BACKWARD_ERROR], found.backward);
        told[FORWARD_ERRORS + c] = found.forward;
        if (!found.accepted)
            told[ACCEPTED] = 0;
    }
}
