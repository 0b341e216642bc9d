// Residuals R = B - A (X + X_low) and gradients A^T R in twice the working precision, in one pass over the rows of A.
#include "doubled_rows.hpp"
#include "matrices.hpp"
#include "threads.hpp"
#include "workspace.hpp"

NEULA_BEGIN

namespace {

constexpr Index BLOCK_ROWS = 32; // rows that stay in the nearest cache, by rows and by columns

struct Part {
    const DoubledNormalProblem *problem;
    Index first, last, columns;  // columns: n padded
    double *rows, *transposed;   // (BLOCK_ROWS, columns) and (n, BLOCK_ROWS)
    double *right, *residual;    // (BLOCK_ROWS), and two of them
    double *gradient, *totals;   // two of (columns), and two of (k, columns)
    const double *zeros;         // (n)
};

// The rows of a block, padded with zeros, and their transpose.
void read_block(const Part &part, Index first, Index count)
{
    const DoubledNormalProblem &p = *part.problem;
    View<const double> a = View<const double>(p.a, 0).from_row(first);
    for (Index i = 0; i < BLOCK_ROWS; i++)
        for (Index j = 0; j < p.n; j++)
            part.rows[i * part.columns + j] = part.transposed[j * BLOCK_ROWS + i] = i < count ? a(i, j) : 0.0;
}

void add_block(const Part &part, Index first, Index count, Index c)
{
    const DoubledNormalProblem &p = *part.problem;
    const double *x = p.x + c * p.n, *low = p.x_low ? p.x_low + c * p.n : part.zeros;
    double *residual_low = part.residual + BLOCK_ROWS, *gradient_low = part.gradient + part.columns;
    for (Index i = 0; i < BLOCK_ROWS; i++)
        part.right[i] = i < count ? p.b[c * p.m + first + i] : 0.0;
    combine_doubled(
        part.right, -1.0, part.transposed, BLOCK_ROWS, x, low, is_zero(p.n, x) && is_zero(p.n, low) ? 0 : p.n, part.residual,
        residual_low);
    for (Index i = 0; i < count; i++) {
        p.residual[c * p.m + first + i] = part.residual[i];
        p.residual[(p.k + c) * p.m + first + i] = residual_low[i];
    }
    combine_doubled(
        nullptr, 1.0, part.rows, part.columns, part.residual, residual_low, BLOCK_ROWS, part.gradient, gradient_low);
    double *total = part.totals + c * part.columns, *total_low = total + p.k * part.columns;
    for (Index j = 0; j < part.columns; j++) {
        double error;
        two_sum(total[j], part.gradient[j], total[j], error);
        two_sum(total[j], total_low[j] + (error + gradient_low[j]), total[j], total_low[j]);
    }
}

void work(Part &part)
{
    for (Index i = part.first; i < part.last; i += BLOCK_ROWS) {
        Index count = part.last - i < BLOCK_ROWS ? part.last - i : BLOCK_ROWS;
        read_block(part, i, count);
        for (Index c = 0; c < part.problem->k; c++)
            add_block(part, i, count, c);
    }
}

}  // namespace

Status doubled_normal(const DoubledNormalProblem &p)
{
    Index count = p.threads < MOST_THREADS ? p.threads : MOST_THREADS, columns = padded(p.n);
    Index each = BLOCK_ROWS * (columns + p.n + 3) + 2 * (1 + p.k) * columns;
    Workspace workspace(columns + count * each);
    if (!workspace)
        return Status::no_memory;
    const double *zeros = workspace.take(columns);
    Part parts[MOST_THREADS];
    for (Index t = 0; t < count; t++) {
        Part &part = parts[t] = {&p, t ? parts[t - 1].last : 0, (t + 1) * p.m / count, columns};
        part.zeros = zeros;
        part.rows = workspace.take(BLOCK_ROWS * columns), part.transposed = workspace.take(BLOCK_ROWS * p.n);
        part.right = workspace.take(BLOCK_ROWS), part.residual = workspace.take(2 * BLOCK_ROWS);
        part.gradient = workspace.take(2 * columns), part.totals = workspace.take(2 * p.k * columns);
    }
    side_by_side<work>(parts, count);
    for (Index c = 0; c < p.k; c++)
        for (Index j = 0; j < p.n; j++) {
            double total = 0.0, low = 0.0, error;
            for (Index t = 0; t < count; t++) {
                const double *found = parts[t].totals + c * columns + j;
                two_sum(total, *found, total, error);
                low += error + found[p.k * columns];
            }
            two_sum(total, low, p.gradient[c * p.n + j], p.gradient[(p.k + c) * p.n + j]);
        }
    return Status::done;
}

NEULA_END
