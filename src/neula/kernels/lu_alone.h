/* LU of one matrix, PANEL columns at a time: what the factors before them make of all rows, as
 * products of tiles, then the columns among themselves. A part of squares.h.
 */
#define PANEL 4
#define TILE 2 /* vectors of rows */

/* Sums of the first j columns of L, of some vectors of rows, times what is above them in the columns of a panel. */
static inline void sum_tile(
    const vec *lower, long height, const vec *panel, long j, vec sums[TILE][PANEL], int tile)
{
    for (int t = 0; t < tile; t++)
        for (int c = 0; c < PANEL; c++)
            sums[t][c] = all(0.0);
    for (long k = 0; k < j; k++)
        for (int c = 0; c < PANEL; c++)
            for (int t = 0; t < tile; t++)
                sums[t][c] = plus_product(sums[t][c], lower[k * height + t], get(panel + c * height, k));
}

/* Rows of U above a panel that begins with column j, vector by vector, then what is left of its other rows. */
static void eliminate(const struct room *room, vec *panel, long j)
{
    long height = room->height, v = 0;
    vec sums[TILE][PANEL];
    for (; v * WIDTH < j; v++) {
        long first = v * WIDTH, end = first + WIDTH < j ? first + WIDTH : j;
        sum_tile(room->lower + v, height, panel, first, sums, 1);
        for (int c = 0; c < PANEL; c++)
            sums[0][c] = panel[c * height + v] - sums[0][c];
        for (long k = first; k < end; k++) /* zeros are above and on the diagonal of L */
            for (int c = 0; c < PANEL; c++)
                sums[0][c] = minus_product(sums[0][c], room->lower[k * height + v], all(sums[0][c][k - first]));
        for (int c = 0; c < PANEL; c++)
            panel[c * height + v] = sums[0][c];
    }
    for (; v + TILE <= height; v += TILE) {
        sum_tile(room->lower + v, height, panel, j, sums, TILE);
        for (int c = 0; c < PANEL; c++)
            for (int t = 0; t < TILE; t++)
                panel[c * height + v + t] -= sums[t][c];
    }
    if (v < height) {
        sum_tile(room->lower + v, height, panel, j, sums, 1);
        for (int c = 0; c < PANEL; c++)
            panel[c * height + v] -= sums[0][c];
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

/* Returns the largest element of U. Zeros are below U and above L, whose diagonals are not there. A definite matrix needs
 * no pivoting. */
static vec factorize(struct room *room, long n, int definite)
{
    long height = room->height, best[PANEL];
    vec most = {0};
    memcpy(room->upper, room->a, n * height * sizeof(vec));
    for (long i = 0; i < n; i++)
        room->order[i] = i;
    for (long j = 0; j < n; j += PANEL) {
        long count = n - j < PANEL ? n - j : PANEL;
        eliminate(room, room->upper + j * height, j);
        most = larger(factorize_panel(room, n, j, count, definite, best), most);
        for (long c = 0; c < count; c++) {
            int other = room->order[j + c];
            room->order[j + c] = room->order[best[c]], room->order[best[c]] = other;
        }
        for (long c = 0; c < n && !definite; c++)
            for (long k = 0; k < count && (c < j || c >= j + count); k++)
                swap((c < j ? room->lower : room->upper) + c * height, j + k, best[k], 0);
    }
    return largest(most);
}
