// The kernels of steps of refinement on a CPU.

#include "arguments_on_host.h"

#include SOURCE

LAUNCHED(added)
LAUNCHED(progress)
LAUNCHED(uncertainty)
LAUNCHED(relative_error)
