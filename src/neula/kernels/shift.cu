// x 2^e: each number is read and written once, and exponents are broadcast.

#define THREADS 256

// A power of two by its bits, for exponents of normal numbers.
__device__ __forceinline__ double power_of_two(long long exponent) { return __longlong_as_double((exponent + 1023) << 52); }

// In the order in which the result lies in memory the last index runs fastest. Exponents have four or eight
// bytes.
extern "C" __global__ void shift(
    const double* x, const void* exponents, double* out, long long count, long long columns, long long depth,
    long long x_0, long long x_1, long long x_2, long long e_0, long long e_1, long long e_2, long long out_0,
    long long out_1, long long out_2, int bytes, int limit
) {
    const long long place = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
    if (place >= count) return;
    const long long k = place % depth, j = place / depth % columns, i = place / depth / columns;
    const long long at = i * e_0 + j * e_1 + k * e_2;
    long long exponent = bytes == 8 ? static_cast<const long long*>(exponents)[at] : static_cast<const int*>(exponents)[at];
    exponent = min(max(exponent, static_cast<long long>(-limit)), static_cast<long long>(limit));
    const long long half = exponent >> 1;
    out[i * out_0 + j * out_1 + k * out_2] = x[i * x_0 + j * x_1 + k * x_2] * power_of_two(half) * power_of_two(exponent - half);
}
