/* Products with a matrix whose rows follow one another and with its transpose, in one pass over it: what it makes of vectors,
 * or what that leaves of right-hand sides, and what the transpose makes of this while the rows are in the nearest cache.
 * Elements are float or double, sums double.
 */
#include <stdlib.h>
#include <string.h>

#include "threads.h"
#include "vectors.h"

#define INLINE static inline __attribute__((always_inline)) /* loops by what is known where they are called */
#define TOGETHER 2 /* vectors that elements are read for */
#define SUMMED 256 /* rows whose multiples are added before they are added to others */

/* In one_pass_host.py. Where x is NULL the right-hand sides themselves are multiplied by the transpose. */
struct pass {
    const char *a;
    long single, m, n, apart; /* whether it is of float; numbers from a row to the next */
    long k;
    const double *x, *b;  /* (k, n), (k, m), or NULL */
    double *image, *back; /* (k, m), (k, n), or NULL */
    long threads;
};

/* What a thread does with some rows, for some of the vectors. */
struct part {
    const struct pass *of;
    long first, last, wide; /* wide: n, up to whole vectors of registers */
    const double *x;        /* (k, wide), ends with zeros */
    double *sums, *totals;  /* (TOGETHER, wide), (k, wide) */
};

/* Elements j to j + WIDTH of a row, zeros behind the last one. */
INLINE vec part_of(const char *row, long single, long j, long n)
{
    if (j + WIDTH <= n)
        return single ? vec_of_floats((const float *)row + j) : vec_at((const double *)row + j);
    vec found = {0};
    for (int l = 0; j + l < n; l++)
        found[l] = single ? ((const float *)row)[j + l] : ((const double *)row)[j + l];
    return found;
}

/* Products of WIDTH rows with some vectors. */
INLINE void multiply(const char **rows, long single, long n, const double *x, long wide, int count, vec *found)
{
    vec sums[TOGETHER][WIDTH] = {0};
    for (long j = 0; j < wide; j += WIDTH)
        for (int r = 0; r < WIDTH; r++) {
            vec of_a = part_of(rows[r], single, j, n);
            for (int c = 0; c < count; c++)
                sums[c][r] = plus_product(sums[c][r], of_a, vec_at(x + c * wide + j));
        }
    for (int c = 0; c < count; c++)
        found[c] = sums_of(sums[c]);
}

/* Multiples of WIDTH rows, added to what is there. */
INLINE void add_multiples(const char **rows, long single, long n, const vec *factors, long wide, int count, double *sums)
{
    for (long j = 0; j < wide; j += WIDTH) {
        vec found[TOGETHER];
        for (int c = 0; c < count; c++)
            found[c] = vec_at(sums + c * wide + j);
        for (int r = 0; r < WIDTH; r++) {
            vec of_a = part_of(rows[r], single, j, n);
            for (int c = 0; c < count; c++)
                found[c] = plus_product(found[c], of_a, all(factors[c][r]));
        }
        for (int c = 0; c < count; c++)
            vec_put(sums + c * wide + j, found[c]);
    }
}

/* WIDTH numbers of a column, or as many as there are, and zeros. */
INLINE vec numbers(const double *from, long count)
{
    if (count >= WIDTH)
        return vec_at(from);
    vec found = {0};
    for (int l = 0; l < count; l++)
        found[l] = from[l];
    return found;
}

static inline void put_numbers(double *to, vec found, long count)
{
    for (int l = 0; l < count && l < WIDTH; l++)
        to[l] = found[l];
}

/* Some rows for vectors c to c + count. */
INLINE void take_rows(const struct part *part, long first, long last, long single, long c, int count)
{
    const struct pass *of = part->of;
    long size = of->apart * (single ? sizeof(float) : sizeof(double));
    for (long i = first; i < last; i += WIDTH) {
        const char *rows[WIDTH];
        vec found[TOGETHER] = {0};
        for (int r = 0; r < WIDTH; r++) /* behind the last one itself again, times zero */
            rows[r] = of->a + (i + r < last ? i + r : last - 1) * size;
        if (of->x)
            multiply(rows, single, of->n, part->x + c * part->wide, part->wide, count, found);
        for (int d = 0; d < count; d++) {
            if (of->b) {
                vec right = numbers(of->b + (c + d) * of->m + i, last - i);
                found[d] = of->x ? right - found[d] : right;
            }
            for (int r = last - i; r < WIDTH; r++)
                found[d][r] = 0.0;
            if (of->image)
                put_numbers(of->image + (c + d) * of->m + i, found[d], last - i);
        }
        if (of->back)
            add_multiples(rows, single, of->n, found, part->wide, count, part->sums);
    }
}

INLINE void take_block(const struct part *part, long first, long last, long single, long c, int count)
{
    double *totals = part->totals + c * part->wide;
    memset(part->sums, 0, count * part->wide * sizeof(double));
    take_rows(part, first, last, single, c, count);
    for (long j = 0; part->of->back && j < count * part->wide; j++)
        totals[j] += part->sums[j];
}

INLINE void take_part(const struct part *part, long single)
{
    for (long i = part->first; i < part->last; i += SUMMED) {
        long last = i + SUMMED < part->last ? i + SUMMED : part->last, c = 0;
        for (; c + TOGETHER <= part->of->k; c += TOGETHER)
            take_block(part, i, last, single, c, TOGETHER);
        for (; c < part->of->k; c++)
            take_block(part, i, last, single, c, 1);
    }
}

static void *work(void *given)
{
    const struct part *part = given;
    if (part->of->single)
        take_part(part, 1);
    else
        take_part(part, 0);
    return NULL;
}

/* 0 where there is too little memory. */
int one_pass(const struct pass *of)
{
    long count = of->threads < MOST_THREADS ? of->threads : MOST_THREADS, wide = (of->n + WIDTH - 1) / WIDTH * WIDTH;
    long each = (TOGETHER + of->k) * wide, all_of_x = of->k * wide;
    double *room = calloc(all_of_x + count * each, sizeof(double));
    struct part parts[MOST_THREADS];
    if (room == NULL)
        return 0;
    for (long c = 0; of->x && c < of->k; c++)
        memcpy(room + c * wide, of->x + c * of->n, of->n * sizeof(double));
    for (long t = 0; t < count; t++) {
        double *own = room + all_of_x + t * each;
        parts[t] = (struct part){of, t ? parts[t - 1].last : 0, of->m, wide, room, own, own + TOGETHER * wide};
        if (t + 1 < count)
            parts[t].last = (t + 1) * of->m / count / WIDTH * WIDTH;
    }
    side_by_side(work, parts, sizeof(*parts), count);
    for (long c = 0; of->back && c < of->k; c++)
        for (long j = 0; j < of->n; j++) {
            double total = 0.0;
            for (long t = 0; t < count; t++)
                total += parts[t].totals[c * wide + j];
            of->back[c * of->n + j] = total;
        }
    free(room);
    return 1;
}
