/* The factor of a Gram matrix, its inverse, and how good they are: a part of seminormal.c. */
#include "seminormal.h"

/* R^-1, row by row from the last one on: the computed one times R errs by n u |R^-1| |R| at most. */
static void invert(const Problem *p)
{
    for (long i = p->n - 1; i >= 0; i--) {
        double *row = p->inverse + i * p->columns, *of_r = p->gram + i * p->columns;
        memset(row, 0, p->columns * sizeof(double));
        row[i] = 1.0;
        add_rows(row, of_r, 1, -1.0, p->inverse, p->columns, i + 1, p->n, i, 1);
        for (long j = i; j < p->columns; j++)
            row[j] /= of_r[i];
    }
}

int worth_of(const Problem *p, const Limits *limits, Worth *worth)
{
    long n = p->n, columns = p->columns;
    form_gram(p->by_rows, p->m, columns, p->gram, 0);
    for (long j = 0; j < n; j++) {
        p->sizes[j] = sqrt(p->gram[j * columns + j]);
        p->work[j] = 1.0 / p->sizes[j];
        if (!moderate(p->sizes[j], limits))
            return 0;
    }
    double of_gram = norm_of(p->gram, n, columns, p->work);
    if (!cholesky(p->gram, n, columns))
        return 0;
    invert(p);
    for (long j = 0; j < columns; j++)
        p->work[j] = 0.0;
    for (long i = 0; i < n; i++)
        for (long j = 0; j < columns; j++) {
            double x = p->gram[i * columns + j] = p->sizes[i] * p->inverse[i * columns + j];
            p->work[j] += fabs(x);
        }
    double of_sums = length(columns, p->work);
    worth->rate = (1.0 + 0x1p-10) * UNIT * of_sums * ((p->m + n + 2) * of_sums + 5 * n);
    if (!(worth->rate <= limits->max_rate))
        return 0;
    form_gram(p->gram, n, columns, p->scaled, 1);
    for (long j = 0; j < columns; j++)
        p->work[j] = 1.0;
    worth->norm = of_gram / sqrt(n), worth->norm_bound = sqrt(of_gram);
    worth->inverse_norm = sqrt(norm_of(p->scaled, n, columns, p->work));
    return 1;
}
