// The reduction to tridiagonal form on a CPU, one matrix after the other.

#include "arguments_on_host.h"

using std::fma, std::sqrt;

#undef __shared__
#define __shared__

alignas(16) float4 shared[1 << 16];

#include SOURCE

LAUNCHED(tridiagonal_panel)
