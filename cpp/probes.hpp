// Errors of QR factorizations A = Q R along random vectors g: in one pass over A and two over Q, some rows at a time,
// while these are in the cache.
#pragma once

#include "matrices.hpp"
#include "vectors.hpp"

NEULA_BEGIN

constexpr int A_VECTORS = (PROBES + WIDTH - 1) / WIDTH;  // registers for the products of a row of A
constexpr int Q_VECTORS = 2 * PROBES / WIDTH;            // and of a row of Q
constexpr int ROWS = 4;                                  // whose sums do not wait for one another
constexpr Index BLOCK = 64;                              // rows, and columns, whose sums are added to others

// Factors of the elements of a column of A and of Q, and Q^T times Q times these.
struct ProbedColumn {
    double for_a[2 * PROBES];  // s = g / norm of the column; zeros
    double for_q[2 * PROBES];  // R s, g
    double image[2 * PROBES];  // Q^T (Q g) in the second half
};

// Products of a row of A and of Q with these: A s; Q (R s), Q g.
struct ProbedRow {
    Vec a[A_VECTORS], q[Q_VECTORS];
};

// Sums of squares of the elements of A s - Q (R s), and of A s.
struct ProbeSums {
    double residual, image;
};

struct ColumnNorms {
    double smallest = INFINITY, largest = 0.0;

    void add(const ColumnNorms &other)
    {
        smallest = other.smallest >= smallest ? smallest : other.smallest;
        largest = other.largest <= largest ? largest : other.largest;
    }
};

// Find s for one of several parts of the columns, and the sums of their part of R s, one vector after the other. R has zeros
// below its diagonal; sums has room for n PROBES numbers.
template <typename RView>
ALWAYS_INLINE void probe_r(
    const RView &r, Index n, Index part, Index parts, const double *g, ProbedColumn *columns, double *sums, ColumnNorms &norms)
{
    norms = ColumnNorms();
    memset(sums, 0, n * PROBES * sizeof(double));
    for (Index j = part; j < n; j += parts) {
        double square = 0.0;
#pragma omp simd reduction(+ : square)
        for (Index i = 0; i <= j; i++)
            square += double(r(i, j)) * double(r(i, j));
        double norm = sqrt(square);
        norms.add({norm, norm});
        for (int p = 0; p < PROBES; p++) {
            double factor = columns[j].for_a[p] = g[j * PROBES + p] / norm, *sum = sums + p * n;
            columns[j].for_q[PROBES + p] = g[j * PROBES + p];
#pragma omp simd
            for (Index i = 0; i <= j; i++)
                sum[i] += double(r(i, j)) * factor;
        }
    }
}

// Add the sums of one part of R s.
inline void add_image_of_r(Index n, const double *sums, ProbedColumn *columns)
{
    for (Index j = 0; j < n; j++)
        for (int p = 0; p < PROBES; p++)
            columns[j].for_q[p] += sums[p * n + j];
}

// Add products of some columns, from `start` to `stop`, to the sums of some rows.
template <int count, typename AView, typename QView>
ALWAYS_INLINE void probe_rows(
    const AView &a, const QView &q, Index first, Index start, Index stop, const ProbedColumn *columns, ProbedRow *rows)
{
    Vec of_a[count][A_VECTORS], of_q[count][Q_VECTORS];
    set_zero(of_a), set_zero(of_q);
    for (Index j = start; j < stop; j++)
        for (int i = 0; i < count; i++) {
            Vec x = all(a(first + i, j)), y = all(q(first + i, j));
            for (int t = 0; t < A_VECTORS; t++)
                of_a[i][t] = plus_product(of_a[i][t], x, load(columns[j].for_a + t * WIDTH));
            for (int t = 0; t < Q_VECTORS; t++)
                of_q[i][t] = plus_product(of_q[i][t], y, load(columns[j].for_q + t * WIDTH));
        }
    for (int i = 0; i < count; i++) {
        for (int t = 0; t < A_VECTORS; t++)
            rows[i].a[t] += of_a[i][t];
        for (int t = 0; t < Q_VECTORS; t++)
            rows[i].q[t] += of_q[i][t];
    }
}

// Add products of Q^T with these sums.
template <int count, typename QView>
ALWAYS_INLINE void probe_back(
    const QView &q, Index first, Index start, Index stop, const ProbedRow *rows, Vec (*images)[Q_VECTORS])
{
    for (Index j = start; j < stop; j++)
        for (int t = Q_VECTORS / 2; t < Q_VECTORS; t++) {
            Vec image = images[j - start][t];
            for (int i = 0; i < count; i++)
                image = plus_product(image, all(q(first + i, j)), rows[i].q[t]);
            images[j - start][t] = image;
        }
}

// BLOCK rows at most, by as many columns: what these need stays in the nearest cache.
template <typename AView, typename QView>
ALWAYS_INLINE void probe_block(
    const AView &a, const QView &q, Index first, Index count, Index n, ProbedColumn *columns, ProbeSums &sums)
{
    ProbedRow rows[BLOCK];
    memset(static_cast<void *>(rows), 0, count * sizeof(ProbedRow));
    for (Index start = 0; start < n; start += BLOCK) {
        Index stop = start + BLOCK < n ? start + BLOCK : n, i = 0;
        for (; i + ROWS <= count; i += ROWS)
            probe_rows<ROWS>(a, q, first + i, start, stop, columns, rows + i);
        for (; i < count; i++)
            probe_rows<1>(a, q, first + i, start, stop, columns, rows + i);
    }
    for (Index start = 0; start < n; start += BLOCK) {
        Vec images[BLOCK][Q_VECTORS];
        Index stop = start + BLOCK < n ? start + BLOCK : n, i = 0;
        memset(static_cast<void *>(images), 0, (stop - start) * sizeof(images[0]));
        for (; i + ROWS <= count; i += ROWS)
            probe_back<ROWS>(q, first + i, start, stop, rows + i, images);
        for (; i < count; i++)
            probe_back<1>(q, first + i, start, stop, rows + i, images);
        for (Index j = start; j < stop; j++)
            for (int t = Q_VECTORS / 2; t < Q_VECTORS; t++) {
                double *place = columns[j].image + t * WIDTH;
                store(place, load(place) + images[j - start][t]);
            }
    }
    for (Index i = 0; i < count; i++) {
        double image[2 * PROBES], product[2 * PROBES];
        memcpy(image, rows[i].a, PROBES * sizeof(double)), memcpy(product, rows[i].q, PROBES * sizeof(double));
        for (int p = 0; p < PROBES; p++) {
            sums.residual += (image[p] - product[p]) * (image[p] - product[p]);
            sums.image += image[p] * image[p];
        }
    }
}

template <typename AView, typename QView>
ALWAYS_INLINE void probe_all_rows(
    const AView &a, const QView &q, Index first, Index last, Index n, ProbedColumn *columns, ProbeSums &sums)
{
    for (; first < last; first += BLOCK)
        probe_block(a, q, first, last - first < BLOCK ? last - first : BLOCK, n, columns, sums);
}

// Add the sums of other rows.
inline void add_sums(
    Index n, const ProbeSums &sums, const ProbedColumn *columns, ProbeSums &all_sums, ProbedColumn *all_columns)
{
    all_sums.residual += sums.residual, all_sums.image += sums.image;
    for (Index j = 0; j < n; j++)
        for (int p = 0; p < 2 * PROBES; p++)
            all_columns[j].image[p] += columns[j].image[p];
}

// Factor of the 2-norm of a matrix times PROBES Gaussian vectors, or as many with orthogonal rows, for an upper
// bound of half of the norm of the matrix: the square of the norm of four Gaussian numbers is less than 2.0007e-3
// with a probability of 5e-7.
inline double margin(Index n) { return n <= PROBES ? 1.0 / sqrt(double(PROBES)) : 0.5 / sqrt(2.0007e-3); }

// The same of a real matrix that stands for a complex one, which has each singular value twice: the square of that of eight
// Gaussian numbers, which is less than 0.1191 as rarely, divided by the root of 2 is less than the norm of its Gram matrix.
inline double margin_of_pairs(Index n) { return n <= PROBES ? margin(n) : 0.5 * sqrt(sqrt(2.0) / 0.1191); }

// The errors of a factorization, once all rows were probed.
inline QRErrors errors_of(
    const ProbeSums &sums, const ColumnNorms &norms, Index n, const double *g, const ProbedColumn *columns, double margin)
{
    double loss = 0.0, square = 0.0, products[PROBES][PROBES] = {};
    for (Index j = 0; j < n; j++) {
        double lost[PROBES];
        for (int p = 0; p < PROBES; p++)
            lost[p] = columns[j].image[PROBES + p] - g[j * PROBES + p];
        for (int p = 0; p < PROBES; p++)
            for (int s = 0; s < PROBES; s++)
                products[p][s] += lost[p] * lost[s];
    }
    for (int p = 0; p < PROBES; p++) {
        loss += products[p][p];
        for (int s = 0; s < PROBES; s++)
            square += products[p][s] * products[p][s];
    }
    double norm = margin * sqrt(sqrt(square));
    return {sqrt(sums.residual), sqrt(sums.image), sqrt(loss), norm, norms.smallest, norms.largest};
}

NEULA_END
