/* What random vectors see of the errors of QR factorizations, whose R is made to have no negative diagonal element before. */
#include <math.h>
#include <stdlib.h>

#include "probes.h"
#include "threads.h"

#define HELD 65536 /* elements of some rows of Q that stay in the cache */
#define HEIGHT 16  /* of these, or a multiple: whole lines of columns */

/* What a thread does: some columns of R, then some rows of A and Q; and its sums. */
typedef struct {
    const Factorizations *of;
    long member, own, count, first, last, height, reflects; /* its number, that of all, whether a sign changes */
    double *signs, *rows, found[FOUND];
    Column *columns, *of_all;
} Part;

/* Change the signs of columns of some rows of Q, in place, and hold these rows in double precision, in the same order. */
INLINED void hold(const Matrices *q, const Part *p, long first, long count)
{
    long n = p->of->n;
    if (q->column == 1)
        for (long i = 0; i < count; i++) {
            double *to = p->rows + i * n;
#pragma omp simd
            for (long j = 0; j < n; j++)
                to[j] = p->signs[j] * element(q, p->member, first + i, j);
            if (p->reflects)
#pragma omp simd
                for (long j = 0; j < n; j++)
                    set(q, p->member, first + i, j, to[j]);
        }
    else
        for (long j = 0; j < n; j++) {
            double *to = p->rows + j * p->height;
#pragma omp simd
            for (long i = 0; i < count; i++)
                to[i] = p->signs[j] * element(q, p->member, first + i, j);
            if (p->signs[j] < 0.0)
#pragma omp simd
                for (long i = 0; i < count; i++)
                    set(q, p->member, first + i, j, to[i]);
        }
}

/* They come by value: what is known of their elements makes other loops. */
INLINED void measure_part(Part *p, Matrices a, Matrices q, long single)
{
    long n = p->of->n, by_rows = q.column == 1;
    Matrices held = {p->rows, 0, 0, by_rows ? n : 1, by_rows ? 1 : p->height};
    a.single = q.single = single;
    for (long first = p->first; first < p->last; first += p->height) {
        long count = p->last - first < p->height ? p->last - first : p->height;
        Matrices rows = from_row(a, p->member, first);
        if (by_rows) {
            q.column = 1;
            hold(&q, p, first, count);
        } else if (q.row == 1) {
            q.row = 1;
            hold(&q, p, first, count);
        } else
            hold(&q, p, first, count);
        measure_rows(&rows, &held, 0, 0, count, n, p->columns, p->found);
    }
}

static void *work(void *given)
{
    Part *p = given;
    if (p->of->a.single)
        measure_part(p, p->of->a, p->of->q, 1);
    else
        measure_part(p, p->of->a, p->of->q, 0);
    return NULL;
}

/* Of a diagonal of R that is to be nonnegative; 0 if it is. */
static long find_signs(const Factorizations *of, long member, double *signs)
{
    long reflects = 0;
    for (long i = 0; i < of->n; i++) {
        signs[i] = signbit(element(&of->r, member, i, i)) ? -1.0 : 1.0;
        reflects |= signs[i] < 0.0;
    }
    return reflects;
}

INLINED void prepare_part(Part *p, Matrices r, long single)
{
    r.single = single;
    for (long first = p->own * TOGETHER; p->reflects && first < p->of->n; first += p->count * TOGETHER)
        for (long j = first; j < p->of->n && j < first + TOGETHER; j++)
#pragma omp simd
            for (long i = 0; i <= j; i++)
                set(&r, p->member, i, j, p->signs[i] * element(&r, p->member, i, j));
    prepare(&r, p->member, p->of->n, p->own, p->count, p->of->g, p->of_all, p->rows, p->found + 3);
}

static void *look_at_r(void *given)
{
    Part *p = given;
    Matrices r = p->of->r;
    if (r.row != 1) {
        prepare_part(p, r, r.single);
        return NULL;
    }
    r.row = 1;
    if (r.single)
        prepare_part(p, r, 1);
    else
        prepare_part(p, r, 0);
    return NULL;
}

static void measure_one(const Factorizations *of, long member, Part *parts, long count)
{
    double *extremes = parts[0].found + 3;
    long n = of->n, reflects = find_signs(of, member, parts[0].signs);
    memset(parts[0].columns, 0, n * sizeof(Column));
    for (long t = 0; t < count; t++) {
        parts[t].member = member, parts[t].reflects = reflects;
        memset(parts[t].found, 0, sizeof(parts[t].found));
    }
    side_by_side(look_at_r, parts, sizeof(*parts), count);
    for (long t = 0; t < count; t++)
        add_to_columns(n, parts[t].rows, parts[0].columns);
    for (long t = 1; t < count; t++) {
        double *of_part = parts[t].found + 3;
        extremes[0] = of_part[0] >= extremes[0] ? extremes[0] : of_part[0];
        extremes[1] = of_part[1] <= extremes[1] ? extremes[1] : of_part[1];
        of_part[0] = of_part[1] = 0.0;
        memcpy(parts[t].columns, parts[0].columns, n * sizeof(Column));
    }
    side_by_side(work, parts, sizeof(*parts), count);
    for (long t = 1; t < count; t++)
        add_sums(n, parts[t].found, parts[t].columns, parts[0].found, parts[0].columns);
    write_down(parts[0].found, n, of->g, parts[0].columns, of->numbers + member, of->count);
}

/* 0 where there is too little memory. */
int probe_errors(const Factorizations *of)
{
    long m = of->m, n = of->n, count = of->threads < MOST_THREADS ? of->threads : MOST_THREADS;
    long most = HELD / n < SUMMED ? HELD / n & -HEIGHT : SUMMED, height = most > HEIGHT ? most : HEIGHT;
    long of_columns = n * (sizeof(Column) / sizeof(double)), each = height * n + of_columns;
    double *room = malloc((n + count * each) * sizeof(double));
    Part parts[MOST_THREADS];
    if (room == NULL)
        return 0;
    for (long t = 0; t < count; t++) {
        double *own = room + n + t * each;
        parts[t] = (Part){.of = of, .own = t, .count = count, .height = height, .signs = room, .rows = own + of_columns};
        parts[t].columns = (Column *)own, parts[t].of_all = parts[0].columns;
        parts[t].first = t ? parts[t - 1].last : 0;
        parts[t].last = t + 1 < count ? (t + 1) * m / count / height * height : m;
    }
    for (long member = 0; member < of->count; member++)
        measure_one(of, member, parts, count);
    free(room);
    return 1;
}
