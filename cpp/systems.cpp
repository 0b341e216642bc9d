// Batches of small linear systems with the evidence of each.
//
// Tiny systems of a batch are solved as many at a time as a vector has lanes, others one after the other, each by vectors of
// its rows. One template does both.
#include "lu.hpp"
#include "matrices.hpp"
#include "refinement.hpp"
#include "rows.hpp"
#include "threads.hpp"

NEULA_BEGIN

namespace {

constexpr Index TOGETHER = 24;  // order up to which systems of a batch take less time in lanes of vectors
constexpr Index LINE_ROWS = 8;  // doubles of a line of the cache

// A group of as many systems as Lanes has numbers, its factors, and its workspace: columns of `height` vectors, with zeros
// behind the last row.
template <typename Lanes> struct Group : LuFactors<Lanes> {
    const SystemsProblem &problem;
    Workspace workspace;
    Vec *a, *column_norms, *row_sums, *sides;
    Vec *before, *after;  // residuals of an update
    Vec *change, *rest, *images;

    explicit Group(const SystemsProblem &p) : LuFactors<Lanes>(p.n), problem(p)
    {
        Index size = this->column_size(), of_sides = 2 * p.k + p.probes;
        if (!workspace.allocate(this->size() + (p.n + of_sides + 9) * size, Filled::no))
            return;
        this->take(workspace);
        workspace.take(p.n * size, a);
        workspace.take(size, column_norms, row_sums, before, after, change);
        workspace.take(2 * size, rest, images);
        workspace.take(of_sides * size, sides);  // right-hand sides, then these and random vectors in the order of the factors
    }

    // Systems of a group behind the last one repeat that.
    Index member(Index first, int l) const { return first + l < problem.count ? first + l : problem.count - 1; }
};

template <typename T, typename Lanes> void read_matrices(Group<Lanes> &g, Index first)
{
    const Matrices &x = g.problem.a;
    Index n = g.n, width = g.height * WIDTH;
    for (int l = 0; l < LANES<Lanes>; l++) {
        const T *a = static_cast<const T *>(x.data) + g.member(first, l) * x.member;
        double *to = reinterpret_cast<double *>(g.a) + l;
        for (Index top = 0; top < n; top += LINE_ROWS)
            for (Index j = 0; j < n; j++)
                for (Index i = top; i < n && i < top + LINE_ROWS; i++)
                    to[j * width + i * LANES<Lanes>] = double(a[i * x.row + j * x.column]);
    }
    if constexpr (ALONE<Lanes>)
        for (Index j = 0; j < n; j++)
            for (Index i = n; i < width; i++)
                reinterpret_cast<double *>(g.a)[j * width + i] = 0.0;
}

template <typename Lanes> void read_right_side(const Group<Lanes> &g, Index first, Index column, Vec *to)
{
    clear(to, g.height);
    for (int l = 0; l < LANES<Lanes>; l++) {
        Index member = g.member(first, l);
        for (Index i = 0; i < g.n; i++)
            reinterpret_cast<double *>(to)[i * LANES<Lanes> + l] = element(g.problem.b, member, i, column);
    }
}

template <typename Lanes> SystemNorms<Lanes> measure_matrices(Group<Lanes> &g)
{
    Index n = g.n, height = g.height;
    Lanes square_of_norm = {};
    Vec most = {};
    clear(g.row_sums, height);
    clear(g.column_norms, height);
    for (Index j = 0; j < n; j++) {
        const Vec *column = g.a + j * height;
        Vec square = {};
        for (Index v = 0; v < height; v++) {
            Vec size = magnitude(column[v]);
            g.row_sums[v] += size;
            most = larger(size, most);
            square += size * size;
        }
        Lanes sum = total<Lanes>(square);
        square_of_norm += sum;
        set<Lanes>(g.column_norms, j, square_root(sum));
    }
    SystemNorms<Lanes> norms;
    norms.largest = largest<Lanes>(most), norms.norm = square_root(square_of_norm);
    norms.infinity_norm = largest_magnitude<Lanes>(g.row_sums, height);
    norms.smallest_column = smallest_element<Lanes>(g.column_norms, n);
    norms.judge(smallest_element<Lanes>(g.row_sums, n), largest_magnitude<Lanes>(g.column_norms, height), n, g.problem.limits);
    return norms;
}

// Whether matrices are symmetric up to rounding errors, and all pivots positive: then they are definite, U is D L^T, and no
// element has grown.
template <typename Lanes> Truth<Lanes> is_definite(const Group<Lanes> &g, Lanes largest_element)
{
    Index n = g.n, height = g.height;
    Lanes difference = {};
    for (Index j = 0; j < n; j++)
        for (Index i = 0; i < j; i++)
            difference = larger(magnitude(get<Lanes>(g.a + j * height, i) - get<Lanes>(g.a + i * height, j)), difference);
    return (difference <= n * UNIT * largest_element) & (smallest_element<Lanes>(g.reciprocals, n) > constant<Lanes>(0.0));
}

// A times some columns.
template <typename Lanes> void multiply(const Group<Lanes> &g, const Vec *x, Vec *images, Index count)
{
    Index height = g.height;
    clear(images, count * height);
    for (Index j = 0; j < g.n; j++) {
        const Vec *column = g.a + j * height;
        for (Index c = 0; c < count; c++) {
            Vec factor = all(get<Lanes>(x + c * height, j)), *image = images + c * height;
            for (Index v = 0; v < height; v++)
                image[v] = plus_product(image[v], column[v], factor);
        }
    }
}

// The componentwise backward error, max |r| / (|A| |x| + |b|).
template <typename Lanes> Lanes componentwise_error(Group<Lanes> &g, const Vec *x, const Vec *b, const Vec *residual)
{
    Index height = g.height;
    Vec *sums = g.row_sums, most = {};
    for (Index v = 0; v < height; v++)
        sums[v] = magnitude(b[v]);
    for (Index j = 0; j < g.n; j++) {
        Vec size = all(magnitude(get<Lanes>(x, j)));
        for (Index v = 0; v < height; v++)
            sums[v] += magnitude(g.a[j * height + v]) * size;
    }
    for (Index v = 0; v < height; v++) {
        Vec size = magnitude(residual[v]);
        most = larger(chosen(size == Vec{}, size, size / sums[v]), most);
    }
    return largest<Lanes>(most);
}

// lost = x - float(x), element by element.
void rounding_to_float(const Vec *x, Vec *lost, Index height)
{
    for (Index i = 0; i < height * WIDTH; i++) {
        double element = get<double>(x, i);
        set<double>(lost, i, element - double(float(element)));
    }
}

// Refinement of solutions for one right-hand side. Numbers of systems that need no more updates stay as they are. An update
// converges where the residual that is `left` is at most `tolerable`; where one does not, no other follows.
template <typename Lanes> struct SystemRefinement {
    Group<Lanes> &g;
    const SystemNorms<Lanes> &norms;
    const Lanes inverse_norm;
    Vec *x;
    const Vec *b;
    Truth<Lanes> active;
    SystemNumbers<Lanes> found = {};
    Lanes left = {}, tolerable = {}, noise = {}, floor = {};

    void begin()
    {
        clear(g.before, g.height);
        clear(g.after, g.height);
        clear(g.rest, g.height);
    }

    // ||A|| ||x|| + ||b|| in infinity norms: the unit of backward errors.
    Lanes scale() const
    {
        return norms.infinity_norm * largest_magnitude<Lanes>(x, g.height) + largest_magnitude<Lanes>(b, g.height);
    }

    void find_residual()
    {
        Vec *before = g.before, *image = g.images;
        const Truth<Lanes> where = active;
        doubled_residual<Lanes>(g.a, g.n, g.height, b, x, g.rest, image, image + g.height);
        for (Index v = 0, height = g.height; v < height; v++)
            before[v] = chosen(where, image[v], before[v]);
    }

    void find_update()
    {
        Vec *change = g.change;
        const Truth<Lanes> where = active;
        g.permute(g.before, change);
        g.substitute(change, 1);
        for (Index v = 0, height = g.height; v < height; v++)
            change[v] = chosen(where, change[v], Vec{});
        found.history[0] =
            chosen(found.updates == Lanes{}, largest_magnitude<Lanes>(g.before, g.height) / scale(), found.history[0]);
    }

    void add_update()
    {
        Vec *rest = g.rest, *change = g.change;
        for (Index v = 0, height = g.height; v < height; v++)
            add_doubled(x[v], rest[v], change[v]);
    }

    // Measure the residual that is left.
    bool needs_another(int steps)
    {
        const SystemLimits &limits = g.problem.limits;
        Index n = g.n, height = g.height;
        Vec *before = g.before, *after = g.after, *image = g.images;
        const Truth<Lanes> where = active;
        multiply(g, g.change, image, 1);
        for (Index v = 0; v < height; v++)
            after[v] = chosen(where, before[v] - image[v], after[v]);
        Lanes now = column_norm<Lanes>(after, height), norm_before = column_norm<Lanes>(before, height);
        // Doubled products (doubled.hpp), by the inequality of Cauchy and Schwarz; b is one more.
        double doubled = (n + 2) * UNIT * (n + 2) * UNIT;
        Lanes least = doubled * (norms.norm * column_norm<Lanes>(x, height) + column_norm<Lanes>(b, height));
        // Rounding of the residual to one number, of A times the change, and of their difference.
        Lanes rounding = least + (n + 2) * UNIT * (norm_before + norms.norm * column_norm<Lanes>(g.change, height));
        Lanes error = largest_magnitude<Lanes>(after, height) / scale();
        for (int later = steps; later <= MOST_UPDATES; later++)
            found.history[later] = chosen(where, error, found.history[later]);
        found.updates = chosen(where, constant<Lanes>(steps), found.updates);
        left = chosen(where, now, left);
        tolerable = chosen(where, limits.max_rate * norm_before + rounding, tolerable);
        noise = chosen(where, rounding, noise);
        floor = chosen(where, least, floor);
        Lanes bound = inverse_norm * (now + rounding) / scaled_norm<Lanes>(g.column_norms, x, height);
        active = active & (now <= tolerable) & (bound > constant<Lanes>(limits.digits)) & (now > least);
        return any_of(active);
    }

    // Evidence of x as it will be rounded, of systems that are `solvable`.
    void measure(Truth<Lanes> solvable)
    {
        const SystemLimits &limits = g.problem.limits;
        Index height = g.height;
        bool single = g.problem.single_result;
        Vec *lost = g.rest + height, *residual = g.after, square = {}, most = {};
        clear(lost, height);
        if (single)
            rounding_to_float(x, lost, height);
        multiply(g, g.rest, g.images, single ? 2 : 1);
        for (Index v = 0; v < height; v++) {
            residual[v] += g.images[v];
            Vec rounded_residual = single ? residual[v] + g.images[height + v] : residual[v];
            square += rounded_residual * rounded_residual;
            most = larger(magnitude(residual[v]), most);
        }
        Lanes norm_b = column_norm<Lanes>(b, height), size = scaled_norm<Lanes>(g.column_norms, x, height);
        Lanes error = largest<Lanes>(most) / scale();
        if (!all_of(norms.equilibrated))
            error = chosen(norms.equilibrated, error, componentwise_error(g, x, b, residual));
        Lanes bound = inverse_norm * (left + noise) / size;
        Lanes rest = scaled_norm<Lanes>(g.column_norms, g.rest, height) / size;
        Lanes rounding = scaled_norm<Lanes>(g.column_norms, lost, height) / size;
        measure_rounded(found, error, bound, rest + rounding, limits.computed);
        found.history[MOST_UPDATES] = error;
        found.residual = square_root(total<Lanes>(square)) / norm_b;
        Truth<Lanes> sound = solvable & (left <= tolerable) & in_safe_range(norm_b, limits) &
                             ((bound <= constant<Lanes>(limits.digits)) | (left <= floor));
        found.doubtful = chosen(sound, Lanes{}, constant<Lanes>(1.0));
    }
};

// ||A D^-1||_2 by a step of the power method, from below.
template <typename Lanes> Lanes equilibrated_norm(Group<Lanes> &g)
{
    Index n = g.n, height = g.height;
    Vec *v = g.change, *image = g.images;
    Lanes sum = {};
    clear(v, height);
    for (Index j = 0; j < n; j++)
        set<Lanes>(v, j, g.problem.vectors[g.problem.probes * n + j] / get<Lanes>(g.column_norms, j));
    multiply(g, v, image, 1);
    for (Index j = 0; j < n; j++) {
        Lanes y = inner_product<Lanes>(g.a + j * height, image, height) / get<Lanes>(g.column_norms, j);
        sum += y * y;
    }
    return square_root(sum) / column_norm<Lanes>(image, height);
}

// Returns the largest elements.
template <typename Lanes>
Lanes store_solution(const Group<Lanes> &g, SystemsSolution &to, Index first, Index column, const Vec *x, Lanes forward_error)
{
    Lanes largest = {};
    const SystemsProblem &p = g.problem;
    Index n = g.n, k = p.k;
    for (int l = 0; l < LANES<Lanes> && first + l < p.count; l++) {
        double most = 0.0;
        for (Index i = 0; i < n; i++) {
            double element = get<double>(x, i * LANES<Lanes> + l);
            element = p.single_result ? double(float(element)) : element;
            to.x[((first + l) * n + i) * k + column] = element;
            most = worse(most, magnitude(element));
        }
        set_lane(largest, l, most);
        to.forward_error[(first + l) * k + column] = lane(forward_error, l);
    }
    return largest;
}

template <typename Lanes> void solve_group(Group<Lanes> &g, SystemsSolution &to, Index first)
{
    const SystemsProblem &p = g.problem;
    const SystemLimits &limits = p.limits;
    Index k = p.k, height = g.height;
    with_type(p.a.single, [&](auto type) { read_matrices<decltype(type)>(g, first); });
    SystemNorms<Lanes> norms = measure_matrices(g);
    Lanes growth = g.factorize(g.a, !p.definite) / norms.largest, square = {};
    if (p.definite) {
        growth = constant<Lanes>(1.0);
        norms.in_safe_range = norms.in_safe_range & is_definite(g, norms.largest);
    }
    Vec *sides = g.sides, *x = sides + k * height, *z = x + k * height;
    for (Index c = 0; c < k; c++) {
        read_right_side(g, first, c, sides + c * height);
        g.permute(sides + c * height, x + c * height);
    }
    for (Index probe = 0; probe < p.probes; probe++) {  // further right-hand sides
        const double *vector = p.vectors + probe * p.n;
        g.permute_elements([vector](int, Index i) { return vector[i]; }, z + probe * height);
    }
    g.substitute(x, k + p.probes);
    for (Index probe = 0; probe < p.probes; probe++) {
        Lanes size = scaled_norm<Lanes>(g.column_norms, z + probe * height, height);
        square += size * size;
    }
    // Solves err by the rate at most: the true norm of the inverse is larger by 1 / (1 - rate).
    Lanes estimate = square_root(square), inverse_norm = limits.margin * estimate;
    Lanes rate = limits.rounding * UNIT * norms.norm * inverse_norm / norms.smallest_column;
    Lanes condition = larger(equilibrated_norm(g), constant<Lanes>(1.0)) * estimate;  // columns have norm 1
    Truth<Lanes> solvable = norms.in_safe_range & (rate <= constant<Lanes>(limits.max_rate));
    SystemNumbers<Lanes> worst = {};
    for (Index c = 0; c < k; c++) {
        Vec *found = x + c * height;
        SystemRefinement<Lanes> refinement = {g, norms, inverse_norm / (1.0 - rate), found, sides + c * height, solvable};
        refinement.begin();
        refine(refinement, MOST_UPDATES);
        refinement.measure(solvable);
        refinement.found.largest = store_solution(g, to, first, c, found, refinement.found.forward_error);
        join_worst<Lanes>(worst, refinement.found);
    }
    worst.condition = larger(condition, constant<Lanes>(1.0)), worst.condition_bound = limits.estimated * worst.condition;
    worst.growth = growth;
    write_evidence<Lanes>(worst, to.evidence, first, p.count);
}

struct Part {
    const SystemsProblem *problem;
    SystemsSolution *to;
    Index first, last;
    bool done;
};

template <typename Lanes> void solve_part(Part &part)
{
    Group<Lanes> group(*part.problem);
    part.done = bool(group.workspace);
    for (Index first = part.first; part.done && first < part.last; first += LANES<Lanes>)
        solve_group(group, *part.to, first);
}

// Each thread has whole groups: no number depends on how many threads there are.
template <typename Lanes> Status solve_groups(const SystemsProblem &p, SystemsSolution &to)
{
    Part parts[MOST_THREADS];
    Index groups = (p.count + LANES<Lanes> - 1) / LANES<Lanes>;
    Index threads = p.threads < groups ? p.threads : groups;
    threads = threads < MOST_THREADS ? threads : MOST_THREADS;
    for (Index t = 0; t < threads; t++) {
        Index first = t * groups / threads * LANES<Lanes>, last = (t + 1) * groups / threads * LANES<Lanes>;
        parts[t] = {&p, &to, first, last < p.count ? last : p.count, false};
    }
    side_by_side<solve_part<Lanes>>(parts, threads);
    bool done = true;
    for (Index t = 0; t < threads; t++)
        done = done && parts[t].done;
    return done ? Status::done : Status::no_memory;
}

}  // namespace

Status solve_systems(const SystemsProblem &p, SystemsSolution &to)
{
    return p.n <= TOGETHER && p.count > 1 ? solve_groups<Vec>(p, to) : solve_groups<double>(p, to);
}

NEULA_END
