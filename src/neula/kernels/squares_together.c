/* As many linear systems at a time as there are lanes in a vector: for tiny ones. */
#include "vectors.h"
#define LANES WIDTH
#include "squares.h"
