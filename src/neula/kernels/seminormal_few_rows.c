/* Fewer rows than columns: a part of seminormal.c. With R of A^T the seminormal equations of the second kind are
 * R^T R w = b for a w that is refined.
 */
#include "seminormal_shortest.h"
#include "triangles.h"

/* Whether the rows of B = A D^-1 as they are, however small, are independent beyond the rounding errors of their Gram
 * matrix, (m + n + 5) u times squares of norms, and those of its factor.
 */
static int are_independent(Shortest *s)
{
    const Problem *p = s->transposed;
    long m = s->m, tall = s->tall;
    double of_b = 0.0, *scaled = s->scaled_columns;
    for (long j = 0; j < s->n; j++)
        for (long i = 0; i < tall; i++)
            scaled[j * tall + i] = s->by_columns[j * tall + i] / s->sizes[j];
    form_gram(scaled, s->n, tall, p->gram, 0);
    for (long i = 0; i < tall; i++)
        of_b += i < m ? p->gram[i * tall + i] : 0.0, p->work[i] = 1.0;
    double of_gram = norm_of(p->gram, m, tall, p->work);
    if (!cholesky(p->gram, m, tall, 0.0))
        return 0;
    invert(p->gram, m, tall, p->inverse);
    form_gram(p->inverse, m, tall, p->gram, 1);
    double inverse_norm = sqrt(norm_of(p->gram, m, tall, p->work));
    s->norm = of_gram / sqrt(of_b), s->condition = s->norm * inverse_norm;
    double lost = (m + s->n + 5) * UNIT * of_b * inverse_norm * inverse_norm;
    s->condition_bound = CEILED * sqrt(of_gram / (1.0 - lost)) * inverse_norm;
    return 4.0 * lost <= 1.0;
}

int factorize_few_rows(Shortest *s, const Limits *limits)
{
    s->rank = s->m, s->few_rows = 1;
    return are_independent(s) && s->condition_bound < limits->condition &&
           begin_factor(s->transposed, limits, &s->worth) && finish_factor(s->transposed, limits, &s->worth);
}

/* Of E^-1 v for the norms E of the rows. */
static double relative_length(const Shortest *s, const double *v)
{
    double sum = 0.0;
    for (long i = 0; i < s->m; i++)
        sum += (v[i] / s->transposed->sizes[i]) * (v[i] / s->transposed->sizes[i]);
    return sqrt(sum);
}

/* Rounding errors of the residual reach x through R^-T; those of A^T w are its own. */
Step step_of_few_rows(const Shortest *s, double noise)
{
    const Problem *p = s->transposed;
    const Worth *worth = &s->worth;
    double of_w = 0.0, of_rows = sqrt(s->m); /* ||E^-1 A||_F */
    for (long i = 0; i < s->m; i++)
        of_w += (p->sizes[i] * s->w[i]) * (p->sizes[i] * s->w[i]);
    times_transposed(p->inverse, s->m, s->tall, s->residual, p->projected);
    times(p->inverse, s->m, s->tall, p->projected, s->added);
    double projected = length(s->tall, p->projected), of_x = length(s->wide, s->x);
    double of_residual = worth->inverse_norm * (of_rows * of_x + relative_length(s, s->b));
    double floor = noise * ((1.0 + worth->rate) * of_residual + of_rows * sqrt(of_w));
    double left = (1.0 + worth->rate) * worth->rate / (1.0 - worth->rate) * projected + floor;
    return (Step){s->largest * left, s->largest * floor};
}

double error_of_few_rows(const Shortest *s)
{
    double image = s->norm * scaled_size(s->n, s->sizes, s->x, NULL);
    return quotient(length(s->tall, s->residual), image + length(s->tall, s->b));
}
