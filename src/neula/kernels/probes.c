/* What random vectors see of the errors of QR factorizations, whose R is made to have no negative diagonal element before. */
#include <math.h>
#include <stdlib.h>

#include "probes.h"
#include "threads.h"

#define HELD 65536 /* elements of some rows of Q that stay in the cache */
#define HEIGHT 16  /* of these, or a multiple: whole lines of columns */
#define LINE 64    /* bytes that come from memory at once */

/* The rows of a thread, and its sums. */
typedef struct {
    const Factorizations *of;
    long member, first, last, height, reflects; /* whether a sign changes */
    double *signs, *rows, found[FOUND];
    Column *columns;
} Part;

/* Elements of a column from the memory, which expects that of rows only, while others are dealt with. */
INLINED void fetch(const Matrices *q, long member, long first, long count, long j)
{
    long some = LINE / (q->single ? sizeof(float) : sizeof(double));
    for (long i = 0; i < count; i += some)
        __builtin_prefetch(place_of(q, member, first + i, j), 1);
}

/* Change the signs of columns of some rows of Q, in place, and hold these rows in double precision, in the same order. */
INLINED void hold(const Matrices *q, const Part *p, long first, long count)
{
    long n = p->of->n, next = first + 2 * p->height <= p->last ? first + p->height : first;
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
            fetch(q, p->member, next, p->height, j);
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

/* Make the diagonal of R nonnegative, by signs of its rows; 0 if it is. */
INLINED int reflect(const Matrices *r, long member, long n, double *signs)
{
    int reflects = 0;
    for (long i = 0; i < n; i++) {
        signs[i] = signbit(element(r, member, i, i)) ? -1.0 : 1.0;
        reflects |= signs[i] < 0.0;
    }
    for (long j = 0; reflects && j < n; j++)
#pragma omp simd
        for (long i = 0; i <= j; i++)
            set(r, member, i, j, signs[i] * element(r, member, i, j));
    return reflects;
}

INLINED void look_at(Part *p, Matrices r, long single, double *extremes)
{
    r.single = single;
    p->reflects = reflect(&r, p->member, p->of->n, p->signs);
    prepare(&r, p->member, p->of->n, p->of->g, p->columns, p->rows, extremes);
}

static void measure_one(const Factorizations *of, long member, Part *parts, long count)
{
    double extremes[2];
    Matrices by_columns = of->r;
    by_columns.row = 1;
    parts[0].member = member;
    if (of->r.single && of->r.row == 1)
        look_at(parts, by_columns, 1, extremes);
    else if (of->r.row == 1)
        look_at(parts, by_columns, 0, extremes);
    else
        look_at(parts, of->r, of->r.single, extremes);
    for (long t = 0; t < count; t++) {
        parts[t].member = member, parts[t].reflects = parts[0].reflects;
        memset(parts[t].found, 0, sizeof(parts[t].found));
        if (t > 0)
            memcpy(parts[t].columns, parts[0].columns, of->n * sizeof(Column));
    }
    side_by_side(work, parts, sizeof(*parts), count);
    for (long t = 1; t < count; t++)
        add_sums(of->n, parts[t].found, parts[t].columns, parts[0].found, parts[0].columns);
    parts[0].found[3] = extremes[0], parts[0].found[4] = extremes[1];
    write_down(parts[0].found, of->n, of->g, parts[0].columns, of->numbers + member, of->count);
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
        parts[t] = (Part){.of = of, .height = height, .signs = room, .columns = (Column *)own, .rows = own + of_columns};
        parts[t].first = t ? parts[t - 1].last : 0;
        parts[t].last = t + 1 < count ? (t + 1) * m / count / height * height : m;
    }
    for (long member = 0; member < of->count; member++)
        measure_one(of, member, parts, count);
    free(room);
    return 1;
}
