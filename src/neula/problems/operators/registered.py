"""Register all operators on import: the module ``neula.ops``.

Apart from the package, whose modules the public functions import: threads that use neula for the first time
would wait for one another.
"""

from neula.problems.operators.bounded import LSQ_LINEAR
from neula.problems.operators.factorizations import CHOLESKY, ORTH, POLAR, QR
from neula.problems.operators.solutions import LSTSQ, SOLVE
from neula.problems.operators.spectra import EIGH, SVD
from neula.problems.products.matmul import MATMUL

__all__ = ["cholesky", "eigh", "lsq_linear", "lstsq", "matmul", "orth", "polar", "qr", "solve", "svd"]

cholesky, eigh, lsq_linear, lstsq, matmul, orth, polar, qr, solve, svd = (
    x.packet for x in (CHOLESKY, EIGH, LSQ_LINEAR, LSTSQ, MATMUL, ORTH, POLAR, QR, SOLVE, SVD)
)
