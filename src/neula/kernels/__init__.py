"""GPU kernels in Triton, for what no library call does well.

A kernel knows tensors, and nothing of engines or algorithms. ``name.py`` has the function that algorithms
call and a reference in plain torch, which runs anywhere and says what is computed; ``name_triton.py`` has
the kernel. The function takes the kernel where it can run, on a GPU that Triton supports and for shapes that
fit on the chip, and the reference elsewhere. Triton is imported at the first call that has use for it: neula
works without.
"""

from neula.kernels.mgs import mgs, mgs_into, mgs_reference, tallest_tile
from neula.kernels.probes import probe_errors, probe_errors_reference

__all__ = [
    "mgs",
    "mgs_into",
    "mgs_reference",
    "probe_errors",
    "probe_errors_reference",
    "tallest_tile",
]
