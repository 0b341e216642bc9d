// The kernel that multiplies by powers of two on a CPU.

#include "arguments_on_host.h"

#include SOURCE

LAUNCHED(shift)
