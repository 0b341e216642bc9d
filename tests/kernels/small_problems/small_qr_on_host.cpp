// The kernel of small QR factorizations on a CPU.

#include "arguments_on_host.h"

#undef __shared__
#define __shared__
#define __noinline__ __attribute__((noinline))

using std::fabs;
using std::fma;
using std::sqrt;

#include SOURCE

double memory[BYTES / sizeof(double)];

LAUNCHED(small_qr)
