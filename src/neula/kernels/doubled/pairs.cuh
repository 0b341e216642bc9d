// Numbers as sums of two that are not evaluated, the larger first: twice the precision of double.

struct Pair {
    double high, low;
};

// A sum and its rounding error (Knuth).
__device__ __forceinline__ Pair two_sum(double a, double b) {
    const double total = a + b, of_b = total - a;
    return {total, (a - (total - of_b)) + (b - of_b)};
}

__device__ __forceinline__ Pair operator+(Pair x, Pair y) {
    const Pair total = two_sum(x.high, y.high);
    return {total.high, total.low + (x.low + y.low)};
}

// A product with (x + x_low), added. It is rounded by itself: contracted to a multiply-add it would have another
// rounding error than what is added here.
__device__ __forceinline__ void add_product(Pair& sum, double a, double x, double x_low) {
    const double product = __dmul_rn(a, x);
    const Pair total = two_sum(sum.high, product);
    sum = {total.high, sum.low + (total.low + fma(a, x_low, fma(a, x, -product)))};
}
