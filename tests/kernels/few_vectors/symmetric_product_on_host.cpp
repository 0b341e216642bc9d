// The kernel of products with symmetric matrices on a CPU.

#include "arguments_on_host.h"

using std::fma;
using std::sqrt;

static double __ldcs(const double* place) { return *place; }

#include SOURCE

LAUNCHED(symmetric_product)
