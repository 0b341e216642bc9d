"""GPU kernels in Triton, for what no library call does well.

A kernel knows tensors, and nothing of engines or algorithms. ``name.py`` has the function that algorithms
call, in plain torch, which runs anywhere and says what is computed; ``name_triton.py`` (or ``name_cuda.py``)
has the kernel. :mod:`neula.kernels.dispatch` gives calls to the kernel where it runs, on a GPU that Triton
supports and for shapes that fit on the chip. Triton is imported at the first call that has use for it: neula
works without.
"""

from neula.kernels.mgs import mgs, mgs_into, tallest_tile
from neula.kernels.probes import probe_errors

__all__ = [
    "mgs",
    "mgs_into",
    "probe_errors",
    "tallest_tile",
]
