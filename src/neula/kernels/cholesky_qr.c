/* QR factorizations by the Cholesky factor of the Gram matrix, as often as it takes, with what random vectors see of their
 * errors: some rows at a time, from the memory to the cache and back once a pass, shared by some threads.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "probes.h"
#include "rows.h"
#include "threads.h"

#define MOST_LOST 0x1p-7 /* of the orthogonality by a pass without a shift */
#define LITTLE_LOST 0x1p-28 /* where inverses of blocks are good enough: up to condition numbers of some thousand */
#define MOST_PASSES 4 /* before the last one: as many do for condition numbers up to 1 / UNIT */
#define LONG 30 /* sums of its square in products err by twice as much as short ones */

/* What a pass does with some rows: those of A, or of Q. */
typedef struct {
    int of_q, solve, gram, measure; /* rows of Q; for X with X R = rows; add X^T X; what random vectors see */
    int refine;                     /* solutions of blocks, whose inverses err by their condition numbers */
} Pass;

/* The rows of a thread, and its sums; `columns` are those of padded matrices. */
typedef struct {
    const Factorizations *of;
    const Pass *pass;
    long member, columns, first, last;
    const double *r, *inverses;
    double *rows, *gram, found[FOUND];
    Column *of_columns;
} Part;

/* How many rows are taken at a time. */
static inline long height_of(long m, long columns)
{
    long most = NEAR / columns > PADDED ? NEAR / columns & -PADDED : PADDED, all_of_them = (m + PADDED - 1) & -PADDED;
    return most < all_of_them ? most : all_of_them;
}

/* Rows padded with zeros, the last of them to whole tiles. */
static inline void load(const Matrices *x, long member, long first, long count, long n, long columns, double *to)
{
    for (long i = 0; i < count; i++)
        for (long j = 0; j < n; j++)
            to[i * columns + j] = element(x, member, first + i, j);
    for (long i = count; i % TALL; i++)
        memset(to + i * columns, 0, columns * sizeof(double));
}

static inline void store(const double *from, long columns, const Matrices *x, long member, long first, long count, long n)
{
    for (long i = 0; i < count; i++)
        for (long j = 0; j < n; j++)
            set(x, member, first + i, j, from[i * columns + j]);
}

/* Sums of multiples of rows of a matrix, for some rows of factors. */
static inline void sum_tile(
    vec sums[TALL][WIDE], const double *factors, const double *rows, long columns, long count, int wide)
{
    for (int s = 0; s < TALL; s++)
        for (int t = 0; t < wide; t++)
            sums[s][t] = all(0.0);
    for (long k = 0; k < count; k++)
        for (int s = 0; s < TALL; s++)
            for (int t = 0; t < wide; t++)
                sums[s][t] = plus_product(
                    sums[s][t], all(factors[s * columns + k]), vec_at(rows + k * columns + t * WIDTH));
}

static inline void put_tile(double *to, long columns, vec tile[TALL][WIDE], int wide)
{
    for (int s = 0; s < TALL; s++)
        for (int t = 0; t < wide; t++)
            vec_put(to + s * columns + t * WIDTH, tile[s][t]);
}

/* Columns from j on of X with X R = rows, in their place; those before are known. */
static inline void solve_tile(
    double *rows, long columns, const double *r, const double *inverses, long j, int wide, int refine)
{
    vec sums[TALL][WIDE], known[TALL][WIDE], found[TALL][WIDE];
    double *of_tile = rows + j;
    const double *inverse = inverses + j * columns + j;
    sum_tile(sums, rows, r + j, columns, j, wide);
    for (int s = 0; s < TALL; s++)
        for (int t = 0; t < wide; t++)
            known[s][t] = vec_at(of_tile + s * columns + t * WIDTH) - sums[s][t];
    put_tile(of_tile, columns, known, wide);
    sum_tile(found, of_tile, inverse, columns, wide * WIDTH, wide);
    if (refine) {
        put_tile(of_tile, columns, found, wide);
        sum_tile(sums, of_tile, r + j * columns + j, columns, wide * WIDTH, wide);
        for (int s = 0; s < TALL; s++)
            for (int t = 0; t < wide; t++)
                known[s][t] -= sums[s][t];
        put_tile(of_tile, columns, known, wide);
        sum_tile(sums, of_tile, inverse, columns, wide * WIDTH, wide);
        for (int s = 0; s < TALL; s++)
            for (int t = 0; t < wide; t++)
                found[s][t] += sums[s][t];
    }
    put_tile(of_tile, columns, found, wide);
}

static inline void solve(double *rows, long count, long columns, const double *r, const double *inverses, int refine)
{
    long j = 0;
    for (; j + WIDE * WIDTH <= columns; j += WIDE * WIDTH)
        for (long i = 0; i < count; i += TALL)
            solve_tile(rows + i * columns, columns, r, inverses, j, WIDE, refine);
    if (j < columns)
        for (long i = 0; i < count; i += TALL)
            solve_tile(rows + i * columns, columns, r, inverses, j, 1, refine);
}

/* Inverses of the diagonal blocks of R that are solved with at once: the whole one would err by the condition of R. */
static inline void invert_blocks(const double *r, long n, long columns, double *inverses)
{
    memset(inverses, 0, columns * columns * sizeof(double));
    for (long i = n - 1; i >= 0; i--) {
        long start = i & -(WIDE * WIDTH), end = start + WIDE * WIDTH < n ? start + WIDE * WIDTH : n;
        double *row = inverses + i * columns;
        row[i] = 1.0;
        for (long k = i + 1; k < end; k++)
            for (long j = k; j < end; j++)
                row[j] -= r[i * columns + k] * inverses[k * columns + j];
        for (long j = i; j < end; j++)
            row[j] /= r[i * columns + i];
    }
}

/* Matrices come by value: what is known of their elements makes other loops. */
static inline void pass_over(const Part *p, Matrices a, Matrices q, long single, double *found)
{
    long n = p->of->n, columns = p->columns, height = height_of(p->of->m, columns);
    a.single = q.single = single, q.column = 1;
    for (long first = p->first; first < p->last; first += height) {
        long count = p->last - first < height ? p->last - first : height, tiled = (count + TALL - 1) & -TALL;
        Matrices rows = p->pass->of_q ? q : a;
        if (rows.column == 1) {
            rows.column = 1;
            load(&rows, p->member, first, count, n, columns, p->rows);
        } else
            load(&rows, p->member, first, count, n, columns, p->rows);
        if (p->pass->solve) {
            solve(p->rows, tiled, columns, p->r, p->inverses, p->pass->refine);
            store(p->rows, columns, &q, p->member, first, count, n);
        }
        if (p->pass->gram)
            add_gram(p->rows, tiled, columns, p->gram, 0);
        if (p->pass->measure)
            measure_rows(&a, &q, p->member, first, first + count, n, p->of_columns, found);
    }
}

static void *work(void *given)
{
    Part *p = given;
    if (p->of->a.single)
        pass_over(p, p->of->a, p->of->q, 1, p->found);
    else
        pass_over(p, p->of->a, p->of->q, 0, p->found);
    return NULL;
}

/* What is to be had for a matrix of each shape: the sums of each part, R and inverses of its diagonal blocks. */
typedef struct {
    long n, columns, count; /* of parts */
    double *r, *before, *inverses;
    Part parts[MOST_THREADS];
    void *room;
} Room;

static int allocate(Room *room, const Factorizations *of)
{
    long n = of->n, threads = of->threads < MOST_THREADS ? of->threads : MOST_THREADS;
    long columns = (n + PADDED - 1) & -PADDED, square = columns * columns, of_rows = height_of(of->m, columns) * columns;
    long of_columns = n * (sizeof(Column) / sizeof(double)), each = square + of_rows + of_columns;
    double *next = aligned_alloc(64, ((3 * square + threads * each) * sizeof(double) + 63) & -64);
    if (next == NULL)
        return 0;
    *room = (Room){.n = n, .columns = columns, .count = threads, .room = next};
    room->r = next, room->before = next + square, room->inverses = next + 2 * square;
    next += 3 * square;
    memset(next, 0, threads * each * sizeof(double));
    for (long t = 0; t < threads; t++, next += each)
        room->parts[t] = (Part){
            .of = of, .columns = columns, .r = room->r, .inverses = room->inverses,
            .rows = next, .gram = next + of_rows, .of_columns = (Column *)(next + of_rows + square),
        };
    return 1;
}

/* A pass over all rows, and the sums of all parts in the first one: in the same order, whatever thread comes first. */
static void run(Room *room, const Pass *pass)
{
    Part *parts = room->parts;
    long square = room->columns * room->columns;
    for (long t = 0; t < room->count; t++) {
        parts[t].pass = pass;
        memset(parts[t].gram, 0, square * sizeof(double)), memset(parts[t].found, 0, sizeof(parts[t].found));
        if (t > 0)
            memcpy(parts[t].of_columns, parts[0].of_columns, room->n * sizeof(Column));
    }
    side_by_side(work, parts, sizeof(*parts), room->count);
    for (long t = 1; t < room->count; t++) {
        for (long i = 0; pass->gram && i < square; i++)
            parts[0].gram[i] += parts[t].gram[i];
        if (pass->measure)
            add_sums(room->n, parts[t].found, parts[t].of_columns, parts[0].found, parts[0].of_columns);
    }
}

/* The factor of the Gram matrix that was found, with a shift, and zeros below the diagonal; 0 where there is none. */
static int find_r(Room *room, double shift)
{
    long columns = room->columns;
    memcpy(room->r, room->parts[0].gram, columns * columns * sizeof(double));
    if (!cholesky(room->r, room->n, columns, shift))
        return 0;
    for (long i = 1; i < room->n; i++)
        memset(room->r + i * columns, 0, i * sizeof(double));
    invert_blocks(room->r, room->n, room->columns, room->inverses);
    return 1;
}

/* ||I - Q^T Q||_F / sqrt(n) after one pass, estimated: R^-T E R^-1 for rounding errors E of the Gram matrix, of which
 * those of an element are some u, more for long sums, times two norms of columns. Random vectors show ||D R^-1||_F.
 */
static double lost_by(const Room *room, const Factorizations *of)
{
    long n = room->n, columns = room->columns;
    double square = 0.0, *y = room->parts[0].rows;
    for (long j = 0; j < n; j++) {
        double of_column = 0.0;
        for (long i = 0; i <= j; i++)
            of_column += room->r[i * columns + j] * room->r[i * columns + j];
        for (int p = 0; p < PROBES; p++)
            y[j * PROBES + p] = sqrt(of_column) * of->g[j * PROBES + p];
    }
    for (long i = 0; i < n; i++) {
        double *own = y + i * PROBES, *row = room->r + i * columns;
        for (int p = 0; p < PROBES; p++)
            own[p] /= row[i], square += own[p] * own[p] / PROBES;
        for (long j = i + 1; j < n; j++)
            for (int p = 0; p < PROBES; p++)
                y[j * PROBES + p] -= row[j] * own[p];
    }
    memset(y, 0, n * PROBES * sizeof(double));
    return UNIT * (1.0 + sqrt(of->m) / LONG) * square / sqrt(n);
}

/* What the factors so far come to, the last one times those before: `before`, of as many passes, in its place. */
static void join_r(Room *room, int passes)
{
    long n = room->n, columns = room->columns;
    double *row = room->parts[0].rows;
    if (passes == 0) {
        memcpy(room->before, room->r, columns * columns * sizeof(double));
        return;
    }
    for (long i = 0; i < n; i++) { /* of which later rows are not read again */
        memset(row, 0, columns * sizeof(double));
        add_rows(row, room->r + i * columns, 1, 1.0, room->before, columns, i, n, i, 1);
        memcpy(room->before + i * columns, row, columns * sizeof(double));
    }
}

static double least_pivot(const Room *room)
{
    double least = INFINITY;
    for (long i = 0; i < room->n; i++)
        least = fmin(least, room->r[i * room->columns + i]);
    return least;
}

/* One of a batch, by shifted Cholesky QR where columns are too dependent for their Gram matrix; 0 where there are no
 * factors.
 */
static int factorize(Room *room, const Factorizations *of, long member)
{
    static const Pass look = {.gram = 1};
    long m = of->m, n = of->n, height = height_of(m, room->columns);
    Part *parts = room->parts;
    for (long t = 0; t < room->count; t++) {
        parts[t].member = member, parts[t].first = t ? parts[t - 1].last : 0;
        parts[t].last = t + 1 < room->count ? (t + 1) * m / room->count / height * height : m;
    }
    double extremes[2];
    int passes = 0;
    run(room, &look);
    for (;; passes++) {
        int found = find_r(room, 0.0);
        double lost = found ? lost_by(room, of) : INFINITY;
        if (passes ? found && least_pivot(room) >= 0.5 : lost <= of->enough)
            break;
        if (passes == MOST_PASSES || (!(lost <= MOST_LOST) && !find_r(room, shift_of(m, n))))
            return 0;
        Pass next = {.of_q = passes > 0, .solve = 1, .gram = 1, .refine = !(lost <= LITTLE_LOST)};
        run(room, &next);
        join_r(room, passes);
    }
    join_r(room, passes);
    for (long i = 0; i < n; i++)
        for (long j = 0; j < n; j++)
            set(&of->r, member, i, j, room->before[i * room->columns + j]);
    memset(parts[0].of_columns, 0, of->n * sizeof(Column));
    prepare(&of->r, member, of->n, 0, 1, of->g, parts[0].of_columns, parts[0].rows, extremes);
    add_to_columns(of->n, parts[0].rows, parts[0].of_columns);
    memset(parts[0].rows, 0, of->n * PROBES * sizeof(double));
    Pass last = {.of_q = passes > 0, .solve = 1, .measure = 1};
    run(room, &last);
    parts[0].found[3] = extremes[0], parts[0].found[4] = extremes[1];
    write_down(parts[0].found, of->n, of->g, parts[0].of_columns, of->numbers + member, of->count);
    return 1;
}

/* All of a batch, Q by rows; 0 where there is too little memory. Those whose numbers are not finite, or beyond the range of
 * squares, are left without factors, and what is found of them is NaN.
 */
int cholesky_qr(const Factorizations *of)
{
    Room room;
    if (!allocate(&room, of))
        return 0;
    for (long member = 0; member < of->count; member++)
        if (!factorize(&room, of, member))
            for (int i = 0; i < FOUND; i++)
                of->numbers[member + i * of->count] = NAN;
    free(room.room);
    return 1;
}
