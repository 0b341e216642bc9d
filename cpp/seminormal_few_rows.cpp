// Fewer rows than columns: a part of seminormal.cpp. With R of A^T the seminormal equations of the second kind are
// R^T R w = b for a w that is refined.
#include "seminormal_minimum_norm.hpp"

NEULA_BEGIN

namespace {

// Whether the rows of B = A D^-1, however small they are, are independent beyond the rounding errors of their Gram matrix,
// (m + n + 5) u times squares of norms, and those of its factor.
bool are_independent(MinimumNorm &s)
{
    const Problem &p = *s.transposed;
    Index m = s.m, tall = s.tall;
    double square_of_b = 0.0, *scaled = s.scaled_columns;
    for (Index j = 0; j < s.n; j++)
        for (Index i = 0; i < tall; i++)
            scaled[j * tall + i] = s.by_columns[j * tall + i] / s.sizes[j];
    form_gram(scaled, s.n, tall, p.gram, false);
    for (Index i = 0; i < tall; i++)
        square_of_b += i < m ? p.gram[i * tall + i] : 0.0, p.part[i] = 1.0;
    double gram_norm = symmetric_norm(p.gram, m, tall, p.part);
    if (!cholesky(p.gram, m, tall, 0.0))
        return false;
    invert(p.gram, m, tall, p.inverse);
    form_gram(p.inverse, m, tall, p.gram, true);
    double inverse_norm = sqrt(symmetric_norm(p.gram, m, tall, p.part));
    s.norm = gram_norm / sqrt(square_of_b), s.condition = s.norm * inverse_norm;
    double lost = (m + s.n + 5) * UNIT * square_of_b * inverse_norm * inverse_norm;
    s.condition_bound = BOUND_MARGIN * sqrt(gram_norm / (1.0 - lost)) * inverse_norm;
    return 4.0 * lost <= 1.0;
}

// ||E^-1 v|| for the norms E of the rows.
double norm_by_rows(const MinimumNorm &s, const double *v)
{
    double sum = 0.0;
    for (Index i = 0; i < s.m; i++)
        sum += (v[i] / s.transposed->sizes[i]) * (v[i] / s.transposed->sizes[i]);
    return sqrt(sum);
}

}  // namespace

bool factorize_few_rows(MinimumNorm &s, const SeminormalLimits &limits)
{
    s.rank = s.m, s.few_rows = true;
    bool good = are_independent(s) && s.condition_bound < limits.condition && begin_factor(*s.transposed, limits) &&
                finish_factor(*s.transposed, limits);
    s.quality = s.transposed->quality;
    return good;
}

// Rounding errors of the residual reach x through R^-T; those of A^T w are its own.
StepError step_of_few_rows(const MinimumNorm &s, double noise)
{
    const Problem &p = *s.transposed;
    const FactorQuality &quality = s.quality;
    double square_of_w = 0.0, rows_norm = sqrt(s.m); // ||E^-1 A||_F
    for (Index i = 0; i < s.m; i++)
        square_of_w += (p.sizes[i] * s.w[i]) * (p.sizes[i] * s.w[i]);
    times_transposed(p.inverse, s.m, s.tall, s.residual, p.projected);
    times(p.inverse, s.m, s.tall, p.projected, s.added);
    double projected_norm = norm(s.tall, p.projected), x_norm = norm(s.wide, s.x);
    double of_residual = quality.inverse_norm * (rows_norm * x_norm + norm_by_rows(s, s.b));
    double floor = noise * ((1.0 + quality.rate) * of_residual + rows_norm * sqrt(square_of_w));
    double error = (1.0 + quality.rate) * quality.rate / (1.0 - quality.rate) * projected_norm + floor;
    return {s.largest * error, s.largest * floor};
}

double backward_error_of_few_rows(const MinimumNorm &s)
{
    double image = s.norm * scaled_norm(s.n, s.sizes, s.x);
    return quotient(norm(s.tall, s.residual), image + norm(s.tall, s.b));
}

NEULA_END
