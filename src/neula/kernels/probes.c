/* What random vectors see of the errors of QR factorizations, whose R is made to have no negative diagonal element before. */
#include <math.h>
#include <stdlib.h>

#include "probes.h"

/* Make the diagonal of R nonnegative, rows of R and columns of Q changing their signs. */
static inline void reflect(const Matrices *q, const Matrices *r, long member, long m, long n)
{
    for (long i = 0; i < n; i++) {
        if (!signbit(element(r, member, i, i)))
            continue;
        for (long j = i; j < n; j++)
            set(r, member, i, j, -element(r, member, i, j));
        for (long k = 0; k < m; k++)
            set(q, member, k, i, -element(q, member, k, i));
    }
}

static inline void measure_one(const Factorizations *of, long member, Column *columns)
{
    double found[FOUND] = {0};
    reflect(&of->q, &of->r, member, of->m, of->n);
    prepare(&of->r, member, of->n, of->g, columns, found + 3);
    measure_rows(&of->a, &of->q, member, 0, of->m, of->n, columns, found);
    write_down(found, of->n, of->g, columns, of->numbers + member, of->count);
}

/* They come by value: what is known of their elements makes other loops. */
static inline void measure_all(Factorizations of, long single, Column *columns)
{
    of.a.single = of.q.single = of.r.single = single;
    for (long member = 0; member < of.count; member++)
        measure_one(&of, member, columns);
}

/* 0 where there is too little memory. */
int probe_errors(const Factorizations *of)
{
    Column *columns = malloc(of->n * sizeof(Column));
    if (columns == NULL)
        return 0;
    if (of->a.single)
        measure_all(*of, 1, columns);
    else
        measure_all(*of, 0, columns);
    free(columns);
    return 1;
}
