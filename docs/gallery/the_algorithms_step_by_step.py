r"""The algorithms, step by step
============================

Five algorithms of the papers on matrices of twelve columns, small enough to see every step. The building blocks take
``trace=``, which is called with each panel, product and block of R; ``Trace`` records them. On the command line,
``neula qr``, ``lu``, ``lstsq``, ``tsqr`` and ``matmul`` show the same with ``--trace``.
"""

# %%
from functools import partial

import torch

from neula.algorithms.corrected import corrected_bmm, corrected_product, split
from neula.algorithms.elimination.lu import lu_factorize
from neula.algorithms.orthogonal.caqr import caqr
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.algorithms.orthogonal.tsqr import tsqr
from neula.algorithms.trace import Trace
from neula.engines import FP16, CpuEngine, EmulatedEngine
from neula.io.matrices import hpl_ai_matrix, random_matrix

torch.set_printoptions(precision=4, linewidth=110)
half = EmulatedEngine(format="fp16")
single = CpuEngine("cpu", "fp32")

# %%
# Algorithm 1: recursive Gram-Schmidt QR
# --------------------------------------
#
# S. Zhang, E. Baharlouei, P. Wu, `HPDC 2020 <https://doi.org/10.1145/3369583.3392685>`__. The columns are halved until three are left,
# which are a panel. After the left half is done, the right half loses its part in the range of :math:`Q_1`:
# :math:`R_{12} = Q_1^T A_2` and :math:`A_2 - Q_1 R_{12}`. These two products are rounded to half precision; panels are not.

A = random_matrix("normal", 48, 12, dtype=torch.float32)
trace = Trace()
Q, R = rgsqrf(A, half, cutoff=3, panel="caqr", trace=trace)
print(trace.picture())

# %%
# Most of the operations are in the largest update, half of the matrix:

products = [event for event in trace.only("product") if event.format == "fp16"]
for event in products:
    m, k, n = event.shape
    print(f"{m} x {k} times {k} x {n}: {2 * m * k * n} operations")
in_products = sum(
    2 * m * k * n for m, k, n in (event.shape for event in products)
)
assert in_products == 2 * 48 * 12**2 - 2 * 48 * 12 * 3

# %%
# R grows block by block. The trace has a copy of each one, and together they are R:

built = torch.zeros_like(R)
for event in trace.only("block of R"):
    built[slice(*event.columns), slice(*event.right)] = event.value
    print(
        f"rows {event.columns}, columns {event.right}: {int((built != 0).sum())} numbers so far"
    )
assert torch.equal(built, R)

# %%
# Half precision in the products gives a residual of half precision:

residual = float((Q @ R - A).norm() / A.norm())
print(f"residual {residual:.1e}, unit roundoff of fp16 {FP16.u:.1e}")
assert residual < FP16.u

# %%
# Formula (8): the tree of a panel
# --------------------------------
#
# A panel of 64 rows and 4 columns is cut into tiles of 8 rows, each factorized by Gram-Schmidt. The eight factors R are stacked
# to a matrix of 32 rows, which is cut into tiles again, until one is left. Then the factors Q are multiplied from the top down.

panel = random_matrix("normal", 64, 4, dtype=torch.float32)
tree = Trace()
q, r = caqr(panel, single, tile_rows=8, tile_columns=4, trace=tree)
for event in tree:
    count, *shape = event.shape
    print(f"{event.kind}: {count} of {' x '.join(map(str, shape))}")
assert torch.allclose(q @ r, panel, atol=1e-5)
assert torch.allclose(q.T @ q, torch.eye(4), atol=1e-5)

# %%
# Algorithm 5.2: LU with two levels of panels
# -------------------------------------------
#
# F. Lopez, T. Mary, 2022 (`HAL <https://hal.science/hal-02937325>`__). The matrix is stored in half precision. A panel of six columns is
# copied to a buffer in single precision, updated there by all columns on its left, and factorized by inner panels of two
# columns. It is rounded once, when it is done.

S = hpl_ai_matrix(12, dtype=torch.float32)
steps = Trace()
packed = lu_factorize(
    S, half, variant="5.2/5.1", panel=6, inner_panel=2, trace=steps
)
for event in steps:
    what = (
        f"columns {event.columns}"
        if event.columns
        else " x ".join(map(str, event.shape))
    )
    print(f"{event.kind:8} {what} {event.format}")

# %%
# Algorithm 3.1 updates every block after every panel instead, and rounds it each time. Here the error is that of one rounding:

L = packed.lu.float().tril(-1) + torch.eye(12)
U = packed.lu.float().triu()
error = float((L @ U - S).abs().max() / S.abs().max())
print(f"error {error:.1e}, unit roundoff of fp16 {FP16.u:.1e}")
assert error < 2 * FP16.u

# %%
# The corrected product
# ---------------------
#
# H. Ootomo, R. Yokota, 2021 (`their code <https://github.com/enp1s0/tsqr-tc>`__). A number in single precision is the sum of two halves. The
# second one is what the first one leaves, times :math:`2^{11}`, so that it does not vanish:

first, second = split(A[:2, :3], FP16)
print(A[:2, :3])
print(first)
print(second)
left = (A[:2, :3] - first - second / 2**11).abs().max()
print(f"left over: {float(left):.1e}")
assert left < 2.0**-21 * A.abs().max()

# %%
# Three products of halves then give almost a product in single precision:

B = random_matrix("normal", 12, 12, dtype=torch.float32, seed=2)
exact = A.double() @ B.double()
errors = {}
for name, product in {
    "fp16": half.gemm(half.operand(A), half.operand(B)),
    "corrected": corrected_product(A, B, half),
    "float32": A @ B,
}.items():
    errors[name] = float((product.double() - exact).norm() / exact.norm())
    print(f"{name}: {errors[name]:.1e}")
assert errors["corrected"] < errors["fp16"] / 500

# %%
# The trace shows the two parts of each operand and the three products. The last two are the corrections:

trace = Trace()
corrected_product(A, B, half, trace=trace)
for event in trace:
    shape = " x ".join(map(str, event.shape))
    scale = f", remainder times {event.value:.0f}" if event.value else ""
    print(f"{event.kind}: {shape} in {event.format}{scale}")
assert [event.kind for event in trace] == ["split"] * 2 + ["product"] * 3

# %%
# TSQR: the tree of Householder factorizations
# --------------------------------------------
#
# The slides factorize tiles of 256 rows; their factors R are stacked and factorized again, until one is left. Here tiles have
# 24 rows, so that a matrix of 96 rows takes three levels.

tall = random_matrix("uniform", 96, 12, dtype=torch.float32)
levels = Trace()
product = partial(corrected_bmm, engine=half)
q, r = tsqr(tall[None], product, tile_rows=24, trace=levels)
for event in levels:
    shape = " x ".join(map(str, event.shape))
    print(
        f"{event.kind}: {shape} {event.value if event.kind == 'panel' else ''}"
    )
assert torch.equal(levels.only("block of R")[-1].value[0].abs(), r[0].abs())
residual = float((q[0] @ r[0] - tall).norm() / tall.norm())
print(f"residual {residual:.1e}, unit roundoff of fp16 {FP16.u:.1e}")
assert residual < FP16.u / 500
