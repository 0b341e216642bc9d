#define REAL double
#define WHOLE long long
#define SINGLE 0
#define LARGEST_WHOLE 0x7fffffffffffffffLL
#define TAKE_BLOCKS take_blocks_of_doubles
#include "lu_blocked.h"
