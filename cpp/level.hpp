// Included first by every kernel. A kernel is compiled once for each instruction set, and all that it defines lies in a
// namespace of that name: the linker must not take a function of one for that of another. So kernels use no templates of
// the standard library, whose instances would be shared.
#pragma once

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.hpp"

#ifndef NEULA_LEVEL
#error "NEULA_LEVEL names the instruction set"
#endif

#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__) || (defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ != 0)
#error "operations are not rounded one by one to the precision of their operands"
#endif

#define NEULA_BEGIN namespace neula { namespace NEULA_LEVEL {
#define NEULA_END } }

// Loops that are specialized where their arguments are constants.
#define ALWAYS_INLINE inline __attribute__((always_inline))

NEULA_BEGIN

// Call work(float()) or work(double()): its parameter has the type of the elements.
template <typename Work> inline void with_type(bool single, const Work &work)
{
    if (single)
        work(float());
    else
        work(double());
}

NEULA_END
