"""GPU kernels in Triton and CUDA C++, in families, for operations that no library call does well.

A kernel knows tensors, and nothing of engines or algorithms. A file has the function that algorithms call,
in plain torch, which runs anywhere and defines the result, and beneath it the kernel in Triton, or the launch
of one in CUDA C++. :mod:`neula.kernels.dispatch` gives calls to the kernel where it runs, on a GPU that
Triton supports and for shapes that fit on the chip. Triton is imported when it has to compile: neula works
without.
"""

from neula.kernels.few_vectors.probes import probe_errors
from neula.kernels.qr.mgs import mgs, mgs_into, tallest_tile

__all__ = ["mgs", "mgs_into", "probe_errors", "tallest_tile"]
