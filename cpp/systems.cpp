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

// By how much rounding errors of inner products of complex numbers may be larger than those of real ones: each part has twice
// as many products, and a vector of their errors is up to the square root of 2 larger than that of magnitudes (N. J. Higham,
// "Accuracy and Stability of Numerical Algorithms", 2002, section 3.6).
template <typename Lanes> constexpr double ROUNDINGS = PARTS<Lanes> == 1 ? 1.0 : 0x1.6a09e667f3bcdp1;

// A group of as many systems as Lanes has numbers, its factors, and its workspace: columns of `height` vectors, with zeros
// behind the last row.
template <typename Lanes> struct Group : LuFactors<Lanes> {
    const SystemsProblem &problem;
    Workspace workspace;
    Vec *column_norms, *row_sums;
    Column<Lanes> *a, *sides;
    Column<Lanes> *before, *after;  // residuals of an update
    Column<Lanes> *change, *rest, *images;

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
        for (Index top = 0; top < n; top += LINE_ROWS)
            for (Index j = 0; j < n; j++)
                for (Index i = top; i < n && i < top + LINE_ROWS; i++)
                    set_number(g.a, j * width + i * LANES<Lanes> + l, One<Lanes>(a[i * x.row + j * x.column]));
    }
    if constexpr (ALONE<Lanes>)
        for (Index j = 0; j < n; j++)
            for (Index i = n; i < width; i++)
                set_number(g.a, j * width + i, 0.0);
}

template <typename Lanes> void read_right_side(const Group<Lanes> &g, Index first, Index column, Column<Lanes> *to)
{
    clear(to, g.height);
    for (int l = 0; l < LANES<Lanes>; l++) {
        Index member = g.member(first, l);
        for (Index i = 0; i < g.n; i++)
            set_number(to, i * LANES<Lanes> + l, element<One<Lanes>>(g.problem.b, member, i, column));
    }
}

template <typename Lanes> SystemNorms<Real<Lanes>> measure_matrices(Group<Lanes> &g)
{
    Index n = g.n, height = g.height;
    using Size = Real<Lanes>;
    Size square_of_norm = {};
    Vec most = {};
    clear(g.row_sums, height);
    clear(g.column_norms, height);
    for (Index j = 0; j < n; j++) {
        const Column<Lanes> *column = g.a + j * height;
        Vec square = {};
        for (Index v = 0; v < height; v++) {
            Vec size = magnitude(column[v]);
            g.row_sums[v] += size;
            most = larger(size, most);
            square += size * size;
        }
        Size sum = total<Size>(square);
        square_of_norm += sum;
        set<Size>(g.column_norms, j, square_root(sum));
    }
    SystemNorms<Size> norms;
    norms.largest = largest<Size>(most), norms.norm = square_root(square_of_norm);
    norms.infinity_norm = largest_magnitude<Size>(g.row_sums, height);
    norms.smallest_column = smallest_element<Size>(g.column_norms, n);
    norms.judge(smallest_element<Size>(g.row_sums, n), largest_magnitude<Size>(g.column_norms, height), n, g.problem.limits);
    return norms;
}

// Whether matrices are Hermitian up to rounding errors of the precision in which they are given, and all pivots positive:
// then they are definite, and up to rounding errors of A, U is D L^T and no element has grown.
template <typename Lanes> Truth<Lanes> is_definite(const Group<Lanes> &g, Real<Lanes> largest_element)
{
    const double unit = g.problem.a.single ? SINGLE_UNIT : UNIT;
    Index n = g.n, height = g.height;
    Real<Lanes> most = {}, zero = {};
    for (Index j = 0; j < n; j++)
        for (Index i = 0; i <= j; i++) {
            Lanes mirrored = conjugate(get<Lanes>(g.a + i * height, j));
            most = larger(comparable(get<Lanes>(g.a + j * height, i) - mirrored), most);
        }
    Real<Lanes> difference = from_comparable<Lanes>(most);
    return (difference <= n * unit * largest_element) & (smallest_element<Lanes>(g.reciprocals, n) > zero);
}

// A times some columns.
template <typename Lanes> void multiply(const Group<Lanes> &g, const Column<Lanes> *x, Column<Lanes> *images, Index count)
{
    Index height = g.height;
    clear(images, count * height);
    for (Index j = 0; j < g.n; j++) {
        const Column<Lanes> *column = g.a + j * height;
        for (Index c = 0; c < count; c++) {
            Column<Lanes> factor = all(get<Lanes>(x + c * height, j)), *image = images + c * height;
            for (Index v = 0; v < height; v++)
                image[v] = plus_product(image[v], column[v], factor);
        }
    }
}

// The componentwise backward error, max |r| / (|A| |x| + |b|).
template <typename Lanes>
Real<Lanes> componentwise_error(Group<Lanes> &g, const Column<Lanes> *x, const Column<Lanes> *b, const Column<Lanes> *residual)
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
template <typename Vectors> void rounding_to_float(const Vectors *x, Vectors *lost, Index height)
{
    for (Index i = 0; i < height * WIDTH; i++)
        set_number(lost, i, number(x, i) - rounded_to_single(number(x, i)));
}

// Refinement of solutions for one right-hand side. Numbers of systems that need no more updates stay as they are. An update
// converges where the residual that is `left` is at most `tolerable`; where one does not, no other follows.
template <typename Lanes> struct SystemRefinement {
    using Size = Real<Lanes>;
    using Vectors = Column<Lanes>;

    Group<Lanes> &g;
    const SystemNorms<Size> &norms;
    const Size inverse_norm;
    Vectors *x;
    const Vectors *b;
    Truth<Lanes> active;
    SystemNumbers<Size> found = {};
    Size left = {}, tolerable = {}, noise = {}, floor = {};

    void begin()
    {
        clear(g.before, g.height);
        clear(g.after, g.height);
        clear(g.rest, g.height);
    }

    // ||A|| ||x|| + ||b|| in infinity norms: the unit of backward errors.
    Size scale() const
    {
        return norms.infinity_norm * largest_magnitude<Lanes>(x, g.height) + largest_magnitude<Lanes>(b, g.height);
    }

    void find_residual()
    {
        Vectors *before = g.before, *image = g.images;
        const Truth<Lanes> where = active;
        doubled_residual<Lanes>(g.a, g.n, g.height, b, x, g.rest, image, image + g.height);
        for (Index v = 0, height = g.height; v < height; v++)
            before[v] = chosen(where, image[v], before[v]);
    }

    void find_update()
    {
        Vectors *change = g.change;
        const Truth<Lanes> where = active;
        g.permute(g.before, change);
        g.substitute(change, 1);
        for (Index v = 0, height = g.height; v < height; v++)
            change[v] = chosen(where, change[v], Vectors{});
        found.history[0] =
            chosen(found.updates == Size{}, largest_magnitude<Lanes>(g.before, g.height) / scale(), found.history[0]);
    }

    void add_update()
    {
        Vectors *rest = g.rest, *change = g.change;
        for (Index v = 0, height = g.height; v < height; v++)
            add_doubled(x[v], rest[v], change[v]);
    }

    // Measure the residual that is left.
    bool needs_another(int steps)
    {
        const SystemLimits &limits = g.problem.limits;
        Index n = g.n, height = g.height;
        Vectors *before = g.before, *after = g.after, *image = g.images;
        const Truth<Lanes> where = active;
        multiply(g, g.change, image, 1);
        for (Index v = 0; v < height; v++)
            after[v] = chosen(where, before[v] - image[v], after[v]);
        Size now = column_norm<Lanes>(after, height), norm_before = column_norm<Lanes>(before, height);
        // Doubled products (doubled.hpp), by the inequality of Cauchy and Schwarz; b is one more.
        double unit = (n + 2) * UNIT * ROUNDINGS<Lanes>;
        Size least = unit * unit * (norms.norm * column_norm<Lanes>(x, height) + column_norm<Lanes>(b, height));
        // Rounding of the residual to one number, of A times the change, and of their difference.
        Size rounding = least + unit * (norm_before + norms.norm * column_norm<Lanes>(g.change, height));
        Size error = largest_magnitude<Lanes>(after, height) / scale();
        for (int later = steps; later <= MOST_UPDATES; later++)
            found.history[later] = chosen(where, error, found.history[later]);
        found.updates = chosen(where, constant<Size>(steps), found.updates);
        left = chosen(where, now, left);
        tolerable = chosen(where, limits.max_rate * norm_before + rounding, tolerable);
        noise = chosen(where, rounding, noise);
        floor = chosen(where, least, floor);
        Size bound = inverse_norm * (now + rounding) / scaled_norm<Lanes>(g.column_norms, x, height);
        active = active & (now <= tolerable) & (bound > constant<Size>(limits.digits)) & (now > least);
        return any_of(active);
    }

    // Evidence of x as it will be rounded, of systems that are `solvable`.
    void measure(Truth<Lanes> solvable)
    {
        const SystemLimits &limits = g.problem.limits;
        Index height = g.height;
        bool single = g.problem.single_result;
        Vectors *lost = g.rest + height, *residual = g.after;
        Vec square = {}, most = {};
        clear(lost, height);
        if (single)
            rounding_to_float(x, lost, height);
        multiply(g, g.rest, g.images, single ? 2 : 1);
        for (Index v = 0; v < height; v++) {
            residual[v] += g.images[v];
            square += squared(single ? residual[v] + g.images[height + v] : residual[v]);
            most = larger(comparable(residual[v]), most);
        }
        Size norm_b = column_norm<Lanes>(b, height), size = scaled_norm<Lanes>(g.column_norms, x, height);
        Size error = from_comparable<Lanes>(largest<Lanes>(most)) / scale();
        if (!all_of(norms.equilibrated))
            error = chosen(norms.equilibrated, error, componentwise_error(g, x, b, residual));
        Size bound = inverse_norm * (left + noise) / size;
        Size rest = scaled_norm<Lanes>(g.column_norms, g.rest, height) / size;
        Size rounding = scaled_norm<Lanes>(g.column_norms, lost, height) / size;
        measure_rounded<Size>(found, error, bound, rest + rounding, limits.computed);
        found.history[MOST_UPDATES] = error;
        found.residual = square_root(total<Size>(square)) / norm_b;
        Truth<Lanes> sound = solvable & (left <= tolerable) & in_safe_range(norm_b, limits) &
                             ((bound <= constant<Size>(limits.digits)) | (left <= floor));
        found.doubtful = chosen(sound, Size{}, constant<Size>(1.0));
    }
};

// ||A D^-1||_2 by a step of the power method, from below.
template <typename Lanes> Real<Lanes> equilibrated_norm(Group<Lanes> &g)
{
    using Size = Real<Lanes>;
    Index n = g.n, height = g.height;
    Column<Lanes> *v = g.change, *image = g.images;
    Size sum = {};
    clear(v, height);
    for (Index j = 0; j < n; j++)
        set<Lanes>(v, j, g.problem.vectors[g.problem.probes * n + j] / get<Size>(g.column_norms, j));
    multiply(g, v, image, 1);
    for (Index j = 0; j < n; j++)
        sum += squared(inner_product<Lanes>(g.a + j * height, image, height) / get<Size>(g.column_norms, j));
    return square_root(sum) / column_norm<Lanes>(image, height);
}

// Returns the largest elements.
template <typename Lanes>
Real<Lanes> store_solution(
    const Group<Lanes> &g, SystemsSolution &to, Index first, Index column, const Column<Lanes> *x, Real<Lanes> forward_error)
{
    Real<Lanes> largest = {};
    const SystemsProblem &p = g.problem;
    Index n = g.n, k = p.k;
    for (int l = 0; l < LANES<Lanes> && first + l < p.count; l++) {
        double most = 0.0;
        for (Index i = 0; i < n; i++) {
            One<Lanes> element = number(x, i * LANES<Lanes> + l);
            element = p.single_result ? rounded_to_single(element) : element;
            reinterpret_cast<One<Lanes> *>(to.x)[((first + l) * n + i) * k + column] = element;
            most = worse(most, magnitude(element));
        }
        set_lane(largest, l, most);
        to.forward_error[(first + l) * k + column] = lane(forward_error, l);
    }
    return largest;
}

template <typename Lanes> void solve_group(Group<Lanes> &g, SystemsSolution &to, Index first)
{
    using Size = Real<Lanes>;
    const SystemsProblem &p = g.problem;
    const SystemLimits &limits = p.limits;
    Index k = p.k, height = g.height;
    with_type(p.a.single, [&](auto type) { read_matrices<Stored<Lanes, decltype(type)>>(g, first); });
    SystemNorms<Size> norms = measure_matrices(g);
    Size growth = g.factorize(g.a, !p.definite) / norms.largest, square = {};
    if (p.definite) {
        growth = constant<Size>(1.0);
        norms.in_safe_range = norms.in_safe_range & is_definite(g, norms.largest);
    }
    Column<Lanes> *sides = g.sides, *x = sides + k * height, *z = x + k * height;
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
        Size size = scaled_norm<Lanes>(g.column_norms, z + probe * height, height);
        square += size * size;
    }
    // Solves err by the rate at most: the true norm of the inverse is larger by 1 / (1 - rate).
    Size estimate = square_root(square), inverse_norm = limits.margin * estimate;
    Size rate = limits.rounding * UNIT * ROUNDINGS<Lanes> * norms.norm * inverse_norm / norms.smallest_column;
    Size condition = larger(equilibrated_norm(g), constant<Size>(1.0)) * estimate;  // columns have norm 1
    Truth<Lanes> solvable = norms.in_safe_range & (rate <= constant<Size>(limits.max_rate));
    SystemNumbers<Size> worst = {};
    for (Index c = 0; c < k; c++) {
        Column<Lanes> *found = x + c * height;
        SystemRefinement<Lanes> refinement = {g, norms, inverse_norm / (1.0 - rate), found, sides + c * height, solvable};
        refinement.begin();
        refine(refinement, MOST_UPDATES);
        refinement.measure(solvable);
        refinement.found.largest = store_solution(g, to, first, c, found, refinement.found.forward_error);
        join_worst<Size>(worst, refinement.found);
    }
    worst.condition = larger(condition, constant<Size>(1.0)), worst.condition_bound = limits.estimated * worst.condition;
    worst.growth = growth;
    write_evidence<Size>(worst, to.evidence, first, p.count);
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
    bool together = p.n <= TOGETHER && p.count > 1;
    if (p.a.complex)
        return together ? solve_groups<ComplexVec>(p, to) : solve_groups<Complex>(p, to);
    return together ? solve_groups<Vec>(p, to) : solve_groups<double>(p, to);
}

NEULA_END
