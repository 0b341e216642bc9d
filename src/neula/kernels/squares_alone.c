/* One linear system at a time. */
#define LANES 1
#include "squares.h"
