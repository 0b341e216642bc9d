/* Linear systems with the evidence of each: what neula.algorithms.lapack.squares does in NumPy, in one pass.
 *
 * A group of LANES systems is worked on at a time: as many as there are lanes in a vector, element by element
 * beside one another, or a single one whose columns are vectors. The same code does both, and a number of a
 * system is a vector in either case. Below each column that is no whole number of vectors there are zeros, which
 * change nothing.
 */
#include <stdlib.h>
#include <string.h>

#include "solved.h"
#include "threads.h"
#include "vectors.h"

#define U 0x1p-53
#define LINE 8
#define MORE 7 /* columns behind U, of a panel that is not full */

/* What the caller decides, in its order. */
struct limits {
    double moderate, alike, max_rate, rounding, margin, computed, digits;
};

struct batch {
    long count, n, k, probes;
    const char *a, *b; /* float or double, of any strides, in elements */
    long a_is_float, a_batch, a_row, a_column;
    long b_is_float, b_batch, b_row, b_column;
    const double *vectors; /* (probes + 1, n), the last one to look at A with */
    long definite;         /* whether matrices are said to be symmetric and positive definite */
    long x_is_float;       /* what x is rounded to */
    double *x;             /* (count, n, k) */
    double *known;         /* (FORWARD_ERRORS + k, count) */
    const struct limits *limits;
};

struct part {
    const struct batch *batch;
    long first, last;
    int failed;
};

/* Room for one group: columns of `height` vectors. */
struct room {
    long height;
    vec *a, *lower, *upper, *pivots; /* pivots: reciprocals */
    vec *sizes, *rows, *sides, *high, *low, *update, *rest, *images;
    int *order; /* row i of the factors is row order[i] of A, of each lane */
};

static double element(const char *base, long is_float, long place)
{
    return is_float ? ((const float *)base)[place] : ((const double *)base)[place];
}

static vec get(const vec *column, long i)
{
    return LANES == 1 ? all(((const double *)column)[i]) : column[i];
}

static void set(vec *column, long i, vec value)
{
    if (LANES == 1)
        ((double *)column)[i] = value[0];
    else
        column[i] = value;
}

/* The vector that row i is in. */
static long place(long i)
{
    return LANES == 1 ? i / WIDTH : i;
}

/* The number of each system from what its rows have added up. */
static vec total(vec sum)
{
    if (LANES > 1)
        return sum;
    double all_of_it = 0;
    for (int l = 0; l < WIDTH; l++)
        all_of_it += sum[l];
    return all(all_of_it);
}

static vec largest(vec found)
{
    if (LANES > 1)
        return found;
    double most = found[0];
    for (int l = 1; l < WIDTH; l++)
        most = found[l] > most ? found[l] : most;
    return all(most);
}

static vec least_of(const vec *column, long n)
{
    vec least = get(column, 0);
    for (long i = 1; i < n; i++) {
        vec other = get(column, i);
        least = chosen(other < least, other, least);
    }
    return least;
}

static vec most_of(const vec *column, long height)
{
    vec most = {0};
    for (long v = 0; v < height; v++)
        most = larger(magnitude(column[v]), most);
    return largest(most);
}

static vec inner(const vec *x, const vec *y, long height)
{
    vec sum = {0};
    for (long v = 0; v < height; v++)
        sum += x[v] * y[v];
    return total(sum);
}

static vec length(const vec *x, long height)
{
    return root(inner(x, x, height));
}

static vec scaled_length(const vec *sizes, const vec *x, long height)
{
    vec sum = {0};
    for (long v = 0; v < height; v++) {
        vec y = sizes[v] * x[v];
        sum += y * y;
    }
    return root(total(sum));
}

static int some(mask where)
{
    long long any = where[0];
    for (int l = 1; l < WIDTH; l++)
        any |= where[l];
    return any != 0;
}

static int every(mask where)
{
    long long both = where[0];
    for (int l = 1; l < WIDTH; l++)
        both &= where[l];
    return both != 0;
}

/* What is known of a matrix before it is factorized. */
struct known {
    vec infinity_norm, norm, smallest, largest;
    mask moderate, alike;
};

#if LANES == 1
/* A with contiguous rows as columns, by squares of WIDTH rows and columns; returns how many of either those are. */
static inline __attribute__((always_inline)) long take_squares(const char *a, int is_float, long apart, long n,
                                                               double *to, long width)
{
    long taken = n / LINE * LINE;
    for (long i = 0; i < taken; i += WIDTH)
        for (long j = 0; j < taken; j += WIDTH) {
            vec square[WIDTH];
#pragma GCC unroll 8
            for (int l = 0; l < WIDTH; l++) {
                long from = (i + l) * apart + j;
                square[l] = is_float ? vec_of_floats((const float *)a + from) : vec_at((const double *)a + from);
            }
            transpose(square);
#pragma GCC unroll 8
            for (int l = 0; l < WIDTH; l++)
                vec_put(to + (j + l) * width + i, square[l]);
        }
    return taken;
}
#endif

/* A as columns, one after the other; the matrices of a group beyond the last one are that again. */
static void take(const struct batch *batch, long first, struct room *room)
{
    long n = batch->n, width = room->height * WIDTH;
    for (int l = 0; l < LANES; l++) {
        long system = first + l < batch->count ? first + l : batch->count - 1, taken = 0;
        long start = system * batch->a_batch;
        double *to = (double *)room->a + l;
#if LANES == 1
        if (batch->a_column == 1 && batch->a_is_float)
            taken = take_squares(batch->a + 4 * start, 1, batch->a_row, n, to, width);
        else if (batch->a_column == 1)
            taken = take_squares(batch->a + 8 * start, 0, batch->a_row, n, to, width);
#endif
        for (long top = 0; top < n; top += LINE) /* lines of a cache, of rows and of columns */
            for (long j = top < taken ? taken : 0; j < n; j++)
                for (long i = top; i < n && i < top + LINE; i++) {
                    long from = start + i * batch->a_row + j * batch->a_column;
                    to[j * width + i * LANES] = element(batch->a, batch->a_is_float, from);
                }
    }
    if (LANES == 1)
        for (long j = 0; j < n; j++)
            for (long i = n; i < width; i++)
                ((double *)room->a)[j * width + i] = 0;
}

static void take_side(const struct batch *batch, long first, long column, vec *to, long height)
{
    memset(to, 0, height * sizeof(vec));
    for (int l = 0; l < LANES; l++) {
        long system = first + l < batch->count ? first + l : batch->count - 1;
        long start = system * batch->b_batch + column * batch->b_column;
        for (long i = 0; i < batch->n; i++)
            ((double *)to)[i * LANES + l] =
                element(batch->b, batch->b_is_float, start + i * batch->b_row);
    }
}

static struct known measure(struct room *room, long n, const struct limits *limits)
{
    long height = room->height;
    vec norm = {0}, most = {0};
    memset(room->rows, 0, height * sizeof(vec));
    for (long j = 0; j < n; j++) {
        const vec *column = room->a + j * height;
        vec square = {0};
        for (long v = 0; v < height; v++) {
            vec size = magnitude(column[v]);
            room->rows[v] += size;
            most = larger(size, most);
            square += size * size;
        }
        square = total(square);
        norm += square;
        set(room->sizes, j, root(square));
    }
    struct known known;
    known.infinity_norm = most_of(room->rows, height);
    known.norm = root(norm);
    known.smallest = least_of(room->sizes, n);
    known.largest = largest(most);
    vec widest = most_of(room->sizes, height), least = least_of(room->rows, n);
    known.alike = (known.infinity_norm <= limits->alike * least) & (widest <= limits->alike * known.smallest);
    /* The norm shows what is not finite, comparisons with which are false. */
    known.moderate = (least >= all(1 / limits->moderate)) & (known.smallest >= all(1 / limits->moderate)) &
                     (known.infinity_norm <= all(limits->moderate)) & (known.norm <= all(n * limits->moderate));
    return known;
}

/* Elements i and j of a column of one lane. */
static void swap(vec *column, long i, long j, int lane)
{
    double *x = (double *)column + lane, other = x[i * LANES];
    x[i * LANES] = x[j * LANES];
    x[j * LANES] = other;
}

#if LANES == 1
#include "lu_alone.h"
#else
/* Subtract what the first j columns of the factors make of a column: four at a time, to read it less often. */
static void eliminate(const struct room *room, vec *restrict x, long j)
{
    long height = room->height, k = 0;
    for (; k + 4 <= j; k += 4) {
        const vec *l0 = room->lower + k * height, *l1 = l0 + height, *l2 = l1 + height, *l3 = l2 + height;
        vec x0 = x[k], x1 = minus_product(x[k + 1], l0[k + 1], x0);
        vec x2 = minus_product(minus_product(x[k + 2], l0[k + 2], x0), l1[k + 2], x1);
        vec x3 = minus_product(minus_product(minus_product(x[k + 3], l0[k + 3], x0), l1[k + 3], x1), l2[k + 3], x2);
        for (long v = k + 1; v < height; v++) {
            vec of_x = minus_product(minus_product(x[v], l0[v], x0), l1[v], x1);
            x[v] = minus_product(minus_product(of_x, l2[v], x2), l3[v], x3);
        }
    }
    for (; k < j; k++) {
        const vec *lower = room->lower + k * height;
        vec of_x = x[k];
        for (long v = k + 1; v < height; v++)
            x[v] = minus_product(x[v], lower[v], of_x);
    }
}

/* Bring the largest element of a column from row j on to row j, in every column; returns what it is. */
static vec pivot(struct room *room, long n, long j)
{
    long height = room->height;
    vec *column = room->upper + j * height;
    for (int l = 0; l < LANES; l++) {
        const double *x = (const double *)column + l;
        long best = j;
        double most = __builtin_fabs(x[j * LANES]);
        for (long i = j + 1; i < n; i++) {
            double size = __builtin_fabs(x[i * LANES]);
            best = size > most ? i : best;
            most = size > most ? size : most;
        }
        if (best == j)
            continue;
        int *order = room->order + l * n, other = order[j];
        order[j] = order[best];
        order[best] = other;
        for (long c = 0; c < n; c++)
            swap((c < j ? room->lower : room->upper) + c * height, j, best, l);
    }
    return column[j];
}

/* LU, with partial pivoting unless A is definite; returns the largest element of U. Zeros are below U and above L, whose
 * diagonals are not there. */
static vec factorize(struct room *room, long n, int definite)
{
    long height = room->height;
    vec most = {0};
    memcpy(room->upper, room->a, n * height * sizeof(vec));
    for (int l = 0; l < LANES; l++)
        for (long i = 0; i < n; i++)
            room->order[l * n + i] = i;
    for (long j = 0; j < n; j++) {
        vec *upper = room->upper + j * height, *lower = room->lower + j * height;
        eliminate(room, upper, j);
        vec diagonal = definite ? upper[j] : pivot(room, n, j), reciprocal = 1 / diagonal;
        most = larger(magnitude(diagonal), most);
        room->pivots[j] = reciprocal;
        memset(lower, 0, (j + 1) * sizeof(vec));
        for (long v = j + 1; v < height; v++)
            lower[v] = upper[v] * reciprocal;
        for (long v = 0; v < j; v++)
            most = larger(magnitude(upper[v]), most);
        memset(upper + j, 0, (height - j) * sizeof(vec));
    }
    return most;
}
#endif

/* Whether matrices are symmetric but for rounding errors, and all their pivots positive: then they are definite, U is
 * D L^T, and no element has grown. */
static mask is_definite(const struct room *room, long n, vec largest)
{
    long height = room->height;
    vec apart = {0};
    for (long j = 0; j < n; j++)
        for (long i = 0; i < j; i++)
            apart = larger(magnitude(get(room->a + j * height, i) - get(room->a + i * height, j)), apart);
    return (apart <= n * U * largest) & (least_of(room->pivots, n) > all(0));
}

/* Subtract multiples of two columns. */
static inline void subtract_two(vec *y, const vec *one, vec of_one, const vec *other, vec of_other, long from, long to)
{
    for (long v = from; v < to; v++)
        y[v] = minus_product(minus_product(y[v], one[v], of_one), other[v], of_other);
}

/* Solutions for some columns, whose rows are in the order of the factors, in their place: two rows at a time. */
static void substitute(const struct room *room, long n, vec *columns, long count)
{
    long height = room->height, j = 0;
    for (; j < n - 1; j += 2) {
        const vec *lower = room->lower + j * height, *next = lower + height;
        vec across = get(lower, j + 1);
        for (long c = 0; c < count; c++) {
            vec *y = columns + c * height, x = get(y, j);
            subtract_two(y, lower, x, next, minus_product(get(y, j + 1), across, x), place(j + 1), height);
        }
    }
    for (j = n - 1; j >= 0; j -= 2) {
        const vec *upper = room->upper + j * height, *next = j ? upper - height : upper;
        vec reciprocal = get(room->pivots, j), of_next = j ? get(room->pivots, j - 1) : (vec){0};
        vec across = j ? get(upper, j - 1) : (vec){0};
        long end = LANES == 1 ? (j + WIDTH - 1) / WIDTH : j;
        for (long c = 0; c < count; c++) {
            vec *y = columns + c * height, x = get(y, j) * reciprocal;
            vec other = j ? minus_product(get(y, j - 1), across, x) * of_next : (vec){0};
            subtract_two(y, upper, x, next, other, 0, end);
            set(y, j, x);
            if (j)
                set(y, j - 1, other);
        }
    }
}

/* Zeros from the vector on that row n would be in. */
static void clear(vec *column, long n, long height)
{
    for (long v = place(n); v < height; v++)
        column[v] = (vec){0};
}

/* A column with its rows in the order of the factors. */
static void permute(const struct room *room, long n, const vec *from, vec *to)
{
    clear(to, n, room->height);
    for (int l = 0; l < LANES; l++)
        for (long i = 0; i < n; i++)
            ((double *)to)[i * LANES + l] = ((const double *)from)[room->order[l * n + i] * LANES + l];
}

/* b - A (x + rest) in twice the working precision, rounded once; the rest is below the rounding errors of x. */
static void residual_of(const struct room *room, long n, const vec *b, const vec *x, const vec *rest, vec *high,
                        vec *low)
{
    long height = room->height;
    memcpy(high, b, height * sizeof(vec));
    memset(low, 0, height * sizeof(vec));
    for (long j = 0; j < n; j++) {
        const vec *column = room->a + j * height;
        vec factor = -get(x, j), small = get(rest, j);
        for (long v = 0; v < height; v++) {
            low[v] = minus_product(low[v], column[v], small);
            add_products(column[v], factor, high + v, low + v);
        }
    }
    for (long v = 0; v < height; v++)
        high[v] += low[v];
}

/* A times some columns. */
static void multiply(const struct room *room, long n, const vec *x, vec *images, long count)
{
    long height = room->height;
    memset(images, 0, count * height * sizeof(vec));
    for (long j = 0; j < n; j++) {
        const vec *column = room->a + j * height;
        for (long c = 0; c < count; c++) {
            vec factor = -get(x + c * height, j), *image = images + c * height;
            for (long v = 0; v < height; v++)
                image[v] = minus_product(image[v], column[v], factor);
        }
    }
}

/* max |r| / (|A| |x| + |b|). */
static vec by_rows(struct room *room, long n, const vec *x, const vec *b, const vec *residual)
{
    long height = room->height;
    vec *sums = room->rows, most = {0};
    for (long v = 0; v < height; v++)
        sums[v] = magnitude(b[v]);
    for (long j = 0; j < n; j++) {
        vec size = magnitude(get(x, j));
        for (long v = 0; v < height; v++)
            sums[v] += magnitude(room->a[j * height + v]) * size;
    }
    for (long v = 0; v < height; v++) {
        vec size = magnitude(residual[v]);
        most = larger(chosen(size == 0, size, size / sums[v]), most);
    }
    return largest(most);
}

/* Random vectors behind the right-hand sides, in the order of the factors. */
static void take_probes(const struct batch *batch, struct room *room, vec *to)
{
    long n = batch->n;
    for (long p = 0; p < batch->probes; p++, to += room->height) {
        clear(to, n, room->height);
        for (int l = 0; l < LANES; l++)
            for (long i = 0; i < n; i++)
                ((double *)to)[i * LANES + l] = batch->vectors[p * n + room->order[l * n + i]];
    }
}

/* ||A D^-1||_2 by a step of the power method, from below. */
static vec scaled_norm(const struct batch *batch, struct room *room)
{
    long n = batch->n, height = room->height;
    vec *v = room->update, *image = room->images, sum = {0};
    memset(v, 0, height * sizeof(vec));
    for (long j = 0; j < n; j++)
        set(v, j, batch->vectors[batch->probes * n + j] / get(room->sizes, j));
    multiply(room, n, v, image, 1);
    for (long j = 0; j < n; j++) {
        vec y = inner(room->a + j * height, image, height) / get(room->sizes, j);
        sum += y * y;
    }
    return root(sum) / length(image, height);
}

/* What is known of solutions for one right-hand side; of systems that are done it stays as it is. */
struct told {
    vec history[MOST_UPDATES + 1], updates, left, noise, floor, residual, backward, forward;
    mask goes_on, good;
};

/* Add to solutions what their residuals say that they lack, and measure what is left then. */
static void update(const struct batch *batch, struct room *room, const struct known *known, vec through, vec *x,
                   const vec *b, int step, struct told *told)
{
    const struct limits *limits = batch->limits;
    long n = batch->n, height = room->height;
    vec *before = room->high, *after = room->low, *change = room->update, *rest = room->rest, *image = room->images;
    mask where = told->goes_on;
    residual_of(room, n, b, x, rest, image, image + height);
    for (long v = 0; v < height; v++)
        before[v] = chosen(where, image[v], before[v]);
    permute(room, n, before, change);
    substitute(room, n, change, 1);
    vec of_x = known->infinity_norm * most_of(x, height) + most_of(b, height);
    vec first = most_of(before, height) / of_x;
    for (long v = 0; v < height; v++) {
        change[v] = chosen(where, change[v], (vec){0});
        vec lacks = rest[v] + change[v], sum = x[v] + lacks, added = sum - x[v];
        rest[v] = (x[v] - (sum - added)) + (lacks - added);
        x[v] = sum;
    }
    multiply(room, n, change, image, 1);
    for (long v = 0; v < height; v++)
        after[v] = chosen(where, before[v] - image[v], after[v]);
    vec left = length(after, height), of_before = length(before, height);
    /* Doubled products (doubled.h), by the inequality of Cauchy and Schwarz; b is one more. */
    double doubled = (n + 2) * U * (n + 2) * U;
    vec floor = doubled * (known->norm * length(x, height) + length(b, height));
    /* Rounding of the residual to one number, of A times the change, and of their difference. */
    vec noise = floor + (n + 2) * U * (of_before + known->norm * length(change, height));
    mask converges = left <= limits->max_rate * of_before + noise;
    of_x = known->infinity_norm * most_of(x, height) + most_of(b, height);
    if (step == 0)
        told->history[0] = first;
    for (int later = step + 1; later <= MOST_UPDATES; later++)
        told->history[later] = chosen(where, most_of(after, height) / of_x, told->history[later]);
    told->updates = chosen(where, all(step + 1), told->updates);
    told->left = chosen(where, left, told->left);
    told->noise = chosen(where, noise, told->noise);
    told->floor = chosen(where, floor, told->floor);
    told->good &= ~(where & ~converges);
    vec wrong = through * (left + noise) / scaled_length(room->sizes, x, height);
    told->goes_on &= converges & (wrong > all(limits->digits)) & (left > floor);
}

/* Refine one solution, and measure what it is. */
static struct told refine(const struct batch *batch, struct room *room, const struct known *known, vec through,
                          mask solves, vec *x, const vec *b)
{
    const struct limits *limits = batch->limits;
    long n = batch->n, height = room->height;
    struct told told = {.goes_on = solves & known->moderate, .good = solves & known->moderate};
    memset(room->high, 0, 2 * height * sizeof(vec));
    memset(room->rest, 0, height * sizeof(vec));
    for (int step = 0; step < MOST_UPDATES && (step == 0 || some(told.goes_on)); step++)
        update(batch, room, known, through, x, b, step, &told);
    vec *lost = room->rest + height, *images = room->images, *of_x = room->low;
    memset(lost, 0, height * sizeof(vec));
    if (batch->x_is_float)
        for (long i = 0; i < height * WIDTH; i++) {
            double given = ((double *)x)[i];
            ((double *)lost)[i] = given - (float)given;
        }
    multiply(room, n, room->rest, images, batch->x_is_float ? 2 : 1);
    vec square = {0}, most = {0};
    for (long v = 0; v < height; v++) {
        of_x[v] += images[v];
        vec of_given = batch->x_is_float ? of_x[v] + images[height + v] : of_x[v];
        square += of_given * of_given;
        most = larger(magnitude(of_x[v]), most);
    }
    vec of_b = length(b, height), size = scaled_length(room->sizes, x, height);
    vec error = largest(most) / (known->infinity_norm * most_of(x, height) + most_of(b, height));
    if (!every(known->alike))
        error = chosen(known->alike, error, by_rows(room, n, x, b, of_x));
    vec wrong = through * (told.left + told.noise) / size, of_rest = scaled_length(room->sizes, room->rest, height) / size;
    vec rounded = scaled_length(room->sizes, lost, height) / size, sum = wrong + of_rest;
    told.forward = chosen(sum < 1, limits->computed * (sum + rounded) / (1 - sum), all(__builtin_inf()));
    told.backward = error + rounded + of_rest;
    told.history[MOST_UPDATES] = error;
    told.residual = root(total(square)) / of_b;
    told.good &= (of_b >= all(1 / limits->moderate)) & (of_b <= all(limits->moderate)) &
                 ((wrong <= all(limits->digits)) | (told.left <= told.floor));
    return told;
}

static void give(const struct batch *batch, long first, long column, const vec *x, vec forward)
{
    long n = batch->n, k = batch->k;
    for (int l = 0; l < LANES && first + l < batch->count; l++) {
        for (long i = 0; i < n; i++) {
            double found = ((const double *)x)[i * LANES + l];
            batch->x[((first + l) * n + i) * k + column] = batch->x_is_float ? (float)found : found;
        }
        batch->known[(FORWARD_ERRORS + column) * batch->count + first + l] = forward[l];
    }
}

static void solve_group(const struct batch *batch, long first, struct room *room)
{
    const struct limits *limits = batch->limits;
    long n = batch->n, k = batch->k, height = room->height;
    memset(room->sizes, 0, height * sizeof(vec));
    take(batch, first, room);
    struct known known = measure(room, n, limits);
    vec growth = factorize(room, n, batch->definite) / known.largest, square = {0};
    if (batch->definite) {
        growth = all(1);
        known.moderate &= is_definite(room, n, known.largest);
    }
    /* Right-hand sides as they are, then in the order of the factors, then random vectors. */
    vec *sides = room->sides, *x = sides + k * height, *z = x + k * height;
    for (long c = 0; c < k; c++) {
        take_side(batch, first, c, sides + c * height, height);
        permute(room, n, sides + c * height, x + c * height);
    }
    take_probes(batch, room, z);
    substitute(room, n, x, k + batch->probes);
    for (long p = 0; p < batch->probes; p++) {
        vec of_one = scaled_length(room->sizes, z + p * height, height);
        square += of_one * of_one;
    }
    /* Solves err by so much at most: the true norm of the inverse is larger by 1 / (1 - rate). */
    vec estimate = root(square), inverse_norm = limits->margin * estimate;
    vec rate = limits->rounding * U * known.norm * inverse_norm / known.smallest;
    vec condition = larger(scaled_norm(batch, room), all(1)) * estimate; /* columns have norm 1 */
    struct told worst = {.good = rate <= all(limits->max_rate)};
    for (long c = 0; c < k; c++) {
        vec *found = x + c * height;
        struct told told =
            refine(batch, room, &known, inverse_norm / (1 - rate), worst.good, found, sides + c * height);
        give(batch, first, c, found, told.forward);
        for (int step = 0; step <= MOST_UPDATES; step++)
            worst.history[step] = larger(told.history[step], worst.history[step]);
        worst.updates = larger(told.updates, worst.updates);
        worst.residual = larger(told.residual, worst.residual);
        worst.backward = larger(told.backward, worst.backward);
        worst.good &= told.good;
    }
    condition = larger(condition, all(1));
    for (int l = 0; l < LANES && first + l < batch->count; l++) {
        double found[FORWARD_ERRORS] = {worst.good[l] ? 0 : 1, worst.residual[l], worst.backward[l], condition[l],
                                        growth[l], worst.updates[l]};
        for (int step = 0; step <= MOST_UPDATES; step++)
            found[HISTORY + step] = worst.history[step][l];
        for (int name = 0; name < FORWARD_ERRORS; name++)
            batch->known[name * batch->count + first + l] = found[name];
    }
}

/* Room for one group; NULL where there is no memory. */
static void *make_room(struct room *room, const struct batch *batch)
{
    long n = batch->n, sides = 2 * batch->k + batch->probes;
    /* Columns an odd number of vectors apart do not meet in a cache. */
    long height = LANES == 1 ? ((n + WIDTH - 1) / WIDTH | 1) : n;
    long columns = 3 * n + MORE + 3 + sides + 2 + 1 + 2 + 2;
    size_t vectors = columns * height * sizeof(vec), size = vectors + LANES * n * sizeof(int);
    vec *next = aligned_alloc(64, (size + 63) / 64 * 64);
    if (next == NULL)
        return NULL;
    room->height = height;
    room->order = (int *)((char *)next + vectors);
    vec **parts[] = {&room->a, &room->lower, &room->upper, &room->pivots, &room->sizes, &room->rows,
                     &room->sides, &room->high, &room->low, &room->update, &room->rest, &room->images};
    long counts[] = {n, n, n + MORE, 1, 1, 1, sides, 1, 1, 1, 2, 2};
    vec *start = next;
    for (unsigned i = 0; i < sizeof(parts) / sizeof(*parts); i++) {
        *parts[i] = next;
        next += counts[i] * height;
    }
    return start;
}

static void *solve_part(void *given)
{
    struct part *part = given;
    const struct batch *batch = part->batch;
    struct room room;
    
    void *memory = make_room(&room, batch);
    part->failed = memory == NULL;
    if (part->failed)
        return NULL;
    for (long first = part->first; first < part->last; first += LANES)
        solve_group(batch, first, &room);
    free(memory);
    return NULL;
}

/* Solve a batch of systems with so many threads; 0, or 1 where there is no memory.
 *
 * Each thread has whole groups: no number depends on how many there are. */
int solve_squares(const struct batch *batch, long threads)
{
    struct part parts[MOST_THREADS];
    int failed = 0;
    long groups = (batch->count + LANES - 1) / LANES;
    threads = threads < groups ? threads : groups;
    threads = threads < MOST_THREADS ? threads : MOST_THREADS;
    for (long t = 0; t < threads; t++) {
        long last = (t + 1) * groups / threads * LANES;
        parts[t] = (struct part){batch, t * groups / threads * LANES, last < batch->count ? last : batch->count, 0};
    }
    side_by_side(solve_part, parts, sizeof(*parts), threads);
    for (long t = 0; t < threads; t++)
        failed |= parts[t].failed;
    return failed;
}
