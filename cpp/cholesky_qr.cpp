// QR factorizations by Cholesky factors of Gram matrices, in as many passes as it takes, and their errors along random
// vectors: in each pass rows are read from memory once, some at a time, and shared by some threads.
//
// A complex number x1 + i x2 stands for [x1 x2; -x2 x1], which multiplies as its conjugate does. So A is a real matrix of twice
// the order, and its R with a positive diagonal is that of the complex one. Of each two rows the first one, with the parts of
// a row of A, suffices for everything but the errors along random vectors: n below is the number of parts of a row.
#include "probes.hpp"
#include "rows.hpp"
#include "threads.hpp"
#include "workspace.hpp"

NEULA_BEGIN

namespace {

constexpr double MOST_LOST = 0x1p-7;     // orthogonality that a pass without a shift may lose
constexpr double LITTLE_LOST = 0x1p-28;  // up to condition numbers of some thousand, inverses of blocks are accurate enough
constexpr int MOST_PASSES = 4;           // before the last one: enough for condition numbers up to 1 / UNIT
constexpr double LONG = 30.0;            // sums of LONG^2 products err by twice as much as short ones

// The work of a pass on rows of A, or of Q.
struct Pass {
    bool of_q;     // rows of Q
    bool solve;    // X with X R = rows, written to Q
    bool gram;     // add X^T X
    bool measure;  // errors along random vectors
    bool refine;   // solutions of blocks, since their inverses err by their condition numbers
};

// The rows of a thread, and its sums; `columns` is n padded.
struct Part {
    const QRProblem *problem;
    const Pass *pass;
    Index member, n, columns, first, last;
    const double *r, *inverses;
    double *rows, *gram, *of_a, *of_q;  // both rows of complex A and Q
    ProbedColumn *probed;
    ProbeSums sums;
};

// Rows that are taken at a time.
inline Index height_of(Index m, Index columns)
{
    Index most = NEAR / columns > PADDED ? NEAR / columns & -PADDED : PADDED, all_of_them = padded(m);
    return most < all_of_them ? most : all_of_them;
}

// Read rows and pad them with zeros, their number to whole tiles.
template <typename X> ALWAYS_INLINE void read_rows(const X &x, Index count, Index n, Index columns, double *to)
{
    for (Index i = 0; i < count; i++)
        for (Index j = 0; j < n; j++)
            to[i * columns + j] = x(i, j);
    for (Index i = count; i % TALL; i++)
        memset(to + i * columns, 0, columns * sizeof(double));
}

// Rows are rounded in their place, too.
template <typename T>
ALWAYS_INLINE void write_rows(double *from, Index columns, const View<T, 0, 1> &x, Index count, Index n)
{
    for (Index i = 0; i < count; i++)
        for (Index j = 0; j < n; j++)
            from[i * columns + j] = x(i, j) = T(from[i * columns + j]);
}

// Columns of TALL rows in registers.
template <int wide> struct Tile {
    Vec x[TALL][wide];

    // The sum of `count` rows of a matrix times elements of TALL rows of factors.
    static ALWAYS_INLINE Tile product(const double *factors, const double *rows, Index columns, Index count)
    {
        Tile sums;
        set_zero(sums.x);
        for (Index k = 0; k < count; k++)
            for (int s = 0; s < TALL; s++)
                for (int t = 0; t < wide; t++)
                    sums.x[s][t] =
                        plus_product(sums.x[s][t], all(factors[s * columns + k]), load(rows + k * columns + t * WIDTH));
        return sums;
    }

    static ALWAYS_INLINE Tile from(const double *x, Index columns)
    {
        Tile found;
        for (int s = 0; s < TALL; s++)
            for (int t = 0; t < wide; t++)
                found.x[s][t] = load(x + s * columns + t * WIDTH);
        return found;
    }

    ALWAYS_INLINE void put(double *to, Index columns) const
    {
        for (int s = 0; s < TALL; s++)
            for (int t = 0; t < wide; t++)
                store(to + s * columns + t * WIDTH, x[s][t]);
    }

    ALWAYS_INLINE void add(const Tile &other, double sign)
    {
        for (int s = 0; s < TALL; s++)
            for (int t = 0; t < wide; t++)
                x[s][t] += sign * other.x[s][t];
    }
};

// Columns from j on of X with X R = rows, in their place; those before are known.
template <int wide>
ALWAYS_INLINE void solve_tile(double *rows, Index columns, const double *r, const double *inverses, Index j, bool refine)
{
    double *place = rows + j;
    const double *inverse = inverses + j * columns + j, *block = r + j * columns + j;
    Tile<wide> right = Tile<wide>::from(place, columns);
    right.add(Tile<wide>::product(rows, r + j, columns, j), -1.0);
    right.put(place, columns);
    Tile<wide> x = Tile<wide>::product(place, inverse, columns, wide * WIDTH);
    if (refine) {
        x.put(place, columns);
        right.add(Tile<wide>::product(place, block, columns, wide * WIDTH), -1.0);
        right.put(place, columns);
        x.add(Tile<wide>::product(place, inverse, columns, wide * WIDTH), 1.0);
    }
    x.put(place, columns);
}

void solve(double *rows, Index count, Index columns, const double *r, const double *inverses, bool refine)
{
    Index j = 0;
    for (; j + WIDE * WIDTH <= columns; j += WIDE * WIDTH)
        for (Index i = 0; i < count; i += TALL)
            solve_tile<WIDE>(rows + i * columns, columns, r, inverses, j, refine);
    if (j < columns)
        for (Index i = 0; i < count; i += TALL)
            solve_tile<1>(rows + i * columns, columns, r, inverses, j, refine);
}

// Inverses of the diagonal blocks of R that are solved with at once: that of all of R would err by its condition number.
void invert_blocks(const double *r, Index n, Index columns, double *inverses)
{
    memset(inverses, 0, columns * columns * sizeof(double));
    for (Index i = n - 1; i >= 0; i--) {
        Index start = i & -Index(WIDE * WIDTH), end = start + WIDE * WIDTH < n ? start + WIDE * WIDTH : n;
        double *row = inverses + i * columns;
        row[i] = 1.0;
        for (Index k = i + 1; k < end; k++)
            for (Index j = k; j < end; j++)
                row[j] -= r[i * columns + k] * inverses[k * columns + j];
        for (Index j = i; j < end; j++)
            row[j] /= r[i * columns + i];
    }
}

// Both rows of numbers with these parts.
template <typename X> ALWAYS_INLINE void read_both_rows(const X &x, Index first, Index count, Index n, Index columns, double *to)
{
    for (Index i = 0; i < count; i++, to += 2 * columns) {
        for (Index j = 0; j < n; j++)
            to[j] = x(first + i, j);
        turn_row(to, n, to + columns);
    }
}

// Some rows of A, or of Q, or their parts.
template <typename T> void read_source(Part &p, Index first, Index count)
{
    const Matrices &source = p.pass->of_q ? p.problem->q : p.problem->a;
    PartsView<const T> parts(source, p.member);
    if (source.complex && source.column == 1)
        read_rows(parts.by_rows().from_row(first), count, p.n, p.columns, p.rows);
    else if (source.complex)
        read_rows([&](Index i, Index j) { return parts(first + i, j); }, count, p.n, p.columns, p.rows);
    else if (source.column == 1)
        read_rows(View<const T, 0, 1>(source, p.member).from_row(first), count, p.n, p.columns, p.rows);
    else
        read_rows(View<const T>(source, p.member).from_row(first), count, p.n, p.columns, p.rows);
}

template <typename T> void pass_over(Part &p)
{
    Index n = p.n, columns = p.columns, height = height_of(p.problem->m, columns);
    const Matrices &of_a = p.problem->a, &of_q = p.problem->q;
    View<const T> a(of_a, p.member);
    View<T, 0, 1> q = of_q.complex ? PartsView<T>(of_q, p.member).by_rows() : View<T, 0, 1>(of_q, p.member);
    for (Index first = p.first; first < p.last; first += height) {
        Index count = p.last - first < height ? p.last - first : height, tiled = (count + TALL - 1) & -Index(TALL);
        read_source<T>(p, first, count);
        if (p.pass->solve) {
            solve(p.rows, tiled, columns, p.r, p.inverses, p.pass->refine);
            write_rows(p.rows, columns, q.from_row(first), count, n);
        }
        if (p.pass->gram)
            add_gram(p.rows, tiled, columns, p.gram, false);
        if (p.pass->measure && of_a.complex) {
            read_both_rows(PartsView<const T>(of_a, p.member), first, count, n, columns, p.of_a);
            read_both_rows(q, first, count, n, columns, p.of_q);
            View<const double> rows_of_a = {p.of_a, columns, 1}, rows_of_q = {p.of_q, columns, 1};
            probe_all_rows(rows_of_a, rows_of_q, 0, 2 * count, n, p.probed, p.sums);
        } else if (p.pass->measure) {
            probe_all_rows(a, q, first, first + count, n, p.probed, p.sums);
        }
    }
}

void work(Part &p)
{
    with_type(p.problem->a.single, [&](auto type) { pass_over<decltype(type)>(p); });
}

// Factorizations of matrices of one shape.
struct CholeskyQR {
    const QRProblem &problem;
    Index parts_each;  // of a number
    Index m, n, columns, square, count, of_rows, of_columns;  // count: of parts
    Workspace workspace;
    double *r, *product, *inverses;  // R of the last pass, the product of those of all passes, inverses of blocks
    Part parts[MOST_THREADS];

    explicit CholeskyQR(const QRProblem &given)
        : problem(given), parts_each(given.a.complex ? 2 : 1), m(given.m), n(parts_each * given.n), columns(padded(n)), square(columns * columns),
          count(given.threads < MOST_THREADS ? given.threads : MOST_THREADS), of_rows(height_of(m, columns) * columns),
          of_columns(n * Index(sizeof(ProbedColumn) / sizeof(double))),
          workspace(3 * square + count * ((parts_each == 2 ? 5 : 1) * of_rows + square + of_columns))
    {
        if (!workspace)
            return;
        workspace.take(square, r, product, inverses);
        Index height = height_of(m, columns);
        for (Index t = 0; t < count; t++) {
            Part &part = parts[t] = {&problem};
            part.first = t ? parts[t - 1].last : 0;
            part.last = t + 1 < count ? (t + 1) * m / count / height * height : m;
            part.n = n, part.columns = columns, part.r = r, part.inverses = inverses;
            if (parts_each == 2)
                workspace.take(2 * of_rows, part.of_a, part.of_q);
            part.rows = workspace.take(of_rows), part.gram = workspace.take(square);
            part.probed = reinterpret_cast<ProbedColumn *>(workspace.take(of_columns));
        }
    }

    // A pass over all rows. The sums of all parts are added in the same order, whichever thread comes first.
    void run(const Pass &pass)
    {
        for (Index t = 0; t < count; t++) {
            parts[t].pass = &pass, parts[t].sums = {};
            memset(parts[t].gram, 0, square * sizeof(double));
            if (t > 0)
                memcpy(parts[t].probed, parts[0].probed, n * sizeof(ProbedColumn));
        }
        side_by_side<work>(parts, count);
        for (Index t = 1; t < count; t++) {
            for (Index i = 0; pass.gram && i < square; i++)
                parts[0].gram[i] += parts[t].gram[i];
            if (pass.measure)
                add_sums(n, parts[t].sums, parts[t].probed, parts[0].sums, parts[0].probed);
        }
    }

    // Of rows (x1, x2) and (-x2, x1), from that of the first ones, in the first rows.
    void add_gram_of_other_rows()
    {
        for (Index i = 0; i < n; i += 2) {
            double *row = r + i * columns, *next = row + columns;
            for (Index j = i; j < n; j += 2) {
                row[j] += next[j + 1];
                row[j + 1] = j > i ? row[j + 1] - next[j] : 0.0;
            }
        }
    }

    // R of the Gram matrix, its diagonal enlarged by some part of itself; false where there is none.
    bool find_r(double shift)
    {
        memcpy(r, parts[0].gram, square * sizeof(double));
        if (parts_each == 2)
            add_gram_of_other_rows();
        if (!cholesky(r, n, columns, shift, parts_each))
            return false;
        for (Index i = 1; i < n; i++)
            memset(r + i * columns, 0, i * sizeof(double));
        invert_blocks(r, n, columns, inverses);
        return true;
    }

    // An estimate of ||I - Q^T Q||_F / sqrt(n) after one pass: it is R^-T E R^-1 for rounding errors E of the Gram matrix,
    // whose elements are some u, more for long sums, times two norms of columns. Random vectors show ||D R^-1||_F for
    // these norms D.
    double estimate_loss()
    {
        double sum = 0.0, *y = parts[0].rows;
        for (Index j = 0; j < n; j++) {
            double of_column = 0.0;
            for (Index i = 0; i <= j; i++)
                of_column += r[i * columns + j] * r[i * columns + j];
            for (int p = 0; p < PROBES; p++)
                y[j * PROBES + p] = sqrt(of_column) * problem.probes[j * PROBES + p];
        }
        for (Index i = 0; i < n; i++) {
            double *own = y + i * PROBES, *row = r + i * columns;
            for (int p = 0; p < PROBES; p++)
                own[p] /= row[i], sum += own[p] * own[p] / PROBES;
            for (Index j = i + 1; j < n; j++)
                for (int p = 0; p < PROBES; p++)
                    y[j * PROBES + p] -= row[j] * own[p];
        }
        memset(y, 0, n * PROBES * sizeof(double));
        return UNIT * (1.0 + sqrt(double(m)) / LONG) * sum / sqrt(double(n));
    }

    // product <- R product, after so many passes.
    void accumulate_r(int passes)
    {
        double *row = parts[0].rows;
        if (passes == 0) {
            memcpy(product, r, square * sizeof(double));
            return;
        }
        for (Index i = 0; i < n; i++) {  // later rows need no earlier one
            memset(row, 0, columns * sizeof(double));
            add_multiples(row, r + i * columns, 1, 1.0, product, columns, i, n, i, true);
            memcpy(product + i * columns, row, columns * sizeof(double));
        }
    }

    // ||I - Q^T Q||_F of rows that are Q's.
    double loss_of_gram() const
    {
        double sum = 0.0;
        for (Index i = 0; i < n; i++)
            for (Index j = i; j < n; j++) {
                double lost = parts[0].gram[i * columns + j] - (i == j);
                sum += (i == j ? 1.0 : 2.0) * lost * lost;
            }
        return sqrt(sum);
    }

    double smallest_pivot() const
    {
        double smallest = INFINITY;
        for (Index i = 0; i < n; i++)
            smallest = fmin(smallest, r[i * columns + i]);
        return smallest;
    }

    template <typename RView> ColumnNorms write_and_probe_r(const RView &to)
    {
        ColumnNorms norms;
        for (Index i = 0; i < n / parts_each; i++)
            for (Index j = 0; j < n; j++)
                to(i, j) = product[parts_each * i * columns + j];
        memset(parts[0].probed, 0, n * sizeof(ProbedColumn));
        if (parts_each == 2) {
            read_both_rows(to, 0, n / 2, n, columns, product);
            View<const double> both(product, columns, 1);
            probe_r(both, n, 0, 1, problem.probes, parts[0].probed, parts[0].rows, norms);
        } else {
            probe_r(to, n, 0, 1, problem.probes, parts[0].probed, parts[0].rows, norms);
        }
        add_image_of_r(n, parts[0].rows, parts[0].probed);
        memset(parts[0].rows, 0, n * PROBES * sizeof(double));
        return norms;
    }

    template <typename T> ColumnNorms write_r(Index member)
    {
        return parts_each == 2 ? write_and_probe_r(PartsView<T>(problem.r, member))
                               : write_and_probe_r(View<T>(problem.r, member));
    }

    // Factorize one of the batch, by shifted Cholesky QR where columns are too dependent for their Gram matrix; false
    // where there are no factors.
    bool factorize(Index member)
    {
        int passes = 0;
        for (Index t = 0; t < count; t++)
            parts[t].member = member;
        Pass next = {};
        next.gram = true;
        run(next);
        for (;; passes++) {
            bool found = find_r(0.0);
            double lost = found ? estimate_loss() : INFINITY;
            if (passes ? found && smallest_pivot() >= 0.5 : lost <= problem.loss)
                break;
            if (passes == MOST_PASSES || (!(lost <= MOST_LOST) && !find_r(gram_shift(parts_each * m, n))))
                return false;
            next.of_q = passes > 0, next.solve = true, next.refine = !(lost <= LITTLE_LOST);
            run(next);
            accumulate_r(passes);
        }
        accumulate_r(passes);
        ColumnNorms norms;
        with_type(problem.r.single, [&](auto type) { norms = write_r<decltype(type)>(member); });
        Pass last = {};
        last.of_q = passes > 0, last.solve = last.measure = true;
        // A tile of the Gram matrix takes less time than another look at Q, which the estimate of the norm may need.
        last.gram = columns == PADDED && parts_each == 1;
        run(last);
        double of_norm = parts_each == 2 ? margin_of_pairs(n) : margin(n);
        QRErrors &errors = problem.errors[member] =
            errors_of(parts[0].sums, norms, n, problem.probes, parts[0].probed, of_norm);
        if (double lost = loss_of_gram(); last.gram && lost < errors.norm)
            errors.norm = lost;
        double both = sqrt(double(parts_each));  // Frobenius norms of both rows
        errors.residual /= both, errors.image /= both, errors.loss /= both;
        return true;
    }
};

// Members of the batch for one thread, of which `threads` share the rows of each.
struct Members {
    const QRProblem *problem;
    Index first, last, threads;
    bool done;
};

void factorize_members(Members &part)
{
    QRProblem problem = *part.problem;
    problem.threads = part.threads;
    CholeskyQR work(problem);
    part.done = bool(work.workspace);
    for (Index member = part.first; part.done && member < part.last; member++)
        if (!work.factorize(member))
            problem.errors[member] = {NAN, NAN, NAN, NAN, NAN, NAN};
}

}  // namespace

// Numbers that are not finite, or beyond the range of squares, leave a matrix without factors; its errors are NaN. Each thread
// has whole matrices where there are as many of them, else some rows of each.
Status cholesky_qr(const QRProblem &problem)
{
    Members parts[MOST_THREADS];
    Index threads = problem.threads < MOST_THREADS ? problem.threads : MOST_THREADS;
    Index count = problem.batch < threads ? 1 : threads;
    bool done = true;
    for (Index t = 0; t < count; t++)
        parts[t] = {&problem, t * problem.batch / count, (t + 1) * problem.batch / count, threads / count, false};
    side_by_side<factorize_members>(parts, count);
    for (Index t = 0; t < count; t++)
        done = done && parts[t].done;
    return done ? Status::done : Status::no_memory;
}

NEULA_END
