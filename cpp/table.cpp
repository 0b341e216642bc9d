// The kernels of one instruction set.
#include "doubled.hpp"

#define NEULA_NAME(x) #x
#define NEULA_NAME_OF(x) NEULA_NAME(x)

NEULA_BEGIN

Status bounded(const BoundedProblem &, BoundedSolution &);
Status kit_solve(const KitProblem &);
Status probe_errors(const QRProblem &);
Status cholesky_qr(const QRProblem &);
Status one_pass(const OnePassProblem &);
void block_fma(const BlockFmaProblem &);
Status seminormal(const SeminormalProblems &, const SeminormalSolutions &);
Status solve_systems(const SystemsProblem &, SystemsSolution &);
Index large_workspace(const LargeSystem &);
double copy_large(const LargeSystem &);
void solve_large(const LargeSystem &, double largest, bool definite, SystemsSolution &);
Status solve_large_in_blocks(const LargeSystem &, SystemsSolution &);

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

extern const Kernels kernels = {
    NEULA_NAME_OF(NEULA_LEVEL), arithmetic_is_exact, bounded, kit_solve, probe_errors, cholesky_qr, one_pass, block_fma,
    seminormal, solve_systems, large_workspace, copy_large, solve_large, solve_large_in_blocks,
};

NEULA_END
