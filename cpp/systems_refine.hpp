// Refinement of solutions of a group (systems.hpp) by residuals in twice the working precision, and bounds on their errors.
#pragma once

#include "systems_lu.hpp"

NEULA_BEGIN

// residual = b - A (x + rest), rounded once; `rest` is below the rounding errors of x. `low` is workspace.
template <typename Lanes>
void doubled_residual(const Group<Lanes> &g, const Vec *b, const Vec *x, const Vec *rest, Vec *residual, Vec *low)
{
    Index height = g.height;
    memcpy(residual, b, height * sizeof(Vec));
    clear(low, height);
    for (Index j = 0; j < g.n; j++) {
        const Vec *column = g.a + j * height;
        Vec factor = all(-get<Lanes>(x, j)), small = all(get<Lanes>(rest, j));
        for (Index v = 0; v < height; v++) {
            low[v] = minus_product(low[v], column[v], small);
            add_product(column[v], factor, residual[v], low[v]);
        }
    }
    for (Index v = 0; v < height; v++)
        residual[v] += low[v];
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

// Solutions for one right-hand side, refined. Numbers of systems that need no more updates stay as they are. An update
// converges where the residual that is `left` is at most `tolerable`; where one does not, no other follows.
template <typename Lanes> struct Refined {
    Lanes history[MOST_UPDATES + 1], updates, left, tolerable, noise, floor, residual, backward_error, forward_error, largest;
    Truth<Lanes> continues, sound;
};

// Add A^-1 (b - A x) to x + rest, and measure the residual that is left.
template <typename Lanes>
void update(Group<Lanes> &g, const Norms<Lanes> &norms, Lanes inverse_norm, Vec *x, const Vec *b, int step, Refined<Lanes> &to)
{
    const SystemLimits &limits = g.problem.limits;
    Index n = g.n, height = g.height;
    Vec *before = g.before, *after = g.after, *change = g.change, *rest = g.rest, *image = g.images;
    Truth<Lanes> where = to.continues;
    doubled_residual(g, b, x, rest, image, image + height);
    for (Index v = 0; v < height; v++)
        before[v] = chosen(where, image[v], before[v]);
    permute(g, before, change);
    substitute(g, change, 1);
    Lanes scale = norms.infinity_norm * largest_magnitude<Lanes>(x, height) + largest_magnitude<Lanes>(b, height);
    Lanes first = largest_magnitude<Lanes>(before, height) / scale;
    for (Index v = 0; v < height; v++) {
        change[v] = chosen(where, change[v], Vec{});
        Vec correction = rest[v] + change[v], sum = x[v] + correction, added = sum - x[v];
        rest[v] = (x[v] - (sum - added)) + (correction - added);
        x[v] = sum;
    }
    multiply(g, change, image, 1);
    for (Index v = 0; v < height; v++)
        after[v] = chosen(where, before[v] - image[v], after[v]);
    Lanes left = column_norm<Lanes>(after, height), norm_before = column_norm<Lanes>(before, height);
    // Doubled products (doubled.hpp), by the inequality of Cauchy and Schwarz; b is one more.
    double doubled = (n + 2) * UNIT * (n + 2) * UNIT;
    Lanes floor = doubled * (norms.norm * column_norm<Lanes>(x, height) + column_norm<Lanes>(b, height));
    // Rounding of the residual to one number, of A times the change, and of their difference.
    Lanes noise = floor + (n + 2) * UNIT * (norm_before + norms.norm * column_norm<Lanes>(change, height));
    Lanes tolerable = limits.max_rate * norm_before + noise;
    scale = norms.infinity_norm * largest_magnitude<Lanes>(x, height) + largest_magnitude<Lanes>(b, height);
    if (step == 0)
        to.history[0] = first;
    Lanes error = largest_magnitude<Lanes>(after, height) / scale;
    for (int later = step + 1; later <= MOST_UPDATES; later++)
        to.history[later] = chosen(where, error, to.history[later]);
    to.updates = chosen(where, constant<Lanes>(step + 1), to.updates);
    to.left = chosen(where, left, to.left);
    to.tolerable = chosen(where, tolerable, to.tolerable);
    to.noise = chosen(where, noise, to.noise);
    to.floor = chosen(where, floor, to.floor);
    Lanes bound = inverse_norm * (left + noise) / scaled_norm<Lanes>(g.column_norms, x, height);
    to.continues = to.continues & (left <= tolerable) & (bound > constant<Lanes>(limits.digits)) & (left > floor);
}

// lost = x - float(x), element by element.
inline void rounding_to_float(const Vec *x, Vec *lost, Index height)
{
    for (Index i = 0; i < height * WIDTH; i++) {
        double element = get<double>(x, i);
        set(lost, i, element - double(float(element)));
    }
}

// Refine a solution of the systems that are `solvable`, with bounds on the errors of x as it will be rounded.
template <typename Lanes>
Refined<Lanes> refine(
    Group<Lanes> &g, const Norms<Lanes> &norms, Lanes inverse_norm, Truth<Lanes> solvable, Vec *x, const Vec *b)
{
    const SystemLimits &limits = g.problem.limits;
    Index height = g.height;
    bool single = g.problem.single_result;
    Refined<Lanes> to = {};
    to.continues = to.sound = solvable & norms.in_safe_range;
    clear(g.before, height);
    clear(g.after, height);
    clear(g.rest, height);
    for (int step = 0; step < MOST_UPDATES && (step == 0 || any_of(to.continues)); step++)
        update(g, norms, inverse_norm, x, b, step, to);
    Vec *lost = g.rest + height, *images = g.images, *residual = g.after;
    clear(lost, height);
    if (single)
        rounding_to_float(x, lost, height);
    multiply(g, g.rest, images, single ? 2 : 1);
    Vec square = {}, most = {};
    for (Index v = 0; v < height; v++) {
        residual[v] += images[v];
        Vec rounded_residual = single ? residual[v] + images[height + v] : residual[v];
        square += rounded_residual * rounded_residual;
        most = larger(magnitude(residual[v]), most);
    }
    Lanes norm_b = column_norm<Lanes>(b, height), size = scaled_norm<Lanes>(g.column_norms, x, height);
    Lanes error = largest<Lanes>(most) / (norms.infinity_norm * largest_magnitude<Lanes>(x, height) +
                                          largest_magnitude<Lanes>(b, height));
    if (!all_of(norms.equilibrated))
        error = chosen(norms.equilibrated, error, componentwise_error(g, x, b, residual));
    Lanes bound = inverse_norm * (to.left + to.noise) / size;
    Lanes rest = scaled_norm<Lanes>(g.column_norms, g.rest, height) / size;
    Lanes rounding = scaled_norm<Lanes>(g.column_norms, lost, height) / size, sum = bound + rest;
    to.forward_error = chosen(sum < constant<Lanes>(1.0), limits.computed * (sum + rounding) / (1 - sum),
                              constant<Lanes>(INFINITY));
    to.backward_error = error + rounding + rest;
    to.history[MOST_UPDATES] = error;
    to.residual = square_root(total<Lanes>(square)) / norm_b;
    to.sound = to.sound & (to.left <= to.tolerable) &
               (norm_b >= constant<Lanes>(1 / limits.in_safe_range)) & (norm_b <= constant<Lanes>(limits.in_safe_range)) &
               ((bound <= constant<Lanes>(limits.digits)) | (to.left <= to.floor));
    return to;
}

NEULA_END
