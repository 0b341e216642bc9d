#define REAL float
#define WHOLE int
#define SINGLE 1
#define LARGEST_WHOLE 0x7fffffff
#define TAKE_BLOCKS take_blocks_of_floats
#include "lu_blocked.h"
