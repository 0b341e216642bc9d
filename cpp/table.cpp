// The kernels of one instruction set.
#include "doubled.hpp"

#define NEULA_NAME(x) #x
#define NEULA_NAME_OF(x) NEULA_NAME(x)

NEULA_BEGIN

#define KERNEL(result, name, ...) result name(__VA_ARGS__);
NEULA_KERNELS(KERNEL)
#undef KERNEL

// Whether sums and products have the errors that they have in IEEE arithmetic: no flag of a compiler, and no mode of the
// processor, has changed that. The numbers are not known when this is compiled.
static bool arithmetic_is_exact()
{
    volatile double one = 1.0, small = 0x1p-60, odd = 1.0 + 0x1p-30, tiny = 0x1p-1050;
    double sum, error, product, rest;
    two_sum(one, small, sum, error);
    two_product(odd, odd, product, rest);
    return sum == 1.0 && error == 0x1p-60 && product == 1.0 + 0x1p-29 && rest == 0x1p-60 && tiny * 0.5 > 0.0;
}

#define KERNEL(result, name, ...) name,
extern const Kernels kernels = {NEULA_NAME_OF(NEULA_LEVEL), arithmetic_is_exact, NEULA_KERNELS(KERNEL)};
#undef KERNEL

NEULA_END
