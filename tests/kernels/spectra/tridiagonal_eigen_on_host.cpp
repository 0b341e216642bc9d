// Eigenvalues and eigenvectors of tridiagonal matrices on a CPU, one thread block after the other.

#include "arguments_on_host.h"

using std::fabs, std::fma, std::fmax, std::signbit, std::sqrt;

#include SOURCE

LAUNCHED(tridiagonal_values)
LAUNCHED(tridiagonal_vectors)
