/* LU of one matrix, PANEL columns at a time: what the factors before them make of all rows, as products, then the
 * columns among themselves. A part of squares.h.
 */
#define PANEL 8

/* Sums of the first j columns of L, of a vector of rows, times what is above them in the columns of a panel. */
static inline __attribute__((always_inline)) void sum_rows(
    const vec *lower, long height, const vec *panel, long j, vec sums[PANEL])
{
#pragma GCC unroll 8
    for (int c = 0; c < PANEL; c++)
        sums[c] = all(0.0);
    for (long k = 0; k < j; k++) {
        vec rows = lower[k * height];
#pragma GCC unroll 8
        for (int c = 0; c < PANEL; c++)
            sums[c] = plus_product(sums[c], rows, get(panel + c * height, k));
    }
}

/* Rows of U above a panel that begins with column j, vector by vector, then what is left of its other rows. */
static void eliminate(const struct room *room, vec *panel, long j)
{
    long height = room->height, v = 0;
    vec sums[PANEL];
    for (; v * WIDTH < j; v++) {
        long first = v * WIDTH, end = first + WIDTH < j ? first + WIDTH : j;
        sum_rows(room->lower + v, height, panel, first, sums);
#pragma GCC unroll 8
        for (int c = 0; c < PANEL; c++)
            sums[c] = panel[c * height + v] - sums[c];
        for (long k = first; k < end; k++) /* zeros are above and on the diagonal of L */
#pragma GCC unroll 8
            for (int c = 0; c < PANEL; c++)
                sums[c] = minus_product(sums[c], room->lower[k * height + v], all(sums[c][k - first]));
        for (int c = 0; c < PANEL; c++)
            panel[c * height + v] = sums[c];
    }
    for (; v < height; v++) {
        sum_rows(room->lower + v, height, panel, j, sums);
#pragma GCC unroll 8
        for (int c = 0; c < PANEL; c++)
            panel[c * height + v] -= sums[c];
    }
}

/* Where the largest element of a column is from row j on. */
static long pivot_of(const vec *column, long height, long n, long j)
{
    const double *x = (const double *)column;
    vec found = {0};
    double most = 0;
    long next = (place(j) + 1) * WIDTH;
    for (long i = j; i < next && i < n; i++)
        most = __builtin_fabs(x[i]) > most ? __builtin_fabs(x[i]) : most;
    for (long v = place(j) + 1; v < height; v++)
        found = larger(magnitude(column[v]), found);
    most = largest(larger(found, all(most)))[0];
    for (long i = j; i < n; i++)
        if (__builtin_fabs(x[i]) == most)
            return i;
    return j; /* not a number */
}

/* A column of the factors, of what is left of one of A, its pivot in row j; returns the largest element of U in it. */
static vec split(struct room *room, long j)
{
    long height = room->height, first = place(j);
    vec *upper = room->upper + j * height, *lower = room->lower + j * height, most = {0};
    vec reciprocal = 1 / get(upper, j);
    most[0] = __builtin_fabs(get(upper, j)[0]);
    set(room->pivots, j, reciprocal);
    memset(lower, 0, first * sizeof(vec));
    for (long v = first; v < height; v++)
        lower[v] = upper[v] * reciprocal;
    for (long i = first * WIDTH; i <= j; i++)
        ((double *)lower)[i] = 0;
    for (long i = j; i < (first + 1) * WIDTH; i++)
        ((double *)upper)[i] = 0;
    memset(upper + first + 1, 0, (height - first - 1) * sizeof(vec));
    for (long v = 0; v <= first; v++)
        most = larger(magnitude(upper[v]), most);
    return most;
}

/* The factors of a panel, whose other columns follow each pivot; `best` says which rows changed their places. */
static vec factorize_panel(struct room *room, long n, long j, long count, int definite, long *best)
{
    long height = room->height;
    vec most = {0};
    for (long c = 0; c < count; c++) {
        vec *column = room->upper + (j + c) * height;
        for (long k = j; k < j + c; k++) {
            const vec *lower = room->lower + k * height;
            vec factor = get(column, k);
            for (long v = place(k); v < height; v++)
                column[v] = minus_product(column[v], lower[v], factor);
        }
        best[c] = definite ? j + c : pivot_of(column, height, n, j + c);
        for (long k = 0; k < count && best[c] != j + c; k++)
            swap((k < c ? room->lower : room->upper) + (j + k) * height, j + c, best[c], 0);
        most = larger(split(room, j + c), most);
    }
    return most;
}

/* Columns of A with their rows in the order that pivots have made so far. */
static void take_panel(const struct room *room, long n, long j, long count)
{
    long height = room->height;
    for (long c = j; c < j + count; c++) {
        const double *from = (const double *)(room->a + c * height);
        double *to = (double *)(room->upper + c * height);
        for (long i = 0; i < n; i++)
            to[i] = from[room->order[i]];
        for (long i = n; i < height * WIDTH; i++)
            to[i] = 0;
    }
}

/* Returns the largest element of U. Zeros are below U and above L, whose diagonals are not there. A definite matrix
 * needs no pivoting. */
static vec factorize(struct room *room, long n, int definite)
{
    long height = room->height, best[PANEL];
    vec most = {0};
    for (long i = 0; i < n; i++)
        room->order[i] = i;
    for (long j = 0; j < n; j += PANEL) {
        long count = n - j < PANEL ? n - j : PANEL;
        take_panel(room, n, j, count);
        eliminate(room, room->upper + j * height, j);
        most = larger(factorize_panel(room, n, j, count, definite, best), most);
        for (long c = 0; c < count; c++) {
            int other = room->order[j + c];
            room->order[j + c] = room->order[best[c]], room->order[best[c]] = other;
        }
        for (long c = 0; c < j && !definite; c++)
            for (long k = 0; k < count; k++)
                swap(room->lower + c * height, j + k, best[k], 0);
    }
    return largest(most);
}
