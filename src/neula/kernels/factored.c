/* One linear system and its evidence, by LU factors, in as few passes over A and the factors as that takes:
 * two over A, of which one makes the copy that is factorized, and one over the factors. Where the solution is
 * updated there is one more of each.
 *
 * Rows of A are contiguous, and the factors are those of its transpose, P L U = A^T, column by column: all products
 * with A, and all solves, are inner products of contiguous numbers.
 */
#include <string.h>

#include "lu_blocks.h"
#include "solved.h"
#include "threads.h"
#include "vectors.h"

/* With arguments that are numbers: loops over so many are unrolled, and what they sum up stays in registers. */
#define INLINE static inline __attribute__((always_inline))

#define U 0x1p-53
#define PROBES 4   /* random vectors that the norm of the inverse is known from */
#define GROUP 6    /* columns that lines are multiplied by together: the random vectors, another one, and a solution */
#define TILE 32    /* lines, and numbers of each, that are transposed together */
#define STRIPE 256 /* lines that several threads solve for together */

/* Lines that are multiplied together: their sums, with GROUP columns, stay in registers. They divide WIDTH. */
#if WIDTH == 8
#define LINES 4
#else
#define LINES 2
#endif

/* What the caller decides, in its order. */
struct limits {
    double moderate, alike, max_rate, margin, computed;
};

struct system {
    long n, k, threads; /* at most MOST_THREADS */
    long wide;          /* a multiple of WIDTH, at least n + WIDTH: columns of the room end with zeros */
    const char *a;
    char *factors; /* float or double; at first a copy of A */
    long apart;    /* its numbers from a line to the next: n, or what `blocks` has */
    long a_is_float, factors_are_float;
    int *pivots;              /* counted from 0 */
    const double *b;          /* (k, n) */
    const double *vectors;    /* (PROBES + 1, n), the last one to look at A with */
    long updates, x_is_float; /* whether to update once; what x is rounded to */
    double *room;             /* COLUMNS, two for each thread, and three times `count_of` columns */
    double *x;                /* (k, n) */
    double *known;            /* (FORWARD_ERRORS + k) */
    const struct limits *limits;
};

/* Columns of the room: sums of magnitudes of rows, sizes of columns, A^T times a random vector, something for a while;
 * then sums of each thread. */
enum { SUMS, SIZES, IMAGE, SPARE, COLUMNS };

/* Lines of a matrix of order n, and how many numbers it is from one to the next. */
struct lines {
    char *first;
    int is_float;
    long n, apart;
};

/* What a thread does with some lines. */
struct part {
    const struct system *system;
    void (*work)(struct part *);
    long first, last;
    const double *columns; /* what lines are multiplied by */
    double *others;        /* what that is subtracted from, or where it goes */
    long count, start, end; /* of columns; elements of lines */
    int looks;              /* whether to tell the largest element */
    double *squares, *image, most;
};

static double *column_of(const struct system *system, long i)
{
    return system->room + i * system->wide;
}

/* Right-hand sides, random vectors and the one to look at A with, filled up to whole groups. */
static long count_of(const struct system *system)
{
    return (system->k + PROBES + 1 + GROUP - 1) / GROUP * GROUP;
}

static inline struct lines lines_of(const struct system *system, int of_factors)
{
    if (of_factors)
        return (struct lines){system->factors, system->factors_are_float, system->n, system->apart};
    return (struct lines){(char *)system->a, system->a_is_float, system->n, system->n};
}

static inline double number(const struct lines *a, long place)
{
    return a->is_float ? ((const float *)a->first)[place] : ((const double *)a->first)[place];
}

static inline vec part_of(const struct lines *a, int is_float, long place)
{
    return is_float ? vec_of_floats((const float *)a->first + place) : vec_at((const double *)a->first + place);
}

static inline void put(const struct lines *a, int is_float, long place, vec x)
{
    if (is_float)
        put_floats((float *)a->first + place, x);
    else
        vec_put((double *)a->first + place, x);
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

static double length_of(const double *x, long n)
{
    double square = 0;
#pragma omp simd reduction(+ : square)
    for (long i = 0; i < n; i++)
        square += x[i] * x[i];
    return __builtin_sqrt(square);
}

/* ||D x||. */
static double scaled_length(const double *sizes, const double *x, long n)
{
    double square = 0;
#pragma omp simd reduction(+ : square)
    for (long i = 0; i < n; i++)
        square += (sizes[i] * x[i]) * (sizes[i] * x[i]);
    return __builtin_sqrt(square);
}

static void *work_on_part(void *given)
{
    struct part *part = given;
    part->work(part);
    return NULL;
}

/* Share lines of a part among threads; returns the largest number that they tell. */
static double share(const struct part *all_of_it)
{
    struct part parts[MOST_THREADS];
    const struct system *system = all_of_it->system;
    long threads = system->threads, lines = all_of_it->last - all_of_it->first;
    double most = 0;
    for (long t = 0; t < threads; t++) {
        parts[t] = *all_of_it;
        parts[t].first = all_of_it->first + t * lines / threads / WIDTH * WIDTH;
        parts[t].last = all_of_it->first + (t + 1 < threads ? (t + 1) * lines / threads / WIDTH * WIDTH : lines);
        parts[t].squares = column_of(system, COLUMNS + 2 * t), parts[t].image = parts[t].squares + system->wide;
    }
    side_by_side(work_on_part, parts, sizeof(*parts), threads);
    for (long t = 0; t < threads; t++)
        raise(&most, parts[t].most);
    return most;
}

/* Copy some lines, and sum up what there is to know of them and of their columns. */
INLINE void copy_lines(struct part *part, int from_float, int to_float, int lines, long i, vec *most)
{
    const struct system *system = part->system;
    struct lines a = {(char *)system->a, from_float, system->n, system->n};
    struct lines copy = {system->factors, to_float, system->n, system->apart};
    const double *y = system->vectors + PROBES * a.n + i;
    vec sums[LINES] = {0}, factors[LINES];
    long j = 0;
#pragma GCC unroll 4
    for (int l = 0; l < lines; l++)
        factors[l] = all(y[l]);
    for (; j + WIDTH <= a.n; j += WIDTH) {
        vec square = vec_at(part->squares + j), image = vec_at(part->image + j);
#pragma GCC unroll 4
        for (int l = 0; l < lines; l++) {
            vec x = part_of(&a, from_float, (i + l) * a.n + j), size = magnitude(x);
            if (from_float && to_float)
                copy_floats((float *)copy.first + (i + l) * copy.apart + j, (const float *)a.first + (i + l) * a.n + j);
            else
                put(&copy, to_float, (i + l) * copy.apart + j, x);
            sums[l] += size;
            most[l] = larger(size, most[l]);
            square = plus_product(square, x, x);
            image = plus_product(image, factors[l], x);
        }
        vec_put(part->squares + j, square), vec_put(part->image + j, image);
    }
    for (int l = 0; l < lines; l++) {
        double sum = sum_of(sums[l]);
        for (long rest = j; rest < a.n; rest++) {
            double x = number(&a, (i + l) * a.n + rest), size = __builtin_fabs(x);
            if (to_float)
                ((float *)copy.first)[(i + l) * copy.apart + rest] = x;
            else
                ((double *)copy.first)[(i + l) * copy.apart + rest] = x;
            sum += size;
            raise(&part->most, size);
            part->squares[rest] += x * x;
            part->image[rest] += y[l] * x;
        }
        column_of(system, SUMS)[i + l] = sum;
    }
}

INLINE void copy_all(struct part *part, int from_float, int to_float)
{
    vec most[LINES] = {0};
    long i = part->first;
    for (; i + LINES <= part->last; i += LINES)
        copy_lines(part, from_float, to_float, LINES, i, most);
    for (; i < part->last; i++)
        copy_lines(part, from_float, to_float, 1, i, most);
    raise(&part->most, largest_of((double *)most, LINES * WIDTH));
}

/* Zeros behind lines of the copy. */
static void pad_lines(const struct system *system, long first, long last)
{
    long size = system->factors_are_float ? sizeof(float) : sizeof(double), gap = system->apart - system->n;
    for (long i = first; i < last && gap > 0; i++)
        memset(system->factors + (i * system->apart + system->n) * size, 0, gap * size);
}

static void copy_part(struct part *part)
{
    const struct system *system = part->system;
    pad_lines(system, part->first, part->last);
    if (!system->a_is_float && !system->factors_are_float)
        copy_all(part, 0, 0);
    else if (system->a_is_float && system->factors_are_float)
        copy_all(part, 1, 1);
    else if (system->a_is_float)
        copy_all(part, 1, 0);
    else
        copy_all(part, 0, 1);
}

/* Copy A, and sum up what there is to know of its rows and columns; returns the largest element. */
double copy_and_look(const struct system *system)
{
    long n = system->n, threads = system->threads;
    memset(system->room, 0, (COLUMNS + 2 * threads + 3 * count_of(system)) * system->wide * sizeof(double));
    double most = share(&(struct part){.system = system, .work = copy_part, .last = n});
    for (long j = 0; j < n; j++) {
        double square = 0, image = 0;
        for (long t = 0; t < threads; t++) {
            square += column_of(system, COLUMNS + 2 * t)[j];
            image += column_of(system, COLUMNS + 2 * t + 1)[j];
        }
        column_of(system, SIZES)[j] = __builtin_sqrt(square), column_of(system, IMAGE)[j] = image;
    }
    return most;
}

/* Inner products of some lines, from an element to another, with some columns; `most` are the largest of these elements
 * where that is asked for. Where elements are no whole number of vectors they go to the end of lines. */
INLINE void multiply_lines(const struct lines *a, int is_float, long i, long start, long end, const double *x,
                           long wide, int lines, int columns, double *found, vec *most)
{
    vec sums[GROUP * LINES] = {0};
    /* Columns end with zeros: the last vector may have a part of the next line, where there is one. */
    long j = start, whole = (end + WIDTH - 1) / WIDTH * WIDTH;
    whole = (i + lines - 1) * a->apart + whole <= a->n * a->apart ? whole : end / WIDTH * WIDTH;
    for (; j < whole; j += WIDTH) {
        vec of_a[LINES];
#pragma GCC unroll 4
        for (int l = 0; l < lines; l++)
            of_a[l] = part_of(a, is_float, (i + l) * a->apart + j);
#pragma GCC unroll 4
        for (int l = 0; l < lines && most != NULL; l++)
            most[l] = larger(magnitude(of_a[l]), most[l]);
#pragma GCC unroll 6
        for (int c = 0; c < columns; c++) {
            vec of_x = vec_at(x + c * wide + j);
#pragma GCC unroll 4
            for (int l = 0; l < lines; l++)
                sums[c * LINES + l] = plus_product(sums[c * LINES + l], of_a[l], of_x);
        }
    }
#pragma GCC unroll 6
    for (int c = 0; c < GROUP * LINES / WIDTH; c++)
        if (c * WIDTH < columns * LINES)
            vec_put(found + c * WIDTH, sums_of(sums + c * WIDTH));
    for (; j < end; j++)
        for (int l = 0; l < lines; l++)
            for (int c = 0; c < columns; c++)
                found[c * LINES + l] += number(a, (i + l) * a->apart + j) * x[c * wide + j];
}

/* The same of all lines of a part, subtracted from other columns. */
INLINE void subtract_lines(struct part *part, const struct lines *a, int is_float, int columns, long first, vec *most)
{
    long wide = part->system->wide, i = part->first;
    const double *x = part->columns + first * wide;
    double *others = part->others + first * wide, found[GROUP * LINES];
    for (; i + LINES <= part->last; i += LINES) {
        multiply_lines(a, is_float, i, part->start, part->end, x, wide, LINES, columns, found, most);
        for (int c = 0; c < columns; c++)
            for (int l = 0; l < LINES; l++)
                others[c * wide + i + l] -= found[c * LINES + l];
    }
    for (; i < part->last; i++) {
        multiply_lines(a, is_float, i, part->start, part->end, x, wide, 1, columns, found, most);
        for (int c = 0; c < columns; c++)
            others[c * wide + i] -= found[c * LINES];
    }
    if (most != NULL)
        raise(&part->most, largest_of((double *)most, LINES * WIDTH));
}

/* With any number of columns; the first group may tell the largest element of the lines. */
static void subtract(struct part *part, const struct lines *a)
{
    vec most[LINES] = {0};
    for (long c = 0; c < part->count; c += GROUP) {
        int alone = part->count - c == 1;
        if (part->looks && c == 0 && a->is_float)
            subtract_lines(part, a, 1, GROUP, c, most);
        else if (part->looks && c == 0)
            subtract_lines(part, a, 0, GROUP, c, most);
        else if (a->is_float && alone)
            subtract_lines(part, a, 1, 1, c, NULL);
        else if (a->is_float)
            subtract_lines(part, a, 1, GROUP, c, NULL);
        else if (alone)
            subtract_lines(part, a, 0, 1, c, NULL);
        else
            subtract_lines(part, a, 0, GROUP, c, NULL);
    }
}

/* What is left of right-hand sides. */
static void eliminate_part(struct part *part)
{
    struct lines factors = lines_of(part->system, 1);
    subtract(part, &factors);
}

/* Solve with a triangle of the factors on their diagonal: U from its first line on, or L from its last one. */
static double solve_triangle(const struct part *block, int upper)
{
    struct lines factors = lines_of(block->system, 1);
    long size = block->last - block->first, wide = block->system->wide;
    double triangle[WIDTH][WIDTH], most = 0;
    for (long i = 0; i < size; i++)
        for (long j = 0; j < size; j++)
            triangle[i][j] = number(&factors, (block->first + i) * factors.apart + block->first + j);
    for (long i = 0; i < size; i++)
        for (long j = 0; j <= i; j++)
            raise(&most, __builtin_fabs(triangle[i][j]));
    for (long c = 0; c < (block->count == 1 ? 1 : (block->count + GROUP - 1) / GROUP * GROUP); c++) {
        double *x = block->others + c * wide + block->first;
        for (long i = 0; upper && i < size; i++) {
            for (long j = 0; j < i; j++)
                x[i] -= triangle[i][j] * x[j];
            x[i] /= triangle[i][i];
        }
        for (long i = size - 1; !upper && i >= 0; i--)
            for (long j = size - 1; j > i; j--)
                x[i] -= triangle[i][j] * x[j];
    }
    return most;
}

/* A^-1 of columns in their place; returns the largest element of U where that is asked for. Each of several threads has
 * some lines of a stripe, and what is on its diagonal is left to one of them. */
static double substitute(const struct system *system, double *columns, long count, int looks)
{
    long n = system->n, wide = system->wide, stripe = system->threads > 1 ? STRIPE : (n + WIDTH - 1) / WIDTH * WIDTH;
    struct part part = {.system = system, .work = eliminate_part, .looks = looks, .count = count};
    double most = 0;
    part.columns = part.others = columns;
    for (long top = 0; top < n; top += stripe) {
        long bottom = top + stripe < n ? top + stripe : n;
        part.first = top, part.last = bottom, part.start = 0, part.end = top;
        if (top > 0)
            raise(&most, share(&part));
        for (long i = top; i < bottom; i += WIDTH) {
            part.first = i, part.last = i + WIDTH < n ? i + WIDTH : n, part.start = top, part.end = i, part.most = 0;
            eliminate_part(&part);
            raise(&most, part.most);
            raise(&most, solve_triangle(&part, 1));
        }
    }
    part.looks = 0;
    for (long top = (n - 1) / stripe * stripe; top >= 0; top -= stripe) {
        long bottom = top + stripe < n ? top + stripe : n;
        part.first = top, part.last = bottom, part.start = bottom, part.end = n;
        if (bottom < n)
            share(&part);
        for (long i = (bottom - 1) / WIDTH * WIDTH; i >= top; i -= WIDTH) {
            part.first = i, part.last = i + WIDTH < n ? i + WIDTH : n, part.start = part.last, part.end = bottom;
            eliminate_part(&part);
            solve_triangle(&part, 0);
        }
    }
    for (long c = 0; c < count; c++)
        for (long j = n - 1; j >= 0; j--) {
            double *x = columns + c * wide, other = x[j];
            x[j] = x[system->pivots[j]];
            x[system->pivots[j]] = other;
        }
    return most;
}

/* b_i - a_i x, in twice the working precision. */
static double residual_of(const struct lines *a, long i, const double *x, double b)
{
    vec high = {0}, low = {0};
    long j = 0;
    for (; j + WIDTH <= a->n; j += WIDTH)
        add_products(part_of(a, a->is_float, i * a->apart + j), -vec_at(x + j), &high, &low);
    double total = b, rest = 0;
    for (int l = 0; l < WIDTH; l++) {
        double error;
        two_sum(total, high[l], &total, &error);
        rest += error + low[l];
    }
    for (; j < a->n; j++)
        add_product(number(a, i * a->apart + j), -x[j], &total, &rest);
    return total + rest;
}

/* What solutions leave of right-hand sides and random vectors: sums in double precision, which is twice that of float
 * factors; where factors are double, right-hand sides in twice that. */
static void measure_part(struct part *part)
{
    const struct system *system = part->system;
    struct lines a = lines_of(system, 0);
    struct part block = *part;
    for (; block.first < part->last; block.first = block.last) {
        block.last = block.first + WIDTH < part->last ? block.first + WIDTH : part->last;
        subtract(&block, &a);
        for (long c = 0; c < system->k && !system->factors_are_float; c++)
            for (long i = block.first; i < block.last; i++) {
                const double *x = part->columns + c * system->wide;
                double b = system->b[c * a.n + i];
                part->others[c * system->wide + i] = residual_of(&a, i, x, b);
            }
    }
}

/* What updates leave of residuals. */
static void update_part(struct part *part)
{
    struct lines a = lines_of(part->system, 0);
    subtract(part, &a);
}

/* Of inner products, and of differences from them, relative to those of magnitudes. */
static double rounding_of(long n)
{
    return (n / WIDTH + 2 * WIDTH + 4) * U;
}

/* A^-T of a vector, in its place. */
INLINE void substitute_transposed_lines(const struct lines *a, int is_float, const int *pivots, double *x)
{
    const float *of_floats = (const float *)a->first;
    const double *of_doubles = (const double *)a->first;
    for (long j = 0; j < a->n; j++) {
        double other = x[j];
        x[j] = x[pivots[j]], x[pivots[j]] = other;
    }
    for (long j = 0; j < a->n; j++) {
        double factor = x[j];
#pragma omp simd
        for (long i = j + 1; i < a->n; i++)
            x[i] -= (is_float ? of_floats[j * a->apart + i] : of_doubles[j * a->apart + i]) * factor;
    }
    for (long j = a->n - 1; j >= 0; j--) {
        double factor = x[j] /= number(a, j * a->apart + j);
#pragma omp simd
        for (long i = 0; i < j; i++)
            x[i] -= (is_float ? of_floats[j * a->apart + i] : of_doubles[j * a->apart + i]) * factor;
    }
}

/* ||D A^-1||_2 from below, by a step of the power method from the best of the random vectors, whose solutions are
 * known. */
static double inverse_norm(const struct system *system, const double *solutions)
{
    struct lines factors = lines_of(system, 1);
    long n = system->n;
    double *sizes = column_of(system, SIZES), *v = column_of(system, SPARE), best = -1;
    const double *of_best = solutions;
    for (int p = 0; p < PROBES; p++) {
        const double *x = solutions + (system->k + p) * system->wide;
        double size = scaled_length(sizes, x, n);
        if (size > best)
            best = size, of_best = x;
    }
    for (long j = 0; j < n; j++)
        v[j] = sizes[j] * (sizes[j] * of_best[j] / best);
    if (factors.is_float)
        substitute_transposed_lines(&factors, 1, system->pivots, v);
    else
        substitute_transposed_lines(&factors, 0, system->pivots, v);
    return length_of(v, n);
}

/* What is known of A. */
struct known {
    double infinity_norm, norm, rate;
    int good;
};

/* What rows of A, random vectors, solutions for them and what these leave say of it. */
static struct known known_of(const struct system *system, const double *solutions, const double *residuals)
{
    const struct limits *limits = system->limits;
    long n = system->n, wide = system->wide;
    const double *sums = column_of(system, SUMS), *sizes = column_of(system, SIZES);
    solutions += system->k * wide, residuals += system->k * wide;
    double infinity_norm = largest_of(sums, n), norm = length_of(sizes, n), lost = 0;
    for (int p = 0; p < PROBES; p++) {
        /* Beside what is left there are the rounding errors of its measurement. */
        double missed = length_of(residuals + p * wide, n) + rounding_of(n) * norm * length_of(solutions + p * wide, n);
        lost += missed * missed;
    }
    double rate = limits->margin * __builtin_sqrt(lost);
    double least = least_of(sums, n), narrowest = least_of(sizes, n);
    int alike = infinity_norm <= limits->alike * least && largest_of(sizes, n) <= limits->alike * narrowest;
    int moderate = least >= 1 / limits->moderate && narrowest >= 1 / limits->moderate &&
                   infinity_norm <= limits->moderate && norm <= n * limits->moderate;
    return (struct known){infinity_norm, norm, rate, alike && moderate && rate <= limits->max_rate};
}

/* What is known of one right-hand side. */
struct told {
    double residual, refined, backward, forward;
    int doubtful;
};

/* Add the update where there is one, round, and say what x is then. */
static struct told judge(const struct system *system, const struct known *known, double through, const double *solution,
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
    double left = length_of(residual, n), of_b = length_of(b, n), size = scaled_length(sizes, x, n);
    double doubled = (n + WIDTH + 2) * U * (n + WIDTH + 2) * U, rounding_errors = rounding_of(n);
    double of_product = system->factors_are_float ? rounding_errors : doubled;
    double floor = of_product * (known->norm * length_of(x, n) + of_b);
    /* Rounding of the residual to one number, and of A times an update and the difference. */
    double of_change = system->updates ? length_of(change, n) : 0;
    double noise = floor + rounding_errors * (of_before + known->norm * of_change);
    double error = through * (left + noise) / size, rounding = scaled_length(sizes, lost, n) / size;
    struct told told;
    told.refined = largest_of(residual, n) / (known->infinity_norm * largest_of(x, n) + largest_of(b, n));
    told.backward = told.refined + rounding;
    error += rounding;
    told.forward = error < 1 ? limits->computed * error / (1 - error) : __builtin_inf();
    told.residual = (left + noise + known->norm * length_of(lost, n)) / of_b;
    int converges = !system->updates || left <= limits->max_rate * of_before + noise;
    int moderate = of_b >= 1 / limits->moderate && of_b <= limits->moderate;
    told.doubtful = !(known->good && converges && moderate);
    return told;
}

/* Solve with the factors, and measure what is found; `largest` is the largest element of A. */
void solve_factored(const struct system *system, double largest)
{
    long n = system->n, k = system->k, wide = system->wide, size = count_of(system) * wide;
    double *solutions = column_of(system, COLUMNS + 2 * system->threads), *residuals = solutions + size;
    double *updates = residuals + size, *look = solutions + (k + PROBES) * wide;
    double *image = column_of(system, IMAGE), *sizes = column_of(system, SIZES), *told = system->known;
    for (long c = 0; c < k + PROBES; c++)
        memcpy(residuals + c * wide, c < k ? system->b + c * n : system->vectors + (c - k) * n, n * sizeof(double));
    memcpy(solutions, residuals, size * sizeof(double));
    memset(told, 0, FORWARD_ERRORS * sizeof(double));
    told[GROWTH] = substitute(system, solutions, k + PROBES, 1) / largest;
    for (long j = 0; j < n; j++) { /* a step of the power method for the norm of A D^-1 */
        image[j] /= sizes[j];
        look[j] = image[j] / sizes[j];
    }
    struct part all = {.system = system, .work = measure_part, .last = n, .columns = solutions, .others = residuals,
                       .count = k + PROBES + 1, .end = n};
    share(&all);
    double infinity_norm = largest_of(column_of(system, SUMS), n), *before = told + FORWARD_ERRORS;
    for (long c = 0; c < k; c++) {
        double scale = infinity_norm * largest_of(solutions + c * wide, n) + largest_of(system->b + c * n, n);
        raise(&told[HISTORY], largest_of(residuals + c * wide, n) / scale);
        before[c] = length_of(residuals + c * wide, n);
    }
    double of_look = length_of(residuals + (k + PROBES) * wide, n);
    struct known known = known_of(system, solutions, residuals);
    if (system->updates) {
        /* Random vectors only where their solutions do not tell how well factors solve. */
        long count = known.rate <= system->limits->max_rate ? k : k + PROBES;
        memcpy(updates, residuals, count * wide * sizeof(double));
        substitute(system, updates, count, 0);
        all.work = update_part, all.columns = updates, all.count = count;
        share(&all);
        for (long i = k * wide; i < count * wide; i++)
            solutions[i] += updates[i];
        known = known_of(system, solutions, residuals);
    }
    double of_norm = of_look / length_of(image, n), of_inverse = inverse_norm(system, solutions);
    double condition = of_inverse * (of_norm > 1 ? of_norm : 1); /* columns have norm 1 */
    /* With X Z for A^-1 Z, A^-1 Z = X Z + A^-1 (Z - A X Z). */
    double through = system->limits->margin * of_inverse / (1 - known.rate);
    told[UPDATES] = system->updates;
    told[CONDITION] = condition > 1 ? condition : 1;
    for (long c = 0; c < k; c++) {
        struct told found = judge(system, &known, through, solutions + c * wide, updates + c * wide,
                                  residuals + c * wide, before[c], system->b + c * n, system->x + c * n);
        for (int step = 1; step <= MOST_UPDATES; step++)
            raise(&told[HISTORY + step], found.refined);
        raise(&told[DOUBTFUL], found.doubtful);
        raise(&told[RESIDUAL], found.residual);
        raise(&told[BACKWARD_ERROR], found.backward);
        told[FORWARD_ERRORS + c] = found.forward;
    }
}

/* Lines of a factor L of A = L L^T, one for each of its columns, of which the part behind the diagonal counts. They become
 * those of P L U above without P, for the diagonal D of L: L D^-1, and U = D L^T in two steps, since lines of U are put
 * together from all of L.
 */
INLINE void divide_lines(const struct lines *a, int is_float, long first, long last)
{
    for (long j = first; j < last; j++) {
        double pivot = number(a, j * a->apart + j), reciprocal = 1 / pivot;
        float *of_floats = (float *)a->first + j * a->apart;
        double *of_doubles = (double *)a->first + j * a->apart;
        if (is_float)
            of_floats[j] = pivot * pivot;
        else
            of_doubles[j] = pivot * pivot;
        for (long i = j + 1; i < a->n; i++) {
            if (is_float)
                of_floats[i] *= (float)reciprocal;
            else
                of_doubles[i] *= reciprocal;
        }
    }
}

/* Lines of U from some on, a tile of the cache at a time. */
INLINE void turn_lines(const struct lines *a, int is_float, long first, long last)
{
    for (long top = first; top < last; top += TILE)
        for (long left = 0; left < last; left += TILE) {
            long bottom = top + TILE < last ? top + TILE : last;
            for (long j = top; j < bottom; j++)
                for (long i = left; i < left + TILE && i < j; i++) {
                    if (is_float) {
                        float *x = (float *)a->first;
                        x[j * a->apart + i] = x[i * a->apart + i] * x[i * a->apart + j];
                    } else {
                        double *x = (double *)a->first;
                        x[j * a->apart + i] = x[i * a->apart + i] * x[i * a->apart + j];
                    }
                }
        }
}

static void divide_part(struct part *part)
{
    struct lines a = lines_of(part->system, 1);
    a.is_float ? divide_lines(&a, 1, part->first, part->last) : divide_lines(&a, 0, part->first, part->last);
}

static void turn_part(struct part *part)
{
    struct lines a = lines_of(part->system, 1);
    a.is_float ? turn_lines(&a, 1, part->first, part->last) : turn_lines(&a, 0, part->first, part->last);
}

/* The same with a factor of a definite A. */
void solve_definite(const struct system *system, double largest)
{
    share(&(struct part){.system = system, .work = divide_part, .last = system->n});
    share(&(struct part){.system = system, .work = turn_part, .last = system->n});
    for (long i = 0; i < system->n; i++)
        system->pivots[i] = i;
    solve_factored(system, largest);
    raise(&system->known[GROWTH], 1); /* no element of U exceeds all of A */
}

/* The same from A to the evidence, with factors of blocks: lines of the copy are whole lines of the cache, and there are
 * some behind the last one up to a whole block. Returns whether no pivot vanishes. */
int solve_in_blocks(const struct system *system)
{
    struct blocks blocks = {.a = system->factors, .n = system->n, .apart = system->apart, .pivots = system->pivots,
                            .count = (system->n + BLOCK - 1) / BLOCK, .threads = system->threads};
    double largest = copy_and_look(system);
    long size = system->apart * (system->factors_are_float ? sizeof(float) : sizeof(double));
    memset(system->factors + system->n * size, 0, (blocks.count * BLOCK - system->n) * size);
    side_by_side(system->factors_are_float ? take_blocks_of_floats : take_blocks_of_doubles, &blocks, 0, system->threads);
    if (!blocks.singular)
        solve_factored(system, largest);
    return !blocks.singular;
}
