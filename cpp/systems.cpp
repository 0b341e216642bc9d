// Batches of small linear systems with the evidence of each.
//
// Tiny systems of a batch are solved as many at a time as a vector has lanes, others one after the other, each by vectors of
// its rows. One template does both.
#include "systems_refine.hpp"
#include "threads.hpp"

NEULA_BEGIN

namespace {

constexpr Index TOGETHER = 24;  // order up to which systems of a batch take less time in lanes of vectors

// Random vectors as further right-hand sides, in the order of the factors.
template <typename Lanes> void permute_probes(Group<Lanes> &g, Vec *to)
{
    Index n = g.n, first = place<Lanes>(n);
    for (Index p = 0; p < g.problem.probes; p++, to += g.height) {
        clear(to + first, g.height - first);
        for (int l = 0; l < LANES<Lanes>; l++)
            for (Index i = 0; i < n; i++)
                reinterpret_cast<double *>(to)[i * LANES<Lanes> + l] = g.problem.vectors[p * n + g.order[l * n + i]];
    }
}

// ||A D^-1||_2 by a step of the power method, from below.
template <typename Lanes> Lanes equilibrated_norm(Group<Lanes> &g)
{
    Index n = g.n, height = g.height;
    Vec *v = g.change, *image = g.images;
    Lanes sum = {};
    clear(v, height);
    for (Index j = 0; j < n; j++)
        set(v, j, g.problem.vectors[g.problem.probes * n + j] / get<Lanes>(g.column_norms, j));
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

template <typename Lanes>
void store_evidence(
    const Group<Lanes> &g, SystemsSolution &to, Index first, const Refined<Lanes> &worst, Lanes condition, Lanes growth)
{
    constexpr Index NUMBERS = sizeof(SystemEvidence) / sizeof(double);
    Index count = g.problem.count;
    for (int l = 0; l < LANES<Lanes> && first + l < count; l++) {
        SystemEvidence evidence;
        evidence.doubtful = lane(worst.sound, l) ? 0.0 : 1.0;
        evidence.residual = lane(worst.residual, l);
        evidence.refined_error = lane(worst.history[MOST_UPDATES], l);
        evidence.backward_error = lane(worst.backward_error, l);
        evidence.forward_error = lane(worst.forward_error, l);
        evidence.condition = lane(condition, l);
        evidence.condition_bound = g.problem.limits.estimated * evidence.condition;
        evidence.largest = lane(worst.largest, l);
        evidence.growth = lane(growth, l);
        evidence.updates = lane(worst.updates, l);
        for (int step = 0; step <= MOST_UPDATES; step++)
            evidence.history[step] = lane(worst.history[step], l);
        double numbers[NUMBERS];
        memcpy(numbers, &evidence, sizeof(evidence));
        for (Index i = 0; i < NUMBERS; i++)
            to.evidence[i * count + first + l] = numbers[i];
    }
}

template <typename Lanes> void solve_group(Group<Lanes> &g, SystemsSolution &to, Index first)
{
    const SystemsProblem &p = g.problem;
    const SystemLimits &limits = p.limits;
    Index k = p.k, height = g.height;
    if (p.a.single)
        read_matrices<float>(g, first);
    else
        read_matrices<double>(g, first);
    Norms<Lanes> norms = measure_matrices(g);
    Lanes growth = factorize(g) / norms.largest, square = {};
    if (p.definite) {
        growth = constant<Lanes>(1.0);
        norms.in_safe_range = norms.in_safe_range & is_definite(g, norms.largest);
    }
    Vec *sides = g.sides, *x = sides + k * height, *z = x + k * height;
    for (Index c = 0; c < k; c++) {
        read_right_side(g, first, c, sides + c * height);
        permute(g, sides + c * height, x + c * height);
    }
    permute_probes(g, z);
    substitute(g, x, k + p.probes);
    for (Index probe = 0; probe < p.probes; probe++) {
        Lanes size = scaled_norm<Lanes>(g.column_norms, z + probe * height, height);
        square += size * size;
    }
    // Solves err by the rate at most: the true norm of the inverse is larger by 1 / (1 - rate).
    Lanes estimate = square_root(square), inverse_norm = limits.margin * estimate;
    Lanes rate = limits.rounding * UNIT * norms.norm * inverse_norm / norms.smallest_column;
    Lanes condition = larger(equilibrated_norm(g), constant<Lanes>(1.0)) * estimate;  // columns have norm 1
    Refined<Lanes> worst = {};
    worst.sound = rate <= constant<Lanes>(limits.max_rate);
    for (Index c = 0; c < k; c++) {
        Vec *found = x + c * height;
        Refined<Lanes> refined =
            refine(g, norms, inverse_norm / (1 - rate), worst.sound, found, sides + c * height);
        worst.largest = worse(store_solution(g, to, first, c, found, refined.forward_error), worst.largest);
        for (int step = 0; step <= MOST_UPDATES; step++)
            worst.history[step] = worse(refined.history[step], worst.history[step]);
        worst.updates = larger(refined.updates, worst.updates);
        worst.residual = worse(refined.residual, worst.residual);
        worst.backward_error = worse(refined.backward_error, worst.backward_error);
        worst.forward_error = worse(refined.forward_error, worst.forward_error);
        worst.sound = worst.sound & refined.sound;
    }
    store_evidence(g, to, first, worst, larger(condition, constant<Lanes>(1.0)), growth);
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
