// Steps of refinement: elementwise, one launch for all operations on an element. A product that is added to something
// is rounded by itself, as in the definitions.

#include "pairs.cuh"

#define THREADS 256
#define INFINITE __longlong_as_double(0x7ff0000000000000)

__device__ __forceinline__ long long place_of() { return blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x; }

// 0 where both vanish.
__device__ __forceinline__ double quotient(double a, double b) { return a == 0.0 ? 0.0 : a / b; }

extern "C" __global__ void added(
    const unsigned char* active, const double* high, const double* low, const double* update, double* to_high,
    double* to_low, double* to_update, long long each, long long k, long long count
) {
    const long long place = place_of();
    if (place >= count) return;
    const double x = active[place / each * k + place % k] ? update[place] : 0.0;
    const Pair sum = two_sum(high[place], x + low[place]);
    to_high[place] = sum.high, to_low[place] = sum.low, to_update[place] = x;
}

extern "C" __global__ void progress(
    const unsigned char* active, const double* left, const double* before, const double* floor, const double* size,
    double* to_left, unsigned char* to_active, double tolerance, double stagnation, double least, long long count
) {
    const long long place = place_of();
    if (place >= count) return;
    const double old = before[place], now = active[place] ? left[place] : old;
    to_left[place] = now;
    to_active[place] = active[place] && now > tolerance * size[place] && now < stagnation * old && now > least * floor[place];
}

extern "C" __global__ void uncertainty(
    const double* projected, const double* size, const double* b, const double* residual, const double* rate,
    const double* norm, const double* inverse_norm, double* to_left, double* to_floor, double noise, long long k,
    long long count
) {
    const long long place = place_of(), member = place / k;
    if (place >= count) return;
    const double of_b = norm[member], of_inverse = inverse_norm[member];
    const double of_x = __dmul_rn(of_b, size[place]) + b[place];
    const double lost = noise * (of_x + __dmul_rn(__dmul_rn(of_b, of_inverse), residual[place]));
    const double wrong = __dmul_rn(rate[member] / (1.0 - rate[member]), projected[place]) + lost;
    to_left[place] = of_inverse * wrong, to_floor[place] = of_inverse * lost;
}

extern "C" __global__ void relative_error(
    const double* left, const double* size, const double* low, const double* rate, double* to_error, double max_rate,
    double computed, long long k, long long count
) {
    const long long place = place_of();
    if (place >= count) return;
    double error = quotient(left[place], size[place]) + quotient(low[place], size[place]);
    error = __dmul_rn(computed, error) / (1.0 - error);
    to_error[place] = rate[place / k] <= max_rate && error >= 0.0 && error < INFINITE ? error : INFINITE;
}
