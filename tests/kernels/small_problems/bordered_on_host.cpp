// The kernel that borders matrices on a CPU.

#include "arguments_on_host.h"

#include SOURCE

LAUNCHED(bordered)
