// The kernels of doubled products on a CPU.

#include "arguments_on_host.h"

using std::fma;

#include SOURCE

LAUNCHED(row_product)
LAUNCHED(column_product)
LAUNCHED(sum_of_pieces)
